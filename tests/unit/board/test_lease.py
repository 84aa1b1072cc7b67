"""What a publisher may write to a board, and how it learns that it may no more."""

import pickle

import pytest
from pydantic import ValidationError

from genapi.board import Board, Lease, MemoryBoard, Reading, Token, new_holder, take_epoch
from genapi.errors import ConfigError, Phase, SupersededError, TransportError
from genapi.types.board import BoardState, BoardWorker
from genapi.types.policy import PolicyVersion
from genapi.types.worker import Fence, FenceStrength, Recovery

WORKERS = (BoardWorker(id="vllm/a"), BoardWorker(id="vllm/b"))


def version(step: int, attempt: int = 1, *, run: str = "r") -> PolicyVersion:
    return PolicyVersion(run=run, step=step, attempt=attempt)


async def test_the_first_to_take_a_board_finds_nothing_and_has_epoch_one(board: Board) -> None:
    lease = await take_epoch(board, "one", "r", clock=lambda: 7.0)
    assert (lease.epoch, lease.holder, lease.found) == (1, "one", None)
    assert lease.state == BoardState(run="r", epoch=1, holder="one", since=7.0)
    assert (await board.read()).state == lease.state


async def test_a_publication_leaves_its_intent_before_and_its_version_after(board: Board) -> None:
    times = iter((1.0, 2.0, 3.0, 4.0))
    lease = await take_epoch(board, "one", clock=lambda: next(times))
    opened = await lease.write(phase="publishing", target=version(1), workers=WORKERS)
    assert opened == BoardState(
        run="r",
        epoch=1,
        phase="publishing",
        target=version(1),
        workers=WORKERS,
        holder="one",
        since=2.0,
    )
    assert (await board.read()).state == opened
    unchanged = await lease.write(workers=WORKERS)
    assert unchanged == opened
    closed = await lease.write(phase="idle", committed=version(1))
    assert closed == BoardState(
        run="r", epoch=1, committed=version(1), workers=WORKERS, holder="one", since=4.0
    )
    assert (await board.read()).state == closed


async def test_a_last_version_is_last_until_anybody_writes_or_takes_the_board(board: Board) -> None:
    lease = await take_epoch(board, "one", "r")
    await lease.write(phase="idle", committed=version(1))
    assert (await lease.write(final=True)).final
    assert not (await lease.write(workers=WORKERS)).final
    assert (await lease.write(final=True)).committed == version(1)
    following = await take_epoch(board, "two")
    assert following.found is not None
    assert following.found.final
    assert not following.state.final


async def test_only_a_committed_version_can_be_the_last(board: Board) -> None:
    lease = await take_epoch(board, "one", "r")
    with pytest.raises(ValidationError, match="final"):
        await lease.write(final=True)
    await lease.write(phase="idle", committed=version(1))
    with pytest.raises(ValidationError, match="final"):
        await lease.write(phase="held", target=version(2), final=True)
    assert not lease.state.final


async def test_the_next_holder_finds_the_publication_that_the_last_one_left_open(
    board: Board,
) -> None:
    dead = await take_epoch(board, "dead", "r")
    await dead.write(phase="idle", committed=version(1), workers=WORKERS)
    left = await dead.write(phase="publishing", target=version(2))
    lease = await take_epoch(board, "next", clock=lambda: 9.0)
    assert lease.found == left
    assert lease.state == left.model_copy(update={"epoch": 2, "holder": "next", "since": 9.0})


async def test_another_run_keeps_the_open_publication_and_drops_what_was_committed(
    board: Board,
) -> None:
    dead = await take_epoch(board, "dead", "r")
    await dead.write(phase="idle", committed=version(1))
    await dead.write(phase="publishing", target=version(2), workers=WORKERS)
    lease = await take_epoch(board, "next", "q")
    assert (lease.state.run, lease.state.committed) == ("q", None)
    assert (lease.state.phase, lease.state.target) == ("publishing", version(2))
    fence = Fence(strength=FenceStrength.DEAD, reason="gone", recovery=Recovery.REPUBLISH)
    fenced = (BoardWorker(id="vllm/a", fence=fence), WORKERS[1])
    held = await lease.write(phase="held", target=version(1, run="q"), workers=fenced)
    assert held.target == version(1, run="q")
    assert held.fence_of("vllm/a") == fence
    assert held.fence_of("vllm/b") is None
    assert held.fence_of("vllm/c") is None


