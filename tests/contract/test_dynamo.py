"""What a fleet behind a Dynamo frontend promises, over an embedded deployment."""

import asyncio
import gc
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import anyio
import pytest

import genapi
from genapi import (
    ConfigError,
    Finished,
    FinishReason,
    FleetError,
    GenerateResponse,
    NotReadyError,
    PublishError,
    StalePolicyError,
    TokenChunk,
    UnsupportedError,
)
from genapi.embedded import Cluster
from genapi.transports.memory import MemoryTransport
from genapi.types.config import Topology
from genapi.types.ids import Role
from genapi.types.worker import Evidence, Outcome, Recovery
from genapi.weights import Memory, from_tensors
from genapi.wire.http import HTTPCall, HTTPReply, json_body
from tests.contract.dynamo import UPDATE, Deployment, bounds, deployed, instance, until, version
from tests.contract.embedded import QUICK, greedy, request, weights

FAMILIES = pytest.mark.parametrize("family", ["vllm", "sidecar", "collective"])


@FAMILIES
async def test_a_publication_reaches_every_worker_and_every_reply_says_its_version(
    family: str,
) -> None:
    async with deployed(family=family) as d, d.publisher() as publisher:
        first = await publisher.adopt(0)
        assert [r.outcome for r in first.receipts] == [Outcome.COMMITTED] * 2
        before = await d.fleet.generate(request())
        assert bounds(before) == (version(0), version(0))
        assert before.output.policy.source == "inferred"

        report = await publisher.publish(3, from_tensors(weights(3)))
        assert report.committed
        assert {r.worker.instance for r in report.receipts} == {d.id(0), d.id(1)}
        assert all(r.evidence is Evidence.OWN_LABEL and r.bytes_sent > 0 for r in report.receipts)
        after = [await d.fleet.generate(request()) for _ in range(4)]
        assert all(reply.output.token_ids == greedy(3, [1, 2, 3], 8) for reply in after)
        assert all(bounds(reply) == (version(3), version(3)) for reply in after)
        assert all(reply.output.policy.is_pure for reply in after)
        assert {instance(reply.worker) for reply in after} == {d.id(0), d.id(1)}


async def test_a_reply_names_its_worker_as_the_fleet_does() -> None:
    async with deployed() as d:
        reply = await d.fleet.generate(request())
        known = {w.id for w in (await d.fleet.snapshot()).workers}
        assert reply.worker in known
        assert reply.worker is not None
        assert (reply.worker.namespace, reply.worker.component) == ("dynamo", "backend")
        assert reply.attempts[-1].worker == reply.worker
        assert int(reply.worker.instance) >= 2**63


async def test_requests_are_not_pinned_while_everybody_serves_and_carry_the_versions_salt() -> None:
    async with deployed() as d:
        await d.publish(1)
        await d.fleet.generate(request(cache_salt="mine"))
        nvext = d.sent()[-1]["nvext"]
        assert nvext["cache_salt"] == "genapi:r:1:1|mine"
        assert nvext.keys() == {"extra_fields", "cache_salt"}


async def test_a_request_in_flight_through_a_publication_has_an_interval_of_both_versions() -> None:
    async with deployed() as d:
        await d.publish(1)
        replies: list[GenerateResponse] = []
        ask = partial(collect, d, request(tokens=300), replies)
        await d.publish_under(2, [ask], lambda: running(d))
        assert bounds(replies[0]) == (version(1), version(2))
        assert len(replies[0].output.token_ids) == 300
        assert not replies[0].output.policy.is_pure


async def collect(d: Deployment, asked: Any, into: list[GenerateResponse]) -> None:
    into.append(await d.fleet.generate(asked))


def running(d: Deployment) -> bool:
    return any(worker.engine.num_running for worker in d.workers)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_pause_that_aborts_is_an_abort_though_the_engine_calls_it_a_stop(
    streams: bool,
) -> None:
    async with deployed() as d:
        await d.publish(1)
        replies: list[GenerateResponse] = []

        async def ask() -> None:
            if not streams:
                replies.append(await d.fleet.generate(request(tokens=500)))
                return
            async with d.fleet.stream(request(tokens=500)) as events:
                replies.extend([e.reply async for e in events if isinstance(e, Finished)])

        await d.publish_under(2, [ask], lambda: running(d), mode="abort")
        out = replies[0].output
        assert (out.finish_reason, out.finish_raw) == (FinishReason.ABORT, "stop")
        assert not out.is_complete
        assert 0 < len(out.token_ids) < 500
        assert bounds(replies[0]) == (version(1), version(2))


async def test_a_stop_under_any_other_pause_is_a_stop() -> None:
    async with deployed() as d:
        await d.publish(1)
        stop = greedy(1, [1, 2, 3], 60)
        asked = request(tokens=60).model_copy(
            update={
                "sampling": genapi.SamplingParams(
                    max_tokens=60, temperature=0.0, stop_token_ids=(stop[-1],)
                )
            }
        )
        replies: list[GenerateResponse] = []
        await d.publish_under(2, [partial(collect, d, asked, replies)], lambda: running(d))
        if replies[0].output.finish_raw == "stop":
            assert replies[0].output.finish_reason is FinishReason.STOP
        reply = await d.fleet.generate(asked)
        assert reply.output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


