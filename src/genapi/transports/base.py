"""`Transport`: the one interface of everything that moves an `HTTPCall` to a server."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from genapi.wire.http import LARGEST_BODY, HTTPCall, HTTPReply

__all__ = ("Plane", "StreamReply", "Transport")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """How one plane's connections behave.

    Attributes:
        connect_timeout_s: bound on one connect; it starts with the connect, not with queueing.
        idle_timeout_s: longest silence of the peer; None = none.
        keep_alive: whether connections are reused (never for administration: a server that
            answered an error may close without saying so).
        max_connections: most connections at once; None = no limit.
        trust_env: whether proxies of the environment are used.
        ca_file: certificate authorities to trust; None = the system's.
        largest_body: most bytes of an answer that `send` reads.
    """

    connect_timeout_s: float = 30.0
    idle_timeout_s: float | None = None
    keep_alive: bool = True
    max_connections: int | None = None
    trust_env: bool = False
    ca_file: str | None = None
    largest_body: int = LARGEST_BODY


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamReply:
    """An answer whose body is still arriving.

    Attributes:
        status: HTTP status.
        headers: by lower-case name.
        chunks: the body in pieces as they arrive. It ends where the framing says so; a body that
            breaks off raises `TransportError` with phase `answered`. One that is always ready
            still gives other tasks, and cancellation, their turn.
        framed: whether the framing tells a complete body from a broken one (chunked or with a
            length); False = it ends when the connection closes.
        url: where it came from, for messages.
    """

    status: int
    headers: Mapping[str, str]
    chunks: AsyncIterator[bytes]
    framed: bool
    url: str


class Transport(Protocol):
    """Moves calls. Safe for any number of calls at once on one event loop.

    Every failure without a usable answer is a `TransportError` whose phase says whether the
    peer may have acted. Cancelling a call closes its connection at once, which is how an engine
    learns that nobody waits any more.
    """

    @property
    def in_process(self) -> bool:
        """Whether servers are objects in this process, to which attachments can be handed."""
        ...

    async def send(
        self, base_url: str, call: HTTPCall, *, headers: Mapping[str, str] = ...
    ) -> HTTPReply:
        """The whole answer to `call`; `headers` are added to the call's own.

        Raises:
            TransportError: there is none.
            ReplyError: it is too large.
        """
        ...

    def stream(
        self, base_url: str, call: HTTPCall, *, headers: Mapping[str, str] = ...
    ) -> AbstractAsyncContextManager[StreamReply]:
        """The answer while it arrives; leaving the block early closes the connection."""
        ...

    async def aclose(self) -> None:
        """Close every connection. Calls in flight end with `TransportError`."""
        ...
