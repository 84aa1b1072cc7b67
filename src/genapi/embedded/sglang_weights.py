"""The scheduler side of SGLang's weight updates: sessions, groups, and what a failure leaves.

Every call loads into the live weights at once, so a request between two calls, or after a trainer
died, runs on a mixture. A session only says when calls are allowed. Names that the model does not
have are ignored. The backend is `genapi_memory`: tensors come with the call, as base64 or by
reference, instead of through a broadcast; they are all received before the first one is loaded.
Every method is one effect between two steps and returns what the scheduler says of it.
"""

import io
import math
import pickle
from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checkpoint import DTYPES, from_bytes, read_checkpoint
from .engine import Engine, Pause
from .sglang_facts import BACKEND

__all__ = ("Outcome", "UpdateOptions", "WeightUpdater", "engine_checksum", "rank_checksum")

Outcome = tuple[bool, str]
_LOST = (
    "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:3992. This is "
    "typically caused by a remote worker crashing. Check the logs of the remote worker before "
    "reporting an error."
)
_LOADABLE = ("_reconstruct", "_frombuffer", "ndarray", "dtype")
_STALE = (
    "Weights were updated, but the cache was not flushed because requests are still running or "
    "queued. Retract or finish them, then call /flush_cache."
)


@dataclass(slots=True)
class _Group:
    """An update group that was joined."""

    digest: str | None
    broken: bool = False


@dataclass(frozen=True, slots=True)
class UpdateOptions:
    """What every kind of update takes."""

    weight_version: str | None
    flush_cache: bool


class _LoadError(Exception):
    """A tensor that does not fit; those before it are in."""


