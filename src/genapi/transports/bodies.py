"""The body of an answer while it arrives, whichever client brings it.

The rule of this file: a peer that always has more to send holds up nobody. A read that never waits
keeps the loop for itself, and anyio cancels nobody whose next piece is there already.
"""

import asyncio
from collections.abc import AsyncIterator

__all__ = ("Turns", "whole")

_PIECES = 16
"""So many pieces one after the other, whether they were waited for or not."""


class Turns:
    """Gives way to other tasks, and to cancellation, now and then."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = _PIECES

    async def next(self) -> None:
        """To be awaited before each piece."""
        self._left -= 1
        if self._left == 0:
            self._left = _PIECES
            await asyncio.sleep(0)


async def whole(chunks: AsyncIterator[bytes]) -> bytes:
    """All of a body."""
    return b"".join([chunk async for chunk in chunks])
