"""A fleet over embedded engines that a test can reach into."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

import genapi
from genapi import GenerateRequest, SamplingParams
from genapi.embedded import Cluster, Fault
from genapi.embedded import policy as embedded_policy
from genapi.events import Event
from genapi.testing.contract import carriers
from genapi.transports.memory import MemoryTransport

Weights = Mapping[str, npt.NDArray[np.float32]]

QUICK = carriers.QUICK
"""Bounds for engines that answer within microseconds unless a fault makes them hang."""


@dataclass
class Rig:
    """What a test holds: the fleet, the engines behind it, and what happened."""

    fleet: genapi.Fleet
    cluster: Cluster
    events: list[Event] = field(default_factory=list)

    def fail(self, worker: int, path: str, action: Any, **details: Any) -> None:
        """Let the next call to `path` on that worker go wrong."""
        self.cluster.workers[worker].faults.add(Fault(path, action, **details))

    @property
    def labels(self) -> list[str]:
        """The label of every engine, whatever the fleet was told."""
        return [worker.engine.label for worker in self.cluster.workers]


@asynccontextmanager
async def rig(
    workers: int = 2, *, options: Mapping[str, Any] | None = None, **query: str
) -> AsyncIterator[Rig]:
    """A ready fleet over `workers` embedded servers, vLLM's unless another protocol is named."""
    cluster = Cluster.from_query({"protocol": "vllm", "workers": str(workers), **query})
    events: list[Event] = []
    fleet = genapi.connect(
        f"embedded://?protocol={query.get('protocol', 'vllm')}",
        transport=MemoryTransport(cluster),
        observe=events.append,
        **(options or {}),
    )
    async with fleet:
        await fleet.wait_ready(timeout_s=5)
        yield Rig(fleet, cluster, events)


def weights(seed: int) -> Weights:
    """A weight set of the default size."""
    return embedded_policy.init(seed)


def greedy(seed: int, prompt: list[int], count: int) -> tuple[int, ...]:
    """What the policy of that weight set answers."""
    return tuple(embedded_policy.greedy(weights(seed), prompt, count))


def request(
    *, tokens: int = 8, prompt: tuple[int, ...] = (1, 2, 3), **more: Any
) -> GenerateRequest:
    """A greedy request."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(prompt_token_ids=prompt, sampling=sampling, **more)
