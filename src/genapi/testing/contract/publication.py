"""Publications: the good path, and what is left of every way it may fail."""

import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

import genapi
from genapi import FinishReason, Outcome, PublishReport, WeightPublisher
from genapi.events import Event, PhaseStarted
from genapi.types.ids import WorkerId
from genapi.types.worker import Evidence, FenceStrength, Recovery

from .bodies import shows
from .meddling import Action
from .stand import Operation, Rig, Stand, finished

__all__ = ()

_INSIDE = '{"status":"error","message":"Worker must be paused"}'
_CANCELLATIONS = 200
_GATE_S = 30


async def failed(p: WeightPublisher, step: int, source: Any) -> PublishReport:
    """The report of a publication that has to fail, in bounded time."""
    with anyio.fail_after(20), pytest.raises(genapi.PublishError) as caught:
        await p.publish(step, source)
    report = caught.value.report
    assert isinstance(report, PublishReport)
    assert not report.committed
    return report


def outcomes(report: PublishReport) -> list[Outcome]:
    """Of each receipt."""
    return [receipt.outcome for receipt in report.receipts]


async def serves(
    s: Stand, seed: int, version: genapi.PolicyVersion, *, workers: int | None = None
) -> None:
    """Fail unless so many workers, all when None, serve these weights under this version."""
    replies = await s.everywhere()
    assert len(replies) == (len(s.servers.addresses) if workers is None else workers)
    for reply in replies:
        s.check(seed, reply)
        assert reply.output.policy.oldest == version
        assert reply.output.policy.is_pure


@shows("publish:commit")
async def _commit(rig: Rig) -> None:
    async with rig.stand(2) as s, s.publisher() as p:
        await p.adopt(0)
        report = await p.publish(3, s.weights(1))
        assert report.committed
        assert outcomes(report) == [Outcome.COMMITTED] * 2
        assert [x.evidence for x in report.receipts] == [Evidence.OWN_LABEL] * 2
        assert [x.fence for x in report.receipts] == [None, None]
        workers = (await s.fleet.snapshot()).workers
        assert {w.version for w in workers} == {report.version}
        assert {w.label for w in workers} == {report.version.label}
        await serves(s, 1, report.version)


@shows("publish:adopt")
async def _adopt(rig: Rig) -> None:
    async with rig.stand(2) as s:
        before = await s.fleet.generate(s.request())
        assert before.output.policy.oldest is None
        report = await s.publisher().adopt(0)
        assert outcomes(report) == [Outcome.COMMITTED] * 2
        after = await s.fleet.generate(s.request())
        assert after.output.token_ids == before.output.token_ids
        assert after.output.policy.oldest == report.version
        assert after.output.policy.lag(0) == 0
        assert s.sent("update") == s.sent("pause") == 0


@shows("publish:adopted")
async def _adopted(rig: Rig) -> None:
    async with rig.stand(2) as s:
        first = await s.publisher().adopt(4)
        second = await s.publisher().adopt(4)
        assert second.version == first.version
        with pytest.raises(genapi.FleetError, match="already carries"):
            await s.publisher().adopt(5)


class _Gated:
    """Weights that are gathered when the gate is opened, before anybody is paused."""

    def __init__(self, inner: genapi.weights.WeightSource) -> None:
        self.reached, self.gate = threading.Event(), threading.Event()
        self._inner = inner

    def manifest(self) -> Sequence[genapi.weights.TensorMeta]:
        return self._inner.manifest()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        self.reached.set()
        assert self.gate.wait(_GATE_S)
        return iter(self._inner)


@asynccontextmanager
async def in_flight(
    rig: Rig, **options: Any
) -> AsyncIterator[tuple[Stand, genapi.GenerateResponse, PublishReport]]:
    """A reply that was under way while step 2 was published over step 1."""
    limits = rig.carrier.timeouts
    unhurried = limits.model_copy(update={name: max(bound, 5.0) for name, bound in limits})
    async with rig.stand() as s, s.publisher(timeouts=unhurried) as p:
        await p.publish(1, s.weights(0))  # from here on the transfer group stands
        source, replies = _Gated(s.weights(1)), []

        async def ask() -> None:
            try:
                async with s.fleet.stream(s.request(tokens=s.carrier.long)) as events:
                    await anext(events)
                    source.gate.set()
                    replies.append(await finished(events))
            finally:
                source.gate.set()

        async with anyio.create_task_group() as group:
            group.start_soon(partial(p.publish, 2, source, **options))
            assert await anyio.to_thread.run_sync(source.reached.wait, _GATE_S)
            await ask()
        assert p.last_report is not None
        yield s, replies[0], p.last_report


