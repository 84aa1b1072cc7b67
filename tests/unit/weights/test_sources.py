"""Sources built from tensors, modules and files hold references and can be read again."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genapi.errors import ConfigError
from genapi.weights import TensorMeta, WeightSource, from_module, from_safetensors, from_tensors

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

ALL_DTYPES = [
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
]


def read(source: WeightSource) -> dict[str, Any]:
    """What a source yields, checked against its manifest."""
    metas = source.manifest()
    got = dict(source)
    assert [m.name for m in metas] == list(got)
    for meta in metas:
        tensor = got[meta.name]
        assert str(tensor.dtype).removeprefix("torch.") == meta.dtype
        assert tuple(tensor.shape) == meta.shape
        assert tensor.nbytes == meta.nbytes
    return got


@pytest.mark.parametrize("name", ALL_DTYPES)
def test_the_size_of_a_tensor_is_what_torch_says(name: str) -> None:
    tensor = torch.empty((3, 5), dtype=getattr(torch, name))
    (meta,) = from_tensors({"w": tensor}).manifest()
    assert meta == TensorMeta(name="w", dtype=name, shape=(3, 5))
    assert meta.nbytes == tensor.nbytes


def test_a_dtype_without_a_known_width_is_named() -> None:
    with pytest.raises(ConfigError, match="'w' has the dtype 'int4'"):
        TensorMeta(name="w", dtype="int4", shape=(2,)).nbytes  # noqa: B018 - the access is the test


def test_tensors_keep_the_mappings_order_and_are_not_copied() -> None:
    weights = {"z": torch.ones(2), "a": np.zeros((2, 3), np.float32), "scalar": np.zeros(())}
    source = from_tensors(weights)
    assert [m.name for m in source.manifest()] == ["z", "a", "scalar"]
    assert all(tensor is weights[name] for name, tensor in source)
    assert read(source).keys() == read(source).keys()


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        pytest.param(
            [("w", np.ones(1)), ("w", np.ones(1))], "'w' comes more than once", id="twice"
        ),
        pytest.param({"w": [1.0]}, "'w' is a list: weights are torch tensors", id="list"),
        pytest.param({1: np.ones(1)}, "1 is no name", id="number"),
        pytest.param({"": np.ones(1)}, "'' is no name", id="no name"),
        pytest.param({"w": torch.empty(1, device="meta")}, "'w' is on the meta device", id="meta"),
        pytest.param({"w": torch.ones(2).to_sparse()}, "'w' is torch.sparse_coo", id="sparse"),
    ],
)
def test_what_is_no_set_of_weights_is_refused_at_once(tensors: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        from_tensors(tensors)


def test_a_sharded_parameter_is_refused_with_the_remedy() -> None:
    class Sharded(torch.Tensor):  # type: ignore[misc,name-defined]
        def full_tensor(self) -> Any:
            return self

    with pytest.raises(ConfigError, match=r"'w' is sharded .*full_tensor\(\)"):
        from_tensors({"w": torch.ones(2).as_subclass(Sharded)})


class Tied(torch.nn.Module):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(4, 2)
        self.head = torch.nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("cache", torch.ones(1), persistent=False)

    def get_extra_state(self) -> Mapping[str, int]:
        return {"step": 1}

    def set_extra_state(self, state: Mapping[str, int]) -> None:
        pass


def test_a_module_gives_parameters_and_persistent_buffers_also_tied_ones() -> None:
    module = Tied()
    got = read(from_module(module))
    assert list(got) == ["scale", "embed.weight", "head.weight"]
    assert got["head.weight"].data_ptr() == module.embed.weight.data_ptr()
    assert not got["head.weight"].requires_grad


def test_a_module_is_read_anew_each_time() -> None:
    module = torch.nn.Linear(2, 1)
    source = from_module(module)
    before = read(source)["weight"].clone()
    with torch.no_grad():
        module.weight.add_(1.0)
    assert torch.equal(read(source)["weight"], before + 1.0)
    module.to(torch.bfloat16)
    assert {m.dtype for m in source.manifest()} == {"bfloat16"}


def weights(*names: str, dtype: Any = torch.float32) -> dict[str, Any]:
    return {name: torch.full((2, 3), float(i + 1)).to(dtype) for i, name in enumerate(names)}


def save(tensors: Mapping[str, Any], file: Path) -> None:
    safetensors_torch.save_file(dict(tensors), file)


def save_index(directory: Path, places: Mapping[str, str]) -> None:
    index = {"metadata": {}, "weight_map": dict(places)}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "dtype", ["bool", "int64", "uint16", "float32", "bfloat16", "float8_e4m3fn", "complex64"]
)
def test_a_file_gives_what_was_saved(tmp_path: Path, dtype: str) -> None:
    saved = weights("b", "a", dtype=getattr(torch, dtype))
    save(saved, tmp_path / "model.safetensors")
    source = from_safetensors(tmp_path / "model.safetensors")
    for _ in range(2):
        got = read(source)
        assert got.keys() == saved.keys()
        for name, tensor in saved.items():
            assert torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8))


def test_tensors_of_a_file_outlive_the_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save(weights("w"), file)
    (pair,) = from_safetensors(str(file))
    file.write_bytes(b"\0" * file.stat().st_size)
    assert torch.equal(pair[1], torch.full((2, 3), 1.0))


def test_a_directory_gives_the_shards_that_its_index_names(tmp_path: Path) -> None:
    save(weights("a", "b"), tmp_path / "one.safetensors")
    save(weights("c"), tmp_path / "two.safetensors")
    save(weights("a", "b", "c"), tmp_path / "consolidated.safetensors")
    save_index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"})
    assert list(read(from_safetensors(tmp_path))) == ["a", "b", "c"]


def test_a_directory_without_an_index_gives_all_its_files(tmp_path: Path) -> None:
    save(weights("c"), tmp_path / "2.safetensors")
    save(weights("a"), tmp_path / "1.safetensors")
    assert list(read(from_safetensors(tmp_path))) == ["a", "c"]
    save(weights("a"), tmp_path / "3.safetensors")
    with pytest.raises(ConfigError, match="'a' comes more than once"):
        from_safetensors(tmp_path).manifest()


@pytest.mark.parametrize(
    ("index", "complaint"),
    [
        pytest.param({"a": "one.safetensors"}, "disagree about tensor 'b'", id="more than named"),
        pytest.param(
            {"a": "one.safetensors", "b": "one.safetensors", "z": "one.safetensors"},
            "disagree about tensor 'z'",
            id="less than named",
        ),
        pytest.param(
            {"a": "one.safetensors", "b": "one.safetensors", "z": "gone.safetensors"},
            r"cannot read .*gone\.safetensors",
            id="no such shard",
        ),
    ],
)
def test_an_index_that_does_not_match_its_shards_is_refused(
    tmp_path: Path, index: dict[str, str], complaint: str
) -> None:
    save(weights("a", "b"), tmp_path / "one.safetensors")
    save_index(tmp_path, index)
    with pytest.raises(ConfigError, match=complaint):
        from_safetensors(tmp_path).manifest()


def test_what_is_no_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.safetensors"):
        from_safetensors(tmp_path / "none.safetensors").manifest()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors file in"):
        from_safetensors(tmp_path).manifest()
    (tmp_path / "pickle.safetensors").write_bytes(b"\x80\x02}q\x00." * 9)
    with pytest.raises(ConfigError, match=r"cannot read .*pickle\.safetensors as safetensors"):
        from_safetensors(tmp_path / "pickle.safetensors").manifest()
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ConfigError, match="no index of safetensors shards"):
        from_safetensors(tmp_path).manifest()


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from genapi.weights import from_safetensors
source = from_safetensors(sys.argv[1])
print([str(m) for m in source.manifest()])
print([(name, type(array).__name__, array.tolist()) for name, array in source])
"""


def test_files_are_read_as_numpy_arrays_where_torch_is_missing(tmp_path: Path) -> None:
    def run(file: Path) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", WITHOUT_TORCH, str(file)]
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)

    save({"w": torch.tensor([1.0, 2.0])}, tmp_path / "f32.safetensors")
    assert run(tmp_path / "f32.safetensors").stdout.splitlines() == [
        "[\"'w' float32 [2]\"]",
        "[('w', 'ndarray', [1.0, 2.0])]",
    ]
    save({"w": torch.tensor([1.0], dtype=torch.bfloat16)}, tmp_path / "bf16.safetensors")
    done = run(tmp_path / "bf16.safetensors")
    assert done.stdout == "[\"'w' bfloat16 [1]\"]\n"
    assert "'w' is BF16, which numpy lacks: install genapi with its extra 'torch'" in done.stderr
