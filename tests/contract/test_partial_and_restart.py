"""Serving with those that committed, and having servers restarted that cannot be healed."""

import anyio
import pytest

import genapi
from genapi import Outcome, PublishReport, WeightPublisher
from genapi.embedded import Cluster, Fault
from genapi.events import WorkerLeftOut
from genapi.transports.memory import MemoryTransport
from genapi.types.ids import WorkerId
from genapi.types.worker import Evidence, FenceStrength, Recovery
from tests.contract.embedded import QUICK, Rig, greedy, request, rig, weights

pytestmark = pytest.mark.anyio


def source(seed: int) -> genapi.weights.WeightSource:
    return genapi.weights.from_tensors(weights(seed))


def publisher(r: Rig, **more: object) -> WeightPublisher:
    return WeightPublisher(
        r.fleet,
        transport=genapi.weights.Memory(),
        timeouts=QUICK.model_copy(update={"restart_s": 2.0}),
        **more,  # type: ignore[arg-type]
    )


async def test_with_serve_those_that_are_proved_go_on_and_the_other_is_fenced() -> None:
    async with rig(3) as r:
        p = publisher(r, on_partial="serve", min_workers=2)
        await p.adopt(0)
        r.fail(1, "/finish_weight_update", "never_answer")
        report = await p.publish(1, source(1))
        assert report.committed
        assert [x.outcome for x in report.receipts] == [
            Outcome.COMMITTED,
            Outcome.UNKNOWN,
            Outcome.COMMITTED,
        ]
        evicted = report.receipts[1]
        assert evicted.fence is not None
        assert evicted.fence.strength is FenceStrength.PAUSED
        assert [w.engine.pause_state.name for w in r.cluster.workers][1] != "NONE"
        for session in "abcdefgh":
            reply = await r.fleet.generate(request(session=session))
            assert reply.worker != evicted.worker
            assert reply.output.token_ids == greedy(1, [1, 2, 3], 8)
        again = await p.publish(2, source(0))
        assert [x.outcome for x in again.receipts] == [Outcome.COMMITTED] * 3


async def serves_only(r: Rig, workers: set[str], seed: int) -> None:
    for session in "abcdefgh":
        reply = await r.fleet.generate(request(session=session))
        assert reply.worker is not None
        assert reply.worker.component in workers
        assert reply.output.token_ids == greedy(seed, [1, 2, 3], 8)


async def test_with_serve_a_worker_that_died_is_left_out_until_it_is_back() -> None:
    async with rig(3) as r:
        p = publisher(r, on_partial="serve", min_workers=2)
        await p.adopt(0)
        r.fail(1, "/finish_weight_update", "die_before")
        assert (await p.publish(1, source(1))).committed
        for step in (2, 3):
            r.events.clear()
            report = await p.publish(step, source(step % 2))
            assert report.committed
            assert [x.url for x in report.receipts] == ["memory://0", "memory://1", "memory://2"]
            gone = report.receipts[1]
            assert (gone.outcome, gone.evidence) == (Outcome.UNTOUCHED, Evidence.DEAD)
            assert gone.recovery is Recovery.RESTART_THEN_PUBLISH
            assert gone.fence is not None
            assert gone.fence.strength is FenceStrength.DEAD
            told = [e for e in r.events if isinstance(e, WorkerLeftOut)]
            assert [(e.version, e.worker) for e in told] == [(report.version, gone.worker)]
        r.cluster.workers[1].restart()
        await r.fleet.snapshot()
        await serves_only(r, {"memory://0", "memory://2"}, 1)
        report = await p.publish(4, source(0))
        assert [x.outcome for x in report.receipts] == [Outcome.COMMITTED] * 3
        assert [x.fence for x in report.receipts] == [None] * 3
        await serves_only(r, {"memory://0", "memory://1", "memory://2"}, 0)


async def test_with_serve_a_worker_that_was_dead_before_the_first_publication_is_left_out() -> None:
    async with rig(3) as r:
        p = publisher(r, on_partial="serve", min_workers=2)
        r.cluster.workers[0].kill()
        report = await p.publish(1, source(1))
        assert [x.outcome for x in report.receipts] == [
            Outcome.UNTOUCHED,
            Outcome.COMMITTED,
            Outcome.COMMITTED,
        ]
        await serves_only(r, {"memory://1", "memory://2"}, 1)


