"""What SGLang's answers prove about a worker's weights, and what heals it.

The rule of this file: a row is a claim about one engine version. RUN was seen on SGLang 0.5.23
over gloo, the way back included (numbers name transcripts `weights_NN`); READ is in its source only
and was not run; RULE follows from how publications work whatever the engine does.

An update that failed leaves its session open, so every way back from one begins with closing it.
"""

from collections.abc import Mapping

from genapi.providers.sglang.errors import error_text, key_hint
from genapi.providers.shapes.answers import matched, unless_failed
from genapi.providers.shapes.errors import (
    BAD_REQUEST,
    FORBIDDEN,
    NOT_ALLOWED,
    NOT_FOUND,
    UNAUTHORIZED,
)
from genapi.publication.evidence import (
    Answer,
    Observed,
    Op,
    Pattern,
    Reached,
    Row,
    Seen,
    Verdict,
    row,
    verdicts_of,
)
from genapi.publication.rules import LABEL_RULES
from genapi.types.worker import Evidence, Outcome, Recovery
from genapi.wire.http import HTTPReply

__all__ = ("PATTERNS", "ROWS", "VERDICTS", "answer_of")

_TOUCHES = (Op.HEAL, Op.BEGIN, Op.UPDATE, Op.FINISH, Op.CLOSE)
"""A refusal of these that nobody knows may have left the weights half-written."""


PATTERNS: tuple[Pattern, ...] = (
    Pattern(r"session is already open", Observed.SESSION_OPEN, "RUN 04b"),
    Pattern(
        r"must run between begin_weight_update|no weight-update session is open",
        Observed.NO_SESSION,
        "RUN 02, 10",
    ),
    Pattern(r"partially updated|Failed to update parameter online", Observed.REJECTED, "RUN 16"),
    # The weights were swapped. It is not asked to flush, so whoever answers this does something
    # else than it was asked.
    Pattern(r"the cache was not flushed", Observed.REJECTED, "RUN 17", (Op.UPDATE,)),
    Pattern(r"Group .* not in ", Observed.REFUSED, "RUN 11"),
    Pattern(r"group name has already been created", Observed.REFUSED, "RUN 14"),
    Pattern(
        r"Failed to receive weights|Failed to initialize custom process group|"
        r"[Cc]onnection (closed|reset) by peer|gloo/transport|[Tt]imed out|NCCL error",
        Observed.PEER_LOST,
        "RUN 19; NCCL and a group that does not form: READ",
        (Op.JOIN, Op.UPDATE),
    ),
    # Of a directory: not there, or without weights.
    Pattern(r"Failed to get weights iterator", Observed.UNREADABLE, "RUN", (Op.UPDATE,)),
    Pattern(r"\d+ validation error", Observed.REFUSED, "RUN"),
)


def answer_of(op: Op, reply: HTTPReply) -> Answer:
    """What a worker's reply to an operation is; an error inside a 200 is an error."""
    return unless_failed(reply) or _failure(op, reply)


def _failure(op: Op, reply: HTTPReply) -> Answer:
    text = error_text(reply.body).message
    detail = f"{reply.status}: {text}"
    known = matched(op, reply, text=text, detail=detail, patterns=PATTERNS)
    if known is not None:
        return known
    if reply.status in (UNAUTHORIZED, FORBIDDEN):
        return Answer(Observed.REFUSED, f"{detail} ({key_hint(reply.url)})")
    refuses = reply.status in (NOT_FOUND, NOT_ALLOWED) or (
        reply.status == BAD_REQUEST and op not in _TOUCHES
    )
    return Answer(Observed.REFUSED if refuses else Observed.REJECTED, detail)


_BEFORE, _EMPTY = Reached.NOT_BEGUN, Reached.EMPTY
_SENT, _HELD = Reached.SENT, Reached.HELD
_OPEN = (_EMPTY, _SENT)
_AGAIN = Recovery.REPUBLISH
_CLOSE = Recovery.CLOSE_THEN_REPUBLISH
_RESTART = Recovery.RESTART_THEN_PUBLISH
_COMMITTED = Outcome.COMMITTED
_DIRTY, _UNKNOWN = Outcome.DIRTY, Outcome.UNKNOWN

