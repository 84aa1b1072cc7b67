"""genapi against real SGLang servers: rollouts, publications over SGLang's own gloo, and failures.

Greedy tokens are held against `transformers` on the weights that the trace names, as for vLLM.
"""

from __future__ import annotations

import contextlib
import http
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import genapi
from genapi import FinishReason, Outcome, SamplingParams
from genapi.events import Event, PhaseStarted
from genapi.testing.contract.meddling import Trouble
from genapi.types.worker import Evidence, PublishReport, Recovery
from genapi.weights._gloo_group import GlooGroup, pack
from tests.engines.kit.judge import FEW, Judge
from tests.engines.kit.meddling import meddling
from tests.engines.test_vllm import (
    LIMITS,
    PROMPT,
    everywhere,
    failed,
    kept,
    publisher,
    request,
    steps_of,
    target,
    weights,
)

if TYPE_CHECKING:
    import pathlib

    from tests.engines.conftest import Models, Oracle, Serve
    from tests.engines.kit.server import Server

on_engine = (pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.anyio)

Pair = tuple["Server", "Server"]
LIMIT_S = 60.0
ROUNDING = 1e-4
PAUSE, UPDATE = "/pause_generation", "/update_weights_from_distributed"
INIT = "/init_weights_update_group"
WHOLE = "model.layers.1.mlp.down_proj.weight"
"""A parameter that is not fused with others."""


def engine(test: Any) -> Any:
    """Mark a test that needs a real engine; the others of this file run everywhere."""
    for mark in on_engine:
        test = mark(test)
    return test


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def post(server: Server, path: str, **body: object) -> Any:
    status, reply = server.request("POST", path, body, timeout_s=LIMIT_S)
    assert status == http.HTTPStatus.OK, reply
    return reply


async def same_streamed_and_whole(fleet: genapi.Fleet) -> None:
    sampling = SamplingParams(max_tokens=64, temperature=0.0, logprobs=3, ignore_eos=True)
    asked = request(session="one").model_copy(update={"sampling": sampling})
    await fleet.generate(asked)  # from here on both find the prompt in the cache
    whole = await fleet.generate(asked)
    async with fleet.stream(asked) as events:
        received = [event async for event in events]
    last = received[-1]
    assert isinstance(last, genapi.Finished)
    streamed = last.reply.output
    assert last.reply.worker == whole.worker
    assert whole.output.finish_reason is FinishReason.LENGTH
    assert len(received) > 10
    for name in ("token_ids", "text", "finish_reason", "policy", "stop_reason"):
        assert getattr(streamed, name) == getattr(whole.output, name)
    assert streamed.logprobs is not None
    assert whole.output.logprobs is not None
    assert np.abs(streamed.logprobs - whole.output.logprobs).max() < ROUNDING
    assert streamed.top_logprobs is not None
    assert whole.output.top_logprobs is not None
    tops = zip(streamed.top_logprobs, whole.output.top_logprobs, strict=True)
    assert all(one.token_ids == other.token_ids for one, other in tops)


@engine
async def test_a_retracted_request_shows_two_spans_and_each_token_is_of_the_weights_it_names(
    sglang_pair: Pair, models: Models, oracle: Oracle
) -> None:
    async with genapi.connect(target(*sglang_pair), run="kept") as fleet:
        await fleet.wait_ready(timeout_s=60)
        judge = Judge(oracle, {10: models.seed0, 11: models.seed1})
        replies = await kept(fleet, models, tokens=1500)
        retractions = [reply.output.extra["num_retractions"] for reply in replies]
        assert retractions == [len(steps_of(reply)) - 1 for reply in replies]
        for reply in replies:
            judge.check(reply, PROMPT)
        judge.close()


