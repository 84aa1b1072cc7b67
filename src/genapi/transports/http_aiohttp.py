"""The default HTTP client: aiohttp, with one connection per call in flight.

aiohttp is used in this file only. What it does by itself beyond one exchange is switched off:
cookies, redirects, decompression, netrc, its second try of a GET, its limit of 100 connections.
The rule of this file: a call whose connection was not obtained is `not_sent`; from then on until
complete headers it is `may_have_run`, also on a reused connection, because a server that closed an
idle connection looks the same as one that died over the request.
"""

import asyncio
import io
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any
from urllib.request import getproxies, proxy_bypass

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

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
from genapi.wire.origin import is_loopback, origin

__all__ = ("AiohttpTransport",)

_LARGE_BODY = 2**20


class _Attempt:
    """One exchange: its connection once it has one, its response once there are headers."""

    __slots__ = ("protocol", "response", "transport")

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.protocol: Any = None
        self.response: aiohttp.ClientResponse | None = None

    @property
    def phase(self) -> Phase:
        """What a failure now means."""
        if self.response is not None:
            return "answered"
        return "not_sent" if self.transport is None else "may_have_run"

    def check_end(self) -> None:
        """Raise when a body that ends with its connection ended because that broke."""
        error = self.protocol.exception()
        if isinstance(error, aiohttp.ClientOSError):  # aiohttp shows such a body as complete
            raise error

    def abandon(self) -> None:
        """Close the connection at once, also when the peer does not read what is still unsent."""
        if self.response is not None:
            self.response.close()  # wakes who reads the body; closing the transport alone does not
        # One that is not closing by now went back to the pool and may already serve another call.
        if self.transport is not None and self.transport.is_closing():
            self.transport.abort()


_attempt: ContextVar[_Attempt] = ContextVar("genapi_attempt")


class _Connector(aiohttp.TCPConnector):
    async def connect(self, *args: Any, **kwargs: Any) -> Any:
        """A connection for the attempt of this context."""
        connection = await super().connect(*args, **kwargs)
        attempt = _attempt.get()
        attempt.transport, attempt.protocol = connection.transport, connection.protocol
        return connection


class _LostError(aiohttp.ClientConnectionError):
    """A lost connection that aiohttp does not take for a reason to send a GET again."""


async def _once(
    request: aiohttp.ClientRequest,
    handler: Callable[[aiohttp.ClientRequest], Awaitable[aiohttp.ClientResponse]],
) -> aiohttp.ClientResponse:
    try:
        return await handler(request)
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise _LostError from error


class _Resolver(AbstractResolver):
    """Bounds the look-up of names, which aiohttp's time limits leave out."""

    def __init__(self, timeout_s: float) -> None:
        self._resolver = aiohttp.ThreadedResolver()  # the system's, whatever is installed
        self._timeout_s = timeout_s

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        async with asyncio.timeout(self._timeout_s):
            return await self._resolver.resolve(host, port, family)

    async def close(self) -> None:
        await self._resolver.close()


def _open_socket(address: Any) -> socket.socket:
    family, kind, protocol, _, _ = address
    opened = socket.socket(family, kind, protocol)
    for name, value in TCP_KEEPALIVE:
        if hasattr(socket, name):
            level = socket.SOL_SOCKET if name.startswith("SO_") else socket.IPPROTO_TCP
            opened.setsockopt(level, getattr(socket, name), value)
    return opened


