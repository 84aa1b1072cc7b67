"""What a worker holds is compared before it serves: with the others, and with the trainer."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import anyio
import numpy as np
import numpy.typing as npt
import pytest

import genapi
from genapi import FinishReason, PolicyVersion, WeightPublisher
from genapi.board import MemoryBoard
from genapi.embedded import Call
from genapi.embedded import policy as embedded_policy
from genapi.events import AdminCalled, Event, PhaseStarted
from genapi.transports.memory import MemoryTransport
from genapi.types.worker import Evidence, FenceStrength, Outcome, PublishReport, Recovery
from tests.contract.embedded import QUICK, Rig, Weights, greedy, request, rig, weights

pytestmark = pytest.mark.anyio

LIMITS = QUICK.model_copy(update={"probe_s": 1.0, "checksum_s": 1.0})


def publisher(r: Rig, *levels: Any, **more: Any) -> WeightPublisher:
    verify = levels or ("probe",)
    return WeightPublisher(
        r.fleet, transport=genapi.weights.Memory(), verify=verify, timeouts=LIMITS, **more
    )


def source(tensors: Weights) -> genapi.weights.WeightSource:
    return genapi.weights.from_tensors(tensors)


def trainer_logprobs(p: WeightPublisher, seed: int) -> npt.NDArray[np.float64]:
    return embedded_policy.logprobs(weights(seed), p.probe_ids)


def without_a_layer(seed: int) -> Weights:
    """What a worker of seed 0 holds that got everything but one layer."""
    return {**weights(seed), embedded_policy.VALUE: weights(0)[embedded_policy.VALUE]}


def with_a_swapped_pair(seed: int) -> Weights:
    right = weights(seed)
    first, second = embedded_policy.EMBED, embedded_policy.HEAD
    return {**right, first: right[second], second: right[first]}


WRONG = [without_a_layer, with_a_swapped_pair]


def when(r: Rig, phase: str, act: Callable[[], object]) -> None:
    """Do something when a publication enters a phase."""

    def observe(event: Event) -> None:
        r.events.append(event)
        if isinstance(event, PhaseStarted) and event.phase == phase:
            act()

    r.fleet.observe = r.fleet.control.observe = observe


def corrupt(r: Rig, held: Mapping[int, Weights], *, phase: str = "resume") -> None:
    """Let workers hold something else, under the right label, by the time they are verified."""

    def act() -> None:
        for number, tensors in held.items():
            r.cluster.workers[number].engine.install(tensors)

    when(r, phase, act)


async def failed(p: WeightPublisher, tensors: Weights, **more: Any) -> PublishReport:
    with anyio.fail_after(10), pytest.raises(genapi.PublishError) as caught:
        await p.publish(1, source(tensors), **more)
    report = caught.value.report
    assert isinstance(report, PublishReport)
    assert not report.committed
    return report


def outcomes(report: PublishReport) -> list[Outcome]:
    return [receipt.outcome for receipt in report.receipts]


async def test_workers_that_agree_are_verified_by_the_probe_and_their_gap_is_told() -> None:
    async with rig(2) as r, publisher(r) as p:
        await p.adopt(0)
        report = await p.publish(1, source(weights(1)), probe_logprobs=trainer_logprobs(p, 1))
        for receipt in report.receipts:
            assert receipt.verified == ("label", "probe")
            assert receipt.probe_gap is not None
            assert receipt.probe_gap < 1e-5
        assert report.probe_gap == max(x.probe_gap or 0 for x in report.receipts)
        assert (await r.fleet.generate(request())).output.token_ids == greedy(1, [1, 2, 3], 8)


async def test_the_label_is_always_verified_and_named() -> None:
    async with rig(1) as r, publisher(r, "label") as p:
        assert [x.verified for x in (await p.adopt(0)).receipts] == [("label",)]
        report = await p.publish(1, source(weights(1)))
        assert [x.verified for x in report.receipts] == [("label",)]
        assert report.probe_gap is None


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_worker_that_holds_something_else_than_the_others_is_dirty_and_gets_no_traffic(
    wrong: Callable[[int], Weights],
) -> None:
    async with rig(3) as r, publisher(r) as p:
        await p.adopt(0)
        corrupt(r, {1: wrong(1)})
        report = await failed(p, weights(1))
        assert outcomes(report) == [Outcome.COMMITTED, Outcome.DIRTY, Outcome.COMMITTED]
        bad = report.receipts[1]
        assert bad.evidence is Evidence.OTHER_SCORES
        assert bad.recovery is Recovery.REPUBLISH
        assert bad.verified == ("label",)
        assert "nats" in (bad.error or "")
        assert bad.fence is not None
        assert bad.fence.strength is FenceStrength.PAUSED
        for session in "abcdefgh":
            reply = await r.fleet.generate(request(session=session))
            assert reply.worker != bad.worker
            assert reply.output.token_ids == greedy(1, [1, 2, 3], 8)


@pytest.mark.parametrize("wrong", WRONG)
async def test_of_two_that_disagree_nobody_is_believed_without_the_trainers_numbers(
    wrong: Callable[[int], Weights],
) -> None:
    async with rig(2) as r, publisher(r) as p:
        await p.adopt(0)
        corrupt(r, {1: wrong(1)})
        report = await failed(p, weights(1))
        assert outcomes(report) == [Outcome.DIRTY] * 2
        assert "no majority" in (report.error or "")
        with pytest.raises(genapi.FleetError, match="republish"):
            await r.fleet.generate(request(timeout_s=1))


@pytest.mark.parametrize("wrong", WRONG)
async def test_of_two_that_disagree_the_trainers_numbers_tell_which_is_wrong(
    wrong: Callable[[int], Weights],
) -> None:
    async with rig(2) as r, publisher(r) as p:
        await p.adopt(0)
        corrupt(r, {0: wrong(1)})
        report = await failed(p, weights(1), probe_logprobs=trainer_logprobs(p, 1))
        assert outcomes(report) == [Outcome.DIRTY, Outcome.COMMITTED]
        assert (report.receipts[0].probe_gap or 0) > 0.1
        reply = await r.fleet.generate(request())
        assert reply.worker == report.receipts[1].worker


@pytest.mark.parametrize("wrong", WRONG)
async def test_workers_that_are_wrong_alike_are_told_by_the_trainers_numbers_alone(
    wrong: Callable[[int], Weights],
) -> None:
    async with rig(2) as r, publisher(r) as p:
        await p.adopt(0)
        fooled = await p.publish(1, source(wrong(1)))
        assert [x.verified for x in fooled.receipts] == [("label", "probe")] * 2
    async with rig(2) as r, publisher(r) as p:
        await p.adopt(0)
        report = await failed(p, wrong(1), probe_logprobs=trainer_logprobs(p, 1))
        assert outcomes(report) == [Outcome.DIRTY] * 2
        assert report.probe_gap is not None
        assert report.probe_gap > 0.1


async def test_a_single_worker_is_verified_by_the_probe_only_where_the_trainer_gives_numbers() -> (
    None
):
    async with rig(1) as r, publisher(r) as p:
        alone = await p.publish(1, source(weights(1)))
        assert [x.verified for x in alone.receipts] == [("label",)]
        told = await p.publish(2, source(weights(0)), probe_logprobs=trainer_logprobs(p, 0))
        assert [x.verified for x in told.receipts] == [("label", "probe")]


async def test_the_next_publication_takes_a_worker_that_did_not_pass_back() -> None:
    async with rig(3) as r, publisher(r) as p:
        await p.adopt(0)
        corrupt(r, {1: weights(2)})
        await failed(p, weights(1))
        r.fleet.observe = r.fleet.control.observe = r.events.append
        again = await p.publish(1, source(weights(1)))
        assert again.version.attempt == 2
        assert [x.verified for x in again.receipts] == [("label", "probe")] * 3
        assert [x.fence for x in again.receipts] == [None] * 3
        assert [w.paused for w in (await r.fleet.snapshot()).workers] == [False] * 3


async def test_a_request_that_the_wrong_worker_had_in_flight_ends_as_aborted() -> None:
    async with rig(1) as r, publisher(r) as p:
        await p.adopt(0)
        corrupt(r, {0: weights(2)})
        async with r.fleet.stream(request(tokens=1500)) as events:
            await anext(events)
            await failed(p, weights(1), probe_logprobs=trainer_logprobs(p, 1))
            last = [event async for event in events][-1]
        assert isinstance(last, genapi.Finished)
        assert last.reply.output.finish_reason is FinishReason.ABORT
        window = genapi.OffPolicyWindow(max_lag=5)
        assert not window.judge(last.reply.output, consumer_version=1).accepted


async def test_new_requests_wait_from_the_pause_on_and_then_go_to_whoever_passed() -> None:
    async with rig(2) as r, publisher(r) as p:
        await p.adopt(0)
        seen: list[int] = []
        replies: list[genapi.GenerateResponse] = []

        async def ask() -> None:
            replies.append(await r.fleet.generate(request()))

        async with anyio.create_task_group() as group:

            def observe(event: Event) -> None:
                if isinstance(event, PhaseStarted) and event.phase == "confirm":
                    group.start_soon(ask)
                if isinstance(event, PhaseStarted) and event.phase in ("resume", "probe"):
                    engines = [w.engine for w in r.cluster.workers]
                    seen.extend(e.num_waiting + e.num_running for e in engines)
                if isinstance(event, PhaseStarted) and event.phase == "resume":
                    r.cluster.workers[1].engine.install(weights(2))

            r.fleet.observe = r.fleet.control.observe = observe
            report = await failed(p, weights(1), probe_logprobs=trainer_logprobs(p, 1))
        assert seen == [0] * 4
        (reply,) = replies
        assert reply.worker == report.receipts[0].worker
        assert reply.output.policy.is_pure
        assert reply.output.policy.newest == report.version
        assert reply.output.token_ids == greedy(1, [1, 2, 3], 8)


async def test_without_a_probe_requests_go_on_to_paused_engines_and_wait_only_to_be_opened() -> (
    None
):
    async with rig(1) as r, publisher(r, "label") as p:
        await p.adopt(0)
        closed: dict[str, bool] = {}

        def observe(event: Event) -> None:
            if isinstance(event, PhaseStarted):
                closed[event.phase] = r.fleet.membership.closed

        r.fleet.observe = r.fleet.control.observe = observe
        await p.publish(1, source(weights(1)))
        assert [phase for phase, waits in closed.items() if waits] == ["resume", "probe"]
        assert not r.fleet.membership.closed


async def test_a_cancelled_publication_lets_requests_go_on() -> None:
    async with rig(2) as r, publisher(r) as p:
        await p.adopt(0)
        with anyio.CancelScope() as scope:
            when(r, "confirm", scope.cancel)
            await p.publish(1, source(weights(1)))
        assert scope.cancelled_caught
        with anyio.fail_after(5):
            assert (await r.fleet.generate(request())).output.is_complete


async def test_other_processes_see_the_wrong_worker_by_its_label_without_a_board() -> None:
    async with rig(3) as r, publisher(r) as p:
        await p.adopt(0)
        corrupt(r, {1: weights(2)})
        report = await failed(p, weights(1))
        transport = MemoryTransport(r.cluster)
        async with genapi.connect("embedded://", transport=transport) as other:
            workers = (await other.snapshot()).workers
            assert [w.fence is not None for w in workers] == [False, True, False]
            assert [w.paused for w in workers] == [False, True, False]
            assert [w.version for w in workers] == [report.version, None, report.version]
            for session in "abcdefgh":
                reply = await other.generate(request(session=session))
                assert reply.output.token_ids == greedy(1, [1, 2, 3], 8)


async def test_other_processes_see_on_the_board_that_a_worker_is_wrong_or_mended() -> None:
    board = MemoryBoard()
    async with rig(3, options={"board": board}) as r, publisher(r) as p:
        await p.adopt(0)
        corrupt(r, {1: weights(2)})
        report = await failed(p, weights(1))
        state, _ = await board.read()
        assert state is not None
        assert (state.phase, state.committed) == ("idle", report.version)
        fences = [state.fence_of(str(receipt.worker)) for receipt in report.receipts]
        assert fences == [receipt.fence for receipt in report.receipts]
        transport = MemoryTransport(r.cluster)
        async with genapi.connect("embedded://", transport=transport, board=board) as other:
            assert [w.fence for w in (await other.snapshot()).workers] == fences
            r.fleet.observe = r.fleet.control.observe = r.events.append
            await p.publish(1, source(weights(1)))
            assert [w.fence for w in (await other.snapshot()).workers] == [None] * 3


@pytest.mark.parametrize("action", ["never_answer", "error", "garble", "die_before"])
async def test_a_worker_that_does_not_score_is_fenced_and_the_others_serve(action: str) -> None:
    async with rig(2) as r, publisher(r) as p:
        await p.adopt(0)

        def fail() -> None:
            for nth in range(1, 5):  # each retry meets it again
                r.fail(1, "/inference/v1/generate", action, nth=nth)

        when(r, "resume", fail)
        report = await failed(p, weights(1), probe_logprobs=trainer_logprobs(p, 1))
        assert report.receipts[0].fence is None
        bad = report.receipts[1]
        assert bad.outcome is Outcome.UNKNOWN
        assert bad.fence is not None
        assert "probe" in (bad.error or "")
        assert "probe" not in bad.verified
        reply = await r.fleet.generate(request(timeout_s=5))
        assert reply.worker == report.receipts[0].worker


async def test_a_worker_whose_scores_are_no_numbers_is_dirty_and_then_mended() -> None:
    async with rig(3) as r, publisher(r) as p:
        await p.adopt(0)
        held = weights(1)
        corrupt(r, {1: {**held, embedded_policy.HEAD: held[embedded_policy.HEAD] * np.nan}})
        report = await failed(p, weights(1))
        assert outcomes(report) == [Outcome.COMMITTED, Outcome.DIRTY, Outcome.COMMITTED]
        assert "not numbers" in (report.receipts[1].error or "")
        r.fleet.observe = r.fleet.control.observe = r.events.append
        again = await p.publish(1, source(weights(1)))
        assert again.committed


async def test_ids_that_no_worker_can_score_are_refused_before_anything_is_touched() -> None:
    async with rig(2) as r, publisher(r, probe_ids=[1, 64]) as p:
        await p.adopt(0)
        report = await failed(p, weights(1))
        assert outcomes(report) == [Outcome.UNTOUCHED] * 2
        assert [x.fence for x in report.receipts] == [None] * 2
        assert "64" in (report.error or "")
        assert "pause" not in {e.operation for e in r.events if isinstance(e, AdminCalled)}


async def test_ids_of_the_users_own_are_scored() -> None:
    async with rig(2) as r, publisher(r, probe_ids=[5, 6, 7]) as p:
        assert p.probe_ids == (5, 6, 7)
        logprobs = trainer_logprobs(p, 1)
        assert logprobs.shape == (3,)
        report = await p.publish(1, source(weights(1)), probe_logprobs=logprobs)
        assert report.probe_gap is not None


@pytest.mark.parametrize(
    "logprobs", [[0.0, -1.0], "text", [0.0, float("nan"), -1.0], [[0.0, -1.0, -2.0]]]
)
async def test_numbers_of_the_trainer_that_do_not_fit_are_refused_before_any_call(
    logprobs: object,
) -> None:
    async with rig(1) as r, publisher(r, probe_ids=[5, 6, 7]) as p:
        r.events.clear()
        with pytest.raises(genapi.ConfigError, match="probe_logprobs"):
            await p.publish(1, source(weights(1)), probe_logprobs=logprobs)
        assert not r.events


async def test_what_cannot_be_verified_is_refused_when_the_publisher_is_made() -> None:
    async with rig(1) as r:
        with pytest.raises(genapi.ConfigError, match="'taste' is none of label, checksum, probe"):
            publisher(r, "taste")
        with pytest.raises(genapi.ConfigError, match="at least two"):
            publisher(r, probe_ids=[1])
        with pytest.raises(genapi.ConfigError, match="probe_tolerance"):
            publisher(r, probe_tolerance=-1.0)
        with pytest.raises(genapi.ConfigError, match="probe_max_gap"):
            publisher(r, probe_max_gap=float("nan"))
        with pytest.raises(genapi.ConfigError, match="verify"):
            await publisher(r, "label").publish(1, source(weights(1)), probe_logprobs=[0.0] * 12)


async def test_a_worker_whose_bytes_differ_is_dirty_and_nobody_is_resumed() -> None:
    async with rig(3) as r, publisher(r, "checksum", "probe") as p:
        await p.adopt(0)
        corrupt(r, {2: with_a_swapped_pair(1)}, phase="verify")
        report = await failed(p, weights(1))
        assert outcomes(report) == [Outcome.COMMITTED, Outcome.COMMITTED, Outcome.DIRTY]
        bad = report.receipts[2]
        assert bad.evidence is Evidence.OTHER_CHECKSUM
        assert bad.recovery is Recovery.REPUBLISH
        assert embedded_policy.HEAD in (bad.error or "")
        assert all(receipt.fence is not None for receipt in report.receipts)
        assert "resume" not in {e.operation for e in r.events if isinstance(e, AdminCalled)}
        assert r.fleet.membership.committed == PolicyVersion(run=report.version.run, step=0)
        r.fleet.observe = r.fleet.control.observe = r.events.append
        again = await p.publish(1, source(weights(1)))
        assert [x.verified for x in again.receipts] == [("label", "checksum", "probe")] * 3


async def test_those_whose_bytes_agree_serve_without_the_other_where_that_was_asked_for() -> None:
    async with rig(3) as r:
        async with publisher(r, "checksum", on_partial="serve", min_workers=2) as p:
            await p.adopt(0)
            corrupt(r, {2: weights(2)}, phase="verify")
            report = await p.publish(1, source(weights(1)))
        assert outcomes(report) == [Outcome.COMMITTED, Outcome.COMMITTED, Outcome.DIRTY]
        for session in "abcdefgh":
            reply = await r.fleet.generate(request(session=session))
            assert reply.output.token_ids == greedy(1, [1, 2, 3], 8)


async def test_a_server_without_the_checksum_route_is_refused_before_anything_is_touched() -> None:
    async with rig(2, version="0.31.0") as r, publisher(r, "checksum") as p:
        report = await failed(p, weights(1))
        assert outcomes(report) == [Outcome.UNTOUCHED] * 2
        assert "/weight_checker" in (report.error or "")
        assert "pause" not in {e.operation for e in r.events if isinstance(e, AdminCalled)}


async def test_tensors_other_than_those_of_the_last_publication_are_refused_and_explained() -> None:
    async with rig(2) as r, publisher(r, "label") as p:
        await p.publish(0, source(weights(0)))
        r.events.clear()
        wrapped = {f"module.{name}": tensor for name, tensor in weights(1).items()}
        report = await failed(p, wrapped)
        assert outcomes(report) == [Outcome.UNTOUCHED] * 2
        assert [x.fence for x in report.receipts] == [None] * 2
        assert "renamed, with 'module.' in it" in (report.error or "")
        assert "manifest_changed=True" in (report.error or "")
        assert "pause" not in {e.operation for e in r.events if isinstance(e, AdminCalled)}
        reply = await r.fleet.generate(request())
        assert reply.output.token_ids == greedy(0, [1, 2, 3], 8)


async def test_a_layer_that_is_missing_is_refused_unless_that_is_meant() -> None:
    async with rig(2) as r, publisher(r, "label") as p:
        await p.publish(0, source(weights(0)))
        part = {n: t for n, t in weights(1).items() if n != embedded_policy.VALUE}
        report = await failed(p, part)
        assert f"missing: {embedded_policy.VALUE!r}" in (report.error or "")
        meant = await p.publish(1, source(part), manifest_changed=True)
        assert outcomes(meant) == [Outcome.COMMITTED] * 2
        # What was meant once is what the next publication is held against.
        await p.publish(2, source(part))


async def test_a_publication_that_failed_is_nothing_to_hold_the_next_one_against() -> None:
    async with rig(1) as r, publisher(r, "label") as p:
        r.fail(0, "/pause", "never_answer")
        part = {embedded_policy.EMBED: weights(1)[embedded_policy.EMBED]}
        await failed(p, part)
        await p.publish(1, source(weights(1)))


async def test_a_worker_that_joined_another_group_since_refuses_before_it_is_touched() -> None:
    async with rig(2) as r, publisher(r, "label") as p:
        await p.publish(0, source(weights(0)))
        body = b'{"init_info":{"rank_offset":1,"world_size":2,"digest":"another"}}'
        joined = await r.cluster.handle(1, Call("POST", "/init_weight_transfer_engine", body=body))
        assert joined.status == 200
        report = await failed(p, weights(1))
        taken = report.receipts[1]
        assert taken.outcome is Outcome.DIRTY
        assert taken.recovery is Recovery.CLOSE_THEN_REPUBLISH
        assert "digest" in (taken.error or "")
        held = r.cluster.workers[1].engine.weights
        assert all(np.array_equal(held[name], t) for name, t in weights(0).items())
        again = await p.publish(1, source(weights(1)))
        assert outcomes(again) == [Outcome.COMMITTED] * 2


async def test_every_call_of_one_update_carries_one_digest_and_another_is_refused() -> None:
    async with rig(1) as r:
        bodies: list[dict[str, Any]] = []
        handle = r.cluster.handle

        async def spy(worker: int, call: Call) -> Any:
            if call.path in ("/init_weight_transfer_engine", "/update_weights"):
                bodies.append(json.loads(call.body))
            return await handle(worker, call)

        r.cluster.handle = spy  # type: ignore[method-assign]
        small = genapi.weights.Memory(bucket_tensors=1)
        async with WeightPublisher(r.fleet, transport=small, timeouts=LIMITS) as p:
            await p.publish(1, source(weights(1)))
        join, *updates = bodies
        digests = {update["update_info"]["digest"] for update in updates}
        assert len(updates) == 3
        assert len(digests) == 1
        (plan,) = digests
        assert plan.startswith(join["init_info"]["digest"] + ":")
        await handle(
            0, Call("POST", "/init_weight_transfer_engine", body=json.dumps(join).encode())
        )
        await handle(0, Call("POST", "/pause", {"mode": "keep"}))
        await handle(0, Call("POST", "/start_weight_update"))
        empty: dict[str, Any] = {"names": [], "dtype_names": [], "shapes": []}
        statuses = []
        for digest in (plan, plan + "x"):
            info = json.dumps({"update_info": {**empty, "digest": digest}}).encode()
            statuses.append((await handle(0, Call("POST", "/update_weights", body=info))).status)
        assert statuses == [200, 500]
