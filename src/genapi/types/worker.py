"""What is known of workers at one moment, and what a publication did to each."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from genapi.types.base import Value
from genapi.types.ids import Role, WorkerId
from genapi.types.policy import PolicyVersion

__all__ = (
    "Evidence",
    "Fence",
    "FenceStrength",
    "FleetSnapshot",
    "Outcome",
    "PhaseTime",
    "PublishReport",
    "Receipt",
    "Recovery",
    "VerifyLevel",
    "WorkerState",
)

VerifyLevel = Literal["label", "checksum", "probe"]
"""How a worker is proved to hold what was published."""


class FenceStrength(StrEnum):
    """What keeps traffic from a fenced worker, weakest first."""

    CLIENT = "client"
    PAUSED = "paused"
    UNROUTED = "unrouted"
    DEAD = "dead"


class Recovery(StrEnum):
    """The way back for a worker that did not commit."""

    REPUBLISH = "republish"
    CLOSE_THEN_REPUBLISH = "close_then_republish"
    RESTART_THEN_PUBLISH = "restart_then_publish"


class Fence(Value):
    """Why a worker gets no traffic. Only a later publication that verifies it lifts a fence.

    Attributes:
        strength: what keeps the traffic away.
        reason: what happened, in a sentence.
        recovery: the way back.
    """

    strength: FenceStrength
    reason: str
    recovery: Recovery


class WorkerState(Value):
    """One worker as a read showed it.

    Attributes:
        id: names this life of the process.
        url: where it is administered.
        role: unified, prefill or decode.
        version: the policy its label names; None = UNKNOWN.
        label: the label itself, as read.
        paused: whether it generates nothing now; None = not known.
        healthy: whether it answers and its engine lives.
        fence: why it gets no traffic; None = it may be used.
        ranks: processes it brings into a collective (TP x PP x internal DP).
    """

    id: WorkerId
    url: str
    role: Role = Role.UNIFIED
    version: PolicyVersion | None = None
    label: str | None = None
    paused: bool | None = None
    healthy: bool = True
    fence: Fence | None = None
    ranks: Annotated[int, Field(ge=1)] = 1


class FleetSnapshot(Value):
    """All workers at one moment.

    Attributes:
        workers: in the stable order that ranks follow.
        committed: the newest version that every worker was proved to hold; None = UNKNOWN.
        final: the version that its publisher was closed with, so that none newer comes unless
            another publisher starts; None = one may come.
    """

    workers: tuple[WorkerState, ...]
    committed: PolicyVersion | None = None
    final: PolicyVersion | None = None


class Outcome(StrEnum):
    """Where a publication left one worker."""

    COMMITTED = "committed"
    UNTOUCHED = "untouched"
    DIRTY = "dirty"
    UNKNOWN = "unknown"


class Evidence(StrEnum):
    """How an outcome is known."""

    OWN_LABEL = "own_label"
    NOT_BEGUN = "not_begun"
    SESSION_CLOSED_EMPTY = "session_closed_empty"
    REJECTED = "rejected"
    OTHER_LABEL = "other_label"
    OTHER_CHECKSUM = "other_checksum"
    OTHER_SCORES = "other_scores"
    PEER_LOST = "peer_lost"
    NO_ANSWER = "no_answer"
    DEAD = "dead"


class Receipt(Value):
    """What one publication did to one worker, and how that is known.

    Attributes:
        worker: which worker.
        url: where it was administered.
        outcome: COMMITTED, UNTOUCHED, DIRTY or UNKNOWN.
        evidence: the observation that the outcome rests on.
        version_before: what its label named at the start; None = UNKNOWN.
        version_after: what its label named at the end; None = UNKNOWN.
        paused_s: seconds from the first pause call to the answered resume, or to the end.
        bytes_sent: weight bytes that the worker was sent, or told to load.
        verified: the levels at which it was proved to hold the version: `label`, its label was
            read back; `checksum`, its bytes equal those of another worker; `probe`, its scores
            equal those of another worker or the trainer's.
        checksum_blind: parameters of which its checksum saw nothing; None = none was taken.
        probe_gap: most nats between one of its scores and the trainer's; None = not compared.
        fence: why it gets no traffic now; None = it serves.
        recovery: the way back; None when it serves.
        error: the first error that concerned this worker, as text.
    """

    worker: WorkerId
    url: str
    outcome: Outcome
    evidence: Evidence
    version_before: PolicyVersion | None = None
    version_after: PolicyVersion | None = None
    paused_s: float = 0.0
    bytes_sent: int = 0
    verified: tuple[VerifyLevel, ...] = ()
    checksum_blind: int | None = None
    probe_gap: float | None = None
    fence: Fence | None = None
    recovery: Recovery | None = None
    error: str | None = None


class PhaseTime(Value):
    """How long one phase of a publication took, in seconds."""

    phase: str
    seconds: float


class PublishReport(Value):
    """The result of one publication.

    Attributes:
        version: what was published.
        committed: whether every worker it needed holds the version and serves.
        receipts: one per worker, in rank order.
        phases: seconds per phase, in the order they ran.
        error: the first error, as text; None when committed.
    """

    version: PolicyVersion
    committed: bool
    receipts: tuple[Receipt, ...]
    phases: tuple[PhaseTime, ...] = ()
    error: str | None = None

    @property
    def probe_gap(self) -> float | None:
        """Most nats between a worker's score and the trainer's; None = nothing was compared."""
        gaps = [r.probe_gap for r in self.receipts if r.probe_gap is not None]
        return max(gaps, default=None)

    @property
    def seconds(self) -> float:
        """Wall time of the whole transaction."""
        return sum(phase.seconds for phase in self.phases)

    def __str__(self) -> str:
        state = "committed" if self.committed else f"NOT committed ({self.error})"
        lines = [f"publication of {self.version}: {state}"]
        for r in self.receipts:
            way = f", recovery {r.recovery}" if r.recovery else ""
            why = f": {r.error}" if r.error else ""
            lines.append(f"  {r.url} {r.outcome} ({r.evidence}{way}){why}")
        return "\n".join(lines)