@engine
async def test_requests_paused_in_place_rest_on_the_old_weights_and_say_so(
    sglang_pair: Pair, models: Models, oracle: Oracle
) -> None:
    async with genapi.connect(target(sglang_pair[0]), run="stale") as fleet:
        await fleet.wait_ready(timeout_s=60)
        async with publisher(fleet, in_flight_kv="stale") as p:
            await p.publish(1, weights(models.seed0))
            async with fleet.stream(request(tokens=1500)) as events:
                await anext(events)
                await p.publish(2, weights(models.seed1))
                last = [event async for event in events][-1]
            assert isinstance(last, genapi.Finished)
            out = last.reply.output
            assert [s.lo.step for s in out.policy.spans if s.lo] == [1, 2]
            assert [s.context.step for s in out.policy.spans if s.context] == [1, 1]
            assert not out.policy.is_pure
            judge = Judge(oracle, {1: models.seed0, 2: models.seed1})
            assert judge.mismatches(last.reply, PROMPT) > 0
            # The salt keeps what is new from finding what the old weights left.
            judge.check(await fleet.generate(request()), PROMPT)
            await p.publish(3, weights(models.seed0), in_flight_kv="recompute")


@engine
async def test_abort_ends_requests_in_flight_with_the_tokens_they_have(
    sglang_pair: Pair, models: Models, oracle: Oracle
) -> None:
    async with genapi.connect(target(sglang_pair[0]), run="abort") as fleet:
        await fleet.wait_ready(timeout_s=60)
        async with publisher(fleet, mode="abort") as p:
            await p.publish(1, weights(models.seed0))
            async with fleet.stream(request(tokens=3500)) as events:
                await anext(events)
                await p.publish(2, weights(models.seed1))
                last = [event async for event in events][-1]
            assert isinstance(last, genapi.Finished)
            out = last.reply.output
            assert out.finish_reason is FinishReason.ABORT
            assert 0 < len(out.token_ids) < 3500
            judge = Judge(oracle, {1: models.seed0, 2: models.seed1})
            judge.check(last.reply, PROMPT)
            assert [s.lo.step for s in out.policy.spans if s.lo] == [1]
            judge.check(await fleet.generate(request()), PROMPT)
            await p.publish(3, weights(models.seed0))


@engine
async def test_requests_that_somebody_paused_in_place_end_with_a_publication_that_aborts(
    sglang_pair: Pair, models: Models
) -> None:
    server = sglang_pair[0]
    async with genapi.connect(target(server), run="in-place") as fleet:
        await fleet.wait_ready(timeout_s=60)
        async with publisher(fleet, mode="abort") as p:
            await p.publish(1, weights(models.seed0))
            async with fleet.stream(request(tokens=3500)) as events:
                await anext(events)
                await anyio.to_thread.run_sync(lambda: post(server, PAUSE, mode="in_place"))
                report = await p.publish(2, weights(models.seed0))
                last = [event async for event in events][-1]
            assert report.committed
            assert isinstance(last, genapi.Finished)
            assert last.reply.output.finish_reason is FinishReason.ABORT


@engine
async def test_a_parameter_that_sglang_does_not_know_is_ignored_and_the_probe_says_so(
    sglang_pair: Pair, models: Models, scores: Callable[..., Any]
) -> None:
    tensors = load_file(models.seed1 / "model.safetensors")
    tensors["model.layers.1.mlp.down_projection.weight"] = tensors.pop(WHOLE)
    misnamed = genapi.weights.from_tensors(tensors)
    async with genapi.connect(target(*sglang_pair), run="unknown") as fleet:
        await fleet.wait_ready(timeout_s=60)
        async with publisher(fleet, verify=("checksum", "probe")) as p:
            # Every call says 200, and each of two workers is as wrong as the other.
            assert (await p.publish(1, misnamed)).committed
        async with publisher(fleet, verify=("probe",)) as p:
            with pytest.raises(genapi.PublishError) as caught:
                await p.publish(2, misnamed, probe_logprobs=scores(models.seed1, p))
            wrong = caught.value.report
            assert isinstance(wrong, PublishReport)
            assert [r.outcome for r in wrong.receipts] == [Outcome.DIRTY] * 2
            assert [r.evidence for r in wrong.receipts] == [Evidence.OTHER_SCORES] * 2
            good = weights(models.seed0)
            right = await p.publish(
                3, good, probe_logprobs=scores(models.seed0, p), manifest_changed=True
            )
            assert right.committed
            print(f"\ngap to transformers: {right.probe_gap}")
            assert right.probe_gap is not None
            assert right.probe_gap < ROUNDING


