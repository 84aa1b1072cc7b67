"""How a publication is driven: what is asked again, how long is waited, what is given up."""

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self

import anyio
import msgspec
import pytest

import genapi
from genapi import PolicyVersion, PublishReport, WeightPublisher
from genapi.embedded import Call, Cluster, Fault
from genapi.events import AdminCalled, Event, PhaseStarted
from genapi.providers.vllm.admin import VLLMAdmin
from genapi.providers.vllm.provider import VLLM
from genapi.types.config import PublishTimeouts
from genapi.types.worker import Evidence, Outcome, Recovery
from genapi.weights import TensorMeta, WeightSource
from genapi.weights.base import Bucket
from tests.contract.embedded import QUICK, greedy, request, weights
from tests.support.leftovers import Leftovers
from tests.support.recorded import Recorded, RecordedCalls, RecordedSender, at_once
from tests.support.weight_sources import PATIENCE_S, Blocked

pytestmark = pytest.mark.anyio

SLOW = PublishTimeouts(
    **dict.fromkeys(
        (
            "preflight_s",
            "stage_s",
            "group_s",
            "pause_s",
            "confirm_s",
            "begin_s",
            "transfer_s",
            "finish_s",
            "label_s",
            "verify_s",
            "resume_s",
        ),
        60.0,
    ),
    cleanup_s=0.2,
)
"""Bounds that no test waits for, but the one of what happens after a cancellation."""


@dataclass
class Stand:
    """What a test holds: the fleet, its publisher and transport, the engines, what happened."""

    fleet: genapi.Fleet
    cluster: Cluster
    calls: RecordedCalls
    transport: Recorded
    publisher: WeightPublisher
    events: list[Event]

    def fail(self, worker: int, path: str, action: Any, **details: Any) -> None:
        """Let the next call to `path` on that worker go wrong."""
        self.cluster.workers[worker].faults.add(Fault(path, action, **details))

    def at(self, phase: str, what: Callable[[], object]) -> None:
        """Do something when a publication enters a phase."""

        def observe(event: Event) -> None:
            self.events.append(event)
            if isinstance(event, PhaseStarted) and event.phase == phase:
                what()

        self.fleet.observe = observe

    def asked(self, operation: str) -> list[str]:
        """Which workers were asked an operation, in the order of the answers."""
        admin = [e for e in self.events if isinstance(e, AdminCalled)]
        return [e.worker for e in admin if e.operation == operation]


@asynccontextmanager
async def stand(
    workers: int = 2,
    *,
    timeouts: PublishTimeouts = QUICK,
    transport: Recorded | None = None,
    prepare: Callable[[genapi.Fleet], None] = lambda _: None,
) -> AsyncIterator[Stand]:
    cluster = Cluster.from_query({"workers": str(workers)})
    calls, events = RecordedCalls(cluster), list[Event]()
    fleet = genapi.connect("embedded://", transport=calls, run="r", observe=events.append)
    prepare(fleet)
    async with fleet:
        await fleet.wait_ready(timeout_s=5)
        carried = transport or Recorded()
        async with WeightPublisher(fleet, transport=carried, timeouts=timeouts) as publisher:
            await publisher.adopt(0)
            events.clear()
            yield Stand(fleet, cluster, calls, carried, publisher, events)


def source(seed: int) -> WeightSource:
    return genapi.weights.from_tensors(weights(seed))


async def failed(s: Stand, step: int, weights_: WeightSource | None = None) -> PublishReport:
    with anyio.fail_after(10), pytest.raises(genapi.PublishError) as caught:
        await s.publisher.publish(step, weights_ or source(1))
    report = caught.value.report
    assert isinstance(report, PublishReport)
    return report


# what is asked again


