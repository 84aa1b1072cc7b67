"""The body of an answer while it arrives, whichever client brings it.

The rule of this file: a peer that always has more to send holds up nobody. A read that never waits
keeps the loop for itself, and anyio cancels nobody whose next piece is there already.
"""

import asyncio
from collections.abc import AsyncIterator

from genapi.errors import ReplyError
from genapi.wire.http import LARGEST_BODY

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


async def whole(
    chunks: AsyncIterator[bytes], *, url: str, status: int, limit: int = LARGEST_BODY
) -> bytes:
    """All of a body.

    Raises:
        ReplyError: it is larger than `limit` bytes.
    """
    pieces: list[bytes] = []
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if size > limit:
            message = f"{url} answered more than {limit} bytes, the most that is read of a reply"
            begins = (pieces or [chunk])[0]
            raise ReplyError(message, body=begins, status=status, url=url)
        pieces.append(chunk)
    return b"".join(pieces)
