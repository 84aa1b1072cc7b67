"""A transport that gives the workers of a cluster HTTP addresses, and puts a router before them."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import anyio

from genapi.embedded import Cluster
from genapi.transports.base import StreamReply
from genapi.transports.memory import MemoryTransport
from genapi.wire.http import HTTPCall, HTTPReply

ROUTER = "http://router:1"


class Spread:
    """Calls to `http://w0:1` go to the first worker; those to `http://router:1` to each in turn.

    Attributes:
        route: which worker the router takes next, by the count of its calls so far.
        gates: calls to such a path wait at the gate until it is opened.
        held: how many calls wait at a gate.
        calls: paths in the order of their calls.
    """

    in_process = True

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.route: Callable[[int], int] = lambda count: count % len(cluster.workers)
        self.gates: dict[str, anyio.Event] = {}
        self.held = 0
        self.calls: list[str] = []
        self._inner = MemoryTransport(cluster)
        self._routed = 0

    @property
    def direct(self) -> str:
        """The target of a fleet that talks to the workers."""
        return "vllm://" + self._workers

    @property
    def routed(self) -> str:
        """The target of a fleet that talks to the router."""
        return f"vllm://router:1?workers={self._workers}"

    @property
    def _workers(self) -> str:
        return ",".join(f"w{index}:1" for index in range(len(self.cluster.workers)))

    def _address(self, url: str) -> str:
        if url != ROUTER:
            return "memory://" + url.removeprefix("http://w").removesuffix(":1")
        worker = self.route(self._routed)
        self._routed += 1
        return f"memory://{worker}"

    async def send(
        self, base_url: str, call: HTTPCall, *, headers: Mapping[str, str] = {}
    ) -> HTTPReply:
        await self._pass(call)
        return await self._inner.send(self._address(base_url), call, headers=headers)

    @asynccontextmanager
    async def stream(
        self, base_url: str, call: HTTPCall, *, headers: Mapping[str, str] = {}
    ) -> AsyncIterator[StreamReply]:
        await self._pass(call)
        async with self._inner.stream(self._address(base_url), call, headers=headers) as reply:
            yield reply

    async def _pass(self, call: HTTPCall) -> None:
        self.calls.append(call.path)
        gate = self.gates.get(call.path)
        if gate is not None:
            self.held += 1
            try:
                await gate.wait()
            finally:
                self.held -= 1

    async def aclose(self) -> None:
        await self._inner.aclose()