@pytest.mark.parametrize(
    ("phase", "path", "operation"),
    [
        ("pause", "/pause", "pause"),
        ("confirm", "/is_paused", "confirm"),
        ("verify", "/weight_info", "read"),
        ("resume", "/resume", "resume"),
        ("probe", "/health", "inspect"),
    ],
)
async def test_what_may_be_repeated_is_asked_again_when_its_reply_is_lost(
    phase: str, path: str, operation: str
) -> None:
    async with stand() as s:

        def lose() -> None:
            s.events.clear()
            s.fail(1, path, "lose_reply")

        s.at(phase, lose)
        report = await s.publisher.publish(1, source(1))
        assert report.committed
        assert s.asked(operation).count("memory://1") == 2
        assert s.asked(operation).count("memory://0") == 1


@pytest.mark.parametrize(
    ("path", "operation"),
    [
        ("/init_weight_transfer_engine", "join"),
        ("/update_weight_version", "mark"),
        ("/start_weight_update", "begin"),
        ("/finish_weight_update", "finish"),
    ],
)
async def test_what_may_not_be_repeated_is_asked_once(path: str, operation: str) -> None:
    async with stand() as s:
        s.fail(1, path, "lose_reply")
        with anyio.fail_after(10), suppress(genapi.PublishError):
            await s.publisher.publish(1, source(1))
        assert s.asked(operation).count("memory://1") == 1


async def test_what_was_answered_with_an_error_is_not_asked_again() -> None:
    async with stand() as s:
        s.fail(1, "/pause", "error")
        report = await failed(s, 1)
        assert s.asked("pause").count("memory://1") == 1
        assert report.receipts[1].error is not None
        assert "injected" in report.receipts[1].error


@pytest.mark.parametrize("status", [404, 405])
@pytest.mark.parametrize(
    ("path", "operation", "outcome"),
    [
        ("/init_weight_transfer_engine", "join", Outcome.UNTOUCHED),
        ("/pause", "pause", Outcome.UNTOUCHED),
        ("/update_weight_version", "mark", Outcome.UNTOUCHED),
        ("/start_weight_update", "begin", Outcome.UNKNOWN),
        ("/update_weights", "update", Outcome.DIRTY),
        ("/finish_weight_update", "finish", Outcome.DIRTY),
        ("/resume", "resume", Outcome.COMMITTED),
    ],
)
async def test_a_route_that_is_not_there_is_a_refusal_and_never_skipped(
    path: str, operation: str, outcome: Outcome, status: int
) -> None:
    async with stand() as s:
        s.fail(1, path, "error", status=status, body='{"detail":"Not here"}')
        report = await failed(s, 1)
        assert s.asked(operation).count("memory://1") == 1
        assert report.receipts[1].outcome is outcome
        assert "Not here" in (report.receipts[1].error or "")


# preflight


@pytest.mark.case("WUP-07")
async def test_one_odd_read_of_who_answers_is_read_again_and_changes_nothing() -> None:
    async with stand() as s:
        reply = await s.cluster.handle(1, Call("GET", "/server_info", {"config_format": "json"}))
        assert isinstance(reply.body, bytes)
        facts = msgspec.json.decode(reply.body)
        facts["vllm_config"]["instance_id"] = "somebody else"
        odd = msgspec.json.encode(facts).decode()
        s.fail(1, "/server_info", "error", status=200, body=odd)
        report = await s.publisher.publish(1, source(1))
        assert report.committed


# the pause


@pytest.mark.parametrize("details", [{}, {"status": 200, "body": '{"is_paused":false}'}])
async def test_a_worker_whose_pause_was_not_confirmed_gets_no_traffic_until_it_is_verified(
    details: dict[str, Any],
) -> None:
    async with stand() as s:
        s.at("confirm", lambda: s.fail(1, "/is_paused", "error", **details))
        report = await failed(s, 1)
        sure, unsure = report.receipts
        assert [r.outcome for r in report.receipts] == [Outcome.UNTOUCHED] * 2
        assert (sure.fence, sure.recovery) == (None, None)
        assert unsure.fence is not None
        assert unsure.recovery is Recovery.REPUBLISH
        await s.fleet.snapshot()
        for session in "abcd":
            reply = await s.fleet.generate(request(session=session))
            assert reply.worker == sure.worker
        s.at("confirm", lambda: None)
        again = await s.publisher.publish(1, source(1))
        assert [r.fence for r in again.receipts] == [None, None]


