"""genapi against Dynamo's own frontend, router and runtime, with workers that are quick to start.

The mockers are Dynamo's simulators: they generate, and nobody can administer them. The policy
workers serve the embedded policy on Dynamo's runtime, so that tokens can be held against the policy
itself, and versions against those that the worker says it used.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import anyio
import pytest

import genapi
from genapi import GenerateRequest, Outcome, SamplingParams
from genapi.embedded import policy
from genapi.types.ids import Role
from genapi.types.policy import parse_label
from tests.engines.kit.dynamo.deployment import MOCKER, POLICY, Deployment
from tests.engines.kit.server import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.engines.conftest import Deploy

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.anyio]

PROMPT = tuple(range(5, 45))
PREFILL, DECODE = ["--role=prefill"], ["--role=decode"]
"""Flags of policy workers."""
PUBLICATIONS = 6
REQUESTS = 8
WEIGHTS = [policy.init(seed) for seed in range(PUBLICATIONS + 1)]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def source(step: int) -> genapi.weights.WeightSource:
    return genapi.weights.from_tensors(WEIGHTS[step])


def request(tokens: int = 12, *, first: int = 5) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(prompt_token_ids=(first, *PROMPT[1:]), sampling=sampling)


def publisher(fleet: genapi.Fleet, **more: object) -> genapi.WeightPublisher:
    return genapi.WeightPublisher(fleet, transport=genapi.weights.Memory(), mode="drain", **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def split(deploy: Deploy) -> Iterator[Deployment]:
    """A frontend, two prefill and two decode workers of the policy."""
    with deploy(POLICY, [PREFILL, PREFILL, DECODE, DECODE]) as deployment:
        yield deployment


async def test_requests_to_mockers_name_the_prefill_and_the_decode_worker_that_served_them(
    deploy: Deploy,
) -> None:
    prefill = ["--disaggregation-mode=prefill", f"--bootstrap-ports={free_port()}"]
    decode = ["--disaggregation-mode=decode"]
    with deploy(MOCKER, [prefill, decode, decode]) as deployment:
        async with genapi.connect(deployment.target) as fleet:
            await fleet.wait_ready(timeout_s=30)
            snapshot = await fleet.snapshot()
            roles = {w.id: w.role for w in snapshot.workers}
            assert sorted(roles.values()) == [Role.DECODE, Role.DECODE, Role.PREFILL]
            unscored = SamplingParams(max_tokens=8, temperature=0.0, logprobs=None)
            asked = request().model_copy(update={"sampling": unscored})
            replies = [await fleet.generate(asked) for _ in range(6)]
            for reply in replies:
                assert len(reply.output.token_ids) == 8
                assert reply.worker is not None
                assert reply.prefill_worker is not None
                assert roles[reply.worker] is Role.DECODE
                assert roles[reply.prefill_worker] is Role.PREFILL
                assert reply.output.policy.oldest is None
            assert len({reply.worker for reply in replies}) == 2
            async with publisher(fleet) as p:
                with pytest.raises((genapi.PublishError, genapi.UnsupportedError), match="/v1/rl"):
                    await p.publish(1, source(1))


async def test_every_prefill_and_decode_worker_is_published_to_and_serves_the_new_weights(
    split: Deployment,
) -> None:
    async with genapi.connect(split.target, run="both") as fleet, publisher(fleet) as p:
        await fleet.wait_ready(timeout_s=30)
        for step in (1, 2):
            report = await p.publish(step, source(step))
            assert [r.outcome for r in report.receipts] == [Outcome.COMMITTED] * 4
            snapshot = await fleet.snapshot()
            assert {w.label for w in snapshot.workers} == {report.version.label}
            assert sorted(w.role for w in snapshot.workers) == sorted(
                [Role.DECODE, Role.DECODE, Role.PREFILL, Role.PREFILL]
            )
            expected = policy.greedy(WEIGHTS[step], PROMPT, 12)
            pairs = set()
            for _ in range(8):
                reply = await fleet.generate(request())
                assert list(reply.output.token_ids) == expected
                assert reply.output.policy.source == "inferred"
                assert reply.output.policy.oldest == report.version
                assert reply.output.policy.is_pure
                pairs.add((reply.prefill_worker, reply.worker))
            assert len({prefill for prefill, _ in pairs}) == 2
            assert len({decode for _, decode in pairs}) == 2


@pytest.mark.parametrize("mode", ["keep", "drain", "abort"])
async def test_versions_that_were_used_lie_in_the_intervals_while_publications_go_on(
    mode: str, deploy: Deploy
) -> None:
    workers = [[]] * 2 if mode == "keep" else [PREFILL, DECODE]
    with deploy(POLICY, workers) as deployment:
        async with genapi.connect(deployment.target, run="true") as fleet:
            await fleet.wait_ready(timeout_s=30)
            seen: list[tuple[genapi.GenerateResponse, int, int]] = []
            committed = target = 0

            async def ask(number: int) -> None:
                while not done.is_set():
                    before = committed
                    with contextlib.suppress(genapi.NotReadyError):
                        reply = await fleet.generate(request(60, first=number))
                        seen.append((reply, before, target))

            async with publisher(fleet) as p:
                await p.publish(0, source(0))
                done = anyio.Event()
                async with anyio.create_task_group() as group:
                    for number in range(REQUESTS):
                        group.start_soon(ask, number)
                    for target in range(1, PUBLICATIONS + 1):
                        await p.publish(target, source(target), mode=mode)  # type: ignore[arg-type]
                        committed = target
                    done.set()
            assert len(seen) > REQUESTS
            for reply, before, after in seen:
                used = reply.output.extra["engine_data"]["true_versions"]
                assert len(used) == len(reply.output.token_ids)
                for at, label in enumerate(used):
                    span, true = reply.output.policy.at(at), parse_label(label)
                    assert span.lo is not None
                    assert span.hi is not None
                    assert true is not None
                    # As wide as there were publications meanwhile, and no wider.
                    assert before <= span.lo.step <= true.step <= span.hi.step <= after
            print(f"\n{mode}: {len(seen)} replies")


async def test_an_aborted_request_is_not_taken_for_one_that_stopped(deploy: Deploy) -> None:
    with deploy(POLICY, [[]]) as deployment:
        async with genapi.connect(deployment.target, run="cut") as fleet:
            await fleet.wait_ready(timeout_s=30)
            async with publisher(fleet) as p:
                await p.publish(0, source(0))
                async with fleet.stream(request(3000)) as events:
                    await anext(events)
                    await p.publish(1, source(1), mode="abort")
                    last = [event async for event in events][-1]
                assert isinstance(last, genapi.Finished)
                assert len(last.reply.output.token_ids) < 3000
                assert not last.reply.output.is_complete


async def test_a_request_that_moved_to_another_worker_is_marked_and_no_version_is_guessed(
    deploy: Deploy,
) -> None:
    with deploy(POLICY, [[], []], frontend=["--migration-limit=3"]) as deployment:
        async with genapi.connect(deployment.target, run="moved") as fleet:
            await fleet.wait_ready(timeout_s=30)
            async with publisher(fleet) as p:
                report = await p.publish(0, source(0))
            async with fleet.stream(request(400)) as events:
                await anext(events)
                (serving,) = deployment.busy()
                deployment.kill(serving)
                with pytest.warns(genapi.GenAPIWarning, match="moved the request"):
                    last = [event async for event in events][-1]
            assert isinstance(last, genapi.Finished)
            out = last.reply.output
            assert list(out.token_ids) == policy.greedy(WEIGHTS[0], PROMPT, 400)
            assert out.extra["migrated"] is True
            assert last.reply.worker is None
            assert not out.policy.is_pure
            # Of the worker that is gone nobody can read any more what it had.
            assert out.policy.oldest in (None, report.version)
