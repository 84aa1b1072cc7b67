"""Publications through files: whole before anybody is paused, and there for as long as needed."""

import json
import pathlib
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import pytest
from anyio.abc import TaskStatus

import genapi
from genapi import Outcome, WeightPublisher
from genapi.board import MemoryBoard, Reading, take_epoch
from genapi.embedded import Cluster, Fault
from genapi.events import Event, OldVersionsKept, PhaseStarted, SenderProgress
from genapi.transports.memory import MemoryTransport
from genapi.types.worker import Evidence, FenceStrength, PublishReport, Receipt, Recovery
from genapi.weights import Filesystem, from_tensors
from genapi.weights._disk import PosixDisk
from tests.contract.embedded import QUICK, greedy, request, weights
from tests.support.recorded import RecordedCalls

pytestmark = pytest.mark.anyio

PROMPT = [1, 2, 3]
PATIENT = QUICK.model_copy(update={"stage_s": 20.0})
"""As `QUICK`, with the time that a busy disk takes."""
LOAD = {
    "vllm": "/collective_rpc",
    "sglang": "/update_weights_from_disk",
    "dynamo": "/engine/update_weights_from_disk",
    "collective": "/collective_rpc",
}
PAUSE = {
    "vllm": "/pause",
    "sglang": "/pause_generation",
    "dynamo": "/engine/pause_generation",
}
RESUME = {
    "vllm": "/resume",
    "sglang": "/continue_generation",
    "dynamo": "/engine/resume_generation",
}
LABEL = {
    "vllm": "/update_weight_version",
    "sglang": "/update_weight_version",
    "dynamo": "/engine/set_weight_version",
}
WHO = {
    "vllm": "/server_info",
    "sglang": "/model_info",
    "dynamo": "/engine/get_weight_version",
}
"""What every reading of a worker asks."""
READS = {"vllm": 2, "sglang": 2, "dynamo": 3}
"""How often a publication reads a worker that says nothing, before it leaves it out."""
CLOSE, REPUBLISH = Recovery.CLOSE_THEN_REPUBLISH, Recovery.REPUBLISH


@dataclass
class Rig:
    """A fleet, what serves it, and what happened.

    Attributes:
        load: the path by which a worker is told to load.
    """

    load: str
    fleet: genapi.Fleet
    cluster: Cluster
    transport: RecordedCalls
    events: list[Event] = field(default_factory=list)
    on: Callable[[Event], None] = lambda _event: None

    def observe(self, event: Event) -> None:
        self.events.append(event)
        self.on(event)

    @property
    def phases(self) -> list[str]:
        return [event.phase for event in self.events if isinstance(event, PhaseStarted)]

    def receipts(self, report: PublishReport) -> list[Receipt]:
        """The receipts in the order of the workers, which a list need not have."""
        of_url = {receipt.url: receipt for receipt in report.receipts}
        return [of_url[url] for url in self.cluster.names if url in of_url]

    def fail(self, worker: int, action: Any, **details: Any) -> None:
        """Let the next load of that worker go wrong."""
        self.cluster.workers[worker].faults.add(Fault(self.load, action, **details))

    async def serves(self, step: int) -> None:
        """Every worker generates what the weights of that step make."""
        for session in "abcdefgh":
            reply = await self.fleet.generate(request(session=session))
            assert reply.output.token_ids == greedy(step, PROMPT, 8)
            assert reply.output.policy.is_pure
            newest = reply.output.policy.newest
            assert newest is not None
            assert newest.step == step


@pytest.fixture(params=["vllm", "sglang", "dynamo"])
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def rig(protocol: str, workers: int = 2, **query: str) -> AsyncIterator[Rig]:
    cluster = Cluster.from_query({"protocol": protocol, "workers": str(workers), **query})
    told: list[Rig] = []
    transport = RecordedCalls(cluster)
    fleet = genapi.connect(
        f"embedded://?protocol={protocol}",
        transport=transport,
        run="r",
        admin_timeout_s=1.0,
        refresh_s=60.0,
        observe=lambda event: told[0].observe(event) if told else None,
    )
    async with fleet:
        await fleet.wait_ready(timeout_s=5)
        told.append(Rig(LOAD.get(query.get("family", protocol), ""), fleet, cluster, transport))
        yield told[0]


def publisher(r: Rig, transport: Filesystem, **options: Any) -> WeightPublisher:
    return WeightPublisher(r.fleet, transport=transport, timeouts=PATIENT, **options)


def source(step: int) -> genapi.weights.WeightSource:
    return from_tensors(weights(step))