# the group


async def test_a_group_that_a_failed_transfer_went_through_is_left_and_joined_anew() -> None:
    async with stand() as s:
        s.fail(1, "/update_weights", "peer_lost")
        await failed(s, 1)
        (first,) = s.transport.senders
        assert first.events[-2:] == ["abandon", "aclose"]
        assert (await s.publisher.publish(1, source(1))).committed
        assert len(s.transport.senders) == 2
        assert s.asked("join") == ["memory://0", "memory://1"] * 2


async def test_a_group_that_a_failure_did_not_reach_stands() -> None:
    async with stand() as s:
        s.fail(1, "/pause", "error")
        await failed(s, 1)
        assert (await s.publisher.publish(1, source(1))).committed
        assert len(s.transport.senders) == 1
        assert len(s.asked("join")) == 2


async def test_workers_learn_at_once_that_there_is_no_group_to_join() -> None:
    async with stand(timeouts=SLOW) as s:

        async def refuse() -> None:
            raise genapi.ConfigError("no such address here")

        s.transport.on_sender = refuse
        report = await failed(s, 1)
        assert "no such address here" in (report.error or "")
        assert [r.outcome for r in report.receipts] == [Outcome.UNTOUCHED] * 2
        assert not s.asked("join")


async def test_a_group_that_cannot_be_joined_is_abandoned_at_once_and_left() -> None:
    async with stand(timeouts=SLOW) as s:

        async def hang() -> None:
            await s.transport.senders[-1].abandoned.wait()
            raise genapi.TransportError("abandoned", phase="may_have_run")

        s.transport.on_join = hang
        s.fail(1, "/init_weight_transfer_engine", "error")
        report = await failed(s, 1)
        assert "injected" in (report.error or "")
        assert s.transport.senders[0].events == ["join", "abandon", "aclose"]
        s.transport.on_join = at_once
        assert (await s.publisher.publish(1, source(1))).committed


# giving up


class Broken:
    """A source that fails in the middle."""

    def manifest(self) -> tuple[TensorMeta, ...]:
        return tuple(source(1).manifest())

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for number, pair in enumerate(weights(1).items()):
            if number == 2:
                raise RuntimeError("the shard is gone")
            yield pair


async def test_workers_learn_at_once_that_nothing_more_will_be_sent() -> None:
    unstaged = Recorded(bucket_tensors=1, stage_bytes=0)
    async with stand(timeouts=SLOW, transport=unstaged) as s:
        report = await failed(s, 1, Broken())
        assert "the shard is gone" in (report.error or "")
        assert [r.fence is not None for r in report.receipts] == [True, True]


async def test_the_cause_of_a_failure_is_kept_as_the_errors_cause() -> None:
    async with stand(transport=Recorded(bucket_tensors=1, stage_bytes=0)) as s:
        with anyio.fail_after(10), pytest.raises(genapi.PublishError) as caught:
            await s.publisher.publish(1, Broken())
        assert isinstance(caught.value.__cause__, genapi.GenAPIError | RuntimeError)
        assert "the shard is gone" in str(caught.value.__cause__)


@pytest.mark.case("WUP-09")
async def test_a_worker_that_fails_ends_a_sender_that_blocks_and_is_named_at_once() -> None:
    async with stand(timeouts=SLOW) as s:

        async def block(sender: RecordedSender) -> None:
            await sender.abandoned.wait()
            raise genapi.TransportError("abandoned", phase="may_have_run")

        s.transport.on_send = block
        s.fail(1, "/update_weights", "error", body='{"error":{"message":"out of memory"}}')
        with anyio.fail_after(2):
            report = await failed(s, 1)
        assert "memory://1" in (report.error or "")
        assert "out of memory" in (report.error or "")
        assert "out of memory" in (report.receipts[1].error or "")
        assert "abandon" in s.transport.senders[0].events


