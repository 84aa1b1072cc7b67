"""A board in a directory: writers that die or stall at any step, and directories that are none."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio import fail_after, wait_all_tasks_blocked

from genapi.board import FileBoard, Token, take_epoch
from genapi.errors import ConfigError, ReplyError, SupersededError, TransportError
from genapi.types.board import BoardState

LIMIT_S = 30
KEPT = 32
WRITER = Path(__file__).parents[2] / "support" / "board_writer.py"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "board"


@contextmanager
def writer(command: str, place: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, str(WRITER), command, f"file:{place}", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def records(place: Path) -> list[Path]:
    return list(place.glob("*.record"))


def drafts(place: Path) -> list[Path]:
    return list(place.glob(".*.draft"))


def answer(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


async def write(place: Path, count: int) -> Token:
    """So many writes, the next epoch each; the last one's token."""
    board = FileBoard(place)
    found, token = await board.read()
    epoch = found.epoch if found else 0
    with fail_after(LIMIT_S):
        for number in range(1, count + 1):
            written = await board.compare_and_set(
                token, BoardState(epoch=epoch + number, holder="t")
            )
            assert written is not None
            token = written
    return token


@pytest.mark.parametrize("writes_before", [0, 1, KEPT])
async def test_whatever_step_a_writer_is_killed_at_others_read_and_write_on(
    place: Path, writes_before: int
) -> None:
    await write(place, writes_before)
    board, epoch, steps = FileBoard(place), writes_before, 0
    with fail_after(LIMIT_S), writer("die", place) as process:
        assert process.stdin is not None
        said = "killed"
        while said == "killed":
            process.stdin.write("once\n")
            process.stdin.flush()
            said = answer(process)
            found, _ = await board.read()
            assert (found.epoch if found else 0) in (epoch, epoch + 1)
            epoch = found.epoch if found else 0
            if said == "killed":
                steps += 1
                await write(place, 1)
                epoch += 1
    assert said == f"written {epoch}"
    assert steps >= 8
    assert len(records(place)) <= KEPT
    assert drafts(place) == []


async def test_a_writer_killed_in_the_middle_of_a_file_leaves_no_torn_record(place: Path) -> None:
    await write(place, 1)
    with writer("die-writing", place) as process:
        assert answer(process) == "killed"
    assert [path.stat().st_size for path in drafts(place)] == [64]
    assert (await FileBoard(place).read()).state == BoardState(epoch=1, holder="t")
    await write(place, 1)
    assert drafts(place) == []


@contextmanager
def stopped_at(place: Path, event: str, step: int) -> Iterator["subprocess.Popen[str]"]:
    """A writer that stands still before a step of its write, counted from an event."""
    with writer("stop", place, event, str(step)) as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        yield process


@pytest.mark.parametrize("event", ["os.mkdir", "os.link"])
@pytest.mark.parametrize(
    ("writes", "said"),
    [
        (1, "refused"),  # its generation is taken
        (KEPT, "refused"),
        (KEPT + 1, "refused"),  # its generation is free again; the next one follows another
        (KEPT + 2, "may_have_run"),  # the next one is removed as well
    ],
)
async def test_a_writer_that_slept_before_it_wrote_changes_nothing(
    place: Path, event: str, writes: int, said: str
) -> None:
    await write(place, 1)
    with stopped_at(place, event, 1) as process:
        token = await write(place, writes)
        process.send_signal(signal.SIGCONT)
        assert answer(process) == said
    assert await FileBoard(place).read() == (BoardState(epoch=1 + writes, holder="t"), token)
    await write(place, 1)
    assert len(records(place)) == min(2 + writes, KEPT)
    assert drafts(place) == []


@pytest.mark.parametrize(
    ("writes", "said"),
    [(0, "written 2"), (1, "written 2"), (KEPT, "written 2"), (KEPT + 2, "may_have_run")],
)
async def test_a_writer_that_slept_after_it_wrote_learns_that_it_wrote_or_that_nobody_can_say(
    place: Path, writes: int, said: str
) -> None:
    await write(place, 1)
    with stopped_at(place, "os.link", 2) as process:
        token = await write(place, writes)
        process.send_signal(signal.SIGCONT)
        assert answer(process) == said
    assert (await FileBoard(place).read()).token == token


async def test_a_write_counts_though_the_server_says_when_asked_again_that_the_name_is_taken(
    place: Path,
) -> None:
    await write(place, 1)
    with stopped_at(place, "os.link", 1) as process:
        (draft,) = drafts(place)
        os.link(draft, place / f"{2:020}.record")
        process.send_signal(signal.SIGCONT)
        assert answer(process) == "written 2"
    assert (await FileBoard(place).read()).token.generation == 2


async def test_a_directory_that_is_removed_under_a_writer_refuses_its_write(place: Path) -> None:
    await write(place, 1)
    with stopped_at(place, "os.link", 1) as process:
        shutil.rmtree(place)
        process.send_signal(signal.SIGCONT)
        assert answer(process) == "refused"
    assert records(place) == []


async def test_a_file_system_that_hangs_is_not_waited_for_and_nothing_happens_late(
    place: Path,
) -> None:
    token = await write(place, 1)
    # Opening a pipe for reading blocks for as long as nobody writes to it.
    pipe = place / f"{2:020}.record"
    os.mkfifo(pipe)
    board = FileBoard(place, timeout_s=0.05)
    with fail_after(LIMIT_S):
        with pytest.raises(TransportError, match="did not answer"):
            await board.read()
        with pytest.raises(TransportError) as caught:
            await board.compare_and_set(token, BoardState(epoch=9, holder="late"))
        assert caught.value.phase == "not_sent"
        os.close(os.open(pipe, os.O_WRONLY))
        pipe.unlink()
        patient = FileBoard(place)
        assert await patient.read() == (BoardState(epoch=1, holder="t"), token)
        assert await board.compare_and_set(token, BoardState(epoch=2, holder="t")) is not None
    assert (await patient.read()).state == BoardState(epoch=2, holder="t")


