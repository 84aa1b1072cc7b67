"""The probe and the checksum on real vLLM: what they catch though every call said 200."""

from __future__ import annotations

import http
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch
from safetensors.torch import load_file

import genapi
from genapi import Outcome
from genapi.events import Event, PhaseStarted
from genapi.types.worker import Evidence, FenceStrength, PublishReport, Recovery
from genapi.weights._gloo_group import GlooGroup, pack
from tests.engines.kit.judge import Judge
from tests.engines.test_vllm import LIMITS, PROMPT, everywhere, request, target, weights

if TYPE_CHECKING:
    from tests.engines.conftest import Models, Oracle, Serve
    from tests.engines.kit.server import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.anyio]

Pair = tuple["Server", "Server"]
Tensors = dict[str, torch.Tensor]
LIMIT_S = 60.0
LAYER = "model.layers.1."
FUSED = "model.layers.1.self_attn.q_proj.weight"
PAIR = ("model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.v_proj.weight")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def publisher(fleet: genapi.Fleet, *levels: Any, **more: Any) -> genapi.WeightPublisher:
    transport = genapi.weights.Gloo(timeout_s=20)
    verify = levels or ("probe",)
    return genapi.WeightPublisher(
        fleet, transport=transport, verify=verify, timeouts=LIMITS, **more
    )


def one_layer(models: Models) -> Tensors:
    """What is left of seed 0 in a worker that one layer of seed 1 never reached."""
    old = load_file(models.seed0 / "model.safetensors")
    return {name: tensor for name, tensor in old.items() if name.startswith(LAYER)}


def swapped_pair(models: Models) -> Tensors:
    """Two tensors of equal shapes, each under the other's name.

    vLLM fuses them with a third, and what of a fused weight does not come is garbage.
    """
    new = load_file(models.seed1 / "model.safetensors")
    return {FUSED: new[FUSED], PAIR[0]: new[PAIR[1]], PAIR[1]: new[PAIR[0]]}


def call(server: Server, path: str, body: object = None) -> Any:
    status, reply = server.request("POST", path, body, timeout_s=LIMIT_S)
    assert status == http.HTTPStatus.OK, reply
    return reply


def push(server: Server, tensors: Tensors, *, label: str) -> None:
    """Put tensors into one server past the publication, and set its label as if all was well."""
    group = GlooGroup("127.0.0.1")
    init = {
        "master_address": group.host,
        "master_port": group.port,
        "rank_offset": 1,
        "world_size": 2,
        "timeout_s": LIMIT_S,
    }
    update = {
        "names": list(tensors),
        "dtype_names": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
        "shapes": [list(t.shape) for t in tensors.values()],
    }
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(call, server, "/init_weight_transfer_engine", {"init_info": init})
        group.join(2, timeout_s=LIMIT_S)
        joined.result()
        call(server, "/start_weight_update")
        received = pool.submit(call, server, "/update_weights", {"update_info": update})
        parcel = pack(list(tensors.values()), update, packed=False, packed_buffer_size_bytes=0)
        group.send(parcel, timeout_s=LIMIT_S)
        received.result()
        call(server, "/finish_weight_update", {"weight_version": label})
    group.close(timeout_s=LIMIT_S)


def corrupting(server: Server, tensors: Tensors, *, phase: str) -> Callable[[Event], None]:
    """While paused, at the start of a phase, one server gets something else under the label."""

    def observe(event: Event) -> None:
        if isinstance(event, PhaseStarted) and event.phase == phase and event.version.step == 1:
            push(server, tensors, label=event.version.label)

    return observe


async def failed(
    p: genapi.WeightPublisher, source: genapi.weights.WeightSource, **more: Any
) -> PublishReport:
    with anyio.fail_after(120), pytest.raises(genapi.PublishError) as caught:
        await p.publish(1, source, **more)
    report = caught.value.report
    assert isinstance(report, PublishReport)
    print(f"\n{report}\n  probe_gap {report.probe_gap}")
    return report


async def restored(servers: Pair, models: Models) -> None:
    """Both serve seed 0 again, by the ordinary way back."""
    async with genapi.connect(target(*servers), run="restored") as fleet:
        await fleet.wait_ready(timeout_s=60)
        async with publisher(fleet) as p:
            report = await p.publish(9, weights(models.seed0))
            assert [r.verified for r in report.receipts] == [("label", "probe")] * 2