def push(server: Server, tensors: dict[str, torch.Tensor]) -> None:
    """Put tensors into one server past the publication, by a group of another name."""
    name = "past"
    group = GlooGroup("127.0.0.1", prefixes=(name, f"{name}/", "cpu/"), plain=True)
    info = {
        "names": list(tensors),
        "dtype_names": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
        "shapes": [list(t.shape) for t in tensors.values()],
    }
    parcel = pack(list(tensors.values()), info, packed=False, packed_buffer_size_bytes=0)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(
            post,
            server,
            INIT,
            master_address=group.host,
            master_port=group.port,
            rank_offset=1,
            world_size=2,
            group_name=name,
            backend="gloo",
        )
        group.join(2, timeout_s=LIMIT_S)
        joined.result()
        received = pool.submit(
            post,
            server,
            UPDATE,
            names=info["names"],
            dtypes=info["dtype_names"],
            shapes=info["shapes"],
            group_name=name,
            flush_cache=False,
        )
        group.send(parcel, timeout_s=LIMIT_S)
        received.result()
    post(server, "/destroy_weights_update_group", group_name=name)
    group.close(timeout_s=LIMIT_S)


@engine
async def test_the_checksum_sees_one_server_with_another_tensor_and_the_next_publication_heals_it(
    sglang_pair: Pair, models: Models, oracle: Oracle
) -> None:
    other = {WHOLE: load_file(models.seed0 / "model.safetensors")[WHOLE]}

    def observe(event: Event) -> None:
        if isinstance(event, PhaseStarted) and (event.phase, event.version.step) == ("finish", 1):
            push(sglang_pair[1], other)

    async with genapi.connect(target(*sglang_pair), run="sums", observe=observe) as fleet:
        await fleet.wait_ready(timeout_s=60)
        async with publisher(fleet, verify=("checksum",)) as p:
            report = await failed(p, 1, weights(models.seed1))
            assert [r.outcome for r in report.receipts] == [Outcome.DIRTY] * 2
            assert [r.evidence for r in report.receipts] == [Evidence.OTHER_CHECKSUM] * 2
            assert [r.checksum_blind for r in report.receipts] == [0, 0]
            again = await p.publish(2, weights(models.seed0))
            assert [r.verified for r in again.receipts] == [("label", "checksum")] * 2
        judge = Judge(oracle, {2: models.seed0})
        for reply in await everywhere(fleet):
            judge.check(reply, PROMPT)
        judge.close()


def kill(server: Server) -> None:
    os.killpg(server.pid, signal.SIGKILL)


@engine
async def test_a_group_that_never_forms_lets_go_of_whoever_had_joined(
    sglang_pair: Pair, models: Models, oracle: Oracle
) -> None:
    limits = LIMITS.model_copy(update={"group_s": 3.0})
    transport = meddling(Trouble(INIT, "swallow", nth=2))
    async with (
        contextlib.aclosing(transport),
        genapi.connect(target(*sglang_pair), run="alone", transport=transport) as fleet,
    ):
        await fleet.wait_ready(timeout_s=60)
        gloo = genapi.weights.Gloo(timeout_s=20)
        async with genapi.WeightPublisher(fleet, transport=gloo, timeouts=limits) as p:
            report = await failed(p, 1, weights(models.seed1))
            assert [r.outcome for r in report.receipts] == [Outcome.UNTOUCHED] * 2
            judge = Judge(oracle, {2: models.seed1, 3: models.seed0})
            for step, folder in ((2, models.seed1), (3, models.seed0)):
                assert (await p.publish(step, weights(folder))).committed
                for reply in await everywhere(fleet):
                    judge.check(reply, PROMPT)
            judge.close()


DYING = """
import sys
import anyio, torch
from safetensors.torch import load_file
import genapi
from tests.engines.kit.meddling import at_second_update, meddling

async def main(target, folder, ballast):
    tensors = load_file(folder)
    first = list(tensors.items())[:9]
    extra = {"ballast": torch.zeros(int(ballast))} if int(ballast) else {}
    content = dict(first) | extra | tensors
    told = at_second_update(lambda: print("under way", flush=True))
    async with genapi.connect(target, run="dying", transport=meddling(told=told)) as fleet:
        await fleet.wait_ready(timeout_s=60)
        transport = genapi.weights.Gloo(timeout_s=20, bucket_tensors=9)
        async with genapi.WeightPublisher(fleet, transport=transport) as p:
            await p.publish(1, genapi.weights.from_tensors(content))
    print("published", flush=True)

anyio.run(main, *sys.argv[1:])
"""


