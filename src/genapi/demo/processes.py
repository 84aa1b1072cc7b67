"""Embedded workers in processes of their own, started and stopped with one block.

The rule of this file: only processes that were started here are stopped, by their own handle, and
leaving the block leaves none, whatever happened inside it.
"""

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
from anyio.abc import Process

from genapi.errors import FleetError

__all__ = ("worker_processes",)

_START_S = 30.0
_TERM_S = 5.0
_KILL_S = 5.0


@asynccontextmanager
async def worker_processes(
    count: int, *, seed: int, tell: Callable[[str], None]
) -> AsyncIterator[tuple[str, ...]]:
    """`host:port` of `count` embedded workers that serve, on ports that the kernel chose.

    Each leads a session and a process group of its own: a terminal's signals do not reach it.

    Args:
        count: how many.
        seed: of their weights, the same for all.
        tell: told of each worker that serves.

    Raises:
        FleetError: a worker ended before it served, or did not serve in time.
    """
    processes: list[Process] = []
    try:
        # Shielded: a process whose start is cancelled would be nobody's.
        with anyio.CancelScope(shield=True):
            for index in range(count):
                processes.append(await _start(index, seed))  # noqa: PERF401 - kept one by one
        addresses = tuple([await _address(process) for process in processes])
        for process, address in zip(processes, addresses, strict=True):
            tell(f"worker process {process.pid} serves at {address}")
        yield addresses
    finally:
        with anyio.CancelScope(shield=True):
            await _stop(processes)


async def _start(index: int, seed: int) -> Process:
    command = (sys.executable, "-m", "genapi.embedded", "--index", str(index), "--seed", str(seed))
    return await anyio.open_process(
        command, stdin=subprocess.DEVNULL, stderr=None, start_new_session=True
    )


async def _address(process: Process) -> str:
    """Where a worker says that it listens."""
    line = b""
    assert process.stdout is not None  # noqa: S101 - it was asked for
    with anyio.move_on_after(_START_S) as scope:
        while b"\n" not in line:
            try:
                line += await process.stdout.receive()
            except anyio.EndOfStream:
                status = await process.wait()
                raise FleetError(
                    f"worker process {process.pid} ended with status {status} before it served; "
                    "install genapi with its extra 'embedded'"
                ) from None
    if scope.cancelled_caught:
        raise FleetError(f"worker process {process.pid} did not serve within {_START_S:g} s")
    url: str = json.loads(line)["url"]
    return url.removeprefix("http://")


async def _stop(processes: list[Process]) -> None:
    """End the processes: TERM, and KILL for those that stay."""
    for process in processes:
        if process.returncode is None:
            process.terminate()
    with anyio.move_on_after(_TERM_S):
        for process in processes:
            await process.wait()
    for process in processes:
        if process.returncode is None:
            process.kill()
    with anyio.move_on_after(_KILL_S):
        for process in processes:
            await process.aclose()
