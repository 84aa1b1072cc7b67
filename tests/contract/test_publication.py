"""Publications over embedded vLLM servers: the good path, and every way it may fail."""

import threading
from collections import Counter
from collections.abc import Iterator

import anyio
import anyio.to_thread
import numpy as np
import numpy.typing as npt
import pytest

import genapi
from genapi import FinishReason, PolicyVersion, WeightPublisher
from genapi.embedded import Call
from genapi.events import AdminCalled, Event, PhaseStarted
from genapi.transports.memory import MemoryTransport
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


async def test_every_worker_serves_the_published_weights_under_the_published_version() -> None:
    async with rig(2) as r, publisher(r) as p:
        await p.adopt(0)
        report = await p.publish(3, source(1))
        assert report.committed
        assert outcomes(report) == [Outcome.COMMITTED] * 2
        assert [x.evidence for x in report.receipts] == [Evidence.OWN_LABEL] * 2
        assert [x.fence for x in report.receipts] == [None, None]
        for session in ("a", "b", "c", "d"):
            reply = await r.fleet.generate(request(session=session))
            assert reply.output.token_ids == greedy(1, list(PROMPT), 8)
            assert reply.output.policy.oldest == report.version
            assert reply.output.policy.is_pure
        assert report.version == PolicyVersion(run=report.version.run, step=3)
        assert {w.version for w in (await r.fleet.snapshot()).workers} == {report.version}


async def test_adopting_labels_fresh_servers_and_moves_nothing() -> None:
    async with rig(2) as r, publisher(r) as p:
        before = await r.fleet.generate(request())
        assert before.output.policy.oldest is None
        report = await p.adopt(0)
        assert outcomes(report) == [Outcome.COMMITTED] * 2
        after = await r.fleet.generate(request())
        assert after.output.token_ids == before.output.token_ids
        assert after.output.policy.oldest == report.version
        assert after.output.policy.lag(0) == 0


async def test_adopting_again_in_another_process_changes_nothing() -> None:
    async with rig(2) as r:
        first = await publisher(r).adopt(4)
        second = await publisher(r).adopt(4)
        assert second.version == first.version
        with pytest.raises(genapi.FleetError, match="already carries"):
            await publisher(r).adopt(5)


async def test_a_request_in_flight_is_kept_and_shows_both_versions() -> None:
    async with rig(1) as r, publisher(r) as p:
        await p.adopt(0)
        async with r.fleet.stream(request(tokens=1500)) as events:
            first = await anext(events)
            assert isinstance(first, genapi.TokenChunk)
            report = await p.publish(1, source(1))
            last = [event async for event in events][-1]
        assert isinstance(last, genapi.Finished)
        trace = last.reply.output.policy
        assert [s.lo.step for s in trace.spans if s.lo] == [0, 1]
        assert trace.is_mixed
        assert trace.newest == report.version
        assert [s.context for s in trace.spans] == [s.lo for s in trace.spans]


async def test_in_flight_kv_left_stale_shows_in_the_context() -> None:
    async with rig(1) as r:
        p = WeightPublisher(
            r.fleet,
            transport=genapi.weights.Memory(),
            in_flight_kv="stale",
            prefix_cache="salt",
            timeouts=QUICK,
        )
        await p.adopt(0)
        async with r.fleet.stream(request(tokens=1500)) as events:
            await anext(events)
            await p.publish(1, source(1))
            last = [event async for event in events][-1]
        assert isinstance(last, genapi.Finished)
        trace = last.reply.output.policy
        assert [s.context.step for s in trace.spans if s.context] == [0, 0]
        assert not trace.is_pure


async def test_abort_mode_ends_requests_in_flight_with_what_they_have() -> None:
    async with rig(1) as r, publisher(r) as p:
        await p.adopt(0)
        async with r.fleet.stream(request(tokens=1500)) as events:
            await anext(events)
            await p.publish(1, source(1), mode="abort")
            last = [e async for e in events][-1]
        assert isinstance(last, genapi.Finished)
        assert last.reply.output.finish_reason is FinishReason.ABORT
        assert not last.reply.output.is_complete
        assert last.reply.output.policy.newest is not None
        assert last.reply.output.policy.newest.step == 0


