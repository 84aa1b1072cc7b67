"""Tensors handed over inside the update call itself, for the embedded engine.

A worker in this process gets numpy arrays by reference; one behind a socket gets their bytes in
`update_info`. There is no group: the rank plan is told to workers all the same, which check it.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from genapi.errors import ConfigError, TransportError
from genapi.publication.receivers import Receivers
from genapi.weights._tensors import bytes_of, is_torch
from genapi.weights.base import (
    Bucket,
    Delivery,
    TensorMeta,
    WireBucket,
    check_limits,
    check_world_size,
)

__all__ = ("Memory",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Weights by reference, or as base64 text to an embedded engine in another process.

    Only the embedded engine has the receiving backend, `genapi_memory`. Needs no torch.

    Attributes:
        bucket_bytes: most bytes per update call (one larger tensor goes alone).
        bucket_tensors: most tensors per update call.
        stage_bytes: most bytes gathered before the fleet is paused.

    Raises:
        ConfigError: a limit under which nothing could be sent.
    """

    bucket_bytes: int = 8 << 20
    bucket_tensors: int = 1024
    stage_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        check_limits(self)

    @property
    def backend(self) -> str:
        """Name of the receiving backend."""
        return "genapi_memory"

    @property
    def acknowledges(self) -> bool:
        """Nothing but the reply says that a worker behind a socket has its bucket."""
        return False

    @property
    def digests(self) -> bool:
        """It is a backend of genapi's own."""
        return True

    def check(self, manifest: Sequence[TensorMeta], *, in_process: bool) -> None:
        """By reference only what numpy has can go.

        Raises:
            ConfigError: a dtype that numpy lacks.
        """
        for meta in manifest if in_process else ():
            try:
                np.dtype(meta.dtype)
            except TypeError:
                raise ConfigError(
                    f"tensor {meta.name!r} is {meta.dtype}, which numpy lacks, and cannot be "
                    "handed to a worker in this process; cast it to float32"
                ) from None

    def towards(self, receivers: Receivers | None) -> "Memory":
        """The same: an embedded engine takes it, whatever it speaks."""
        del receivers
        return self

    async def sender(self, *, world_size: int, timeout_s: float) -> "MemorySender":
        """The trainer's end of a group of `world_size` ranks. Nothing in it waits.

        Raises:
            ConfigError: the group has no receiver.
        """
        del timeout_s
        check_world_size(world_size)
        return MemorySender(world_size)


class MemorySender:
    """The sender of `Memory`: all it does is in `wire`."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._left = False

    @property
    def init_info(self) -> Mapping[str, Any]:
        """The world size, for workers to hold their rank against."""
        return {"world_size": self._world_size}

    async def join(self) -> None:
        """Nothing to wait for.

        Raises:
            TransportError: it was abandoned.
        """
        self._check()

    def wire(self, bucket: Bucket, *, in_process: bool) -> WireBucket:
        """The bucket as read-only arrays by reference, or `data`: base64 of little-endian bytes.

        Raises:
            ConfigError: numpy has no such dtype, so it cannot be handed over by reference.
        """
        if in_process:
            pairs = zip(bucket.metas, bucket.tensors, strict=True)
            return WireBucket(
                update_info=bucket.update_info,
                attachment=Delivery(_by_reference(meta.name, tensor) for meta, tensor in pairs),
            )
        data = [base64.b64encode(bytes_of(tensor)).decode("ascii") for tensor in bucket.tensors]
        return WireBucket(update_info={**bucket.update_info, "data": data})

    async def send(self, bucket: Bucket) -> None:
        """Nothing to move: the update call carries the bucket.

        Raises:
            TransportError: it was abandoned.
        """
        del bucket
        self._check()

    def abandon(self) -> None:
        """Refuse whatever comes after."""
        self._left = True

    async def aclose(self) -> None:
        """Refuse whatever comes after."""
        self._left = True

    def _check(self) -> None:
        if self._left:
            raise TransportError("this sender has left its group", phase="not_sent")


def _by_reference(name: str, tensor: Any) -> npt.NDArray[Any]:
    if is_torch(tensor):
        try:
            tensor = tensor.detach().cpu().numpy()
        except TypeError:
            raise ConfigError(
                f"tensor {name!r} is {tensor.dtype}, which numpy lacks, and cannot be handed to a "
                "worker in this process; cast it to float32"
            ) from None
    view: npt.NDArray[Any] = tensor.view()
    view.flags.writeable = False
    return view