async def test_good_workers_agree_and_their_gap_to_transformers_is_rounding(
    vllm_pair: Pair, models: Models, scores: Callable[..., Any]
) -> None:
    async with genapi.connect(target(*vllm_pair), run="good") as fleet:
        await fleet.wait_ready(timeout_s=60)
        async with publisher(fleet, "checksum", "probe", probe_tolerance=0.0) as p:
            for step, folder in ((1, models.seed1), (2, models.seed0)):
                report = await p.publish(step, weights(folder), probe_logprobs=scores(folder, p))
                for receipt in report.receipts:
                    assert receipt.verified == ("label", "checksum", "probe")
                seconds = {t.phase: round(t.seconds, 3) for t in report.phases}
                blind = report.receipts[0].checksum_blind
                print(
                    f"\ngap to transformers {report.probe_gap:.2g} nats; blind {blind}; {seconds}"
                )
                assert report.probe_gap is not None
                assert report.probe_gap < 1e-4


@pytest.mark.parametrize("wrong", [one_layer, swapped_pair])
async def test_one_worker_with_a_layer_missing_or_a_pair_swapped_is_told_from_the_right_one(
    wrong: Callable[[Models], Tensors],
    vllm_pair: Pair,
    models: Models,
    oracle: Oracle,
    scores: Callable[..., Any],
) -> None:
    corrupt = corrupting(vllm_pair[1], wrong(models), phase="resume")
    replies: list[genapi.GenerateResponse] = []
    async with anyio.create_task_group() as group:

        def observe(event: Event) -> None:
            corrupt(event)
            if isinstance(event, PhaseStarted) and event.phase == "confirm":
                group.start_soon(ask)

        run = f"one-{wrong.__name__}"
        fleet = genapi.connect(target(*vllm_pair), run=run, observe=observe)

        async def ask() -> None:
            replies.append(await fleet.generate(request()))

        async with fleet:
            await fleet.wait_ready(timeout_s=60)
            judge = Judge(oracle, {1: models.seed1})
            async with publisher(fleet) as p:
                report = await failed(
                    p, weights(models.seed1), probe_logprobs=scores(models.seed1, p)
                )
            good, bad = report.receipts
            assert good.outcome is Outcome.COMMITTED
            assert good.fence is None
            assert bad.outcome is Outcome.DIRTY
            assert bad.evidence is Evidence.OTHER_SCORES
            assert bad.recovery is Recovery.REPUBLISH
            assert bad.fence is not None
            assert bad.fence.strength is FenceStrength.PAUSED
            assert (bad.probe_gap or 0) > 0.5
            sessions = [request(session=str(number)) for number in range(8)]
            replies += [await fleet.generate(asked) for asked in sessions]
            for reply in replies:
                assert reply.worker == good.worker
                judge.check(reply, PROMPT)
            judge.close()
    # Whoever comes along sees that the other one is not what it should be.
    async with genapi.connect(target(*vllm_pair), run=run) as other:
        workers = (await other.snapshot()).workers
        assert [w.fence is not None for w in workers] == [False, True]
        assert [w.paused for w in workers] == [False, True]
    await restored(vllm_pair, models)


@pytest.mark.parametrize("wrong", [one_layer, swapped_pair])
async def test_of_two_that_disagree_both_are_dirty_without_the_trainers_numbers(
    wrong: Callable[[Models], Tensors], vllm_pair: Pair, models: Models
) -> None:
    observe = corrupting(vllm_pair[1], wrong(models), phase="resume")
    run = f"two-{wrong.__name__}"
    async with genapi.connect(target(*vllm_pair), run=run, observe=observe) as fleet:
        await fleet.wait_ready(timeout_s=60)
        async with publisher(fleet) as p:
            report = await failed(p, weights(models.seed1))
            assert [r.outcome for r in report.receipts] == [Outcome.DIRTY] * 2
            assert [r.verified for r in report.receipts] == [("label",)] * 2
            with pytest.raises(genapi.FleetError):
                await fleet.generate(request(timeout_s=10))
    await restored(vllm_pair, models)


@pytest.mark.parametrize("wrong", [one_layer, swapped_pair])
async def test_workers_that_are_wrong_alike_are_caught_by_the_trainers_numbers(
    wrong: Callable[[Models], Tensors],
    vllm_pair: Pair,
    models: Models,
    scores: Callable[..., Any],
) -> None:
    tensors = load_file(models.seed1 / "model.safetensors")
    if wrong is one_layer:
        tensors = {name: t for name, t in tensors.items() if not name.startswith(LAYER)}
    else:
        tensors |= wrong(models)
    source = genapi.weights.from_tensors(tensors)
    async with genapi.connect(target(*vllm_pair), run=f"alike-{wrong.__name__}") as fleet:
        await fleet.wait_ready(timeout_s=60)
        async with publisher(fleet) as p:
            report = await failed(p, source, probe_logprobs=scores(models.seed1, p))
            assert [r.outcome for r in report.receipts] == [Outcome.DIRTY] * 2
            assert (report.probe_gap or 0) > 0.5
        async with publisher(fleet) as p:
            fooled = await p.publish(2, source)  # without them everything is well
            assert [r.verified for r in fooled.receipts] == [("label", "probe")] * 2
    await restored(vllm_pair, models)