@shows("publish:kept")
async def _kept(rig: Rig) -> None:
    async with in_flight(rig) as (_, reply, report):
        trace = reply.output.policy
        assert [span.lo.step for span in trace.spans if span.lo] == [1, 2]
        assert [span.context for span in trace.spans] == [span.lo for span in trace.spans]
        assert trace.is_mixed
        assert trace.newest == report.version
        assert reply.output.is_complete


@shows("publish:kept-stale")
async def _kept_stale(rig: Rig) -> None:
    async with in_flight(rig, in_flight_kv="stale") as (s, reply, report):
        trace = reply.output.policy
        assert [span.lo.step for span in trace.spans if span.lo] == [1, 2]
        assert [span.context.step for span in trace.spans if span.context] == [1, 1]
        assert not trace.is_pure
        await serves(s, 1, report.version)


@shows("publish:abort")
async def _abort(rig: Rig) -> None:
    async with in_flight(rig, mode="abort") as (s, reply, report):
        out = reply.output
        assert out.finish_reason is FinishReason.ABORT
        assert not out.is_complete
        assert [span.lo.step for span in out.policy.spans if span.lo] == [1]
        await serves(s, 1, report.version)


@shows("publish:drain")
async def _drain(rig: Rig) -> None:
    async with rig.stand() as s, s.publisher() as p:
        await p.publish(1, s.weights(0))
        async with s.fleet.stream(s.request(tokens=40)) as events:
            await anext(events)
            report = await p.publish(2, s.weights(1), mode="drain")
            out = (await finished(events)).output
        assert out.is_complete
        assert [span.lo.step for span in out.policy.spans if span.lo] == [1]
        await serves(s, 1, report.version)


@shows("publish:prefix")
async def _prefix(rig: Rig) -> None:
    async with rig.stand() as s:
        for prefix_cache in ("salt", "flush"):
            async with s.publisher(prefix_cache=prefix_cache) as p:
                for seed in (1, 0):
                    await s.fleet.generate(s.request())  # it leaves the prompt in the cache
                    step = 2 * (prefix_cache == "flush") + (seed == 0) + 1
                    report = await p.publish(step, s.weights(seed))
                    await serves(s, seed, report.version)


@shows("publish:older")
async def _older(rig: Rig) -> None:
    async with rig.stand(2) as s, s.publisher() as p:
        await p.adopt(12)
        for step in (11, 12):
            with pytest.raises(genapi.ConfigError, match=f"{step} is not newer than 12"):
                await p.publish(step, s.weights(1))
        assert s.asked("join") == s.asked("pause") == 0


@shows("publish:group")
async def _group(rig: Rig) -> None:
    async with rig.stand(2) as s, s.publisher() as p:
        await p.publish(1, s.weights(1))
        report = await p.publish(2, s.weights(0))
        assert s.asked("join") == 2
        await serves(s, 0, report.version)


def misshapen(s: Stand) -> genapi.weights.WeightSource:
    """The weights of seed 1 with one tensor in the middle that has another shape."""
    tensors = s.carrier.tensors(1)
    tensors[list(tensors)[1]] = np.zeros((3, 3), dtype=np.float32)
    return genapi.weights.from_tensors(tensors)


@shows("publish:shape")
async def _shape(rig: Rig) -> None:
    async with rig.stand(2) as s, s.publisher() as p:
        adopted = await p.adopt(0)
        report = await failed(p, 1, misshapen(s))
        for receipt in report.receipts:
            assert receipt.outcome is Outcome.DIRTY
            assert receipt.recovery is not None
            assert receipt.fence is not None
            assert receipt.fence.strength is FenceStrength.PAUSED
            assert "update" in (receipt.error or "")
        assert s.sent("resume") == 0
        assert (await s.fleet.snapshot()).committed in (None, adopted.version)
        with pytest.raises(genapi.FleetError):
            await s.fleet.generate(s.request(timeout_s=0.2))