async def test_a_step_that_is_not_newer_is_refused_before_anything_is_touched() -> None:
    async with rig(2) as r, publisher(r) as p:
        await p.adopt(12)
        r.events.clear()
        with pytest.raises(genapi.ConfigError, match="11 is not newer than 12"):
            await p.publish(11, source(1))
        with pytest.raises(genapi.ConfigError, match="12 is not newer"):
            await p.publish(12, source(1))
        assert not r.events


async def test_a_second_publication_uses_the_group_that_stands() -> None:
    async with rig(2) as r, publisher(r) as p:
        await p.publish(1, source(1))
        await p.publish(2, source(0))
        joins = [e for e in r.events if isinstance(e, AdminCalled) and e.operation == "join"]
        assert len(joins) == 2
        reply = await r.fleet.generate(request())
        assert reply.output.token_ids == greedy(0, list(PROMPT), 8)


class BadShape:
    """One tensor in the middle has another shape than the server's model."""

    def __init__(self) -> None:
        self.tensors = dict(weights(1))
        name = list(self.tensors)[1]
        self.tensors[name] = np.zeros((3, 3), dtype=np.float32)
        self.inner = genapi.weights.from_tensors(self.tensors)

    def manifest(self) -> tuple[genapi.weights.TensorMeta, ...]:
        return tuple(self.inner.manifest())

    def __iter__(self) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        return iter(self.inner)


async def test_a_tensor_of_a_wrong_shape_leaves_every_worker_dirty_and_paused() -> None:
    async with rig(2) as r, publisher(r) as p:
        await p.adopt(0)
        with anyio.fail_after(10), pytest.raises(genapi.PublishError) as caught:
            await p.publish(1, BadShape())
        report = caught.value.report
        for receipt in report.receipts:
            assert receipt.outcome is Outcome.DIRTY
            assert receipt.recovery is Recovery.RESTART_THEN_PUBLISH
            assert receipt.fence is not None
            assert receipt.fence.strength is FenceStrength.PAUSED
            assert "update" in (receipt.error or "")
        assert r.fleet.membership.committed == PolicyVersion(run=report.version.run, step=0)
        with pytest.raises(genapi.FleetError, match="restart"):
            await r.fleet.generate(request(timeout_s=5))
        await nobody_was_resumed(r)
        # A worker whose weights cannot be trusted is not published to again, and says why.
        again = await failed(p, 2)
        assert outcomes(again) == [Outcome.UNTOUCHED] * 2 or Outcome.DIRTY in outcomes(again)


async def nobody_was_resumed(r: Rig) -> None:
    calls = [e for e in r.events if isinstance(e, AdminCalled)]
    assert "resume" not in [c.operation for c in calls]


FATAL = ["die_before", "die_during", "die_after"]


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


@pytest.mark.case("DISC-12")
async def test_a_worker_that_died_before_the_publication_stops_it_before_any_pause() -> None:
    async with rig(2) as r, publisher(r) as p:
        await p.adopt(0)
        r.cluster.workers[1].kill()
        report = await failed(p, 1)
        assert outcomes(report) == [Outcome.UNTOUCHED] * 2
        operations = {e.operation for e in r.events if isinstance(e, AdminCalled)}
        assert "pause" not in operations
        reply = await r.fleet.generate(request())
        assert reply.output.policy.newest == PolicyVersion(run=report.version.run, step=0)


async def test_a_lost_reply_to_the_update_is_decided_by_finish_and_the_label() -> None:
    async with rig(2) as r, publisher(r) as p:
        await p.adopt(0)
        r.fail(0, "/update_weights", "lose_reply")
        report = await p.publish(1, source(1))
        assert outcomes(report) == [Outcome.COMMITTED] * 2


async def test_a_lost_reply_to_finish_is_decided_by_the_label() -> None:
    async with rig(2) as r, publisher(r) as p:
        await p.adopt(0)
        r.fail(1, "/finish_weight_update", "lose_reply")
        report = await p.publish(1, source(1))
        assert outcomes(report) == [Outcome.COMMITTED] * 2
        assert (await r.fleet.generate(request())).output.token_ids == greedy(1, [1, 2, 3], 8)


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


