"""A fleet over an embedded Dynamo deployment that a test can reach into."""

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel

import genapi
from genapi import GenerateResponse, PolicyVersion, WeightPublisher
from genapi.embedded import Clock, Cluster, Fault, Worker
from genapi.events import Event
from genapi.types.ids import WorkerId
from genapi.weights import Memory, from_tensors
from tests.contract.embedded import QUICK, weights
from tests.support.recorded import RecordedCalls

__all__ = ("Deployment", "deployed", "until", "version")

UPDATE = "/engine/update_weights_from_distributed"


@dataclass
class Deployment:
    """What a test holds: the fleet, its engines, and what happened."""

    fleet: genapi.Fleet
    cluster: Cluster
    calls: RecordedCalls
    events: list[Event] = field(default_factory=list)

    @property
    def workers(self) -> tuple[Worker, ...]:
        return self.cluster.workers

    def id(self, number: int) -> str:
        """The instance of a worker, as discovery names it."""
        return str(self.workers[number].server.instance_id)  # type: ignore[attr-defined]

    def fail(self, worker: int, path: str, action: Any, **details: Any) -> None:
        """Let the next call to `path` on that worker go wrong."""
        self.workers[worker].faults.add(Fault(path, action, **details))

    def publisher(self, **options: Any) -> WeightPublisher:
        return WeightPublisher(self.fleet, transport=Memory(), **{"timeouts": QUICK, **options})

    async def publish(self, step: int, **options: Any) -> None:
        """Publish the weights of that seed, or fail."""
        async with self.publisher(**options) as publisher:
            report = await publisher.publish(step, from_tensors(weights(step)))
        assert report.committed

    async def publish_under(
        self,
        step: int,
        asks: Sequence[Callable[[], Coroutine[Any, Any, None]]],
        under_way: Callable[[], bool],
        **options: Any,
    ) -> None:
        """Publish while requests, begun just before the pause, are under way; wait for them."""
        async with anyio.create_task_group() as tasks:

            async def begin() -> None:
                for ask in asks:
                    tasks.start_soon(ask)
                await until(under_way)

            self.calls.before_pause = begin
            await self.publish(step, **options)

    def sent(self) -> list[dict[str, Any]]:
        """The bodies of the generations that the frontend got."""
        return [body for _, path, body in self.calls.calls if path == "/v1/completions"]


@asynccontextmanager
async def deployed(
    workers: int = 2,
    *,
    options: Mapping[str, Any] | None = None,
    clock: Clock | None = None,
    ready: bool = True,
    **query: str,
) -> AsyncIterator[Deployment]:
    """A ready fleet behind an embedded frontend."""
    wanted = {"protocol": "dynamo", "workers": str(workers), **query}
    cluster = Cluster.from_query(wanted, clock)
    calls, events = RecordedCalls(cluster), list[Event]()
    fleet = genapi.connect(
        "embedded://?protocol=dynamo",
        transport=calls,
        observe=events.append,
        run="r",
        **{"refresh_s": 0.01, **(options or {})},
    )
    async with fleet:
        if ready:
            await fleet.wait_ready(timeout_s=20)
        yield Deployment(fleet, cluster, calls, events)


async def until(condition: Any) -> None:
    """Let the others run until something holds."""
    with anyio.fail_after(20):
        while not condition():
            await anyio.lowlevel.checkpoint()


def version(step: int, attempt: int = 1) -> PolicyVersion:
    return PolicyVersion(run="r", step=step, attempt=attempt)


def bounds(reply: GenerateResponse) -> tuple[PolicyVersion | None, PolicyVersion | None]:
    """The interval of a reply's only span."""
    (span,) = reply.output.policy.spans
    return span.lo, span.hi


def instance(worker: WorkerId | None) -> str | None:
    return None if worker is None else worker.instance
