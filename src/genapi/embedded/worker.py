"""A server process in memory, and a handful of them under one clock.

A `Worker` has the life of a process: it takes calls, is killed, exits by itself some time after its
engine died, and comes back as another instance. Faults that concern the connection or the process
act here.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

import anyio

from .calls import Call, Reply
from .clock import Clock, VirtualClock
from .dynamo import DynamoConfig
from .engine import Engine, EngineConfig, EngineDeadError
from .faults import Fault, FaultPlan
from .protocol import Front, Identity, Server, ServerConfig
from .sglang import SglangConfig
from .vllm import VllmConfig

__all__ = ("PROTOCOLS", "Cluster", "Worker", "read_config")

T = TypeVar("T")
PROTOCOLS: Mapping[str, type[ServerConfig]] = {
    "dynamo": DynamoConfig,
    "sglang": SglangConfig,
    "vllm": VllmConfig,
}
_EPOCH_S = 1_795_000_000.0


class Worker:
    """One addressable server process with one engine.

    Args:
        config: The protocol it speaks, with its flags.
        engine: Size, limits and speed of its engine.
        clock: The time it lives in.
        index: Its place among its siblings; tells their instances and their random numbers apart.
        faults: What goes wrong, and when.
        epoch_s: Seconds since 1970 at time 0 of the clock.
    """

    def __init__(
        self,
        config: ServerConfig,
        engine: EngineConfig,
        *,
        clock: Clock,
        index: int = 0,
        faults: Iterable[Fault] = (),
        epoch_s: float = _EPOCH_S,
    ) -> None:
        self.faults = FaultPlan(faults)
        self._config = config
        self._engine_config = config.tune(engine)
        self._clock = clock
        self._index = index
        self._epoch_s = epoch_s
        self._starts = 0
        self.ended: list[tuple[Server, float]] = []
        """The servers of processes that ended, and when, oldest first."""
        self._process = self._spawn()

    @property
    def instance_id(self) -> str:
        """Identity of the process; another one after each restart."""
        return self._process.identity.instance_id

    @property
    def alive(self) -> bool:
        """Whether the process takes connections, be its engine dead or not."""
        return not self._process.gone.is_set()

    @property
    def server(self) -> Server:
        """The server of the current process, also when that has ended."""
        return self._process.server

    @property
    def engine(self) -> Engine:
        """The engine of the current process, for looking at in tests."""
        return self._process.engine

    @property
    def holds(self) -> bool:
        """Whether it was paused: requests that come now wait."""
        return self._process.server.holds

    async def handle(self, call: Call) -> Reply:
        """Answer one call. Cancelling it is a client that went away.

        Raises:
            ConnectionRefusedError: The process is gone.
            ConnectionResetError: The process went away before its reply was complete.
        """
        process = self._process
        fault = self.faults.take(call.path)
        if process.gone.is_set() or (fault is not None and fault.action == "refuse"):
            raise ConnectionRefusedError(f"worker {self._index} takes no connections")
        if fault is not None:
            return await self._mishandle(process, call, fault)
        reply = await process.server.handle(call, None)
        self._require(process)
        return reply

    async def run(self) -> None:
        """Let the engine step, through every restart; cancelling it ends the process."""
        try:
            async with anyio.create_task_group() as group:
                while True:
                    process = self._process
                    group.start_soon(self._live, process)
                    await process.replaced.wait()
        finally:
            self._end(self._process)

    async def exited(self) -> None:
        """Wait until the current process is gone."""
        await self._process.gone.wait()

    def kill(self) -> None:
        """End the process at once: calls in flight are reset, later ones refused."""
        self._end(self._process)

    def restart(self) -> None:
        """Start a new process with the original weights and label; a live one is killed first."""
        old = self._process
        self._end(old)
        self._process = self._spawn()
        old.replaced.set()

    async def _live(self, process: "_Process") -> None:
        await process.engine.run()
        if not process.gone.is_set():
            # an engine that dies alone leaves its server behind for a while
            if isinstance(process.engine.error, EngineDeadError):
                await self._clock.sleep(self._engine_config.exit_s)
            self._end(process)

    async def _mishandle(self, process: "_Process", call: Call, fault: Fault) -> Reply:
        match fault.action:
            case "error":
                headers = {"content-type": "application/json"}
                return Reply(fault.status, headers, fault.body.encode())
            case "die_before":
                self._end(process)
            case "never_answer":
                await process.gone.wait()
            case "die_during":
                return await self._die_during(process, call)
        self._require(process)
        reply = await process.server.handle(call, fault)
        match fault.action:
            case "die_after":
                self._end(process)
            case "answer_late":
                await self._clock.sleep(fault.delay_s)
            case "lose_reply":
                await _discard(reply)
                raise ConnectionResetError(f"worker {self._index}: reply to {call.path} lost")
            case "garble":
                await _discard(reply)
                reply = Reply(200, {"content-type": "application/json"}, b"<html>upstream")
        self._require(process)
        return reply

    async def _die_during(self, process: "_Process", call: Call) -> Reply:
        """Let the call begin, end the process 1.5 steps later; only a stream has a reply."""
        reply: Reply | None = None
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._end_soon, process)
                reply = await process.server.handle(call, None)
        except* ConnectionResetError:
            pass
        if reply is None or isinstance(reply.body, bytes):
            raise ConnectionResetError(f"worker {self._index} went away")
        return reply

    async def _end_soon(self, process: "_Process") -> None:
        try:
            await self._clock.sleep(1.5 * self._engine_config.step_s)
        finally:
            self._end(process)

    def _require(self, process: "_Process") -> None:
        if process.gone.is_set():
            raise ConnectionResetError(f"worker {self._index} went away")

    def _end(self, process: "_Process") -> None:
        if not process.gone.is_set():
            self.ended.append((process.server, self._clock.now()))
        process.gone.set()
        process.engine.fail(ConnectionResetError(f"worker {self._index} went away"))

    def _spawn(self) -> "_Process":
        self._starts += 1
        born_us = int(1e6 * (self._epoch_s + self._clock.now()))
        number = 1000 * (born_us + self._index) + self._starts
        identity = Identity(instance_id=str(number), epoch_s=self._epoch_s)
        engine = Engine(self._engine_config, self._clock, stream=self._index)
        return _Process(identity, engine, self._config.build(engine, identity))


class _Process:
    """What dies with a process."""

    def __init__(self, identity: Identity, engine: Engine, server: Server) -> None:
        self.identity = identity
        self.engine = engine
        self.server = server
        self.gone = asyncio.Event()
        self.replaced = asyncio.Event()


class Cluster:
    """Workers in this process, named `memory://0`, `memory://1`, ... under one clock.

    What stands before them has the first of these names.

    Open it, or use it as an async context manager; it may be closed by another task than the one
    that opened it.
    """

    def __init__(
        self, workers: Iterable[Worker], *, clock: Clock, front: Front | None = None
    ) -> None:
        self.workers = tuple(workers)
        self.clock = clock
        self.front = front
        if front is not None:
            front.attach(self.workers, self.names[front.addresses :])
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    def from_query(cls, query: Mapping[str, str], clock: Clock | None = None) -> "Cluster":
        """Workers as a query describes them: `protocol`, `workers`, fields of the configurations.

        Raises:
            ValueError: An unknown key, or a value that cannot be read.
        """
        rest = dict(query)
        size = _read("workers", rest.pop("workers", "1"), int)
        if size < 1:
            raise ValueError(f"workers={size}: a cluster has at least one")
        config, engine = read_config(rest)
        time = VirtualClock() if clock is None else clock
        return cls(
            [
                Worker(own, engine, clock=time, index=index)
                for index, own in enumerate(config.spread(size))
            ],
            clock=time,
            front=config.front(time, epoch_s=_EPOCH_S),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Addresses of what stands before the workers, then of these, in order."""
        return tuple(f"memory://{index}" for index in range(self._before + len(self.workers)))

    @property
    def _before(self) -> int:
        return 0 if self.front is None else self.front.addresses

    async def open(self) -> None:
        """Start the workers; after `aclose`, as new processes."""
        if not self._tasks:
            for worker in self.workers:
                if not worker.alive:
                    worker.restart()
            # not a task group: a fleet may be closed by another task than the one that opened it
            start = asyncio.get_running_loop().create_task
            self._tasks = [start(worker.run()) for worker in self.workers]

    async def aclose(self) -> None:
        """Stop the workers; calls in flight are reset."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def handle(self, worker: int, call: Call) -> Reply:
        """Answer a call to one address, most often of a worker; see `Worker.handle`."""
        if self.front is not None and worker < self.front.addresses:
            return await self.front.handle(worker, call)
        return await self.workers[worker - self._before].handle(call)


def read_config(query: Mapping[str, str]) -> tuple[ServerConfig, EngineConfig]:
    """The protocol and engine configurations that text fields describe, over their defaults.

    Raises:
        ValueError: An unknown protocol or key, or a value that cannot be read.
    """
    rest = dict(query)
    name = rest.pop("protocol", "vllm")
    protocol = PROTOCOLS.get(name)
    if protocol is None:
        raise ValueError(f"unknown protocol {name!r}; known are {', '.join(sorted(PROTOCOLS))}")
    config = _build(protocol, rest)
    engine = _build(EngineConfig, rest)
    if rest:
        raise ValueError(f"unknown options of the embedded engine: {', '.join(sorted(rest))}")
    return config, engine


def _build(kind: type[T], texts: dict[str, str]) -> T:
    """Build a configuration from its fields among `texts`, which are taken out."""
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind) if field.name in texts]  # type: ignore[arg-type]
    return kind(**{name: _read(name, texts.pop(name), hints[name]) for name in names})


def _read(name: str, text: str, hint: Any) -> Any:
    options = get_args(hint)
    if get_origin(hint) is Literal:
        if text not in options:
            raise ValueError(f"{name}={text!r}: expected one of {', '.join(options)}")
        return text
    kind = options[0] if options else hint
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise ValueError(f"{name}={text!r}: expected true or false")
        return text.lower() in ("true", "1")
    try:
        return kind(text)
    except ValueError as error:
        raise ValueError(f"{name}={text!r}: expected {kind.__name__}") from error


async def _discard(reply: Reply) -> None:
    if not isinstance(reply.body, bytes):
        await reply.body.aclose()