async def test_an_abort_before_any_token_is_an_abort_too() -> None:
    async with deployed(1, max_num_seqs="1") as d:
        await d.publish(1)
        replies: list[GenerateResponse] = []
        asks = [partial(collect, d, request(tokens=tokens), replies) for tokens in (400, 10)]
        one_waits = lambda: d.workers[0].engine.num_waiting == 1  # noqa: E731
        await d.publish_under(2, asks, one_waits, mode="abort")
        assert {r.output.finish_reason for r in replies} == {FinishReason.ABORT}
        assert min(len(r.output.token_ids) for r in replies) == 0


# prefill and decode


@pytest.mark.parametrize("mode", ["drain", "abort"])
async def test_prefill_and_decode_workers_are_both_in_every_publication(mode: Any) -> None:
    async with deployed(4, prefill="2") as d:
        roles = [w.role for w in (await d.fleet.snapshot()).workers]
        assert roles == [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE]
        async with d.publisher(mode=mode) as publisher:
            report = await publisher.publish(1, from_tensors(weights(1)))
        assert len(report.receipts) == 4
        assert report.committed
        reply = await d.fleet.generate(request())
        assert reply.output.token_ids == greedy(1, [1, 2, 3], 8)
        assert instance(reply.worker) in {d.id(0), d.id(1)}
        assert instance(reply.prefill_worker) in {d.id(2), d.id(3)}
        assert reply.prefill_worker is not None
        assert reply.prefill_worker.component == "prefill"
        assert bounds(reply) == (version(1), version(1))


async def test_frozen_requests_between_workers_cannot_be_made_to_recompute() -> None:
    async with deployed(2, prefill="1") as d:
        with pytest.raises(PublishError, match="keys and values on their way"):
            await d.publish(1)
        assert {w.engine.label for w in d.workers} == {"default"}


async def test_an_old_prefill_worker_makes_a_reply_old() -> None:
    async with deployed(2, prefill="1") as d:
        await d.publish(1, mode="drain")
        decode = next(
            m for m in d.fleet.membership.members.values() if m.facts and not m.is_prefill
        )
        _, body = await relabel(d, decode.url, "genapi:r:2:1")
        assert body["status"] == "ok"
        await d.fleet.snapshot()
        reply = await d.fleet.generate(request())
        lo, hi = bounds(reply)
        assert (lo, hi) == (version(1), version(2))
        assert not reply.output.policy.is_pure


async def test_a_prefill_worker_that_was_restarted_prefills_for_nobody() -> None:
    async with deployed(4, prefill="2") as d:
        await d.publish(1, mode="drain")
        d.workers[3].restart()
        await d.fleet.snapshot()
        replies = [await d.fleet.generate(request()) for _ in range(6)]
        assert {instance(reply.prefill_worker) for reply in replies} == {d.id(2)}
        assert all(body["nvext"]["prefill_worker_id"] == int(d.id(2)) for body in d.sent()[-6:])
        d.workers[2].restart()
        await d.fleet.snapshot()
        with pytest.raises(FleetError, match="no prefill worker may get traffic"):
            await d.fleet.generate(request())


async def relabel(d: Deployment, url: str, label: str) -> tuple[int, Any]:
    """Set a label behind the fleet's back."""
    call = HTTPCall(
        method="POST", path="/engine/set_weight_version", body=json_body({"weight_version": label})
    )
    reply = await d.calls.send(url, call)
    return reply.status, reply.json()


# workers that come and go


async def test_a_replacement_gets_no_traffic_until_it_was_published_to() -> None:
    async with deployed() as d:
        await d.publish(1)
        d.workers[1].restart()
        await d.fleet.snapshot()
        replies = [await d.fleet.generate(request()) for _ in range(6)]
        assert {instance(reply.worker) for reply in replies} == {d.id(0)}
        assert all(reply.output.token_ids == greedy(1, [1, 2, 3], 8) for reply in replies)
        assert all(body["nvext"]["backend_instance_id"] == int(d.id(0)) for body in d.sent()[-6:])
        fences = {w.id.instance: w.fence for w in (await d.fleet.snapshot()).workers}
        fence = fences[d.id(1)]
        assert fence is not None
        assert fence.recovery is Recovery.REPUBLISH

        await d.publish(2)
        replies = [await d.fleet.generate(request()) for _ in range(6)]
        assert {instance(reply.worker) for reply in replies} == {d.id(0), d.id(1)}


async def test_a_reply_of_a_replacement_that_nobody_knew_is_not_handed_out() -> None:
    errors: list[str] = []
    for turn in range(2):  # whoever has its turn next: one of the two is the replacement
        async with deployed(options={"refresh_s": 1000.0}) as d:
            await d.publish(1)
            for _ in range(turn):
                await d.fleet.generate(request())
            d.workers[1].restart()
            replies = [await d.fleet.generate(request()) for _ in range(4)]
            assert {instance(reply.worker) for reply in replies} == {d.id(0)}
            assert all(reply.output.token_ids == greedy(1, [1, 2, 3], 8) for reply in replies)
            errors += [a.error for reply in replies for a in reply.attempts if a.error]
    assert len(errors) == 1
    assert "was restarted" in errors[0]


