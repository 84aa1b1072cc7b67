"""Publications that share a board: one winner, and what others learn from it."""

import asyncio
import pathlib
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

import genapi
from genapi import Outcome, PublishReport, SupersededError, TransportError, WeightPublisher
from genapi.board import MemoryBoard, Reading, Token, new_holder, open_board, take_epoch
from genapi.embedded import Cluster, Fault
from genapi.events import AdminCalled, Event, PhaseEnded, PhaseStarted, WorkerFenced, ignore
from genapi.providers.vllm import Options
from genapi.providers.vllm.admin import VLLMAdmin
from genapi.providers.vllm.provider import VLLM
from genapi.transports.memory import MemoryTransport
from genapi.types.board import BoardState, BoardWorker
from genapi.types.worker import FenceStrength, Recovery
from genapi.wire.http import HTTPCall, HTTPReply
from tests.contract.dynamo import bounds
from tests.contract.embedded import QUICK, greedy, request, weights

pytestmark = pytest.mark.anyio


class Unreliable(MemoryBoard):
    """A board that can be down.

    Attributes:
        is_down: whether it takes no connections now.
        hangs: whether it answers nothing now.
        refused: how many connections it did not take.
    """

    is_down = False
    hangs = False
    refused = 0

    async def read(self) -> Reading:
        await self._reach()
        return await super().read()

    async def compare_and_set(self, token: Token, new: BoardState) -> Token | None:
        await self._reach()
        return await super().compare_and_set(token, new)

    async def _reach(self) -> None:
        if self.hangs:
            await anyio.sleep_forever()
        if self.is_down:
            self.refused += 1
            message = "the board takes no connections"
            raise TransportError(message, phase="not_sent") from ConnectionRefusedError()


def at(fleet: genapi.Fleet, phase: str, what: Callable[[], None]) -> None:
    """Do something when a publication enters a phase."""

    def observe(event: Event) -> None:
        if isinstance(event, PhaseStarted) and event.phase == phase:
            what()

    fleet.observe = observe


@asynccontextmanager
async def process(cluster: Cluster, board: MemoryBoard | str) -> AsyncIterator[genapi.Fleet]:
    """A fleet as another process would have it, on the same board."""
    fleet = genapi.connect("embedded://", transport=MemoryTransport(cluster), run="r", board=board)
    async with fleet:
        await fleet.wait_ready(timeout_s=5)
        yield fleet


def publisher(fleet: genapi.Fleet) -> WeightPublisher:
    return WeightPublisher(fleet, transport=genapi.weights.Memory(), timeouts=QUICK)


def source(seed: int) -> genapi.weights.WeightSource:
    return genapi.weights.from_tensors(weights(seed))


async def test_a_publication_is_written_ahead_and_then_committed_on_the_board() -> None:
    cluster, board = Cluster.from_query({"workers": "2"}), MemoryBoard()
    async with process(cluster, board) as fleet:
        p = publisher(fleet)
        await p.adopt(0)
        state, _ = await board.read()
        assert state is not None
        assert (state.phase, state.committed and state.committed.step) == ("idle", 0)
        report = await p.publish(1, source(1))
        state, _ = await board.read()
        assert state is not None
        assert (state.phase, state.committed, state.target) == ("idle", report.version, None)


async def test_a_publication_that_fails_past_begin_leaves_its_target_and_fences_on_the_board() -> (
    None
):
    cluster, board = Cluster.from_query({"workers": "2"}), MemoryBoard()
    async with process(cluster, board) as fleet:
        p = publisher(fleet)
        await p.adopt(0)
        cluster.workers[1].faults.add(Fault("/update_weights", "peer_lost"))
        with pytest.raises(genapi.PublishError) as caught:
            await p.publish(1, source(1))
        report = caught.value.report
        assert isinstance(report, PublishReport)
        state, _ = await board.read()
        assert state is not None
        assert (state.phase, state.target) == ("held", report.version)
        assert state.committed is not None
        assert state.committed.step == 0
        for receipt in report.receipts:
            assert state.fence_of(str(receipt.worker)) == receipt.fence
    async with process(cluster, board) as other:
        fences = [w.fence for w in (await other.snapshot()).workers]
        assert fences == [receipt.fence for receipt in report.receipts]
        again = await publisher(other).publish(1, source(1))
        assert again.committed
        assert again.version.attempt == 2
        reply = await other.generate(request())
        assert reply.output.token_ids == greedy(1, [1, 2, 3], 8)