async def test_with_serve_a_worker_that_nobody_ever_reached_is_left_out_and_fenced() -> None:
    cluster = Cluster.from_query({"workers": "3"})
    fleet = genapi.connect("embedded://", transport=MemoryTransport(cluster), run="r")
    async with fleet:
        cluster.workers[2].faults.add(Fault("/health", "die_before"))
        r = Rig(fleet, cluster)
        p = publisher(r, on_partial="serve", min_workers=2)
        report = await p.publish(1, source(1))
        assert [x.url for x in report.receipts] == ["memory://0", "memory://1", "memory://2"]
        assert report.receipts[2].fence is not None
        cluster.workers[2].restart()
        await fleet.snapshot()
        await serves_only(r, {"memory://0", "memory://1"}, 1)
        report = await p.publish(2, source(0))
        assert [x.outcome for x in report.receipts] == [Outcome.COMMITTED] * 3


async def test_with_serve_a_worker_that_cannot_be_healed_is_left_out() -> None:
    async with rig(3) as r:
        p = publisher(r, on_partial="serve", min_workers=2)
        await p.adopt(0)
        r.fail(1, "/update_weights", "error")
        with pytest.raises(genapi.PublishError):
            await p.publish(1, source(1))
        report = await p.publish(1, source(1))
        assert report.committed
        left_out = report.receipts[1]
        assert (left_out.outcome, left_out.evidence) == (Outcome.UNTOUCHED, Evidence.NOT_BEGUN)
        assert left_out.recovery is Recovery.RESTART_THEN_PUBLISH
        await serves_only(r, {"memory://0", "memory://2"}, 1)


async def test_with_serve_a_worker_that_gives_no_answer_is_left_out_until_it_does() -> None:
    async with rig(3, options={"admin_timeout_s": 0.3}) as r:
        p = publisher(r, on_partial="serve", min_workers=2)
        await p.adopt(0)
        for nth in (1, 2):
            r.fail(1, "/health", "never_answer", nth=nth)
        report = await p.publish(1, source(1))
        silent = report.receipts[1]
        assert (silent.outcome, silent.evidence) == (Outcome.UNTOUCHED, Evidence.NO_ANSWER)
        assert silent.recovery is Recovery.REPUBLISH
        await r.fleet.snapshot()
        await serves_only(r, {"memory://0", "memory://2"}, 1)
        report = await p.publish(2, source(0))
        assert [x.outcome for x in report.receipts] == [Outcome.COMMITTED] * 3


async def test_with_serve_one_failed_read_leaves_nobody_out() -> None:
    async with rig(3) as r:
        p = publisher(r, on_partial="serve", min_workers=2)
        await p.adopt(0)
        r.fail(1, "/health", "refuse")
        report = await p.publish(1, source(1))
        assert [x.outcome for x in report.receipts] == [Outcome.COMMITTED] * 3


async def test_with_serve_and_too_few_left_nobody_is_left_out() -> None:
    async with rig(3) as r:
        p = publisher(r, on_partial="serve", min_workers=3)
        await p.adopt(0)
        r.cluster.workers[1].kill()
        with anyio.fail_after(10), pytest.raises(genapi.PublishError, match="inspect"):
            await p.publish(1, source(1))
        assert not [e for e in r.events if isinstance(e, WorkerLeftOut)]
        assert r.labels[0] == r.labels[2]
        assert "updating" not in r.labels[0]


async def test_with_serve_a_server_that_does_not_come_back_is_left_out() -> None:
    restarted: list[str] = []
    async with rig(3) as r:

        async def restart(worker: WorkerId, url: str) -> None:
            restarted.append(url)

        p = publisher(r, on_partial="serve", min_workers=2, restarter=restart)
        await p.adopt(0)
        r.cluster.workers[1].kill()
        report = await p.publish(1, source(1))
        assert report.committed
        assert report.version.attempt == 1
        assert restarted == ["memory://1"]