@pytest.mark.parametrize("streams", [False, True])
async def test_a_request_of_a_killed_worker_fails_typed_and_the_others_go_on(
    streams: bool,
) -> None:
    retry = genapi.RetryPolicy(max_attempts=1)
    async with deployed(options={"retry": retry}) as d:
        await d.publish(1)
        outcomes: dict[int, Any] = {}

        async def ask(number: int) -> None:
            try:
                if not streams:
                    outcomes[number] = await d.fleet.generate(request(tokens=1500))
                    return
                async with d.fleet.stream(request(tokens=1500)) as events:
                    async for event in events:
                        if isinstance(event, Finished):
                            outcomes[number] = event.reply
            except NotReadyError as error:
                outcomes[number] = error

        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(ask, number)
            await until(lambda: all(w.engine.num_running == 2 for w in d.workers))
            d.workers[1].kill()
        failed = [o for o in outcomes.values() if isinstance(o, NotReadyError)]
        whole = [o for o in outcomes.values() if isinstance(o, GenerateResponse)]
        assert (len(failed), len(whole)) == (2, 2)
        assert {instance(reply.worker) for reply in whole} == {d.id(0)}
        assert all(bounds(reply) == (version(1), version(1)) for reply in whole)
        assert all((error.partial is not None) == streams for error in failed)


async def test_a_killed_worker_is_not_asked_while_its_lease_lives() -> None:
    async with deployed() as d:
        await d.publish(1)
        d.workers[1].kill()
        replies = [await d.fleet.generate(request()) for _ in range(6)]
        assert {instance(reply.worker) for reply in replies} == {d.id(0)}
        dead = [w for w in (await d.fleet.snapshot()).workers if not w.healthy]
        assert [w.id.instance for w in dead] == [d.id(1)]


async def test_a_change_of_the_list_is_confirmed_once() -> None:
    async with deployed() as d:

        async def reads_of_a_snapshot() -> int:
            before = lists_read(d)
            await d.fleet.snapshot()
            return lists_read(d) - before

        assert await reads_of_a_snapshot() == 1
        d.workers[1].kill()  # it is listed with an error from now on
        assert [await reads_of_a_snapshot() for _ in range(3)] == [2, 1, 1]
        await d.cluster.clock.sleep(30)  # and then no more
        assert [await reads_of_a_snapshot() for _ in range(2)] == [1, 1]
        d.workers[1].restart()
        assert [await reads_of_a_snapshot() for _ in range(2)] == [2, 1]
        assert len((await d.fleet.snapshot()).workers) == 2


async def test_a_worker_whose_lease_ended_is_no_member_any_more() -> None:
    async with deployed() as d:
        await d.publish(1)
        gone = d.id(1)
        d.workers[1].kill()
        await d.cluster.clock.sleep(30)
        snapshot = await d.fleet.snapshot()
        assert gone not in {w.id.instance for w in snapshot.workers}
        reply = await d.fleet.generate(request())
        assert bounds(reply) == (version(1), version(1))
        await d.publish(2)


async def test_a_migrated_reply_is_marked_and_of_unknown_versions() -> None:
    async with deployed(migration_limit="3") as d:
        await d.publish(1)
        replies: list[GenerateResponse] = []

        async def kill_while_it_runs() -> None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(collect, d, request(tokens=100), replies)
                await until(lambda: running(d))
                busy = next(w for w in d.workers if w.engine.num_running)
                await until(lambda: len(busy.engine.requests[0].tracks[0].output) > 20)
                busy.kill()

        with pytest.warns(genapi.GenAPIWarning, match="moved the request to another worker"):
            await kill_while_it_runs()
        out = replies[0].output
        assert out.extra["migrated"] is True
        assert replies[0].worker is None
        assert out.policy.is_mixed
        assert out.policy.lag(1) is None


async def test_a_pinned_request_is_never_migrated() -> None:
    retry = genapi.RetryPolicy(max_attempts=1)
    async with deployed(3, migration_limit="3", options={"retry": retry}) as d:
        await d.publish(1)
        d.workers[2].restart()
        await d.fleet.snapshot()
        errors: list[Exception] = []

        async def ask() -> None:
            try:
                await d.fleet.generate(request(tokens=400))
            except NotReadyError as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(lambda: running(d))
            next(w for w in d.workers if w.engine.num_running).kill()
        assert len(errors) == 1


async def test_a_worker_that_joined_is_in_the_next_publication() -> None:
    async with deployed(3, options={"refresh_s": 1000.0}) as d:
        d.workers[2].kill()
        await d.cluster.clock.sleep(30)
        assert len((await d.fleet.snapshot()).workers) == 2
        await d.publish(1)
        d.workers[2].restart()
        async with d.publisher() as publisher:
            report = await publisher.publish(2, from_tensors(weights(2)))
        assert {r.worker.instance for r in report.receipts} == {d.id(n) for n in range(3)}


async def test_the_workers_that_have_to_serve_are_those_that_are_listed_however_early() -> None:
    def publisher(fleet: genapi.Fleet, least: int) -> genapi.WeightPublisher:
        return genapi.WeightPublisher(
            fleet, transport=Memory(), on_partial="serve", min_workers=least, timeouts=QUICK
        )

    target = "embedded://?protocol=dynamo&workers=2"
    async with genapi.connect(target) as fleet, publisher(fleet, 2) as p:
        assert (await p.publish(1, from_tensors(weights(1)))).committed
    async with genapi.connect(target) as fleet, publisher(fleet, 3) as p:
        with pytest.raises(FleetError, match="2 workers are listed, and min_workers=3"):
            await p.publish(1, from_tensors(weights(1)))


