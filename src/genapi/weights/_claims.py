"""Who publishes a run into a directory: a file for each publisher that lives, locked by it.

    DIR/.<run>.publisher      of the one that publishes the run
    DIR/.<run>.publisher-2    of one that goes on beside it, as it was superseded; and so on

The rule of this file: a lock ends with its process, so what a file says counts only while it is
locked. Nobody makes one of the others but to go on, so that of two that start at once one does.
"""

import itertools
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from genapi.types.policy import PolicyVersion
from genapi.weights._disk import Disk

__all__ = ("Claims",)


class _Claim(NamedTuple):
    disk: Disk
    path: Path
    lock: int


class Claims:
    """The runs that one publisher publishes, and what it wrote.

    Attributes:
        written: versions that it wrote.
    """

    def __init__(self) -> None:
        self.written: set[PolicyVersion] = set()
        self._claims: dict[str, _Claim] = {}

    def take(self, disk: Disk, directory: Path, run: str, *, beside: bool) -> str | None:
        """Publish a run there from now on; returns who does already, where that is refused.

        Args:
            disk: of the directory.
            directory: one that is there.
            run: its name.
            beside: whether to go on beside others.
        """
        mine = self._claims.get(run)
        if mine is not None:
            if mine.disk.is_called(mine.lock, mine.path):
                return None
            del self._claims[run]  # the directory was removed, and perhaps made anew by another
            mine.disk.close(mine.lock)
        first = directory / _name_of(run)
        for number in itertools.count(1):
            path = first if number == 1 else first.with_name(f"{first.name}-{number}")
            try:
                lock = disk.lock(path)
            except BlockingIOError:
                if not beside:
                    return _owner(disk, path)
                continue
            if lock is not None:
                self._claims[run] = _Claim(disk, path, lock)
                disk.write(lock, f"{_this_process()}\n".encode(), 0)
            break
        rival = None if beside else self.rival(disk, directory, run)
        if rival is not None and run in self._claims:
            self._give_up(run)
        return rival

    def rival(self, disk: Disk, directory: Path, run: str) -> str | None:
        """Who else publishes a run there; None = nobody that lives."""
        mine, name = self._claims.get(run), _name_of(run)
        for other in sorted(disk.names(directory)):
            path = directory / other
            if not other.startswith(name) or (mine is not None and mine.path == path):
                continue
            if other != name and not other.removeprefix(f"{name}-").isdecimal():
                continue
            try:
                lock = disk.lock(path, make=False)
            except BlockingIOError:
                return _owner(disk, path)
            except FileNotFoundError:
                continue
            if lock is not None:  # of one that died
                try:
                    disk.remove(path)
                finally:
                    disk.close(lock)
        return None

    def close(self) -> None:
        """Give up what was taken."""
        for run in list(self._claims):
            self._give_up(run)

    def _give_up(self, run: str) -> None:
        disk, path, lock = self._claims.pop(run)
        try:
            if disk.is_called(lock, path):
                disk.remove(path)
        finally:
            disk.close(lock)

    def __del__(self) -> None:
        """Of a publisher that is gone a file may stay, which nobody holds."""
        for disk, _, lock in self._claims.values():
            with suppress(OSError):
                disk.close(lock)


def _name_of(run: str) -> str:
    return f".{run}.publisher"


def _owner(disk: Disk, path: Path) -> str:
    """Who has locked a file, as far as it says."""
    try:
        said = disk.read(path).decode(errors="replace").partition("\n")[0]
    except OSError:
        said = ""
    if said == _this_process():
        said = "another publisher of this process"
    return f"{said or 'another process'} ({path})"


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