async def test_with_too_few_that_are_proved_nobody_goes_on() -> None:
    async with rig(3) as r:
        p = publisher(r, on_partial="serve", min_workers=3)
        await p.adopt(0)
        r.fail(1, "/finish_weight_update", "never_answer")
        with pytest.raises(genapi.PublishError) as caught:
            await p.publish(1, source(1))
        assert all(receipt.fence is not None for receipt in caught.value.report.receipts)


@pytest.mark.parametrize(
    "options",
    [{"on_partial": "serve"}, {"min_workers": 1}, {"on_partial": "serve", "min_workers": 0}],
)
async def test_serve_and_min_workers_go_together(options: dict[str, object]) -> None:
    async with rig(1) as r:
        with pytest.raises(genapi.ConfigError, match="min_workers"):
            publisher(r, **options)


async def test_a_server_that_cannot_be_healed_is_restarted_and_published_to() -> None:
    restarted: list[str] = []
    async with rig(2) as r:

        async def restart(worker: WorkerId, url: str) -> None:
            restarted.append(url)
            r.cluster.workers[int(url.removeprefix("memory://"))].restart()

        p = publisher(r, restarter=restart)
        await p.adopt(0)
        r.fail(1, "/update_weights", "error")
        report = await p.publish(1, source(1))
        assert restarted == ["memory://1"]
        assert report.version.attempt == 2
        assert [x.outcome for x in report.receipts] == [Outcome.COMMITTED] * 2
        for session in "abcd":
            reply = await r.fleet.generate(request(session=session))
            assert reply.output.token_ids == greedy(1, [1, 2, 3], 8)


async def test_a_server_that_is_gone_when_the_publication_begins_is_named_with_a_way_back() -> None:
    async with rig(2) as r:
        p = publisher(r)
        await p.adopt(0)
        r.cluster.workers[1].kill()
        with pytest.raises(genapi.PublishError) as caught:
            await p.publish(1, source(1))
        report = caught.value.report
        assert isinstance(report, PublishReport)
        first, second = report.receipts
        assert (first.fence, first.recovery) == (None, None)
        assert second.recovery is Recovery.REPUBLISH
        assert second.fence is not None
        assert "not_sent" in (second.error or "")
        assert {str((await r.fleet.generate(request())).worker) for _ in range(4)} == {
            str(first.worker)
        }


async def test_a_server_that_nobody_ever_reached_is_named_with_what_to_do() -> None:
    async with rig(2) as r:
        r.cluster.workers[1].kill()
        other = genapi.connect("embedded://", transport=MemoryTransport(r.cluster), run="r")
        async with other:
            p = WeightPublisher(other, transport=genapi.weights.Memory(), timeouts=QUICK)
            with pytest.raises(genapi.FleetError, match=r"memory://1 were never reached.*start"):
                await p.publish(1, source(1))


@pytest.mark.parametrize(
    ("path", "action", "details"),
    [
        ("/health", "refuse", {}),
        ("/health", "error", {"status": 503}),
        ("/health", "error", {"status": 401}),
        ("/version", "lose_reply", {}),
        ("/server_info", "error", {}),
        ("/weight_info", "garble", {}),
        ("/is_paused", "never_answer", {}),
    ],
)
async def test_a_server_whose_read_fails_once_is_not_restarted(
    path: str, action: str, details: dict[str, int]
) -> None:
    restarted: list[str] = []
    async with rig(2, options={"admin_timeout_s": 0.3}) as r:

        async def restart(worker: WorkerId, url: str) -> None:
            restarted.append(url)

        p = publisher(r, restarter=restart)
        await p.adopt(0)
        r.fail(1, path, action, **details)
        report = await p.publish(1, source(1))
        assert report.committed
        assert not restarted


async def test_a_server_that_answers_errors_is_not_restarted() -> None:
    restarted: list[str] = []
    async with rig(2) as r:

        async def restart(worker: WorkerId, url: str) -> None:
            restarted.append(url)

        p = publisher(r, restarter=restart)
        await p.adopt(0)
        for nth in range(1, 9):
            r.fail(1, "/server_info", "error", nth=nth)
        with anyio.fail_after(10), pytest.raises(genapi.PublishError):
            await p.publish(1, source(1))
        assert not restarted