def versions(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


async def failed(p: WeightPublisher, step: int) -> PublishReport:
    with anyio.fail_after(10), pytest.raises(genapi.PublishError) as caught:
        await p.publish(step, source(step))
    report = caught.value.report
    assert isinstance(report, PublishReport)
    return report


async def cancelled(
    r: Rig, p: WeightPublisher, step: int, *, when: Callable[[Event], bool]
) -> None:
    with anyio.CancelScope() as scope:

        def cancel(event: Event) -> None:
            if when(event):
                scope.cancel()

        r.on = cancel
        await p.publish(step, source(step))
    r.on = lambda _event: None


def is_written(event: Event) -> bool:
    return isinstance(event, SenderProgress) and event.what == "written"


def is_begun(event: Event) -> bool:
    return isinstance(event, PhaseStarted) and event.phase == "begin"


async def test_every_worker_serves_the_weights_of_the_files_under_the_published_version(
    protocol: str, tmp_path: pathlib.Path
) -> None:
    async with rig(protocol) as r, publisher(r, Filesystem(tmp_path)) as p:
        await p.adopt(0)
        size = sum(array.nbytes for array in weights(1).values())
        for step in (1, 2):
            report = await p.publish(step, source(step))
            assert [x.outcome for x in report.receipts] == [Outcome.COMMITTED] * 2
            assert [x.evidence for x in report.receipts] == [Evidence.OWN_LABEL] * 2
            assert [x.bytes_sent for x in report.receipts] == [size] * 2
            await r.serves(step)
        assert versions(tmp_path) == ["r-2-1"]
        written = [e for e in r.events if isinstance(e, SenderProgress) and e.what == "written"]
        assert written[-1].bytes_done == written[-1].bytes_total == size


async def test_a_version_is_whole_and_marked_before_anybody_is_paused(
    protocol: str, tmp_path: pathlib.Path
) -> None:
    marked: list[bool] = []
    async with rig(protocol) as r, publisher(r, Filesystem(tmp_path)) as p:

        def look(event: Event) -> None:
            if isinstance(event, PhaseStarted) and event.phase in ("stage", "pause"):
                marked.append((tmp_path / "r-1-1" / "STABLE").exists())

        r.on = look
        await p.publish(1, source(1))
    assert marked == [False, True]


async def test_a_kept_request_goes_on_with_the_weights_of_the_files(
    protocol: str, tmp_path: pathlib.Path
) -> None:
    replies: list[genapi.GenerateResponse] = []
    async with rig(protocol, 1) as r, publisher(r, Filesystem(tmp_path)) as p:

        async def ask(*, task_status: TaskStatus[None]) -> None:
            async with r.fleet.stream(request(tokens=1500)) as events:
                await anext(events)
                task_status.started()
                last = [event async for event in events][-1]
                assert isinstance(last, genapi.Finished)
                replies.append(last.reply)

        await p.adopt(0)
        async with anyio.create_task_group() as group:
            r.transport.before_pause = partial(group.start, ask)
            await p.publish(1, source(1))
        named = [(s.lo.step, s.hi.step) for s in replies[0].output.policy.spans if s.lo and s.hi]
    assert named == ([(0, 1)] if protocol == "dynamo" else [(0, 0), (1, 1)])


async def test_what_cannot_be_written_pauses_nobody(protocol: str, tmp_path: pathlib.Path) -> None:
    async with rig(protocol) as r, publisher(r, Filesystem(tmp_path / "gone" / "w")) as p:
        await p.adopt(0)
        report = await failed(p, 1)
        assert "create or mount it" in str(report.error)
        assert [x.outcome for x in report.receipts] == [Outcome.UNTOUCHED] * 2
        assert [x.fence for x in report.receipts] == [None, None]
        assert r.phases == ["preflight", "stage"]
        (tmp_path / "gone").mkdir()
        assert (await p.publish(2, source(2))).committed
        await r.serves(2)


async def test_a_path_that_the_workers_do_not_have_is_named_with_the_remedy_and_can_be_mended(
    protocol: str, tmp_path: pathlib.Path
) -> None:
    mount = tmp_path / "mount"
    transport = Filesystem(tmp_path / "w", worker_dir=str(mount))
    async with rig(protocol) as r, publisher(r, transport) as p:
        report = await failed(p, 1)
        for receipt in report.receipts:
            assert receipt.recovery is (REPUBLISH if protocol == "sglang" else CLOSE)
            assert receipt.fence is not None
            assert f"{str(mount / 'r-1-1')!r}" in (receipt.error or "")
            assert "worker_dir=" in (receipt.error or "")
        mount.symlink_to(tmp_path / "w")
        assert (await p.publish(1, source(1))).committed
        await r.serves(1)


async def test_a_lost_answer_to_a_load_proves_nothing_and_the_next_publication_heals_it(
    protocol: str, tmp_path: pathlib.Path
) -> None:
    async with rig(protocol) as r, publisher(r, Filesystem(tmp_path)) as p:
        await p.adopt(0)
        r.fail(1, "lose_reply")
        report = await failed(p, 1)
        ours, lost = r.receipts(report)
        # Each fails alone: the other holds the version, and waits for it.
        assert (ours.outcome, ours.recovery) == (Outcome.COMMITTED, REPUBLISH)
        assert (lost.outcome, lost.recovery) == (Outcome.UNKNOWN, CLOSE)
        assert (await p.publish(1, source(2))).version.attempt == 2
        for session in "abcdefgh":
            reply = await r.fleet.generate(request(session=session))
            assert reply.output.token_ids == greedy(2, PROMPT, 8)


async def test_what_a_worker_may_still_be_reading_stays_until_it_is_proved(
    protocol: str, tmp_path: pathlib.Path
) -> None:
    async with (
        rig(protocol) as r,
        publisher(r, Filesystem(tmp_path), on_partial="serve", min_workers=1) as p,
    ):
        await p.publish(1, source(1))
        r.fail(0, "never_answer")
        report = await p.publish(2, source(2))
        assert [x.outcome for x in r.receipts(report)] == [Outcome.UNKNOWN, Outcome.COMMITTED]
        # Now it does not say who it is either, and is left out.
        for nth in range(READS[protocol]):
            silence = Fault(WHO[protocol], "never_answer", nth=nth + 1)
            r.cluster.workers[0].faults.add(silence)
        report = await p.publish(3, source(3))
        assert "left out" in str(r.receipts(report)[0].error)
        assert versions(tmp_path) == ["r-2-1", "r-3-1"]
        report = await p.publish(4, source(4))
        assert [x.outcome for x in report.receipts] == [Outcome.COMMITTED] * 2
        assert versions(tmp_path) == ["r-4-1"]


async def test_nobody_reads_for_a_worker_that_died(protocol: str, tmp_path: pathlib.Path) -> None:
    async with (
        rig(protocol) as r,
        publisher(r, Filesystem(tmp_path), on_partial="serve", min_workers=1) as p,
    ):
        r.fail(0, "die_during")
        report = await p.publish(1, source(1))
        assert r.receipts(report)[0].outcome is Outcome.UNKNOWN
        await p.publish(2, source(2))
        assert versions(tmp_path) == ["r-2-1"]


async def test_the_next_publisher_keeps_what_an_unfinished_publication_may_need(
    protocol: str, tmp_path: pathlib.Path
) -> None:
    async with rig(protocol) as r:
        async with publisher(r, Filesystem(tmp_path)) as first:
            await first.publish(1, source(1))
            r.fail(0, "never_answer")
            await failed(first, 2)
        assert versions(tmp_path) == ["r-1-1", "r-2-1"]
        # One that knows nothing of it finds the version in the worker's label.
        async with genapi.connect(
            f"embedded://?protocol={protocol}", transport=MemoryTransport(r.cluster), run="r"
        ) as fleet:
            await fleet.wait_ready(timeout_s=5)
            async with WeightPublisher(
                fleet,
                transport=Filesystem(tmp_path),
                timeouts=QUICK,
                on_partial="serve",
                min_workers=1,
            ) as heir:
                r.fail(0, "lose_reply")
                await heir.publish(3, source(3))
                assert versions(tmp_path) == ["r-3-1"]
                assert (await heir.publish(4, source(4))).committed
                assert versions(tmp_path) == ["r-4-1"]


async def test_a_publication_cancelled_while_it_writes_leaves_nothing_and_pauses_nobody(
    protocol: str, tmp_path: pathlib.Path
) -> None:
    async with rig(protocol) as r, publisher(r, Filesystem(tmp_path, bucket_tensors=1)) as p:
        await cancelled(r, p, 1, when=is_written)
        assert versions(tmp_path) == []
        assert "pause" not in r.phases
        assert (await p.publish(2, source(2))).committed


async def test_a_publication_cancelled_before_a_load_leaves_workers_that_hold_the_old_weights(
    protocol: str, tmp_path: pathlib.Path
) -> None:
    async with rig(protocol) as r, publisher(r, Filesystem(tmp_path)) as p:
        await p.publish(1, source(1))
        await cancelled(r, p, 2, when=is_begun)
        report = p.last_report
        assert report is not None
        assert [x.outcome for x in report.receipts] == [Outcome.UNTOUCHED] * 2
        assert [x.recovery for x in report.receipts] == [REPUBLISH] * 2
        assert (await p.publish(3, source(3))).committed
        await r.serves(3)


async def test_attempts_that_told_nobody_to_load_leave_no_files(
    protocol: str, tmp_path: pathlib.Path
) -> None:
    async with rig(protocol) as r, publisher(r, Filesystem(tmp_path, keep=2)) as p:
        await p.publish(1, source(1))
        for step in (2, 2, 3):
            for worker in r.cluster.workers:
                worker.faults.add(Fault(PAUSE[protocol], "error"))
            report = await failed(p, step)
            assert [x.outcome for x in report.receipts] == [Outcome.UNTOUCHED] * 2
            assert versions(tmp_path) == ["r-1-1"]
        await cancelled(r, p, 4, when=is_begun)
        assert versions(tmp_path) == ["r-1-1"]
        assert (await p.publish(4, source(4))).committed
        assert versions(tmp_path) == ["r-1-1", "r-4-2"]
        assert not [event for event in r.events if isinstance(event, OldVersionsKept)]


async def test_a_version_that_a_worker_was_told_to_load_stays_though_later_attempts_fail(
    protocol: str, tmp_path: pathlib.Path
) -> None:
    async with rig(protocol) as r, publisher(r, Filesystem(tmp_path)) as p:
        r.fail(1, "lose_reply")
        await failed(p, 1)
        for worker in r.cluster.workers:
            worker.faults.add(Fault(PAUSE[protocol], "error"))
        await failed(p, 1)
        assert versions(tmp_path) == ["r-1-1"]
        await p.publish(1, source(1))
        assert versions(tmp_path) == ["r-1-3"]


async def test_an_attempt_that_failed_takes_no_place_of_a_version_to_roll_back_to(
    protocol: str, tmp_path: pathlib.Path
) -> None:
    async with rig(protocol) as r, publisher(r, Filesystem(tmp_path, keep=2)) as p:
        await p.publish(7, source(7))
        r.fail(1, "lose_reply")
        await failed(p, 8)
        assert versions(tmp_path) == ["r-7-1", "r-8-1"]
        await p.publish(8, source(8))
        assert versions(tmp_path) == ["r-7-1", "r-8-2"]
        r.fail(1, "lose_reply")
        await failed(p, 9)
        await p.publish(10, source(10))
        assert versions(tmp_path) == ["r-10-1", "r-8-2"]


async def test_attempts_that_fail_in_the_load_leave_no_more_than_what_may_be_read(
    protocol: str, tmp_path: pathlib.Path
) -> None:
    async with rig(protocol) as r, publisher(r, Filesystem(tmp_path)) as p:
        await p.publish(1, source(1))
        for attempt in (1, 2, 3):
            r.fail(1, "lose_reply")
            await failed(p, 2)
            assert versions(tmp_path) == ["r-1-1", f"r-2-{attempt}"]


async def test_a_version_that_was_loaded_and_not_labelled_goes_at_once(
    protocol: str, tmp_path: pathlib.Path
) -> None:
    async with rig(protocol, workers=1) as r, publisher(r, Filesystem(tmp_path)) as p:
        await p.publish(1, source(1))
        # The second label of a publication is its own, after the load.
        r.cluster.workers[0].faults.add(Fault(LABEL[protocol], "error", nth=2))
        (receipt,) = (await failed(p, 2)).receipts
        assert receipt.evidence is Evidence.OTHER_LABEL
        assert versions(tmp_path) == ["r-1-1"]
        assert (await p.publish(2, source(2))).committed
        assert versions(tmp_path) == ["r-2-2"]


async def test_a_version_that_committed_and_was_not_resumed_everywhere_is_one_to_roll_back_to(
    protocol: str, tmp_path: pathlib.Path
) -> None:
    async with rig(protocol) as r, publisher(r, Filesystem(tmp_path, keep=2)) as p:
        await p.publish(1, source(1))
        r.cluster.workers[1].faults.add(Fault(RESUME[protocol], "error"))
        report = await failed(p, 2)
        assert [x.outcome for x in report.receipts] == [Outcome.COMMITTED] * 2
        await p.publish(3, source(3))
        assert versions(tmp_path) == ["r-2-1", "r-3-1"]


async def test_a_publisher_that_closes_removes_a_failed_version_once_nobody_may_be_reading_it(
    protocol: str, tmp_path: pathlib.Path
) -> None:
    async with rig(protocol) as r:
        async with publisher(r, Filesystem(tmp_path)) as p:
            await p.publish(1, source(1))
            r.fail(1, "never_answer")
            for worker in r.cluster.workers[:1]:
                worker.faults.add(Fault(LOAD[protocol], "error"))
            await failed(p, 2)
            assert versions(tmp_path) == ["r-1-1", "r-2-1"]
            for worker in r.cluster.workers:
                worker.kill()
                worker.restart()
        assert versions(tmp_path) == ["r-1-1"]
        assert not [event for event in r.events if isinstance(event, OldVersionsKept)]


async def test_a_publisher_that_closes_says_which_failed_version_a_worker_may_be_reading(
    protocol: str, tmp_path: pathlib.Path
) -> None:
    async with rig(protocol) as r:
        async with publisher(r, Filesystem(tmp_path)) as p:
            await p.publish(1, source(1))
            r.fail(1, "never_answer")
            report = await failed(p, 2)
        assert versions(tmp_path) == ["r-1-1", "r-2-1"]
        (kept,) = [event for event in r.events if isinstance(event, OldVersionsKept)]
        assert kept.version == report.version
        assert all(str(receipt.worker) in kept.error for receipt in report.receipts)
        assert "by hand" in kept.error


async def test_a_publisher_that_was_superseded_removes_nothing_when_it_closes(
    protocol: str, tmp_path: pathlib.Path
) -> None:
    board = MemoryBoard()
    cluster = Cluster.from_query({"protocol": protocol, "workers": "1"})
    target = f"embedded://?protocol={protocol}"
    kept: list[Event] = []

    def observe(event: Event) -> None:
        if isinstance(event, OldVersionsKept):
            kept.append(event)

    async with genapi.connect(
        target, transport=MemoryTransport(cluster), run="r", board=board, observe=observe
    ) as fleet:
        await fleet.wait_ready(timeout_s=5)
        p = WeightPublisher(fleet, transport=Filesystem(tmp_path), timeouts=QUICK)
        cluster.workers[0].faults.add(Fault(LOAD[protocol], "lose_reply"))
        await failed(p, 1)
        await take_epoch(board, "another")
        cluster.workers[0].kill()
        cluster.workers[0].restart()
        await p.aclose()
    assert versions(tmp_path) == ["r-1-1"]
    assert not kept


class Silent(MemoryBoard):
    """A board that says nothing more from some moment on."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.silent = how, False

    async def read(self) -> Reading:
        if self.silent and self.how == "hangs":
            await anyio.sleep_forever()
        if self.silent:
            raise genapi.TransportError("no route to the board", phase="not_sent")
        return await super().read()


@pytest.mark.parametrize("how", ["hangs", "fails"])
async def test_a_publisher_that_cannot_read_the_board_when_it_closes_removes_nothing_and_says_why(
    how: str, tmp_path: pathlib.Path
) -> None:
    board = Silent(how)
    cluster = Cluster.from_query({"protocol": "vllm", "workers": "1"})
    kept: list[str] = []

    def observe(event: Event) -> None:
        if isinstance(event, OldVersionsKept):
            kept.append(event.error)

    fleet = genapi.connect(
        "embedded://", transport=MemoryTransport(cluster), run="r", board=board, observe=observe
    )
    async with fleet:
        await fleet.wait_ready(timeout_s=5)
        p = WeightPublisher(fleet, transport=Filesystem(tmp_path), timeouts=QUICK)
        cluster.workers[0].faults.add(Fault(LOAD["vllm"], "lose_reply"))
        await failed(p, 1)
        board.silent = True
        cluster.workers[0].kill()
        cluster.workers[0].restart()
        with anyio.fail_after(10):
            await p.aclose()
    assert versions(tmp_path) == ["r-1-1"]
    assert [("board" in error, "by hand" in error) for error in kept] == [(True, True)]


async def test_a_publisher_that_was_superseded_leaves_the_other_ones_files_alone(
    protocol: str, tmp_path: pathlib.Path
) -> None:
    board = MemoryBoard()
    cluster = Cluster.from_query({"protocol": protocol, "workers": "1"})

    def process(transport: MemoryTransport) -> genapi.Fleet:
        target = f"embedded://?protocol={protocol}"
        return genapi.connect(target, transport=transport, run="r", board=board)

    transport = RecordedCalls(cluster)
    async with process(transport) as one, process(MemoryTransport(cluster)) as two:
        first, second = (
            WeightPublisher(fleet, transport=Filesystem(tmp_path), timeouts=QUICK)
            for fleet in (one, two)
        )
        await one.wait_ready(timeout_s=5)
        await two.wait_ready(timeout_s=5)

        async def take_over() -> None:
            # Names and files of the other one stay its own, for as long as it lives.
            assert (await second.publish(1, source(1))).version.attempt == 2

        transport.before_pause = take_over
        with pytest.raises(genapi.SupersededError):
            await first.publish(1, source(1))
        for step in (2, 3):
            assert (await second.publish(step, source(step))).committed
        assert versions(tmp_path) == ["r-1-1", "r-3-1"]
        await first.aclose()
        assert (await second.publish(4, source(4))).committed
        assert versions(tmp_path) == ["r-4-1"]
        await second.aclose()


async def test_a_publisher_is_refused_where_another_one_that_lives_publishes_the_same_run(
    protocol: str, tmp_path: pathlib.Path
) -> None:
    async with rig(protocol) as a, rig(protocol) as b:
        async with publisher(a, Filesystem(tmp_path)) as first:
            assert (await first.publish(1, source(1))).committed
            async with publisher(b, Filesystem(tmp_path)) as second:
                report = await failed(second, 1)
                assert "another publisher of this process" in str(report.error)
                assert "another run=" in str(report.error)
                assert [x.outcome for x in report.receipts] == [Outcome.UNTOUCHED] * 2
                assert b.phases == ["preflight", "stage"]
                assert versions(tmp_path) == ["r-1-1"]
            assert (await first.publish(2, source(2))).committed
        # Once the first is gone, its names stay its own.
        async with publisher(b, Filesystem(tmp_path)) as second:
            assert (await second.publish(2, source(3))).version.attempt == 2
            for session in "abcdefgh":
                reply = await b.fleet.generate(request(session=session))
                assert reply.output.token_ids == greedy(3, PROMPT, 8)
        await a.serves(2)


async def test_two_fleets_of_one_run_with_a_board_each_serve_their_own_weights(
    tmp_path: pathlib.Path,
) -> None:
    clusters = [Cluster.from_query({"workers": "1"}) for _ in range(2)]
    fleets = [
        genapi.connect(
            "embedded://", transport=MemoryTransport(cluster), run="r", board=MemoryBoard()
        )
        for cluster in clusters
    ]
    async with fleets[0] as one, fleets[1] as two:
        await one.wait_ready(timeout_s=5)
        await two.wait_ready(timeout_s=5)
        first, second = (
            WeightPublisher(fleet, transport=Filesystem(tmp_path), timeouts=PATIENT)
            for fleet in (one, two)
        )
        for step in (1, 2):
            for p, fleet, seed in ((first, one, step), (second, two, step + 10)):
                assert (await p.publish(step, source(seed))).committed
                reply = await fleet.generate(request())
                assert reply.output.token_ids == greedy(seed, PROMPT, 8)
        # Neither takes those of the other for old ones of its own.
        assert versions(tmp_path) == ["r-2-1", "r-2-2"]
        await first.publish(3, source(3))
        assert versions(tmp_path) == ["r-2-2", "r-3-1"]
        await first.aclose()
        await second.aclose()
        assert sorted(PosixDisk().names(tmp_path)) == versions(tmp_path)


async def test_a_trainer_that_died_after_it_marked_a_version_publishes_it_as_the_next_attempt(
    protocol: str, tmp_path: pathlib.Path
) -> None:
    async with rig(protocol) as r, publisher(r, Filesystem(tmp_path)) as p:
        (tmp_path / "r-1-1").mkdir()
        (tmp_path / "r-1-1" / "STABLE").touch()
        (tmp_path / "r-1-2").mkdir()
        (tmp_path / "r-1-2" / "mine").write_text("not genapi's")
        assert (await p.publish(1, source(1))).version.attempt == 3
        await r.serves(1)
        assert versions(tmp_path) == ["r-1-2", "r-1-3"]


async def test_files_of_a_failed_attempt_that_cannot_be_removed_are_told(
    protocol: str, tmp_path: pathlib.Path
) -> None:
    async with (
        rig(protocol) as r,
        publisher(r, Filesystem(tmp_path, disk=Stubborn())) as p,
    ):
        r.cluster.workers[0].faults.add(Fault(PAUSE[protocol], "error"))
        report = await failed(p, 1)
        assert "injected" in (report.error or "")
        (kept,) = [event for event in r.events if isinstance(event, OldVersionsKept)]
        assert kept.version == report.version
        assert "cannot be written" in kept.error


async def test_a_failed_version_that_cannot_be_removed_keeps_no_other_from_going(
    protocol: str, tmp_path: pathlib.Path
) -> None:
    async with rig(protocol) as r:
        async with publisher(r, Filesystem(tmp_path)) as p:
            await p.publish(1, source(1))
            r.fail(1, "lose_reply")
            stays = (await failed(p, 2)).version
            (tmp_path / "r-2-1" / "eval").mkdir()
            for step in (3, 4):
                report = await p.publish(step, source(step))
                assert versions(tmp_path) == ["r-2-1", f"r-{step}-1"]
                told = r.events[-1]
                assert isinstance(told, OldVersionsKept)
                assert (told.version, "eval" in told.error) == (report.version, True)
            r.fail(1, "never_answer")
            await failed(p, 5)
            assert versions(tmp_path) == ["r-2-1", "r-4-1", "r-5-1"]
            for worker in r.cluster.workers:
                worker.kill()
                worker.restart()
            r.events.clear()
        assert versions(tmp_path) == ["r-2-1", "r-4-1"]
        (kept,) = [event for event in r.events if isinstance(event, OldVersionsKept)]
        assert (kept.version, "eval" in kept.error) == (stays, True)


class Looking(PosixDisk):
    """Counts how often each file was asked to be locked."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    def lock(self, path: pathlib.Path, *, make: bool = True) -> int | None:
        self.asked[path.parent.name] += 1
        return super().lock(path, make=make)


async def test_a_publication_looks_once_at_what_others_write(tmp_path: pathlib.Path) -> None:
    disk, held = Looking(), PosixDisk()
    async with rig("vllm") as r, publisher(r, Filesystem(tmp_path, disk=disk)) as p:
        (tmp_path / "other-3-1").mkdir()
        file = held.lock(tmp_path / "other-3-1" / ".writing")
        assert file is not None
        await p.publish(1, source(1))
        held.close(file)
        assert disk.asked["other-3-1"] == 1
        await p.publish(2, source(2))
        assert disk.asked["other-3-1"] == 2
        assert versions(tmp_path) == ["r-2-1"]


async def test_one_worker_that_fails_takes_no_other_with_it(
    protocol: str, tmp_path: pathlib.Path
) -> None:
    async with (
        rig(protocol, 3) as r,
        publisher(r, Filesystem(tmp_path), on_partial="serve", min_workers=2) as p,
    ):
        r.fail(1, "error", body='{"message":"disk on fire"}')
        report = await p.publish(1, source(1))
        assert report.committed
        receipts = r.receipts(report)
        outcomes = [x.outcome for x in receipts]
        assert outcomes == [Outcome.COMMITTED, Outcome.DIRTY, Outcome.COMMITTED]
        assert receipts[1].recovery is Recovery.RESTART_THEN_PUBLISH
        await r.serves(1)


class Stubborn(PosixDisk):
    """Removes nothing from the folder of step 1."""

    def remove(self, path: pathlib.Path) -> None:
        if path.parent.name == "r-1-1" and path.name != ".writing":
            raise PermissionError(13, "Permission denied", str(path))
        super().remove(path)


async def test_old_files_that_cannot_be_removed_are_told_and_fail_nothing(
    protocol: str, tmp_path: pathlib.Path
) -> None:
    disk = Stubborn()
    async with rig(protocol) as r, publisher(r, Filesystem(tmp_path, disk=disk)) as p:
        (tmp_path / "r-1-1").mkdir()
        (tmp_path / "r-1-1" / "STABLE").touch()
        report = await p.publish(2, source(2))
        assert report.committed
        (kept,) = [event for event in r.events if isinstance(event, OldVersionsKept)]
        assert kept.version == report.version
        assert "cannot be written" in kept.error
        await r.serves(2)


async def test_replicas_of_sglang_load_files_though_they_have_no_ranks(
    tmp_path: pathlib.Path,
) -> None:
    async with rig("sglang", 1, dp_size="2") as r:
        async with WeightPublisher(
            r.fleet, transport=genapi.weights.Memory(), timeouts=QUICK
        ) as refused:
            report = await failed(refused, 1)
            assert "weights.Filesystem(dir)" in str(report.receipts[0].error)
        async with publisher(r, Filesystem(tmp_path)) as p:
            assert (await p.publish(1, source(1))).committed
            await r.serves(1)


of_vllm = pytest.mark.parametrize(
    ("protocol", "query"),
    [("vllm", {}), ("dynamo", {}), ("dynamo", {"family": "collective"})],
    ids=["vllm", "dynamo", "collective"],
    indirect=["protocol"],
)


@of_vllm
async def test_vllm_without_weight_transfer_loads_files_but_cannot_be_healed(
    protocol: str, query: dict[str, str], tmp_path: pathlib.Path
) -> None:
    async with (
        rig(protocol, 1, weight_transfer="false", **query) as r,
        publisher(r, Filesystem(tmp_path)) as p,
    ):
        assert (await p.publish(1, source(1))).committed
        await r.serves(1)
        r.fail(0, "lose_reply")
        assert (await failed(p, 2)).receipts[0].recovery is CLOSE
        (receipt,) = (await failed(p, 3)).receipts
        assert receipt.recovery is Recovery.RESTART_THEN_PUBLISH
        assert "--weight-transfer-config" in (receipt.error or "")


@of_vllm
async def test_a_load_that_fails_half_way_leaves_vllm_in_pieces_and_closing_it_mends_that(
    protocol: str, query: dict[str, str], tmp_path: pathlib.Path
) -> None:
    async with (
        rig(protocol, 1, **query) as r,
        publisher(r, Filesystem(tmp_path, shard_bytes=1)) as p,
    ):

        def cut(event: Event) -> None:
            if isinstance(event, PhaseStarted) and (event.phase, event.version.step) == (
                "begin",
                1,
            ):
                shard = max((tmp_path / "r-1-1").glob("*.safetensors"))
                shard.write_bytes(shard.read_bytes()[:-1])

        r.on = cut
        (receipt,) = (await failed(p, 1)).receipts
        assert (receipt.outcome, receipt.recovery) == (Outcome.DIRTY, CLOSE)
        assert "file not fully covered" in (receipt.error or "")
        assert (await p.publish(2, source(2))).committed
        await r.serves(2)


async def test_a_file_that_cannot_be_read_takes_sglang_down(tmp_path: pathlib.Path) -> None:
    async with rig("sglang", 1) as r, publisher(r, Filesystem(tmp_path)) as p:

        def cut(event: Event) -> None:
            if isinstance(event, PhaseStarted) and event.phase == "begin":
                shard = tmp_path / "r-1-1" / "model.safetensors"
                shard.write_bytes(shard.read_bytes()[:-1])

        r.on = cut
        (receipt,) = (await failed(p, 1)).receipts
        assert receipt.outcome is Outcome.UNKNOWN
        assert receipt.fence is not None
        assert receipt.fence.strength is FenceStrength.DEAD


async def test_what_is_no_weight_transport_is_refused() -> None:
    async with rig("vllm", 1) as r:
        with pytest.raises(genapi.ConfigError, match=r"is no weight transport: .*Filesystem"):
            WeightPublisher(r.fleet, transport="/weights")  # type: ignore[arg-type]


async def test_a_sidecar_that_names_no_server_of_its_engine_is_refused_before_it_is_paused(
    tmp_path: pathlib.Path,
) -> None:
    async with rig("dynamo", 1, family="sidecar") as r, publisher(r, Filesystem(tmp_path)) as p:
        before = len(r.transport.calls)
        with pytest.raises(genapi.UnsupportedError, match=r"load files.*use genapi\.weights\.Gloo"):
            await p.publish(1, source(1))
        assert r.phases == []
        assert not [path for _, path, _ in r.transport.calls[before:] if "pause_gen" in path]


async def test_prefill_and_decode_workers_load_files_where_nothing_has_to_recompute(
    tmp_path: pathlib.Path,
) -> None:
    async with (
        rig("dynamo", 2, prefill="1") as r,
        publisher(r, Filesystem(tmp_path), mode="drain") as p,
    ):
        assert (await p.publish(1, source(1))).committed
        await r.serves(1)


# behind a socket


@pytest.fixture
def target(protocol: str) -> Iterator[str]:
    """Where two workers are, in processes of their own."""
    flags = [["--workers", "2"]] if protocol == "dynamo" else [["--index", "0"], ["--index", "1"]]
    started: list[subprocess.Popen[str]] = []
    urls: list[str] = []
    try:
        for more in flags:
            command = [sys.executable, "-m", "genapi.embedded", "--protocol", protocol, *more]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            started.append(process)
        for process in started:
            assert process.stdout is not None
            facts = json.loads(process.stdout.readline())
            urls += facts.get("urls", [facts.get("url")])
        places = [url.removeprefix("http://") for url in urls]
        if protocol == "dynamo":
            yield f"dynamo://{places[0]}?discovery={places[1]}"
        else:
            yield f"{protocol}://{','.join(places)}"
    finally:
        for process in started:
            process.kill()
            process.communicate()


async def test_workers_in_other_processes_load_from_where_the_files_are_for_them(
    target: str, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").symlink_to(tmp_path / "here")
    transport = Filesystem(
        tmp_path / "here", worker_dir=str(tmp_path / "there"), shard_bytes=5000, keep=2
    )
    async with genapi.connect(target, run="r") as fleet:
        await fleet.wait_ready(timeout_s=20)
        async with WeightPublisher(fleet, transport=transport) as p:
            for step in (1, 2, 3):
                report = await p.publish(step, source(step))
                assert [x.outcome for x in report.receipts] == [Outcome.COMMITTED] * 2
                for session in "abcd":
                    reply = await fleet.generate(request(session=session))
                    assert reply.output.token_ids == greedy(step, PROMPT, 8)
                    assert reply.output.policy.oldest == report.version
        assert versions(tmp_path / "here") == ["r-2-1", "r-3-1"]
