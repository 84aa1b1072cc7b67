"""The compatible HTTP client: httpx, or any client of the user's that has its two methods.

httpx is used in this file only. It behaves as the default client does (one contract suite runs on
both) and is much slower with many calls in flight; bring it for an ASGI application, a mock
transport, or hooks that a program already has on its client.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, Protocol

import httpx

from genapi.errors import Phase, TransportError
from genapi.transports.base import Plane, StreamReply
from genapi.transports.bodies import Turns, whole
from genapi.transports.http import (
    IDLE_CONNECTION_S,
    NO_HEADERS,
    OTHER_LOOP,
    TCP_KEEPALIVE,
    call_headers,
    call_url,
    is_framed,
    lost,
    refuse_attachment,
)
from genapi.wire.http import HTTPCall, HTTPReply

__all__ = ("AsyncClient", "HttpxTransport")

_BEFORE_SENDING = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.ProxyError,
    httpx.UnsupportedProtocol,
    httpx.LocalProtocolError,
)
_LOOPBACK = ("all://localhost", "all://127.0.0.1", "all://[::1]")


class AsyncClient(Protocol):
    """What is needed of an `httpx.AsyncClient`."""

    def build_request(
        self, method: str, url: str, *, content: Any, headers: Any, timeout: Any
    ) -> Any:
        """A request of the client's own type."""
        ...

    async def send(self, request: Any, *, stream: bool, follow_redirects: bool) -> Any:
        """The response to a request, with the body still to be read."""
        ...


class HttpxTransport:
    """Moves calls with httpx. It belongs to the event loop of its first call.

    A client that is passed in keeps its own connection limits, proxies, hooks and default headers;
    only the plane's time limits are set on each request. Whoever made it closes it.
    """

    in_process = False

    def __init__(self, plane: Plane, client: AsyncClient | None = None) -> None:
        self._plane = plane
        self._given = client
        self._own: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._timeout = httpx.Timeout(
            plane.idle_timeout_s, connect=plane.connect_timeout_s, pool=None
        )

    async def send(
        self, base_url: str, call: HTTPCall, *, headers: Mapping[str, str] = NO_HEADERS
    ) -> HTTPReply:
        """The whole answer to `call`.

        Raises:
            TransportError: there is none; its phase says whether the peer may have acted.
            ReplyError: it is larger than `Plane.largest_body`.
        """
        async with self.stream(base_url, call, headers=headers) as reply:
            body = await whole(
                reply.chunks,
                url=reply.url,
                status=reply.status,
                limit=self._plane.largest_body,
            )
        return HTTPReply(reply.status, body, reply.headers, reply.url)

    @asynccontextmanager
    async def stream(
        self, base_url: str, call: HTTPCall, *, headers: Mapping[str, str] = NO_HEADERS
    ) -> AsyncIterator[StreamReply]:
        """The answer while it arrives; leaving the block early closes the connection.

        Raises:
            TransportError: there is none, or its body broke off.
        """
        refuse_attachment(call)
        if self._closed:
            raise lost(base_url, call, "this transport is closed", phase="not_sent")
        client = self._bound()
        request = client.build_request(
            call.method,
            call_url(base_url, call),
            content=call.body,
            headers=call_headers(call, headers),
            timeout=self._timeout,
        )
        try:
            response = await client.send(request, stream=True, follow_redirects=False)
        except httpx.TransportError as error:
            phase: Phase = "not_sent" if isinstance(error, _BEFORE_SENDING) else "may_have_run"
            raise self._failure(error, base_url, call, phase) from error
        found = {name.lower(): value for name, value in response.headers.items()}
        try:
            yield StreamReply(
                status=response.status_code,
                headers=found,
                chunks=_Chunks(self, response, base_url, call),
                framed=is_framed(response.status_code, found),
                url=base_url + call.path,
            )
        finally:
            await response.aclose()

    async def aclose(self) -> None:
        """Close genapi's own client; calls in flight end with `TransportError`."""
        self._closed = True
        if self._own is not None:
            self._check_loop()
            await self._own.aclose()

    def _bound(self) -> AsyncClient:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        self._check_loop()
        if self._given is not None:
            return self._given
        if self._own is None:
            self._own = self._open()
        return self._own

    def _check_loop(self) -> None:
        if self._loop is not asyncio.get_running_loop():
            raise RuntimeError(OTHER_LOOP)

    def _open(self) -> httpx.AsyncClient:
        plane = self._plane
        context = ssl.create_default_context(cafile=plane.ca_file)
        limits = httpx.Limits(
            max_connections=plane.max_connections,
            max_keepalive_connections=None if plane.keep_alive else 0,
            keepalive_expiry=IDLE_CONNECTION_S,
        )
        direct = httpx.AsyncHTTPTransport(
            verify=context, limits=limits, trust_env=False, socket_options=_socket_options()
        )
        return httpx.AsyncClient(
            verify=context,
            limits=limits,
            mounts=dict.fromkeys(("all://", *_LOOPBACK), direct),
            trust_env=plane.trust_env,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            headers=None if plane.keep_alive else {"connection": "close"},
        )

    def _failure(
        self, error: httpx.TransportError, base_url: str, call: HTTPCall, phase: Phase
    ) -> TransportError:
        return lost(base_url, call, self._reason(error), phase=phase)

    def _reason(self, error: httpx.TransportError) -> str:
        if self._closed:
            return "this transport was closed"
        match error:
            case httpx.ConnectTimeout():
                return f"no connection within {self._plane.connect_timeout_s:g} s"
            case httpx.TimeoutException():
                return f"the peer was silent for {self._plane.idle_timeout_s:g} s"
            case httpx.ConnectError():
                return f"no connection ({error})"
            case httpx.RemoteProtocolError():
                return "the peer closed the connection, or what came back is not HTTP"
        return f"{type(error).__name__}: {error}"


class _Chunks:
    """The pieces of a body as they arrive."""

    __slots__ = ("_base_url", "_call", "_pieces", "_transport", "_turns")

    def __init__(
        self, transport: HttpxTransport, response: Any, base_url: str, call: HTTPCall
    ) -> None:
        self._transport = transport
        self._base_url = base_url
        self._call = call
        self._turns = Turns()
        # A mock transport hands over a response that it has read itself.
        read = response.is_stream_consumed
        self._pieces: AsyncIterator[bytes] = (
            _one(response.content) if read else response.aiter_raw()
        )

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        await self._turns.next()
        try:
            return await anext(self._pieces)
        except httpx.TransportError as error:
            raise self._transport._failure(  # noqa: SLF001 - one file, one owner
                error, self._base_url, self._call, "answered"
            ) from error


async def _one(body: bytes) -> AsyncIterator[bytes]:
    yield body


def _socket_options() -> list[tuple[int, int, int]]:
    return [
        (
            socket.SOL_SOCKET if name.startswith("SO_") else socket.IPPROTO_TCP,
            getattr(socket, name),
            value,
        )
        for name, value in TCP_KEEPALIVE
        if hasattr(socket, name)
    ]
