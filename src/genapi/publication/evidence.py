"""What an answer of a worker means, and what follows from it.

A provider's `admin.py` turns each reply into an `Answer` and owns a table of `Verdict`s: what an
observation proves about the worker's weights and what heals it. The state table of a
publication concludes from these and from nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from genapi.types.worker import Evidence, Outcome, Recovery

__all__ = ("Answer", "Observed", "Op", "Verdict")


class Op(StrEnum):
    """What can be asked of a worker during a publication."""

    INSPECT = "inspect"
    JOIN = "join"
    PAUSE = "pause"
    CONFIRM = "confirm"
    MARK = "mark"
    UNMARK = "unmark"
    HEAL = "heal"
    BEGIN = "begin"
    UPDATE = "update"
    FINISH = "finish"
    LABEL = "label"
    READ = "read"
    RESUME = "resume"
    PROBE = "probe"
    SHUT = "shut"
    CLOSE = "close"


class Observed(StrEnum):
    """What came back."""

    DONE = "done"
    """Answered: it did what was asked."""
    REFUSED = "refused"
    """Answered an error that shows nothing was changed."""
    REJECTED = "rejected"
    """Answered that it did not take what was sent; its weights may be half-written."""
    PEER_LOST = "peer_lost"
    """Answered that the other end of the transfer went away."""
    SESSION_OPEN = "session_open"
    """Answered that an update session is open already."""
    NO_SESSION = "no_session"
    """Answered that no update session is open."""
    NOT_SENT = "not_sent"
    """The call cannot have reached it."""
    LOST = "lost"
    """No answer in time: it may or may not have acted."""
    DIFFERS = "differs"
    """It answered, and holds something else than the other workers or the trainer."""
    DEAD = "dead"
    """It answered that its engine is dead, or nothing listens any more."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One worker's answer to one operation.

    Attributes:
        observed: what came back.
        detail: the worker's own words, for messages.
        facts: what was read, by name (`label`, `paused`, `checksums`, `scores`).
    """

    observed: Observed
    detail: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """Whether the worker did what was asked."""
        return self.observed is Observed.DONE


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is proved about a worker's weights, and the way back.

    Attributes:
        outcome: where the worker is.
        evidence: the observation that shows it.
        recovery: the way back; None when nothing has to be done.
    """

    outcome: Outcome
    evidence: Evidence
    recovery: Recovery | None