class WeightUpdater:
    """Weight state of one scheduler.

    Args:
        engine: Whose weights.
        ranks: Ranks that the server takes in a group.
        stages: Pipeline stages; the ranks of the second would be those of the first.
        crash: Ends the process for a reason that no reply can tell.
    """

    def __init__(
        self, engine: Engine, *, ranks: int, stages: int, crash: Callable[[str], Exception]
    ) -> None:
        self._engine = engine
        self._ranks = ranks
        self._stages = stages
        self._crash = crash
        self._groups: dict[str, _Group] = {}
        self._open = False
        self._plan: str | None = None
        self._released: set[str] = set()
        self._snapshot: dict[str, NDArray[np.float32]] | None = None

    # sessions and groups

    def begin(self) -> Outcome:
        """Open a session; nothing happens to the weights."""
        if self._open:
            return False, (
                "a weight-update session is already open; call end_weight_update() first"
            )
        self._open = True
        self._plan = None
        return True, "Success"

    def end(self) -> Outcome:
        """Close the session, whatever came in it."""
        if not self._open:
            return False, "no weight-update session is open; call begin_weight_update() first"
        self._open = False
        return True, "Success"

    def join(self, body: Mapping[str, Any]) -> Outcome:
        """Join a group under a name that no other group of the process has."""
        name, failed = body["group_name"], "Failed to initialize custom process group:"
        if name in self._groups:
            return False, (
                f"{failed} The specified group name has already been created, please use a "
                "different group name."
            )
        if body["backend"] != BACKEND:
            return False, (
                f"{failed} an embedded engine has no backend {body['backend']!r}, only {BACKEND!r}."
            )
        if self._stages > 1:
            return False, f"{failed} {self._stages} pipeline stages would have the same ranks."
        first, world = body["rank_offset"], body["world_size"]
        if not 1 <= first <= first + self._ranks - 1 < world:
            return False, (
                f"{failed} ranks {first} to {first + self._ranks - 1} are not those of a receiver "
                f"in a group of {world}."
            )
        self._groups[name] = _Group(body.get("digest"))
        return True, "Succeeded to initialize custom process group."

    def leave(self, name: str) -> Outcome:
        """Leave a group, also one whose other end is gone."""
        if self._groups.pop(name, None) is None:
            return False, "The group to be destroyed does not exist."
        return True, "Succeeded to destroy custom process group."

    # updates

    def from_group(
        self,
        body: Mapping[str, Any],
        options: UpdateOptions,
        *,
        arrays: Sequence[Any] | None,
        lost: bool,
    ) -> Outcome:
        """Receive tensors through a group and load them; `lost`: the sender goes away."""
        if not self._open:
            return False, (
                "update_weights_from_distributed must run between begin_weight_update() and "
                "end_weight_update()"
            )
        try:
            tensors = self._receive(body, arrays, lost=lost)
        except (ValueError, TypeError, AttributeError, ConnectionError) as error:
            return False, f"Failed to receive weights: {error}"
        try:
            self._load(tensors)
        except _LoadError as error:
            return False, (
                f"Failed to update parameter online: {error}. The full weights of the ModelRunner "
                "are partially updated. Please discard the whole weights."
            )
        return self._updated(options, "Succeeded to update parameter online.")

    def from_pickles(self, payloads: Sequence[str], options: UpdateOptions) -> Outcome:
        """Load tensors that came as base64 of a pickle, one for each rank.

        Raises:
            Exception: It cannot be read, or a tensor does not fit; the process is gone.
        """
        if not self._open:
            return False, (
                "update_weights_from_tensor must run between begin_weight_update() and "
                "end_weight_update()"
            )
        try:
            self._load(_unpickled(payloads[0]))
        except (_LoadError, IndexError, ValueError, TypeError, pickle.UnpicklingError) as error:
            raise self._crash(f"the scheduler raised {error!r}") from error
        return self._updated(options, "Success")

    def from_disk(self, folder: str, options: UpdateOptions) -> Outcome:
        """Load a checkpoint; no session is needed.

        Raises:
            Exception: A file cannot be read, or a tensor does not fit. The way back to the old
                weights reads the same files again, so the process is gone.
        """
        if not Path(folder).is_dir():
            # what is no folder is taken for a name on a hub
            return False, (
                "Failed to get weights iterator: Repo id must use alphanumeric chars, '-', '_' or "
                "'.'. The name cannot start or end with '-' or '.' and the maximum length is 96: "
                f"'{folder}'.."
            )
        try:
            self._load(list(read_checkpoint(Path(folder))))
        except FileNotFoundError as error:
            return False, f"Failed to get weights iterator: {error}."
        except (_LoadError, OSError, ValueError) as error:
            raise self._crash(f"the scheduler raised {error!r}") from error
        return self._updated(options, "Succeeded to update model weights.")

    def relabel(self, version: str) -> None:
        """Call the weights something else."""
        self._engine.label = version

    def flush(self) -> bool:
        """Forget cached prefixes; False, and nothing done, while requests stand in the way."""
        if not self.idle:
            return False
        self._engine.cache.clear()
        return True

    @property
    def idle(self) -> bool:
        """Whether nothing runs, and nothing is queued either unless the scheduler is paused."""
        engine = self._engine
        paused = engine.pause_state is Pause.ALL
        return engine.num_running == 0 and (paused or engine.num_waiting == 0)

    # what they are

    def rows(self, name: str, count: int) -> list[Any] | None:
        """The first entries of a parameter along its first dimension, or None."""
        array = self._engine.weights.get(name)
        return None if array is None else np.asarray(array).tolist()[:count]

    def check(self, action: str, skipped: Sequence[str]) -> tuple[bool, str, dict[str, str] | None]:
        """Do what `/weights_checker` is told: success, message, checksums."""
        weights = {
            name: array
            for name, array in self._engine.weights.items()
            if not any(part in name for part in skipped)
        }
        match action:
            case "checksum":
                sums = {
                    name: blake2b(np.ascontiguousarray(a).tobytes(), digest_size=8).hexdigest()
                    for name, a in weights.items()
                }
                return True, "Success.", sums
            case "snapshot":
                self._snapshot = {name: a.copy() for name, a in self._engine.weights.items()}
            case "compare":
                if self._snapshot is None:
                    return False, "", None
                wrong = [
                    f"name={name} "
                    for name, array in weights.items()
                    if not np.array_equal(array, self._snapshot[name])
                ]
                if wrong:
                    said = "check tensor equality failed:\n" + "\n".join(wrong)
                    return False, said, None
                self._snapshot = None
            case "reset_tensors":
                rng = np.random.Generator(np.random.PCG64(self._engine.config.seed))
                noise = {
                    name: rng.random(array.shape, dtype=np.float32)
                    for name, array in weights.items()
                }
                self._engine.install({**self._engine.weights, **noise})
            case _:
                return False, f"Unsupported action={action!r}", None
        return True, "Success.", None

    # memory, which an embedded engine keeps

    def release(self, tags: Iterable[str]) -> None:
        """Note what was released.

        Raises:
            Exception: Something runs; the process is gone.
        """
        if not self.idle:
            raise self._crash("release_memory_occupation should be called only when idle")
        self._released |= set(tags)
        if "kv_cache" in self._released:
            self.flush()

    def regain(self, tags: Iterable[str]) -> None:
        """Note what is back.

        Raises:
            Exception: It had not been released; the process is gone.
        """
        for tag in tags:
            if tag not in self._released:
                raise self._crash(f"{tag!r} was not released")
            self._released.remove(tag)

    # internals

    def _receive(
        self, body: Mapping[str, Any], arrays: Sequence[Any] | None, *, lost: bool
    ) -> list[tuple[str, NDArray[np.float32]]]:
        name = body["group_name"]
        group = self._groups.get(name)
        if group is None:
            raise ValueError(
                f"Group {name} not in {list(self._groups)}. Please call "
                "`init_weights_update_group` first."
            )
        self._agree(group, body.get("digest"))
        metas = [
            (one, dtype, tuple(shape))
            for one, dtype, shape in zip(
                body["names"], body["dtypes"], body["shapes"], strict=False
            )
        ]
        for _, dtype, _ in metas:
            if dtype not in DTYPES:
                raise AttributeError(f"module 'torch' has no attribute {dtype!r}")
        flat = body.get("load_format") == "flattened_bucket"
        bounds = _bounds(metas) if flat else []
        if lost or group.broken:
            group.broken = True
            raise ConnectionError(_LOST)
        if arrays is not None:
            return _by_reference(metas, arrays)
        data = body.get("data") or []
        if flat and len(data) == 1:
            raw = b64decode(data[0])
            parts = [raw[begin:end] for begin, end in bounds]
        else:
            parts = [b64decode(part) for part in data]
        if len(parts) != len(metas):
            raise ValueError(f"expected {len(metas)} tensors with the call, got {len(parts)}")
        return [
            (one, from_bytes(part, dtype, shape))
            for (one, dtype, shape), part in zip(metas, parts, strict=True)
        ]

    def _agree(self, group: _Group, digest: str | None) -> None:
        """Refuse what is not part of the group that was joined and of the update begun."""
        if group.digest is None:
            return
        joined, _, plan = (digest or "").partition(":")
        if joined != group.digest:
            raise ValueError(
                f"the digest is of the group {joined!r}, and this worker joined {group.digest!r}"
            )
        if self._plan not in (None, plan):
            raise ValueError(
                f"the digest is of the update {plan!r}, and this session began with {self._plan!r}"
            )
        self._plan = plan

    def _load(self, tensors: Iterable[tuple[str, NDArray[np.float32]]]) -> None:
        """Put tensors into the live weights, one after the other until one does not fit."""
        weights = dict(self._engine.weights)
        try:
            for name, tensor in tensors:
                current = weights.get(name)
                if current is None:
                    continue
                if current.shape != tensor.shape:
                    raise _LoadError(
                        f"Attempted to load weight ({_torch_size(tensor.shape)}) into parameter "
                        f"({_torch_size(current.shape)})"
                    )
                weights[name] = tensor
        finally:
            self._engine.install(weights)

    def _updated(self, options: UpdateOptions, message: str) -> Outcome:
        if options.weight_version is not None:
            self._engine.label = options.weight_version
        if options.flush_cache and not self.flush():
            return False, _STALE
        return True, message