async def test_a_finish_that_never_took_effect_is_not_committed() -> None:
    async with rig(2) as r, publisher(r) as p:
        await p.adopt(0)
        r.fail(1, "/finish_weight_update", "never_answer")
        report = await failed(p, 1)
        assert report.receipts[0].outcome is Outcome.COMMITTED
        assert report.receipts[1].outcome is Outcome.UNKNOWN
        assert all(receipt.fence is not None for receipt in report.receipts)
        await nobody_was_resumed(r)


@pytest.mark.case("WUP-11")
async def test_a_pause_that_never_answers_is_named_and_the_other_worker_serves_on() -> None:
    async with rig(2) as r, publisher(r) as p:
        await p.adopt(0)
        r.fail(1, "/pause", "never_answer")
        report = await failed(p, 1)
        assert outcomes(report) == [Outcome.UNTOUCHED] * 2
        assert report.receipts[0].fence is None
        assert report.receipts[1].fence is not None
        assert "pause" in (report.receipts[1].error or "")
        assert "memory://1" in report.receipts[1].url
        reply = await r.fleet.generate(request(timeout_s=5))
        assert reply.output.token_ids == greedy(0, [1, 2, 3], 8)
        assert reply.worker == report.receipts[0].worker


@pytest.mark.case("WUP-01")
@pytest.mark.parametrize(
    ("path", "fenced", "step"),
    [
        ("/init_weight_transfer_engine", [False, False], 0),
        ("/pause", [False, True], 0),
        ("/update_weights", [True, True], 0),
        ("/resume", [False, True], 1),
    ],
)
async def test_an_error_inside_a_200_is_the_error_of_that_worker_and_it_gets_no_new_version(
    path: str, fenced: list[bool], step: int
) -> None:
    body = '{"status":"error","message":"Worker must be paused"}'
    async with rig(2) as r, publisher(r) as p:
        await p.adopt(0)
        r.fail(1, path, "error", status=200, body=body)
        report = await failed(p, 1)
        good, bad = report.receipts
        assert "Worker must be paused" in (report.error or "")
        assert "Worker must be paused" in (bad.error or "")
        assert good.error is None
        assert [x.fence is not None for x in report.receipts] == fenced
        committed = r.fleet.membership.committed
        assert committed == PolicyVersion(run=report.version.run, step=step)
        if not all(fenced):
            reply = await r.fleet.generate(request(timeout_s=5))
            assert reply.output.policy.oldest == committed


@pytest.mark.case("WUP-03")
async def test_an_error_on_one_of_three_workers_resumes_nobody_and_is_no_error_of_the_others() -> (
    None
):
    async with rig(3) as r, publisher(r) as p:
        await p.adopt(0)
        r.fail(1, "/update_weights", "error", status=400, body='{"success":false,"message":"x"}')
        with anyio.fail_after(10), pytest.raises(genapi.PublishError) as caught:
            await p.publish(1, source(1))
        report = caught.value.report
        assert isinstance(report, PublishReport)
        assert "memory://1" in (report.error or "")
        assert [x.error is None for x in report.receipts] == [True, False, True]
        assert "x" in (report.receipts[1].error or "")
        assert all(x.fence is not None for x in report.receipts)
        calls = Counter(e.operation for e in r.events if isinstance(e, AdminCalled))
        assert (calls["pause"], calls["update"], calls["resume"]) == (3, 3, 0)
        assert r.fleet.membership.committed == PolicyVersion(run=report.version.run, step=0)
        assert not any(label == report.version.label for label in r.labels)
        with pytest.raises(genapi.FleetError):
            await r.fleet.generate(request(timeout_s=0.2))


@pytest.mark.case("WUP-05")
async def test_a_failed_update_is_closed_once_and_the_next_cycle_can_go_on() -> None:
    async with rig(2) as r, publisher(r) as p:
        await p.adopt(0)
        r.fail(1, "/update_weights", "peer_lost")
        report = await failed(p, 1)
        assert report.error is not None
        assert "update" in report.error
        closes = [e for e in r.events if isinstance(e, AdminCalled) and e.operation == "close"]
        assert len(closes) == 2
        again = await p.publish(2, source(1))
        assert outcomes(again) == [Outcome.COMMITTED] * 2
        for session in ("a", "b", "c", "d"):
            reply = await r.fleet.generate(request(session=session))
            assert reply.output.token_ids == greedy(1, [1, 2, 3], 8)