ROWS: tuple[Row, ...] = (
    *LABEL_RULES,
    row(
        Op.HEAL,
        Observed.REJECTED,
        _BEFORE,
        _DIRTY,
        Evidence.REJECTED,
        _RESTART,
        "READ weight_updater.py: finishing the weights failed half-way",
    ),
    row(
        Op.BEGIN,
        Observed.SESSION_OPEN,
        _EMPTY,
        _UNKNOWN,
        Evidence.REJECTED,
        _CLOSE,
        "RUN 04b: end closes it, and a full publication heals",
    ),
    row(
        Op.BEGIN,
        Observed.REJECTED,
        _EMPTY,
        _UNKNOWN,
        Evidence.REJECTED,
        _RESTART,
        "READ weight_updater.py: restoring packed weights failed half-way",
    ),
    row(
        Op.BEGIN,
        Observed.LOST,
        _EMPTY,
        _UNKNOWN,
        Evidence.NO_ANSWER,
        _CLOSE,
        "RUN: it may have acted or not; where a session is open end closes it",
    ),
    row(
        Op.UPDATE,
        Observed.REFUSED,
        _SENT,
        _DIRTY,
        Evidence.REJECTED,
        _CLOSE,
        "RUN 11: nothing of this bucket was received; earlier buckets are loaded",
    ),
    row(
        Op.UPDATE,
        Observed.REJECTED,
        _SENT,
        _DIRTY,
        Evidence.REJECTED,
        _CLOSE,
        "RUN 16: partially updated, to be discarded; a full session heals it",
    ),
    row(
        Op.UPDATE,
        Observed.PEER_LOST,
        _SENT,
        _DIRTY,
        Evidence.PEER_LOST,
        _CLOSE,
        "RUN 19: weights of this bucket untouched, the server fine after end; earlier buckets "
        "are loaded",
    ),
    row(
        Op.UPDATE,
        Observed.NO_SESSION,
        _SENT,
        _UNKNOWN,
        Evidence.REJECTED,
        _CLOSE,
        "RUN 02: somebody else closed the session, and nothing was received",
    ),
    row(
        Op.UPDATE,
        Observed.LOST,
        _SENT,
        _UNKNOWN,
        Evidence.NO_ANSWER,
        _CLOSE,
        "RUN: over gloo the receiver fails when the sender leaves; READ: an NCCL receiver stays in "
        "its broadcast, and healing it then ends in a restart",
    ),
    row(
        Op.FINISH,
        Observed.REJECTED,
        _SENT,
        _DIRTY,
        Evidence.REJECTED,
        _RESTART,
        "READ weight_updater.py: finishing the weights failed half-way",
    ),
    row(
        Op.FINISH,
        Observed.NO_SESSION,
        _SENT,
        _UNKNOWN,
        Evidence.REJECTED,
        _CLOSE,
        "RUN 10: somebody else closed the session",
    ),
    row(
        Op.CLOSE,
        Observed.DONE,
        _EMPTY,
        _UNKNOWN,
        Evidence.SESSION_CLOSED_EMPTY,
        _AGAIN,
        "RUN: a full publication heals; READ weight_updater.py: an empty session restores and "
        "finishes the weights it had",
    ),
    row(
        Op.CLOSE,
        Observed.DONE,
        _SENT,
        _DIRTY,
        Evidence.OTHER_LABEL,
        _AGAIN,
        "RUN: every bucket was loaded as it came; a full session loads all anew",
    ),
    row(
        Op.CLOSE,
        Observed.REJECTED,
        _OPEN,
        _DIRTY,
        Evidence.REJECTED,
        _RESTART,
        "READ weight_updater.py: as FINISH, which is the same call",
    ),
    row(
        Op.READ,
        None,
        _HELD,
        _COMMITTED,
        Evidence.OWN_LABEL,
        _AGAIN,
        "RUN: the label was set by a call of its own after end had answered; paused until it "
        "serves with the others",
    ),
    row(
        Op.PROBE,
        Observed.DONE,
        _HELD,
        _COMMITTED,
        Evidence.OWN_LABEL,
        None,
        "RUN: it holds the label and serves",
    ),
    row(
        Op.READ,
        Observed.DIFFERS,
        _SENT,
        _DIRTY,
        Evidence.OTHER_CHECKSUM,
        _AGAIN,
        "RUN: a full session loads every tensor anew",
    ),
    row(
        Op.PROBE,
        Observed.DIFFERS,
        _HELD,
        _DIRTY,
        Evidence.OTHER_SCORES,
        _AGAIN,
        "RUN: a full session loads every tensor anew",
    ),
)

VERDICTS: Mapping[Seen, Verdict] = verdicts_of(ROWS)