async def test_a_write_that_is_cancelled_before_it_began_never_happens(place: Path) -> None:
    token = await write(place, 1)
    pipe = place / f"{2:020}.record"
    os.mkfifo(pipe)
    board = FileBoard(place)
    with fail_after(LIMIT_S), pytest.RaisesGroup(ReplyError):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(board.read)  # blocks, and the write waits for it
            end = await writing_end(pipe)
            async with anyio.create_task_group() as writing:
                writing.start_soon(board.compare_and_set, token, BoardState(epoch=9, holder="late"))
                await wait_all_tasks_blocked()
                writing.cancel_scope.cancel()
            shutil.move(pipe, place.parent)
            os.close(end)
    assert await board.compare_and_set(token, BoardState(epoch=2, holder="t")) is not None


async def writing_end(pipe: Path) -> int:
    """The pipe, opened once somebody reads from it."""
    while True:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "does not hold generation 2"),
        (b"genapi-board 3 abc\n{}", "does not hold generation 2"),
        (b"genapi-board 2 abc", "does not hold generation 2"),
        (b"genapi-board 2 abc def\n{", "holds no JSON"),
        (b"genapi-board 2 abc def\n[]", "does not hold a board's record"),
        (b'genapi-board 2 abc def\n{"format":2}', "has format 2"),
        (b'genapi-board 2 abc def\n{"format":1}', "has no 'run'"),
        (b"genapi-board 2 abc def\n" + b"[" * 100_000, "nested too deeply"),
        (b'genapi-board 2 abc def\n{"format":' + b'{"a":' * 100_000, "nested too deeply"),
    ],
)
async def test_a_record_that_cannot_be_read_is_an_error_that_names_its_file(
    place: Path, content: bytes, said: str
) -> None:
    token = await write(place, 1)
    broken = place / f"{2:020}.record"
    broken.write_bytes(content)
    board = FileBoard(place)
    with pytest.raises(ReplyError, match=said) as caught:
        await board.read()
    assert str(broken) in str(caught.value)
    with pytest.raises(ReplyError, match=said):
        await board.compare_and_set(token, BoardState(epoch=2, holder="t"))


async def test_other_files_in_the_directory_are_left_alone(place: Path) -> None:
    await write(place, 1)
    others = [place / name for name in ("99.record", "notes.txt", ".nfs000000000000012c00000001")]
    for other in others:
        other.touch()
    await write(place, KEPT + 1)
    assert all(other.exists() for other in others)


async def test_a_board_whose_files_were_all_removed_starts_anew(place: Path) -> None:
    token = await write(place, 3)
    shutil.rmtree(place)
    board = FileBoard(place)
    assert await board.compare_and_set(token, BoardState(epoch=4, holder="t")) is None
    assert (await write(place, 1)).generation == 1


async def test_a_board_that_another_started_anew_supersedes_its_old_holder(place: Path) -> None:
    board = FileBoard(place)
    older = await take_epoch(board, "older")
    shutil.rmtree(place)
    newer = await take_epoch(board, "newer")
    assert newer.epoch == older.epoch
    with pytest.raises(SupersededError, match="'newer'"):
        await older.check()
    with pytest.raises(SupersededError, match="'newer'"):
        await older.write(workers=())


async def test_a_directory_that_cannot_be_a_board_is_a_mistake_in_the_configuration(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    link, loop = tmp_path / "link", tmp_path / "loop"
    link.symlink_to("nowhere")
    loop.symlink_to("loop")
    for place, said in (
        (tmp_path / "not-mounted" / "board", "create or mount it"),
        (tmp_path / "file", "Not a directory"),
        (tmp_path / "file" / "board", "create or mount it|Not a directory"),
        (link, r"it is a link to 'nowhere', where nothing is; create or mount"),
        (link / "board", "create or mount it"),
        (loop, "symbolic links"),
        (loop / "board", "symbolic links"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        board = FileBoard(place)
        with pytest.raises(ConfigError, match=said):
            await board.read()
        with pytest.raises(ConfigError, match=said):
            await board.compare_and_set(Token(0, ""), BoardState(epoch=1, holder="t"))
    with pytest.raises(ConfigError, match="not absolute"):
        FileBoard("board")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
async def test_a_place_where_no_directory_can_be_made_is_a_mistake_in_the_configuration() -> None:
    board = FileBoard("/proc/self/genapi-board")
    assert (await board.read()).state is None
    with pytest.raises(ConfigError, match="no directory can be made in /proc/self"):
        await take_epoch(board, "t")


async def test_a_link_to_a_directory_is_a_board_like_the_directory(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    await write(tmp_path / "link", 1)
    assert (await FileBoard(tmp_path / "there").read()).token.generation == 1


@pytest.mark.parametrize("path", ["/a\0b", "/a\ud800b", None, 5])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(ConfigError, match="is no path"):
        FileBoard(path)


async def test_a_directory_in_a_records_place_is_no_record(place: Path) -> None:
    await write(place, 1)
    (place / f"{2:020}.record").mkdir()
    with pytest.raises(ReplyError, match="is a directory, and no record"):
        await FileBoard(place).read()
