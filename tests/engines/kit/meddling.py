"""Stands between genapi and real servers, and lets chosen calls go wrong.

The rule of this file: the server is the real one. A call to it is lost before or after it acts,
changed on the way, sent twice, or answered in its place; everything else passes as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import anyio

import genapi
from genapi.publication.receivers import Receivers
from genapi.transports.base import Plane, StreamReply
from genapi.transports.http_aiohttp import AiohttpTransport
from genapi.weights.base import Bucket, GroupTransport, Sender
from genapi.wire.http import HTTPCall, HTTPReply, json_body

__all__ = ("Breaking", "Meddled", "Meddling")

SECOND = 2
UPDATES = (
    "/update_weights",
    "/update_weights_from_distributed",
    "/engine/update_weights_from_distributed:update_weights",
)


@dataclass(frozen=True)
class Meddled:
    """What goes wrong with the `nth` call to a path.

    Attributes:
        path: of the call; behind it, with a colon, the method of the engine that its body names.
        how: `lose`: the server acts, its reply is lost. `swallow`: it never arrives, and nobody
            knows. `hang`: it never arrives, and is never answered. `refuse`: something in between
            answers 503 in its place. `twice`: it arrives twice, and the second reply comes back.
            `change`: its body is changed.
        nth: which call to that path, from 1.
        url: of the one server whose calls count; None = of any.
        change: makes another body of the one that was sent.
    """

    path: str
    how: Literal["lose", "swallow", "hang", "refuse", "twice", "change"]
    nth: int = 1
    url: str | None = None
    change: Callable[[dict[str, Any]], dict[str, Any]] = dict


class Meddling:
    """An HTTP transport with things to go wrong."""

    in_process = False

    def __init__(
        self, *meddled: Meddled, told: Callable[[str, int], None] = lambda _path, _nth: None
    ) -> None:
        self.inner = AiohttpTransport(Plane(keep_alive=False))
        self.meddled = meddled
        self.told = told
        """Called before each call goes out, with its path and which call to that path it is."""
        self.calls: list[str] = []
        self.done = 0
        """How many things went wrong."""
        self._at: list[tuple[str, str]] = []
        self.second_bucket = anyio.Event()
        """Set when a worker is asked to take a second bucket."""

    async def send(
        self, base_url: str, call: HTTPCall, *, headers: Mapping[str, str] | None = None
    ) -> HTTPReply:
        path = _path(call)
        self.calls.append(path)
        self._at.append((base_url, path))
        nth = self.calls.count(path)
        of_url = {None: nth, base_url: self._at.count((base_url, path))}
        self.told(path, nth)
        if path in UPDATES and nth == SECOND:
            self.second_bucket.set()
        how = {m for m in self.meddled if m.path == path and m.nth == of_url.get(m.url)}
        self.done += len(how)
        for meddled in how:
            if meddled.how == "change":
                body = meddled.change(HTTPReply(200, call.body or b"{}").json_object())
                call = replace(call, body=json_body(body))
            elif meddled.how == "refuse":
                return HTTPReply(503, b'{"error":{"message":"try later"}}')
            elif meddled.how == "swallow":
                raise _lost(base_url)
            elif meddled.how == "hang":
                await anyio.sleep_forever()
            elif meddled.how == "twice":
                await self.inner.send(base_url, call, headers=headers or {})
        reply = await self.inner.send(base_url, call, headers=headers or {})
        if any(m.how == "lose" for m in how):
            raise _lost(base_url)
        return reply

    @contextlib.asynccontextmanager
    async def stream(
        self, base_url: str, call: HTTPCall, *, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[StreamReply]:
        async with self.inner.stream(base_url, call, headers=headers or {}) as reply:
            yield reply

    async def aclose(self) -> None:
        await self.inner.aclose()


def _path(call: HTTPCall) -> str:
    if b'"engine_rpc"' not in (call.body or b""):
        return call.path
    return f"{call.path}:{HTTPReply(200, call.body or b'').json_object()['engine_rpc']}"


def _lost(url: str) -> genapi.TransportError:
    return genapi.TransportError("lost on the way", phase="may_have_run", url=url)


class Breaking:
    """A weight transport whose first sender breaks at its second bucket.

    Args:
        inner: does everything else.
        awaited: set when the second bucket is awaited.
        late: break when every worker has taken the second bucket, and not before one has.
    """

    def __init__(self, inner: GroupTransport, awaited: anyio.Event, *, late: bool) -> None:
        self._inner = inner
        self._awaited = awaited
        self._late = late
        self._broke = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def towards(self, receivers: Receivers | None) -> Breaking:
        self._inner = self._inner.towards(receivers)
        return self

    async def sender(self, *, world_size: int, timeout_s: float) -> Any:
        inner = await self._inner.sender(world_size=world_size, timeout_s=timeout_s)
        if self._broke:
            return inner
        self._broke = True
        return _BreakingSender(inner, self._awaited, late=self._late)


class _BreakingSender:
    def __init__(self, inner: Sender, awaited: anyio.Event, *, late: bool) -> None:
        self._inner = inner
        self._awaited = awaited
        self._late = late
        self._buckets = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def send(self, bucket: Bucket) -> None:
        self._buckets += 1
        if self._buckets == SECOND:
            await self._awaited.wait()
        if self._buckets != SECOND or self._late:
            await self._inner.send(bucket)
        if self._buckets == SECOND:
            raise genapi.TransportError("the trainer broke", phase="may_have_run")