async def test_of_two_holders_the_older_learns_that_it_is_superseded(board: Board) -> None:
    older = await take_epoch(board, "older", "r")
    assert await older.check() == older.state
    newer = await take_epoch(board, "newer")
    for call in (older.check, lambda: older.write(phase="publishing", target=version(1))):
        with pytest.raises(SupersededError, match=r"epoch 1 of 'older'.*2 of 'newer'") as caught:
            await call()
        assert (caught.value.holder, caught.value.epoch) == ("newer", 2)
        assert "another publisher took over, so stop this publisher" in str(caught.value)
    assert await newer.check() == newer.state == (await board.read()).state


async def test_a_name_that_takes_the_board_twice_supersedes_itself(board: Board) -> None:
    older = await take_epoch(board, "same")
    await take_epoch(board, "same")
    with pytest.raises(SupersededError):
        await older.write(workers=WORKERS)


async def test_what_was_committed_does_not_go_back(board: Board) -> None:
    lease = await take_epoch(board, "one", "r")
    written = await lease.write(committed=version(3, 2))
    assert written == await lease.write(committed=version(3, 2))
    for older in (version(2, 9), version(3, 1)):
        with pytest.raises(ConfigError, match="does not go back"):
            await lease.write(committed=older)
    assert (await board.read()).state == written
    assert (await lease.write(committed=version(3, 3))).committed == version(3, 3)


async def test_a_version_of_another_run_is_refused(board: Board) -> None:
    lease = await take_epoch(board, "one", "r")
    other = version(1, run="q")
    with pytest.raises(ConfigError, match="not of run 'r'"):
        await lease.write(phase="publishing", target=other)
    with pytest.raises(ConfigError, match="not of run 'r'"):
        await lease.write(committed=other)


async def test_phase_and_target_go_together(board: Board) -> None:
    lease = await take_epoch(board, "one", "r")
    with pytest.raises(ValidationError, match="does not go with target"):
        await lease.write(phase="publishing")
    with pytest.raises(ValidationError, match="does not go with target"):
        await lease.write(target=version(1))
    with pytest.raises(ValidationError, match="does not go with target"):
        await lease.write(phase="idle", target=version(1))
    assert (await board.read()).state == lease.state


def test_every_holder_has_a_name_of_its_own() -> None:
    assert new_holder() != new_holder()


def test_being_superseded_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(SupersededError("over", holder="me", epoch=4)))  # noqa: S301
    assert (str(error), error.holder, error.epoch) == ("over", "me", 4)


class Failing:
    """A board of which every write ends in the same way."""

    def __init__(self, outcome: TransportError | None) -> None:
        self.outcome = outcome
        self.board = MemoryBoard()
        self.writes = 0

    async def read(self) -> Reading:
        return await self.board.read()

    async def compare_and_set(self, token: Token, new: BoardState) -> Token | None:
        self.writes += 1
        if self.outcome is not None:
            raise self.outcome
        return None

    async def aclose(self) -> None:
        await self.board.aclose()


async def test_taking_a_board_ends_however_often_others_are_faster() -> None:
    board = Failing(None)
    with pytest.raises(SupersededError, match="lost 20 tries"):
        await take_epoch(board, "one")
    assert board.writes == 20


@pytest.mark.parametrize(("phase", "writes"), [("not_sent", 1), ("may_have_run", 3)])
async def test_taking_a_board_that_fails_ends_with_its_error(phase: Phase, writes: int) -> None:
    failure = TransportError("away", phase=phase)
    board = Failing(failure)
    with pytest.raises(TransportError) as caught:
        await take_epoch(board, "one")
    assert caught.value is failure
    assert board.writes == writes


@pytest.mark.parametrize(("phase", "writes"), [("not_sent", 1), ("may_have_run", 3)])
async def test_writing_to_a_board_that_fails_ends_with_its_error(phase: Phase, writes: int) -> None:
    failure = TransportError("away", phase=phase)
    board = Failing(failure)
    taken = await take_epoch(board.board, "one")
    lease = Lease(board, await board.read(), found=None)
    with pytest.raises(TransportError) as caught:
        await lease.write(workers=WORKERS)
    assert caught.value is failure
    assert board.writes == writes
    assert await lease.check() == taken.state


async def test_writing_ends_however_often_the_record_is_another_one() -> None:
    board = Failing(None)
    await take_epoch(board.board, "one")
    lease = Lease(board, await board.read(), found=None)
    with pytest.raises(TransportError, match="20 writes lost") as caught:
        await lease.write(workers=WORKERS)
    assert caught.value.phase == "not_sent"
