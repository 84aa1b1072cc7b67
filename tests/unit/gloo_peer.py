"""A receiving rank in a process of its own, for tests of the wire between both ends.

It does one command at a time and answers each with a `Result`; the test may do something else
between asking (`ask`) and reading the answer (`answer`).
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pathlib
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from genapi.engine_side.receiver import GlooReceiver

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from multiprocessing.connection import Connection

PATIENCE_S = 30.0

Received = list[list[tuple[str, str, list[int], bytes]]]


@dataclass(frozen=True)
class Result:
    value: Any
    error: str | None
    took_s: float


class Peer:
    """Starts the process and talks to it; the commands are the methods of `_Rank`."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._asked = 0
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, command: str, *args: Any, **options: Any) -> None:
        self._asked += 1
        self._pipe.send((self._asked, command, args, options))

    def answer(self) -> Result:
        """The answer to the last command; those to earlier ones are dropped."""
        while True:
            assert self._pipe.poll(PATIENCE_S), f"no answer within {PATIENCE_S} s"
            number, answer = self._pipe.recv()
            if number == self._asked:
                assert isinstance(answer, Result)
                return answer

    def call(self, command: str, *args: Any) -> Any:
        self.ask(command, *args)
        result = self.answer()
        assert result.error is None, result.error
        return result.value

    def stop(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE_S)
        self._pipe.close()


class _Rank:
    def __init__(self) -> None:
        self.receiver = GlooReceiver(packed=False, packed_buffer_size_bytes=0, timeout_s=1.0)
        self.incoming: Iterator[list[tuple[str, torch.Tensor]]] = iter(())

    def make(self, packed: bool, limit: int, timeout_s: float) -> None:
        self.receiver.close()
        self.receiver = GlooReceiver(
            packed=packed, packed_buffer_size_bytes=limit, timeout_s=timeout_s
        )

    def join(self, address: str, port: int, rank: int, world_size: int) -> None:
        self.receiver.join(address, port, rank=rank, world_size=world_size)

    def receive(self, *description: Any, timeout_s: float | None = None) -> Received:
        return _plain(self.receiver.receive(*description, timeout_s=timeout_s))

    def receive_one(self, *description: Any) -> Received:
        """Only the first broadcast; `go_on` takes the rest."""
        self.incoming = self.receiver.receive(*description)
        return _plain([next(self.incoming)])

    def go_on(self) -> Received:
        return _plain(self.incoming)

    def close(self) -> None:
        self.receiver.close()

    def held(self) -> tuple[list[str], int]:
        return held()

    def pid(self) -> int:
        return os.getpid()


def _serve(pipe: Connection) -> None:
    rank = _Rank()
    while True:
        number, command, args, options = pipe.recv()
        started = time.monotonic()
        value, error = None, None
        try:
            value = getattr(rank, command)(*args, **options)
        except (RuntimeError, ValueError) as exception:
            # Kept until the next one: a caught exception must not hold a group open.
            kept = exception
            error = f"{type(kept).__name__}: {kept}"
        pipe.send((number, Result(value, error, time.monotonic() - started)))


def _plain(incoming: Iterable[list[tuple[str, torch.Tensor]]]) -> Received:
    return [
        [(name, str(tensor.dtype), list(tensor.shape), content(tensor)) for name, tensor in tensors]
        for tensors in incoming
    ]


def content(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes in row-major order."""
    return np.asarray(tensor.contiguous().view(-1).view(torch.uint8)).tobytes()


def held() -> tuple[list[str], int]:
    """What groups hold in this process once all leaves are over: threads by name, and sockets."""
    for thread in threading.enumerate():
        if thread.name == "genapi-gloo-leave":
            thread.join(PATIENCE_S)
    names = [p.read_text().strip() for p in pathlib.Path("/proc/self/task").glob("*/comm")]
    threads = sorted(n for n in names if n.startswith(("gloo", "pt_gloo", "pt_tcpstore")))
    return threads, len(_sockets(os.getpid()))


def listening_addresses(pid: int) -> set[str]:
    """Local addresses of the process's listening sockets, in the kernel's notation."""
    mine = _sockets(pid)
    found = set()
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in mine:  # LISTEN, and the inode
                found.add(local.partition(":")[0])
    return found


def _sockets(pid: int) -> set[str]:
    inodes = set()
    for entry in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        if target.startswith("socket:["):
            inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    return inodes
