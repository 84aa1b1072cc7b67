"""genapi against a real Dynamo frontend and its vLLM workers: rollouts, publications, failures.

First comes what every provider shows, as in `test_contract.py`. No version comes with a reply of
Dynamo's: a trace is an interval. Greedy tokens are held against `transformers` on the weights of
every version in it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import signal
from http import HTTPStatus
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import pytest

import genapi
from genapi import Outcome
from genapi.events import Event, PhaseStarted
from genapi.testing.contract import PROFILES, suite
from genapi.types.worker import Evidence, FenceStrength, Recovery
from tests.engines.kit.dynamo.deployment import VLLM_WORKER, Deployment
from tests.engines.kit.judge import FEW, Judge
from tests.engines.test_contract import Real
from tests.engines.test_filesystem import SHARD
from tests.engines.test_sglang import die_in_mid_transfer
from tests.engines.test_vllm import (
    KEPT,
    LIMITS,
    PROMPT,
    Gated,
    everywhere,
    failed,
    publisher,
    request,
    weights,
)
from tests.support.cases import marked

if TYPE_CHECKING:
    from collections.abc import Iterator

    from genapi.testing.contract import Case
    from tests.engines.conftest import Deploy, Models, Oracle, Reference
    from tests.engines.kit.server import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.anyio]

REAL = Real()
CASES = suite([profile for profile in PROFILES if profile.provider == "dynamo"], [REAL])
IN_FLIGHT = 8
INFERRED = "inferred"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def started(deploy: Deploy) -> Iterator[Deployment]:
    with deploy(VLLM_WORKER, [[], []]) as deployment:
        yield deployment


@pytest.fixture
def pair(started: Deployment) -> Deployment:
    """A frontend and two vLLM workers; a test leaves both of them serving seed 0, or dead."""
    for server in [s for s in started.workers if s.process.poll() is not None]:
        started.kill(server)
    for _ in range(2 - len(started.workers)):
        started.start(VLLM_WORKER)
    started.wait()
    return started


@pytest.mark.parametrize("case", marked(CASES))
async def test_on_a_real_deployment(
    case: Case, pair: Deployment, models: Models, reference: Reference
) -> None:
    REAL.pair, REAL.front = tuple(pair.workers), pair.target.partition("://")[2]
    REAL.models, REAL.reference = models, reference
    await case.run()


def instances(deployment: Deployment) -> set[str]:
    return {str(deployment.instance(server)) for server in deployment.workers}


async def test_weights_that_were_sent_tensor_by_tensor_are_served_exactly_by_dynamo(
    pair: Deployment, models: Models, oracle: Oracle
) -> None:
    transport = genapi.weights.Gloo(timeout_s=20, bucket_tensors=9, packed=False)
    async with genapi.connect(pair.target, run="exact") as fleet:
        await fleet.wait_ready(timeout_s=60)
        judge = Judge(oracle, {1: models.seed1, 2: models.seed0})
        async with genapi.WeightPublisher(fleet, transport=transport, timeouts=LIMITS) as p:
            for step, folder in ((1, models.seed1), (2, models.seed0)):
                report = await p.publish(step, weights(folder))
                assert [r.outcome for r in report.receipts] == [Outcome.COMMITTED] * 2
                assert {r.worker.instance for r in report.receipts} == instances(pair)
                for reply in await everywhere(fleet):
                    assert reply.output.policy.oldest == reply.output.policy.newest
                    judge.check(reply, PROMPT, source=INFERRED)
                print(f"\npaused_s: {[round(r.paused_s or 0, 3) for r in report.receipts]}")
        judge.close()


async def test_files_are_served_exactly_by_dynamo_also_to_a_kept_request_and_the_first_come_back(
    pair: Deployment, models: Models, oracle: Oracle, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "there").symlink_to(tmp_path / "here")
    transport = genapi.weights.Filesystem(
        tmp_path / "here", worker_dir=str(tmp_path / "there"), keep=2, shard_bytes=SHARD
    )
    async with genapi.connect(pair.target, run="files") as fleet:
        await fleet.wait_ready(timeout_s=60)
        judge = Judge(oracle, {0: models.seed0, 1: models.seed1, 2: models.seed0})
        async with genapi.WeightPublisher(fleet, transport=transport, timeouts=LIMITS) as p:
            await p.publish(0, weights(models.seed0))
            first = await everywhere(fleet)
            pauses = []
            async with fleet.stream(request(tokens=1500)) as events:
                await anext(events)
                for step, folder in ((1, models.seed1), (2, models.seed0)):
                    report = await p.publish(step, weights(folder))
                    assert [r.outcome for r in report.receipts] == [Outcome.COMMITTED] * 2
                    assert [r.evidence for r in report.receipts] == [Evidence.OWN_LABEL] * 2
                    pauses += [r.paused_s for r in report.receipts]
                    snapshot = await fleet.snapshot()
                    assert {w.label for w in snapshot.workers} == {report.version.label}
                    for reply in await everywhere(fleet):
                        policy = reply.output.policy
                        assert policy.oldest == policy.newest == report.version
                        judge.check(reply, PROMPT, source=INFERRED)
                kept = [event async for event in events][-1]
            assert isinstance(kept, genapi.Finished)
            (span,) = kept.reply.output.policy.spans
            assert span.lo is not None
            assert span.hi is not None
            assert (span.lo.step, span.hi.step) in ((0, 1), (0, 2))
            whole = Judge(oracle, judge.folders)  # of one long reply a few ties are to be expected
            whole.check(kept.reply, PROMPT, source=INFERRED)
            assert whole.ties < FEW
            last = await everywhere(fleet)
            assert {r.output.token_ids for r in last} == {r.output.token_ids for r in first}
            print(f"\npaused_s per worker: {[round(s, 3) for s in pauses]}")
        judge.close()


async def test_a_worker_that_sleeps_is_refused_and_published_to_when_it_is_awake(
    pair: Deployment, models: Models
) -> None:
    sleeper = next(iter(pair.workers))
    async with genapi.connect(pair.target, run="asleep") as fleet, publisher(fleet) as p:
        await fleet.wait_ready(timeout_s=60)
        await p.adopt(0)
        assert sleeper.request("POST", "/engine/control/sleep", {"level": 1})[0] == HTTPStatus.OK
        report = await failed(p, 1, weights(models.seed0))
        assert [r.outcome for r in report.receipts] == [Outcome.UNTOUCHED] * 2
        errors = {r.url: r.error for r in report.receipts}
        assert "/engine/control/wake_up" in (errors[sleeper.url] or "")
        assert sleeper.request("POST", "/engine/control/wake_up", {})[0] == HTTPStatus.OK
        await fleet.wait_ready(timeout_s=60)
        assert (await p.publish(1, weights(models.seed0))).committed


async def test_tokens_of_a_request_that_a_publication_overlaps_are_of_the_two_versions_it_names(
    pair: Deployment, models: Models, oracle: Oracle
) -> None:
    async with genapi.connect(pair.target, run="kept") as fleet:
        await fleet.wait_ready(timeout_s=60)
        judge = Judge(oracle, {10: models.seed0, 11: models.seed1})
        source = Gated(models.seed1)
        replies: list[genapi.GenerateResponse] = []
        began = 0

        async def keep() -> None:
            nonlocal began
            async with fleet.stream(request(tokens=1500)) as events:
                await anext(events)
                began += 1
                if began == KEPT:
                    source.gate.set()
                last = [event async for event in events][-1]
            assert isinstance(last, genapi.Finished)
            replies.append(last.reply)

        async with publisher(fleet) as p:
            await p.publish(10, weights(models.seed0))
            async with anyio.create_task_group() as group:
                group.start_soon(p.publish, 11, source)
                assert await anyio.to_thread.run_sync(source.reached.wait, 60)
                for _ in range(KEPT):
                    group.start_soon(keep)
            after = await everywhere(fleet)
            await p.publish(12, weights(models.seed0))
        named = {(r.output.policy.oldest, r.output.policy.newest) for r in replies}
        steps = {(low.step, high.step) for low, high in named if low and high}
        assert (10, 11) in steps
        assert steps <= {(10, 10), (10, 11)}
        assert {r.output.policy.oldest.step for r in after if r.output.policy.oldest} == {11}
        for reply in (*replies, *after):
            assert reply.output.is_complete
            judge.check(reply, PROMPT, source=INFERRED)
        judge.close()


class Flight:
    """Streams that run at the same time, and what became of them."""

    def __init__(self, fleet: genapi.Fleet) -> None:
        self.fleet = fleet
        self.replies: list[genapi.GenerateResponse] = []
        self.errors: list[genapi.GenAPIError] = []
        self.everyone = anyio.Event()
        self._began = 0

    async def ask(self) -> None:
        try:
            async with self.fleet.stream(request(tokens=1500)) as events:
                await anext(events)
                self._began += 1
                if self._began == IN_FLIGHT:
                    self.everyone.set()
                last = [event async for event in events][-1]
        except genapi.GenAPIError as error:
            self.errors.append(error)
        else:
            assert isinstance(last, genapi.Finished)
            self.replies.append(last.reply)

    async def lose(self, deployment: Deployment) -> str:
        """Kill a worker when all of them run; the instance that it was."""
        async with anyio.create_task_group() as group:
            for _ in range(IN_FLIGHT):
                group.start_soon(self.ask)
            with anyio.fail_after(60):
                await self.everyone.wait()
            victim = deployment.busy()[0]
            gone = str(deployment.instance(victim))
            deployment.kill(victim)
        kinds = sorted({type(error).__name__ for error in self.errors})
        print(f"\n{len(self.replies)} replies, errors: {kinds}")
        return gone


async def test_requests_to_a_worker_that_is_killed_fail_typed_and_the_others_end(
    pair: Deployment, models: Models, oracle: Oracle
) -> None:
    async with genapi.connect(pair.target, run="killed") as fleet, publisher(fleet) as p:
        await fleet.wait_ready(timeout_s=60)
        first = await p.publish(1, weights(models.seed0))
        flight = Flight(fleet)
        gone = await flight.lose(pair)
        assert flight.errors
        assert len(flight.replies) + len(flight.errors) == IN_FLIGHT
        for error in flight.errors:
            assert isinstance(error, (genapi.ProviderError, genapi.IncompleteError))
        judge = Judge(oracle, {1: models.seed0, 2: models.seed1})
        for reply in flight.replies:
            assert served_by(reply) != gone
            judge.check(reply, PROMPT, source=INFERRED)

        successor = pair.start(VLLM_WORKER)
        await anyio.to_thread.run_sync(pair.wait)
        new = str(pair.instance(successor))
        for _ in range(6):
            reply = await fleet.generate(request())
            assert served_by(reply) != new
            assert reply.output.policy.oldest == reply.output.policy.newest == first.version
            judge.check(reply, PROMPT, source=INFERRED)
        second = await p.publish(2, weights(models.seed1))
        assert {r.worker.instance for r in second.receipts} == instances(pair)
        assert [r.outcome for r in second.receipts] == [Outcome.COMMITTED] * 2
        replies = await everywhere(fleet)
        assert new in {served_by(reply) for reply in replies}
        for reply in replies:
            assert reply.output.policy.oldest == second.version
            judge.check(reply, PROMPT, source=INFERRED)
        judge.close()
        await p.publish(3, weights(models.seed0))


def served_by(reply: genapi.GenerateResponse) -> str:
    assert reply.worker is not None
    return reply.worker.instance


async def test_one_of_two_workers_killed_in_a_transfer_leaves_receipts_and_nobody_resumed(
    pair: Deployment, models: Models, oracle: Oracle
) -> None:
    survivor, victim = pair.workers

    def observe(event: Event) -> None:
        if isinstance(event, PhaseStarted) and (event.phase, event.version.step) == ("transfer", 1):
            os.killpg(victim.pid, signal.SIGKILL)

    async with genapi.connect(pair.target, run="transfer", observe=observe) as fleet:
        await fleet.wait_ready(timeout_s=60)
        lost = str(pair.instance(victim))
        async with publisher(fleet) as p:
            await p.publish(0, weights(models.seed0))
            report = await failed(p, 1, weights(models.seed1))
            receipts = {r.worker.instance: r for r in report.receipts}
            dead = receipts.pop(lost)
            (left,) = receipts.values()
            assert dead.outcome is not Outcome.COMMITTED
            assert dead.recovery is Recovery.RESTART_THEN_PUBLISH
            assert dead.fence is not None
            assert dead.fence.strength is FenceStrength.DEAD
            assert left.outcome is not Outcome.COMMITTED
            assert left.fence is not None
            assert fleet.membership.committed is not None
            assert fleet.membership.committed.step == 0
            with pytest.raises(genapi.FleetError):
                await fleet.generate(request(timeout_s=5))
            assert is_paused(survivor)
    pair.kill(victim)
    if left.recovery is Recovery.RESTART_THEN_PUBLISH:
        pair.kill(survivor)
        survivor = pair.start(VLLM_WORKER)
    pair.start(VLLM_WORKER)
    await anyio.to_thread.run_sync(pair.wait)
    async with genapi.connect(pair.target, run="transfer") as fleet, publisher(fleet) as p:
        judge = Judge(oracle, {2: models.seed1, 3: models.seed0})
        for step, folder in ((2, models.seed1), (3, models.seed0)):
            assert (await p.publish(step, weights(folder))).committed
            for reply in await everywhere(fleet):
                judge.check(reply, PROMPT, source=INFERRED)
        judge.close()


def is_paused(server: Server) -> bool:
    """Whether a worker would take an update, asked for one that looks and does nothing else."""
    body = {"engine_rpc": "check_health", "reset_prefix_cache": False}
    _, reply = server.request("POST", "/engine/update_weights_from_distributed", body)
    return "must be paused" not in str(reply)


async def test_a_trainer_killed_in_the_middle_of_a_bucket_leaves_workers_that_serve_nobody(
    pair: Deployment, models: Models, oracle: Oracle
) -> None:
    await anyio.to_thread.run_sync(
        functools.partial(die_in_mid_transfer, pair.target, models.seed1, ballast=0)
    )
    async with genapi.connect(pair.target, run="heir") as fleet:
        with contextlib.suppress(genapi.FleetError):
            await fleet.wait_ready(timeout_s=10)
        assert all(is_paused(server) for server in pair.workers)
        judge = Judge(oracle, {2: models.seed1, 3: models.seed0})
        async with publisher(fleet) as p:
            for step, folder in ((2, models.seed1), (3, models.seed0)):
                report = await p.publish(step, weights(folder))
                assert [r.outcome for r in report.receipts] == [Outcome.COMMITTED] * 2
                for reply in await everywhere(fleet):
                    judge.check(reply, PROMPT, source=INFERRED)
        judge.close()
