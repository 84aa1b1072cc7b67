"""What holds requests and updates apart in SGLang's front end: a pause gate and a lock.

Requests wait at the gate, then hold the lock as readers until they are over. An update of a server
that is not paused takes the lock as a writer, so it waits for everything in flight and everything
behind it waits too; an update of a paused server keeps the gate shut instead.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ("Gate", "ReadWriteLock")


class ReadWriteLock:
    """Many readers or one writer; a waiting writer goes before new readers."""

    def __init__(self) -> None:
        self._readers = 0
        self._writing = False
        self._writers_waiting = 0
        self._sleepers: list[asyncio.Future[None]] = []

    @property
    def locked(self) -> bool:
        """Whether anybody holds it."""
        return self._writing or self._readers > 0

    async def acquire_read(self) -> None:
        """Wait until nobody writes or waits to write, and read."""
        while self._writing or self._writers_waiting:
            await self._sleep()
        self._readers += 1

    def release_read(self) -> None:
        """Read no longer."""
        self._readers -= 1
        self._wake()

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Wait until nobody reads or writes, and write."""
        self._writers_waiting += 1
        try:
            while self.locked:
                await self._sleep()
            self._writing = True
        finally:
            self._writers_waiting -= 1
            self._wake()
        try:
            yield
        finally:
            self._writing = False
            self._wake()

    async def _sleep(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append(turn)
        await turn

    def _wake(self) -> None:
        sleepers, self._sleepers = self._sleepers, []
        for turn in sleepers:
            if not turn.done():
                turn.set_result(None)


class Gate:
    """Whether requests are let in. Whoever changes that, or relies on it, holds `turn`."""

    def __init__(self) -> None:
        self.turn = asyncio.Condition()
        self.shut = False
        self.lock = ReadWriteLock()

    async def enter(self) -> None:
        """Wait until the gate is open, and become a reader."""
        async with self.turn:
            await self.turn.wait_for(lambda: not self.shut)
        await self.lock.acquire_read()

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        """Hold everything off that an update must not meet."""
        async with self.turn:
            shut = self.shut
            if shut:
                yield
        if not shut:
            async with self.lock.writing():
                yield
