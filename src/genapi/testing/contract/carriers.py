"""Carriers over the embedded engine: objects in this process, and processes behind a socket."""

import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import cache
from types import MappingProxyType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import genapi
from genapi.embedded import Call, Cluster, Fault, policy
from genapi.transports.base import StreamReply, Transport
from genapi.transports.memory import MemoryTransport
from genapi.types.config import PublishTimeouts
from genapi.weights.base import WeightSource, WeightTransport
from genapi.wire.http import HTTPCall, HTTPReply

from .manifest import CarrierName
from .shared import Shared
from .stand import Profile, Servers

__all__ = ("QUICK", "Memory", "Socket")

_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})
QUICK: Final = PublishTimeouts(
    preflight_s=2,
    stage_s=2,
    group_s=2,
    pause_s=0.5,
    confirm_s=0.5,
    begin_s=0.5,
    transfer_s=0.5,
    finish_s=0.5,
    label_s=0.5,
    verify_s=0.5,
    resume_s=0.5,
    cleanup_s=1,
)
"""For engines that answer within microseconds unless they were made to hang."""
_SLOW: Final = PublishTimeouts()
_BLOCKS: Final = tuple(1 + 7 * k % 60 for k in range(40))


class _Embedded:
    """What both carriers share: the policy is known exactly."""

    prompt = _BLOCKS
    patience_s = 20.0

    def sender(self) -> WeightTransport:
        """Tensors by reference, or in the body of the call."""
        return genapi.weights.Memory()

    def weights(self, seed: int) -> WeightSource:
        """The weights of a seed."""
        return genapi.weights.from_tensors(self.tensors(seed))

    def tensors(self, seed: int) -> dict[str, Any]:
        """The same, by name."""
        return dict(policy.init(seed))

    def check(self, seed: int, prompt: Sequence[int], token_ids: Sequence[int]) -> None:
        """Fail unless the policy of that seed answers so."""
        assert tuple(token_ids) == _greedy(seed, tuple(prompt), len(token_ids))


@cache
def _greedy(seed: int, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    return tuple(policy.greedy(policy.init(seed), list(prompt), count))


class Memory(_Embedded):
    """Servers of the embedded engine in this process, on a clock of their own.

    Args:
        cluster: makes so many servers with these flags, where they speak a protocol that the
            embedded engine does not; their engines are embedded ones.
    """

    name: CarrierName = "memory"
    long = 600
    timeouts = QUICK

    def __init__(self, cluster: Callable[[int, Mapping[str, str]], Cluster] | None = None) -> None:
        self._cluster = cluster

    @asynccontextmanager
    async def servers(
        self, profile: Profile, count: int, flags: Mapping[str, str]
    ) -> AsyncIterator[Servers]:
        """Servers that nobody else has."""
        if self._cluster is None:
            query = {"protocol": profile.provider, "workers": str(count), **flags}
            cluster = Cluster.from_query(query)
        else:
            cluster = self._cluster(count, flags)
        found = _InMemory(cluster, profile)
        try:
            yield found
        finally:
            await found.transport.aclose()


class _InMemory:
    """Servers of a cluster, under addresses that nobody listens on."""

    def __init__(self, cluster: Cluster, profile: Profile) -> None:
        before = len(cluster.names) - len(cluster.workers)
        named = {f"http://127.0.0.1:{1 + k}": name for k, name in enumerate(cluster.names)}
        places = tuple(url.removeprefix("http://") for url in named)
        self.front = profile.front and profile.front.format(*places[:before])
        # Who is listed has the address that the list gives.
        self.addresses = cluster.names[before:] if before else places
        everyone = named | {name: name for name in cluster.names}
        self.transport: Transport = _Addressed(cluster, everyone)
        self._cluster = cluster
        self._paths = profile.paths

    def kill(self, index: int) -> None:
        self._cluster.workers[index].kill()

    def restart(self, index: int) -> None:
        self._cluster.workers[index].restart()

    def running(self, index: int) -> int:
        return self._cluster.workers[index].engine.num_running

    def lose_peer(self, index: int) -> None:
        self._cluster.workers[index].faults.add(
            Fault(self._paths["update"].split()[0], "peer_lost")
        )

    def overwrite(self, index: int, tensors: Mapping[str, Any]) -> None:
        self._cluster.workers[index].engine.install(dict(tensors))

    async def sleep(self, index: int) -> None:
        reply = await self._cluster.workers[index].handle(Call("POST", self._paths["sleep"]))
        assert reply.status == 200, reply


class _Addressed:
    """Calls to an address go to the cluster's server of that name."""

    in_process = True

    def __init__(self, cluster: Cluster, places: Mapping[str, str]) -> None:
        self._inner = MemoryTransport(cluster)
        self._places = places

    async def send(
        self, base_url: str, call: HTTPCall, *, headers: Mapping[str, str] = _NO_HEADERS
    ) -> HTTPReply:
        return await self._inner.send(self._places[base_url], call, headers=headers)

    @asynccontextmanager
    async def stream(
        self, base_url: str, call: HTTPCall, *, headers: Mapping[str, str] = _NO_HEADERS
    ) -> AsyncIterator[StreamReply]:
        async with self._inner.stream(self._places[base_url], call, headers=headers) as reply:
            yield reply

    async def aclose(self) -> None:
        await self._inner.aclose()


class Socket(_Embedded):
    """Two servers of the embedded engine behind sockets for each provider, shared by all bodies.

    Each is a process of its own, unless something stands before them: that is one with them. Use as
    a context manager: what it started ends with it.
    """

    name: CarrierName = "socket"
    long = 400
    timeouts = _SLOW

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._running: dict[str, tuple[tuple[str, ...], str | None]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._running.clear()
        self._stack.close()

    @asynccontextmanager
    async def servers(
        self, profile: Profile, count: int, flags: Mapping[str, str]
    ) -> AsyncIterator[Servers]:
        """Servers that are put back to their first weights afterwards."""
        del flags
        if profile.provider not in self._running:
            self._running[profile.provider] = self._start(profile)
        addresses, front = self._running[profile.provider]
        # What lists its servers lists all of them.
        found = Shared(addresses if front else addresses[:count], front)
        async with found.put_back(profile, self):
            yield found

    def _start(self, profile: Profile) -> tuple[tuple[str, ...], str | None]:
        if profile.front is None:
            started = [_process(profile.provider, "--index", str(index)) for index in range(2)]
            return tuple(self._stack.enter_context(one)[0] for one in started), None
        found = self._stack.enter_context(_process(profile.provider, "--workers", "2"))
        return found[-2:], profile.front.format(*found[:-2])


@contextmanager
def _process(protocol: str, *options: str) -> Iterator[tuple[str, ...]]:
    """The addresses of a process: of a server, or of several after what stands before them."""
    command = [sys.executable, "-m", "genapi.embedded", "--protocol", protocol]
    pace = ["--step-s", "0.002"]
    with subprocess.Popen(
        [*command, *options, *pace], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            facts = json.loads(process.stdout.readline())
            yield tuple(urlsplit(url).netloc for url in facts.get("urls", [facts["url"]]))
        finally:
            process.send_signal(signal.SIGKILL)
