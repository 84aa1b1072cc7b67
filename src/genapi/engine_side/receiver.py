"""The receiving rank of a gloo update group, and the wire layout that both ends follow.

The rule of this file: torch alone. The sending rank is written separately, in
`genapi.weights._gloo_group`; the two meet in this layout and nowhere else.

    Rendezvous  Rank 0 hosts a `TCPStore` at `master_address:master_port` for as long as the group
                lives. Every rank builds a `ProcessGroupGloo` of `world_size` ranks over it, under
                the key prefix `genapi`.
    Line        Every receiver also keeps a silent connection to that address. Its end is the
                sender's leave.
    Greeting    All ranks all-reduce (sum) one int64 holding 1; the result must be `world_size`.
    Bucket      One update call. `names`, `dtype_names` and `shapes` list its tensors: row-major,
                in the machine's byte order, dtype names as torch prints them (`bfloat16`).
                First an announcement is broadcast, three int64: the number of broadcasts that
                follow, their bytes in total, and a digest of what the tensors are: the first eight
                bytes, little-endian and signed, of the SHA-256 of `[[name, dtype, shape], ...]` as
                ASCII JSON without spaces.
                Not packed: one broadcast from rank 0 per tensor.
                Packed: one broadcast per chunk. A chunk is consecutive tensors, end to end without
                padding; it closes with the tensor that takes it over `packed_buffer_size_bytes`,
                and the last one holds the rest.
                These broadcasts carry bytes (uint8). One that would carry none is left out.
                A rank that has put the whole bucket to use greets again, as above: when that is
                over, every rank has.

The names and both ways to cut a bucket are those of vLLM's NCCL backend. What is added answers
to gloo: data of another size than expected would end the process, hence the announcement, and
tensors of one size that change places would be loaded as each other, hence its digest. A
receive whose sender dies in the middle of a message is never told, hence the line.
"""

# ruff: noqa: SLF001 - torch's stubs do not know gloo's options, which are private besides
from __future__ import annotations

import datetime as dt
import hashlib
import json
import math
import select
import socket
import threading
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ("GlooReceiver", "chunk_ends")

_c10d: Any = torch.distributed

_PREFIX = "genapi"
_LOOK_AT_LINE_EVERY = dt.timedelta(seconds=0.1)
# Connecting is instant, but torch's store looks up the address's name, and a resolver that does not
# answer takes its time.
_CONNECT_TIMEOUT_S = 15.0
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