@pytest.mark.case("WUP-09")
async def test_a_sender_that_blocks_for_ever_is_given_up_and_the_worker_that_failed_is_named() -> (
    None
):
    limits = replace_timeouts(SLOW, transfer_s=0.2)
    async with stand(timeouts=limits) as s:

        async def block(_: RecordedSender) -> None:
            await anyio.sleep_forever()

        s.transport.on_send = block
        s.fail(1, "/update_weights", "error", body='{"error":{"message":"out of memory"}}')
        with anyio.fail_after(2):
            report = await failed(s, 1)
        assert "out of memory" in (report.error or "")
        assert [r.fence is not None for r in report.receipts] == [True, True]


async def test_a_cancellation_ends_the_gathering_and_closes_its_source() -> None:
    manifest = tuple(source(1).manifest())
    blocked = Blocked(manifest, at=len(manifest) - 1)
    unstaged = Recorded(bucket_tensors=1, stage_bytes=0)
    patient = replace_timeouts(SLOW, cleanup_s=60.0)
    scope = anyio.CancelScope()

    async def cancel_when_reached() -> None:
        assert await anyio.to_thread.run_sync(blocked.reached.wait, 5)
        scope.cancel()

    async with stand(timeouts=patient, transport=unstaged) as s:
        async with anyio.create_task_group() as group:
            group.start_soon(cancel_when_reached)
            with anyio.fail_after(10), scope:
                await s.publisher.publish(1, blocked.source)
        assert scope.cancelled_caught
        report = s.publisher.last_report
        assert report is not None
        assert [r.fence is not None for r in report.receipts] == [True, True]
    blocked.release.set()
    assert await anyio.to_thread.run_sync(blocked.source.closed.wait, 5)


# bounds


class Unfinished(Blocked):
    """Blocks where it is asked what it holds, or for whatever comes before its first tensor."""

    def __init__(self, manifest: Sequence[TensorMeta], where: str) -> None:
        super().__init__(manifest, at=-1)
        self._tensors, self._where = manifest, where

    def manifest(self) -> Sequence[TensorMeta]:
        self._block("manifest")
        return self._tensors

    def stage(self, budget_bytes: int) -> None:
        del budget_bytes
        self._block("stage")

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.source)

    def _block(self, where: str) -> None:
        if where == self._where:
            assert self.release.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("where", "named"), [("manifest", "its manifest"), ("stage", "its next tensors")]
)
async def test_a_source_that_stalls_before_its_first_tensor_is_what_is_named(
    where: str, named: str
) -> None:
    stalled = Unfinished(tuple(source(1).manifest()), where)
    try:
        async with stand(timeouts=replace_timeouts(QUICK, stage_s=0.2)) as s:
            report = await failed(s, 1, stalled)
            assert report.error == f"stage: the weight source did not give {named} within 0.2 s"
            assert [r.error for r in report.receipts] == [None, None]
            assert s.asked("pause") == []
    finally:
        stalled.release.set()


@pytest.mark.parametrize(("staged", "phase"), [(1 << 30, "stage"), (0, "send")])
async def test_a_source_that_stalls_at_a_tensor_is_what_is_named_with_the_tensor(
    staged: int, phase: str
) -> None:
    manifest = tuple(source(1).manifest())
    blocked = Blocked(manifest, at=1)
    limits = replace_timeouts(QUICK, stage_s=0.2, transfer_s=0.2)
    transport = Recorded(bucket_tensors=1, stage_bytes=staged)
    try:
        async with stand(timeouts=limits, transport=transport) as s:
            report = await failed(s, 1, blocked.source)
            stalled = f"the weight source did not give tensor {manifest[1].name!r} within 0.2 s"
            assert report.error == f"{phase}: {stalled}"
            for receipt in report.receipts:
                assert str(receipt.worker) not in report.error
                assert receipt.error is None or "the trainer's end failed" in receipt.error
    finally:
        blocked.release.set()


