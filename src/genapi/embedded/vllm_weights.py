"""The worker side of vLLM's weight transfer: one session machine and all the ways it breaks.

While a session is open the parameters are gone from the model, so a step kills the engine. What a
failed update leaves behind depends on its cause: nothing touched heals by itself, a lost peer heals
by an empty session, a rejected tensor by nothing but a restart. The backend is `genapi_memory`:
tensors come with the call, as base64 or by reference, instead of through a collective. Every method
is one effect between two steps; what it raises is the text of the worker's error.
"""

import math
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checkpoint import read_checkpoint
from .engine import Engine

__all__ = ("PeerLost", "WeightSession", "WorkerError")

_DTYPES = {"float16": "<f2", "float32": "<f4", "float64": "<f8", "bfloat16": "<u2"}
_NO_LOADER = "'Parameter' object has no attribute 'weight_loader'"


class WorkerError(Exception):
    """A worker raised inside a collective call."""


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The sender goes away after so many tensors of a call; half of them when None."""

    after_tensors: int | None = None


@dataclass(frozen=True, kw_only=True)
class InitInfo:
    """What joining a group takes. Only the rank plan means something in memory."""

    rank_offset: int
    world_size: int
    master_address: str | None = None
    master_port: int | None = None
    nccl_unique_id_b64: str | None = None
    packed: bool = False
    packed_buffer_size_bytes: int = 1 << 30
    packed_num_buffers: int = 2
    timeout_s: float = 60.0
    digest: str | None = None


@dataclass(frozen=True)
class UpdateInfo:
    """What one call brings; `data` holds one base64 text of little-endian bytes per tensor."""

    names: Sequence[str]
    dtype_names: Sequence[str]
    shapes: Sequence[Sequence[int]]
    data: Sequence[str] | None = None
    digest: str | None = None

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise ValueError("names, dtype_names and shapes must be of the same length")


class WeightSession:
    """Weight transfer state of one server process; without a backend it is not configured."""

    def __init__(self, engine: Engine, *, world: int, backend: str | None) -> None:
        self._engine = engine
        self._world = world
        self._backend = backend
        self._joined = False
        self._group: str | None = None
        self._plan: str | None = None
        self._open = False
        self._loaded: dict[str, NDArray[np.float32]] = {}
        self._stale: frozenset[str] = frozenset()
        self._poison: str | None = None

    def init(self, info: Mapping[str, Any]) -> None:
        """Join a group; an earlier one is left."""
        self._require_backend()
        try:
            init = InitInfo(**info)
        except TypeError as error:
            raise WorkerError(f"Invalid init_info for GenapiMemory: {error}") from error
        if init.rank_offset < 1:
            raise WorkerError(f"rank {init.rank_offset} is the trainer's or below it")
        last = init.rank_offset + self._world - 1
        if last >= init.world_size:
            raise WorkerError(
                f"rank {last} is out of range for a group of world_size {init.world_size}"
            )
        self._joined = True
        self._group = init.digest

    def shutdown(self) -> None:
        """Leave the group."""
        self._require_backend()
        if self._open:
            raise WorkerError("Cannot release a trainer connection during a weight update")
        self._joined = False

    def start(self) -> None:
        """Open a session: the model has no parameters from here to `finish`."""
        self._require_backend()
        if self._open:
            raise WorkerError(
                "start_weight_update called while a weight update is already active. "
                "Call finish_weight_update first."
            )
        self._open = True
        self._plan = None
        self._engine.loaded = False
        self._stale = frozenset(self._loaded)

    def update(
        self,
        info: Mapping[str, Any],
        *,
        arrays: Sequence[Any] | None = None,
        lost: PeerLost | None = None,
    ) -> None:
        """Receive tensors in the order of their names; any error drops the session."""
        self._require_backend()
        if not self._open:
            raise WorkerError("start_weight_update must be called before update_weights.")
        try:
            self._receive(_update_info(info), arrays, lost)
        except (WorkerError, TypeError, ValueError) as error:
            self._open = False
            raise WorkerError(str(error)) from error

    def finish(self) -> None:
        """Close the session; parameters that were not received keep their old values.

        A rejected tensor is replayed: then the session stays open.
        """
        self._require_backend()
        if not self._open:
            raise WorkerError("finish_weight_update called without a matching start_weight_update.")
        if self._poison is not None:
            raise WorkerError(self._poison)  # and the session stays open
        self._open = False
        self._engine.install({**self._engine.weights, **self._loaded})
        self._loaded = {}
        self._stale = frozenset()
        self._engine.loaded = True

    def reload(self, folder: str) -> None:
        """Load a folder in one go, or leave the model in pieces.

        What an earlier failure left in it makes the next load fail as well, which clears it away; a
        tensor of another shape nothing clears away. A name that is not known is no such tensor.
        """
        stale, self._loaded = frozenset(self._loaded), {}
        self._engine.loaded = False
        try:
            if not Path(folder).is_dir():
                # what is no folder is taken for a name on a hub
                raise WorkerError(
                    f"Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{folder}'."
                    " Use `repo_type` argument if needed."
                )
            for name, tensor in read_checkpoint(Path(folder)):
                if self._poison is not None:
                    raise WorkerError(self._poison)
                if name in stale:
                    self._loaded = {}
                    raise WorkerError(_NO_LOADER)
                if name not in self._engine.weights:
                    raise WorkerError(self._unknown(name))
                self._load(name, tensor)
        except (OSError, ValueError) as error:
            raise WorkerError(str(error)) from error
        self._open = False
        self._engine.install({**self._engine.weights, **self._loaded})
        self._loaded = {}
        self._engine.loaded = True

    def checksums(self) -> dict[str, str]:
        """SHA-256 of the bytes of every parameter."""
        weights = self._engine.weights
        return {
            name: sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
            for name, array in weights.items()
        }

    def _receive(
        self, info: UpdateInfo, arrays: Sequence[Any] | None, lost: PeerLost | None
    ) -> None:
        if not self._joined:
            raise WorkerError(
                "GenapiMemory weight transfer not initialized. Call init_transfer_engine() first."
            )
        self._agree(info.digest)
        count = len(info.names)
        source = info.data if arrays is None else arrays
        if count and (source is None or len(source) != count):
            got = 0 if source is None else len(source)
            raise WorkerError(f"expected {count} tensors with the call, got {got}")
        limit = count
        if lost is not None:
            limit = count // 2 if lost.after_tensors is None else min(lost.after_tensors, count)
        for index in range(limit):
            name, shape = info.names[index], tuple(info.shapes[index])
            tensor = _tensor((source or ())[index], info.dtype_names[index], shape)
            self._load(name, tensor)
        if lost is not None:
            raise WorkerError("Connection closed by peer")

    def _agree(self, digest: str | None) -> None:
        """Refuse what is not part of the group that was joined and of the update begun."""
        if self._group is None:
            return
        group, _, plan = (digest or "").partition(":")
        if group != self._group:
            raise WorkerError(
                f"Invalid update_info: its digest is of the group {group!r}, and this worker "
                f"joined {self._group!r}"
            )
        if self._plan not in (None, plan):
            raise WorkerError(
                f"Invalid update_info: its digest is of the update {plan!r}, and this session "
                f"began with {self._plan!r}"
            )
        self._plan = plan

    def _load(self, name: str, tensor: NDArray[np.float32]) -> None:
        current = self._engine.weights.get(name)
        if current is None:
            self._reject(self._unknown(name))
        elif current.shape != tensor.shape:
            self._loaded[name] = current
            self._reject(
                f"Attempted to load weight ({_torch_size(tensor.shape)}) into parameter "
                f"({_torch_size(current.shape)})"
            )
        elif self._poison is not None or name in self._stale:
            self._reject(_NO_LOADER)
        else:
            self._loaded[name] = tensor

    def _unknown(self, name: str) -> str:
        known = ", ".join(repr(known) for known in self._engine.weights)
        return (
            f"There is no module or parameter named {name!r} in TinyForCausalLM. "
            f"The available parameters belonging to  (TinyForCausalLM) are: {{{known}}}"
        )

    def _reject(self, message: str) -> None:
        self._poison = self._poison or message
        raise WorkerError(message)

    def _require_backend(self) -> None:
        if self._backend is None:
            raise WorkerError(
                "Weight transfer not configured. "
                "Please set weight_transfer_config to enable weight transfer."
            )


def _update_info(info: Mapping[str, Any]) -> UpdateInfo:
    try:
        return UpdateInfo(**info)
    except (TypeError, ValueError) as error:
        raise WorkerError(f"Invalid update_info for GenapiMemory: {error}") from error


def _tensor(source: object, dtype_name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """A copy of one received tensor; the sender may go on writing to its own."""
    code = _DTYPES.get(dtype_name)
    if code is None:
        raise WorkerError(f"module 'torch' has no attribute {dtype_name!r}")
    if isinstance(source, str):
        raw = b64decode(source)
        if len(raw) != math.prod(shape) * np.dtype(code).itemsize:
            raise WorkerError(
                f"shape {list(shape)} of {dtype_name} is invalid for input of {len(raw)} bytes"
            )
        array: NDArray[Any] = np.frombuffer(raw, dtype=code).reshape(shape)
    else:
        array = np.asarray(source)
        if array.shape != shape:
            raise WorkerError(
                f"shape {list(shape)} is invalid for input of shape {list(array.shape)}"
            )
    if dtype_name == "bfloat16" and array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return np.array(array, dtype=np.float32)


def _torch_size(shape: Sequence[int]) -> str:
    return f"torch.Size({list(shape)})"