async def test_fewer_than_have_to_serve_are_no_mistake_of_the_user_whenever_one_leaves() -> None:
    serve: dict[str, Any] = {"on_partial": "serve", "min_workers": 2}
    async with deployed(2) as d:
        await d.publish(1, **serve)
        d.workers[1].kill()

        async def restart(_worker: Any, _url: str) -> None:
            await d.cluster.clock.sleep(30)  # its lease ends, and it is listed no more
            raise OSError("nothing to start it on")

        for restarter in (restart, None):
            with pytest.raises(FleetError, match="1 workers are listed, and min_workers=2"):
                await d.publish(2, **serve, restarter=restarter)
        assert d.workers[0].engine.label == "genapi:r:1:1"


async def test_nothing_is_published_to_less_than_the_expected_topology() -> None:
    expect = Topology(workers=2)
    async with deployed(2, options={"expect": expect}) as d:
        await d.publish(1)
        d.workers[1].kill()
        await d.cluster.clock.sleep(30)
        with pytest.raises(FleetError, match="1 of 2 workers seen"):
            await d.publish(2)
        assert d.workers[0].engine.label == "genapi:r:1:1"
        await d.publish(2, on_partial="serve", min_workers=1)


async def test_a_restarter_brings_a_broken_worker_back_at_its_address() -> None:
    async with deployed() as d:
        await d.publish(1)

        async def restart(worker: Any, url: str) -> None:
            assert url == "memory://3"
            assert worker.instance == d.id(1)
            d.workers[1].restart()

        rejected = '{"status":"error","message":"Attempted to load weight"}'
        d.fail(1, UPDATE, "error", nth=3, status=200, body=rejected)
        async with d.publisher(restarter=restart) as publisher:
            report = await publisher.publish(2, from_tensors(weights(2)))
        assert report.committed
        reply = await d.fleet.generate(request())
        assert reply.output.token_ids == greedy(2, [1, 2, 3], 8)


async def stand_by(d: Deployment, *numbers: int) -> None:
    """Take workers away, to be started elsewhere in place of others."""
    for number in numbers:
        d.workers[number].kill()
    await d.cluster.clock.sleep(30)
    await d.fleet.snapshot()


def lists_read(d: Deployment) -> int:
    """How often the list of workers was read."""
    return sum(path == "/v1/rl/workers" for _, path, _ in d.calls.calls)


async def test_a_worker_that_is_restarted_at_another_address_is_found_and_published_to() -> None:
    async with deployed(3) as d:
        await stand_by(d, 2)
        await d.publish(1)
        gone = d.id(1)

        async def restart(worker: Any, url: str) -> None:
            assert (worker.instance, url) == (gone, "memory://3")
            d.workers[2].restart()

        d.workers[1].kill()
        async with d.publisher(restarter=restart) as publisher, anyio.create_task_group() as tasks:

            async def end_its_lease() -> None:
                # Both are listed for a while: the new one, and the old one with an error.
                await until(lambda: lists_read(d) > seen + 2)
                await d.cluster.clock.sleep(30)

            seen = lists_read(d)
            tasks.start_soon(end_its_lease)
            report = await publisher.publish(2, from_tensors(weights(2)))
        assert report.committed
        assert {r.worker.instance for r in report.receipts} == {d.id(0), d.id(2)}
        replies = [await d.fleet.generate(request()) for _ in range(4)]
        assert {instance(reply.worker) for reply in replies} == {d.id(0), d.id(2)}
        assert all(reply.output.token_ids == greedy(2, [1, 2, 3], 8) for reply in replies)


async def test_of_several_that_are_restarted_elsewhere_each_has_a_successor_of_its_own() -> None:
    async with deployed(5) as d:
        await stand_by(d, 3, 4)
        await d.publish(1)
        for number in (1, 2):
            d.workers[number].kill()
        asked: list[str] = []

        async def restart(_worker: Any, url: str) -> None:
            asked.append(url)
            if len(asked) == 1:
                await d.cluster.clock.sleep(30)
                d.workers[3].restart()
                return
            await until(lambda: lists_read(d) > seen + 4)
            d.workers[4].restart()  # long after the other one was found

        seen = lists_read(d)
        async with d.publisher(restarter=restart) as publisher:
            report = await publisher.publish(2, from_tensors(weights(2)))
        assert sorted(asked) == ["memory://3", "memory://4"]
        assert {r.worker.instance for r in report.receipts} == {d.id(n) for n in (0, 3, 4)}


async def test_a_restarted_worker_has_no_successor_in_one_of_another_component() -> None:
    async with deployed(5, prefill="2") as d:  # the last two prefill
        await stand_by(d, 2)
        await d.publish(1, mode="drain")
        d.workers[4].kill()

        async def restart(_worker: Any, _url: str) -> None:
            await d.cluster.clock.sleep(30)
            d.workers[2].restart()  # decodes

        limits = QUICK.model_copy(update={"restart_s": 1.5})
        with pytest.raises(FleetError, match=r"restart_s=1.5: nobody is .* memory://4 is none"):
            await d.publish(2, mode="drain", restarter=restart, timeouts=limits)
        assert d.workers[0].engine.label == "genapi:r:1:1"


