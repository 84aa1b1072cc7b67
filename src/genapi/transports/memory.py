"""Calls to engines inside this process: no socket, and attachments go by reference.

The rule of this file: it knows a cluster only by the shape below, never by import.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol, Self

from genapi.errors import Phase, TransportError
from genapi.transports.base import StreamReply
from genapi.transports.bodies import Turns, whole
from genapi.wire.http import HTTPCall, HTTPReply

__all__ = ("Cluster", "MemoryCall", "MemoryTransport")

_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})
_SCHEME: Final = "memory://"


@dataclass(frozen=True, slots=True, eq=False)
class MemoryCall:
    """What a cluster's worker is handed; header names are lower case."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    attachment: object | None


class Cluster(Protocol):
    """Servers in this process.

    A reply has `status`, `headers`, and a `body` of bytes or of an asynchronous iterator of them
    that has `aclose`. A server that does not listen raises `ConnectionRefusedError`; one that goes
    away raises `ConnectionResetError`, from `handle` or out of the body.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """Addresses of the servers, in order: `memory://0`, `memory://1`, ..."""
        ...

    async def open(self) -> None:
        """Start the servers; no effect when they run."""
        ...

    async def aclose(self) -> None:
        """Stop the servers; calls in flight are reset."""
        ...

    async def handle(self, worker: int, call: Any) -> Any:
        """The reply of one server to a call; cancelling it is a client that went away."""
        ...


class MemoryTransport:
    """Moves calls to `memory://0`, `memory://1`, ... of one cluster.

    The cluster is started with the transport (by entering it, else by the first call) and stopped
    with it.
    """

    in_process = True

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._closed = False

    @property
    def urls(self) -> tuple[str, ...]:
        """Base URLs of the servers, in order."""
        return self._cluster.names

    async def __aenter__(self) -> Self:
        await self._cluster.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def send(
        self, base_url: str, call: HTTPCall, *, headers: Mapping[str, str] = _NO_HEADERS
    ) -> HTTPReply:
        """The whole answer to `call`.

        Raises:
            TransportError: there is none; its phase says whether the server may have acted.
            ReplyError: it is too large.
        """
        reply = await self._handle(base_url, call, headers)
        body = reply.body
        if not isinstance(body, bytes):
            try:
                body = await whole(
                    _many(body, base_url, call), url=base_url + call.path, status=reply.status
                )
            finally:
                await reply.body.aclose()
        return HTTPReply(reply.status, body, _lower(reply.headers), base_url + call.path)

    @asynccontextmanager
    async def stream(
        self, base_url: str, call: HTTPCall, *, headers: Mapping[str, str] = _NO_HEADERS
    ) -> AsyncIterator[StreamReply]:
        """The answer while it arrives; leaving the block early tells the server.

        Raises:
            TransportError: there is none, or its body broke off.
        """
        reply = await self._handle(base_url, call, headers)
        whole = isinstance(reply.body, bytes)
        try:
            yield StreamReply(
                status=reply.status,
                headers=_lower(reply.headers),
                chunks=_one(reply.body) if whole else _many(reply.body, base_url, call),
                framed=True,
                url=base_url + call.path,
            )
        finally:
            if not whole:
                await reply.body.aclose()

    async def _handle(self, base_url: str, call: HTTPCall, headers: Mapping[str, str]) -> Any:
        if self._closed:
            raise _lost(base_url, call, "this transport is closed", phase="not_sent")
        await self._cluster.open()
        try:
            return await self._cluster.handle(_index(base_url), _memory_call(call, headers))
        except ConnectionRefusedError as error:
            raise _lost(base_url, call, str(error), phase="not_sent") from error
        except ConnectionResetError as error:
            raise _lost(base_url, call, str(error), phase="may_have_run") from error

    async def aclose(self) -> None:
        """Stop the cluster; calls in flight end with `TransportError`."""
        self._closed = True
        await self._cluster.aclose()


def _index(base_url: str) -> int:
    text = base_url.removeprefix(_SCHEME)
    if not (base_url.startswith(_SCHEME) and text.isdecimal()):
        raise ValueError(f"{base_url!r} is not the address of a server in memory; write memory://0")
    return int(text)


def _memory_call(call: HTTPCall, headers: Mapping[str, str]) -> MemoryCall:
    sent = {} if call.body is None else {"content-type": "application/json"}
    sent |= _lower(call.headers) | _lower(headers)
    return MemoryCall(
        method=call.method,
        path=call.path,
        query=call.query,
        headers=sent,
        body=call.body or b"",
        attachment=call.attachment,
    )


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


async def _one(body: bytes) -> AsyncIterator[bytes]:
    yield body


async def _many(body: AsyncIterator[bytes], base_url: str, call: HTTPCall) -> AsyncIterator[bytes]:
    turns = Turns()
    try:
        async for chunk in body:
            yield chunk
            await turns.next()
    except ConnectionResetError as error:
        raise _lost(base_url, call, str(error), phase="answered") from error


def _lost(base_url: str, call: HTTPCall, reason: str, *, phase: Phase) -> TransportError:
    message = f"{call.method} {call.path} to {base_url}: {reason}"
    return TransportError(message, phase=phase, url=base_url + call.path)
