"""What every kind of board promises."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from itertools import groupby
from pathlib import Path

import anyio
import pytest
from anyio import fail_after

from genapi.board import NOTHING, Board, MemoryBoard, Token, open_board, wait_for_change
from genapi.errors import ConfigError
from genapi.types.board import BoardState, BoardWorker
from genapi.types.policy import PolicyVersion
from genapi.types.worker import Fence, FenceStrength, Recovery

OpenBoard = Callable[[], Board]

LIMIT_S = 30
WRITER = Path(__file__).parents[2] / "support" / "board_writer.py"
FULL = BoardState(
    run="r",
    epoch=3,
    phase="held",
    committed=PolicyVersion(run="r", step=4, attempt=2),
    target=PolicyVersion(run="r", step=5),
    workers=(
        BoardWorker(id="vllm/http://w1:8000/a"),
        BoardWorker(
            id="vllm/http://w2:8000/b",
            fence=Fence(
                strength=FenceStrength.PAUSED,
                reason='took part of "genapi:r:5:1"\nand died — sorry',
                recovery=Recovery.RESTART_THEN_PUBLISH,
            ),
        ),
    ),
    holder="host/12/abc",
    since=1795961790.76,
)


def state(epoch: int, holder: str = "one") -> BoardState:
    return BoardState(epoch=epoch, holder=holder)


async def test_a_board_nobody_wrote_to_reads_as_nothing(board: Board) -> None:
    assert await board.read() == (None, NOTHING)


async def test_what_was_written_is_read_back_by_others(board: Board, open_again: OpenBoard) -> None:
    token = await board.compare_and_set(NOTHING, FULL)
    assert await open_again().read() == (FULL, token)


async def test_only_a_write_that_saw_the_newest_record_counts(
    board: Board, open_again: OpenBoard
) -> None:
    first = await board.compare_and_set(NOTHING, state(1))
    assert first is not None
    second = await open_again().compare_and_set(first, state(2))
    for outdated in (NOTHING, first, Token(first.generation + 1, first.nonce)):
        assert await board.compare_and_set(outdated, FULL) is None
    assert await board.read() == (state(2), second)


async def test_of_writers_that_saw_the_same_record_exactly_one_wins(
    board: Board, open_again: OpenBoard
) -> None:
    token = await board.compare_and_set(NOTHING, state(1))
    assert token is not None
    won: list[str] = []

    async def write(name: str) -> None:
        if await open_again().compare_and_set(token, state(2, name)) is not None:
            won.append(name)

    with fail_after(LIMIT_S):
        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(write, f"writer {number}")
    assert len(won) == 1
    assert (await board.read()).state == state(2, won[0])


async def test_a_closed_board_leaves_its_record_and_opens_again(
    board: Board, open_again: OpenBoard
) -> None:
    await board.compare_and_set(NOTHING, FULL)
    await board.aclose()
    await board.aclose()
    assert (await open_again().read()).state == FULL
    assert (await board.read()).state == FULL


async def test_a_change_by_somebody_else_is_waited_for(board: Board, open_again: OpenBoard) -> None:
    seen = await board.read()
    with fail_after(LIMIT_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(open_again().compare_and_set, seen.token, FULL)
            found = await wait_for_change(board, seen.token, timeout_s=LIMIT_S, poll_s=0.001)
    assert found is not None
    assert found.state == FULL


async def test_a_change_that_does_not_come_is_not_waited_for_longer_than_asked(
    board: Board,
) -> None:
    token = await board.compare_and_set(NOTHING, FULL)
    assert token is not None
    with fail_after(LIMIT_S):
        assert await wait_for_change(board, token, timeout_s=0) is None
        assert await wait_for_change(board, token, timeout_s=0.01, poll_s=10) is None


async def test_no_write_is_lost_and_no_read_is_torn_when_processes_write_at_once(
    shared_url: str,
) -> None:
    writers, writes = 4, 40
    epochs: list[list[int]] = [[], []]

    async def watch(seen: list[int]) -> None:
        board = open_board(shared_url)
        while not seen or seen[-1] < writers * writes:
            found, _ = await board.read()
            seen.append(found.epoch if found else 0)
            assert found is None or found.epoch == len(found.workers)
        await board.aclose()

    with fail_after(2 * LIMIT_S):
        async with AsyncExitStack() as stack, anyio.create_task_group() as tasks:
            processes = [
                await stack.enter_async_context(
                    await anyio.open_process(
                        [sys.executable, WRITER, "append", shared_url, f"{number}", f"{writes}"],
                        stderr=None,
                    )
                )
                for number in range(writers)
            ]
            for process in processes:
                assert process.stdout is not None
                assert await process.stdout.receive(1) == b"r"
            for process in processes:
                assert process.stdin is not None
                await process.stdin.send(b"go\n")
            for seen in epochs:
                tasks.start_soon(watch, seen)
        assert [process.returncode for process in processes] == [0] * writers

    board = open_board(shared_url)
    found, token = await board.read()
    await board.aclose()
    assert found is not None
    assert token.generation == found.epoch == writers * writes
    names = [worker.id for worker in found.workers]
    assert sorted(names) == sorted(f"{n}:{w}" for n in range(writers) for w in range(writes))
    turns = len(list(groupby(name.partition(":")[0] for name in names)))
    assert turns > writers, "the writers wrote one after the other, so that nothing was tried"
    assert all(seen == sorted(seen) for seen in epochs)


def test_a_board_object_is_used_as_it_is() -> None:
    board = MemoryBoard()
    assert open_board(board) is board


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("/shared/board", "scheme '' is not known"),
        ("etcd://host:1/x", "scheme 'etcd' is not known"),
        ("file:board", "absolute path"),
        ("file://host/board", "absolute path"),
        ("file:/board?key=x", "absolute path"),
        ("file:/a%00b", "there is a NUL in it"),
        ("file:/a\0b", "there is a NUL in it"),
        ("file:/a%ffb", "names no path"),
        ("file:/a\ud800b", "names no path"),
        ("redis:///0", "is not redis://HOST:PORT/DB"),
        ("redis://host:port/0", "is no URL"),
        ("redis://host/zero", "database 'zero' is not a number"),
        ("redis://host/0?keys=x", r"\['keys'\]"),
        ("redis://host/0?key=x&key=y", "one twice"),
        ("redis://host/0?key", "not name=value"),
        ("redis://host/0?password=hush", "is a reference"),
        ("redis://me:hush@host/0", "password=env:VARIABLE"),
    ],
)
def test_a_url_that_names_no_board_is_refused_with_the_remedy(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        open_board(url)
    assert "hush" not in str(caught.value)


def test_a_redis_board_needs_its_extra_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "redis.py").write_text("raise ModuleNotFoundError('no redis', name='redis')")
    program = "import genapi.board; genapi.board.open_board('redis://h')"
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert "install genapi with its extra 'redis'" in ran.stderr.splitlines()[-1]
