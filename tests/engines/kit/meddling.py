"""Calls to real servers, and senders of tensors, that go wrong when a test says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio

import genapi
from genapi.publication.receivers import Receivers
from genapi.testing.contract.meddling import Meddling, Trouble, goes_to
from genapi.transports.base import Plane
from genapi.transports.http_aiohttp import AiohttpTransport
from genapi.weights.base import Bucket, GroupTransport, Sender
from genapi.wire.http import HTTPCall

__all__ = ("Breaking", "at_second_update", "meddling")

SECOND = 2
UPDATES = (
    "/update_weights",
    "/update_weights_from_distributed",
    "/engine/update_weights_from_distributed update_info",
)


def meddling(*troubles: Trouble, told: Callable[[HTTPCall], None] = lambda _call: None) -> Meddling:
    """An HTTP transport with things to go wrong, none of which is the end of a server."""
    plane = AiohttpTransport(Plane(keep_alive=False))
    transport = Meddling(plane, _spare, _spare, told=told)
    for trouble in troubles:
        transport.add(trouble)
    return transport


def _spare(worker: int) -> None:
    raise AssertionError(f"nobody is there to end worker {worker}: the test has to do it")


def at_second_update(do: Callable[[], object]) -> Callable[[HTTPCall], None]:
    """What does something before the second call that has a worker take a bucket."""
    count = 0

    def told(call: HTTPCall) -> None:
        nonlocal count
        if any(goes_to(route, call) for route in UPDATES):
            count += 1
            if count == SECOND:
                do()

    return told


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
