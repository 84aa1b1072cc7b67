"""The state table of a publication: one row per phase, and nothing about how rows are run.

The rule of this file: whatever decides the order of a publication is a row here. `transaction`
walks the table, `drive` carries out what a row asks, the docs draw their diagram from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Literal

from genapi.publication.evidence import Observed, Op

__all__ = ("READS", "TABLE", "Act", "Phase", "Row", "Who", "mermaid")

READS = frozenset({Op.INSPECT, Op.CONFIRM, Op.READ, Op.PROBE})
"""What changes nothing. Before anything else a publisher makes sure that it was not superseded: a
call of its own would land in the middle of its successor's publication."""


class Phase(StrEnum):
    """Where a publication stands. The last three are its ends."""

    PREFLIGHT = "preflight"
    STAGE = "stage"
    GROUP = "group"
    PAUSE = "pause"
    CONFIRM = "confirm"
    MARK = "mark"
    HEAL = "heal"
    BEGIN = "begin"
    TRANSFER = "transfer"
    FINISH = "finish"
    LABEL = "label"
    VERIFY = "verify"
    COMMIT = "commit"
    RESUME = "resume"
    PROBE = "probe"
    SHUT = "shut"
    OPEN = "open"
    CLOSE = "close"
    EXAMINE = "examine"
    UNMARK = "unmark"
    RELEASE = "release"
    DONE = "done"
    RELEASED = "released"
    HELD = "held"


class Act(StrEnum):
    """What the publisher does itself while workers are asked."""

    STAGE = "stage"
    JOIN = "join"
    INTEND = "intend"
    """Write the target onto the board, before any worker is asked to begin."""
    SEND = "send"
    COMMIT = "commit"


class Who(StrEnum):
    """Which workers a row asks."""

    ALL = "all"
    UNJOINED = "unjoined"
    """Those whose group does not stand yet."""
    MARKABLE = "markable"
    """All, where the engine can be labelled without aborting anything."""
    BROKEN = "broken"
    """Those that a failure left in the middle of an update, here or in another process."""
    WHOLE = "whole"
    """Those whose group is not broken."""
    UNLABELLED = "unlabelled"
    """Those that finished, when FINISH did not carry the label."""
    PROVED = "proved"
    """Those whose label was read back as the attempt's own."""
    RESUMED = "resumed"
    """Those that answered the resume."""
    DOUBTED = "doubted"
    """Those that serve under the new label and did not pass the probe."""
    BEGUN = "begun"
    """Those that were asked to begin and are not dead."""
    CUT_OFF = "cut_off"
    """Those of them whose group is broken."""
    MARKED_CLEAN = "marked_clean"
    """Those that were marked, never asked to begin and not broken before."""
    PAUSED_CLEAN = "paused_clean"
    """Those that this publication paused, whose label is what it was, that were never asked to
    begin and were neither fenced nor broken before."""


@dataclass(frozen=True, slots=True)
class Row:
    """One phase.

    Attributes:
        ask: the operation asked of workers; None = nothing.
        who: which workers are asked.
        act: what the publisher does meanwhile; None = nothing.
        then: the next phase when everything asked was done.
        otherwise: the next phase when something failed or the caller cancelled.
        breaks: whether a failure of one worker breaks its group, and a cancellation breaks all.
        alone: whether the other groups go on: `otherwise` is for when all are broken.
        tolerates: answers that are no failure here, because a later row decides.
        retries: whether an unanswered operation may be asked again.
        on_cancel: `cut`: what is waited for is given up. `wait`: it is awaited (bounded), since an
            unanswered call would leave more unknown, and then the row has failed. `go_on`: the
            row takes no notice, since going forward is the shorter way to a known state.
    """

    then: Phase
    otherwise: Phase
    ask: Op | None = None
    who: Who = Who.ALL
    act: Act | None = None
    breaks: bool = False
    alone: bool = False
    tolerates: frozenset[Observed] = frozenset()
    retries: bool = False
    on_cancel: Literal["cut", "wait", "go_on"] = "go_on"


_LOST = frozenset({Observed.LOST})