_Meta = tuple[str, str, tuple[int, ...]]


def _bounds(metas: Sequence[_Meta]) -> list[tuple[int, int]]:
    """Where each tensor lies in a flattened bucket."""
    if not metas:
        raise ValueError("Cannot create empty tensor bucket")
    bounds, offset = [], 0
    for name, dtype, shape in metas:
        size = np.dtype(DTYPES[dtype]).itemsize
        if offset % size:
            raise ValueError(
                f"Unaligned received tensor {name}: byte offset {offset}, dtype torch.{dtype}"
            )
        end = offset + math.prod(shape) * size
        bounds.append((offset, end))
        offset = end
    return bounds


def _by_reference(
    metas: Sequence[_Meta], arrays: Sequence[Any]
) -> list[tuple[str, NDArray[np.float32]]]:
    """Copies of arrays that came along; the sender may go on writing to its own."""
    if len(arrays) != len(metas):
        raise ValueError(f"expected {len(metas)} tensors with the call, got {len(arrays)}")
    tensors = []
    for (name, _, shape), source in zip(metas, arrays, strict=True):
        array = np.asarray(source)
        if array.shape != shape:
            raise ValueError(
                f"shape {list(shape)} is invalid for input of shape {list(array.shape)}"
            )
        tensors.append((name, np.array(array, dtype=np.float32)))
    return tensors


class _Unpickler(pickle.Unpickler):
    """Reads numpy arrays and plain containers, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "numpy" and name in _LOADABLE:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not on the list of what may be loaded")


def _unpickled(payload: str) -> list[tuple[str, NDArray[np.float32]]]:
    try:
        raw = b64decode(payload, validate=True)
    except NotBase64 as error:
        raise ValueError(str(error)) from error
    try:
        pairs = _Unpickler(io.BytesIO(raw)).load()
    except (EOFError, KeyError, AttributeError, UnicodeDecodeError) as error:
        raise pickle.UnpicklingError(str(error)) from error
    return [(str(name), np.array(array, dtype=np.float32)) for name, array in pairs]


def engine_checksum(ranks: Iterable[str]) -> str:
    """The one checksum of all ranks."""
    return sha256("".join(ranks).encode()).hexdigest()


def rank_checksum(sums: Mapping[str, str]) -> str:
    """The one checksum of a rank's parameters."""
    return sha256("".join(f"{name}{sums[name]}" for name in sorted(sums)).encode()).hexdigest()


def _torch_size(shape: Sequence[int]) -> str:
    return f"torch.Size({list(shape)})"