@pytest.mark.parametrize("phase", ["preflight", "pause", "mark"])
async def test_only_a_commit_takes_a_held_publication_off_the_board(phase: str) -> None:
    cluster, board, scope = Cluster.from_query({"workers": "2"}), MemoryBoard(), anyio.CancelScope()
    async with process(cluster, board) as fleet:
        p = publisher(fleet)
        await p.adopt(0)
        cluster.workers[0].faults.add(Fault("/update_weights", "peer_lost"))
        with pytest.raises(genapi.PublishError) as caught:
            await p.publish(1, source(1))
        at(fleet, phase, scope.cancel)
        with anyio.fail_after(10), scope:
            await p.publish(2, source(2))
        assert scope.cancelled_caught
        state, _ = await board.read()
        assert state is not None
        assert (state.phase, state.target) == ("held", caught.value.report.version)
        assert p.last_report is not None
        for receipt in p.last_report.receipts:
            assert receipt.fence is not None
            assert state.fence_of(str(receipt.worker)) == receipt.fence
        at(fleet, phase, lambda: None)
        report = await p.publish(3, source(1))
        state, _ = await board.read()
        assert state is not None
        assert (state.phase, state.committed, state.target) == ("idle", report.version, None)


async def test_what_another_run_left_held_stays_on_the_board_until_a_commit() -> None:
    cluster, board = Cluster.from_query({"workers": "2"}), MemoryBoard()
    async with process(cluster, board) as fleet:
        p = publisher(fleet)
        await p.adopt(0)
        cluster.workers[0].faults.add(Fault("/update_weights", "peer_lost"))
        with pytest.raises(genapi.PublishError) as caught:
            await p.publish(1, source(1))
    carrier = MemoryTransport(cluster)
    async with genapi.connect("embedded://", transport=carrier, run="next", board=board) as fleet:
        await fleet.wait_ready(timeout_s=5)
        p = publisher(fleet)
        for nth in (1, 2, 3):
            cluster.workers[1].faults.add(Fault("/health", "error", status=503, nth=nth))
        with anyio.fail_after(10), pytest.raises(genapi.PublishError) as refused:
            await p.publish(1, source(2))
        assert refused.value.__cause__ is None
        state, _ = await board.read()
        assert state is not None
        assert (state.run, state.phase, state.target) == (
            "next",
            "held",
            caught.value.report.version,
        )
        report = await p.publish(1, source(2))
        state, _ = await board.read()
        assert state is not None
        assert (state.phase, state.committed, state.target) == ("idle", report.version, None)


@pytest.mark.parametrize("phase", ["preflight", "pause", "begin", "transfer", "finish", "resume"])
async def test_a_cancelled_publication_writes_its_end_on_the_board(phase: str) -> None:
    cluster, board, scope = Cluster.from_query({"workers": "2"}), MemoryBoard(), anyio.CancelScope()
    async with process(cluster, board) as fleet:
        p = publisher(fleet)
        await p.adopt(0)
        at(fleet, phase, scope.cancel)
        with anyio.fail_after(10), scope:
            await p.publish(1, source(1))
        assert scope.cancelled_caught
        report = p.last_report
        state, _ = await board.read()
        assert report is not None
        assert state is not None
        assert state.phase == ("held" if phase in {"begin", "transfer"} else "idle")
        for receipt in report.receipts:
            assert state.fence_of(str(receipt.worker)) == receipt.fence
        assert state.committed is not None
        assert (state.committed == report.version) == report.committed


class Slow(MemoryBoard):
    """A board whose every answer is waited for."""

    async def read(self) -> Reading:
        await asyncio.sleep(0)
        return await super().read()

    async def compare_and_set(self, token: Token, new: BoardState) -> Token | None:
        await asyncio.sleep(0)
        return await super().compare_and_set(token, new)


@pytest.mark.parametrize("phase", ["pause", "begin", "transfer"])
async def test_a_publication_cancelled_again_while_it_ends_writes_its_end_all_the_same(
    phase: str,
) -> None:
    cluster, board, entered = Cluster.from_query({"workers": "2"}), Slow(), anyio.Event()
    async with process(cluster, board) as fleet:
        p = publisher(fleet)
        await p.adopt(0)
        at(fleet, phase, entered.set)
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            publishing = tasks.create_task(p.publish(1, source(1)))
            await entered.wait()
            while not publishing.done():
                publishing.cancel()
                await asyncio.sleep(0)
        assert publishing.cancelled()
        state, _ = await board.read()
        assert state is not None
        assert state.phase == ("held" if phase in {"begin", "transfer"} else "idle")


