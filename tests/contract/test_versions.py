"""Versions that stay true over embedded vLLM servers: intervals, `min_version`, `exact_version`."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import pytest

import genapi
from genapi import OffPolicyWindow, PolicyTrace, PolicyVersion, RetryPolicy
from genapi.embedded import Cluster
from genapi.events import AdminCalled, RequestRetried
from genapi.offpolicy import DropReason
from genapi.transports.memory import MemoryTransport
from tests.contract.embedded import Rig, greedy, request, rig, weights
from tests.support.spread import Spread

pytestmark = pytest.mark.anyio

SILENT = "0.31.0"
"""The last vLLM whose replies name no versions."""
SOON = RetryPolicy(backoff_s=0.001, max_backoff_s=0.002)
LONG = 1500
"""Tokens enough for a publication to happen meanwhile."""


def publisher_of(fleet: genapi.Fleet, **more: Any) -> genapi.WeightPublisher:
    return genapi.WeightPublisher(fleet, transport=genapi.weights.Memory(), **more)


async def publish(publisher: genapi.WeightPublisher, step: int) -> None:
    await publisher.publish(step, genapi.weights.from_tensors(weights(step)))


def steps(trace: PolicyTrace) -> list[tuple[int | None, int | None]]:
    return [(s.lo.step if s.lo else None, s.hi.step if s.hi else None) for s in trace.spans]


def inspections(r: Rig) -> int:
    return sum(isinstance(e, AdminCalled) and e.operation == "inspect" for e in r.events)


@asynccontextmanager
async def spread(
    workers: int, *, version: str = "0.32.0", routed: bool, **options: Any
) -> AsyncIterator[tuple[genapi.Fleet, Spread, list[genapi.events.Event]]]:
    """A ready fleet over workers with HTTP addresses, behind a router or not."""
    cluster = Cluster.from_query({"workers": str(workers), "version": version})
    carrier = Spread(cluster)
    events: list[genapi.events.Event] = []
    target = carrier.routed if routed else carrier.direct
    fleet = genapi.connect(target, transport=carrier, observe=events.append, **options)
    async with fleet:
        await fleet.wait_ready(timeout_s=5)
        yield fleet, carrier, events
    await carrier.aclose()


# intervals


@pytest.mark.case("VER-01")
@pytest.mark.parametrize("routed", [False, True])
async def test_a_reply_that_attests_nothing_may_be_of_any_version_from_before_it_to_after_it(
    routed: bool,
) -> None:
    async with spread(1, version=SILENT, routed=routed) as (fleet, _, _):
        publisher = publisher_of(fleet)
        await publisher.adopt(7)
        async with fleet.stream(request(tokens=LONG)) as events:
            await anext(events)
            await publish(publisher, 8)
            last = [event async for event in events][-1]
        assert isinstance(last, genapi.Finished)
        trace = last.reply.output.policy
        assert trace.source == "inferred"
        assert steps(trace) == [(7, 8)]
        assert len(trace) == LONG
        assert not trace.at(-1).is_attested
        assert trace.is_mixed
        assert not trace.is_pure
        assert trace.lag(8) == 1
        strict = OffPolicyWindow(max_lag=0)
        assert strict.judge(trace, consumer_version=8).reason is DropReason.STALE


@pytest.mark.parametrize("routed", [False, True])
async def test_without_a_publication_meanwhile_an_interval_has_one_version(routed: bool) -> None:
    async with spread(2, version=SILENT, routed=routed) as (fleet, _, _):
        publisher = publisher_of(fleet)
        await publisher.adopt(7)
        before = await fleet.generate(request())
        await publish(publisher, 8)
        after = await fleet.generate(request())
        assert steps(before.output.policy) == [(7, 7)]
        assert steps(after.output.policy) == [(8, 8)]
        assert after.output.policy.is_pure
        assert after.output.policy.source == "inferred"
        assert after.output.token_ids == greedy(8, [1, 2, 3], 8)


async def test_a_stream_and_a_call_date_their_replies_alike() -> None:
    async with rig(1, version=SILENT) as r:
        await publisher_of(r.fleet).adopt(7)
        whole = await r.fleet.generate(request())
        async with r.fleet.stream(request()) as events:
            last = [event async for event in events][-1]
        assert isinstance(last, genapi.Finished)
        assert last.reply.outputs == whole.outputs


async def test_a_fleet_that_does_not_publish_sees_the_versions_of_one_that_does() -> None:
    async with rig(2, version=SILENT) as r:
        publisher = publisher_of(r.fleet)
        await publisher.adopt(7)
        other = genapi.connect("embedded://", transport=MemoryTransport(r.cluster))
        async with other:
            await other.wait_ready(timeout_s=5)
            assert steps((await other.generate(request())).output.policy) == [(7, 7)]
            async with other.stream(request(tokens=LONG)) as events:
                await anext(events)
                await publish(publisher, 8)
                last = [event async for event in events][-1]
            assert isinstance(last, genapi.Finished)
            assert steps(last.reply.output.policy) == [(7, 8)]
            await other.snapshot()
            mine, theirs = [
                (await fleet.generate(request())).output.policy for fleet in (r.fleet, other)
            ]
            assert steps(mine) == steps(theirs) == [(8, 8)]


async def test_what_is_known_longer_than_refresh_s_is_read_again_before_a_request_goes() -> None:
    async with rig(1, version=SILENT) as r:
        publisher = publisher_of(r.fleet)
        await publisher.adopt(7)
        other = genapi.connect("embedded://", transport=MemoryTransport(r.cluster), refresh_s=1e-6)
        async with other:
            await other.wait_ready(timeout_s=5)
            await publish(publisher, 8)
            assert steps((await other.generate(request())).output.policy) == [(8, 8)]


async def test_labels_that_are_no_versions_leave_their_end_unknown() -> None:
    async with rig(1, version=SILENT) as r:
        fresh = (await r.fleet.generate(request())).output.policy
        assert steps(fresh) == [(None, None)]
        assert fresh.lag(0) is None
        await publisher_of(r.fleet).adopt(7)
        engine = r.cluster.workers[0].engine
        for label in ("genapi:another:9:1", "genapi:another:9:1!updating", "a/path"):
            await r.fleet.snapshot()
            known, engine.label = engine.label, label
            trace = (await r.fleet.generate(request())).output.policy
            engine.label = known
            assert steps(trace) == [(7, None)]
            assert trace.is_mixed


async def test_behind_a_router_the_workers_oldest_and_newest_versions_bound_a_reply() -> None:
    async with spread(2, version=SILENT, routed=True, run="r") as (fleet, carrier, _):
        first, second = (worker.engine for worker in carrier.cluster.workers)
        first.label, second.label = "genapi:r:7:1", "genapi:r:9:1"
        await fleet.snapshot()
        assert steps((await fleet.generate(request())).output.policy) == [(7, 9)]
        second.label = "default"
        assert steps((await fleet.generate(request())).output.policy) == [(7, None)]


async def test_a_worker_that_was_restarted_meanwhile_leaves_both_ends_unknown() -> None:
    async with spread(2, version=SILENT, routed=True, run="r") as (fleet, carrier, _):
        carrier.route = lambda _count: 0
        workers = carrier.cluster.workers
        for worker in workers:
            worker.engine.label = "genapi:r:7:1"
        await fleet.snapshot()
        async with fleet.stream(request(tokens=LONG)) as events:
            await anext(events)
            workers[1].restart()
            workers[1].engine.label = "genapi:r:7:1"
            last = [event async for event in events][-1]
        assert isinstance(last, genapi.Finished)
        assert steps(last.reply.output.policy) == [(None, None)]


async def test_replies_that_end_during_a_read_share_the_next_one() -> None:
    async with spread(1, version=SILENT, routed=False) as (fleet, carrier, events):
        await publisher_of(fleet).adopt(7)
        traces: list[PolicyTrace] = []

        async def ask() -> None:
            traces.append((await fleet.generate(request(tokens=1))).output.policy)

        def reads() -> int:
            return sum(isinstance(e, AdminCalled) and e.operation == "inspect" for e in events)

        before = reads()
        gate = carrier.gates["/health"] = anyio.Event()
        engine = carrier.cluster.workers[0].engine
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            with anyio.fail_after(5):
                while not carrier.held:
                    await anyio.lowlevel.checkpoint()
            for _ in range(200):
                group.start_soon(ask)
            with anyio.fail_after(20):
                while carrier.calls.count("/inference/v1/generate") < 201 or engine.requests:
                    await anyio.lowlevel.checkpoint()
            assert traces == []
            gate.set()
        assert len(traces) == 201
        assert {tuple(steps(trace)) for trace in traces} == {((7, 7),)}
        assert reads() - before == 2


async def test_a_read_that_does_not_come_leaves_the_versions_unknown() -> None:
    async with rig(1, version=SILENT, options={"admin_timeout_s": 0.3}) as r:
        await publisher_of(r.fleet).adopt(7)
        r.fail(0, "/weight_info", "never_answer")
        with anyio.fail_after(5):
            reply = await r.fleet.generate(request())
        assert steps(reply.output.policy) == [(None, None)]
        assert steps((await r.fleet.generate(request())).output.policy) == [(7, 7)]


async def test_a_reply_that_is_complete_is_returned_though_its_time_ends_before_the_read() -> None:
    async with rig(1, version=SILENT) as r:
        await publisher_of(r.fleet).adopt(7)
        r.fail(0, "/weight_info", "never_answer")
        with anyio.fail_after(5):
            reply = await r.fleet.generate(request(timeout_s=0.5))
        assert reply.output.is_complete
        assert steps(reply.output.policy) == [(None, None)]


async def test_closing_a_fleet_lets_replies_that_wait_for_a_read_go() -> None:
    async with spread(1, version=SILENT, routed=False) as (fleet, carrier, _):
        carrier.gates["/health"] = anyio.Event()
        replies: list[genapi.GenerateResponse] = []

        async def ask() -> None:
            replies.append(await fleet.generate(request()))

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            with anyio.fail_after(5):
                while not carrier.held:
                    await anyio.lowlevel.checkpoint()
                await fleet.aclose()
        assert steps(replies[0].output.policy) == [(None, None)]
        assert carrier.held == 0


async def test_a_reply_that_attests_its_versions_causes_no_read() -> None:
    async with rig(1) as r:
        await publisher_of(r.fleet).adopt(7)
        before = inspections(r)
        reply = await r.fleet.generate(request())
        assert reply.output.policy.source == "engine"
        assert steps(reply.output.policy) == [(7, 7)]
        assert inspections(r) == before


async def test_labels_of_base_weights_say_nothing_of_an_adapter() -> None:
    async with rig(1, version=SILENT) as r:
        await publisher_of(r.fleet).adopt(7)
        for bound in (request(lora="mine", min_version=7), request(lora="a", exact_version=7)):
            with pytest.raises(genapi.UnsupportedError, match="adapter"):
                await r.fleet.generate(bound)


async def test_turns_with_inferred_versions_join_into_one_trace() -> None:
    async with rig(1, version=SILENT) as r:
        publisher = publisher_of(r.fleet)
        await publisher.adopt(7)
        first = await r.fleet.generate(request())
        asked = request(tokens=LONG)
        async with r.fleet.stream(asked) as events:
            await anext(events)
            await publish(publisher, 8)
            last = [event async for event in events][-1]
        assert isinstance(last, genapi.Finished)
        third = await r.fleet.generate(request())
        turns = [reply.output.policy for reply in (first, last.reply, third)]
        trace = PolicyTrace.join(turns)
        assert steps(trace) == [(7, 7), (7, 8), (8, 8)]
        assert len(trace) == 8 + LONG + 8
        assert trace.source == "inferred"
        assert (trace.lag(9), PolicyTrace.join(turns[2:]).lag(9)) == (2, 1)
        engine_turn = turns[0].model_copy(update={"source": "engine"})
        assert PolicyTrace.join([engine_turn, turns[1]]).source == "inferred"


# min_version, exact_version


@pytest.mark.parametrize("version", [SILENT, "0.32.0"])
@pytest.mark.parametrize("routed", [False, True])
async def test_a_bound_that_is_held_already_is_met_at_once(version: str, routed: bool) -> None:
    async with spread(2, version=version, routed=routed) as (fleet, _, _):
        publisher = publisher_of(fleet)
        report = await publisher.adopt(7)
        bounds: list[dict[str, Any]] = [
            {"min_version": 6},
            {"min_version": 7},
            {"exact_version": 7},
            {"min_version": report.version, "exact_version": report.version},
        ]
        for bound in bounds:
            reply = await fleet.generate(request(**bound))
            assert steps(reply.output.policy) == [(7, 7)]
            assert len(reply.attempts) == 1


@pytest.mark.parametrize("version", [SILENT, "0.32.0"])
@pytest.mark.parametrize("field", ["min_version", "exact_version"])
@pytest.mark.parametrize("routed", [False, True])
async def test_a_request_waits_for_the_publication_of_its_version(
    version: str, field: str, routed: bool
) -> None:
    async with spread(2, version=version, routed=routed) as (fleet, carrier, _):
        publisher = publisher_of(fleet)
        await publisher.adopt(7)
        bound: dict[str, Any] = {field: 8}
        replies: list[genapi.GenerateResponse] = []

        async def ask() -> None:
            replies.append(await fleet.generate(request(**bound)))

        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(ask)
            await fleet.generate(request())
            assert carrier.calls.count("/inference/v1/generate") == 1
            with anyio.fail_after(10):
                await publish(publisher, 8)
        assert len(replies) == 5
        for reply in replies:
            assert steps(reply.output.policy) == [(8, 8)]
            assert reply.output.token_ids == greedy(8, [1, 2, 3], 8)
            assert len(reply.attempts) == 1


async def test_waiting_for_a_version_takes_no_slot_from_others() -> None:
    async with rig(1, options={"max_in_flight": 1}) as r:
        publisher = publisher_of(r.fleet)
        await publisher.adopt(7)
        async with anyio.create_task_group() as group:
            group.start_soon(r.fleet.generate, request(min_version=8))
            with anyio.fail_after(5):
                await r.fleet.generate(request())
                await publish(publisher, 8)


async def test_a_fleet_that_does_not_publish_notices_a_publication_by_reading_again() -> None:
    async with rig(2) as r:
        publisher = publisher_of(r.fleet)
        await publisher.adopt(7)
        other = genapi.connect("embedded://", transport=MemoryTransport(r.cluster), refresh_s=0.01)
        async with other, anyio.create_task_group() as group:
            await other.wait_ready(timeout_s=5)
            replies: list[genapi.GenerateResponse] = []

            async def ask() -> None:
                replies.append(await other.generate(request(min_version=8)))

            group.start_soon(ask)
            await publish(publisher, 8)
        assert steps(replies[0].output.policy) == [(8, 8)]


@pytest.mark.parametrize("routed", [False, True])
async def test_a_version_that_does_not_come_in_time_is_named_with_what_was_seen(
    routed: bool,
) -> None:
    async with spread(2, routed=routed) as (fleet, _, _):
        await publisher_of(fleet).adopt(7)
        with anyio.fail_after(5), pytest.raises(genapi.StalePolicyError) as caught:
            await fleet.generate(request(min_version=8, timeout_s=0.05))
        for part in ("min_version=8", "timeout_s=0.05", "http://w0:1 holds 'genapi:", ":7:1'"):
            assert part in str(caught.value)


@pytest.mark.parametrize("field", ["min_version", "exact_version"])
@pytest.mark.parametrize("routed", [False, True])
async def test_whoever_waits_for_more_than_a_closed_publisher_made_is_refused(
    field: str, routed: bool
) -> None:
    bound: dict[str, Any] = {field: 9}
    errors: list[genapi.StalePolicyError] = []
    async with spread(2, routed=routed, run="r") as (fleet, _, _):

        async def ask() -> None:
            with pytest.raises(genapi.StalePolicyError) as caught:
                await fleet.generate(request(**bound))
            errors.append(caught.value)

        with anyio.fail_after(10):
            async with anyio.create_task_group() as group, publisher_of(fleet) as publisher:
                await publish(publisher, 7)
                group.start_soon(ask)
                await publish(publisher, 8)
                assert (await fleet.snapshot()).final is None
            await ask()  # also who comes later
        assert (await fleet.snapshot()).final == PolicyVersion(run="r", step=8)
        assert len(errors) == 2
        for error in errors:
            for part in (f"{field}=9", "will not come", "ended with genapi:r:8:1", "Publish it"):
                assert part in str(error)
        assert steps((await fleet.generate(request(min_version=8))).output.policy) == [(8, 8)]


async def test_another_publisher_of_the_fleet_takes_the_end_away() -> None:
    async with rig(1) as r:
        async with publisher_of(r.fleet) as first:
            await publish(first, 7)
        async with anyio.create_task_group() as group, publisher_of(r.fleet) as second:
            await second.adopt(7)
            group.start_soon(r.fleet.generate, request(min_version=8))
            with anyio.fail_after(5):
                await publish(second, 8)


async def _nothing(_: genapi.WeightPublisher) -> None:
    """The block ends as it should."""


async def _an_error(_: genapi.WeightPublisher) -> None:
    raise ZeroDivisionError


async def _a_refused_publication(publisher: genapi.WeightPublisher) -> None:
    with pytest.raises(genapi.ConfigError):
        await publish(publisher, 6)


async def _a_hand_over(publisher: genapi.WeightPublisher) -> None:
    await publisher.aclose(final=False)


@pytest.mark.parametrize(
    ("last", "begun"),
    [
        (_an_error, True),
        (_a_refused_publication, True),
        (_a_hand_over, True),
        (_nothing, False),
    ],
    ids=["error", "not_committed", "handed_over", "only_adopted"],
)
async def test_a_publisher_that_ends_otherwise_is_no_end(
    last: Callable[[genapi.WeightPublisher], Awaitable[None]], begun: bool
) -> None:
    async with rig(1) as r:
        with suppress(ZeroDivisionError):
            async with publisher_of(r.fleet) as publisher:
                await publisher.adopt(6)
                if begun:
                    await publish(publisher, 7)
                await last(publisher)
        with pytest.raises(genapi.StalePolicyError, match=r"within timeout_s=0\.05"):
            await r.fleet.generate(request(min_version=9, timeout_s=0.05))
        assert (await r.fleet.snapshot()).final is None


async def test_a_publisher_that_closes_before_another_of_its_fleet_is_no_end() -> None:
    async with rig(1) as r:
        first, second = publisher_of(r.fleet), publisher_of(r.fleet)
        await publish(first, 7)
        await publish(second, 8)
        await first.aclose()
        assert (await r.fleet.snapshot()).final is None
        await second.aclose()
        final = (await r.fleet.snapshot()).final
        assert final is not None
        assert final.step == 8


async def test_an_exact_version_means_its_attempt_too_and_a_step_means_any() -> None:
    async with rig(1, options={"run": "r"}) as r:
        r.cluster.workers[0].engine.label = "genapi:r:7:2"
        await r.fleet.snapshot()
        second = PolicyVersion(run="r", step=7, attempt=2)
        for bound in (7, second):
            reply = await r.fleet.generate(request(exact_version=bound))
            assert reply.output.policy.oldest == second
        with anyio.fail_after(5), pytest.raises(genapi.StalePolicyError, match="attempt 1"):
            await r.fleet.generate(request(exact_version=PolicyVersion(run="r", step=7)))
        later = PolicyVersion(run="r", step=7, attempt=3)
        with pytest.raises(genapi.StalePolicyError, match="timeout_s"):
            await r.fleet.generate(request(exact_version=later, timeout_s=0.05))
        reply = await r.fleet.generate(request(min_version=later))
        assert reply.output.policy.oldest == second


async def test_a_request_goes_only_to_workers_whose_label_meets_it() -> None:
    async with rig(3, options={"run": "r"}) as r:
        for worker, step in zip(r.cluster.workers, (7, 8, 9), strict=True):
            worker.engine.label = f"genapi:r:{step}:1"
        ids = [str(worker.id) for worker in (await r.fleet.snapshot()).workers]
        cases: list[tuple[dict[str, Any], set[str]]] = [
            ({"exact_version": 8}, {ids[1]}),
            ({"min_version": 8}, {ids[1], ids[2]}),
            ({"min_version": 8, "exact_version": 9}, {ids[2]}),
        ]
        for bound, allowed in cases:
            for session in range(6):
                reply = await r.fleet.generate(request(session=str(session), **bound))
                assert str(reply.worker) in allowed


@pytest.mark.parametrize("version", [SILENT, "0.32.0"])
async def test_a_router_is_asked_again_until_its_reply_is_of_the_version(version: str) -> None:
    async with spread(2, version=version, routed=True, run="r", retry=SOON) as (
        fleet,
        carrier,
        events,
    ):
        for worker, step in zip(carrier.cluster.workers, (7, 8), strict=True):
            worker.engine.label = f"genapi:r:{step}:1"
        await fleet.snapshot()
        asked = request(min_version=8, timeout_s=0.1 if version == SILENT else 5)
        if version == SILENT:
            # Either worker may make a reply that names nobody, so none is asked for.
            sent = carrier.calls.count("/inference/v1/generate")
            with pytest.raises(genapi.StalePolicyError, match="http://w0:1 holds 'genapi:r:7:1'"):
                await fleet.generate(asked)
            assert carrier.calls.count("/inference/v1/generate") == sent
            return
        with anyio.fail_after(5):
            reply = await fleet.generate(asked)
        assert steps(reply.output.policy) == [(8, 8)]
        first, second = reply.attempts
        assert "genapi:r:7:1" in str(first.error)
        assert second.error is None
        assert sum(isinstance(e, RequestRetried) for e in events) == 1


@pytest.mark.parametrize("version", [SILENT, "0.32.0"])
async def test_a_kept_request_that_straddles_an_update_is_not_of_one_exact_version(
    version: str,
) -> None:
    async with rig(1, version=version, options={"retry": SOON}) as r:
        publisher = publisher_of(r.fleet)
        await publisher.adopt(7)
        errors: list[genapi.StalePolicyError] = []
        replies: list[genapi.GenerateResponse] = []

        async def exact() -> None:
            try:
                await r.fleet.generate(request(tokens=LONG, exact_version=7))
            except genapi.StalePolicyError as error:
                errors.append(error)

        async def least() -> None:
            replies.append(await r.fleet.generate(request(tokens=LONG, min_version=7)))

        async with anyio.create_task_group() as group:
            group.start_soon(exact)
            group.start_soon(least)
            engine = r.cluster.workers[0].engine
            with anyio.fail_after(5):
                while engine.num_running < 2:
                    await anyio.lowlevel.checkpoint()
                await publish(publisher, 8)
        assert "any more" in str(errors[0])
        arrays = replies[0].output.policy.arrays()
        assert (arrays.lo.min(), arrays.hi.max()) == (7, 8)


async def test_a_stream_whose_tokens_do_not_meet_the_bound_ends_in_an_error() -> None:
    async with rig(1) as r:
        publisher = publisher_of(r.fleet)
        await publisher.adopt(7)
        seen: list[object] = []
        async with r.fleet.stream(request(tokens=LONG, exact_version=7)) as events:
            seen.append(await anext(events))
            await publish(publisher, 8)
            with pytest.raises(genapi.StalePolicyError, match="handed out"):
                seen += [event async for event in events]
        assert isinstance(seen[0], genapi.TokenChunk)


async def test_a_step_needs_a_run_and_the_labels_name_it_when_they_agree() -> None:
    async with rig(2) as r:
        first, second = (worker.engine for worker in r.cluster.workers)
        first.label, second.label = "genapi:a:7:1", "genapi:b:7:1"
        await r.fleet.snapshot()
        with pytest.raises(genapi.ConfigError, match="run="):
            await r.fleet.generate(request(min_version=7))
        of_b = request(exact_version=PolicyVersion(run="b", step=7))
        reply = await r.fleet.generate(of_b)
        assert reply.output.policy.oldest == PolicyVersion(run="b", step=7)
        second.label = "genapi:a:7:1"
        await r.fleet.snapshot()
        assert (await r.fleet.generate(request(exact_version=7))).output.policy.is_mixed is False


async def test_a_version_of_another_run_than_the_fleets_is_refused_before_anything_is_sent() -> (
    None
):
    async with spread(1, routed=False, run="r") as (fleet, carrier, _):
        sent = len(carrier.calls)
        with pytest.raises(genapi.ConfigError, match="run 'b'"):
            await fleet.generate(request(min_version=PolicyVersion(run="b", step=1)))
        assert len(carrier.calls) == sent


@pytest.mark.parametrize("version", [SILENT, "0.32.0"])
async def test_where_labels_cannot_be_read_only_replies_that_attest_can_meet_a_bound(
    version: str,
) -> None:
    async with rig(1, version=version, dev_mode="false", options={"run": "r", "retry": SOON}) as r:
        r.cluster.workers[0].engine.label = "genapi:r:7:1"
        if version == SILENT:
            with pytest.raises(genapi.UnsupportedError, match="VLLM_SERVER_DEV_MODE"):
                await r.fleet.generate(request(min_version=7))
            assert steps((await r.fleet.generate(request())).output.policy) == [(None, None)]
            return
        reply = await r.fleet.generate(request(min_version=7))
        assert steps(reply.output.policy) == [(7, 7)]
        for timeout_s, said in ((1.0, "timeout_s=1"), (None, "3 replies")):
            with pytest.raises(genapi.StalePolicyError, match="genapi:r:7:1") as caught:
                await r.fleet.generate(request(min_version=8, timeout_s=timeout_s))
            assert said in str(caught.value)
