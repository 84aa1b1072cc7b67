"""Workers divided into transfer groups: what happens in one of them stays in it."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

import genapi
from genapi import Outcome, PublishReport, WeightPublisher
from genapi.embedded import Cluster, Fault
from genapi.types.config import PublishTimeouts
from genapi.types.worker import FenceStrength, Recovery
from genapi.weights import TensorMeta, WeightSource
from tests.contract.embedded import QUICK, greedy, request, weights
from tests.support.recorded import Recorded, RecordedCalls, RecordedSender

pytestmark = pytest.mark.anyio

FATAL = ["die_before", "die_during", "die_after"]


@dataclass
class Stand:
    """What a test holds: the fleet, its publisher, and what was sent to whom."""

    fleet: genapi.Fleet
    cluster: Cluster
    calls: RecordedCalls
    transport: Recorded
    publisher: WeightPublisher

    def fail(self, worker: int, path: str, action: Any, **details: Any) -> None:
        """Let the next call to `path` on that worker go wrong."""
        self.cluster.workers[worker].faults.add(Fault(path, action, **details))

    @property
    def joins(self) -> dict[str, list[tuple[int, int, int]]]:
        """Of each worker the groups it was asked to join: port, its rank, and how many ranks."""
        return {
            url: [(i["master_port"], i["rank_offset"], i["world_size"]) for i in infos]
            for url, bodies in self.calls.bodies("/init_weight_transfer_engine").items()
            for infos in [[body["init_info"] for body in bodies]]
        }

    async def failed(self, step: int) -> PublishReport:
        with anyio.fail_after(10), pytest.raises(genapi.PublishError) as caught:
            await self.publisher.publish(step, source(step))
        report = caught.value.report
        assert isinstance(report, PublishReport)
        return report


@asynccontextmanager
async def stand(
    workers: int,
    at_most: int | None,
    *,
    timeouts: PublishTimeouts = QUICK,
    stage_bytes: int = 1 << 20,
    **options: Any,
) -> AsyncIterator[Stand]:
    cluster = Cluster.from_query({"workers": str(workers)})
    calls = RecordedCalls(cluster)
    transport = Recorded(bucket_tensors=1, stage_bytes=stage_bytes)
    async with genapi.connect("embedded://", transport=calls, run="r") as fleet:
        await fleet.wait_ready(timeout_s=5)
        publisher = WeightPublisher(
            fleet,
            transport=transport,
            timeouts=timeouts,
            max_workers_per_group=at_most,
            **options,
        )
        async with publisher:
            await publisher.adopt(0)
            yield Stand(fleet, cluster, calls, transport, publisher)


def source(seed: int) -> WeightSource:
    return genapi.weights.from_tensors(weights(seed))


def outcomes(report: PublishReport) -> list[Outcome]:
    return [receipt.outcome for receipt in report.receipts]


class Once:
    """A source that counts what is gathered from it."""

    def __init__(self) -> None:
        self.gathered: list[str] = []

    def manifest(self) -> tuple[TensorMeta, ...]:
        return tuple(source(1).manifest())

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for name, tensor in source(1):
            self.gathered.append(name)
            yield name, tensor


async def test_each_group_has_its_own_rendezvous_and_ranks_and_gets_every_bucket() -> None:
    async with stand(5, 2) as s:
        once = Once()
        report = await s.publisher.publish(1, once)
        assert outcomes(report) == [Outcome.COMMITTED] * 5
        assert s.joins == {
            "memory://0": [(1, 1, 3)],
            "memory://1": [(1, 2, 3)],
            "memory://2": [(2, 1, 3)],
            "memory://3": [(2, 2, 3)],
            "memory://4": [(3, 1, 2)],
        }
        tensors = list(weights(1))
        assert once.gathered == tensors
        for sender in s.transport.senders:
            assert sender.events == ["join", *["send"] * len(tensors)]
        for session in "abcdefgh":
            reply = await s.fleet.generate(request(session=session))
            assert reply.output.token_ids == greedy(1, [1, 2, 3], 8)


async def test_groups_are_joined_and_sent_to_side_by_side() -> None:
    async with stand(2, 1) as s:
        met, arrived = anyio.Event(), set[int]()

        async def meet(sender: RecordedSender) -> None:
            arrived.add(sender.number)
            if len(arrived) == 2:
                met.set()
            await met.wait()

        s.transport.on_send = meet
        assert (await s.publisher.publish(1, source(1))).committed


@pytest.mark.parametrize("action", ["peer_lost", "error", "never_answer", *FATAL])
@pytest.mark.parametrize("bucket", [1, 2])
async def test_what_befalls_a_worker_in_mid_transfer_leaves_the_other_groups_finish(
    action: str, bucket: int
) -> None:
    async with stand(4, 2) as s:
        s.fail(1, "/update_weights", action, nth=bucket)
        report = await s.failed(1)
        hit, beside, *others = report.receipts
        for receipt in (hit, beside):
            assert receipt.outcome in (Outcome.DIRTY, Outcome.UNKNOWN)
            assert receipt.fence is not None
        for receipt, worker in zip(others, s.cluster.workers[2:], strict=True):
            assert receipt.outcome is Outcome.COMMITTED
            assert receipt.recovery is Recovery.REPUBLISH
            assert receipt.fence is not None
            assert receipt.fence.strength is FenceStrength.PAUSED
            assert worker.engine.label == report.version.label
            assert worker.engine.pause_state.name != "NONE"
        assert [w.engine.label == report.version.label for w in s.cluster.workers[:2]] == [
            False
        ] * 2
        broken, whole = s.transport.senders
        assert "abandon" in broken.events
        assert broken.events[-1] == "aclose"
        assert "abandon" not in whole.events


@pytest.mark.parametrize("path", ["/update_weights", "/start_weight_update"])
async def test_with_serve_the_groups_that_are_whole_serve_and_the_other_is_fenced(
    path: str,
) -> None:
    async with stand(4, 2, on_partial="serve", min_workers=2) as s:
        s.fail(1, path, "error")
        report = await s.publisher.publish(1, source(1))
        assert report.committed
        assert outcomes(report)[2:] == [Outcome.COMMITTED] * 2
        assert [r.fence is None for r in report.receipts] == [False, False, True, True]
        serving = {r.worker for r in report.receipts[2:]}
        for session in "abcdefgh":
            reply = await s.fleet.generate(request(session=session))
            assert reply.worker in serving
            assert reply.output.token_ids == greedy(1, [1, 2, 3], 8)


async def test_with_one_group_the_same_failure_reaches_everybody() -> None:
    async with stand(4, None) as s:
        s.fail(1, "/update_weights", "peer_lost")
        report = await s.failed(1)
        assert outcomes(report) == [Outcome.DIRTY] * 4


async def test_only_the_group_that_broke_is_joined_anew() -> None:
    async with stand(4, 2) as s:
        s.fail(1, "/update_weights", "peer_lost")
        await s.failed(1)
        again = await s.publisher.publish(1, source(1))
        assert outcomes(again) == [Outcome.COMMITTED] * 4
        assert s.joins == {
            "memory://0": [(1, 1, 3), (3, 1, 3)],
            "memory://1": [(1, 2, 3), (3, 2, 3)],
            "memory://2": [(2, 1, 3)],
            "memory://3": [(2, 2, 3)],
        }


async def test_only_the_group_of_a_process_that_was_replaced_is_joined_anew() -> None:
    async with stand(4, 2) as s:
        await s.publisher.publish(1, source(1))
        s.cluster.workers[3].restart()
        await s.fleet.snapshot()
        report = await s.publisher.publish(2, source(2))
        assert outcomes(report) == [Outcome.COMMITTED] * 4
        assert [len(s.joins[f"memory://{i}"]) for i in range(4)] == [1, 1, 2, 2]
        assert "aclose" in s.transport.senders[1].events


async def test_a_group_that_cannot_be_joined_leaves_everybody_untouched() -> None:
    async with stand(4, 2) as s:
        s.fail(1, "/init_weight_transfer_engine", "error")
        report = await s.failed(1)
        assert outcomes(report) == [Outcome.UNTOUCHED] * 4
        assert [r.fence for r in report.receipts] == [None] * 4
        assert (await s.publisher.publish(1, source(1))).committed
        assert [len(s.joins[f"memory://{i}"]) for i in range(4)] == [2, 2, 1, 1]


async def test_a_sender_that_fails_for_one_group_fails_that_group_alone() -> None:
    async with stand(2, 1) as s:

        async def fail(sender: RecordedSender) -> None:
            if sender.number == 1:
                raise genapi.TransportError("the line is down", phase="may_have_run")

        s.transport.on_send = fail
        report = await s.failed(1)
        assert "the line is down" in (report.error or "")
        assert outcomes(report) == [Outcome.DIRTY, Outcome.COMMITTED]


async def test_a_source_that_fails_fails_every_group() -> None:
    class Broken(Once):
        def __iter__(self) -> Iterator[tuple[str, Any]]:
            yield next(super().__iter__())
            raise RuntimeError("the shard is gone")

    async with stand(2, 1, stage_bytes=0) as s:
        with anyio.fail_after(10), pytest.raises(genapi.PublishError) as caught:
            await s.publisher.publish(1, Broken())
        for receipt in caught.value.report.receipts:
            assert receipt.outcome is not Outcome.COMMITTED
            assert receipt.recovery is Recovery.CLOSE_THEN_REPUBLISH


PATIENT = QUICK.model_copy(update={"group_s": 60.0, "transfer_s": 60.0, "cleanup_s": 0.2})
"""What no test waits for, but for what comes after a failure."""


async def test_a_worker_that_stays_silent_after_its_group_broke_is_named_and_not_waited_for() -> (
    None
):
    async with stand(3, None, timeouts=PATIENT) as s:
        s.fail(0, "/update_weights", "peer_lost")
        s.fail(2, "/update_weights", "never_answer")
        report = await s.failed(1)
        hit, told, silent = report.receipts
        # The first one's answer says that somebody else went away.
        assert (report.error or "").startswith(f"update on {silent.worker}: lost")
        for receipt in (hit, told):
            assert str(receipt.worker) not in (report.error or "")
        assert "0.2 s after its group broke" in (silent.error or "")


async def test_a_worker_that_holds_up_the_sender_is_named_and_not_those_that_answer() -> None:
    async with stand(3, None, timeouts=PATIENT) as s:

        async def give_up(_: RecordedSender) -> None:
            await anyio.wait_all_tasks_blocked()
            raise genapi.TransportError("not all took it in time", phase="may_have_run")

        s.transport.on_send = give_up
        s.fail(1, "/update_weights", "never_answer")
        report = await s.failed(1)
        assert "not all took it in time" in (report.error or "")
        named = [str(r.worker) in (report.error or "") for r in report.receipts]
        assert named == [False, True, False]


async def test_a_worker_that_does_not_join_is_named_when_the_trainers_end_gives_up() -> None:
    async with stand(3, 2, timeouts=PATIENT) as s:

        async def give_up() -> None:
            first = len(s.transport.senders) == 1
            await anyio.wait_all_tasks_blocked()
            if first:
                raise genapi.TransportError("not all joined", phase="may_have_run")

        s.transport.on_join = give_up
        s.fail(1, "/init_weight_transfer_engine", "never_answer")
        report = await s.failed(1)
        assert "not all joined" in (report.error or "")
        named = [str(r.worker) in (report.error or "") for r in report.receipts]
        assert named == [False, True, False]
        assert outcomes(report) == [Outcome.UNTOUCHED] * 3
        assert (await s.publisher.publish(1, source(1))).committed


async def test_a_silent_worker_of_one_group_holds_up_the_others_no_longer_than_its_own() -> None:
    async with stand(2, 1, timeouts=PATIENT, on_partial="serve", min_workers=1) as s:

        async def give_up(sender: RecordedSender) -> None:
            if sender.number == 1:
                await anyio.wait_all_tasks_blocked()
                raise genapi.TransportError("it did not take it in time", phase="may_have_run")

        s.transport.on_send = give_up
        s.fail(0, "/update_weights", "never_answer")
        with anyio.fail_after(10):
            report = await s.publisher.publish(1, source(1))
        assert outcomes(report) == [Outcome.UNKNOWN, Outcome.COMMITTED]
        assert report.receipts[1].fence is None


async def test_a_group_that_is_given_up_before_it_is_offered_is_offered_to_nobody() -> None:
    async with stand(2, 1) as s:
        scope = anyio.CancelScope()

        async def cancel() -> None:
            scope.cancel()
            await anyio.wait_all_tasks_blocked()

        s.transport.on_sender = cancel
        with anyio.fail_after(10), scope:
            await s.publisher.publish(1, source(1))
        report = s.publisher.last_report
        assert report is not None
        assert outcomes(report) == [Outcome.UNTOUCHED] * 2
        assert s.joins == {}
        assert [sender.events for sender in s.transport.senders] == [["abandon", "aclose"]] * 2


async def test_a_cancellation_in_mid_transfer_leaves_no_group_half_way() -> None:
    async with stand(2, 1) as s:
        scope = anyio.CancelScope()

        async def cancel(sender: RecordedSender) -> None:
            if sender.number == 2:
                scope.cancel()

        s.transport.on_send = cancel
        with anyio.fail_after(10), scope:
            await s.publisher.publish(1, source(1))
        report = s.publisher.last_report
        assert report is not None
        assert outcomes(report) == [Outcome.DIRTY] * 2
        assert (await s.publisher.publish(1, source(1))).committed


async def test_a_group_of_less_than_one_worker_is_refused() -> None:
    async with genapi.connect("embedded://") as fleet:
        with pytest.raises(genapi.ConfigError, match="max_workers_per_group=0"):
            WeightPublisher(fleet, transport=genapi.weights.Memory(), max_workers_per_group=0)
