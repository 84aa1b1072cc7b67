"""A transport between genapi and servers, which lets chosen calls go wrong.

The rule of this file: the servers are what they are. A call is lost before or after it acts,
changed on the way, sent twice or answered in its place; a process dies before or after it;
everything else passes as it is.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Literal

import anyio

from genapi.errors import TransportError
from genapi.transports.base import StreamReply, Transport
from genapi.wire.http import HTTPCall, HTTPReply, json_body

__all__ = ("Action", "Meddling", "Trouble", "goes_to")

Action = Literal[
    "refuse",
    "error",
    "lose_reply",
    "garble",
    "never_answer",
    "swallow",
    "change",
    "twice",
    "answer_late",
    "die_before",
    "die_after",
    "break_off",
    "lose_peer",
]
"""`refuse`: connection refused. `error`: another answer, and the call never arrives. `lose_reply`:
the server acts, nobody hears of it. `garble`: it acts, and the answer is no JSON. `never_answer`:
it never arrives, and nobody says so. `swallow`: it never arrives, and nobody knows. `change`: its
body is changed. `twice`: it arrives twice, and the second answer comes back. `answer_late`: the
answer comes `late_s` after its time.
`die_before`, `die_after`: the process is killed before it acts, or before its answer is out.
`break_off`: a streamed answer ends in the middle. `lose_peer`: the sender of an update goes away
while the server receives."""

_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})
_JSON: Final[Mapping[str, str]] = MappingProxyType({"content-type": "application/json"})
_INJECTED: Final = (
    '{"error":{"message":"injected","type":"InternalServerError","param":null,"code":500}}'
)


@dataclass(frozen=True, slots=True)
class Trouble:
    """One call that goes wrong.

    Attributes:
        route: a path, and words of the body after it where one path serves several purposes; None
            = whatever is called.
        action: how.
        address: where it goes, or how that ends; empty = anywhere.
        worker: who dies of it.
        nth: which call to it from now on; 0 = every one.
        status: of an answer in its place.
        body: of an answer in its place.
        late_s: how late an answer is.
        pieces: of a stream that breaks off.
        change: makes another body of the one that was sent.
    """

    route: str | None
    action: Action
    _: KW_ONLY
    address: str = ""
    worker: int = 0
    nth: int = 1
    status: int = 500
    body: str = _INJECTED
    late_s: float = 0.05
    pieces: int = 4
    change: Callable[[dict[str, Any]], dict[str, Any]] = dict


class Meddling:
    """See the module.

    Args:
        inner: what carries calls.
        kill: ends the process of a worker.
        lose_peer: lets the next update of a worker lose its sender.
        told: called with each call before anything becomes of it.

    Attributes:
        calls: what was called, in order.
        done: how many calls went wrong.
    """

    def __init__(
        self,
        inner: Transport,
        kill: Callable[[int], None],
        lose_peer: Callable[[int], None],
        *,
        told: Callable[[HTTPCall], None] = lambda _call: None,
    ) -> None:
        self._lose_peer = lose_peer
        self._told = told
        self.calls: list[HTTPCall] = []
        self.done = 0
        self._inner = inner
        self._kill = kill
        self._troubles: dict[Trouble, int] = {}

    @property
    def in_process(self) -> bool:
        """Whether the servers are objects in this process."""
        return self._inner.in_process

    def add(self, trouble: Trouble) -> None:
        """Let a later call go wrong."""
        self._troubles[trouble] = trouble.nth

    def clear(self) -> None:
        """Let nothing more go wrong."""
        self._troubles.clear()

    def sent(self, route: str) -> int:
        """How many calls went to a route."""
        return sum(goes_to(route, call) for call in self.calls)

    async def send(
        self, base_url: str, call: HTTPCall, *, headers: Mapping[str, str] = _NO_HEADERS
    ) -> HTTPReply:
        """The whole answer, or what became of it."""
        trouble = self._next(base_url, call)
        if trouble is None:
            return await self._inner.send(base_url, call, headers=headers)
        instead = await self._instead(trouble, base_url + call.path)
        if instead is not None:
            return instead
        call = await self._before(trouble, base_url, call, headers)
        reply = await self._inner.send(base_url, call, headers=headers)
        return await self._after(trouble, reply)

    @asynccontextmanager
    async def stream(
        self, base_url: str, call: HTTPCall, *, headers: Mapping[str, str] = _NO_HEADERS
    ) -> AsyncIterator[StreamReply]:
        """The answer while it arrives, or what became of it."""
        trouble = self._next(base_url, call)
        if trouble is not None:
            instead = await self._instead(trouble, base_url + call.path)
            if instead is not None:
                yield _whole(instead)
                return
            call = await self._before(trouble, base_url, call, headers)
        async with self._inner.stream(base_url, call, headers=headers) as reply:
            if trouble is None:
                yield reply
            elif trouble.action == "break_off":
                yield StreamReply(
                    status=reply.status,
                    headers=reply.headers,
                    chunks=_broken(reply.chunks, trouble.pieces, reply.url),
                    framed=reply.framed,
                    url=reply.url,
                )
            else:
                answer = HTTPReply(reply.status, b"", reply.headers, reply.url)
                after = await self._after(trouble, answer)
                yield reply if after is answer else _whole(after)

    async def aclose(self) -> None:
        """Close what it stands in front of."""
        await self._inner.aclose()

    def _next(self, base_url: str, call: HTTPCall) -> Trouble | None:
        self.calls.append(call)
        self._told(call)
        found = None
        for trouble, left in [*self._troubles.items()]:
            here = base_url.endswith(trouble.address)
            if not here or not (trouble.route is None or goes_to(trouble.route, call)):
                continue
            if trouble.nth:
                self._troubles[trouble] = left - 1
            if left <= 1 and found is None:
                found = trouble
                self.done += 1
                if trouble.nth:
                    del self._troubles[trouble]
        return found

    async def _instead(self, trouble: Trouble, url: str) -> HTTPReply | None:
        """What comes of a call that never arrives; None = it does."""
        match trouble.action:
            case "error":
                return HTTPReply(trouble.status, trouble.body.encode(), _JSON, url)
            case "refuse":
                lost = TransportError(f"{url}: refused", phase="not_sent", url=url)
                raise lost from ConnectionRefusedError()
            case "swallow":
                raise TransportError(f"{url}: lost", phase="may_have_run", url=url)
            case "never_answer":
                await anyio.sleep_forever()
        return None

    async def _before(
        self, trouble: Trouble, base_url: str, call: HTTPCall, headers: Mapping[str, str]
    ) -> HTTPCall:
        """What arrives, and what becomes of others before it does."""
        match trouble.action:
            case "change":
                body = HTTPReply(200, call.body or b"{}").json_object()
                return replace(call, body=json_body(trouble.change(body)))
            case "twice":
                await self._inner.send(base_url, call, headers=headers)
            case "lose_peer":
                self._lose_peer(trouble.worker)
            case "die_before":
                self._kill(trouble.worker)
        return call

    async def _after(self, trouble: Trouble, reply: HTTPReply) -> HTTPReply:
        match trouble.action:
            case "garble":
                return HTTPReply(200, b"<html>upstream", _JSON, reply.url)
            case "answer_late":
                await anyio.sleep(trouble.late_s)
            case "lose_reply" | "die_after":
                if trouble.action == "die_after":
                    self._kill(trouble.worker)
                raise TransportError(f"{reply.url}: lost", phase="may_have_run", url=reply.url)
        return reply


def goes_to(route: str, call: HTTPCall) -> bool:
    """Whether a call is one to that path, with these words in its body."""
    path, *words = route.split()
    body = (call.body or b"").decode()
    return call.path == path and all(word in body for word in words)


def _whole(reply: HTTPReply) -> StreamReply:
    return StreamReply(
        status=reply.status,
        headers=reply.headers,
        chunks=_once(reply.body),
        framed=True,
        url=reply.url or "",
    )


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body


async def _broken(chunks: AsyncIterator[bytes], pieces: int, url: str) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        yield chunk
        pieces -= 1
        if not pieces:
            raise TransportError(f"{url}: connection reset", phase="answered", url=url)
