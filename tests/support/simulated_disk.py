"""A disk that keeps only what was synced, and whatever else it happened to have written.

The rule of this file: as long as the machine runs, everything is seen as it was done. When it
fails, a name that was not synced is there or not, and so is what a file was given since it was last
synced, each for itself.
"""

import errno
import itertools
import os
import random
import threading
from pathlib import Path

__all__ = ("PowerCut", "SimulatedDisk")


class PowerCut(BaseException):
    """The machine is off."""


class _File:
    def __init__(self) -> None:
        self.content = b""
        self.durable = b""


class _Directory:
    def __init__(self) -> None:
        self.names: dict[str, _File | _Directory] = {}
        self.durable: dict[str, _File | _Directory] = {}


class SimulatedDisk:
    """One directory tree under `/`.

    Attributes:
        steps: how many things were done.
        fails_at: the step at which the machine fails instead; None = it does not.
        refuses_at: the step at which `refusal` is raised instead.
        refusal: an error of the system.
        room: bytes that are free.
    """

    def __init__(self, *, fails_at: int | None = None, room: int = 1 << 30) -> None:
        self.steps = 0
        self.fails_at = fails_at
        self.refuses_at: int | None = None
        self.refusal = errno.EIO
        self.room = room
        self._root = _Directory()
        self._open: dict[int, _File] = {}
        self._handles = itertools.count(3)
        self._off = False
        self._locked: dict[int, _File] = {}
        self._one = threading.RLock()

    def restart(self, seed: int) -> None:
        """The machine is back with what was durable, and a random part of the rest."""
        chance = random.Random(seed)  # noqa: S311 - no secret
        self.fails_at, self._off = None, False
        self._open.clear()
        self._locked.clear()
        self._settle(self._root, chance)

    def read(self, path: Path) -> bytes:
        """Part of `Disk` as well, and no step: nothing depends on what is read."""
        found = self._find(path)
        assert isinstance(found, _File)
        return found.content

    @property
    def is_open(self) -> bool:
        """Whether a file of it was opened and not closed."""
        return bool(self._open)

    # what `Disk` asks for

    def free(self, path: Path) -> int:
        self._step()
        self._directory(path)
        return self.room

    def names(self, path: Path) -> list[str]:
        self._step()
        return sorted(self._directory(path).names)

    def is_file(self, path: Path) -> bool:
        self._step()
        return isinstance(self._found(path), _File)

    def is_directory(self, path: Path) -> bool:
        self._step()
        return isinstance(self._found(path), _Directory)

    def is_link(self, path: Path) -> bool:
        self._step()
        self._found(path)
        return False

    def make_directory(self, path: Path) -> None:
        self._step()
        above = self._directory(path.parent)
        if path.name in above.names:
            raise _error(errno.EEXIST, path)
        above.names[path.name] = _Directory()

    def create(self, path: Path) -> int:
        self._step()
        above = self._directory(path.parent)
        if path.name in above.names:
            raise _error(errno.EEXIST, path)
        above.names[path.name] = file = _File()
        return self._handle(file)

    def write(self, file: int, data: bytes | memoryview, offset: int) -> None:
        self._step()
        held, new = self._open[file], bytes(data)
        self.room -= len(new)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        before = held.content.ljust(offset, b"\0")
        held.content = before[:offset] + new + before[offset + len(new) :]

    def sync(self, file: int) -> None:
        self._step()
        self._open[file].durable = self._open[file].content

    def close(self, file: int) -> None:
        self._open.pop(file, None)
        self._locked.pop(file, None)
        if not self._off:
            self._step()

    def lock(self, path: Path, *, make: bool = True) -> int | None:
        self._step()
        above = self._directory(path.parent)
        if not make:
            self._find(path)
        file = above.names.setdefault(path.name, _File())
        assert isinstance(file, _File)
        if file in self._locked.values():
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK), str(path))
        handle = self._handle(file)
        self._locked[handle] = file
        return handle

    def is_called(self, file: int, path: Path) -> bool:
        self._step()
        return self._open[file] is self._found(path)

    def rename(self, old: Path, new: Path) -> None:
        self._step()
        self._directory(new.parent).names[new.name] = self._directory(old.parent).names.pop(
            old.name
        )

    def remove(self, path: Path) -> None:
        self._step()
        self._directory(path.parent).names.pop(path.name, None)

    def remove_directory(self, path: Path) -> None:
        self._step()
        if self._directory(path).names:
            raise _error(errno.ENOTEMPTY, path)
        del self._directory(path.parent).names[path.name]

    def sync_directory(self, path: Path) -> None:
        self._step()
        directory = self._directory(path)
        directory.durable = dict(directory.names)

    # internals

    def _step(self) -> None:
        with self._one:
            if self.fails_at is not None and self.steps >= self.fails_at:
                self._off = True
                raise PowerCut
            self.steps += 1
            if self.steps == self.refuses_at:
                raise OSError(self.refusal, os.strerror(self.refusal))

    def _handle(self, file: _File) -> int:
        handle = next(self._handles)
        self._open[handle] = file
        return handle

    def _found(self, path: Path) -> _File | _Directory | None:
        here: _File | _Directory | None = self._root
        for part in path.parts[1:]:
            here = here.names.get(part) if isinstance(here, _Directory) else None
        return here

    def _find(self, path: Path) -> _File | _Directory:
        found = self._found(path)
        if found is None:
            raise _error(errno.ENOENT, path)
        return found

    def _directory(self, path: Path) -> _Directory:
        found = self._find(path)
        if isinstance(found, _File):
            raise _error(errno.ENOTDIR, path)
        return found

    def _settle(self, node: _File | _Directory, chance: random.Random) -> None:
        if isinstance(node, _File):
            if node.content == node.durable:
                return
            part = node.content[: chance.randint(0, len(node.content))]
            node.content = node.durable = chance.choice([node.durable, node.content, part])
            return
        both = {**node.durable, **node.names}
        kept: dict[str, _File | _Directory] = {}
        for name in both:
            found = chance.choice([node.durable.get(name), node.names.get(name)])
            if found is not None:
                kept[name] = found
        node.names, node.durable = dict(kept), dict(kept)
        for child in kept.values():
            self._settle(child, chance)


def _error(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), str(path))
