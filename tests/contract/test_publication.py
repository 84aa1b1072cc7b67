"""Publications over embedded vLLM servers: the good path, and every way it may fail."""

import threading
from collections.abc import Iterator

import anyio
import anyio.to_thread
import numpy as np
import numpy.typing as npt
import pytest

import genapi
from genapi import PolicyVersion, WeightPublisher
from genapi.embedded import Call
from genapi.events import AdminCalled, Event, PhaseStarted
from genapi.types.worker import Evidence, FenceStrength, Outcome, PublishReport, Recovery
from tests.contract.embedded import QUICK, Rig, greedy, request, rig, weights

pytestmark = pytest.mark.anyio

PROMPT = (1, 2, 3)


def publisher(r: Rig) -> WeightPublisher:
    return WeightPublisher(r.fleet, transport=genapi.weights.Memory(), timeouts=QUICK)


def source(seed: int) -> genapi.weights.WeightSource:
    return genapi.weights.from_tensors(weights(seed))


def outcomes(report: PublishReport) -> list[Outcome]:
    return [receipt.outcome for receipt in report.receipts]


async def failed(publisher: WeightPublisher, step: int, seed: int = 1) -> PublishReport:
    """The report of a publication that has to fail, in bounded time."""
    with anyio.fail_after(10), pytest.raises(genapi.PublishError) as caught:
        await publisher.publish(step, source(seed))
    report = caught.value.report
    assert isinstance(report, PublishReport)
    assert not report.committed
    assert len(report.receipts) == 2
    return report


async def nobody_was_resumed(r: Rig) -> None:
    calls = [e for e in r.events if isinstance(e, AdminCalled)]
    assert "resume" not in [c.operation for c in calls]


FATAL = ["die_during"]


@pytest.mark.parametrize("action", FATAL)
@pytest.mark.parametrize(
    "path", ["/start_weight_update", "/update_weights", "/finish_weight_update"]
)
async def test_a_worker_that_dies_after_begin_leaves_nobody_resumed(action: str, path: str) -> None:
    async with rig(2) as r, publisher(r) as p:
        await p.adopt(0)
        r.fail(1, path, action)
        report = await failed(p, 1)
        dead = report.receipts[1]
        assert dead.outcome in (Outcome.UNKNOWN, Outcome.COMMITTED)
        assert dead.recovery is Recovery.RESTART_THEN_PUBLISH
        assert dead.fence is not None
        assert dead.fence.strength is FenceStrength.DEAD
        assert all(receipt.fence is not None for receipt in report.receipts)
        assert r.fleet.membership.committed == PolicyVersion(run=report.version.run, step=0)
        await nobody_was_resumed(r)


async def test_lost_replies_to_the_update_and_to_finish_are_decided_by_the_label() -> None:
    async with rig(2) as r, publisher(r) as p:
        await p.adopt(0)
        r.fail(1, "/update_weights", "lose_reply")
        r.fail(1, "/finish_weight_update", "lose_reply")
        report = await p.publish(1, source(1))
        assert outcomes(report) == [Outcome.COMMITTED] * 2
        assert [x.evidence for x in report.receipts] == [Evidence.OWN_LABEL] * 2
        for session in ("a", "b", "c", "d"):
            reply = await r.fleet.generate(request(session=session))
            assert reply.output.token_ids == greedy(1, [1, 2, 3], 8)


async def test_an_update_that_was_never_taken_is_not_committed() -> None:
    async with rig(2) as r, publisher(r) as p:
        await p.adopt(0)
        r.fail(1, "/update_weights", "never_answer")
        report = await failed(p, 1)
        assert Outcome.COMMITTED not in outcomes(report)
        await nobody_was_resumed(r)


async def test_a_worker_with_a_write_ahead_label_is_not_adopted() -> None:
    async with rig(1) as r, publisher(r) as p:
        label = PolicyVersion(run="r", step=4).updating_label
        await r.cluster.handle(
            0,
            Call("POST", "/update_weight_version", body=f'{{"new_version":"{label}"}}'.encode()),
        )
        await r.fleet.snapshot()
        with pytest.raises(genapi.FleetError, match="middle of an update"):
            await p.adopt(0)


async def test_a_cancelled_pause_is_awaited_and_resumed() -> None:
    async with rig(2) as r, publisher(r) as p:
        await p.adopt(0)
        r.fail(1, "/pause", "answer_late", delay_s=0.05)
        scope = anyio.CancelScope()

        def observe(event: Event) -> None:
            r.events.append(event)
            if isinstance(event, PhaseStarted) and event.phase == "pause":
                scope.cancel()

        r.fleet.observe = r.fleet.control.observe = observe
        with anyio.fail_after(5), scope:
            await p.publish(1, source(1))
        assert p.last_report is not None
        assert [x.fence for x in p.last_report.receipts] == [None, None]
        assert [w.paused for w in (await r.fleet.snapshot()).workers] == [False, False]


async def test_every_gather_has_ended_before_the_first_pause_is_sent() -> None:
    order: list[str] = []
    reached, gate = threading.Event(), threading.Event()

    class Gated:
        def manifest(self) -> tuple[genapi.weights.TensorMeta, ...]:
            return tuple(source(1).manifest())

        def __iter__(self) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
            for pair in weights(1).items():
                order.append("gather")
                yield pair
            reached.set()
            assert gate.wait(5)
            order.append("gathered")

    async with rig(2) as r, publisher(r) as p:
        await p.adopt(0)
        r.fleet.observe = lambda event: note(event, order)
        async with anyio.create_task_group() as group:
            group.start_soon(p.publish, 1, Gated())
            assert await anyio.to_thread.run_sync(reached.wait, 5)
            assert (await r.fleet.generate(request())).output.is_complete
            assert "pause" not in order
            gate.set()
    assert order.index("gathered") < order.index("pause")


def note(event: Event, order: list[str]) -> None:
    if isinstance(event, PhaseStarted):
        order.append(event.phase)