def die_in_mid_transfer(address: str, folder: pathlib.Path, *, ballast: int = 64 << 20) -> None:
    """Publish from a process of its own, and kill it while its second bucket is under way.

    With ballast, which SGLang takes and ignores, that bucket is under way for a while.
    """
    file = folder / "model.safetensors"
    with subprocess.Popen(
        [sys.executable, "-c", DYING, address, str(file), str(ballast)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as trainer:
        assert trainer.stdout is not None
        line = trainer.stdout.readline()
        trainer.kill()
    assert line == "under way\n"


@engine
async def test_a_trainer_killed_in_the_middle_of_a_bucket_leaves_a_server_that_the_next_one_heals(
    sglang_pair: Pair, models: Models, oracle: Oracle
) -> None:
    place = target(*sglang_pair)
    await anyio.to_thread.run_sync(die_in_mid_transfer, place, models.seed1)
    async with genapi.connect(target(*sglang_pair), run="heir") as fleet:
        await fleet.wait_ready(timeout_s=60)
        snapshot = await fleet.snapshot()
        assert [w.paused for w in snapshot.workers] == [True, True]
        judge = Judge(oracle, {2: models.seed1, 3: models.seed0})
        async with publisher(fleet) as p:
            for step, folder in ((2, models.seed1), (3, models.seed0)):
                report = await p.publish(step, weights(folder))
                assert [r.outcome for r in report.receipts] == [Outcome.COMMITTED] * 2
                for reply in await everywhere(fleet):
                    judge.check(reply, PROMPT)
        judge.close()


@engine
async def test_one_of_two_sglang_servers_killed_in_a_transfer_and_the_other_can_go_on(
    serve_sglang: Serve, models: Models, oracle: Oracle
) -> None:
    with serve_sglang(2) as servers:

        def observe(event: Event) -> None:
            if isinstance(event, PhaseStarted):
                place = (event.phase, event.version.step)
                if place == ("transfer", 1):
                    kill(servers[1])

        async with genapi.connect(target(*servers), run="kill", observe=observe) as fleet:
            await fleet.wait_ready(timeout_s=60)
            async with publisher(fleet) as p:
                await p.publish(0, weights(models.seed0))
                report = await failed(p, 1, weights(models.seed1))
                survivor, dead = report.receipts
                assert dead.outcome is not Outcome.COMMITTED
                assert dead.recovery is Recovery.RESTART_THEN_PUBLISH
                ways = (Recovery.REPUBLISH, Recovery.CLOSE_THEN_REPUBLISH)
                assert survivor.recovery in ways
                assert survivor.fence is not None
        async with genapi.connect(target(servers[0]), run="kill") as alone:
            judge = Judge(oracle, {2: models.seed1})
            async with publisher(alone) as p:
                assert (await p.publish(2, weights(models.seed1))).committed
                judge.check(await alone.generate(request()), PROMPT)
            judge.close()


@engine
async def test_two_keys_and_incremental_streams_are_as_the_recorded_ones(
    serve_sglang: Serve, models: Models, oracle: Oracle
) -> None:
    flags = ["--api-key=user", "--admin-api-key=adm", "--incremental-streaming-output"]
    with serve_sglang(1, flags=flags) as (server,):
        async with genapi.connect(target(server), api_key="adm") as fleet:
            with pytest.raises(genapi.AuthError):
                await fleet.wait_ready(timeout_s=30)
        async with genapi.connect(
            target(server), run="keys", api_key="user", admin_api_key="adm"
        ) as fleet:
            await fleet.wait_ready(timeout_s=30)
            await same_streamed_and_whole(fleet)
            judge = Judge(oracle, {1: models.seed0, 2: models.seed1})
            async with publisher(fleet) as p:
                await p.publish(1, weights(models.seed0))
                async with fleet.stream(request(tokens=1500)) as events:
                    await anext(events)
                    assert (await p.publish(2, weights(models.seed1))).committed
                    last = [event async for event in events][-1]
                assert isinstance(last, genapi.Finished)
                judge.check(last.reply, PROMPT)
                assert [s.lo.step for s in last.reply.output.policy.spans if s.lo] == [1, 2]
            judge.close(ties=FEW)