@shows("publish:way-back")
async def _way_back(rig: Rig) -> None:
    async with rig.stand(2) as s, s.publisher() as p:
        await p.adopt(0)
        report = await failed(p, 1, misshapen(s))
        for index, receipt in enumerate(report.receipts):
            if receipt.recovery is Recovery.RESTART_THEN_PUBLISH:
                s.servers.restart(index)
        await s.fleet.snapshot()
        tensors = s.weights(1)
        try:
            again = await p.publish(2, tensors, manifest_changed=True)
        except genapi.PublishError:  # once: another process answers
            again = await p.publish(3, tensors, manifest_changed=True)
        assert outcomes(again) == [Outcome.COMMITTED] * 2
        await serves(s, 1, again.version)


@shows("publish:death")
async def _death(rig: Rig) -> None:
    operations: tuple[Operation, ...] = ("begin", "update", "finish")
    for operation in operations:
        actions: tuple[Action, ...] = ("die_before", "die_after")
        for action in actions:
            async with rig.stand(2) as s, s.publisher() as p:
                adopted = await p.adopt(0)
                s.fail(1, operation, action)
                report = await failed(p, 1, s.weights(1))
                alive, dead = report.receipts
                assert dead.outcome is Outcome.UNKNOWN
                assert dead.recovery is Recovery.RESTART_THEN_PUBLISH
                assert dead.fence is not None
                assert dead.fence.strength is FenceStrength.DEAD
                assert alive.fence is not None
                assert s.fleet.membership.committed == adopted.version
                assert s.sent("resume") == 0


@shows("publish:dead-before")
async def _dead_before(rig: Rig) -> None:
    async with rig.stand(2) as s, s.publisher() as p:
        adopted = await p.adopt(0)
        s.servers.kill(1)
        report = await failed(p, 1, s.weights(1))
        assert outcomes(report) == [Outcome.UNTOUCHED] * 2
        assert s.sent("pause") == 0
        await serves(s, 0, adopted.version, workers=1)


async def settled(s: Stand, p: WeightPublisher, operation: Operation) -> None:
    """Lose one reply to that call, and hold what was concluded against what is served."""
    await p.adopt(0)
    s.fail(1, operation, "lose_reply", nth=2 if operation == "label" else 1)
    try:
        report = await p.publish(1, s.weights(1))
    except genapi.PublishError as error:
        found = error.report
        assert isinstance(found, PublishReport)
        assert found.receipts[1].outcome is not Outcome.COMMITTED
        assert found.receipts[1].recovery is not None
        assert s.sent("resume") == 0
        with pytest.raises(genapi.FleetError):
            await s.fleet.generate(s.request(timeout_s=0.2))
        report = await p.publish(2, s.weights(1))
    assert outcomes(report) == [Outcome.COMMITTED] * 2
    assert [x.evidence for x in report.receipts] == [Evidence.OWN_LABEL] * 2
    await serves(s, 1, report.version)


@shows("publish:lost-update")
async def _lost_update(rig: Rig) -> None:
    async with rig.stand(2) as s, s.publisher() as p:
        await settled(s, p, "update")


@shows("publish:lost-finish")
async def _lost_finish(rig: Rig) -> None:
    async with rig.stand(2) as s, s.publisher() as p:
        await settled(s, p, "finish")


@shows("publish:lost-label")
async def _lost_label(rig: Rig) -> None:
    async with rig.stand(2) as s, s.publisher() as p:
        await p.adopt(0)
        # The first label of a publication is the one that is written ahead.
        s.fail(1, "label", "lose_reply", nth=2)
        report = await p.publish(1, s.weights(1))
        assert outcomes(report) == [Outcome.COMMITTED] * 2
        await serves(s, 1, report.version)


@shows("publish:no-finish")
async def _no_finish(rig: Rig) -> None:
    async with rig.stand(2) as s, s.publisher() as p:
        adopted = await p.adopt(0)
        s.fail(1, "finish", "never_answer")
        report = await failed(p, 1, s.weights(1))
        assert report.receipts[1].outcome is Outcome.UNKNOWN
        assert all(receipt.fence is not None for receipt in report.receipts)
        assert s.fleet.membership.committed == adopted.version
        assert s.sent("resume") == 0