@pytest.mark.parametrize(
    ("path", "status", "error"),
    [("/health", 401, genapi.AuthError), ("/version", 404, genapi.ConfigError)],
)
async def test_a_server_that_refuses_the_key_or_is_of_another_kind_is_named_and_not_restarted(
    path: str, status: int, error: type[genapi.GenAPIError]
) -> None:
    restarted: list[str] = []
    async with rig(2) as r:

        async def restart(worker: WorkerId, url: str) -> None:
            restarted.append(url)

        p = publisher(r, restarter=restart)
        await p.adopt(0)
        for nth in range(1, 9):
            r.fail(1, path, "error", status=status, nth=nth)
        with anyio.fail_after(10), pytest.raises(error):
            await p.publish(1, source(1))
        assert not restarted


async def test_a_server_that_gives_no_answer_for_long_is_restarted() -> None:
    restarted: list[str] = []
    async with rig(2, options={"admin_timeout_s": 0.3}) as r:

        async def restart(worker: WorkerId, url: str) -> None:
            restarted.append(url)
            r.cluster.workers[1].restart()

        p = publisher(r, restarter=restart)
        await p.adopt(0)
        for nth in (1, 2):
            r.fail(1, "/health", "never_answer", nth=nth)
        report = await p.publish(1, source(1))
        assert restarted == ["memory://1"]
        assert [x.outcome for x in report.receipts] == [Outcome.COMMITTED] * 2


async def test_a_server_that_does_not_come_back_is_named_within_the_limit() -> None:
    async with rig(2) as r:

        async def restart(worker: WorkerId, url: str) -> None:
            return

        p = publisher(r, restarter=restart)
        await p.adopt(0)
        r.cluster.workers[1].kill()
        lacks = r"restart_s=.*: .*memory://1.*; one that comes elsewhere has to be discovered"
        with anyio.fail_after(10), pytest.raises(genapi.FleetError, match=lacks):
            await p.publish(1, source(1))


async def restarts_nothing(worker: WorkerId, url: str) -> None:
    message = "no such pod"
    raise OSError(message)


async def test_a_restarter_that_fails_is_named_with_its_error() -> None:
    async with rig(2) as r:
        p = publisher(r, restarter=restarts_nothing)
        await p.adopt(0)
        r.cluster.workers[1].kill()
        with pytest.raises(genapi.FleetError, match=r"restarter failed.*memory://1.*pod") as caught:
            await p.publish(1, source(1))
        assert isinstance(caught.value.__cause__, OSError)


async def test_a_restarter_that_fails_after_a_publication_loses_no_receipt() -> None:
    async with rig(2) as r:
        p = publisher(r, restarter=restarts_nothing)
        await p.adopt(0)
        r.fail(1, "/update_weights", "error")
        with pytest.raises(genapi.PublishError) as caught:
            await p.publish(1, source(1))
        assert caught.value.report.receipts[1].recovery is Recovery.RESTART_THEN_PUBLISH
        assert "restarter failed" in str(caught.value.__cause__)


async def test_with_serve_a_server_whose_restarter_fails_is_left_out() -> None:
    async with rig(3) as r:
        p = publisher(r, on_partial="serve", min_workers=2, restarter=restarts_nothing)
        await p.adopt(0)
        r.cluster.workers[1].kill()
        report = await p.publish(1, source(1))
        assert (report.committed, report.version.attempt) == (True, 1)
        assert report.receipts[1].fence is not None
        await serves_only(r, {"memory://0", "memory://2"}, 1)


async def test_without_a_restarter_the_receipt_says_who_has_to_be_restarted() -> None:
    async with rig(2) as r:
        p = publisher(r)
        await p.adopt(0)
        r.fail(1, "/update_weights", "error")
        with pytest.raises(genapi.PublishError) as caught:
            await p.publish(1, source(1))
        assert caught.value.report.receipts[1].recovery is Recovery.RESTART_THEN_PUBLISH


async def test_more_workers_than_there_are_are_refused_before_anything_is_touched() -> None:
    async with rig(2) as r:
        p = publisher(r, on_partial="serve", min_workers=3)
        await p.adopt(0)
        with pytest.raises(genapi.ConfigError, match="min_workers=3, and the fleet has 2 workers"):
            await p.publish(1, source(1))
        assert p.last_report is None
        assert set(r.labels) == {"genapi:" + r.labels[0].split(":")[1] + ":0:1"}
