"""The loop: take rollouts, judge them, learn, publish, again; rollouts go on all the while.

The rule of this file: genapi's public names only, as any trainer would use them.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import anyio
import anyio.to_thread
import numpy as np

import genapi
from genapi import OffPolicyWindow, WeightPublisher
from genapi.demo.learner import Learner, Sample, token_rewards
from genapi.demo.report import Record, Step
from genapi.demo.rollouts import Rollout, Rollouts, requests
from genapi.offpolicy import Verdict
from genapi.weights import WeightSource, WeightTransport

__all__ = ("Improve", "Judged", "Plan", "learning", "prepared", "run")

_IN_FLIGHT = 8
_KEEP = 16
_READY_S = 60.0


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """A rollout and what the window says of it."""

    rollout: Rollout
    verdict: Verdict


Improve = Callable[[Sequence[Judged]], Awaitable[WeightSource]]
"""From the rollouts of a step to the weights of the next version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one run of the demo does.

    Attributes:
        target: the fleet.
        steps: how many steps.
        rollouts: how many rollouts a step takes, accepted or not.
        seed: of prompts and draws.
        vocab: ids of prompts lie below this.
        rewarded: whether tokens of the lowest quarter of the vocabulary are rewarded.
        window: which rollouts count.
        transport: how weights travel; None = nothing is administrated.
        improve: where the next weights come from; None = the policy stays what it is.
        publish: whether they are published.
    """

    target: str
    steps: int
    rollouts: int = 32
    seed: int = 0
    vocab: int = 64
    rewarded: bool = True
    window: OffPolicyWindow
    transport: WeightTransport | None
    improve: Improve | None
    publish: bool


def learning(learner: Learner, *, vocab: int) -> Improve:
    """Learn, in a thread, from the rollouts that were accepted."""

    async def improve(judged: Sequence[Judged]) -> WeightSource:
        samples = [_sample(one, vocab) for one in judged if one.verdict.accepted]
        parameters = await anyio.to_thread.run_sync(learner.step, samples)
        return genapi.weights.from_tensors(parameters)

    return improve


def prepared(sources: Sequence[WeightSource]) -> Improve:
    """Take one prepared set of weights after the other, in turn, whatever the rollouts are."""
    turn = 0

    async def improve(_judged: Sequence[Judged]) -> WeightSource:
        nonlocal turn
        source = sources[turn % len(sources)]
        turn += 1
        return source

    return improve


async def run(plan: Plan, record: Record, *, tell: Callable[[str], None]) -> None:
    """Run the plan; `record` has at every moment what was done, however this ends.

    Raises:
        GenAPIError: what the fleet, a rollout or a publication raises; may come in a group.
    """
    async with genapi.connect(plan.target) as fleet:
        snapshot = await fleet.wait_ready(timeout_s=_READY_S)
        record.workers = len(snapshot.workers)
        held = snapshot.committed
        rollouts = Rollouts(
            fleet,
            requests(seed=plan.seed, vocab=plan.vocab),
            in_flight=_IN_FLIGHT,
            keep=_KEEP,
        )
        if plan.transport is None:
            record.final_version = held.step if held else None
            unknown = "UNKNOWN, which the window takes for stale; --weights publishes versions"
            tell(f"{record.workers} workers, version {held or unknown}")
            await _Loop(plan, record, rollouts, None, tell).run()
            return
        async with WeightPublisher(fleet, transport=plan.transport) as publisher:
            # Fresh servers hold version 0; those of an earlier run go on from theirs.
            adopted = await publisher.adopt(held or 0)
            record.final_version = adopted.version.step
            tell(f"{record.workers} workers, version {adopted.version}")
            await _Loop(plan, record, rollouts, publisher if plan.publish else None, tell).run()


@dataclass(slots=True)
class _Loop:
    plan: Plan
    record: Record
    rollouts: Rollouts
    publisher: WeightPublisher | None
    tell: Callable[[str], None]

    async def run(self) -> None:
        version = self.record.final_version or 0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.rollouts.run)
            for _ in range(self.plan.steps):
                step, judged = await self._take(version)
                if self.plan.improve is not None:
                    source = await self.plan.improve(judged)
                    version += 1
                    await self._publish(version, source, step)
                self.tell(step.line(steps=self.plan.steps))
            tasks.cancel_scope.cancel()

    async def _take(self, version: int) -> tuple[Step, list[Judged]]:
        taken = await self.rollouts.take(self.plan.rollouts)
        judged = [Judged(r, self.plan.window.judge(r.output, version)) for r in taken]
        step = Step(number=len(self.record.steps) + 1, version=version)
        for one in judged:
            step.count(one.rollout.output.policy, one.verdict)
        if self.plan.rewarded:
            tokens = [token for r in taken for token in r.output.token_ids]
            step.reward = float(token_rewards(tokens, vocab=self.plan.vocab).mean())
        self.record.steps.append(step)
        self.record.superseded = self.rollouts.superseded
        return step, judged

    async def _publish(self, version: int, source: WeightSource, step: Step) -> None:
        if self.publisher is None:
            return
        self.record.publications += 1
        try:
            await self.publisher.publish(version, source)
        finally:
            # One that was cancelled has ended as well, one way or the other.
            report = self.publisher.last_report
            if report is not None and report.version.step == version:
                step.report = report
            if step.report is not None and step.report.committed:
                self.record.committed += 1
                self.record.final_version = version


def _sample(one: Judged, vocab: int) -> Sample:
    out = one.rollout.output
    unknown = np.full(len(out.token_ids), np.nan)
    return Sample(
        prompt=one.rollout.prompt,
        tokens=out.token_ids,
        rewards=token_rewards(out.token_ids, vocab=vocab),
        logprobs=unknown if out.logprobs is None else out.logprobs,
        mask=one.verdict.token_mask,
    )
