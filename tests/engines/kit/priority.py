"""What of a server goes first."""

from __future__ import annotations

import os
import pathlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ("let_answer_first",)

ENGINE = b"VLLM::"
"""What the processes call themselves that make tokens."""


def let_answer_first(group: int) -> None:
    """Where a process group holds vLLM's engine, let all else in it go before making tokens.

    While vLLM makes tokens, the main threads of two of its processes wait for each other without
    sleeping. On two cores they starved the threads that answer and those that hand on for whole
    seconds: the first event of a stream came when all its tokens had been made, and so did an
    abort or a pause. Cores of their own would not do: there the engines of two servers starve
    each other.
    """
    processes = dict(_processes(group))
    engine = {path for path, command in processes.items() if command.startswith(ENGINE)}
    if not engine:
        return
    for process in processes:
        for thread in _names(process / "task"):
            if process in engine and thread.name == process.name:
                continue
            try:
                os.sched_setscheduler(int(thread.name), os.SCHED_RR, os.sched_param(1))
            except ProcessLookupError:
                continue
            except PermissionError:
                return  # a user's machine has more cores


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
