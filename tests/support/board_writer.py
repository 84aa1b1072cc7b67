"""A process that writes to a board: with others at once, dying at a step, or standing still at one.

    board_writer.py append URL NAME COUNT     on a line read: appends workers NAME:0 ...
    board_writer.py die URL                   for each line read: writes once, killed one step later
    board_writer.py die-writing URL           writes once, killed in the middle of the file
    board_writer.py stop URL EVENT STEP       writes once, stops itself at a step counted from EVENT

The steps are the interpreter's audit events that name something in the board's directory.
"""

import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from genapi.board import Board, open_board
from genapi.errors import TransportError
from genapi.types.board import BoardState, BoardWorker, parse_board

BIG = tuple(BoardWorker(id=f"vllm/http://127.0.0.1:8000/{n:032}") for n in range(20))


def say(*words: object) -> None:
    """One line to whoever started this process."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def append(board: Board, name: str, count: int) -> None:
    """Append workers; a write of unknown outcome is looked for in what is there afterwards."""
    say("ready")
    sys.stdin.readline()
    for number in range(count):
        mine = BoardWorker(id=f"{name}:{number}")
        written = unknown = False
        while not written:
            state, token = await board.read()
            known = state.workers if state else ()
            if unknown and mine in known:
                break
            epoch = state.epoch + 1 if state else 1
            new = BoardState(epoch=epoch, holder=name, workers=(*known, mine))
            try:
                written = await board.compare_and_set(token, new) is not None
            except TransportError:
                unknown = True
    await board.aclose()


async def write_once(board: Board) -> str:
    """One write; what it says of its outcome."""
    state, token = await board.read()
    epoch = state.epoch + 1 if state else 1
    new = BoardState(epoch=epoch, holder=f"process {os.getpid()}", workers=BIG)
    try:
        written = await board.compare_and_set(token, new)
    except TransportError as error:
        return error.phase
    return "refused" if written is None else f"written {written.generation}"


def signal_self(url: str, number: signal.Signals, *, step: int, since: str | None = None) -> None:
    """Have this process signalled just before a step: the first is 1, or the first `since`."""
    place = str(Path(parse_board(url).path).parent)
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        is_step = event.startswith(("open", "os.")) and str(arguments[0]).startswith(place)
        if is_step and (seen or since in (None, event)):
            seen += 1
            if seen == step:
                # To this thread: sent to the process, it might let this one go on a little.
                signal.pthread_kill(threading.get_ident(), number)

    sys.addaudithook(hook)


def in_child(url: str, prepare: Callable[[], None]) -> str:
    """Write once in a forked process; what it said, or `killed`."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        prepare()
        os.write(writing, anyio.run(write_once, open_board(url)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        said = answer.read()
    _, status = os.waitpid(child, 0)
    return said if os.waitstatus_to_exitcode(status) == 0 else "killed"


def limit_files() -> None:
    """Have this process killed when it writes more than 64 bytes to a file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))


def main(command: str, url: str, *arguments: str) -> None:
    """Run one command."""
    match command, arguments:
        case "append", (name, count):
            anyio.run(append, open_board(url), name, int(count))
        case "die", ():
            for step, _ in enumerate(sys.stdin, start=1):
                say(in_child(url, partial(signal_self, url, signal.SIGKILL, step=step)))
        case "die-writing", ():
            say(in_child(url, limit_files))
        case "stop", (since, step):
            signal_self(url, signal.SIGSTOP, since=since, step=int(step))
            say(anyio.run(write_once, open_board(url)))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(*sys.argv[1:])
