"""Which cores a server's processes run on."""

from __future__ import annotations

import os
import pathlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ("keep_apart",)

ENGINE = b"VLLM::"
"""What the processes call themselves that make tokens."""


def keep_apart(group: int) -> None:
    """Keep vLLM's engine, where a process group has one, off the cores of the group's others.

    While vLLM makes tokens, two of its processes wait for each other without sleeping. On two
    cores they starved the one that answers for whole seconds: the first event of a stream came
    when all its tokens had been made, and so did the answer to an abort or a pause.
    """
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    processes = dict(_processes(group))
    engine = {process for process, command in processes.items() if command.startswith(ENGINE)}
    if not half or not engine:
        return
    for process in processes:
        own = cores[half:] if process in engine else cores[:half]
        for thread in _names(process / "task"):
            try:
                os.sched_setaffinity(int(thread.name), own)
            except ProcessLookupError:
                continue


def _processes(group: int) -> Iterator[tuple[pathlib.Path, bytes]]:
    """The processes of a group, each with its command line."""
    for process in _names(pathlib.Path("/proc")):
        try:
            if os.getpgid(int(process.name)) == group:
                yield process, (process / "cmdline").read_bytes()
        except (ProcessLookupError, FileNotFoundError):
            continue


def _names(folder: pathlib.Path) -> list[pathlib.Path]:
    """What is named by a number there."""
    try:
        return [path for path in folder.iterdir() if path.name.isdecimal()]
    except FileNotFoundError:
        return []
