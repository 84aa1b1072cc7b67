"""The sending rank of a gloo update group.

The rule of this file: every call but `abandon` may block and runs in a thread of the caller's;
`abandon` may come from any thread at any moment, does not block, and what blocks then fails.

What travels is laid out in `genapi.engine_side.receiver`, whose code this file does not share:
each end is written against the layout, and tests hold them against each other.

gloo has no way to call a collective off (`abort` and `shutdown` do nothing), and the destructor
of a group waits for what is in flight. So waits are cut into slices that look whether the group
was abandoned, and the destructor runs in a thread of its own. When any operation times out, gloo
closes every connection of its group, so that thread first posts a receive that nobody answers,
with a limit of 1 ms: it ends most of what is in flight, and receivers see connections closed.

An engine's own receiver that finds nobody at the rendezvous tries again for half an hour, and does
nothing else meanwhile. So the port of a plain group that never formed stays open until `close`,
and whoever comes is turned away.
"""

# ruff: noqa: SLF001 - torch's stubs do not know gloo's options, which are private besides
from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import json
import os
import socket
import threading
import time
import weakref
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ("GlooGroup", "GroupError", "Parcel", "pack", "plan_chunks")

_c10d: Any = torch.distributed

_LOOK_EVERY = dt.timedelta(seconds=0.1)
_LOOK_EVERY_S = _LOOK_EVERY.total_seconds()
_AT_ONCE = dt.timedelta(milliseconds=1)
_UNUSED_TAG = 0x6E0


class GroupError(RuntimeError):
    """The group could not be built, or broke; it is of no further use."""


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """One bucket as it travels, for however many groups it is sent to.

    Attributes:
        announcement: what receivers hold their update call against.
        broadcasts: the bytes of each broadcast, on the CPU.
        nbytes: size of all of them.
    """

    announcement: torch.Tensor
    broadcasts: tuple[torch.Tensor, ...]
    nbytes: int


def pack(
    tensors: Sequence[Any],
    update_info: Mapping[str, Any],
    *,
    packed: bool,
    packed_buffer_size_bytes: int,
    plain: bool = False,
) -> Parcel:
    """Lay out one bucket.

    Tensors are torch tensors on any device, or numpy arrays. They are not copied where they lie
    contiguous on the CPU and are not packed: they must not change before the parcel was sent.

    Args:
        tensors: what is sent.
        update_info: what it is: `names`, `dtype_names`, `shapes`.
        packed: whether tensors are copied together into chunks, or each is a broadcast.
        packed_buffer_size_bytes: a chunk closes with the tensor that takes it over this size.
        plain: whether receivers wait for what has no byte as well.
    """
    sizes = [t.nbytes for t in tensors]
    # No tensor fits under a negative limit: each closes a chunk of its own.
    chunks = plan_chunks(sizes, packed_buffer_size_bytes if packed else -1)
    broadcasts = tuple(
        _payload([tensors[i] for i in chunk])
        for chunk in chunks
        if plain or any(sizes[i] for i in chunk)
    )
    return Parcel(
        torch.tensor([len(broadcasts), sum(sizes), _digest(update_info)], dtype=torch.int64),
        broadcasts,
        sum(sizes),
    )


