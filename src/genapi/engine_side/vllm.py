"""The vLLM weight-transfer backend `genapi_gloo`.

The rule of this file: importing it needs torch alone; vLLM is imported where it is used.

vLLM calls `register` in each of its processes, by the entry point `genapi` of the group
`vllm.general_plugins` (where VLLM_PLUGINS is set, it has to name `genapi`). A server takes the
backend with

    --weight-transfer-config '{"backend": "genapi_gloo"}'

and is then driven over vLLM's own routes. `init_info` and `update_info` carry the fields of the
NCCL backend, and `timeout_s` and `digest` besides.
"""

# ruff: noqa: PLC0415 - the rule above
from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from genapi.engine_side.receiver import GlooReceiver

if TYPE_CHECKING:
    import torch

__all__ = ("BACKEND", "GlooBackend", "InitInfo", "UpdateInfo", "register")

BACKEND = "genapi_gloo"


@dataclass(kw_only=True)
class InitInfo:
    """Which group to join.

    Attributes:
        master_address: where the trainer hosts the rendezvous.
        master_port: its port.
        rank_offset: the rank of this server's first worker; the trainer has rank 0.
        world_size: all ranks, the trainer's included.
        packed: tensors come concatenated in chunks.
        packed_buffer_size_bytes: a chunk closes with the tensor that takes it over this size.
        packed_num_buffers: a field of the NCCL backend; gloo has one buffer.
        timeout_s: limit for joining, and for each broadcast of an update that names no other.
        digest: of what both ends have agreed on; None = nothing is compared.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    packed: bool = False
    packed_buffer_size_bytes: int = 1 << 30
    packed_num_buffers: int = 2
    timeout_s: float = 60.0
    digest: str | None = None


@dataclass(kw_only=True)
class UpdateInfo:
    """The tensors of one update call, in the order in which they are sent.

    Attributes:
        names: the checkpoint's names.
        dtype_names: such as `bfloat16`.
        shapes: full shapes; vLLM shards and fuses itself.
        timeout_s: limit for each broadcast; None = the last one named.
        digest: that of the group, a colon, and that of the whole update.
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    timeout_s: float | None = None
    digest: str | None = None


class GlooBackend:
    """What `genapi_gloo` adds to vLLM's `WeightTransferEngine`, which provides the attributes."""

    init_info_cls: ClassVar[type[InitInfo]] = InitInfo
    update_info_cls: ClassVar[type[UpdateInfo]] = UpdateInfo

    parallel_config: Any
    model_config: Any
    model: Any
    device: torch.device

    _receiver: GlooReceiver | None = None
    _group: str | None = None
    _plan: str | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the group, in place of any earlier one; returns when every rank has joined."""
        self.shutdown()
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        receiver = GlooReceiver(
            packed=init_info.packed,
            packed_buffer_size_bytes=init_info.packed_buffer_size_bytes,
            timeout_s=init_info.timeout_s,
        )
        receiver.join(
            init_info.master_address,
            init_info.master_port,
            rank=init_info.rank_offset + rank,
            world_size=init_info.world_size,
        )
        self._receiver = receiver
        self._group = init_info.digest

    def start_weight_update(self) -> None:
        """Prepare the model to be loaded anew; needed on CPU too, where weights are repacked."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._plan = None
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive one bucket and load it.

        Any failure leaves the group, so that the trainer and the other servers fail too.
        """
        if self._receiver is None:
            raise RuntimeError(
                "there is no update group: call /init_weight_transfer_engine first, and again "
                "after an update that failed"
            )
        try:
            self._agree(update_info.digest)
            with _partial_loads():
                for tensors in self._receiver.receive(
                    update_info.names,
                    update_info.dtype_names,
                    update_info.shapes,
                    timeout_s=update_info.timeout_s,
                ):
                    self.model.load_weights([(n, t.to(self.device)) for n, t in tensors])
        except BaseException:
            self.shutdown()
            raise

    def _agree(self, digest: str | None) -> None:
        """Refuse a bucket, before any of it is received, that is not part of what was agreed.

        Raises:
            ValueError: another group was joined, or another update begun.
        """
        if self._group is None:
            return
        group, _, plan = (digest or "").partition(":")
        if group != self._group:
            raise ValueError(
                f"Invalid update_info: its digest is of the group {group!r}, and this worker "
                f"joined {self._group!r}: another publisher has joined it to another group since, "
                "or the two ends go by other workers, ranks or wire parameters; join it again"
            )
        if self._plan not in (None, plan):
            raise ValueError(
                f"Invalid update_info: its digest is of the update {plan!r}, and this session "
                f"began with {self._plan!r}: another manifest, or other buckets of it"
            )
        self._plan = plan

    def finish_weight_update(self) -> None:
        """Process what was loaded and put it into service."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the group."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


def register() -> None:
    """Make vLLM know the backend; vLLM calls it once per process, and more calls do no harm."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    engine = type("GenapiGlooEngine", (GlooBackend, WeightTransferEngine), {})
    with contextlib.suppress(ValueError):  # the factory refuses a name that it has
        WeightTransferEngineFactory.register_engine(BACKEND, engine)


def _partial_loads() -> contextlib.AbstractContextManager[None]:
    """Let a model with draft layers accept a bucket that holds only some of its weights."""
    try:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    except ImportError:  # releases that do not check
        return contextlib.nullcontext()
    check: contextlib.AbstractContextManager[None] = disable_mtp_completeness_check()
    return check
