"""Adapters on a real vLLM: what its spans say of them is not to be believed."""

from __future__ import annotations

import http
import json
from typing import TYPE_CHECKING

import anyio
import pytest
import torch
from safetensors.torch import save_file

import genapi
from tests.engines.test_vllm import publisher, request, target

if TYPE_CHECKING:
    import pathlib

    from tests.engines.conftest import Serve
    from tests.engines.kit.server import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.anyio]

RANK, HIDDEN, HEADS, LAYERS = 8, 64, 128, 2  # of the tiny model


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def write_adapter(folder: pathlib.Path, *, seed: int) -> pathlib.Path:
    folder.mkdir()
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=draw)
        tensors[f"{name}.lora_B.weight"] = torch.randn(HEADS, RANK, generator=draw)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def post(server: Server, path: str, **body: object) -> None:
    status, reply = server.request("POST", path, body)
    assert status == http.HTTPStatus.OK, reply


def load(server: Server, folder: pathlib.Path, *, in_place: bool) -> None:
    adapter = {"lora_name": "policy", "lora_path": str(folder)}
    post(server, "/v1/load_lora_adapter", **adapter, load_inplace=in_place)


async def test_an_adapter_replaced_under_a_request_is_in_its_tokens_and_its_trace_is_unknown(
    serve: Serve, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM attests one span of the base weights' label over tokens of two adapters."""
    first, second = (write_adapter(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    with serve(1, flags=["--enable-lora", f"--max-lora-rank={RANK}"]) as (server,):
        load(server, first, in_place=False)
        async with genapi.connect(target(server), run="lora") as fleet:
            await fleet.wait_ready(timeout_s=60)
            async with publisher(fleet) as p:
                await p.adopt(0)
            asked = request(tokens=3000, lora="policy")
            alone = (await fleet.generate(asked)).output
            replies = []

            async def ask() -> None:
                replies.append(await fleet.generate(asked))

            async with anyio.create_task_group() as group:
                group.start_soon(ask)
                await server.generating(1)
                post(server, "/pause?mode=keep&clear_cache=false")  # however quick it is
                load(server, second, in_place=True)
                post(server, "/resume")
        out = replies[0].output
        assert out.token_ids[:1] == alone.token_ids[:1]
        assert out.token_ids != alone.token_ids
        for trace in (out.policy, alone.policy):
            assert trace.oldest is None
            assert not any(span.is_attested for span in trace.spans)