class GlooGroup:
    """Rank 0 of one group, and the host of its rendezvous.

    Attributes:
        host: the address that receivers connect to; nothing listens on any other.
        port: the rendezvous port, chosen by the kernel and open from now until `abandon`; that of
            a plain group that did not form, until `close`.
    """

    def __init__(
        self,
        host: str,
        *,
        prefixes: Sequence[str] = ("genapi",),
        plain: bool = False,
    ) -> None:
        """Open the rendezvous.

        Args:
            host: an address of this machine that every receiver can reach; a name is resolved.
            prefixes: key prefixes of the store, the outermost first, as the receivers have them.
            plain: the receivers are an engine's own and know broadcasts of data only: neither
                the layout's greetings nor its announcements.

        Raises:
            ValueError: the address stands for every interface; receivers need one to connect to.
            OSError: the address is not one of this machine's.
        """
        self._prefixes = tuple(prefixes)
        self._plain = plain
        self._lock = threading.Lock()
        self._abandoned = threading.Event()
        self._closed = threading.Event()
        self._group: Any = None  # a ProcessGroupGloo, or None
        self._leaving: threading.Thread | None = None
        self._world_size = 0
        self.host, self.port, self._listener = _listen(host)
        # Once; at the latest when nobody holds the group any more.
        self._stop_listening = weakref.finalize(self, os.close, self._listener)
        self._store, self._client = self._open_store()

    def join(self, world_size: int, *, timeout_s: float) -> None:
        """Take rank 0; returns when every receiver has joined.

        Raises:
            ValueError: a group needs at least one receiver.
            GroupError: not all joined within `timeout_s`, or the group was abandoned.
        """
        if world_size < 2:  # noqa: PLR2004 - the sender and one receiver
            raise ValueError(f"world_size={world_size}: a group is the trainer and its receivers")
        deadline = time.monotonic() + timeout_s
        problem = self._join(world_size, deadline)
        if problem is None and not self._plain:
            problem = self._greet(deadline)
        if problem is not None:
            self.abandon()
            raise GroupError(
                f"the update group of {world_size} ranks at {self.host}:{self.port} did not form "
                f"within {timeout_s:g} s: {problem}"
            )

    def send(self, parcel: Parcel, *, timeout_s: float) -> int:
        """Send one bucket and return its size in bytes. Not to be called twice at a time.

        When it returns every receiver has loaded the bucket (`plain` ones have received it).

        Raises:
            GroupError: not every receiver took the bucket within `timeout_s`, or the group is
                gone. After any error the group is abandoned, so that receivers fail too.
        """
        deadline = time.monotonic() + timeout_s
        try:
            if not self._plain:
                self._broadcast(parcel.announcement, deadline)
            for data in parcel.broadcasts:
                self._broadcast(data, deadline)
            if not self._plain:
                self._check(self._greet(deadline))
        except BaseException:
            self.abandon()
            raise
        return parcel.nbytes

    def abandon(self) -> None:
        """Leave the group at once. Never blocks; safe to repeat.

        A `join` or `send` under way in another thread raises `GroupError`; receivers that wait
        for data fail, and so will those that ask for it later. A thread frees what the group
        holds: nearly always within moments, at the latest when a broadcast under way reaches its
        limit.
        """
        with self._lock:
            if self._abandoned.is_set():
                return
            self._abandoned.set()
            self._store = self._client = None  # the receivers' lines close
            if self._group is not None:
                group = [self._group]
                self._group = None
                self._leave_by(_leave, group, self._world_size)
            elif self._plain and not self._closed.is_set():
                self._leave_by(self._turn_away, daemon=True)  # nobody has to call `close`
                return
            self._stop_listening()

    def close(self, *, timeout_s: float) -> bool:
        """Abandon the group and wait until all it held is free; false if that takes longer."""
        self._closed.set()
        self.abandon()
        if self._leaving is not None:
            self._leaving.join(timeout_s)
        return self._leaving is None or not self._leaving.is_alive()

    def _open_store(self) -> tuple[Any, Any]:
        """A store at the port, and a connection of our own to it.

        Our keys go over the connection: the hosting object must be free to vanish while a thread
        waits for a key.
        """
        store = _c10d.TCPStore(
            self.host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=os.dup(self._listener),
        )
        return store, _c10d.TCPStore(self.host, self.port, is_master=False, wait_for_workers=False)

    def _leave_by(self, function: Callable[..., None], *args: object, daemon: bool = False) -> None:
        self._leaving = threading.Thread(
            target=function, args=args, name="genapi-gloo-leave", daemon=daemon
        )
        self._leaving.start()

    def _turn_away(self) -> None:
        """Until the group is closed, let every late receiver in and hang up on it."""
        try:
            while not self._closed.is_set():
                store, client = self._open_store()
                # A receiver writes the first key as soon as its connection stands.
                while not client.num_keys() and not self._closed.wait(_LOOK_EVERY_S):
                    pass
                del store, client
        finally:
            self._stop_listening()

    def _broadcast(self, data: torch.Tensor, deadline: float) -> None:
        options = _c10d.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = _until(deadline)
        self._check(self._run("broadcast", data, options))

    def _check(self, problem: str | None) -> None:
        if problem is not None:
            raise GroupError(f"the update group of {self._world_size} ranks broke: {problem}")

    # From here on failures are returned as text. The frames of an exception that is on its way, or
    # kept by somebody, would hold references to the group and with them its sockets.

    def _join(self, world_size: int, deadline: float) -> str | None:
        gloo = _c10d.ProcessGroupGloo
        options = gloo._Options()
        options._threads = 1
        options._timeout = _until(deadline)
        store = self._client
        if store is None:
            return "it was abandoned"
        try:
            options._devices = [gloo.create_device(hostname=self.host)]
            store.set_timeout(_until(deadline))
            for prefix in self._prefixes:
                store = _c10d.PrefixStore(prefix, store)
            group = [gloo(store, 0, world_size, options)]
        except RuntimeError as error:
            return self._explain(error)
        with self._lock:
            if not self._abandoned.is_set():
                self._world_size = world_size
                self._group = group.pop()
                return None
        _leave(group, world_size)
        return "it was abandoned"

    def _greet(self, deadline: float) -> str | None:
        ranks = torch.ones(1, dtype=torch.int64)
        options = _c10d.AllreduceOptions()
        options.timeout = _until(deadline)
        if problem := self._run("allreduce", ranks, options):
            return problem
        greeted, expected = ranks.item(), self._world_size
        return None if greeted == expected else f"{greeted} of {expected} ranks greeted"

    def _run(self, operation: str, data: torch.Tensor, options: Any) -> str | None:
        group = self._group
        if group is None:
            return "it was abandoned" if self._abandoned.is_set() else "nobody has joined it"
        try:
            work = getattr(group, operation)([data], options)
        except RuntimeError as error:
            return self._explain(error)
        del group
        while True:
            over = work.is_completed()
            try:
                work.wait(_LOOK_EVERY)
            except RuntimeError as error:
                if over:
                    return self._explain(error)
                if work.is_completed():
                    continue  # just then: this error may be that of the wait alone
            else:
                return None
            if self._abandoned.is_set():
                return "it was abandoned"

    def _explain(self, error: RuntimeError) -> str:
        return "it was abandoned" if self._abandoned.is_set() else str(error)


