"""Runs one program, and ends it with all that it started when whoever asked for it is gone.

    python -I keeper.py STARTER_PID GRACE_S COMMAND...

It is a process of its own between genapi and the program. Anything that its standard input says,
its end, or another parent means that the starter wants the program stopped or is gone, which is one
and the same. (The end alone would not do: whoever the starter forked holds the input open as well.)
The program leads a session of its own and gets SIGTERM
with its whole group, then SIGKILL; what left the group is adopted here (Linux) and ends as well.
Standard output tells `{"pid"}`, then `{"status"}` once the program itself has ended, negative for a
signal, then `{"left"}` where processes survive SIGKILL, the program itself included; it closes when
nothing more can be done. Standard error is the program's output.

The rule of this file: the standard library only, and nothing of ours.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ("main",)

_LOOK_S = 1.0
_GONE_S = 10.0
_PR_SET_CHILD_SUBREAPER = 36
_STAT_PARENT = 1
_FAILED = 127
_INPUT, _OUTPUT, _LOG = 0, 1, 2


def main(argv: Sequence[str]) -> int:
    """Run the program to its end; returns 0, or 127 where it could not be started."""
    starter, grace_s, command = int(argv[0]), float(argv[1]), list(argv[2:])
    wake = _wake_on(signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    with contextlib.suppress(OSError, AttributeError):  # elsewhere than on Linux
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != starter:
        return 0
    try:
        program = os.posix_spawnp(
            command[0],
            command,
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, _INPUT, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, _LOG, _OUTPUT),
            ],
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGPIPE, signal.SIGTERM, signal.SIGINT, signal.SIGHUP],
        )
    except OSError as error:
        _tell({"failed": f"{command[0]!r} cannot be run: {error.strerror}"})
        return _FAILED
    _tell({"pid": program})
    _keep(program, starter, wake)
    if _status(program) is None:
        _signal(program, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while _status(program) is None and time.monotonic() < deadline:
            _wait([wake], deadline - time.monotonic())
    _end(program, wake)
    return 0


def _keep(program: int, starter: int, wake: int) -> None:
    """Return when the program has ended, or is to end."""
    while _status(program) is None and os.getppid() == starter:
        ready = _wait([_INPUT, wake], _LOOK_S)
        if _INPUT in ready:
            return
        if any(number != signal.SIGCHLD for number in _drained(wake, ready)):
            return


def _end(program: int, wake: int) -> None:
    """Kill what is left of the program and of all that it started."""
    deadline, told = time.monotonic() + _GONE_S, False
    while True:
        # Not reaped before the others are gone: its id stays the group's and nobody else's.
        _signal(program, signal.SIGKILL)
        status = _status(program)
        if status is not None and not told:
            _tell({"status": status})
            told = True
        # Whoever a reaped one leaves behind is found the next time round.
        others = _adopted(program)
        if (told and not others) or time.monotonic() > deadline:
            break
        _drained(wake, _wait([wake], 0.05))
    left = others if told else [program, *others]
    if left:
        _tell({"left": left})
    with contextlib.suppress(ChildProcessError):
        os.waitpid(program, os.WNOHANG)


def _status(program: int) -> int | None:
    """How the program ended, which stays to be reaped; None = it runs. Reaps everybody else."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return None
        if found is None:
            return None
        if found.si_pid == program:
            exited = found.si_code == os.CLD_EXITED
            return found.si_status if exited else -found.si_status
        os.waitpid(found.si_pid, 0)


def _adopted(program: int) -> list[int]:
    """Children besides the program, which it left behind: killed, and reaped once they ended."""
    children = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            stat = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            if int(stat[_STAT_PARENT]) == os.getpid() and int(entry.name) != program:
                children.append(int(entry.name))
    for child in children:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, os.WNOHANG)
    return children


def _signal(program: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(program, number)


def _wake_on(*numbers: signal.Signals) -> int:
    """A descriptor to which the number of each of these signals is written."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    os.set_blocking(reading, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    return reading


def _wait(descriptors: list[int], limit_s: float) -> list[int]:
    return select.select(descriptors, [], [], max(0.0, limit_s))[0]


def _drained(wake: int, ready: list[int]) -> bytes:
    return os.read(wake, 1024) if wake in ready else b""


def _tell(fact: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        os.write(_OUTPUT, json.dumps(fact).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