@shows("publish:no-pause")
async def _no_pause(rig: Rig) -> None:
    async with rig.stand(2) as s, s.publisher() as p:
        adopted = await p.adopt(0)
        s.fail(1, "pause", "never_answer")
        report = await failed(p, 1, s.weights(1))
        assert outcomes(report) == [Outcome.UNTOUCHED] * 2
        assert report.receipts[0].fence is None
        assert report.receipts[1].fence is not None
        assert "pause" in (report.receipts[1].error or "")
        assert s.servers.addresses[1] in report.receipts[1].url
        await serves(s, 0, adopted.version, workers=1)


@shows("publish:error-inside")
async def _error_inside(rig: Rig) -> None:
    wanted: dict[Operation, tuple[list[bool], int]] = {
        "join": ([False, False], 0),
        "pause": ([False, True], 0),
        "update": ([True, True], 0),
        "resume": ([False, True], 1),
    }
    for operation, (fenced, step) in wanted.items():
        async with rig.stand(2) as s, s.publisher() as p:
            await p.adopt(0)
            s.fail(1, operation, "error", status=200, body=_INSIDE)
            report = await failed(p, 1, s.weights(1))
            good, bad = report.receipts
            assert "Worker must be paused" in (report.error or "")
            assert "Worker must be paused" in (bad.error or "")
            assert good.error is None
            assert [x.fence is not None for x in report.receipts] == fenced, operation
            committed = s.fleet.membership.committed
            assert committed is not None
            assert committed.step == step
            if not all(fenced):
                await serves(s, step, committed, workers=fenced.count(False))


@shows("publish:one-of-three")
async def _one_of_three(rig: Rig) -> None:
    async with rig.stand(3) as s, s.publisher() as p:
        adopted = await p.adopt(0)
        s.fail(1, "update", "error", status=400, body='{"success":false,"message":"x"}')
        report = await failed(p, 1, s.weights(1))
        (bad,) = [receipt for receipt in report.receipts if receipt.error is not None]
        assert bad.url == s.url(1)
        assert str(bad.worker) in (report.error or "")
        assert all(x.fence is not None for x in report.receipts)
        assert [s.asked(op) for op in ("pause", "update", "resume")] == [3, 3, 0]
        assert s.fleet.membership.committed == adopted.version
        labels = {w.label for w in (await s.fleet.snapshot()).workers}
        assert report.version.label not in labels
        with pytest.raises(genapi.FleetError):
            await s.fleet.generate(s.request(timeout_s=0.2))


@shows("publish:peer")
async def _peer(rig: Rig) -> None:
    async with rig.stand(2) as s, s.publisher() as p:
        await p.adopt(0)
        s.fail(1, "update", "lose_peer")
        report = await failed(p, 1, s.weights(1))
        assert "update" in (report.error or "")
        assert s.asked("close") == 2
        again = await p.publish(2, s.weights(1))
        assert outcomes(again) == [Outcome.COMMITTED] * 2
        await serves(s, 1, again.version)


@shows("publish:other-life")
async def _other_life(rig: Rig) -> None:
    async with rig.stand(2) as s, s.publisher() as p:
        await p.adopt(0)
        s.servers.restart(1)
        report = await failed(p, 1, s.weights(1))
        assert outcomes(report) == [Outcome.UNTOUCHED] * 2
        assert "in place of" in (report.receipts[1].error or "")
        assert s.sent("pause") == 0
        again = await p.publish(1, s.weights(1))
        assert outcomes(again) == [Outcome.COMMITTED] * 2
        assert again.version.attempt == 2


@shows("publish:asleep")
async def _asleep(rig: Rig) -> None:
    async with rig.stand(2, flags=rig.profile.sleeping) as s, s.publisher() as p:
        await p.adopt(0)
        await s.servers.sleep(1)
        report = await failed(p, 1, s.weights(1))
        assert outcomes(report) == [Outcome.UNTOUCHED] * 2
        assert "wake" in (report.receipts[1].error or "")
        assert s.sent("pause") == s.sent("begin") == 0


