"""What one process leaves behind, and what another one makes of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

import genapi
from genapi import Outcome, PublishReport, WeightPublisher
from genapi.embedded import Cluster, Fault
from genapi.events import Event, PhaseEnded, PhaseStarted
from genapi.transports.memory import MemoryTransport
from genapi.types.policy import is_updating_label
from genapi.types.worker import Recovery
from tests.contract.embedded import QUICK, greedy, request, weights

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def process(cluster: Cluster, *, run: str | None = "r") -> AsyncIterator[genapi.Fleet]:
    """A fleet as another process would have it."""
    async with genapi.connect("embedded://", transport=MemoryTransport(cluster), run=run) as fleet:
        await fleet.wait_ready(timeout_s=5)
        yield fleet


def publisher(fleet: genapi.Fleet) -> WeightPublisher:
    return WeightPublisher(fleet, transport=genapi.weights.Memory(bucket_tensors=1), timeouts=QUICK)


def source(seed: int) -> genapi.weights.WeightSource:
    return genapi.weights.from_tensors(weights(seed))


async def failed(p: WeightPublisher, step: int, seed: int) -> PublishReport:
    with anyio.fail_after(10), pytest.raises(genapi.PublishError) as caught:
        await p.publish(step, source(seed))
    report = caught.value.report
    assert isinstance(report, PublishReport)
    return report


async def left_half_updated(cluster: Cluster) -> None:
    """A trainer publishes step 1, loses its peer in step 2, and is gone."""
    async with process(cluster) as fleet:
        p = publisher(fleet)
        await p.adopt(0)
        await p.publish(1, source(1))
        cluster.workers[1].faults.add(Fault("/update_weights", "peer_lost", nth=2))
        await failed(p, 2, 2)


async def test_a_half_updated_worker_says_so_to_every_process() -> None:
    cluster = Cluster.from_query({"workers": "2"})
    await left_half_updated(cluster)
    assert all(is_updating_label(w.engine.label) for w in cluster.workers)
    async with process(cluster) as other:
        snapshot = await other.snapshot()
        assert [w.version for w in snapshot.workers] == [None, None]
        assert all(w.fence is not None for w in snapshot.workers)
        assert snapshot.committed is None
        with pytest.raises(genapi.FleetError, match="middle of an update"):
            await publisher(other).adopt(1)
        with anyio.fail_after(5), pytest.raises(genapi.TransportError, match="timeout_s"):
            await other.generate(request(timeout_s=0.3))


async def test_a_failure_of_the_next_publisher_resumes_nobody_who_was_left_half_updated() -> None:
    cluster = Cluster.from_query({"workers": "2"})
    await left_half_updated(cluster)
    async with process(cluster) as other:
        p = publisher(other)
        cluster.workers[0].faults.add(Fault("/is_paused", "error", nth=3))
        report = await failed(p, 3, 2)
        assert all(receipt.fence is not None for receipt in report.receipts)
        assert all(worker.engine.pause_state.name != "NONE" for worker in cluster.workers)
        again = await p.publish(3, source(2))
        assert [r.outcome for r in again.receipts] == [Outcome.COMMITTED] * 2
        for session in ("a", "b", "c", "d"):
            reply = await other.generate(request(session=session))
            assert reply.output.token_ids == greedy(2, [1, 2, 3], 8)


async def test_a_newer_version_of_another_process_is_neither_adopted_nor_published_over() -> None:
    cluster = Cluster.from_query({"workers": "2"})
    async with process(cluster) as one, process(cluster) as two:
        await publisher(two).publish(5, source(1))
        p = publisher(one)
        for step in (5, 5, 5, 3):
            with pytest.raises((genapi.ConfigError, genapi.PublishError)):
                await p.publish(step, source(2))
        with pytest.raises(genapi.FleetError, match="carries"):
            await p.adopt(0)
        assert {worker.engine.label for worker in cluster.workers} == {"genapi:r:5:1"}
        reply = await one.generate(request())
        assert reply.output.token_ids == greedy(1, [1, 2, 3], 8)


async def test_a_step_that_somebody_finishes_after_a_failure_here_is_not_published_over() -> None:
    cluster = Cluster.from_query({"workers": "2"})
    async with process(cluster) as one, process(cluster) as two:
        p = publisher(one)
        await p.adopt(0)
        for nth in (1, 2):  # an answer that is odd is read once more
            cluster.workers[0].faults.add(Fault("/health", "error", status=503, nth=nth))
        await failed(p, 5, 2)
        assert (await publisher(two).publish(5, source(1))).committed
        for _ in range(2):
            with pytest.raises(genapi.ConfigError, match="holds already"):
                await p.publish(5, source(2))
        assert {worker.engine.label for worker in cluster.workers} == {"genapi:r:5:1"}


async def test_a_step_that_somebody_left_half_done_may_be_tried_again() -> None:
    cluster = Cluster.from_query({"workers": "2"})
    async with process(cluster) as fleet:
        p = publisher(fleet)
        await p.adopt(0)
        cluster.workers[1].faults.add(Fault("/resume", "error"))
        await failed(p, 1, 1)
    async with process(cluster) as other:
        report = await publisher(other).publish(1, source(1))
        assert report.committed
        assert report.version.attempt == 2


async def test_a_fenced_worker_is_not_adopted() -> None:
    cluster = Cluster.from_query({"workers": "2"})
    async with process(cluster) as fleet:
        p = publisher(fleet)
        await p.adopt(0)
        await p.publish(1, source(1))
        cluster.workers[1].restart()
        with pytest.raises(genapi.FleetError, match="fenced"):
            await p.adopt(1)
        assert cluster.workers[1].engine.label == "default"


async def test_adopting_a_version_again_promises_nothing_more_about_caches() -> None:
    cluster = Cluster.from_query({"workers": "1"})
    async with process(cluster) as fleet:
        stale = WeightPublisher(
            fleet,
            transport=genapi.weights.Memory(),
            timeouts=QUICK,
            in_flight_kv="stale",
            prefix_cache="stale",
        )
        await stale.adopt(0)
        await stale.publish(1, source(1))
        await stale.adopt(1)
        reply = await fleet.generate(request(prompt=tuple(range(1, 40))))
        assert not reply.output.policy.is_pure
    async with process(cluster) as other:
        await publisher(other).adopt(1)
        reply = await other.generate(request(prompt=tuple(range(1, 40))))
        assert reply.output.policy.spans[0].context is None


async def test_two_publishers_on_one_fleet_run_one_after_the_other() -> None:
    cluster = Cluster.from_query({"workers": "2"})
    phases: list[tuple[int, str]] = []
    async with process(cluster) as fleet:

        def observe(event: Event) -> None:
            if isinstance(event, PhaseStarted):
                phases.append((event.version.step, event.phase))

        fleet.observe = observe
        async with anyio.create_task_group() as group:
            group.start_soon(publisher(fleet).publish, 1, source(1))
            group.start_soon(publisher(fleet).publish, 2, source(2))
    steps = [step for step, _ in phases]
    assert steps == sorted(steps)
    assert {worker.engine.label for worker in cluster.workers} == {"genapi:r:2:1"}


@pytest.mark.parametrize("phase", ["commit", "resume"])
async def test_a_worker_that_restarts_while_it_is_resumed_is_not_called_committed(
    phase: str,
) -> None:
    cluster = Cluster.from_query({"workers": "2"})
    async with process(cluster) as fleet:
        p = publisher(fleet)
        await p.adopt(0)

        def observe(event: Event) -> None:
            if isinstance(event, PhaseStarted) and event.phase == phase:
                cluster.workers[1].restart()

        fleet.observe = observe
        report = await failed(p, 1, 1)
        assert report.receipts[0].outcome is Outcome.COMMITTED
        assert report.receipts[0].fence is None
        assert report.receipts[1].outcome is not Outcome.COMMITTED
        for session in ("a", "b", "c", "d"):
            reply = await fleet.generate(request(session=session))
            assert reply.output.token_ids == greedy(1, [1, 2, 3], 8)


async def test_a_worker_that_needs_a_restart_is_refused_until_another_process_answers() -> None:
    cluster = Cluster.from_query({"workers": "2"})
    async with process(cluster) as fleet:
        p = publisher(fleet)
        await p.adopt(0)
        cluster.workers[1].faults.add(Fault("/start_weight_update", "error"))
        report = await failed(p, 1, 1)
        assert report.receipts[1].recovery is Recovery.RESTART_THEN_PUBLISH
        again = await failed(p, 1, 1)
        assert "restart it first" in (again.receipts[1].error or "")
        cluster.workers[1].restart()
        await fleet.snapshot()
        assert (await p.publish(1, source(1))).committed


async def test_a_worker_that_does_not_resume_is_fenced_and_can_be_published_to_again() -> None:
    cluster = Cluster.from_query({"workers": "2"})
    async with process(cluster) as fleet:
        p = publisher(fleet)
        await p.adopt(0)
        cluster.workers[1].faults.add(Fault("/resume", "error"))
        report = await failed(p, 1, 1)
        assert [r.outcome for r in report.receipts] == [Outcome.COMMITTED] * 2
        assert report.receipts[1].recovery is Recovery.REPUBLISH
        assert report.receipts[1].fence is not None
        again = await p.publish(1, source(1))
        assert again.committed
        assert again.version.attempt == 2


async def test_the_run_is_minted_once_whatever_fails() -> None:
    cluster = Cluster.from_query({"workers": "1"})
    async with process(cluster, run=None) as fleet:
        p = publisher(fleet)
        cluster.workers[0].faults.add(Fault("/pause", "error"))
        with pytest.raises(genapi.PublishError) as caught:
            await p.publish(1, source(1))
        report = await p.publish(1, source(1))
        assert report.version.run == caught.value.report.version.run
        assert report.version.attempt == 2


async def test_a_cancellation_in_the_last_turn_is_a_cancellation() -> None:
    cluster = Cluster.from_query({"workers": "1"})
    async with process(cluster) as fleet:
        task: asyncio.Task[PublishReport] | None = None
        ended = 0

        def observe(event: Event) -> None:
            nonlocal ended
            if isinstance(event, PhaseEnded) and event.phase == "probe":
                ended += 1
                assert task is not None
                asyncio.get_running_loop().call_soon(task.cancel)

        fleet.observe = observe
        task = asyncio.get_running_loop().create_task(publisher(fleet).publish(1, source(1)))
        await asyncio.wait([task])
        assert ended == 1
        assert task.cancelled() or task.exception() is None


async def test_answers_that_cannot_be_read_end_a_publication_with_receipts() -> None:
    cluster = Cluster.from_query({"workers": "2"})
    async with process(cluster) as fleet:
        p = publisher(fleet)
        await p.adopt(0)
        cluster.workers[1].faults.add(Fault("/update_weights", "error", body="[" * 200_000))
        report = await failed(p, 1, 1)
        assert all(receipt.fence is not None for receipt in report.receipts)


@pytest.mark.parametrize("step", ["3", None, -1, 1.5, True])
async def test_a_step_that_is_none_is_named(step: object) -> None:
    cluster = Cluster.from_query({"workers": "1"})
    async with process(cluster) as fleet:
        with pytest.raises(genapi.ConfigError, match="step"):
            await publisher(fleet).publish(step, source(1))  # type: ignore[arg-type]
        with pytest.raises(genapi.ConfigError, match="mode"):
            WeightPublisher(fleet, transport=genapi.weights.Memory(), mode="wait")  # type: ignore[arg-type]


async def test_a_publisher_that_outlives_its_fleet_still_frees_its_sender() -> None:
    cluster = Cluster.from_query({"workers": "1"})
    async with process(cluster) as fleet:
        p = publisher(fleet)
        await p.publish(1, source(1))
    with anyio.fail_after(5):
        await p.aclose()