class AiohttpTransport:
    """Moves calls over HTTP/1.1 with aiohttp. It belongs to the event loop of its first call.

    Time limits are the plane's only; there is no limit on a whole exchange, and none on a peer that
    stops reading a request: deadlines are the caller's.
    """

    in_process = False

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._attempts: set[_Attempt] = set()
        self._proxies: dict[str, str | None] = {}

    async def send(
        self, base_url: str, call: HTTPCall, *, headers: Mapping[str, str] = NO_HEADERS
    ) -> HTTPReply:
        """The whole answer to `call`.

        Raises:
            TransportError: there is none; its phase says whether the peer may have acted.
            ReplyError: it is larger than `Plane.largest_body`.
        """
        attempt = _Attempt()
        self._attempts.add(attempt)
        try:
            response = await self._request(attempt, base_url, call, headers)
            found = _headers(response)
            framed = is_framed(response.status, found)
            body = await whole(
                _Chunks(response, at_end=None if framed else attempt.check_end),
                url=base_url + call.path,
                status=response.status,
                limit=self._plane.largest_body,
            )
            await response.read()  # nothing is left: until the request is written as well
        except BaseException as error:
            attempt.abandon()
            if (failure := self._failure(error, base_url, call, attempt.phase)) is None:
                raise
            raise failure from _shareable(error)
        finally:
            self._attempts.discard(attempt)
        return HTTPReply(response.status, body, found, base_url + call.path)

    @asynccontextmanager
    async def stream(
        self, base_url: str, call: HTTPCall, *, headers: Mapping[str, str] = NO_HEADERS
    ) -> AsyncIterator[StreamReply]:
        """The answer while it arrives; leaving the block early closes the connection.

        Raises:
            TransportError: there is none, or its body broke off.
        """
        attempt = _Attempt()
        self._attempts.add(attempt)

        def failure(error: BaseException) -> TransportError | None:
            return self._failure(error, base_url, call, attempt.phase)

        try:
            try:
                response = await self._request(attempt, base_url, call, headers)
            except BaseException as error:
                if (loss := failure(error)) is None:
                    raise
                raise loss from _shareable(error)
            found = _headers(response)
            framed = is_framed(response.status, found)
            yield StreamReply(
                status=response.status,
                headers=found,
                chunks=_Chunks(
                    response, at_end=None if framed else attempt.check_end, failure=failure
                ),
                framed=framed,
                url=base_url + call.path,
            )
        finally:
            self._attempts.discard(attempt)
            attempt.abandon()

    async def aclose(self) -> None:
        """Close every connection; calls in flight end with `TransportError`."""
        self._closed = True
        if self._session is None:
            return
        session = self._bound()
        for attempt in self._attempts:
            attempt.abandon()
            if attempt.response is None and attempt.transport is not None:
                attempt.transport.abort()  # in use by this attempt for certain
        await session.close()

    async def _request(
        self, attempt: _Attempt, base_url: str, call: HTTPCall, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        refuse_attachment(call)
        if self._closed:
            raise lost(base_url, call, "this transport is closed", phase="not_sent")
        session = self._bound()
        body: Any = call.body
        if body is not None and len(body) > _LARGE_BODY:
            body = io.BytesIO(body)  # written in pieces
        token = _attempt.set(attempt)
        try:
            attempt.response = await session.request(
                call.method,
                URL(call_url(base_url, call), encoded=True),
                data=body,
                headers=call_headers(call, headers),
                allow_redirects=False,
                proxy=self._proxy(base_url) if self._plane.trust_env else None,
            )
        finally:
            _attempt.reset(token)
        return attempt.response

    def _bound(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._session is None:
            self._session, self._loop = self._open(), loop
        elif self._loop is not loop:
            raise RuntimeError(OTHER_LOOP)
        return self._session

    def _open(self) -> aiohttp.ClientSession:
        plane = self._plane
        context = ssl.create_default_context(cafile=plane.ca_file) if plane.ca_file else True
        connector = _Connector(
            limit=plane.max_connections or 0,
            limit_per_host=plane.max_connections or 0,
            force_close=not plane.keep_alive,
            keepalive_timeout=IDLE_CONNECTION_S if plane.keep_alive else None,
            resolver=_Resolver(plane.connect_timeout_s),
            socket_factory=_open_socket,
            ssl=context,
        )
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=plane.connect_timeout_s, sock_read=plane.idle_timeout_s
        )
        return aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("Content-Type",),
            trust_env=False,  # it would also send passwords of ~/.netrc; proxies are found below
            middlewares=(_once,),
        )

    def _proxy(self, base_url: str) -> str | None:
        key = origin(base_url)
        if key not in self._proxies:
            scheme, _, host = key.partition("://")
            direct = is_loopback(key) or proxy_bypass(host)
            found = getproxies()
            self._proxies[key] = None if direct else found.get(scheme, found.get("all"))
        return self._proxies[key]

    def _failure(
        self, error: BaseException, base_url: str, call: HTTPCall, phase: Phase
    ) -> TransportError | None:
        """`error` as what it means to the caller; None = raise it as it is."""
        match error:
            case aiohttp.ClientError() | OSError():
                return lost(base_url, call, self._reason(error), phase=phase)
            case asyncio.CancelledError() if self._closed and not _is_cancelled():
                # The closed connector cancels who waits in it.
                return lost(base_url, call, "this transport was closed", phase=phase)
        return None

    def _reason(self, error: BaseException) -> str:
        if isinstance(error, _LostError) and error.__cause__ is not None:
            error = error.__cause__
        match error:
            case _ if self._closed:
                reason = "this transport was closed"
            case aiohttp.ConnectionTimeoutError():
                reason = f"no connection within {self._plane.connect_timeout_s:g} s"
            case aiohttp.SocketTimeoutError():
                reason = f"the peer was silent for {self._plane.idle_timeout_s:g} s"
            case aiohttp.ClientConnectorError():
                reason = f"no connection ({error.os_error})"
            case aiohttp.ServerDisconnectedError():
                reason = "the peer closed the connection"
            case aiohttp.ClientPayloadError():
                reason = "the body ended before its framing says so"
            case aiohttp.ClientHttpProxyError():
                reason = f"the proxy refused to connect (status {error.status})"
            case aiohttp.ClientResponseError():
                reason = "what came back is not HTTP"
            case _:
                reason = f"{type(error).__name__}: {error}"
        return reason


class _Chunks:
    """The pieces of a body as they arrive."""

    __slots__ = ("_at_end", "_failure", "_response", "_turns")

    def __init__(
        self,
        response: aiohttp.ClientResponse,
        *,
        at_end: Callable[[], None] | None,
        failure: Callable[[BaseException], TransportError | None] = lambda _error: None,
    ) -> None:
        self._response = response
        self._at_end = at_end
        self._failure = failure
        self._turns = Turns()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        await self._turns.next()
        try:
            chunk = await self._response.content.readany()
            if not chunk and self._at_end is not None:
                self._at_end()
        except (aiohttp.ClientError, OSError) as error:
            if (loss := self._failure(error)) is None:
                raise
            raise loss from _shareable(error)
        if not chunk:
            raise StopAsyncIteration
        return chunk


def _headers(response: aiohttp.ClientResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in response.headers.items()}


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _shareable(error: BaseException) -> BaseException | None:
    """The cause to keep: none that holds the request's headers."""
    return None if isinstance(error, aiohttp.ClientResponseError) else error
