"""The vLLM backend without vLLM: what it does to a model, and what it needs to be imported."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from genapi.engine_side.vllm import BACKEND, GlooBackend, InitInfo, UpdateInfo
from genapi.weights._gloo_group import GlooGroup, GroupError, Parcel, pack

LIMIT_S = 20.0


class Model:
    """Stands in for the engine's model: keeps what it is given, or refuses it."""

    def __init__(self, refuses: str | None = None) -> None:
        self.refuses = refuses
        self.loaded: dict[str, torch.Tensor] = {}

    def load_weights(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            if name == self.refuses:
                raise ValueError(f"{name} does not fit")
            self.loaded[name] = tensor


def backend(model: Model, *, rank: int = 0, world_size: int = 1, replica: int = 0) -> GlooBackend:
    made = GlooBackend()
    made.model = model
    made.device = torch.device("cpu")
    made.parallel_config = SimpleNamespace(
        rank=rank, world_size=world_size, data_parallel_index=replica
    )
    return made


def join(
    group: GlooGroup, *receivers: GlooBackend, rank_offset: int = 1, digest: str | None = None
) -> None:
    world_size = 1 + len(receivers)
    info = InitInfo(
        master_address=group.host,
        master_port=group.port,
        rank_offset=rank_offset,
        world_size=world_size,
        timeout_s=LIMIT_S,
        digest=digest,
    )
    with ThreadPoolExecutor(len(receivers)) as pool:
        joining = [pool.submit(r.init_transfer_engine, info) for r in receivers]
        group.join(world_size, timeout_s=LIMIT_S)
        for future in joining:
            future.result()


def described(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        "names": list(tensors),
        "dtype_names": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
        "shapes": [list(t.shape) for t in tensors.values()],
    }


def parcel(tensors: dict[str, torch.Tensor]) -> Parcel:
    data = list(tensors.values())
    return pack(data, described(tensors), packed=False, packed_buffer_size_bytes=0)


def update(
    group: GlooGroup,
    tensors: dict[str, torch.Tensor],
    *receivers: GlooBackend,
    digest: str | None = None,
) -> None:
    info = UpdateInfo(**described(tensors), digest=digest)
    with ThreadPoolExecutor(len(receivers)) as pool:
        receiving = [pool.submit(r.receive_weights, info) for r in receivers]
        try:
            group.send(parcel(tensors), timeout_s=LIMIT_S)
        finally:
            for future in receiving:
                future.result(LIMIT_S)


def test_ranks_follow_the_engines_own_formula_over_tensor_and_data_parallel_workers() -> None:
    group = GlooGroup("127.0.0.1")
    receivers = [
        backend(Model(), rank=rank, world_size=2, replica=replica)
        for replica in (0, 1)
        for rank in (0, 1)
    ]
    join(group, *receivers)  # would not form if two had the same rank
    tensors = {"a": torch.arange(3.0), "b": torch.arange(4, dtype=torch.bfloat16)}
    update(group, tensors, *receivers)
    group.abandon()
    for receiver in receivers:
        assert receiver.model.loaded.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(receiver.model.loaded[name], tensor)
        receiver.shutdown()


def test_a_tensor_that_the_model_refuses_ends_the_group_for_everybody() -> None:
    group = GlooGroup("127.0.0.1")
    refusing, fine = backend(Model("b"), rank=0), backend(Model(), rank=1)
    join(group, refusing, fine)
    with pytest.raises(ValueError, match="b does not fit") as failure:
        update(group, {"a": torch.ones(1), "b": torch.ones(1), "c": torch.ones(1)}, refusing, fine)
    assert isinstance(failure.value.__context__, GroupError)
    again = UpdateInfo(names=["a"], dtype_names=["float32"], shapes=[[1]])
    for receiver in (refusing, fine):
        with pytest.raises(RuntimeError, match="there is no update group"):
            receiver.receive_weights(again)


@pytest.mark.parametrize("other", ["h:p", "g:q", None])
def test_a_bucket_that_is_not_what_was_agreed_is_refused_and_ends_the_group(
    other: str | None,
) -> None:
    group, model = GlooGroup("127.0.0.1"), Model()
    receiver = backend(model)
    join(group, receiver, digest="g")
    update(group, {"a": torch.ones(1)}, receiver, digest="g:p")
    with pytest.raises(ValueError, match="Invalid update_info: its digest") as failure:
        update(group, {"b": torch.ones(1)}, receiver, digest=other)
    assert isinstance(failure.value.__context__, GroupError)
    assert list(model.loaded) == ["a"]


def test_joining_again_replaces_the_group() -> None:
    receiver = backend(Model())
    first, second = GlooGroup("127.0.0.1"), GlooGroup("127.0.0.1")
    join(first, receiver)
    join(second, receiver)
    update(second, {"a": torch.ones(1)}, receiver)
    with pytest.raises(GroupError):
        first.send(parcel({"a": torch.ones(1)}), timeout_s=LIMIT_S)
    second.abandon()
    receiver.shutdown()
    receiver.shutdown()


def test_the_fields_are_those_of_the_nccl_backend_a_limit_and_a_digest() -> None:
    names = set(InitInfo.__dataclass_fields__)
    assert names == {
        "master_address",
        "master_port",
        "rank_offset",
        "world_size",
        "packed",
        "packed_buffer_size_bytes",
        "packed_num_buffers",
        "timeout_s",
        "digest",
    }
    described = {"names", "dtype_names", "shapes"}
    assert set(UpdateInfo.__dataclass_fields__) == described | {"timeout_s", "digest"}
    assert BACKEND == "genapi_gloo"


ALONE = """
import sys
from importlib.abc import MetaPathFinder

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(name + " is not there")

sys.meta_path.insert(0, Refuse())
import genapi.engine_side.receiver, genapi.engine_side.vllm
print(sorted(m for m in sys.modules if m.partition(".")[0] == "genapi"))
"""


def test_it_is_imported_where_there_is_torch_and_nothing_else_of_ours() -> None:
    names = ("aiohttp", "anyio", "httpx", "msgspec", "numpy", "pydantic", "safetensors", "vllm")
    script = ALONE.replace("{names!r}", repr(names))
    done: Any = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=LIMIT_S * 2,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(
        ["genapi", "genapi.engine_side", "genapi.engine_side.receiver", "genapi.engine_side.vllm"]
    )