@pytest.mark.case("WUP-07")
async def test_a_worker_that_restarted_since_is_refused_once_and_published_to_next() -> None:
    async with rig(2) as r, publisher(r) as p:
        await p.adopt(0)
        r.cluster.workers[1].restart()
        report = await failed(p, 1)
        assert outcomes(report) == [Outcome.UNTOUCHED] * 2
        assert "in place of" in (report.receipts[1].error or "")
        assert "pause" not in {e.operation for e in r.events if isinstance(e, AdminCalled)}
        again = await p.publish(1, source(1))
        assert outcomes(again) == [Outcome.COMMITTED] * 2
        assert again.version.attempt == 2


@pytest.mark.case("WUP-16")
async def test_a_worker_that_sleeps_is_refused_before_anything_is_sent_to_it() -> None:
    async with rig(2, enable_sleep_mode="true") as r, publisher(r) as p:
        await p.adopt(0)
        await r.cluster.handle(1, Call("POST", "/sleep", {"level": "1"}))
        report = await failed(p, 1)
        assert outcomes(report) == [Outcome.UNTOUCHED] * 2
        assert "wake" in (report.receipts[1].error or "")
        assert "pause" not in {e.operation for e in r.events if isinstance(e, AdminCalled)}


async def test_a_worker_that_somebody_left_paused_is_published_to_and_serves_again() -> None:
    async with rig(2) as r, publisher(r) as p:
        await p.adopt(0)
        await r.cluster.handle(1, Call("POST", "/pause", {"mode": "keep"}))
        assert [w.paused for w in (await r.fleet.snapshot()).workers] == [False, True]
        report = await p.publish(1, source(1))
        assert outcomes(report) == [Outcome.COMMITTED] * 2
        assert [w.paused for w in (await r.fleet.snapshot()).workers] == [False, False]


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


async def test_a_paused_worker_with_an_old_label_is_not_adopted() -> None:
    """So is one whose publisher was killed in the middle of a transfer, label and health alike."""
    async with rig(1) as r, publisher(r) as p:
        await p.adopt(3)
        before = r.labels
        await r.cluster.handle(0, Call("POST", "/pause", {"mode": "keep"}))
        async with genapi.connect("embedded://", transport=MemoryTransport(r.cluster)) as other:
            await other.wait_ready(timeout_s=5)
            for step in (3, 4):
                with pytest.raises(genapi.FleetError, match="is paused"):
                    await publisher(Rig(other, r.cluster)).adopt(step)
        assert r.labels == before
        assert [w.paused for w in (await r.fleet.snapshot()).workers] == [True]


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


async def test_a_cancelled_publication_ends_with_one_version_or_with_fences() -> None:
    """Cancels at each event in turn, until a publication gets through."""
    for number in range(200):
        async with rig(2) as r, publisher(r) as p:
            await p.adopt(0)
            scope = anyio.CancelScope()
            seen = 0

            def observe(_: Event, scope: anyio.CancelScope = scope, number: int = number) -> None:
                nonlocal seen
                seen += 1
                if seen > number:
                    scope.cancel()

            r.fleet.observe = observe
            r.fleet.control.observe = observe
            with anyio.fail_after(10), scope:
                await p.publish(1, source(1))
            report = p.last_report
            assert report is not None
            await holds_one_version_or_fences(r, report)
            if not scope.cancelled_caught and seen <= number:
                return
    raise AssertionError("no publication got through")


async def holds_one_version_or_fences(r: Rig, report: PublishReport) -> None:
    fenced = [m.fence is not None for m in r.fleet.membership.members.values()]
    if all(fenced):
        return
    for session in ("a", "b", "c", "d"):
        reply = await r.fleet.generate(request(session=session, timeout_s=5))
        (span,) = reply.output.policy.spans
        assert span.lo is not None
        seed = 1 if span.lo.step else 0
        assert reply.output.token_ids == greedy(seed, [1, 2, 3], 8)
        if report.version.step and report.committed:
            assert span.lo.step == 1
