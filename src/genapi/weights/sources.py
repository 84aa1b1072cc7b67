"""Weights to publish out of tensors, a module or safetensors files.

The rule of this file: a source holds references, never a snapshot. Values are read when the
source is iterated, and again the next time.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from genapi.errors import ConfigError
from genapi.weights._tensors import FROM_SAFETENSORS, describe
from genapi.weights.base import TensorMeta, WeightSource

__all__ = ("from_module", "from_safetensors", "from_tensors")

_INDEX = "model.safetensors.index.json"
_NUMPY_HAS = frozenset(
    {"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "F32", "F64", "C64"}
)


class _Module(Protocol):
    def state_dict(self) -> Mapping[str, Any]: ...


def from_tensors(
    tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
) -> WeightSource:
    """A source of these tensors, in this order.

    Names and tensors are taken now, what they hold is read while a publication runs: they must
    not change until it has ended. Tensors that share storage are sent under each name.

    Args:
        tensors: torch tensors or numpy arrays by checkpoint name, or `(name, tensor)` pairs.

    Raises:
        ConfigError: a name comes twice or is no text, or a value is no dense tensor.
    """
    pairs = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    _check_names([name for name, _ in pairs])
    for name, tensor in pairs:
        describe(name, tensor)
    return _Tensors(pairs)


def from_module(module: _Module) -> WeightSource:
    """A source of what `module.state_dict()` holds: parameters and persistent buffers.

    Nothing is copied and no snapshot is taken: each iteration reads the module as it is then, so
    an optimizer must not step while a publication runs. Tied parameters are sent under each name.
    Extra state, which no engine knows, is left out.

    Args:
        module: a `torch.nn.Module` whose names are the checkpoint's and whose parameters are
            whole; gather sharded ones in a source of your own.
    """
    return _ModuleSource(module)


def from_safetensors(path: str | PathLike[str]) -> WeightSource:
    """A source of safetensors files, one tensor in memory at a time.

    The manifest is read from the headers. Without torch, dtypes that numpy has are read as numpy
    arrays.

    Args:
        path: one file, or a directory: the shards that its `model.safetensors.index.json` names,
            or, without an index, all its `*.safetensors` files.

    Raises:
        ConfigError: safetensors is not installed. While reading: no such file, a broken header,
            shards that do not match the index, a dtype that needs torch.
    """
    try:
        import safetensors  # noqa: F401, PLC0415 - whether it is installed
    except ImportError:
        raise ConfigError(
            "reading safetensors needs a package more: install genapi with its extra 'torch'"
        ) from None
    return _Safetensors(Path(path))


def _check_names(names: Sequence[object]) -> None:
    for name in names:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{name!r} is no name of a tensor: names are text")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigError(f"tensor {twice[0]!r} comes more than once: names are unique")


def _meta(name: str, tensor: Any) -> TensorMeta:
    dtype, shape = describe(name, tensor)
    return TensorMeta(name=name, dtype=dtype, shape=shape)


class _Tensors:
    def __init__(self, pairs: Sequence[tuple[str, Any]]) -> None:
        self._pairs = pairs

    def manifest(self) -> tuple[TensorMeta, ...]:
        return tuple(_meta(name, tensor) for name, tensor in self._pairs)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self._pairs)


class _ModuleSource:
    def __init__(self, module: _Module) -> None:
        self._module = module

    def manifest(self) -> tuple[TensorMeta, ...]:
        return tuple(_meta(name, tensor) for name, tensor in self)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for name, tensor in self._module.state_dict().items():
            if name.rpartition(".")[2] != "_extra_state":
                yield name, tensor


class _Safetensors:
    def __init__(self, path: Path) -> None:
        self._path = path

    def manifest(self) -> tuple[TensorMeta, ...]:
        metas = [meta for shard in self._shards() for meta in shard.metas()]
        _check_names([meta.name for meta in metas])
        return tuple(metas)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for shard in self._shards():
            yield from shard.tensors()

    def _shards(self) -> list["_Shard"]:
        if not self._path.is_dir():
            return [_Shard(self._path)]
        index = self._path / _INDEX
        if not index.exists():
            found = sorted(self._path.glob("*.safetensors"))
            if not found:
                raise ConfigError(f"no *.safetensors file in {self._path}")
            return [_Shard(file) for file in found]
        try:
            places: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{index} is no index of safetensors shards: {error!r}") from None
        return [
            _Shard(self._path / file, {name for name, place in places.items() if place == file})
            for file in sorted(set(places.values()))
        ]


class _Shard:
    """One file; `expected` is what the index says it holds."""

    def __init__(self, file: Path, expected: AbstractSet[str] | None = None) -> None:
        self._file = file
        self._expected = expected

    def metas(self) -> list[TensorMeta]:
        metas = []
        with self._open("numpy") as shard:
            for name in shard.keys():  # noqa: SIM118 - it has no other iteration
                header = shard.get_slice(name)
                dtype = FROM_SAFETENSORS.get(header.get_dtype())
                if dtype is None:
                    raise ConfigError(
                        f"{self._file}: tensor {name!r} has the dtype {header.get_dtype()!r}; "
                        f"those that can be published are {', '.join(FROM_SAFETENSORS)}"
                    )
                metas.append(TensorMeta(name=name, dtype=dtype, shape=header.get_shape()))
        names = {meta.name for meta in metas}
        if self._expected is not None and names != self._expected:
            name = min(names ^ self._expected)
            raise ConfigError(
                f"{self._file} and {_INDEX} beside it disagree about tensor {name!r}: "
                "the directory holds parts of different checkpoints"
            )
        return metas

    def tensors(self) -> Iterator[tuple[str, Any]]:
        has_torch = find_spec("torch") is not None
        with self._open("pt" if has_torch else "numpy") as shard:
            for name in shard.keys():  # noqa: SIM118 - it has no other iteration
                if has_torch:
                    # A copy: what is only mapped would be read while the fleet is paused, and
                    # would change with the file.
                    yield name, shard.get_tensor(name).clone()
                    continue
                dtype = shard.get_slice(name).get_dtype()
                if dtype not in _NUMPY_HAS:
                    raise ConfigError(
                        f"{self._file}: tensor {name!r} is {dtype}, which numpy lacks: "
                        "install genapi with its extra 'torch'"
                    )
                yield name, shard.get_tensor(name)

    @contextmanager
    def _open(self, framework: str) -> Iterator[Any]:
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - an extra

        try:
            with safe_open(self._file, framework=framework) as shard:
                yield shard
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"cannot read {self._file} as safetensors: {error}") from error
