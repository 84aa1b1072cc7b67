"""Rollouts that never stop: some are in flight at every moment, also while weights move.

The rule of this file: nothing waits for whoever takes rollouts. While nobody does, only the newest
are kept: a slow consumer costs rollouts, not freshness.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import anyio
import numpy as np

from genapi import Fleet, GenerateOutput, GenerateRequest, SamplingParams

__all__ = ("Rollout", "Rollouts", "requests")

_PROMPT_TOKENS = 4
_TOKENS = 16
_TIMEOUT_S = 120.0
_APART_S = 0.002
"""Between two first requests, so that rollouts of one length do not all end together."""


def requests(*, seed: int, vocab: int) -> Iterator[GenerateRequest]:
    """Requests without end: random prompts of one length, each with a seed of its own."""
    for index in itertools.count():
        rng = np.random.default_rng((seed, index))
        yield GenerateRequest(
            prompt_token_ids=rng.integers(vocab, size=_PROMPT_TOKENS).tolist(),
            sampling=SamplingParams(
                max_tokens=_TOKENS,
                temperature=1.0,
                logprobs=0,
                ignore_eos=True,
                seed=int(rng.integers(2**31)),
            ),
            timeout_s=_TIMEOUT_S,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """A prompt and what came of it."""

    prompt: Sequence[int]
    output: GenerateOutput


class Rollouts:
    """A pool of generations over a fleet, and the newest of those that have finished.

    Attributes:
        superseded: how many made way for newer ones before anybody took them.
    """

    def __init__(
        self, fleet: Fleet, requests: Iterator[GenerateRequest], *, in_flight: int, keep: int
    ) -> None:
        """Touch nothing yet.

        Args:
            fleet: an open fleet.
            requests: what to ask; without end.
            in_flight: how many at once.
            keep: how many finished ones to hold while none are taken.
        """
        self.superseded = 0
        self._fleet = fleet
        self._requests = requests
        self._in_flight = in_flight
        self._finished: deque[Rollout] = deque(maxlen=keep)
        self._arrival = anyio.Event()

    async def run(self) -> None:
        """Generate until cancelled; raises what a generation raises."""
        async with anyio.create_task_group() as tasks:
            for slot in range(self._in_flight):
                tasks.start_soon(self._generate, slot * _APART_S)

    async def take(self, count: int) -> list[Rollout]:
        """The next `count` to finish, those that are held first."""
        taken: list[Rollout] = []
        while len(taken) < count:
            if self._finished:
                taken.append(self._finished.popleft())
            else:
                self._arrival = anyio.Event()
                await self._arrival.wait()
        return taken

    async def _generate(self, after_s: float) -> None:
        await anyio.sleep(after_s)
        for request in self._requests:
            reply = await self._fleet.generate(request)
            self.superseded += len(self._finished) == self._finished.maxlen
            self._finished.append(Rollout(request.prompt_token_ids or (), reply.output))
            self._arrival.set()