def plan_chunks(sizes: Sequence[int], limit: int) -> list[range]:
    """Split tensors of these sizes in bytes into packed chunks, as ranges of indexes."""
    chunks, first, total = [], 0, 0
    for index, size in enumerate(sizes):
        total += size
        if total > limit:
            chunks.append(range(first, index + 1))
            first, total = index + 1, 0
    if first < len(sizes):
        chunks.append(range(first, len(sizes)))
    return chunks


def _digest(info: Mapping[str, Any]) -> int:
    columns = (info["names"], info["dtype_names"], [list(shape) for shape in info["shapes"]])
    text = json.dumps(list(zip(*columns, strict=True)), separators=(",", ":"))
    return int.from_bytes(sha256(text.encode()).digest()[:8], "little", signed=True)


def _payload(tensors: Sequence[Any]) -> torch.Tensor:
    parts = []
    for tensor in tensors:
        # A copy of an array: torch warns about those that it may not write to.
        known = tensor if isinstance(tensor, torch.Tensor) else torch.tensor(tensor)
        parts.append(known.detach().contiguous().view(-1).view(torch.uint8).cpu())
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _listen(host: str) -> tuple[str, int, int]:
    """Listen on a free port of this address only; a store left to itself listens on all."""
    family, kind, _, _, target = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    address = str(target[0])
    if ipaddress.ip_address(address).is_unspecified:
        raise ValueError(f"{host!r} stands for every interface: name one that receivers can reach")
    listener = socket.socket(family, kind)
    try:
        listener.bind(target)
        listener.listen()
    except OSError:
        listener.close()
        raise
    port = int(listener.getsockname()[1])
    return address, port, listener.detach()


def _until(deadline: float) -> dt.timedelta:
    return max(dt.timedelta(seconds=deadline - time.monotonic()), _AT_ONCE)


def _leave(group: list[Any], world_size: int) -> None:
    unanswered = torch.empty(1, dtype=torch.uint8)
    for rank in range(1, world_size):  # the first one alive does it; a dead one closes only itself
        with contextlib.suppress(RuntimeError):
            group[0].recv([unanswered], rank, _UNUSED_TAG).wait(_AT_ONCE)
    group.clear()
