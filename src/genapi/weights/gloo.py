"""Tensors broadcast over gloo from the trainer's process to every rank of the workers.

The rule of this file: the event loop waits and threads do the work; what they wait for ends when
the group is abandoned. The collectives are in `_gloo_group`, torch with them.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio

from genapi.errors import ConfigError, TransportError
from genapi.publication.receivers import Receivers
from genapi.types.arguments import seconds
from genapi.weights._tensors import element_bytes, is_torch, raw_bytes
from genapi.weights._threads import run_in_thread, start_thread
from genapi.weights.base import Bucket, TensorMeta, WireBucket, check_limits, check_world_size

if TYPE_CHECKING:
    from genapi.weights._gloo_group import GlooGroup, Parcel

__all__ = ("Gloo",)

T = TypeVar("T")

_GRACE_S = 5.0
_LEAST_S = 30.0
"""What a bucket gets however small it is: the engines load it, on machines that may be busy."""
_SLOWEST_BYTES_PER_S = 8 << 20
"""What is still accepted: a line of 1 Gbit/s that carries a copy for each of 15 receivers."""
_DEVICE = "cpu/"
"""What torch puts before the keys of a group whose tensors are on the CPU."""
_BROADCAST: Final = frozenset(
    ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool"]
)
"""The dtypes that torch's own gloo broadcasts; a receiver of genapi's takes bytes."""


@dataclass(frozen=True, slots=True)
class Gloo:
    """Weights by gloo broadcast over TCP: no GPU needed, on either side.

    vLLM needs the backend `genapi_gloo`, which genapi installs into it; SGLang receives by its own
    `gloo`. The transfer is neither encrypted nor authenticated: keep `host` on a network of your
    own.

    Attributes:
        host: an address of this machine that every worker can reach.
        bucket_bytes: most bytes per update call (one larger tensor goes alone).
        bucket_tensors: most tensors per update call.
        stage_bytes: most bytes gathered before the fleet is paused.
        packed: whether a bucket is one broadcast (copied together once) or one per tensor.
        timeout_s: limit for moving and loading one bucket, in seconds; None = as its size asks:
            30 s and 1 s for every 8 MiB of it.

    Raises:
        ConfigError: torch is not installed, or a limit under which nothing could be sent.
    """

    host: str = "127.0.0.1"
    _: KW_ONLY
    bucket_bytes: int = 256 << 20
    bucket_tensors: int = 1024
    stage_bytes: int = 4 << 30
    packed: bool = True
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        check_limits(self)
        if self.timeout_s is not None:
            seconds("timeout_s", self.timeout_s, more=", or None")
        if find_spec("torch") is None:
            raise ConfigError(
                "publishing over gloo needs torch: install genapi with its extra 'torch'"
            )

    @property
    def backend(self) -> str:
        """Name of the receiving backend."""
        return "genapi_gloo"

    @property
    def acknowledges(self) -> bool:
        """Every receiver greets the sender once more when it has loaded a bucket."""
        return True

    @property
    def digests(self) -> bool:
        """It is a backend of genapi's own."""
        return True

    @property
    def plain(self) -> bool:
        """Whether receivers know broadcasts of data only."""
        return False

    def check(self, manifest: Sequence[TensorMeta], *, in_process: bool) -> None:
        """Everything that torch knows can travel, to workers that are processes."""
        del manifest
        if in_process:
            raise ConfigError("workers inside this process take weights.Memory(), not Gloo()")

    def towards(self, receivers: Receivers | None) -> "Gloo":
        """The same settings, for receivers of genapi's own or of the engine's."""
        if receivers is None:
            return self
        settings = {f.name: getattr(self, f.name) for f in fields(Gloo)}
        return _PlainGloo(**settings, receivers=receivers)

    async def sender(self, *, world_size: int, timeout_s: float) -> "GlooSender":
        """Open the rendezvous of a new group of `world_size` ranks, this one included.

        Args:
            world_size: all ranks.
            timeout_s: limit for `join`, in seconds.

        Raises:
            ConfigError: the group has no receiver, or `host` is no address of this machine.
        """
        check_world_size(world_size)
        try:
            with anyio.fail_after(timeout_s):
                group = await run_in_thread(self._open, name="genapi-gloo-open")
        except (ValueError, OSError) as error:
            why = str(error) or f"nothing after {timeout_s:g} s"
            raise ConfigError(
                f"cannot host an update group at host={self.host!r} ({why}): pass an address of "
                "this machine that every worker can reach"
            ) from error
        return GlooSender(self, group, world_size=world_size, join_timeout_s=timeout_s)

    def _open(self) -> "GlooGroup":
        from genapi.weights._gloo_group import GlooGroup  # noqa: PLC0415 - it imports torch

        return GlooGroup(self.host)

    def arrange(self, bucket: Bucket) -> Bucket:
        """The bucket in the order in which its tensors travel."""
        return bucket

    def announce(self, bucket: Bucket) -> dict[str, Any]:
        """The fields of the update call."""
        return bucket.update_info


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlainGloo(Gloo):
    """The same towards receivers that know broadcasts of data only."""

    receivers: Receivers

    @property
    def backend(self) -> str:
        """Torch's name of it."""
        return "gloo"

    @property
    def acknowledges(self) -> bool:
        """A receiver that has the bytes may still refuse them."""
        return False

    @property
    def digests(self) -> bool:
        """There is nobody to compare one."""
        return False

    @property
    def plain(self) -> bool:
        """They greet nobody and announce nothing, and take a bucket in one piece or by tensor."""
        return True

    def check(self, manifest: Sequence[TensorMeta], *, in_process: bool) -> None:
        """Refuse what torch does not broadcast, where each tensor is a broadcast of its own."""
        Gloo.check(self, manifest, in_process=in_process)
        other = [meta for meta in manifest if meta.dtype.removeprefix("torch.") not in _BROADCAST]
        if other and not self.packed:
            raise ConfigError(
                f"tensor {other[0]} is of a dtype that gloo does not broadcast: use "
                "weights.Gloo(packed=True), which sends bytes"
            )

    def arrange(self, bucket: Bucket) -> Bucket:
        """Larger elements first: then every tensor begins at a multiple of its own size."""
        if not self.packed:
            return bucket
        pairs = sorted(
            zip(bucket.metas, bucket.tensors, strict=True),
            key=lambda pair: -element_bytes(pair[0].dtype, name=pair[0].name),
        )
        return Bucket(tuple(meta for meta, _ in pairs), tuple(tensor for _, tensor in pairs))

    def announce(self, bucket: Bucket) -> dict[str, Any]:
        """The fields of the update call, and how the bytes come."""
        return {**self.arrange(bucket).update_info, "packed": self.packed}

    def _open(self) -> "GlooGroup":
        from genapi.weights._gloo_group import GlooGroup  # noqa: PLC0415 - it imports torch

        return GlooGroup(
            self.host,
            prefixes=(*self.receivers.store_prefixes, _DEVICE),
            plain=True,
        )


