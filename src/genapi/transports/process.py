"""One program run for as long as a task runs, and not a moment longer than this process.

Between this process and the program stands a keeper (`keeper.py`), which ends the program and all
that it started when it is told to or when this process is gone, however that went.
The rule of this file: a program is stopped by ending the task that keeps it, in no other way.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from genapi.errors import FleetError
from genapi.transports import keeper

__all__ = ("Program",)

_LONGEST_LINE = 65536
_AFTER_GRACE_S = 20.0
"""The keeper's own bound on what survives SIGKILL is shorter."""
_TAIL_BYTES = 65536
_LISTENS = "0A"
"""TCP_LISTEN in /proc/net/tcp."""


class Program:
    """One life of a program.

    Attributes:
        name: what messages call it.
        log: the file that holds all its output.
        pid: of the program, which leads a process group; None until it was started.
        status: how it ended, negative for a signal; None = it runs, or that is not known.
        started: set when it was started, or could not be.
        ended: set when the program itself has ended.
        gone: set when nothing of it is left, or what is left survives SIGKILL.
        failed: why it could not be started.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: Path,
        log: Path,
        grace_s: float,
    ) -> None:
        """Start nothing yet.

        Args:
            name: what messages call it.
            argv: its command line.
            environment: all of its variables.
            folder: its working folder.
            log: the file its output is added to, readable by nobody else.
            grace_s: how long after SIGTERM it gets SIGKILL.
        """
        self.name = name
        self.log = log
        self.pid: int | None = None
        self.status: int | None = None
        self.failed: str | None = None
        self.started = anyio.Event()
        self.ended = anyio.Event()
        self.gone = anyio.Event()
        self._left: Sequence[int] = ()
        self._argv = argv
        self._environment = environment
        self._folder = folder
        self._grace_s = grace_s

    async def keep(self) -> None:
        """Run it until it ends; cancelling this stops it. Returns when nothing of it is left.

        Raises:
            FleetError: processes of it survive SIGKILL.
        """
        # Shielded: a keeper whose start is cancelled would be told nothing.
        with anyio.CancelScope(shield=True):
            try:
                process = await self._start_keeper()
            except OSError as error:
                self.failed = str(error)
                for event in (self.started, self.ended, self.gone):
                    event.set()
                return
        assert process.stdout is not None  # noqa: S101 - it was asked for
        lines = BufferedByteReceiveStream(process.stdout)
        try:
            with suppress(anyio.IncompleteRead, anyio.EndOfStream):
                while not self.ended.is_set():
                    await self._hear(lines)
        finally:
            with anyio.CancelScope(shield=True):
                self._left = await self._end(process, lines)
            self.started.set()
            self.ended.set()
            self.gone.set()
        self.check_gone()

    def check_gone(self) -> None:
        """Return where nothing of it was left, or what was left has ended since.

        Raises:
            FleetError: processes of it survive SIGKILL.
        """
        left = [pid for pid in self._left if _is_there(pid)]
        if left:
            raise FleetError(
                f"processes {left} of {self.name} survive SIGKILL; the system has to end them"
            )

    def tail(self, lines: int = 40, *, hide: Iterable[str] = ()) -> str:
        """The last lines of its output, without the texts that are to be hidden."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except OSError:
            return ""
        for secret in hide:
            text = text.replace(secret, "**********")
        return "\n".join(text.splitlines()[-lines:])

    def is_not_at(self, port: int) -> bool:
        """Whether it shows that another program listens at that port of this machine.

        False also where that cannot be seen: who listens is another user's, or the system does
        not say.
        """
        sockets = _listening(port)
        owners = {session for session, links in _sockets() if sockets & links} if sockets else set()
        return bool(owners) and self.pid not in owners

    @property
    def fate(self) -> str:
        """How it ended, in words."""
        if self.failed is not None:
            return f"could not be started: {self.failed}"
        if self._left and self.status is None:
            return "survives SIGKILL"
        if self.status is None:
            return "ended in an unknown way"
        if self.status < 0:
            with suppress(ValueError):
                return f"was killed by {signal.Signals(-self.status).name}"
        return f"ended with status {self.status}"

    async def _start_keeper(self) -> Process:
        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            return await anyio.open_process(
                [
                    sys.executable,
                    "-I",
                    keeper.__file__,
                    str(os.getpid()),
                    str(self._grace_s),
                    *self._argv,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=descriptor,
                env=self._environment,
                cwd=self._folder,
                start_new_session=True,
            )
        finally:
            os.close(descriptor)

    async def _hear(self, lines: BufferedByteReceiveStream) -> list[int]:
        """Take in one thing that the keeper tells."""
        fact = json.loads(await lines.receive_until(b"\n", _LONGEST_LINE))
        self.pid = fact.get("pid", self.pid)
        self.failed = fact.get("failed")
        self.status = fact.get("status", self.status)
        if self.pid is not None:
            self.started.set()
        if self.failed is not None or self.status is not None:
            self.ended.set()
        left: list[int] = fact.get("left", [])
        return left

    async def _end(self, process: Process, lines: BufferedByteReceiveStream) -> Sequence[int]:
        """Tell the keeper to end the program, and wait until nothing is left."""
        assert process.stdin is not None  # noqa: S101 - it was asked for
        with suppress(anyio.BrokenResourceError, OSError):  # it has ended by itself
            await process.stdin.send(b"stop\n")
        await process.stdin.aclose()
        left: list[int] = []
        with anyio.move_on_after(self._grace_s + _AFTER_GRACE_S):
            with suppress(anyio.IncompleteRead, anyio.EndOfStream):
                while True:
                    left = await self._hear(lines) or left
            await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()
        if process.returncode and self.pid is not None and not self.ended.is_set():
            with suppress(ProcessLookupError):  # the keeper itself was killed
                os.killpg(self.pid, signal.SIGKILL)
        await process.aclose()
        return left


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _listening(port: int) -> set[str]:
    """The sockets that listen at a port, as links of a process name them."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{fields[9]}]")
    return found


def _sockets() -> Iterator[tuple[int, set[str]]]:
    """The session of each process that can be seen, and what its descriptors are."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            session = int((process / "stat").read_bytes().rpartition(b")")[2].split()[3])
            links = set()
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    links.add(str(descriptor.readlink()))
            yield session, links
