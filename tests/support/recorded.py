"""A weight transport and a carrier of calls that tell what is done with them, or hold it up."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import msgspec

from genapi.embedded import Cluster
from genapi.transports.base import StreamReply
from genapi.transports.memory import MemoryTransport
from genapi.weights import Memory
from genapi.weights.base import Bucket
from genapi.weights.memory import MemorySender
from genapi.wire.http import HTTPCall, HTTPReply


async def at_once() -> None:
    """A step that holds nothing up."""


class RecordedSender(MemorySender):
    """A sender of `Memory` that notes what it is asked.

    Attributes:
        number: its place among the senders of its transport, and its port in `init_info`.
        events: what it was asked, in order.
        abandoned: set when it was abandoned.
    """

    def __init__(self, world_size: int, transport: "Recorded") -> None:
        super().__init__(world_size)
        self.number = len(transport.senders) + 1
        self.events: list[str] = []
        self.abandoned = anyio.Event()
        self._transport = transport

    @property
    def init_info(self) -> Mapping[str, Any]:
        return {**super().init_info, "master_port": self.number}

    async def join(self) -> None:
        self.events.append("join")
        await self._transport.on_join()
        await super().join()

    async def send(self, bucket: Bucket) -> None:
        self.events.append("send")
        await self._transport.on_send(self)
        await super().send(bucket)

    def abandon(self) -> None:
        self.events.append("abandon")
        self.abandoned.set()
        super().abandon()

    async def aclose(self) -> None:
        self.events.append("aclose")
        await super().aclose()


class Recorded(Memory):
    """`Memory` whose senders are kept.

    Attributes:
        senders: every sender that was made, in order.
        on_sender: awaited before one is made.
        on_join: awaited while one joins.
        on_send: awaited while one sends.
    """

    senders: list[RecordedSender]
    on_sender: Callable[[], Awaitable[None]]
    on_join: Callable[[], Awaitable[None]]
    on_send: Callable[[RecordedSender], Awaitable[None]]

    def __init__(self, **limits: int) -> None:
        super().__init__(**limits)
        self.senders = []
        self.on_sender = at_once
        self.on_join = at_once
        self.on_send = _at_once

    def __setattr__(self, name: str, value: object) -> None:
        # What it tells changes, unlike the limits of the value that it is.
        object.__setattr__(self, name, value)

    async def sender(self, *, world_size: int, timeout_s: float) -> RecordedSender:
        del timeout_s
        await self.on_sender()
        sender = RecordedSender(world_size, self)
        self.senders.append(sender)
        return sender


async def _at_once(_sender: RecordedSender) -> None:
    """A sending that nothing holds up."""


class RecordedCalls(MemoryTransport):
    """Calls to engines in this process, kept in their order.

    Attributes:
        calls: address, path and JSON body of each.
        on_piece: awaited before each piece of an event stream, with the number of those before it.
        before_pause: awaited once, before any pause arrives: what is prepared for a publication
            takes real time, in which an engine in virtual time ends any request.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.before_pause: Callable[[], Awaitable[None]] | None = None
        self._pausing = anyio.Lock()
        self.calls: list[tuple[str, str, Any]] = []
        self.on_piece: Callable[[int], Awaitable[None]] = _no_piece

    def _note(self, base_url: str, call: HTTPCall) -> None:
        body = msgspec.json.decode(call.body) if call.body else None
        self.calls.append((base_url, call.path, body))

    async def send(
        self, base_url: str, call: HTTPCall, *, headers: Mapping[str, str] = {}
    ) -> HTTPReply:
        if "pause" in call.path and call.method == "POST":
            async with self._pausing:
                first, self.before_pause = self.before_pause, None
                if first is not None:
                    await first()
        self._note(base_url, call)
        return await super().send(base_url, call, headers=headers)

    @asynccontextmanager
    async def stream(
        self, base_url: str, call: HTTPCall, *, headers: Mapping[str, str] = {}
    ) -> AsyncIterator[StreamReply]:
        self._note(base_url, call)
        async with super().stream(base_url, call, headers=headers) as reply:
            if reply.headers.get("content-type", "").startswith("text/event-stream"):
                reply = replace(reply, chunks=self._pieces(reply.chunks))  # noqa: PLW2901
            yield reply

    async def _pieces(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        number = 0
        async for chunk in chunks:
            await self.on_piece(number)
            number += 1
            yield chunk

    def bodies(self, path: str) -> dict[str, list[Any]]:
        """The bodies of the calls to a path, by address."""
        found: dict[str, list[Any]] = {}
        for url, called, body in self.calls:
            if called == path:
                found.setdefault(url, []).append(body)
        return found


async def _no_piece(_number: int) -> None:
    """A piece that nothing holds up."""