@pytest.mark.parametrize(
    ("leaves", "lacks"),
    [
        (True, "nobody is listed at memory://3 or came in its place since"),
        (False, "it is listed there still, and the old process still answers at memory://3"),
    ],
)
async def test_an_error_says_why_nobody_is_known_for_a_restarted_worker(
    leaves: bool, lacks: str
) -> None:
    async with deployed() as d:
        await d.publish(1)
        rejected = '{"status":"error","message":"Attempted to load weight"}'
        d.fail(1, UPDATE, "error", nth=3, status=200, body=rejected)
        with pytest.raises(PublishError):
            await d.publish(2)

        async def restart(_worker: Any, _url: str) -> None:
            if leaves:
                d.workers[1].kill()
                await d.cluster.clock.sleep(30)

        limits = QUICK.model_copy(update={"restart_s": 1.0})
        with pytest.raises(FleetError, match=lacks):
            await d.publish(2, restarter=restart, timeouts=limits)


class Away:
    """A frontend that takes no connection, or answers nothing."""

    addresses = 2

    def __init__(self, *, hangs: bool = False) -> None:
        self.hangs = hangs

    def attach(self, processes: Any, urls: Any) -> None:
        del processes, urls

    async def handle(self, address: int, call: Any) -> Any:
        if self.hangs:
            await anyio.sleep_forever()
        raise ConnectionRefusedError(f"{address}: {call.path}")


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_worker_is_restarted_also_where_the_list_of_workers_cannot_be_read_meanwhile(
    hangs: bool,
) -> None:
    async with deployed(options={"admin_timeout_s": 0.5}) as d:
        await d.publish(1)
        rejected = '{"status":"error","message":"Attempted to load weight"}'
        d.fail(1, UPDATE, "error", nth=3, status=200, body=rejected)
        with pytest.raises(PublishError):
            await d.publish(2)
        front, d.cluster.front = d.cluster.front, Away(hangs=hangs)

        async def restart(worker: Any, _url: str) -> None:
            assert worker.instance == d.id(1)
            d.workers[1].restart()
            d.cluster.front = front

        await d.publish(3, restarter=restart)


async def test_a_frontend_that_is_away_makes_no_worker_dead() -> None:
    async with deployed() as d:
        await d.publish(1)
        front, d.cluster.front = d.cluster.front, None

        d.cluster.front = Away()
        restarted: list[str] = []

        async def restart(worker: Any, url: str) -> None:
            restarted.append(f"{worker} {url}")

        async with d.publisher(restarter=restart) as publisher:
            with pytest.raises((FleetError, PublishError), match="cannot be listed"):
                await publisher.publish(2, from_tensors(weights(2)))
        d.cluster.front = front
        assert restarted == []
        reply = await d.fleet.generate(request())
        assert bounds(reply) == (version(1), version(1))


# failures


async def test_a_half_updated_worker_is_fenced_and_a_restarted_one_is_healed() -> None:
    async with deployed() as d:
        await d.publish(1)
        rejected = '{"status":"error","message":"Attempted to load weight"}'
        d.fail(1, UPDATE, "error", nth=3, status=200, body=rejected)
        async with d.publisher() as publisher:
            with pytest.raises(PublishError) as caught:
                await publisher.publish(2, from_tensors(weights(2)))
            by_instance = {r.worker.instance: r for r in caught.value.report.receipts}
            broken = by_instance[d.id(1)]
            assert (broken.outcome, broken.evidence) == (Outcome.DIRTY, Evidence.REJECTED)
            assert broken.recovery is Recovery.RESTART_THEN_PUBLISH
            assert all(r.fence is not None for r in caught.value.report.receipts)
            with pytest.raises(FleetError, match="no worker may get traffic"):
                await d.fleet.generate(request())
            d.workers[1].restart()
            report = await publisher.publish(2, from_tensors(weights(2)))
        assert report.committed
        reply = await d.fleet.generate(request())
        assert reply.output.token_ids == greedy(2, [1, 2, 3], 8)
        assert bounds(reply) == (version(2, 2), version(2, 2))


async def test_a_worker_that_lost_its_trainer_is_healed_the_way_its_receipt_names() -> None:
    async with deployed() as d:
        await d.publish(1)
        d.fail(1, UPDATE, "peer_lost", nth=3)
        async with d.publisher() as publisher:
            with pytest.raises(PublishError) as caught:
                await publisher.publish(2, from_tensors(weights(2)))
            broken = {r.worker.instance: r for r in caught.value.report.receipts}[d.id(1)]
            assert (broken.outcome, broken.evidence) == (Outcome.DIRTY, Evidence.PEER_LOST)
            if broken.recovery is Recovery.RESTART_THEN_PUBLISH:
                d.workers[1].restart()
            report = await publisher.publish(2, from_tensors(weights(2)))
        assert report.committed
        replies = [await d.fleet.generate(request()) for _ in range(4)]
        assert all(reply.output.token_ids == greedy(2, [1, 2, 3], 8) for reply in replies)
        assert {instance(reply.worker) for reply in replies} == {d.id(0), d.id(1)}


@pytest.mark.parametrize("nth", [2, 3, 4])
async def test_a_lost_reply_in_the_session_ends_with_receipts_and_nothing_half_updated_serves(
    nth: int,
) -> None:
    async with deployed() as d:
        await d.publish(1)
        d.fail(1, UPDATE, "lose_reply", nth=nth)
        async with d.publisher() as publisher:
            try:
                report = await publisher.publish(2, from_tensors(weights(2)))
            except PublishError as error:
                report = error.report
                assert any(r.recovery is not None for r in report.receipts)
                assert not any(r.fence is None for r in report.receipts)
            else:
                reply = await d.fleet.generate(request())
                assert reply.output.token_ids == greedy(2, [1, 2, 3], 8)
        assert len(report.receipts) == 2