async def test_a_worker_whose_scores_are_no_numbers_is_dirty_and_comes_back(
    vllm_pair: Pair, models: Models
) -> None:
    """Part of a fused weight: vLLM leaves the rest as it found the memory."""
    new = load_file(models.seed1 / "model.safetensors")
    broken = {FUSED: torch.full_like(new[FUSED], float("nan")), **{n: new[n] for n in PAIR}}
    observe = corrupting(vllm_pair[1], broken, phase="resume")
    async with genapi.connect(target(*vllm_pair), run="nan", observe=observe) as fleet:
        await fleet.wait_ready(timeout_s=60)
        async with publisher(fleet) as p:
            report = await failed(p, weights(models.seed1))
            assert [r.outcome for r in report.receipts] == [Outcome.COMMITTED, Outcome.DIRTY]
            assert "not numbers" in (report.receipts[1].error or "")
    await restored(vllm_pair, models)


async def test_a_worker_that_another_publisher_took_over_refuses_the_first_ones_update(
    vllm_pair: Pair, models: Models
) -> None:
    async with (
        genapi.connect(target(*vllm_pair), run="taken") as one,
        genapi.connect(target(*vllm_pair), run="taken") as two,
    ):
        await one.wait_ready(timeout_s=60)
        await two.wait_ready(timeout_s=60)
        async with publisher(one) as first, publisher(two) as second:
            await first.publish(0, weights(models.seed0))
            await second.publish(1, weights(models.seed1))
            began = anyio.current_time()
            with anyio.fail_after(60), pytest.raises(genapi.PublishError) as caught:
                await first.publish(2, weights(models.seed0))
            report = caught.value.report
            print(f"\nrefused after {anyio.current_time() - began:.1f} s\n{report}")
            assert isinstance(report, PublishReport)
            for receipt in report.receipts:
                assert receipt.recovery is Recovery.CLOSE_THEN_REPUBLISH
                assert "Invalid update_info: its digest is of the group" in (receipt.error or "")
            again = await first.publish(2, weights(models.seed0))
            assert [r.verified for r in again.receipts] == [("label", "probe")] * 2
    await restored(vllm_pair, models)


async def test_an_unknown_name_is_refused_before_a_byte_moves_and_else_by_the_engine(
    serve: Serve, models: Models
) -> None:
    tensors = load_file(models.seed1 / "model.safetensors")
    odd = genapi.weights.from_tensors({**tensors, "model.layers.7.odd.weight": torch.ones(2)})
    with serve(1) as (server,):
        async with genapi.connect(target(server), run="odd") as fleet:
            await fleet.wait_ready(timeout_s=60)
            async with publisher(fleet) as p:
                await p.publish(0, weights(models.seed0))
                report = await failed(p, odd)
                assert [r.outcome for r in report.receipts] == [Outcome.UNTOUCHED]
                assert [r.bytes_sent for r in report.receipts] == [0]
                assert "extra: 'model.layers.7.odd.weight'" in (report.error or "")
                assert (await fleet.generate(request())).output.is_complete
                report = await failed(p, odd, manifest_changed=True)
                assert [r.outcome for r in report.receipts] == [Outcome.DIRTY]
                assert [r.recovery for r in report.receipts] == [Recovery.RESTART_THEN_PUBLISH]


async def test_on_a_cpu_the_checksum_sees_embeddings_and_is_blind_for_linear_weights(
    vllm_pair: Pair, models: Models
) -> None:
    async with genapi.connect(target(*vllm_pair), run="blind") as fleet:
        await fleet.wait_ready(timeout_s=60)
        fleet.observe = corrupting(vllm_pair[1], swapped_pair(models), phase="verify")
        async with publisher(fleet, "checksum") as p:
            report = await p.publish(1, weights(models.seed1))
            assert [r.verified for r in report.receipts] == [("label", "checksum")] * 2
            print(f"\nblind for {report.receipts[0].checksum_blind} parameters")
            assert report.receipts[0].checksum_blind
    await restored(vllm_pair, models)
    name = "model.embed_tokens.weight"
    rows = {name: load_file(models.seed0 / "model.safetensors")[name]}
    observe = corrupting(vllm_pair[1], rows, phase="verify")
    async with genapi.connect(target(*vllm_pair), run="seen", observe=observe) as fleet:
        await fleet.wait_ready(timeout_s=60)
        async with publisher(fleet, "checksum") as p:
            report = await failed(p, weights(models.seed1))
            assert [r.outcome for r in report.receipts] == [Outcome.DIRTY] * 2
            assert [r.evidence for r in report.receipts] == [Evidence.OTHER_CHECKSUM] * 2
            for server in vllm_pair:
                assert server.request("GET", "/is_paused")[1]["is_paused"]
    await restored(vllm_pair, models)
    async with genapi.connect(target(*vllm_pair), run="restored") as fleet:
        assert len(await everywhere(fleet)) == 2
