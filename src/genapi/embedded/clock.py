"""The time an engine lives in: real, or virtual and therefore free.

Everything in this package that waits for time to pass asks a `Clock`; nothing here knows of
engines.
"""

import asyncio
import heapq
import time
from itertools import count
from typing import Protocol

__all__ = ("Clock", "RealClock", "VirtualClock")


class Clock(Protocol):
    """Where an engine gets its time from, in seconds."""

    def now(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return when `seconds` more have passed on this clock."""
        ...


class RealClock:
    """The host's monotonic clock."""

    def now(self) -> float:
        """Seconds of the monotonic clock."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait for real."""
        await asyncio.sleep(seconds)


class VirtualClock:
    """A clock that jumps to the next wake-up, once per turn of the event loop.

    Sleepers wake in the order of their deadlines, equal deadlines in the order of their calls.
    Between two wake-ups every task that is ready gets one turn, so work elsewhere in the process
    overlaps with simulated time and two equal runs interleave equally. One clock belongs to one
    event loop.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._now = start_s
        self._order = count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._pumping = False

    def now(self) -> float:
        """Virtual seconds."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Yield to the event loop until virtual time has advanced by `seconds`."""
        loop = asyncio.get_running_loop()
        wake: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._sleepers, (self._now + max(seconds, 0.0), next(self._order), wake))
        if not self._pumping:
            self._pumping = True
            loop.call_soon(self._pump, loop)
        await wake

    def _pump(self, loop: asyncio.AbstractEventLoop) -> None:
        while (
            self._sleepers and self._sleepers[0][2].done()
        ):  # a cancelled sleeper must not move time
            heapq.heappop(self._sleepers)
        if self._sleepers:
            due, _, wake = heapq.heappop(self._sleepers)
            self._now = max(self._now, due)
            wake.set_result(None)
        self._pumping = bool(self._sleepers)
        if self._pumping:
            loop.call_soon(self._pump, loop)
