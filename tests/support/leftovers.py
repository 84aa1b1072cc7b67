"""What a piece of work may leave behind in its process: tasks, threads, sockets."""

import asyncio
import contextlib
import gc
import pathlib
import threading

import anyio

_DESCRIPTORS = pathlib.Path("/proc/self/fd")


class Leftovers:
    """What there is now; `none` waits until there is nothing more than that."""

    def __init__(self) -> None:
        self._tasks = asyncio.all_tasks()
        self._threads = set(threading.enumerate())
        self._sockets = _sockets()

    async def none(self) -> None:
        """Everything that was started since has ended, or does within 5 s."""
        for _ in range(500):
            if not self._found():
                return
            await anyio.sleep(0.01)
        assert not self._found(), self._found()

    def _found(self) -> list[object]:
        gc.collect()
        return [
            *(asyncio.all_tasks() - self._tasks),
            *(set(threading.enumerate()) - self._threads),
            *(_sockets() - self._sockets),
        ]


def _sockets() -> set[str]:
    """The sockets that are open; none where the system does not list them."""
    if not _DESCRIPTORS.is_dir():
        return set()
    found = set()
    for entry in _DESCRIPTORS.iterdir():
        with contextlib.suppress(OSError):  # the one that lists them is gone
            target = str(entry.readlink())
            if target.startswith("socket:"):
                found.add(target)
    return found