@shows("publish:paused")
async def _paused(rig: Rig) -> None:
    async with rig.stand(2) as s, s.publisher() as p:
        await p.adopt(0)
        await s.pause(1)
        with pytest.raises(genapi.FleetError, match="paused"):
            async with s.another() as other:
                await genapi.WeightPublisher(other, transport=s.carrier.sender()).adopt(0)
        report = await p.publish(1, s.weights(1))
        assert outcomes(report) == [Outcome.COMMITTED] * 2
        assert [w.paused for w in (await s.fleet.snapshot()).workers] == [False, False]
        await serves(s, 1, report.version)


@shows("publish:half")
async def _half(rig: Rig) -> None:
    async with rig.stand(2) as s, s.publisher() as p:
        await p.adopt(0)
        s.fail(1, "update", "never_answer")
        report = await failed(p, 1, s.weights(1))
        async with s.another() as other:
            workers = (await other.snapshot()).workers
            assert workers[1].label == report.version.updating_label
            assert workers[1].version is None
            with pytest.raises(genapi.FleetError, match="middle of an update"):
                await genapi.WeightPublisher(other, transport=s.carrier.sender()).adopt(0)


def watched(s: Stand, observe: Callable[[Event], None]) -> None:
    """Tell of every event, the administration's too."""
    s.fleet.observe = s.fleet.control.observe = observe


@shows("publish:cancelled")
async def _cancelled(rig: Rig) -> None:
    """Cancels at each event in turn, until a publication gets through."""
    for number in range(_CANCELLATIONS):
        async with rig.stand(2) as s, s.publisher() as p:
            adopted = await p.adopt(0)
            scope, seen = anyio.CancelScope(), [0]

            def observe(
                _: Event,
                scope: anyio.CancelScope = scope,
                seen: list[int] = seen,
                number: int = number,
            ) -> None:
                seen[0] += 1
                if seen[0] > number:
                    scope.cancel()

            watched(s, observe)
            with anyio.fail_after(20), scope:
                await p.publish(1, s.weights(1))
            await _one_version_or_fences(s, adopted.version, p.last_report)
            if seen[0] <= number:
                return
    raise AssertionError("no publication got through")


async def _one_version_or_fences(
    s: Stand, before: genapi.PolicyVersion, report: PublishReport | None
) -> None:
    if all(worker.fence is not None for worker in (await s.fleet.snapshot()).workers):
        return
    for reply in await s.everywhere():
        (span,) = reply.output.policy.spans
        assert span.lo in (before, report and report.version)
        s.check(span.lo != before, reply)


@shows("publish:checksum")
async def _checksum(rig: Rig) -> None:
    async with rig.stand(2) as s, s.publisher(verify=("checksum",)) as p:
        assert (await p.publish(1, s.weights(1))).committed
        other = s.weights(0)

        def observe(event: Event) -> None:
            if isinstance(event, PhaseStarted) and event.phase == "verify":
                s.servers.overwrite(1, s.carrier.tensors(1))

        watched(s, observe)
        report = await failed(p, 2, other)
        assert outcomes(report) == [Outcome.DIRTY] * 2
        assert [x.evidence for x in report.receipts] == [Evidence.OTHER_CHECKSUM] * 2
        assert s.asked("resume") == 2


@shows("publish:probe")
async def _probe(rig: Rig) -> None:
    async with rig.stand(2) as s, s.publisher(verify=("probe",)) as p:
        report = await p.publish(1, s.weights(1))
        assert [receipt.verified for receipt in report.receipts] == [("label", "probe")] * 2
        await serves(s, 1, report.version)


@shows("publish:restarter")
async def _restarter(rig: Rig) -> None:
    async with rig.stand(2) as s:
        restarted: list[str] = []

        async def restart(_worker: WorkerId, url: str) -> None:
            restarted.append(url)
            s.servers.restart(1)

        timeouts = s.carrier.timeouts.model_copy(update={"restart_s": 10.0})
        async with s.publisher(restarter=restart, timeouts=timeouts) as p:
            await p.adopt(0)
            s.servers.kill(1)
            report = await p.publish(1, s.weights(1))
            assert restarted == [s.url(1)]
            assert outcomes(report) == [Outcome.COMMITTED] * 2
            await serves(s, 1, report.version)
