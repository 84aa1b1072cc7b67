"""What a publisher keeps from one publication to the next: group, attempts, run, reports."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

import genapi
from genapi import PolicyVersion, PublishReport, WeightPublisher
from genapi.board import Board, MemoryBoard
from genapi.embedded import Cluster, Fault
from genapi.events import Event, PhaseStarted, WorkerFenced
from genapi.weights import WeightSource
from tests.contract.embedded import QUICK, weights
from tests.support.leftovers import Leftovers
from tests.support.recorded import Recorded, RecordedCalls
from tests.support.spread import Spread

pytestmark = pytest.mark.anyio

JOIN, LEAVE = "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine"


def source(seed: int) -> WeightSource:
    return genapi.weights.from_tensors(weights(seed))


@asynccontextmanager
async def fleet_of(
    cluster: Cluster, *, run: str | None = "r", board: Board | None = None
) -> AsyncIterator[tuple[genapi.Fleet, RecordedCalls, list[Event]]]:
    calls, events = RecordedCalls(cluster), list[Event]()
    fleet = genapi.connect(
        "embedded://", transport=calls, run=run, board=board, observe=events.append
    )
    async with fleet:
        await fleet.wait_ready(timeout_s=5)
        yield fleet, calls, events


async def failed(publisher: WeightPublisher, step: int) -> PublishReport:
    with anyio.fail_after(10), pytest.raises(genapi.PublishError) as caught:
        await publisher.publish(step, source(1))
    report = caught.value.report
    assert isinstance(report, PublishReport)
    return report


def fails(cluster: Cluster, worker: int, path: str, action: str = "error") -> None:
    cluster.workers[worker].faults.add(Fault(path, action))  # type: ignore[arg-type]


# the group


async def test_after_a_change_of_membership_workers_join_the_new_group_and_no_other() -> None:
    cluster = Cluster.from_query({"workers": "2"})
    transport = Recorded()

    async def take_turns() -> None:
        for _ in range(20):
            await anyio.lowlevel.checkpoint()

    transport.on_sender = take_turns
    async with fleet_of(cluster) as (fleet, calls, _):
        async with WeightPublisher(fleet, transport=transport, timeouts=QUICK) as publisher:
            await publisher.publish(1, source(1))
            cluster.workers[1].restart()
            await fleet.snapshot()
            assert (await publisher.publish(2, source(0))).committed
            first, second = transport.senders
            assert first.events[-1] == "aclose"
            assert "aclose" not in second.events
        joined = {
            url: [body["init_info"]["master_port"] for body in bodies]
            for url, bodies in calls.bodies(JOIN).items()
        }
        assert joined == {"memory://0": [1, 2], "memory://1": [1, 2]}
        assert second.events[-1] == "aclose"


async def test_the_same_workers_stay_in_their_group() -> None:
    cluster = Cluster.from_query({"workers": "2"})
    transport = Recorded()
    async with fleet_of(cluster) as (fleet, calls, _):
        async with WeightPublisher(fleet, transport=transport, timeouts=QUICK) as publisher:
            await publisher.publish(1, source(1))
            await publisher.publish(2, source(0))
        assert {url: len(b) for url, b in calls.bodies(JOIN).items()} == {
            "memory://0": 1,
            "memory://1": 1,
        }
        assert transport.senders[0].events == ["join", "send", "send", "aclose"]


async def test_leaving_asks_every_worker_of_the_group_and_frees_the_sender() -> None:
    cluster = Cluster.from_query({"workers": "2"})
    transport = Recorded()
    async with fleet_of(cluster) as (fleet, calls, _):
        publisher = WeightPublisher(fleet, transport=transport, timeouts=QUICK)
        await publisher.publish(1, source(1))
        await publisher.aclose()
        assert set(calls.bodies(LEAVE)) == {"memory://0", "memory://1"}
        assert transport.senders[0].events[-1] == "aclose"
        await publisher.aclose()
        assert [len(bodies) for bodies in calls.bodies(LEAVE).values()] == [1, 1]


async def test_a_worker_that_does_not_let_go_holds_nobody_up() -> None:
    cluster = Cluster.from_query({"workers": "2"})
    transport = Recorded()
    async with fleet_of(cluster) as (fleet, _, _):
        publisher = WeightPublisher(
            fleet, transport=transport, timeouts=QUICK.model_copy(update={"cleanup_s": 0.1})
        )
        await publisher.publish(1, source(1))
        fails(cluster, 0, LEAVE, "never_answer")
        with anyio.fail_after(5):
            await publisher.aclose()
        assert transport.senders[0].events[-1] == "aclose"


@pytest.mark.parametrize("turns", [1, 2, 3, 4])
async def test_a_publisher_whose_close_is_cancelled_leaves_its_groups_all_the_same(
    turns: int,
) -> None:
    transport = Recorded()
    board = MemoryBoard()
    async with fleet_of(Cluster.from_query({"workers": "2"}), board=board) as (fleet, calls, _):
        publisher = WeightPublisher(fleet, transport=transport, timeouts=QUICK)
        await publisher.publish(1, source(1))
        async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
            closing = tasks.create_task(publisher.aclose())
            for _ in range(turns):
                await asyncio.sleep(0)
            closing.cancel()
        assert set(calls.bodies(LEAVE)) == {"memory://0", "memory://1"}
        assert transport.senders[0].events[-1] == "aclose"
        found, _ = await board.read()
        assert found is not None
        assert found.final


async def test_another_life_of_a_worker_is_not_asked_to_leave_a_group_it_was_never_in() -> None:
    cluster = Cluster.from_query({"workers": "2"})
    async with fleet_of(cluster) as (fleet, calls, _):
        publisher = WeightPublisher(fleet, transport=Recorded(), timeouts=QUICK)
        await publisher.publish(1, source(1))
        cluster.workers[1].restart()
        await fleet.snapshot()
        await publisher.aclose()
        assert set(calls.bodies(LEAVE)) == {"memory://0"}


# attempts and runs


async def test_every_attempt_of_a_step_has_a_number_of_its_own() -> None:
    cluster = Cluster.from_query({"workers": "2"})
    async with fleet_of(cluster) as (fleet, _, _):
        publisher = WeightPublisher(fleet, transport=Recorded(), timeouts=QUICK)
        for attempt in (1, 2):
            fails(cluster, 1, "/pause")  # before any label is written
            assert (await failed(publisher, 3)).version.attempt == attempt
        assert (await publisher.publish(3, source(1))).version.attempt == 3
        assert (await publisher.publish(4, source(1))).version.attempt == 1


async def test_another_publisher_counts_on_from_what_a_half_updated_worker_says() -> None:
    cluster = Cluster.from_query({"workers": "2"})
    async with fleet_of(cluster) as (fleet, _, _):
        publisher = WeightPublisher(fleet, transport=Recorded(), timeouts=QUICK)
        fails(cluster, 1, "/update_weights", "peer_lost")
        assert (await failed(publisher, 3)).version.attempt == 1
    async with fleet_of(cluster) as (fleet, _, _):
        publisher = WeightPublisher(fleet, transport=Recorded(), timeouts=QUICK)
        assert (await publisher.publish(3, source(1))).version.attempt == 2


async def test_a_version_of_another_run_is_refused_before_anybody_is_asked() -> None:
    cluster = Cluster.from_query({"workers": "1"})
    async with fleet_of(cluster) as (fleet, calls, _):
        publisher = WeightPublisher(fleet, transport=Recorded(), timeouts=QUICK)
        calls.calls.clear()
        other = PolicyVersion(run="other", step=1)
        with pytest.raises(genapi.ConfigError, match="run 'other', but the fleet's run is 'r'"):
            await publisher.publish(other, source(1))
        assert {path for _, path, _ in calls.calls} <= {"/server_info", "/weight_info", "/health"}


async def test_the_run_of_the_workers_is_gone_on_with_where_none_was_named() -> None:
    cluster = Cluster.from_query({"workers": "2"})
    async with fleet_of(cluster, run="first") as (fleet, _, _):
        await WeightPublisher(fleet, transport=Recorded(), timeouts=QUICK).adopt(3)
    async with fleet_of(cluster, run=None) as (fleet, _, _):
        publisher = WeightPublisher(fleet, transport=Recorded(), timeouts=QUICK)
        report = await publisher.publish(4, source(1))
        assert report.version == PolicyVersion(run="first", step=4)


# receipts


async def test_receipts_say_what_each_label_named_before_and_after() -> None:
    cluster = Cluster.from_query({"workers": "2"})
    async with fleet_of(cluster) as (fleet, _, _):
        publisher = WeightPublisher(fleet, transport=Recorded(), timeouts=QUICK)
        first = await publisher.publish(1, source(1))
        assert [r.version_before for r in first.receipts] == [None, None]
        assert [r.version_after for r in first.receipts] == [first.version] * 2
        second = await publisher.publish(2, source(0))
        assert [r.version_before for r in second.receipts] == [first.version] * 2
        assert [r.version_after for r in second.receipts] == [second.version] * 2


@pytest.mark.parametrize("path", ["/pause", "/update_weight_version"])
async def test_a_publication_that_ended_before_begin_leaves_the_versions_of_before(
    path: str,
) -> None:
    cluster = Cluster.from_query({"workers": "2"})
    async with fleet_of(cluster) as (fleet, _, _):
        publisher = WeightPublisher(fleet, transport=Recorded(), timeouts=QUICK)
        adopted = await publisher.adopt(0)
        fails(cluster, 1, path)
        report = await failed(publisher, 1)
        assert [r.version_after for r in report.receipts] == [adopted.version] * 2
        assert {w.version for w in (await fleet.snapshot()).workers} == {adopted.version}


async def test_a_worker_that_was_left_in_the_middle_holds_no_version() -> None:
    cluster = Cluster.from_query({"workers": "2"})
    async with fleet_of(cluster) as (fleet, _, _):
        publisher = WeightPublisher(fleet, transport=Recorded(), timeouts=QUICK)
        adopted = await publisher.adopt(0)
        fails(cluster, 1, "/update_weights", "peer_lost")
        report = await failed(publisher, 1)
        assert [r.version_before for r in report.receipts] == [adopted.version] * 2
        assert [r.version_after for r in report.receipts] == [None, None]


# what is left behind


async def test_publications_that_succeed_fail_and_are_cancelled_leave_nothing_behind() -> None:
    before = Leftovers()
    cluster = Cluster.from_query({"workers": "2"})
    async with fleet_of(cluster) as (fleet, calls, _):
        while_open = Leftovers()
        async with WeightPublisher(fleet, transport=Recorded(), timeouts=QUICK) as publisher:
            await publisher.publish(1, source(1))
            fails(cluster, 1, "/pause", "never_answer")
            await failed(publisher, 2)
            scope = anyio.CancelScope()

            def observe(event: Event) -> None:
                if isinstance(event, PhaseStarted) and event.phase == "transfer":
                    scope.cancel()

            fleet.observe = observe
            with scope:
                await publisher.publish(3, source(1))
            fleet.observe = lambda _: None
            await publisher.publish(4, source(1))
        await while_open.none()
    await calls.aclose()
    await before.none()


async def test_an_observer_that_fails_changes_nothing_of_how_a_failed_publication_ends() -> None:
    seen: list[Event] = []

    def observe(event: Event) -> None:
        seen.append(event)
        raise RuntimeError(event)

    spread = Spread(Cluster.from_query({"protocol": "vllm", "workers": "2"}))
    fleet = genapi.connect(spread.direct, transport=spread, run="r", observe=observe)
    async with fleet:
        p = WeightPublisher(fleet, transport=genapi.weights.Memory(), timeouts=QUICK)
        await p.adopt(0)
        spread.cluster.workers[0].faults.add(Fault("/update_weights", "peer_lost"))
        with pytest.raises(genapi.PublishError) as caught:
            await p.publish(1, genapi.weights.from_tensors(weights(1)))
        report = caught.value.report
        assert report == p.last_report
        assert all(receipt.fence is not None for receipt in report.receipts)
        workers = (await fleet.snapshot()).workers
        assert [w.fence for w in workers] == [r.fence for r in report.receipts]
    assert any(isinstance(event, WorkerFenced) for event in seen)