async def test_an_error_inside_a_200_stops_a_publication_before_anything_began() -> None:
    async with deployed(weight_transfer="false") as d:
        with pytest.raises(PublishError, match="Weight transfer not configured"):
            await d.publish(1)
        reply = await d.fleet.generate(request())
        assert len(reply.output.token_ids) == 8


async def test_a_pause_that_the_worker_denies_is_seen() -> None:
    async with deployed() as d:
        error = '{"status":"ok","message":"Engine paused"}'
        d.fail(1, "/engine/pause_generation", "error", status=200, body=error)
        with pytest.raises(PublishError, match="must be paused") as caught:
            await d.publish(1)
        assert {r.outcome for r in caught.value.report.receipts} == {Outcome.UNTOUCHED}


async def test_probed_workers_are_scored_by_name_through_the_frontend() -> None:
    async with deployed() as d:
        await d.publish(1)
        async with d.publisher(verify=("label", "probe")) as publisher:
            report = await publisher.publish(2, from_tensors(weights(2)))
        assert all("probe" in r.verified for r in report.receipts)
        pins = {body["nvext"].get("backend_instance_id") for body in d.sent()}
        assert {int(d.id(0)), int(d.id(1))} <= pins


class _Unpinned(MemoryTransport):
    """Carries calls past something that drops the pin, and what else is named.

    Attributes:
        extra_fields: those that it drops.
    """

    extra_fields: tuple[str, ...] = ()

    async def send(self, base_url: str, call: HTTPCall, **more: Any) -> HTTPReply:
        if call.path == "/v1/completions":
            assert call.body is not None
            body = json.loads(call.body)
            body["nvext"].pop("backend_instance_id", None)
            body["nvext"]["extra_fields"] = [
                name for name in body["nvext"]["extra_fields"] if name not in self.extra_fields
            ]
            call = replace(call, body=json_body(body))
        return await super().send(base_url, call, **more)


@pytest.mark.parametrize("extra_fields", [(), ("worker_id",)])
async def test_scores_count_for_nobody_where_the_pin_to_a_worker_is_dropped(
    extra_fields: tuple[str, ...],
) -> None:
    cluster = Cluster.from_query({"protocol": "dynamo", "workers": "2"})
    transport = _Unpinned(cluster)
    transport.extra_fields = extra_fields
    async with genapi.connect("embedded://?protocol=dynamo", transport=transport) as fleet:
        await fleet.wait_ready(timeout_s=20)
        await fleet.generate(request())  # the frontend's next turn is the second worker's
        publisher = genapi.WeightPublisher(
            fleet, transport=Memory(), timeouts=QUICK, verify=("label", "probe")
        )
        with pytest.raises(PublishError, match="answered in place of") as caught:
            await publisher.publish(1, from_tensors(weights(1)))
    assert not any("probe" in receipt.verified for receipt in caught.value.report.receipts)


async def test_a_reply_that_names_nobody_is_of_any_worker_also_where_it_was_pinned() -> None:
    cluster = Cluster.from_query({"protocol": "dynamo", "workers": "2"})
    transport = _Unpinned(cluster)
    transport.extra_fields = ("worker_id",)
    target = "embedded://?protocol=dynamo"
    async with genapi.connect(target, transport=transport, refresh_s=1000, run="r") as fleet:
        await fleet.wait_ready(timeout_s=20)
        async with genapi.WeightPublisher(fleet, transport=Memory(), timeouts=QUICK) as publisher:
            await publisher.publish(1, from_tensors(weights(1)))
            whole = await fleet.generate(request(min_version=1))
            cluster.workers[1].restart()
            await fleet.snapshot()  # from now on requests are pinned to the other one
            replies = [await fleet.generate(request()) for _ in range(2)]
    assert (whole.worker, bounds(whole)) == (None, (version(1), version(1)))
    assert [reply.worker for reply in replies] == [None, None]
    # One of them was made with the file's weights, and nobody can say which.
    assert len({tuple(reply.output.token_ids) for reply in replies}) == 2
    assert [bounds(reply) for reply in replies] == [(None, None)] * 2


async def test_a_reply_that_moved_though_it_was_pinned_names_nobody() -> None:
    cluster = Cluster.from_query({"protocol": "dynamo", "workers": "3", "migration_limit": "3"})
    target, transport = "embedded://?protocol=dynamo", _Unpinned(cluster)
    replies: list[GenerateResponse] = []
    async with genapi.connect(target, transport=transport, refresh_s=1000) as fleet:
        await fleet.wait_ready(timeout_s=20)
        async with genapi.WeightPublisher(fleet, transport=Memory(), timeouts=QUICK) as publisher:
            await publisher.publish(1, from_tensors(weights(1)))
        cluster.workers[2].restart()
        await fleet.snapshot()  # from now on requests are pinned to those that hold the version

        async def ask() -> None:
            replies.append(await fleet.generate(request(tokens=100)))

        async def kill_while_it_runs() -> None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                await until(lambda: any(w.engine.num_running for w in cluster.workers))
                busy = next(w for w in cluster.workers if w.engine.num_running)
                await until(lambda: len(busy.engine.requests[0].tracks[0].output) > 20)
                busy.kill()

        with pytest.warns(genapi.GenAPIWarning, match="moved the request to another worker"):
            await kill_while_it_runs()
    assert replies[0].worker is None
    assert replies[0].attempts[-1].worker is None


