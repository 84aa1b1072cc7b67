"""`Gloo` towards receivers that an engine has of its own: a process group as torch makes it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

from genapi.errors import ConfigError, TransportError
from genapi.providers.registry import provider
from genapi.weights import Gloo, Memory, TensorMeta
from genapi.weights.base import Bucket, Sender

torch = pytest.importorskip("torch")

LIMIT_S = 20.0
# As engines join: torch's own rendezvous and its own helper, which put prefixes before the keys.
RECEIVER = """
import json, sys
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    Backend, PrefixStore, _new_process_group_helper, _world, default_pg_timeout, rendezvous)

def answer(**content):
    print(json.dumps(content), flush=True)

def join(address, port, rank, world_size, backend, name):
    store, rank, world_size = next(
        rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=default_pg_timeout))
    group, _ = _new_process_group_helper(
        world_size, rank, [], Backend(backend), PrefixStore(name, store),
        group_name=name, timeout=default_pg_timeout, backend_options=None)
    _world.pg_group_ranks[group] = {r: r for r in range(world_size)}
    return group

group = join(*json.loads(sys.stdin.readline()))
answer(joined=True)
for line in sys.stdin:
    info = json.loads(line)
    dtypes = [getattr(torch, name) for name in info["dtype_names"]]
    try:
        if info["packed"]:
            sizes = [torch.Size(s).numel() * d.itemsize
                     for s, d in zip(info["shapes"], dtypes)]
            flat = torch.empty(sum(sizes), dtype=torch.uint8)
            dist.broadcast(flat, src=0, group=group)
            tensors = [part.view(d) for part, d in zip(flat.split(sizes), dtypes)]
        else:
            tensors = [torch.empty(s, dtype=d) for s, d in zip(info["shapes"], dtypes)]
            work = [dist.broadcast(t, src=0, group=group, async_op=True) for t in tensors]
            for each in work:
                each.wait()
    except RuntimeError as error:
        answer(error=str(error))
        continue
    held = [t.reshape(-1).view(torch.uint8).tolist() for t in tensors]
    answer(received=dict(zip(info["names"], held)))
"""


class Receiver:
    """A process with torch alone."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RECEIVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, question: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()

    async def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        with anyio.fail_after(LIMIT_S):
            line = await anyio.to_thread.run_sync(
                self.process.stdout.readline, abandon_on_cancel=True
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


@pytest.fixture
def receivers() -> Iterator[list[Receiver]]:
    started = [Receiver() for _ in range(2)]
    yield started
    for receiver in started:
        receiver.process.kill()
        with receiver.process:
            pass


def towards_sglang(**settings: Any) -> Any:
    return Gloo(**settings).towards(provider("sglang").administer(None).receivers)


async def joined(transport: Any, receivers: list[Receiver]) -> Sender:
    sender: Sender = await transport.sender(world_size=1 + len(receivers), timeout_s=LIMIT_S)
    info = sender.init_info
    for rank, receiver in enumerate(receivers, start=1):
        place = [info["master_address"], info["master_port"], rank, info["world_size"]]
        receiver.ask([*place, transport.backend, "genapi"])
    await sender.join()
    assert [await r.answer() for r in receivers] == [{"joined": True}] * len(receivers)
    return sender


def bucket(**tensors: Any) -> Bucket:
    metas = [
        TensorMeta(name=name, dtype=str(t.dtype).removeprefix("torch."), shape=tuple(t.shape))
        for name, t in tensors.items()
    ]
    return Bucket(tuple(metas), tuple(tensors.values()))


def content(tensor: Any) -> list[int]:
    held = tensor if isinstance(tensor, torch.Tensor) else torch.tensor(tensor)
    listed: list[int] = held.contiguous().reshape(-1).view(torch.uint8).tolist()
    return listed


MIXED = {
    "flags": torch.tensor([True, False, True]),
    "small": torch.arange(3, dtype=torch.bfloat16),
    "wide": torch.arange(10, dtype=torch.float64).reshape(5, 2).t(),
    "none": torch.zeros(0, 4),
    "array": np.arange(5, dtype=np.float32),
}


@pytest.mark.parametrize("packed", [True, False])
async def test_receivers_of_torchs_own_get_every_byte_of_mixed_dtypes(
    packed: bool, receivers: list[Receiver]
) -> None:
    sender = await joined(towards_sglang(packed=packed), receivers)
    try:
        for sent in (MIXED, {"none": MIXED["none"]}, {"last": torch.ones(7)}):
            called = sender.wire(bucket(**sent), in_process=False).update_info
            for receiver in receivers:
                receiver.ask(called)
            await sender.send(bucket(**sent))
            expected = {name: content(tensor) for name, tensor in sent.items()}
            for receiver in receivers:
                assert await receiver.answer() == {"received": expected}
    finally:
        await sender.aclose()


async def test_a_packed_bucket_begins_every_tensor_at_a_multiple_of_its_elements(
    receivers: list[Receiver],
) -> None:
    sender = await towards_sglang().sender(world_size=2, timeout_s=LIMIT_S)
    try:
        info = sender.wire(bucket(**MIXED), in_process=False).update_info
        assert info["names"] == ["wide", "none", "array", "small", "flags"]
        assert info["dtype_names"] == ["float64", "float32", "float32", "bfloat16", "bool"]
        assert info["packed"] is True
    finally:
        await sender.aclose()


async def test_receivers_of_torchs_own_fail_at_once_when_the_sender_leaves(
    receivers: list[Receiver],
) -> None:
    sender = await joined(towards_sglang(), receivers)
    info = sender.wire(bucket(**MIXED), in_process=False).update_info
    for receiver in receivers:
        receiver.ask(info)
    await sender.aclose()
    for receiver in receivers:
        assert "error" in await receiver.answer()
    with pytest.raises(TransportError, match="abandoned"):
        await sender.send(bucket(**MIXED))


def test_one_transport_serves_both_kinds_of_receivers() -> None:
    gloo = Gloo(bucket_bytes=1 << 20, timeout_s=7)
    assert gloo.towards(provider("vllm").administer(None).receivers) is gloo
    plain = towards_sglang(bucket_bytes=1 << 20, timeout_s=7)
    assert (plain.backend, plain.acknowledges, plain.digests) == ("gloo", False, False)
    assert (plain.bucket_bytes, plain.timeout_s) == (1 << 20, 7)
    memory = Memory()
    assert memory.towards(provider("sglang").administer(None).receivers) is memory


def test_a_dtype_that_gloo_does_not_broadcast_travels_packed_only() -> None:
    manifest = [TensorMeta(name="w", dtype="float8_e4m3fn", shape=(2,))]
    towards_sglang().check(manifest, in_process=False)
    with pytest.raises(ConfigError, match=r"'w' float8_e4m3fn.*packed=True"):
        towards_sglang(packed=False).check(manifest, in_process=False)
