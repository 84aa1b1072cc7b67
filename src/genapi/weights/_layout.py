"""How weights lie in safetensors files: which tensor in which shard, and where in it.

The rule of this file: everything follows from the manifest, so that each tensor can be written
when it comes, and no byte of one is looked at. A file is eight bytes of length, that much JSON,
and the bytes of the tensors.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from genapi.errors import ConfigError
from genapi.weights._tensors import FROM_SAFETENSORS, element_bytes
from genapi.weights.base import TensorMeta

__all__ = ("INDEX", "Shard", "check_storable", "index_of", "plan_shards")

INDEX = "model.safetensors.index.json"

_ALIGNED = 8
_METADATA = "__metadata__"
_SHORT = {name: short for short, name in FROM_SAFETENSORS.items()}


@dataclass(frozen=True, slots=True)
class Shard:
    """One file.

    Attributes:
        name: of the file.
        head: its first bytes, up to the first tensor.
        starts: where each tensor begins in the file, in the order of the manifest.
        size: of the whole file in bytes.
    """

    name: str
    head: bytes
    starts: tuple[tuple[TensorMeta, int], ...]
    size: int


def check_storable(manifest: Sequence[TensorMeta]) -> None:
    """Raise `ConfigError` for a tensor that a safetensors file cannot hold."""
    for meta in manifest:
        if meta.dtype not in _SHORT:
            raise ConfigError(
                f"tensor {meta.name!r} is {meta.dtype}, which safetensors files have no name for; "
                f"cast it to one of {', '.join(_SHORT)}"
            )
        if meta.name == _METADATA:
            raise ConfigError(f"safetensors files cannot hold a tensor called {_METADATA!r}")


def plan_shards(manifest: Sequence[TensorMeta], *, shard_bytes: int) -> tuple[Shard, ...]:
    """The files of these tensors, in order; one tensor larger than `shard_bytes` is alone."""
    parts: list[list[TensorMeta]] = [[]]
    held = 0
    for meta in manifest:
        if parts[-1] and held + meta.nbytes > shard_bytes:
            parts.append([])
            held = 0
        parts[-1].append(meta)
        held += meta.nbytes
    return tuple(_shard(part, number, len(parts)) for number, part in enumerate(parts, 1))


def index_of(shards: Sequence[Shard]) -> bytes | None:
    """What `INDEX` says of several shards; one alone needs none."""
    if len(shards) == 1:
        return None
    places = {meta.name: shard.name for shard in shards for meta, _ in shard.starts}
    total = sum(meta.nbytes for shard in shards for meta, _ in shard.starts)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=1).encode()


def _shard(metas: Sequence[TensorMeta], number: int, of: int) -> Shard:
    # Larger elements first: then each tensor begins at a multiple of the size of its own.
    header: dict[str, object] = {_METADATA: {"format": "pt"}}  # transformers asks for it
    begins: dict[str, int] = {}
    end = 0
    for meta in sorted(metas, key=lambda meta: -element_bytes(meta.dtype, name=meta.name)):
        begins[meta.name], end = end, end + meta.nbytes
        header[meta.name] = {
            "dtype": _SHORT[meta.dtype],
            "shape": list(meta.shape),
            "data_offsets": [begins[meta.name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    head = len(text).to_bytes(8, "little") + text
    name = "model.safetensors" if of == 1 else f"model-{number:05}-of-{of:05}.safetensors"
    starts = tuple((meta, len(head) + begins[meta.name]) for meta in metas)
    return Shard(name, head, starts, len(head) + end)
