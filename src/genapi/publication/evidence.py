"""What an answer of a worker means, and what follows from it.

A provider turns each reply into an `Answer` by its `Pattern`s, and owns the `Row`s that say what
an observation proves about the worker's weights and what heals it. A publication concludes from
rows and from nothing else. Here is what rows are made of; none of it knows an engine.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from genapi.types.worker import Evidence, Outcome, Recovery

__all__ = (
    "Answer",
    "Observed",
    "Op",
    "Pattern",
    "Reached",
    "Row",
    "Seen",
    "Verdict",
    "markdown",
    "verdicts_of",
)


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
    UNREADABLE = "unreadable"
    """Answered that it cannot read the files that it was told to load."""
    SESSION_OPEN = "session_open"
    """Answered that an update session is open already."""
    NO_SESSION = "no_session"
    """Answered that no update session is open."""
    NOT_SENT = "not_sent"
    """The call cannot have reached it."""
    LOST = "lost"
    """No answer in time: it may or may not have acted."""
    UPDATING = "updating"
    """Its label says that an update of it began and did not end."""
    OTHER_LABEL = "other_label"
    """It carries another label than this attempt's, or another process answers in its place."""
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


class Reached(StrEnum):
    """How far a publication had come with a worker."""

    NOT_BEGUN = "not_begun"
    """It was never asked to begin."""
    EMPTY = "empty"
    """It was asked to begin, and no bucket was sent to it."""
    SENT = "sent"
    """A bucket was sent to it."""
    HELD = "held"
    """The attempt's own label was read back from it, and its engine lives."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one worker showed.

    Attributes:
        op: what was asked; None = whatever it was.
        observed: what came back; None = whatever it was.
        reached: how far the publication had come with the worker.
    """

    op: Op | None
    observed: Observed | None
    reached: Reached


@dataclass(frozen=True, slots=True)
class Row:
    """What one observation proves: a claim about one engine.

    Attributes:
        op: what was asked; None = whatever it was.
        observed: what came back; None = whatever else it was.
        reached: how far the publication may have come with the worker.
        verdict: where the worker's weights are and what heals them.
        source: where this was seen. It begins with RUN (on the real engine), READ (in its source)
            or RULE (it holds whatever the engine does).
    """

    op: Op | None
    observed: Observed | None
    reached: tuple[Reached, ...]
    verdict: Verdict
    source: str


def row(  # noqa: PLR0917 - one column each
    op: Op | None,
    observed: Observed | None,
    reached: Reached | tuple[Reached, ...],
    outcome: Outcome,
    evidence: Evidence,
    recovery: Recovery | None,
    source: str,
) -> Row:
    """A row, written as a line of a table."""
    places = (reached,) if isinstance(reached, Reached) else reached
    return Row(op, observed, places, Verdict(outcome, evidence, recovery), source)


@dataclass(frozen=True, slots=True)
class Pattern:
    """What a text in an error answer to one of `ops` shows; the first that fits counts.

    Attributes:
        text: a regular expression.
        observed: what it shows.
        source: where this was seen, as in a `Row`.
        ops: the operations it counts for; empty = all.
    """

    text: str
    observed: Observed
    source: str
    ops: tuple[Op, ...] = ()


def verdicts_of(rows: Iterable[Row]) -> Mapping[Seen, Verdict]:
    """The rows by what they are about.

    Raises:
        ValueError: two rows are about the same, or nothing is said of what no row names.
    """
    found: dict[Seen, Verdict] = {}
    for row in rows:
        for reached in row.reached:
            seen = Seen(row.op, row.observed, reached)
            if seen in found:
                raise ValueError(f"two rows are about {seen}")
            found[seen] = row.verdict
    missing = [reached for reached in Reached if Seen(None, None, reached) not in found]
    if missing:
        raise ValueError(f"no row for whatever else is seen when {missing[0]} was reached")
    return MappingProxyType(found)


def markdown(rows: Sequence[Row], patterns: Sequence[Pattern]) -> tuple[str, str]:
    """Rows and patterns as two tables for a page of docs."""
    evidence = _table(
        ("asked", "came back", "reached", "outcome", "evidence", "recovery", "source"),
        [
            (
                row.op or "any",
                row.observed or "any other",
                ", ".join(row.reached),
                row.verdict.outcome,
                row.verdict.evidence,
                row.verdict.recovery or "none",
                row.source,
            )
            for row in rows
        ],
    )
    texts = _table(
        ("text of the error", "to", "shows", "source"),
        [(f"`{p.text}`", ", ".join(p.ops) or "any", p.observed, p.source) for p in patterns],
    )
    return evidence, texts


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
