"""Plain HTTP-shaped calls and replies, without any HTTP library.

Both shells speak these: the memory shell hands them over in process, the socket shell makes them
from ASGI.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

__all__ = ("ByteStream", "Call", "Reply")


class ByteStream(AsyncIterator[bytes]):
    """A reply body that arrives in pieces.

    Closing it, or cancelling a read of it, is a client that went away: the server is told at once,
    also when nothing was read yet.
    """

    def __init__(self, source: AsyncGenerator[bytes, None], *, gone: Callable[[], None]) -> None:
        self._source = source
        self._gone = gone

    async def __anext__(self) -> bytes:
        """The next piece.

        Raises:
            ConnectionResetError: The process behind it was killed.
        """
        try:
            return await self._source.__anext__()
        except BaseException:
            self._gone()
            raise

    async def aclose(self) -> None:
        """Go away; further reads end."""
        self._gone()
        await self._source.aclose()


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One request, header names in lower case; `attachment` carries arrays past the wire."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    attachment: object | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """One answer; `closes`: the server hangs up after it without having said so in a header."""

    status: int
    headers: Mapping[str, str]
    body: bytes | ByteStream
    closes: bool = False
