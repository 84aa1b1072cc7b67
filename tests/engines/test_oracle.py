"""Random publications on real vLLM servers: every greedy token is what its trace names.

The plans and the moments at which requests start are drawn from one seed, which is printed. With a
cache decision that leaves old keys and values to be read, the same comparison has to fail and the
trace has to say so.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import anyio
import anyio.abc
import pytest

import genapi
from genapi import FinishReason, GenerateRequest, GenerateResponse, PublishTimeouts, SamplingParams
from genapi.events import Event, PhaseStarted
from genapi.publication.plan import PausePlan
from tests.engines.kit.judge import Judge
from tests.engines.kit.server import make_tokens

if TYPE_CHECKING:
    from tests.engines.conftest import Models, Oracle
    from tests.engines.kit.server import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.anyio]

SEED = 20261129
PUBLICATIONS = 6
MOMENTS = ("preflight", "group", "pause", "mark", "transfer", "finish", "resume", "probe")
LIMITS = PublishTimeouts(pause_s=60, transfer_s=30, finish_s=20, resume_s=20, cleanup_s=10)

CLEAN = (
    PausePlan("keep", "recompute", "flush"),
    PausePlan("keep", "recompute", "salt"),
    PausePlan("drain", "recompute", "flush"),
    PausePlan("drain", "recompute", "salt"),
    PausePlan("abort", "recompute", "flush"),
    PausePlan("abort", "recompute", "salt"),
)
SHARED = tuple(300 + 7 * i for i in range(200))
"""A prompt of many blocks, which several requests share."""


class Play:
    """A fleet, publications on it, and the replies that came meanwhile."""

    def __init__(self, fleet: genapi.Fleet, group: anyio.abc.TaskGroup, models: Models) -> None:
        self.fleet = fleet
        self.group = group
        self.folders = [models.seed0, models.seed1]
        self.publisher = genapi.WeightPublisher(
            fleet, transport=genapi.weights.Gloo(timeout_s=20), timeouts=LIMITS
        )
        self.heard: list[tuple[tuple[int, ...], GenerateResponse]] = []
        self.starts: dict[str, list[tuple[tuple[int, ...], int]]] = {}
        self.asked = 0
        fleet.observe = self.observe

    def observe(self, event: Event) -> None:
        if isinstance(event, PhaseStarted):
            for prompt, tokens in self.starts.pop(event.phase, []):
                self.group.start_soon(self.ask, prompt, tokens)

    async def ask(self, prompt: tuple[int, ...], tokens: int) -> GenerateResponse:
        self.asked += 1
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        reply = await self.fleet.generate(
            GenerateRequest(prompt_token_ids=prompt, sampling=sampling)
        )
        self.heard.append((prompt, reply))
        return reply

    async def publish(self, step: int, plan: PausePlan) -> None:
        report = await self.publisher.publish(
            step,
            genapi.weights.from_safetensors(self.folders[step % 2]),
            mode=plan.mode,
            in_flight_kv=plan.in_flight_kv,
            prefix_cache=plan.prefix_cache,
        )
        assert report.committed


def judge_of(oracle: Oracle, models: Models, *, last: int) -> Judge:
    return Judge(oracle, {s: models.seed1 if s % 2 else models.seed0 for s in range(last + 1)})


@pytest.mark.parametrize("workers", [1, 2])
async def test_every_token_under_random_publications_is_what_its_trace_names(
    workers: int, vllm_pair: tuple[Server, Server], models: Models, oracle: Oracle
) -> None:
    chance = random.Random(SEED + workers)  # noqa: S311 - which order is tried
    plans = [CLEAN[0], *chance.sample(CLEAN[1:], PUBLICATIONS - 1)]
    servers = ",".join(server.address for server in vllm_pair[:workers])
    async with genapi.connect(f"vllm://{servers}", run=f"oracle-{workers}") as fleet:
        await fleet.wait_ready(timeout_s=60)
        async with anyio.create_task_group() as group:
            play = Play(fleet, group, models)
            await play.publisher.adopt(0)
            for step, plan in enumerate(plans, start=1):
                for number, moment in enumerate(chance.choices(MOMENTS, k=4)):
                    own = tuple(chance.randrange(300, 2000) for _ in range(20))
                    asked = (SHARED if number % 2 else own), chance.choice((1, 20, 150, 400))
                    play.starts.setdefault(moment, []).append(asked)
                # In flight when the pause comes, however quick that is.
                group.start_soon(play.ask, SHARED, 1200)
                await make_tokens(*vllm_pair[:workers], tokens=20)
                await play.publish(step, plan)
        await play.publish(PUBLICATIONS + 1, CLEAN[0])
        await play.publish(PUBLICATIONS + 2, CLEAN[0])  # seed 0 again
        await play.publisher.aclose()
    judge = judge_of(oracle, models, last=PUBLICATIONS + 2)
    print(f"\nseed {SEED + workers}: {[str(plan) for plan in plans]}")
    assert len(play.heard) == play.asked >= 4 * PUBLICATIONS
    assert any(reply.output.policy.is_mixed for _, reply in play.heard)
    for prompt, reply in play.heard:
        judge.check(reply, prompt)
        if reply.output.finish_reason is FinishReason.ABORT:
            assert not reply.output.is_complete
    judge.close()


async def test_keys_and_values_left_stale_are_found_and_the_trace_is_impure(
    vllm_pair: tuple[Server, Server], models: Models, oracle: Oracle
) -> None:
    judge = judge_of(oracle, models, last=6)
    target = f"vllm://{vllm_pair[0].address}"
    async with genapi.connect(target, run="stale") as fleet:
        await fleet.wait_ready(timeout_s=60)
        async with anyio.create_task_group() as group:
            play = Play(fleet, group, models)
            await play.publisher.adopt(0)
            await play.publish(1, CLEAN[0])  # from here on the transfer group stands
            for _ in range(4):
                group.start_soon(play.ask, SHARED, 3800)
            await vllm_pair[0].generating(4)
            await play.publish(2, PausePlan("keep", "stale", "salt"))
        kept = [play.heard.pop()[1] for _ in range(4)]
        for reply in kept:
            assert not reply.output.policy.is_pure, reply.output.policy.spans
        assert all(judge.mismatches(reply, SHARED) > 0 for reply in kept)
        for reply in kept:
            assert [span.lo and span.lo.step for span in reply.output.policy.spans] == [1, 2]
        # The first one takes the salt off the requests; the second leaves entries to be found.
        await play.publish(3, PausePlan("drain", "recompute", "stale"))
        await play.ask(SHARED, 1)
        await play.publish(4, PausePlan("drain", "recompute", "stale"))
        reused = await play.ask(SHARED, 60)
        assert [span.context for span in reused.output.policy.spans] == [None]
        assert not reused.output.policy.is_pure
        assert judge.mismatches(reused, SHARED) > 0
        for step in (5, 6):  # seed 0 again, and nothing of the others is left
            await play.publish(step, CLEAN[0])
            judge.check(await play.ask(SHARED, 60), SHARED)
        await play.publisher.aclose()