@pytest.mark.parametrize("phase", ["pause", "begin", "finish", "resume"])
async def test_a_board_that_is_down_makes_no_worker_dead_and_loses_no_receipt(phase: str) -> None:
    cluster, board = Cluster.from_query({"workers": "2"}), Unreliable()
    async with process(cluster, board) as fleet:
        p = publisher(fleet)
        await p.adopt(0)
        at(fleet, phase, lambda: setattr(board, "is_down", True))
        with anyio.fail_after(20), pytest.raises(genapi.PublishError) as caught:
            await p.publish(1, source(1))
        assert isinstance(caught.value.__cause__, TransportError)
        for receipt in caught.value.report.receipts:
            assert receipt.recovery is not Recovery.RESTART_THEN_PUBLISH
            assert receipt.recovery is None or receipt.fence is not None
        board.is_down = False
        at(fleet, phase, lambda: None)
        again = await p.publish(1, source(1))
        assert [r.outcome for r in again.receipts] == [Outcome.COMMITTED] * 2
        state, _ = await board.read()
        assert state is not None
        assert (state.phase, state.committed) == ("idle", again.version)


@pytest.mark.parametrize(
    "phase", ["group", "pause", "mark", "begin", "transfer", "finish", "commit", "resume"]
)
async def test_a_board_that_hangs_is_what_is_named_and_no_worker(phase: str) -> None:
    cluster, board = Cluster.from_query({"workers": "2"}), Unreliable()
    async with process(cluster, board) as fleet:
        p = publisher(fleet)
        await p.adopt(0)

        def hang() -> None:
            board.hangs = True

        at(fleet, phase, hang)
        with anyio.fail_after(20), pytest.raises(genapi.PublishError) as caught:
            await p.publish(1, source(1))
        report = caught.value.report
        assert isinstance(report, PublishReport)
        assert "the board gave no answer within" in (report.error or "")
        assert "board" in str(caught.value.__cause__)
        for receipt in report.receipts:
            assert receipt.fence is None or receipt.fence.strength is not FenceStrength.DEAD
            assert receipt.error is None or "the board gave no answer" in receipt.error
        outcomes = {receipt.outcome for receipt in report.receipts}
        begun = phase in ("transfer", "finish", "commit", "resume")
        assert begun or outcomes == {Outcome.UNTOUCHED}
        fleet.observe, board.hangs = ignore, False
        assert (await p.publish(2, source(2))).committed


async def test_what_a_worker_was_asked_before_the_board_went_down_is_not_taken_for_unasked() -> (
    None
):
    cluster, board = Cluster.from_query({"workers": "2"}), Unreliable()

    def observe(event: Event) -> None:
        if isinstance(event, AdminCalled) and event.operation == "pause":
            board.is_down = True

    fleet = genapi.connect(
        "embedded://", transport=MemoryTransport(cluster), run="r", board=board, observe=observe
    )
    async with fleet:
        await fleet.wait_ready(timeout_s=5)
        p = publisher(fleet)
        await p.adopt(0)
        cluster.workers[0].faults.add(Fault("/pause", "lose_reply"))
        with anyio.fail_after(10), pytest.raises(genapi.PublishError) as caught:
            await p.publish(1, source(1))
        report = caught.value.report
        assert isinstance(report, PublishReport)
        assert board.refused > 0
        assert (report.receipts[0].error or "").startswith("pause: lost: ")
        assert report.receipts[0].fence is not None


class Odd(Unreliable):
    """A board of a user's own, whose client raises errors of its own."""

    async def _reach(self) -> None:
        if self.is_down:
            raise LookupError("no quorum")

    def __repr__(self) -> str:
        return "Odd()"


@pytest.mark.parametrize("phase", ["group", "pause", "begin", "transfer", "commit", "resume"])
async def test_an_error_of_a_board_s_own_fails_the_publication_like_any_other_of_a_board(
    phase: str,
) -> None:
    cluster, board = Cluster.from_query({"workers": "2"}), Odd()
    async with process(cluster, board) as fleet:
        p = publisher(fleet)
        await p.adopt(0)

        def break_down() -> None:
            board.is_down = True

        at(fleet, phase, break_down)
        with anyio.fail_after(20), pytest.raises(genapi.PublishError) as caught:
            await p.publish(1, source(1))
        cause = caught.value.__cause__
        assert isinstance(cause, TransportError)
        assert isinstance(cause.__cause__, LookupError)
        for text in (str(cause), str(caught.value)):
            assert "board Odd() failed (LookupError: no quorum)" in text
        fleet.observe, board.is_down = ignore, False
        assert (await p.publish(2, source(2))).committed


