"""genapi against real vLLM servers: rollouts, publications over gloo, and failures.

Greedy tokens are held against `transformers` on the weights that the trace names. A difference
counts unless the reference's two best logits are too near to each other; see `kit/judge.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import anyio
import anyio.to_thread
import pytest
import torch
from safetensors.torch import load_file

import genapi
from genapi import GenerateRequest, Outcome, PublishTimeouts, SamplingParams
from genapi.events import AdminCalled, Event, PhaseStarted
from genapi.testing.contract.meddling import Trouble
from genapi.types.worker import Evidence, FenceStrength, PublishReport, Recovery
from tests.engines.kit.judge import Judge
from tests.engines.kit.meddling import meddling

if TYPE_CHECKING:
    import pathlib

    from tests.engines.conftest import Models, Oracle, Reference, Serve
    from tests.engines.kit.server import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.anyio]

SMALL = 4  # tensors in a bucket, so that there are several
KEPT = 5  # requests in flight, so that none ends before the pause
PROMPT = tuple(300 + 7 * i for i in range(200))
LIMITS = PublishTimeouts(
    pause_s=20, transfer_s=30, finish_s=20, verify_s=10, resume_s=20, cleanup_s=10
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def target(*servers: Server) -> str:
    scheme = servers[0].engine.scheme
    return f"{scheme}://" + ",".join(server.address for server in servers)


def request(*, tokens: int = 16, **more: Any) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(prompt_token_ids=PROMPT, sampling=sampling, **more)


def publisher(fleet: genapi.Fleet, **more: Any) -> genapi.WeightPublisher:
    return genapi.WeightPublisher(
        fleet, transport=genapi.weights.Gloo(timeout_s=20), timeouts=LIMITS, **more
    )


def weights(folder: pathlib.Path) -> genapi.weights.WeightSource:
    return genapi.weights.from_safetensors(folder)


async def everywhere(fleet: genapi.Fleet, **more: Any) -> list[genapi.GenerateResponse]:
    """One reply from each worker."""
    replies: dict[str, genapi.GenerateResponse] = {}
    count = len((await fleet.snapshot()).workers)
    for number in range(100):
        reply = await fleet.generate(request(session=str(number), **more))
        replies[str(reply.worker)] = reply
        if len(replies) == count:
            return list(replies.values())
    raise AssertionError("a worker never answered")


class Gated:
    """Weights whose last tensor is gathered when the test opens the gate."""

    def __init__(self, folder: pathlib.Path, order: list[str] | None = None) -> None:
        self.tensors = load_file(folder / "model.safetensors")
        self.inner = genapi.weights.from_tensors(self.tensors)
        self.order = order if order is not None else []
        self.reached = threading.Event()
        self.gate = threading.Event()

    def manifest(self) -> Sequence[genapi.weights.TensorMeta]:
        return self.inner.manifest()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for number, pair in enumerate(self.inner, start=1):
            if number == len(self.tensors):
                self.reached.set()
                assert self.gate.wait(60)
            self.order.append("gather")
            yield pair


async def kept(
    fleet: genapi.Fleet, models: Models, *, tokens: int
) -> list[genapi.GenerateResponse]:
    """Replies that were begun under step 10, of seed 0, while step 11, of seed 1, was published."""
    source = Gated(models.seed1)
    replies: list[genapi.GenerateResponse] = []
    began = 0

    async def keep() -> None:
        nonlocal began
        async with fleet.stream(request(tokens=tokens)) as events:
            await anext(events)
            began += 1
            if began == KEPT:
                source.gate.set()
            last = [event async for event in events][-1]
        assert isinstance(last, genapi.Finished)
        replies.append(last.reply)

    async with publisher(fleet) as p:
        # The group forms with the first publication, and no token is made meanwhile.
        await p.publish(10, weights(models.seed0))
        async with anyio.create_task_group() as group:
            group.start_soon(p.publish, 11, source)
            assert await anyio.to_thread.run_sync(source.reached.wait, 60)
            for _ in range(KEPT):
                group.start_soon(keep)
        await p.publish(12, weights(models.seed0))
    made = [steps_of(reply) for reply in replies]
    assert [10, 11] in made
    assert all(steps in ([10], [10, 11]) for steps in made)
    assert all(reply.output.is_complete for reply in replies)
    return replies


def steps_of(reply: genapi.GenerateResponse) -> list[int]:
    """The step of each span."""
    return [span.lo.step for span in reply.output.policy.spans if span.lo]


async def test_a_kept_request_shows_two_spans_and_each_token_is_of_the_weights_it_names(
    vllm_pair: tuple[Server, Server], models: Models, oracle: Oracle
) -> None:
    async with genapi.connect(target(*vllm_pair), run="kept") as fleet:
        await fleet.wait_ready(timeout_s=60)
        judge = Judge(oracle, {10: models.seed0, 11: models.seed1})
        for reply in await kept(fleet, models, tokens=3500):
            judge.check(reply, PROMPT)
        judge.close()


async def test_every_gather_has_ended_before_the_first_pause(
    vllm_pair: tuple[Server, Server], models: Models
) -> None:
    order: list[str] = []

    def observe(event: Event) -> None:
        if isinstance(event, PhaseStarted):
            order.append(event.phase)

    source = Gated(models.seed0, order)
    async with genapi.connect(target(*vllm_pair), run="order", observe=observe) as fleet:
        await fleet.wait_ready(timeout_s=60)
        async with publisher(fleet) as p, anyio.create_task_group() as group:
            group.start_soon(p.publish, 1, source)
            assert await anyio.to_thread.run_sync(source.reached.wait, 60)
            assert (await fleet.generate(request())).output.is_complete
            assert "pause" not in order
            source.gate.set()
    last_gather = max(index for index, what in enumerate(order) if what == "gather")
    assert last_gather < order.index("pause")


@pytest.mark.parametrize("path", ["/update_weights", "/finish_weight_update"])
async def test_a_lost_reply_is_decided_by_what_is_read_back(
    path: str, vllm_pair: tuple[Server, Server], models: Models, oracle: Oracle
) -> None:
    transport = meddling(Trouble(path, "lose_reply", address=vllm_pair[1].address))
    run = "lost" + path.replace("/", "-")
    async with (
        contextlib.aclosing(transport),
        genapi.connect(target(*vllm_pair), run=run, transport=transport) as fleet,
    ):
        await fleet.wait_ready(timeout_s=60)
        judge = Judge(oracle, {1: models.seed1})
        async with publisher(fleet) as p:
            report = await p.publish(1, weights(models.seed1))
            assert transport.done == 1
            assert [r.outcome for r in report.receipts] == [Outcome.COMMITTED] * 2
            for reply in await everywhere(fleet):
                judge.check(reply, PROMPT)
            await p.publish(2, weights(models.seed0))
        judge.close()


@pytest.mark.parametrize("phase", ["stage", "pause", "begin", "transfer", "finish"])
async def test_a_cancelled_publication_leaves_one_version_or_fences(
    phase: str, vllm_pair: tuple[Server, Server], models: Models, oracle: Oracle
) -> None:
    scope = anyio.CancelScope()

    def observe(event: Event) -> None:
        if isinstance(event, PhaseStarted) and event.phase == phase and event.version.step == 1:
            scope.cancel()

    async with genapi.connect(target(*vllm_pair), run=f"cancel-{phase}", observe=observe) as fleet:
        await fleet.wait_ready(timeout_s=60)
        judge = Judge(oracle, {0: models.seed0, 1: models.seed1, 2: models.seed0})
        async with publisher(fleet) as p:
            await p.publish(0, weights(models.seed0))
            with anyio.fail_after(120), scope:
                await p.publish(1, weights(models.seed1))
            report = p.last_report
            assert report is not None
            fenced = [r.fence is not None for r in report.receipts]
            if not any(fenced):
                for reply in await everywhere(fleet):
                    assert reply.output.policy.oldest is not None
                    assert reply.output.policy.oldest.step == int(report.committed)
                    judge.check(reply, PROMPT)
            else:
                assert all(fenced)
                assert all(r.recovery is not Recovery.RESTART_THEN_PUBLISH for r in report.receipts)
            again = await p.publish(2, weights(models.seed0))
            assert again.committed
            for reply in await everywhere(fleet):
                judge.check(reply, PROMPT)
        judge.close()


async def failed(
    p: genapi.WeightPublisher, step: int, source: genapi.weights.WeightSource
) -> PublishReport:
    with anyio.fail_after(120), pytest.raises(genapi.PublishError) as caught:
        await p.publish(step, source)
    report = caught.value.report
    assert isinstance(report, PublishReport)
    print(f"\n{report}")
    return report


async def test_a_wrong_shape_in_mid_update_leaves_both_dirty_and_nobody_resumed(
    serve: Serve, models: Models
) -> None:
    tensors = load_file(models.seed1 / "model.safetensors")
    middle = sorted(tensors)[len(tensors) // 2]
    tensors[middle] = torch.zeros(3, 3)
    calls: list[str] = []

    def observe(event: Event) -> None:
        if isinstance(event, AdminCalled):
            calls.append(event.operation)

    with serve(2) as servers:
        async with genapi.connect(target(*servers), run="shape", observe=observe) as fleet:
            await fleet.wait_ready(timeout_s=60)
            async with publisher(fleet) as p:
                await p.adopt(0)
                source = genapi.weights.from_tensors(dict(sorted(tensors.items())))
                report = await failed(p, 1, source)
                for receipt in report.receipts:
                    assert receipt.outcome in (Outcome.DIRTY, Outcome.UNKNOWN)
                    assert receipt.fence is not None
                assert Recovery.RESTART_THEN_PUBLISH in {r.recovery for r in report.receipts}
                assert "resume" not in calls
                snapshot = await fleet.snapshot()
                assert [w.paused for w in snapshot.workers] == [True, True]
                assert snapshot.committed is not None
                assert snapshot.committed.step == 0
                with pytest.raises(genapi.FleetError):
                    await fleet.generate(request(timeout_s=20))


@pytest.mark.parametrize("phase", ["preflight", "transfer", "verify"])
async def test_one_of_two_workers_killed_leaves_receipts_and_the_other_can_go_on(
    phase: str, serve: Serve, models: Models, oracle: Oracle
) -> None:
    with serve(2) as servers:

        def observe(event: Event) -> None:
            if isinstance(event, PhaseStarted) and event.phase == phase and event.version.step == 1:
                os.killpg(servers[1].pid, signal.SIGKILL)

        async with genapi.connect(target(*servers), run="kill", observe=observe) as fleet:
            await fleet.wait_ready(timeout_s=60)
            async with publisher(fleet) as p:
                await p.publish(0, weights(models.seed0))
                report = await failed(p, 1, weights(models.seed1))
                assert fleet.membership.committed is not None
                assert fleet.membership.committed.step == 0
                survivor, dead = report.receipts
                if phase == "preflight":
                    assert survivor.outcome is Outcome.UNTOUCHED
                    assert survivor.fence is None
                    assert (await fleet.generate(request(timeout_s=30))).worker == survivor.worker
                else:
                    assert dead.outcome is not Outcome.COMMITTED
                    assert dead.fence is not None
                    assert dead.fence.strength is FenceStrength.DEAD
                    assert dead.recovery is Recovery.RESTART_THEN_PUBLISH
                    assert survivor.fence is not None
        # Whoever is left serves the new weights exactly, once published to.
        async with genapi.connect(target(servers[0]), run="kill") as alone:
            judge = Judge(oracle, {2: models.seed1})
            async with publisher(alone) as p:
                again = await p.publish(2, weights(models.seed1))
                assert again.committed
                judge.check(await alone.generate(request()), PROMPT)
            judge.close()


class Interrupted:
    """A source that has something done between two buckets, once some have been sent."""

    def __init__(self, folder: pathlib.Path, what: Callable[[], object]) -> None:
        self.inner = weights(folder)
        self.what = what

    def manifest(self) -> Sequence[genapi.weights.TensorMeta]:
        return self.inner.manifest()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for index, pair in enumerate(self.inner):
            if index == 2 * SMALL:  # the second bucket is being sent, the third is gathered
                self.what()
            yield pair


@pytest.mark.parametrize("on_partial", ["hold", "serve"])
async def test_a_server_killed_in_mid_transfer_leaves_the_other_ones_group_untouched(
    on_partial: Literal["hold", "serve"], serve: Serve, models: Models, reference: Reference
) -> None:
    with serve(2) as servers:
        interrupted = Interrupted(models.seed1, lambda: os.killpg(servers[1].pid, signal.SIGKILL))
        async with genapi.connect(target(*servers), run="radius") as fleet:
            await fleet.wait_ready(timeout_s=60)
            p = genapi.WeightPublisher(
                fleet,
                transport=genapi.weights.Gloo(timeout_s=20, bucket_tensors=SMALL, stage_bytes=0),
                timeouts=LIMITS,
                max_workers_per_group=1,
                on_partial=on_partial,
                min_workers=1 if on_partial == "serve" else None,
            )
            async with p:
                await p.publish(0, weights(models.seed0))
                if on_partial == "hold":
                    report = await failed(p, 1, interrupted)
                else:
                    with anyio.fail_after(120):
                        report = await p.publish(1, interrupted)
                survivor, dead = report.receipts
                assert survivor.outcome is Outcome.COMMITTED
                assert survivor.version_after == report.version
                assert dead.outcome is Outcome.UNKNOWN
                if on_partial == "hold":
                    assert str(dead.worker) in (report.error or "")
                assert dead.fence is not None
                assert dead.fence.strength is FenceStrength.DEAD
                if on_partial == "hold":
                    assert survivor.recovery is Recovery.REPUBLISH
                    assert survivor.fence is not None
                    assert servers[0].request("GET", "/is_paused")[1]["is_paused"] is True
                    assert servers[0].request("POST", "/resume")[0] == 200
        # It holds the new weights whole, and serves them.
        async with genapi.connect(target(servers[0]), run="radius") as alone:
            out = (await alone.generate(request())).output
            assert out.policy.oldest == out.policy.newest == report.version
            reference(models.seed1, PROMPT, len(out.token_ids)).assert_said_by(out.token_ids)


async def test_a_server_that_is_stopped_in_mid_transfer_is_named_and_comes_back(
    serve: Serve, models: Models, oracle: Oracle
) -> None:
    with serve(2) as servers:
        interrupted = Interrupted(models.seed1, lambda: os.killpg(servers[1].pid, signal.SIGSTOP))
        limits = LIMITS.model_copy(update={"transfer_s": 600.0})
        async with genapi.connect(target(*servers), run="stopped") as fleet:
            await fleet.wait_ready(timeout_s=60)
            p = genapi.WeightPublisher(
                fleet,
                transport=genapi.weights.Gloo(timeout_s=5, bucket_tensors=SMALL, stage_bytes=0),
                timeouts=limits,
            )
            async with p:
                await p.publish(0, weights(models.seed0))
                try:
                    report = await failed(p, 1, interrupted)  # within 120 s, not 600
                finally:
                    os.killpg(servers[1].pid, signal.SIGCONT)
                told, stopped = report.receipts
                assert told.outcome is Outcome.DIRTY
                assert told.evidence is Evidence.PEER_LOST
                assert stopped.outcome is Outcome.UNKNOWN
                assert str(stopped.worker) in (report.error or "")
                assert str(told.worker) not in (report.error or "")
                await anyio.to_thread.run_sync(servers[1].request, "GET", "/health")
                again = await p.publish(2, weights(models.seed1))
                assert again.committed
            judge = Judge(oracle, {2: models.seed1})
            for reply in await everywhere(fleet):
                judge.check(reply, PROMPT)
            judge.close()


async def test_a_pause_that_never_answers_ends_bounded_and_the_other_worker_serves(
    vllm_pair: tuple[Server, Server], models: Models
) -> None:
    transport = meddling(Trouble("/pause", "never_answer", address=vllm_pair[1].address))
    limits = LIMITS.model_copy(update={"pause_s": 2.0})
    async with (
        contextlib.aclosing(transport),
        genapi.connect(target(*vllm_pair), run="silent", transport=transport) as fleet,
    ):
        await fleet.wait_ready(timeout_s=60)
        p = genapi.WeightPublisher(
            fleet, transport=genapi.weights.Gloo(timeout_s=20), timeouts=limits
        )
        async with p:
            await p.adopt(0)
            report = await failed(p, 1, weights(models.seed1))
            assert [r.outcome for r in report.receipts] == [Outcome.UNTOUCHED] * 2
            assert report.receipts[0].fence is None
            assert report.receipts[1].fence is not None
            assert "pause" in (report.receipts[1].error or "")
            reply = await fleet.generate(request(timeout_s=30))
            assert reply.worker == report.receipts[0].worker


async def test_wrong_keys_and_switched_off_routes_are_named(serve: Serve) -> None:
    with serve(1, flags=["--api-key=secret"]) as (server,):
        async with genapi.connect(target(server)) as fleet:
            with pytest.raises(genapi.AuthError):
                await fleet.wait_ready(timeout_s=30)
        async with genapi.connect(target(server), api_key="secret") as fleet:
            await fleet.wait_ready(timeout_s=30)
            with pytest.raises(genapi.ProviderError, match="999999"):
                await fleet.generate(
                    GenerateRequest(
                        prompt_token_ids=[999999], sampling=SamplingParams(max_tokens=1)
                    )
                )
            with pytest.raises(genapi.OverlongPromptError):
                await fleet.generate(
                    GenerateRequest(
                        prompt_token_ids=[5] * 5000, sampling=SamplingParams(max_tokens=1)
                    )
                )


async def test_a_store_that_vllm_does_not_empty_is_refused_because_old_keys_outlive_weights(
    serve: Serve, models: Models, oracle: Oracle, tmp_path: pathlib.Path
) -> None:
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    with serve(1, flags=[f"--kv-transfer-config={json.dumps(connector)}"]) as (server,):
        async with genapi.connect(target(server)) as fleet, publisher(fleet) as p:
            await fleet.wait_ready(timeout_s=60)
            await p.adopt(0)
            await fleet.generate(request())
            report = await failed(p, 1, weights(models.seed1))
            assert [r.outcome for r in report.receipts] == [Outcome.UNTOUCHED]
            assert "'ExampleConnector'" in (report.receipts[0].error or "")
            allowed = await p.publish(
                1, weights(models.seed1), in_flight_kv="stale", prefix_cache="stale"
            )
            assert allowed.committed
            # A reset answers success, and the store has its entries still.
            status, reset = server.request("POST", "/reset_prefix_cache?reset_external=true")
            assert (status, reset) == (200, {"success": True})
            reply = await fleet.generate(request())
            assert [span.context for span in reply.output.policy.spans] == [None]
            assert Judge(oracle, {1: models.seed1}).mismatches(reply, PROMPT) > 0