@pytest.mark.parametrize(
    ("query", "options", "match"),
    [
        ({}, {"verify": ("checksum",)}, "use verify=.'probe',."),
        ({"prefill": "1"}, {"verify": ("probe",), "mode": "drain"}, "prefill worker's alone"),
        ({"family": "mocker"}, {}, "cannot admin"),
        ({}, {"in_flight_kv": "stale", "prefix_cache": "flush"}, "cannot flush"),
    ],
)
async def test_what_cannot_be_done_is_said_before_anything_is_touched(
    query: dict[str, Any], options: dict[str, Any], match: str
) -> None:
    async with deployed(**query) as d:
        with pytest.raises((PublishError, UnsupportedError), match=match):
            await d.publish(1, **options)
        assert not any(w.engine.label != "default" for w in d.workers)


# requests


async def test_simulated_workers_generate_and_say_nothing_of_versions() -> None:
    async with deployed(family="mocker") as d:
        sampling = genapi.SamplingParams(max_tokens=4, logprobs=None)
        reply = await d.fleet.generate(
            genapi.GenerateRequest(prompt_token_ids=[1], sampling=sampling)
        )
        assert reply.output.policy.newest is None
        assert instance(reply.worker) in {d.id(0), d.id(1)}


async def test_an_aborted_request_ends_on_the_engine_and_is_an_abort() -> None:
    async with deployed(1) as d:
        replies: list[GenerateResponse] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collect, d, request(tokens=4000, request_id="mine"), replies)
            await until(lambda: running(d))
            assert await d.fleet.abort("mine") == 1
        assert replies[0].output.finish_reason is FinishReason.ABORT
        await until(lambda: not running(d))


async def test_an_aborted_stream_keeps_what_had_come() -> None:
    async with deployed(1) as d, d.fleet.stream(request(tokens=4000, request_id="mine")) as events:
        got: list[int] = []
        reply = None
        async for event in events:
            if isinstance(event, TokenChunk):
                got += event.token_ids
                if len(got) == 5:
                    await d.fleet.abort("mine")
            else:
                reply = event.reply
        assert reply is not None
        assert reply.output.finish_reason is FinishReason.ABORT
        assert reply.output.token_ids == got
        await until(lambda: not running(d))


async def test_leaving_a_stream_ends_the_generation() -> None:
    async with deployed(1) as d:
        async with d.fleet.stream(request(tokens=4000)) as events:
            await anext(events)
        await until(lambda: not running(d))


async def test_a_version_that_one_worker_has_is_asked_of_that_worker() -> None:
    async with deployed() as d:
        await d.publish(1)
        url = next(iter(d.fleet.membership.members))
        first = d.fleet.membership.members[url]
        await relabel(d, url, "genapi:r:2:1")
        await d.fleet.snapshot()
        asked = request(min_version=2, timeout_s=5)
        replies = [await d.fleet.generate(asked) for _ in range(3)]
        assert {reply.worker for reply in replies} == {first.id}
        with pytest.raises(StalePolicyError):
            await d.fleet.generate(request(min_version=3, timeout_s=0.2))


# readiness and discovery


@pytest.mark.case("DISC-01")
async def test_a_fleet_is_not_ready_before_the_whole_topology_is_seen() -> None:
    expect = Topology(workers=3, world_size=3)
    async with deployed(3, ready=False, options={"expect": expect}) as d:
        await d.cluster.open()
        for worker in d.workers[1:]:
            worker.kill()
        with pytest.raises(FleetError, match="1 of 3 workers seen: memory://2"):
            await d.fleet.wait_ready(timeout_s=0.5)
        for worker in d.workers[1:]:
            worker.restart()
        await d.cluster.clock.sleep(30)  # until the leases of those that were killed end
        snapshot = await d.fleet.wait_ready(timeout_s=20)
        assert len(snapshot.workers) == 3


async def test_a_worker_that_sleeps_makes_the_fleet_unready() -> None:
    async with deployed(1) as d:
        d.workers[0].server.registered = False  # type: ignore[attr-defined]
        with pytest.raises(FleetError, match="missing worker types: aggregated"):
            await d.fleet.wait_ready(timeout_s=0.3)


async def control(d: Deployment, number: int, what: str) -> None:
    """Have a worker sleep, or wake up."""
    call = HTTPCall(method="POST", path=f"/engine/control/{what}", body=b"{}")
    assert (await d.calls.send(d.cluster.names[-len(d.workers) :][number], call)).ok


async def refused_asleep(d: Deployment, publisher: genapi.WeightPublisher, step: int) -> None:
    """A publication ends before it pauses anybody, as the second worker sleeps."""
    paused = len([path for _, path, _ in d.calls.calls if path.endswith("pause_generation")])
    with pytest.raises(PublishError) as caught:
        await publisher.publish(step, from_tensors(weights(step)))
    receipts = {r.worker.instance: r for r in caught.value.report.receipts}
    assert {r.outcome for r in receipts.values()} == {Outcome.UNTOUCHED}
    assert "wake_up" in (receipts[d.id(1)].error or "")
    paths = [path for _, path, _ in d.calls.calls if path.endswith("pause_generation")]
    assert len(paths) == paused