class GlooSender:
    """Rank 0 of one group."""

    def __init__(
        self, transport: Gloo, group: "GlooGroup", *, world_size: int, join_timeout_s: float
    ) -> None:
        self._transport = transport
        self._group = group
        self._world_size = world_size
        self._join_timeout_s = join_timeout_s
        self._working: set[asyncio.Future[Any]] = set()
        self._abandoned: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def init_info(self) -> Mapping[str, Any]:
        """The fields of vLLM's NCCL backend without `rank_offset`, and `timeout_s`."""
        return {
            "master_address": self._group.host,
            "master_port": self._group.port,
            "world_size": self._world_size,
            "packed": self._transport.packed,
            "packed_buffer_size_bytes": self._transport.bucket_bytes,
            "packed_num_buffers": 2,
            "timeout_s": self._join_timeout_s,
        }

    async def join(self) -> None:
        """Take rank 0 and wait until every receiver has joined.

        Raises:
            TransportError: not all have within the limit, or the group was abandoned.
        """
        await self._work(
            "join", lambda: self._group.join(self._world_size, timeout_s=self._join_timeout_s)
        )

    def wire(self, bucket: Bucket, *, in_process: bool) -> WireBucket:
        """What the tensors are, and `timeout_s`; what they hold goes through the group."""
        del in_process
        # Receivers wait longer than this end: it is the one that gives up.
        timeout_s = _limit_s(self._transport, bucket) + _GRACE_S
        return WireBucket(update_info={**self._transport.announce(bucket), "timeout_s": timeout_s})

    async def send(self, bucket: Bucket) -> None:
        """Broadcast one bucket.

        Raises:
            TransportError: not every receiver has taken it within the limit, or the group was
                abandoned.
        """
        await self._work("send", lambda: self._send(bucket))

    def abandon(self) -> None:
        """Destroy this end, so that receivers fail at once. Safe to repeat."""
        if not self._abandoned.done():
            self._abandoned.set_result(None)
            self._group.abandon()

    async def aclose(self) -> None:
        """Leave the group and free threads and sockets, within 5 s. Safe to repeat."""
        self.abandon()
        self._start("close", lambda: self._group.close(timeout_s=_GRACE_S))
        with anyio.CancelScope(shield=True):
            await asyncio.wait(set(self._working), timeout=_GRACE_S)

    def _send(self, bucket: Bucket) -> int:
        return self._group.send(
            bucket.made.get(partial(_pack, self._transport, bucket)),
            timeout_s=_limit_s(self._transport, bucket),
        )

    async def _work(self, what: str, function: Callable[[], object]) -> None:
        url = f"gloo://{self._group.host}:{self._group.port}"
        gone = "the update group was abandoned"
        if self._abandoned.done():
            raise TransportError(gone, phase="not_sent", url=url)
        work = self._start(what, function)
        try:
            await asyncio.wait((work, self._abandoned), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.abandon()
            raise
        if not work.done():  # the thread is about to find out
            raise TransportError(gone, phase="may_have_run", url=url)
        error = work.exception()
        if error is not None:
            self.abandon()
            raise TransportError(str(error), phase="may_have_run", url=url) from error

    def _start(self, what: str, function: Callable[[], T]) -> "asyncio.Future[T]":
        future = start_thread(function, name=f"genapi-gloo-{what}")
        self._working.add(future)
        future.add_done_callback(self._working.discard)
        return future


def _limit_s(transport: Gloo, bucket: Bucket) -> float:
    if transport.timeout_s is not None:
        return transport.timeout_s
    return _LEAST_S + bucket.nbytes / _SLOWEST_BYTES_PER_S


def _pack(transport: Gloo, bucket: Bucket) -> "Parcel":
    from genapi.weights._gloo_group import pack  # noqa: PLC0415 - it imports torch

    arranged = transport.arrange(bucket)
    return pack(
        [t if is_torch(t) else raw_bytes(t) for t in arranged.tensors],
        arranged.update_info,
        packed=transport.packed,
        packed_buffer_size_bytes=bucket.nbytes if transport.plain else transport.bucket_bytes,
        plain=transport.plain,
    )