@dataclass(frozen=True)
class Unwritten:
    """A place for weights that is never done with writing."""

    bucket_bytes: int = 1 << 20
    bucket_tensors: int = 1
    stage_bytes: int = 1 << 20

    def check(self, manifest: Sequence[TensorMeta], *, in_process: bool) -> None:
        del manifest, in_process

    def opened(self) -> Self:
        return self

    async def close(self) -> None:
        return

    async def taken(self) -> AbstractSet[PolicyVersion]:
        return frozenset()

    async def write(
        self,
        version: PolicyVersion,
        manifest: Sequence[TensorMeta],
        buckets: AsyncIterable[Bucket],
        *,
        supersedes: bool = False,
    ) -> str:
        del version, manifest, supersedes
        async for _ in buckets:
            pass
        await anyio.sleep_forever()
        return "/nowhere"

    async def discard(self, version: PolicyVersion) -> None:
        del version

    async def tidy(self, committed: PolicyVersion, needed: AbstractSet[PolicyVersion]) -> None:
        del committed, needed


async def test_weights_that_are_not_written_in_time_are_what_is_named() -> None:
    async with stand() as s:
        limits = replace_timeouts(QUICK, stage_s=0.2)
        s.publisher = WeightPublisher(s.fleet, transport=Unwritten(), timeouts=limits)
        report = await failed(s, 1)
        assert report.error == "stage: Unwritten did not write the version within 0.2 s"
        assert s.asked("pause") == []


async def cancelled(s: Stand, phase: str, *, turns: int) -> float:
    """How long a publication goes on that is cancelled some turns after it entered a phase."""
    scope, entered = anyio.CancelScope(), anyio.Event()
    s.at(phase, entered.set)

    async def cancel() -> None:
        await entered.wait()
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()
        scope.cancel()

    began = anyio.current_time()
    async with anyio.create_task_group() as group:
        group.start_soon(cancel)
        with anyio.fail_after(20), scope:
            await s.publisher.publish(1, source(1))
    assert scope.cancelled_caught
    return anyio.current_time() - began


@pytest.mark.parametrize("turns", [0, 50])
async def test_what_is_waited_for_when_a_publication_is_cancelled_is_bounded_by_cleanup_s(
    turns: int,
) -> None:
    async with stand(timeouts=SLOW) as s:
        s.fail(1, "/pause", "never_answer")
        assert await cancelled(s, "pause", turns=turns) < 5
        report = s.publisher.last_report
        assert report is not None
        assert report.receipts[0].fence is None
        assert report.receipts[1].fence is not None


async def test_what_a_cancelled_publication_still_has_to_ask_is_bounded_by_cleanup_s() -> None:
    async with stand(timeouts=SLOW) as s:
        s.fail(1, "/resume", "never_answer")
        s.fail(0, "/pause", "answer_late", delay_s=0.01)
        assert await cancelled(s, "pause", turns=0) < 5
        report = s.publisher.last_report
        assert report is not None
        assert report.receipts[1].fence is not None


async def test_without_a_cancellation_cleanup_s_bounds_nothing() -> None:
    slow = replace_timeouts(SLOW, cleanup_s=0.01)
    async with stand(timeouts=slow) as s:

        async def take_time(_: RecordedSender) -> None:
            await anyio.sleep(0.05)

        s.transport.on_send = take_time
        assert (await s.publisher.publish(1, source(1))).committed


def replace_timeouts(timeouts: PublishTimeouts, **changes: float) -> PublishTimeouts:
    return timeouts.model_copy(update=changes)


# what is measured


async def test_a_workers_pause_ends_when_it_has_resumed_and_not_with_the_publication() -> None:
    async with stand() as s:
        for nth in (1, 2, 3):
            s.fail(1, "/resume", "never_answer", nth=nth)
        report = await failed(s, 1)
        quick, stuck = (r.paused_s for r in report.receipts)
        assert 0 < quick < stuck
        assert stuck - quick > QUICK.resume_s / 2