class GlooReceiver:
    """One receiving rank. Every wait is bounded: by `timeout_s`, or by that of the bucket.

    Not thread-safe.

    A rank that fails leaves its group at once, so that the others fail too instead of waiting.
    """

    def __init__(self, *, packed: bool, packed_buffer_size_bytes: int, timeout_s: float) -> None:
        self._packed = packed
        self._limit = packed_buffer_size_bytes
        self._timeout_s = timeout_s
        self._world_size = 0
        self._line: socket.socket | None = None
        self._group: Any = None  # a ProcessGroupGloo, or None

    def join(self, master_address: str, master_port: int, *, rank: int, world_size: int) -> None:
        """Join the group; returns when every rank has.

        Raises:
            ValueError: the rank does not exist in a group of this size, or is the sender's.
            RuntimeError: not every rank came in time, or one left.
        """
        if not 0 < rank < world_size:
            raise ValueError(
                f"Invalid init_info: rank {rank} is not a receiver's in a group of {world_size}: "
                "receivers have the ranks 1 and up, so check rank_offset and world_size"
            )
        self._world_size = world_size
        problem = self._join(master_address, master_port, rank, world_size)
        if problem is not None:
            self.close()
            raise RuntimeError(
                f"rank {rank} of {world_size} could not join the update group at "
                f"{master_address}:{master_port} (limit {self._timeout_s:g} s): {problem}"
            )

    def receive(
        self,
        names: Sequence[str],
        dtype_names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        timeout_s: float | None = None,
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield the bucket's tensors, on the CPU, as they arrive: one list per broadcast.

        Every tensor owns its memory. Asking for more after the last list tells the others that
        this rank is done with the bucket, and waits for them to be. A caller that does not take
        all must `close`. Each broadcast is awaited for at most `timeout_s`; None = as long as the
        one before was, at first as long as the join.

        Raises:
            ValueError: the three lists do not describe tensors; nothing was received, and the
                group still works.
            RuntimeError: there is no group, the sender or another rank left it or stalled, or the
                sender was about to send something else.
        """
        if self._group is None:
            raise RuntimeError("there is no update group: it was never joined, or it broke earlier")
        specs = _specs(names, dtype_names, shapes)
        self._timeout_s = timeout_s or self._timeout_s
        sizes = [dtype.itemsize * math.prod(shape) for _, dtype, shape in specs]
        ends = list(chunk_ends(sizes, self._limit) if self._packed else range(1, len(specs) + 1))
        pieces = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        digest = _digest(names, dtype_names, shapes)
        self._expect(sum(any(sizes[piece]) for piece in pieces), sum(sizes), digest)
        for piece in pieces:
            chunk = torch.empty(sum(sizes[piece]), dtype=torch.uint8)
            if chunk.numel():
                self._fill(chunk, f"{specs[piece.start][0]!r} and what goes with it")
            parts = torch.split(chunk, sizes[piece])
            yield [_restore(*spec, part) for spec, part in zip(specs[piece], parts, strict=True)]
        self._check(self._greet(), "the other ranks")

    def close(self) -> None:
        """Leave the group. Safe to repeat.

        What it holds is freed by a thread: an operation that is never told of its peer's end
        keeps threads and sockets until its own limit, but keeps nobody waiting.
        """
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._group is not None:
            group = [self._group]
            self._group = None
            threading.Thread(target=group.clear, name="genapi-gloo-leave").start()

    # From here on failures are returned as text. The frames of an exception that is on its way, or
    # kept by somebody, would hold references to the group and with them its sockets.

    def _join(self, address: str, port: int, rank: int, world_size: int) -> str | None:
        gloo = _c10d.ProcessGroupGloo
        timeout = dt.timedelta(seconds=self._timeout_s)
        connect_timeout_s = min(_CONNECT_TIMEOUT_S, self._timeout_s)
        options = gloo._Options()
        options._timeout = timeout
        options._threads = 1
        try:
            self._line = socket.create_connection((address, port), connect_timeout_s)
            # The way to the trainer is the right interface to bind.
            options._devices = [gloo.create_device(hostname=self._line.getsockname()[0])]
            store = _c10d.TCPStore(
                address,
                port,
                is_master=False,
                wait_for_workers=False,
                timeout=dt.timedelta(seconds=connect_timeout_s),
            )
            store.set_timeout(timeout)
            self._group = gloo(_c10d.PrefixStore(_PREFIX, store), rank, world_size, options)
        except (RuntimeError, OSError) as error:
            return str(error)
        return self._greet()

    def _expect(self, broadcasts: int, total: int, digest: int) -> None:
        announced = torch.empty(3, dtype=torch.int64)
        self._fill(announced, "the announcement of a bucket")
        if announced.tolist() != [broadcasts, total, digest]:
            count, size, its_own = announced.tolist()
            other = "other tensors, or another order" if its_own != digest else "the same tensors"
            self._check(
                f"the sender announced {size} bytes in {count} broadcasts, the update call "
                f"describes {total} in {broadcasts}, and {other}; names, dtypes, shapes, their "
                "order, packed and packed_buffer_size_bytes must be those that the sender goes by",
                "a bucket",
            )

    def _fill(self, data: torch.Tensor, what: str) -> None:
        options = _c10d.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = dt.timedelta(seconds=self._timeout_s)
        self._check(self._run("broadcast", data, options), what)

    def _check(self, problem: str | None, what: str) -> None:
        if problem is not None:
            self.close()
            raise RuntimeError(
                f"the update group broke while {what} was awaited "
                f"(limit {self._timeout_s:g} s): {problem}"
            )

    def _greet(self) -> str | None:
        ranks = torch.ones(1, dtype=torch.int64)
        options = _c10d.AllreduceOptions()
        options.timeout = dt.timedelta(seconds=self._timeout_s)
        problem = self._run("allreduce", ranks, options)
        expected = self._world_size
        if problem is None and ranks.item() != expected:
            return f"{ranks.item()} of {expected} ranks greeted"
        return problem

    def _run(self, operation: str, data: torch.Tensor, options: Any) -> str | None:
        """Wait for a collective, which has a limit of its own, or for the sender's leave."""
        if self._group is None:
            return "it was closed"
        try:
            work = getattr(self._group, operation)([data], options)
        except RuntimeError as error:
            return str(error)
        while True:
            over = work.is_completed()
            try:
                work.wait(_LOOK_AT_LINE_EVERY)
            except RuntimeError as error:
                if over:
                    return str(error)
                if work.is_completed():
                    continue  # just then: this error may be that of the wait alone
            else:
                return None
            if self._line is None or select.select([self._line], [], [], 0)[0]:
                return "the sender left"


def chunk_ends(sizes: Sequence[int], limit: int) -> Iterator[int]:
    """Yield the end index of each packed chunk of tensors with these sizes in bytes."""
    total = 0
    for end, size in enumerate(sizes, start=1):
        total += size
        if total > limit or end == len(sizes):
            yield end
            total = 0


def _digest(
    names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]
) -> int:
    tensors = [[n, d, list(s)] for n, d, s in zip(names, dtype_names, shapes, strict=True)]
    text = json.dumps(tensors, separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def _specs(
    names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]
) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    if not len(names) == len(dtype_names) == len(shapes):
        raise ValueError(
            f"Invalid update_info: {len(names)} names, {len(dtype_names)} dtype_names and "
            f"{len(shapes)} shapes: they describe the same tensors and must be of one length"
        )
    specs = []
    for name, dtype_name, shape in zip(names, dtype_names, shapes, strict=True):
        if dtype_name not in _DTYPES:
            raise ValueError(
                f"Invalid update_info: {name!r} has the dtype {dtype_name!r}, unknown to torch"
            )
        if any(size < 0 for size in shape):
            raise ValueError(
                f"Invalid update_info: {name!r} has the shape {list(shape)}, less than nothing"
            )
        specs.append((name, _DTYPES[dtype_name], tuple(shape)))
    return specs


def _restore(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], data: torch.Tensor
) -> tuple[str, torch.Tensor]:
    # A copy: bytes in the middle of a chunk need not be aligned for the dtype, and the engine may
    # keep a tensor for long, which must not hold the whole chunk.
    tensor = torch.empty(shape, dtype=dtype)
    tensor.view(-1).view(torch.uint8).copy_(data)
    return name, tensor