TABLE: Mapping[Phase, Row] = MappingProxyType(
    {
        # Nothing is touched before every worker can take part.
        Phase.PREFLIGHT: Row(
            Phase.STAGE, Phase.RELEASED, ask=Op.INSPECT, retries=True, on_cancel="cut"
        ),
        Phase.STAGE: Row(Phase.GROUP, Phase.RELEASED, act=Act.STAGE, on_cancel="cut"),
        Phase.GROUP: Row(
            Phase.PAUSE,
            Phase.RELEASED,
            ask=Op.JOIN,
            who=Who.UNJOINED,
            act=Act.JOIN,
            breaks=True,
            on_cancel="wait",
        ),
        Phase.PAUSE: Row(
            Phase.CONFIRM, Phase.RELEASE, ask=Op.PAUSE, retries=True, on_cancel="wait"
        ),
        Phase.CONFIRM: Row(
            Phase.MARK, Phase.RELEASE, ask=Op.CONFIRM, retries=True, on_cancel="wait"
        ),
        # Written ahead: a worker that is left half-updated says so to everybody who asks.
        Phase.MARK: Row(
            Phase.HEAL,
            Phase.UNMARK,
            ask=Op.MARK,
            who=Who.MARKABLE,
            act=Act.INTEND,
            on_cancel="wait",
        ),
        Phase.HEAL: Row(Phase.BEGIN, Phase.UNMARK, ask=Op.HEAL, who=Who.BROKEN, on_cancel="wait"),
        # From here on nobody resumes without proof.
        Phase.BEGIN: Row(
            Phase.TRANSFER,
            Phase.CLOSE,
            ask=Op.BEGIN,
            breaks=True,
            alone=True,
            on_cancel="wait",
        ),
        # A lost reply goes on to FINISH, whose answer decides, if the sender knows that every
        # worker took the bucket.
        Phase.TRANSFER: Row(
            Phase.FINISH,
            Phase.CLOSE,
            ask=Op.UPDATE,
            who=Who.WHOLE,
            act=Act.SEND,
            breaks=True,
            alone=True,
            tolerates=_LOST,
            on_cancel="wait",
        ),
        Phase.FINISH: Row(Phase.LABEL, Phase.LABEL, ask=Op.FINISH, who=Who.WHOLE, tolerates=_LOST),
        Phase.LABEL: Row(
            Phase.VERIFY,
            Phase.CLOSE,
            ask=Op.LABEL,
            who=Who.UNLABELLED,
            tolerates=_LOST,
        ),
        Phase.VERIFY: Row(Phase.COMMIT, Phase.HELD, ask=Op.READ, retries=True),
        Phase.COMMIT: Row(Phase.RESUME, Phase.HELD, act=Act.COMMIT),
        Phase.RESUME: Row(Phase.PROBE, Phase.PROBE, ask=Op.RESUME, who=Who.PROVED, retries=True),
        # A process that restarted meanwhile answers a resume as well.
        Phase.PROBE: Row(Phase.OPEN, Phase.SHUT, ask=Op.PROBE, who=Who.RESUMED, retries=True),
        # What is not what its label says must not serve other processes either: paused, and
        # labelled as a worker in the middle of an update.
        Phase.SHUT: Row(Phase.OPEN, Phase.OPEN, ask=Op.SHUT, who=Who.DOUBTED, retries=True),
        Phase.OPEN: Row(Phase.DONE, Phase.DONE),
        # Ways out after a failure.
        Phase.CLOSE: Row(Phase.EXAMINE, Phase.EXAMINE, ask=Op.CLOSE, who=Who.CUT_OFF),
        Phase.EXAMINE: Row(Phase.HELD, Phase.HELD, ask=Op.READ, who=Who.BEGUN, retries=True),
        Phase.UNMARK: Row(
            Phase.RELEASE, Phase.RELEASE, ask=Op.UNMARK, who=Who.MARKED_CLEAN, retries=True
        ),
        Phase.RELEASE: Row(
            Phase.RELEASED,
            Phase.RELEASED,
            ask=Op.RESUME,
            who=Who.PAUSED_CLEAN,
            retries=True,
        ),
    }
)


def mermaid() -> str:
    """The table as a Mermaid state diagram: solid words for success, `fails` for failure."""
    lines = ["stateDiagram-v2", f"    [*] --> {Phase.PREFLIGHT}"]
    for phase, row in TABLE.items():
        lines.append(f"    {phase} --> {row.then}")
        if row.otherwise is not row.then:
            lines.append(f"    {phase} --> {row.otherwise}: fails")
    lines += [f"    {end} --> [*]" for end in (Phase.DONE, Phase.RELEASED, Phase.HELD)]
    return "\n".join(lines)