async def test_a_worker_that_was_never_paused_counts_no_pause_and_no_bytes() -> None:
    async with stand() as s:
        s.fail(1, "/health", "error", status=503)
        for nth in range(2, 9):
            s.fail(1, "/health", "error", status=503, nth=nth)
        report = await failed(s, 1)
        assert [r.paused_s for r in report.receipts] == [0.0, 0.0]
        assert [r.bytes_sent for r in report.receipts] == [0, 0]


async def test_each_worker_is_sent_every_byte_once() -> None:
    async with stand(transport=Recorded(bucket_tensors=1)) as s:
        report = await s.publisher.publish(1, source(1))
        size = sum(meta.nbytes for meta in source(1).manifest())
        assert [r.bytes_sent for r in report.receipts] == [size, size]


# who is asked


async def test_a_label_is_not_put_back_onto_another_process_that_took_the_workers_place() -> None:
    async with stand() as s:
        s.fail(1, "/update_weight_version", "error")
        s.at("unmark", s.cluster.workers[0].restart)
        report = await failed(s, 1)
        assert report.receipts[0].fence is not None
        assert s.cluster.workers[0].engine.label == "default"
        await s.fleet.snapshot()
        for session in "abcd":
            reply = await s.fleet.generate(request(session=session))
            assert reply.worker == report.receipts[1].worker


async def test_a_worker_that_told_no_label_is_given_back_one_that_names_no_version() -> None:
    async with stand() as s:
        s.fail(0, "/weight_info", "error", status=200, body='{"weight_version": null}')
        s.fail(1, "/update_weight_version", "error")
        report = await failed(s, 1)
        assert report.receipts[0].fence is None
        assert s.calls.bodies("/update_weight_version")["memory://0"][-1] == {
            "new_version": "default"
        }
        assert s.cluster.workers[0].engine.label == "default"


class LabelApart(VLLMAdmin):
    """An engine whose session is closed without a label, which is set by a call of its own."""

    finish_sets_label = False


class Apart(VLLM):
    _admin = LabelApart()


def label_apart(fleet: genapi.Fleet) -> None:
    fleet.provider = Apart()


async def test_an_engine_whose_label_is_set_apart_is_labelled_after_its_session() -> None:
    async with stand(prepare=label_apart) as s:
        report = await s.publisher.publish(1, source(1))
        assert report.committed
        assert [r.evidence for r in report.receipts] == [Evidence.OWN_LABEL] * 2
        assert s.calls.bodies("/finish_weight_update") == {
            "memory://0": [None],
            "memory://1": [None],
        }
        order = [path for url, path, _ in s.calls.calls if url == "memory://0"]
        assert order.index("/finish_weight_update") < len(order) - 1 - order[::-1].index(
            "/update_weight_version"
        )
        reply = await s.fleet.generate(request())
        assert reply.output.token_ids == greedy(1, [1, 2, 3], 8)
        assert reply.output.policy.oldest == report.version


async def test_an_engine_whose_label_is_set_apart_is_not_labelled_when_finish_is_lost() -> None:
    async with stand(prepare=label_apart) as s:
        s.fail(1, "/finish_weight_update", "never_answer")
        report = await failed(s, 1)
        assert report.receipts[1].outcome is Outcome.UNKNOWN
        assert report.receipts[1].recovery is Recovery.CLOSE_THEN_REPUBLISH
        labels = [
            body["new_version"] for body in s.calls.bodies("/update_weight_version")["memory://1"]
        ]
        assert report.version.label not in labels
        assert report.version.updating_label in labels


async def test_a_process_that_took_a_workers_place_is_not_given_its_label() -> None:
    async with stand(prepare=label_apart) as s:
        s.at("label", s.cluster.workers[0].restart)
        report = await failed(s, 1)
        assert report.receipts[0].outcome is not Outcome.COMMITTED
        assert s.cluster.workers[0].engine.label == "default"


async def test_a_source_that_was_given_up_leaves_nothing_behind() -> None:
    async with stand(transport=Recorded(bucket_tensors=1, stage_bytes=0)) as s:
        before = Leftovers()
        await failed(s, 1, Broken())
        await before.none()