@pytest.mark.parametrize("how", ["is_down", "hangs"])
async def test_a_board_of_one_s_own_that_fails_or_hangs_is_named_by_whatever_asks_it(
    how: str,
) -> None:
    cluster = Cluster.from_query({"workers": "1"})
    board = Odd() if how == "is_down" else Unreliable()
    fleet = genapi.connect(
        "embedded://",
        transport=MemoryTransport(cluster),
        run="r",
        board=board,
        admin_timeout_s=0.2,
    )
    async with fleet:
        await fleet.wait_ready(timeout_s=5)
        p = publisher(fleet)
        await p.adopt(0)
        setattr(board, how, True)
        why = "board .* (failed|gave no answer within 0.2 s)"
        other = publisher(fleet)
        for asked in (fleet.snapshot(), other.adopt(0), other.publish(1, source(1))):
            with anyio.fail_after(10), pytest.raises(TransportError, match=why):
                await asked
        # Requests do not need it.
        assert (await fleet.generate(request())).output.is_complete
        with anyio.fail_after(10):
            await p.aclose()


class Mounted(MemoryBoard):
    """A board that reads in a thread, which nothing can cancel, or at once.

    Attributes:
        answers: set when threads may end.
        left: threads that have ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()
        self.answers.set()
        self.left = 0

    async def read(self) -> Reading:
        await anyio.to_thread.run_sync(self.answers.wait, 30)
        self.left += 1
        return await super().read()


async def test_a_board_of_one_s_own_whose_thread_hangs_holds_nobody_up() -> None:
    cluster, board = Cluster.from_query({"workers": "1"}), Mounted()
    fleet = genapi.connect(
        "embedded://", transport=MemoryTransport(cluster), run="r", board=board, admin_timeout_s=0.2
    )
    async with fleet:
        await fleet.wait_ready(timeout_s=5)
        p = publisher(fleet)
        await p.adopt(0)
        left = board.left
        board.answers.clear()
        try:
            with pytest.raises(TransportError, match=r"board .* gave no answer within 0.2 s"):
                await fleet.snapshot()
            with anyio.move_on_after(0.01) as given_up:
                await fleet.snapshot()
            assert given_up.cancelled_caught
            with pytest.raises(TransportError, match="gave no answer"):
                await p.publish(1, source(1))
            assert board.left == left
        finally:
            board.answers.set()
        assert (await p.publish(2, source(2))).committed


class Blocking(MemoryBoard):
    """A board whose methods are no coroutines, and raise."""

    def read(self) -> Any:
        message = "no quorum"
        raise LookupError(message)


async def test_a_board_of_one_s_own_that_raises_at_once_is_named() -> None:
    cluster = Cluster.from_query({"workers": "1"})
    fleet = genapi.connect("embedded://", transport=MemoryTransport(cluster), board=Blocking())
    async with fleet:
        with pytest.raises(TransportError, match=r"board .* failed \(LookupError: no quorum\)"):
            await fleet.snapshot()


async def test_the_calls_of_one_phase_ask_a_board_that_is_down_once() -> None:
    cluster, board = Cluster.from_query({"workers": "8"}), Unreliable()
    refused: list[int] = []
    async with process(cluster, board) as fleet:

        def observe(event: Event) -> None:
            if isinstance(event, PhaseStarted) and event.phase == "begin":
                board.is_down = True
            elif isinstance(event, PhaseEnded) and event.phase == "begin":
                refused.append(board.refused)

        p = publisher(fleet)
        await p.adopt(0)
        fleet.observe = observe
        with anyio.fail_after(20), pytest.raises(genapi.PublishError) as caught:
            await p.publish(1, source(1))
        assert isinstance(caught.value.__cause__, TransportError)
        assert refused == [1]


@pytest.mark.parametrize("how", ["is_down", "hangs"])
async def test_what_failed_first_is_told_when_the_board_does_not_take_the_end(how: str) -> None:
    cluster, board = Cluster.from_query({"workers": "2"}), Unreliable()
    async with process(cluster, board) as fleet:
        p = publisher(fleet)
        await p.adopt(0)
        cluster.workers[1].faults.add(Fault("/finish_weight_update", "error"))
        at(fleet, "examine", lambda: setattr(board, how, True))
        with anyio.fail_after(10), pytest.raises(genapi.PublishError, match="injected") as caught:
            await p.publish(1, source(1))
        assert isinstance(caught.value.__cause__, TransportError)
        assert "finish" in (caught.value.report.receipts[1].error or "")


@pytest.mark.parametrize("phase", ["stage", "pause", "mark", "begin", "transfer", "finish"])
async def test_of_two_publishers_one_wins_and_the_other_is_superseded(phase: str) -> None:
    cluster, board = Cluster.from_query({"workers": "2"}), MemoryBoard()
    async with process(cluster, board) as one, process(cluster, board) as two:
        first, second = publisher(one), publisher(two)
        await first.adopt(0)
        taken = anyio.Event()

        def observe(event: Event) -> None:
            if isinstance(event, PhaseStarted) and event.phase == phase:
                taken.set()

        one.observe = observe
        results: list[str] = []

        async def loser() -> None:
            try:
                await first.publish(1, source(1))
                results.append("won")
            except SupersededError as error:
                results.append(str(error).rpartition("; ")[2])
            except genapi.PublishError as error:
                results.append(f"failed: {error}")

        async def winner() -> None:
            await taken.wait()
            for _ in range(20):
                try:
                    report = await second.publish(2, source(2))
                except genapi.PublishError:
                    continue
                assert report.committed
                return
            raise AssertionError("the second publisher never got through")

        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                group.start_soon(loser)
                group.start_soon(winner)
        assert results in (["another publisher took over, so stop this publisher"], ["won"])
        assert {w.engine.label for w in cluster.workers} == {"genapi:r:2:1"} or {
            w.engine.label.rpartition(":")[0] for w in cluster.workers
        } == {"genapi:r:2"}
        for session in ("a", "b", "c", "d"):
            reply = await two.generate(request(session=session))
            assert reply.output.token_ids == greedy(2, [1, 2, 3], 8)


async def test_a_publisher_that_was_superseded_ends_nothing_when_it_is_closed() -> None:
    cluster, board = Cluster.from_query({"workers": "1"}), MemoryBoard()
    async with process(cluster, board) as one, process(cluster, board) as two:
        async with publisher(one) as old:
            await old.publish(1, source(1))
            await publisher(two).adopt(1)
        state, _ = await board.read()
        assert state is not None
        assert state.committed is not None
        assert not state.final
        assert one.membership.final is None


@pytest.mark.parametrize("how", ["is_down", "hangs"])
async def test_a_board_that_does_not_take_the_end_holds_no_publisher_up(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    cluster, board = Cluster.from_query({"workers": "1"}), Unreliable()
    async with process(cluster, board) as fleet:
        quick = QUICK.model_copy(update={"cleanup_s": 0.05})
        transport = genapi.weights.Memory()
        with anyio.fail_after(5):
            async with WeightPublisher(fleet, transport=transport, timeouts=quick) as it:
                await it.publish(1, source(1))
                setattr(board, how, True)
        assert "was not told that genapi:r:1:1 is the last version" in caplog.text
        assert fleet.membership.final is None


async def test_a_process_that_only_generates_learns_of_the_version_from_a_board_that_travels(
    tmp_path: pathlib.Path,
) -> None:
    cluster, url = Cluster.from_query({"workers": "1"}), f"file:{tmp_path / 'board'}"
    async with process(cluster, url) as fleet:
        assert fleet.config.board == url
        await publisher(fleet).adopt(4)
        config = fleet.config
    board = open_board(config.board or "")
    state, _ = await board.read()
    await board.aclose()
    assert state is not None
    assert state.committed is not None
    assert state.committed.step == 4
    async with process(cluster, url) as other:
        assert other.membership.committed == state.committed


class Unmarked(VLLMAdmin):
    """An engine whose label cannot be written ahead."""

    marks = False


class Plain(VLLM):
    admin = Unmarked()


@pytest.mark.parametrize("provider", [VLLM(), Plain()], ids=["marks", "no marks"])
async def test_whoever_an_open_publication_names_is_healed_by_the_next_publisher(
    provider: VLLM,
) -> None:
    cluster, board = Cluster.from_query({"workers": "2"}), Unreliable()
    async with process(cluster, board) as fleet:
        fleet.provider = provider
        p = WeightPublisher(
            fleet, transport=genapi.weights.Memory(bucket_tensors=1), timeouts=QUICK
        )
        await p.adopt(0)
        # As if it had been killed: without the board it sends nothing and writes nothing any more.
        cluster.workers[1].faults.add(Fault("/update_weights", "peer_lost", nth=2))
        at(fleet, "close", lambda: setattr(board, "is_down", True))
        with anyio.fail_after(10), pytest.raises(genapi.PublishError):
            await p.publish(1, source(1))
    board.is_down = False
    state, _ = await board.read()
    assert state is not None
    assert state.phase == "publishing"
    async with process(cluster, board) as other:
        other.provider = provider
        p = publisher(other)
        with pytest.raises(genapi.FleetError, match="cannot be adopted"):
            await p.adopt(0)
        report = await p.publish(2, source(2))
        assert [r.outcome for r in report.receipts] == [Outcome.COMMITTED] * 2
        for session in "abcd":
            reply = await other.generate(request(session=session))
            assert reply.output.token_ids == greedy(2, [1, 2, 3], 8)


class Parted(MemoryTransport):
    """A transport that may not reach the last of three workers."""

    is_parted = True

    async def send(
        self, base_url: str, call: HTTPCall, *, headers: Mapping[str, str] = {}
    ) -> HTTPReply:
        if self.is_parted and base_url == "memory://2":
            message = "connection refused"
            raise TransportError(message, phase="not_sent") from ConnectionRefusedError()
        return await super().send(base_url, call, headers=headers)


async def test_an_open_publication_puts_everybody_in_doubt_once() -> None:
    cluster, board = Cluster.from_query({"workers": "3"}), MemoryBoard()
    async with process(cluster, board) as fleet:
        await publisher(fleet).adopt(0)
        names = [str(w.id) for w in (await fleet.snapshot()).workers]
    lease = await take_epoch(board, new_holder())
    left = genapi.PolicyVersion(run="r", step=1)
    workers = [BoardWorker(id=name) for name in names]
    await lease.write(phase="publishing", target=left, workers=workers)
    carrier, fenced = Parted(cluster), list[str]()

    def observe(event: Event) -> None:
        if isinstance(event, WorkerFenced) and "open" in event.reason:
            fenced.append(str(event.worker))

    async with genapi.connect(
        "embedded://", transport=carrier, run="r", board=board, observe=observe
    ) as other:
        p = WeightPublisher(
            other,
            transport=genapi.weights.Memory(),
            timeouts=QUICK,
            on_partial="serve",
            min_workers=2,
        )

        async def ask(ended: anyio.Event) -> None:
            while not ended.is_set():
                reply = await other.generate(request(timeout_s=5))
                assert str(reply.worker) in names[:2]

        async def publish_under_traffic(step: int) -> None:
            ended = anyio.Event()
            async with anyio.create_task_group() as group:
                group.start_soon(ask, ended)
                try:
                    assert (await p.publish(step, source(step))).committed
                finally:
                    ended.set()

        with anyio.fail_after(20):
            assert (await p.publish(2, source(2))).committed
            assert fenced == names[:2]
            for step in (3, 4):
                await publish_under_traffic(step)
            assert fenced == names[:2]
            carrier.is_parted = False
            report = await p.publish(5, source(5))
        assert fenced == names
        assert [r.outcome for r in report.receipts] == [Outcome.COMMITTED] * 3


async def test_a_worker_that_was_left_out_is_fenced_in_every_process_until_it_is_included() -> None:
    cluster, board = Cluster.from_query({"workers": "3"}), MemoryBoard()
    async with process(cluster, board) as fleet, process(cluster, board) as other:
        p = WeightPublisher(
            fleet,
            transport=genapi.weights.Memory(),
            timeouts=QUICK,
            on_partial="serve",
            min_workers=2,
        )
        await p.adopt(0)
        cluster.workers[1].kill()
        report = await p.publish(1, source(1))
        gone = report.receipts[1]
        state, _ = await board.read()
        assert state is not None
        assert (state.phase, state.committed) == ("idle", report.version)
        assert state.fence_of(str(gone.worker)) == gone.fence
        cluster.workers[1].restart()
        async with process(cluster, board) as late:
            for reader in (fleet, other, late):
                fences = [w.fence for w in (await reader.snapshot()).workers]
                assert [f is not None for f in fences] == [False, True, False]
                for session in "abcdefgh":
                    reply = await reader.generate(request(session=session))
                    assert reply.output.token_ids == greedy(1, [1, 2, 3], 8)
            assert (await p.publish(2, source(2))).committed
            for reader in (fleet, other, late):
                assert [w.fence for w in (await reader.snapshot()).workers] == [None] * 3


async def test_servers_that_came_back_with_their_first_weights_are_not_adopted_over_the_board() -> (
    None
):
    board = MemoryBoard()
    async with process(Cluster.from_query({"workers": "2"}), board) as fleet:
        p = publisher(fleet)
        await p.adopt(0)
        await p.publish(5, source(5))
    cluster = Cluster.from_query({"workers": "2"})
    async with process(cluster, board) as fleet, process(cluster, board) as other:
        p = publisher(fleet)
        with pytest.raises(genapi.ConfigError, match="cannot follow"):
            await p.adopt(0)
        assert p.last_report is None
        assert {worker.engine.label for worker in cluster.workers} == {"default"}
        for each in (fleet, other):
            with pytest.raises((genapi.StalePolicyError, genapi.FleetError)):
                await each.generate(request())
        assert (await p.publish(6, source(6))).committed
        await other.snapshot()
        assert (await other.generate(request())).output.token_ids == greedy(6, [1, 2, 3], 8)


class _Held(MemoryTransport):
    """Holds back what the first worker is asked next, where that is wanted.

    Attributes:
        holds: how many calls are held back from now on.
        holding: whether one is held back, or was.
        go_on: what they wait for.
    """

    holds = 0
    holding = False

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.go_on = anyio.Event()

    async def send(self, base_url: str, call: HTTPCall, **more: Any) -> HTTPReply:
        if self.holds and base_url == self.urls[0]:
            self.holds -= 1
            self.holding = True
            await self.go_on.wait()
        return await super().send(base_url, call, **more)


async def test_what_a_replaced_worker_was_proved_to_hold_is_not_believed_of_its_successor() -> None:
    cluster = Cluster.from_query({"workers": "2"})
    transport, proved = _Held(cluster), anyio.Event()

    fenced: list[str] = []

    def observe(event: Event) -> None:
        if isinstance(event, WorkerFenced):
            fenced.append(event.reason)
        elif isinstance(event, PhaseStarted) and (event.version.step, event.phase) == (2, "probe"):
            transport.holds = 1
        elif isinstance(event, AdminCalled) and transport.holding and event.worker == "memory://1":
            proved.set()

    fleet = genapi.connect(
        "embedded://",
        transport=transport,
        run="r",
        board=MemoryBoard(),
        refresh_s=1000,
        observe=observe,
    )
    async with fleet:
        await fleet.wait_ready(timeout_s=5)
        p = publisher(fleet)
        await p.publish(1, source(1))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(p.publish, 2, source(2))
            with anyio.fail_after(5):
                await proved.wait()
            cluster.workers[1].restart()
            await fleet.snapshot()
            transport.go_on.set()
        with pytest.raises(genapi.FleetError, match="took the place of"):
            await p.adopt(2)
    assert cluster.workers[1].engine.label == "default"
    assert len(fenced) == 1  # and was never lifted


async def test_what_was_adopted_of_a_replaced_worker_is_not_believed_of_its_successor() -> None:
    cluster = Cluster.from_query({"workers": "2"})
    transport = _Held(cluster)
    labelled = anyio.Event()

    def observe(event: Event) -> None:
        if isinstance(event, AdminCalled) and event.operation == "label":
            transport.holds = int(not transport.holding)
        elif isinstance(event, AdminCalled) and event.operation == "read":
            labelled.set()

    fleet = genapi.connect(
        "embedded://", transport=transport, run="r", refresh_s=1000, observe=observe
    )
    async with fleet:
        await fleet.wait_ready(timeout_s=5)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publisher(fleet).adopt, 1)
            with anyio.fail_after(5):
                await labelled.wait()
            cluster.workers[1].restart()
            await fleet.snapshot()
            transport.go_on.set()
        asked = [request(session=name, options=Options(route="openai")) for name in "abcdefgh"]
        replies = [await fleet.generate(one) for one in asked]
    told = {(r.worker.component, bounds(r)[0] is not None) for r in replies if r.worker is not None}
    assert told == {("memory://0", True), ("memory://1", False)}
