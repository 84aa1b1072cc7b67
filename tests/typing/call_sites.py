"""The call sites users rely on, read by mypy and never run.

Each public call is written here as users write it, and `assert_type` says what comes back.
mypy runs without pydantic's plugin, as it does in most users' projects.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

import genapi
from genapi import FinishReason, GenerateRequest, OffPolicyWindow, PolicyTrace, SamplingParams


async def behind_a_frontend(prompt: list[int]) -> None:
    async with genapi.connect("dynamo://frontend:8000?discovery=8001") as fleet:
        await fleet.wait_ready(timeout_s=60)
        options = genapi.providers.dynamo.Options(extra_fields=("timing",))
        request = GenerateRequest(
            prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=16), options=options
        )
        reply = await fleet.generate(request)
        assert_type(reply.worker, genapi.WorkerId | None)
        assert_type(reply.prefill_worker, genapi.WorkerId | None)
        async with genapi.WeightPublisher(fleet, transport=genapi.weights.Gloo()) as publisher:
            report = await publisher.publish(3, genapi.weights.from_tensors({}))
            for receipt in report.receipts:
                print(receipt.worker, receipt.outcome, receipt.evidence, receipt.fence)


async def behind_a_gateway() -> None:
    target = "sglang://gateway:30000?workers=discover"
    async with genapi.connect(target, expect=genapi.Topology(workers=2)) as fleet:
        await fleet.wait_ready(timeout_s=60)


async def rollout(prompt: list[int]) -> None:
    async with genapi.connect("vllm://127.0.0.1:8001,127.0.0.1:8002", model="tiny") as fleet:
        assert_type(fleet, genapi.Fleet)
        await fleet.wait_ready(timeout_s=60)
        request = GenerateRequest(
            prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=16, temperature=0.0)
        )
        reply = await fleet.generate(request)
        assert_type(reply, genapi.GenerateResponse)
        out = reply.output
        assert_type(out, genapi.GenerateOutput)
        assert_type(out.token_ids, genapi.TokenIds)
        assert_type(out.token_ids[0], int)
        assert_type(out.text, str | None)
        assert_type(out.finish_reason, FinishReason)
        assert_type(out.is_complete, bool)
        assert_type(out.policy, PolicyTrace)
        assert_type(out.policy.spans, tuple[genapi.Span, ...])
        assert_type(out.policy.oldest, genapi.PolicyVersion | None)
        assert_type(out.policy.newest, genapi.PolicyVersion | None)
        assert_type(out.policy.is_mixed, bool)
        assert_type(out.policy.is_pure, bool)
        assert_type(out.policy.lag(5), int | None)
        assert_type(out.logprobs, npt.NDArray[np.float32] | None)
        print(out.stop_reason, out.top_logprobs)
        print(out.policy.source, out.policy.arrays())
        assert_type(out.policy.at(0), genapi.Span)
        assert_type(reply.prompt_token_ids, genapi.TokenIds | None)
        assert_type(reply.prompt_logprobs, npt.NDArray[np.float32] | None)
        print(reply.attempts, reply.logprobs_mode)
        snapshot = await fleet.snapshot()
        for worker in snapshot.workers:
            print(worker.id, worker.url, worker.role, worker.version, worker.paused)
            print(worker.healthy, worker.fence, worker.ranks)
        GenerateRequest(prompt="Where am I?", sampling=SamplingParams(max_tokens=1))
        asked = GenerateRequest(
            messages=[{"role": "user", "content": "Where am I?"}],
            tools=[{"type": "function", "function": {"name": "look"}}],
            sampling=SamplingParams(max_tokens=1, n=2),
            options=genapi.providers.vllm.Options(route="openai", chat={"tool_choice": "auto"}),
        )
        for output in (await fleet.generate(asked)).outputs:
            assert_type(output.reasoning, str | None)
            assert_type(output.tool_calls, tuple[Mapping[str, Any], ...])
        fresh = request.model_copy(update={"min_version": 3})
        GenerateRequest(
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=1),
            request_id="mine",
            min_version=3,
            exact_version=genapi.PolicyVersion(run="r", step=3),
            timeout_s=5,
        )
        print(fresh)
        array: npt.NDArray[Any] = np.asarray(out.token_ids)
        more: Sequence[int] = prompt + out.token_ids
        assert_type(reply.usage.cached_tokens, int | None)
        assert_type(reply.request_id, str)
        assert_type(reply.worker, genapi.WorkerId | None)
        assert_type(reply.prefill_worker, genapi.WorkerId | None)
        following = request.extended(out.token_ids, [7, 8])
        assert_type(following, GenerateRequest)
        async with fleet.stream(request) as events:
            async for event in events:
                match event:
                    case genapi.TokenChunk():
                        assert_type(event.token_ids, genapi.TokenIds)
                    case genapi.Finished():
                        assert_type(event.reply, genapi.GenerateResponse)
        print(array, more)


async def open_and_close() -> None:
    fleet = genapi.connect(
        genapi.FleetConfig(target="vllm://w1:8001", retry=genapi.RetryPolicy()), run="run-1"
    )
    await fleet.open()
    await fleet.abort("mine")
    assert_type(fleet.config, genapi.FleetConfig)
    await fleet.aclose()


async def options() -> None:
    genapi.connect(
        "vllm://w1:8001",
        api_key="env:KEY",
        admin_api_key="file:/run/key",
        expect=genapi.Topology(workers=1),
        max_in_flight=8,
        connect_timeout_s=1.0,
        idle_timeout_s=30.0,
        admin_timeout_s=10.0,
        refresh_s=1.0,
        allowed_origins=("http://w2:8001",),
        discovery_url=None,
        strict=True,
        board="file:/shared/board",
    )


async def publish(fleet: genapi.Fleet, state_dict: Mapping[str, npt.NDArray[np.float32]]) -> None:
    async with genapi.WeightPublisher(fleet, transport=genapi.weights.Memory()) as publisher:
        await publisher.adopt(0)
        report = await publisher.publish(3, genapi.weights.from_tensors(state_dict))
        await publisher.publish(
            4,
            genapi.weights.from_safetensors("model"),
            mode="drain",
            in_flight_kv="recompute",
            prefix_cache="flush",
            at_most=None,
            latest_only=False,
        )
        for receipt in report.receipts:
            assert_type(receipt.worker, genapi.WorkerId)
            print(receipt.outcome, receipt.evidence, receipt.version_before, receipt.version_after)
            print(receipt.paused_s, receipt.bytes_sent, receipt.fence, receipt.recovery)
            print(receipt.error)
    genapi.WeightPublisher(fleet, transport=genapi.weights.Filesystem("/shared/weights"))
    genapi.WeightPublisher(
        fleet,
        transport=genapi.weights.Filesystem(
            pathlib.Path("/shared/weights"), worker_dir="/mnt/weights", base="model", keep=2
        ),
    )
    genapi.WeightPublisher(
        fleet,
        transport=genapi.weights.Gloo(),
        mode="keep",
        in_flight_kv="recompute",
        prefix_cache="salt",
        verify=("label",),
        timeouts=genapi.PublishTimeouts(),
        on_partial="serve",
        min_workers=1,
        max_workers_per_group=8,
        restarter=None,
    )


def orchestrate(out: genapi.GenerateOutput, turns: list[genapi.GenerateOutput]) -> None:
    window = OffPolicyWindow(max_lag=2, on_stale="drop", require_pure=False, basis="oldest")
    verdict = window.judge(out, consumer_version=5)
    assert_type(verdict.accepted, bool)
    assert_type(verdict.lag, int | None)
    print(verdict.token_mask, verdict.reason)
    joined = PolicyTrace.join([turn.policy for turn in turns])
    assert_type(joined, PolicyTrace)
    window.judge(joined, consumer_version=genapi.PolicyVersion(run="r", step=5))


def errors(error: genapi.GenAPIError) -> None:
    match error:
        case genapi.TransportError():
            print(error.phase)
        case genapi.ProviderError():
            assert_type(error.status, int)
        case genapi.PublishError():
            print(error.report)


async def launching() -> None:
    launched = genapi.launch(
        genapi.providers.vllm.Launch(
            model="/models/tiny",
            workers=2,
            devices=("0", "1"),
            python="/opt/vllm/bin/python",
            api_key="env:GENAPI_KEY",
            flags=("--seed=7",),
            environment={"HF_TOKEN": "env:HF_TOKEN"},
        ),
        on_exit="leave",
        run="run-7",
        strict=True,
    )
    print(launched.dry_run())
    async with launched as fleet:
        assert_type(fleet, genapi.Fleet)
        genapi.WeightPublisher(fleet, transport=genapi.weights.Gloo(), restarter=launched.restart)
    gateway = genapi.providers.sglang.Gateway(port=8000)
    async with genapi.launch(
        genapi.providers.sglang.Launch(model="m", gateway=gateway, admin_api_key="k")
    ) as fleet:
        assert_type(fleet, genapi.Fleet)