async def test_a_fenced_worker_that_sleeps_is_refused_until_it_is_woken() -> None:
    async with deployed() as d, d.publisher() as publisher:
        await publisher.publish(1, from_tensors(weights(1)))
        d.fail(1, "/engine/resume_generation", "error")
        with pytest.raises(PublishError):
            await publisher.publish(2, from_tensors(weights(2)))
        fences = {w.id.instance: w.fence for w in (await d.fleet.snapshot()).workers}
        assert fences[d.id(1)] is not None
        await control(d, 1, "sleep")
        await refused_asleep(d, publisher, 3)
        await control(d, 1, "wake_up")
        report = await publisher.publish(3, from_tensors(weights(3)))
        assert [r.outcome for r in report.receipts] == [Outcome.COMMITTED] * 2


async def test_a_replacement_that_sleeps_is_refused_until_it_is_woken() -> None:
    async with deployed() as d, d.publisher() as publisher:
        await publisher.publish(1, from_tensors(weights(1)))
        d.workers[1].restart()
        await d.fleet.snapshot()
        await control(d, 1, "sleep")
        await refused_asleep(d, publisher, 2)
        await control(d, 1, "wake_up")
        report = await publisher.publish(2, from_tensors(weights(2)))
        assert [r.outcome for r in report.receipts] == [Outcome.COMMITTED] * 2


async def test_workers_are_listed_by_the_frontend_alone() -> None:
    with pytest.raises(ConfigError, match="lists its workers itself"):
        genapi.connect("dynamo://h:8000?workers=w1:1")


@pytest.mark.parametrize(
    ("target", "options", "listed"),
    [
        ("dynamo://h:8000", {}, "http://h:8001"),
        ("dynamo://h:8000?discovery=9000", {}, "http://h:9000"),
        ("dynamo://h:8000?discovery=d:9000", {}, "http://d:9000"),
        ("dynamo+https://h:8000?discovery=9000", {}, "https://h:9000"),
        ("dynamo://h:8000", {"discovery_url": "http://d:1"}, "http://d:1"),
    ],
)
async def test_the_list_is_looked_for_where_the_target_says(
    target: str, options: dict[str, Any], listed: str
) -> None:
    asked: list[str] = []

    class Nobody:
        in_process = False

        async def send(self, base_url: str, call: Any, *, headers: Any = ()) -> Any:
            del headers
            asked.append(base_url + call.path)
            raise genapi.TransportError("nobody", phase="not_sent")

        stream = send  # nothing is streamed

    transport: Any = Nobody()
    async with genapi.connect(target, transport=transport, **options) as fleet:
        with pytest.raises(FleetError, match="nobody"):
            await fleet.wait_ready(timeout_s=0.05)
    assert f"{listed}/v1/rl/workers" in asked


class Misnamed(MemoryTransport):
    """A list that names the frontend's own address as that of the first worker."""

    async def send(
        self, base_url: str, call: HTTPCall, *, headers: Mapping[str, str] = {}
    ) -> HTTPReply:
        reply = await super().send(base_url, call, headers=headers)
        if call.path != "/v1/rl/workers":
            return reply
        return replace(reply, body=reply.body.replace(b"memory://2", b"memory://0"))


async def test_a_listed_address_where_no_worker_is_is_blamed_and_not_the_model() -> None:
    transport = Misnamed(Cluster.from_query({"protocol": "dynamo"}))
    target = "embedded://?protocol=dynamo"
    wanted = "memory://0/engine/.* answered 404: .* list of workers names that address"
    async with genapi.connect(target, transport=transport, model="tiny") as fleet:
        with pytest.raises(ConfigError, match=wanted) as caught:
            await fleet.wait_ready(timeout_s=5)
    assert "model" not in str(caught.value)


class Unanswered:
    """A transport that answers nothing until it is told to, and then fails."""

    in_process = False

    def __init__(self) -> None:
        self.released = anyio.Event()
        self.failed = anyio.Event()

    async def send(self, base_url: str, call: Any, *, headers: Any = ()) -> Any:
        del base_url, call, headers
        await self.released.wait()
        self.failed.set()
        raise genapi.TransportError("released", phase="not_sent")

    stream = send  # nothing is streamed


async def test_a_list_that_does_not_answer_is_named() -> None:
    transport: Any = Unanswered()
    async with genapi.connect("dynamo://h:8000", transport=transport) as fleet:
        with pytest.raises(FleetError, match=r"no answer yet from .* at http://h:8001$"):
            await fleet.wait_ready(timeout_s=0.05)


async def test_a_list_that_fails_when_nobody_waits_for_it_any_more_is_no_stray_exception() -> None:
    strays: list[Any] = []
    loop = asyncio.get_running_loop()
    handler = loop.get_exception_handler()
    loop.set_exception_handler(lambda _loop, context: strays.append(context))
    transport: Any = Unanswered()
    try:
        async with genapi.connect("dynamo://h:8000", transport=transport) as fleet:
            with pytest.raises(FleetError, match="no answer yet"):
                await fleet.wait_ready(timeout_s=0.05)
            transport.released.set()
            with anyio.fail_after(5):
                await transport.failed.wait()
                with pytest.raises(FleetError, match="released"):
                    await fleet.listed()
        del fleet
        gc.collect()
    finally:
        loop.set_exception_handler(handler)
    assert strays == []
