"""The small protocols of weights on the move: source, transport, sender.

The rule of this file: a transport knows tensors and its own group, never an engine's routes.
The names in `init_info` and `update_info` are those of vLLM's NCCL backend; each provider's
`admin.py` maps them onto its own calls.
"""

import math
from collections.abc import AsyncIterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, runtime_checkable

from pydantic import Field

from genapi.errors import ConfigError
from genapi.publication.receivers import Receivers
from genapi.types.arguments import whole
from genapi.types.base import Value
from genapi.types.policy import PolicyVersion
from genapi.weights._tensors import element_bytes
from genapi.weights._threads import Once

__all__ = (
    "Bucket",
    "Delivery",
    "GroupTransport",
    "Sender",
    "TensorMeta",
    "WeightSource",
    "WeightStore",
    "WeightTransport",
    "WireBucket",
    "check_limits",
    "check_source",
    "check_world_size",
)


class TensorMeta(Value):
    """One tensor of a manifest.

    Attributes:
        name: the checkpoint's name, such as `model.layers.0.mlp.up_proj.weight`.
        dtype: such as `bfloat16`, `float32`, `float8_e4m3fn`.
        shape: the full shape, unsharded.
    """

    name: Annotated[str, Field(min_length=1)]
    dtype: str
    shape: tuple[Annotated[int, Field(ge=0)], ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes.

        Raises:
            ConfigError: the dtype is none that can be published.
        """
        return element_bytes(self.dtype, name=self.name) * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name!r} {self.dtype} {list(self.shape)}"


@runtime_checkable
class WeightSource(Protocol):
    """Weights to publish: a manifest that moves no bytes, and tensors in the manifest's order.

    Iterating may gather from many devices and may block. A publication reads the manifest and
    iterates once, in one thread of its own; it may be done again for the next one. When the
    publication is given up, a generator is closed at its next `yield`, in that same thread; one
    that blocks for ever is left behind and cannot keep the process alive.

    A source may also have `stage(budget_bytes)`. It is called once, in the same thread, between
    the manifest and the iteration and before the fleet is paused.
    """

    def manifest(self) -> Sequence[TensorMeta]:
        """Every tensor, in the order of iteration; names are unique."""
        ...

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """`(name, tensor)` pairs; tensors are torch tensors or numpy arrays.

        A tensor must not change after it was yielded until the publication has ended.
        """
        ...


@dataclass(frozen=True, slots=True)
class Bucket:
    """Consecutive tensors that go in one update call.

    Attributes:
        metas: what they are.
        tensors: the tensors, in the same order.
        made: what the transport makes of them, once for all groups that they are sent to.
    """

    metas: tuple[TensorMeta, ...]
    tensors: tuple[Any, ...]
    made: Once[Any] = field(default_factory=Once, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(meta.nbytes for meta in self.metas)

    @property
    def update_info(self) -> dict[str, Any]:
        """`names`, `dtype_names` and `shapes`, as vLLM's backends name them."""
        return {
            "names": [m.name for m in self.metas],
            "dtype_names": [m.dtype for m in self.metas],
            "shapes": [list(m.shape) for m in self.metas],
        }


class Delivery(tuple[Any, ...]):  # noqa: SLOT001 - a tuple with slots can hold no attribute
    """Numpy arrays handed over by reference; whoever has loaded them calls `taken`."""

    was_taken = False

    def taken(self) -> None:
        """The worker has loaded them: a reply that is lost afterwards loses nothing."""
        self.was_taken = True


@dataclass(frozen=True, slots=True)
class WireBucket:
    """What one update call carries.

    Attributes:
        update_info: fields of the call.
        attachment: numpy arrays by reference, in the order of `names`, for a worker inside this
            process; None = what the tensors hold travels in `update_info` or beside the call.
    """

    update_info: Mapping[str, Any]
    attachment: Delivery | None = None


class Sender(Protocol):
    """The trainer's end of one group of workers.

    Its methods run on the event loop and block nothing: what blocks runs in threads that never
    keep the process alive. Cancelling `join` or `send` abandons the group. Every failure is a
    `TransportError`, and after one the group is of no further use: join a new one.
    """

    @property
    def init_info(self) -> Mapping[str, Any]:
        """What every worker is told to join; only its own `rank_offset` is missing."""
        ...

    async def join(self) -> None:
        """Take rank 0 and wait until every worker has joined. Runs while workers are asked to.

        Raises:
            TransportError: not all have joined in time, or the group was abandoned.
        """
        ...

    def wire(self, bucket: Bucket, *, in_process: bool) -> WireBucket:
        """What the update call of this bucket carries to each worker of one kind.

        Args:
            bucket: what is going to be sent.
            in_process: whether the worker is an object in this process.
        """
        ...

    async def send(self, bucket: Bucket) -> None:
        """Move one bucket to every worker. Runs while the workers' update calls are open.

        Raises:
            TransportError: not all have taken it in time, or the group was abandoned.
        """
        ...

    def abandon(self) -> None:
        """Destroy this end, so that receivers fail instead of waiting. Safe to repeat.

        `join` and `send` under way fail at once.
        """
        ...

    async def aclose(self) -> None:
        """Leave the group and free threads and sockets. Bounded; safe to repeat."""
        ...


class WeightTransport(Protocol):
    """How weights travel, which is one of two ways.

    A `GroupTransport` (`Gloo()`, `Memory()`) sends them to a group of paused workers; a
    `WeightStore` (`Filesystem(dir)`) puts them where workers load them from.
    """

    @property
    def bucket_bytes(self) -> int:
        """Most bytes that are sent, or written, at a time; one larger tensor goes alone."""
        ...

    @property
    def bucket_tensors(self) -> int:
        """Most tensors that are sent, or written, at a time."""
        ...

    @property
    def stage_bytes(self) -> int:
        """Most bytes gathered before the fleet is paused, or before they are written."""
        ...

    def check(self, manifest: Sequence[TensorMeta], *, in_process: bool) -> None:
        """Raise `ConfigError` for a tensor that cannot travel; nobody is paused yet."""
        ...


@runtime_checkable
class GroupTransport(WeightTransport, Protocol):
    """Tensors go to all workers of a group, bucket by bucket, while they are paused."""

    @property
    def backend(self) -> str:
        """Name of the receiving backend that workers must have been started with."""
        ...

    @property
    def acknowledges(self) -> bool:
        """Whether a `send` that returns proves that every worker has loaded the bucket.

        Only then does a lost reply to an update call not fail the publication.
        """
        ...

    @property
    def digests(self) -> bool:
        """Whether the backend takes a `digest` of what both ends have to agree on."""
        ...

    def towards(self, receivers: Receivers | None) -> "GroupTransport":
        """This transport as workers of one kind take it, by whatever name they know it.

        Args:
            receivers: what the engine itself receives by; None = a backend of genapi's own.
        """
        ...

    async def sender(self, *, world_size: int, timeout_s: float) -> Sender:
        """The trainer's end of a new group.

        Args:
            world_size: all ranks, this one included.
            timeout_s: limit for `join`.

        Raises:
            ConfigError: the group cannot be offered from this machine, or has no receiver.
        """
        ...


@runtime_checkable
class WeightStore(WeightTransport, Protocol):
    """Weights lie in a place that every worker can load them from, before anybody is paused."""

    def opened(self) -> "WeightStore":
        """This store as one publisher has it."""
        ...

    async def close(self) -> None:
        """Let other publishers have it.

        Raises:
            GenAPIError: the store failed.
        """
        ...

    async def taken(self) -> AbstractSet[PolicyVersion]:
        """Versions that cannot be written any more; asked once before each that is written.

        Raises:
            GenAPIError: the store failed.
        """
        ...

    async def write(
        self,
        version: PolicyVersion,
        manifest: Sequence[TensorMeta],
        buckets: AsyncIterable[Bucket],
        *,
        supersedes: bool = False,
    ) -> str:
        """Put one version there, durably; returns the path that workers are told to load.

        When it fails or is cancelled, nothing is left that could be taken for a version.

        Args:
            version: what the place is named after.
            manifest: every tensor.
            buckets: them, in that order.
            supersedes: whether another publisher that has the store was superseded, as the board
                says. What it wrote is left alone.

        Raises:
            ConfigError: it cannot be written there; the message names the remedy.
            TransportError: the store failed.
        """
        ...

    async def discard(self, version: PolicyVersion) -> None:
        """Remove one version that nobody was told to load; one that is not there is removed.

        Raises:
            GenAPIError: it could not be removed.
        """
        ...

    async def tidy(self, committed: PolicyVersion, needed: AbstractSet[PolicyVersion]) -> None:
        """Remove versions that nobody needs any more.

        Args:
            committed: what the fleet serves.
            needed: what a worker may be reading.

        Raises:
            GenAPIError: they could not be removed.
        """
        ...


def check_limits(transport: WeightTransport) -> None:
    """Raise `ConfigError` for limits under which nothing could be sent."""
    for name, least in (("bucket_bytes", 1), ("bucket_tensors", 1), ("stage_bytes", 0)):
        check_whole(transport, name, least=least)


def check_whole(transport: object, name: str, *, least: int) -> None:
    """Hold a limit as an int; raise `ConfigError` for what is none."""
    # Transports are frozen, and built just now.
    object.__setattr__(transport, name, whole(name, getattr(transport, name), least=least))


def check_source(source: object) -> None:
    """Raise `ConfigError` for what is no weight source, with the way to make one."""
    if isinstance(source, type) or not isinstance(source, WeightSource):
        raise ConfigError(
            f"{type(source).__name__} is no weight source: wrap tensors with "
            "genapi.weights.from_tensors(mapping), or give it manifest() and __iter__()"
        )


def check_world_size(world_size: int) -> None:
    """Raise `ConfigError` unless there is at least one receiver beside the sender."""
    if world_size < 2:  # noqa: PLR2004 - the trainer and one rank of a worker
        raise ConfigError(
            f"world_size={world_size}: an update group is the trainer and at least one rank of a "
            "worker; check the workers that the fleet has found"
        )
