"""What vLLM's answers prove about a worker's weights, and what heals it.

The rule of this file: a row is a claim about one engine version. RUN was seen on vLLM 0.32.0
over gloo (`tests/engines/test_rows.py`; numbers name transcripts); READ is in its source only;
RULE holds whatever the engine does.
"""

import re
from collections.abc import Mapping

from genapi.providers.shapes.answers import (
    NOT_CONFIGURED,
    UNREADABLE,
    matched,
    unless_failed,
)
from genapi.providers.shapes.errors import (
    BAD_REQUEST,
    FORBIDDEN,
    NOT_ALLOWED,
    NOT_FOUND,
    UNAUTHORIZED,
    error_text,
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
from genapi.publication.rules import RULES
from genapi.types.worker import Evidence, Outcome, Recovery
from genapi.wire.http import HTTPReply

__all__ = ("PATTERNS", "ROWS", "VERDICTS", "answer_of")

_WORKER = re.compile(r"Worker failed with error '(.*)', please check", re.DOTALL)


PATTERNS: tuple[Pattern, ...] = (
    Pattern(r"EngineCore encountered an issue|EngineDeadError", Observed.DEAD, "RUN 47, 49, 90"),
    Pattern(
        r"while a weight update is already active|"
        r"Cannot release a trainer connection during a weight update",
        Observed.SESSION_OPEN,
        "RUN 42",
    ),
    Pattern(
        r"called without a matching start_weight_update|start_weight_update must be called before",
        Observed.NO_SESSION,
        "RUN 42",
    ),
    Pattern(NOT_CONFIGURED, Observed.REFUSED, "RUN 50"),
    # Raised before a tensor was touched; the session is dropped all the same.
    Pattern(
        r"Invalid (init|update)_info|transfer not initialized|missing \d+ required",
        Observed.REFUSED,
        "RUN 42, 48",
    ),
    # The receiver of genapi, gloo and its store, NCCL.
    Pattern(
        r"update group broke|there is no update group|could not join the update group|"
        r"[Cc]onnection (closed|reset) by peer|Broken pipe|gloo/transport|"
        r"client socket has timed out|[Tt]imed out|NCCL error",
        Observed.PEER_LOST,
        "RUN 42; NCCL: READ",
        (Op.JOIN, Op.UPDATE),
    ),
    Pattern(UNREADABLE, Observed.UNREADABLE, "RUN; the system's own errors: READ", (Op.UPDATE,)),
    Pattern(r"\d+ validation error", Observed.REFUSED, "RUN 42"),
)


def answer_of(op: Op, reply: HTTPReply) -> Answer:
    """What a worker's reply to an operation is; an error inside a 200 is an error."""
    return unless_failed(reply) or _failure(op, reply)


def _failure(op: Op, reply: HTTPReply) -> Answer:
    text = error_text(reply.body).message
    inner = _WORKER.search(text)
    detail = f"{reply.status}: {inner[1] if inner else text}"
    refuses = reply.status in (BAD_REQUEST, UNAUTHORIZED, FORBIDDEN, NOT_FOUND, NOT_ALLOWED)
    return matched(op, reply, text=text, detail=detail, patterns=PATTERNS) or Answer(
        Observed.REFUSED if refuses else Observed.REJECTED, detail
    )


_BEFORE, _EMPTY = Reached.NOT_BEGUN, Reached.EMPTY
_SENT, _HELD = Reached.SENT, Reached.HELD
_OPEN = (_EMPTY, _SENT)
_COMMITTED, _UNTOUCHED = Outcome.COMMITTED, Outcome.UNTOUCHED
_DIRTY, _UNKNOWN = Outcome.DIRTY, Outcome.UNKNOWN
_REPUBLISH = Recovery.REPUBLISH
_CLOSE = Recovery.CLOSE_THEN_REPUBLISH
_RESTART = Recovery.RESTART_THEN_PUBLISH

ROWS: tuple[Row, ...] = (
    *RULES,
    row(
        Op.HEAL,
        Observed.REJECTED,
        _BEFORE,
        _DIRTY,
        Evidence.REJECTED,
        _RESTART,
        "RUN 49b: after a rejected tensor the empty finish replays it",
    ),
    row(
        Op.BEGIN,
        Observed.SESSION_OPEN,
        _EMPTY,
        _UNKNOWN,
        Evidence.REJECTED,
        _CLOSE,
        "RUN 42: an empty finish, then a full publication, heals",
    ),
    row(
        Op.BEGIN,
        Observed.REJECTED,
        _EMPTY,
        _UNKNOWN,
        Evidence.REJECTED,
        _RESTART,
        "READ gpu_worker.py: preparing the reload failed half-way",
    ),
    row(
        Op.BEGIN,
        Observed.LOST,
        _EMPTY,
        _UNKNOWN,
        Evidence.NO_ANSWER,
        _CLOSE,
        "RUN: an empty finish closes what was begun, if it was",
    ),
    row(
        Op.UPDATE,
        Observed.REFUSED,
        _SENT,
        _DIRTY,
        Evidence.REJECTED,
        _CLOSE,
        "RUN 42: session dropped, nothing of this bucket touched; earlier buckets as after a "
        "lost peer",
    ),
    row(
        Op.UPDATE,
        Observed.REJECTED,
        _SENT,
        _DIRTY,
        Evidence.REJECTED,
        _RESTART,
        "RUN 49, 49b: generating kills the engine, a full session fails on weight_loader",
    ),
    row(
        Op.UPDATE,
        Observed.PEER_LOST,
        _SENT,
        _DIRTY,
        Evidence.PEER_LOST,
        _CLOSE,
        "RUN over gloo: start, EMPTY finish, start, full update, finish, 3 of 3; RUN 42: its "
        "session is dropped, so it holds neither version whole, which is more than UNKNOWN",
    ),
    row(
        Op.UPDATE,
        Observed.NO_SESSION,
        _SENT,
        _UNKNOWN,
        Evidence.REJECTED,
        _CLOSE,
        "RUN 42: somebody else closed the session",
    ),
    row(
        Op.UPDATE,
        Observed.LOST,
        _SENT,
        _UNKNOWN,
        Evidence.NO_ANSWER,
        _CLOSE,
        "RUN over gloo; an NCCL receiver stays in its broadcast, and healing it then ends in a "
        "restart",
    ),
    row(
        Op.FINISH,
        Observed.REJECTED,
        _SENT,
        _DIRTY,
        Evidence.REJECTED,
        _RESTART,
        "RUN: finish replays a tensor that was rejected earlier, and leaves its session open",
    ),
    row(
        Op.FINISH,
        Observed.NO_SESSION,
        _SENT,
        _UNKNOWN,
        Evidence.REJECTED,
        _RESTART,
        "RUN 42: somebody closed the session, which an empty one and a full one heal; or an update "
        "had failed unheard, which they may not",
    ),
    row(
        Op.CLOSE,
        Observed.DONE,
        _EMPTY,
        _UNTOUCHED,
        Evidence.SESSION_CLOSED_EMPTY,
        _REPUBLISH,
        "RUN 42: an empty session changes nothing",
    ),
    row(
        Op.CLOSE,
        Observed.DONE,
        _SENT,
        _DIRTY,
        Evidence.OTHER_LABEL,
        _REPUBLISH,
        "RUN: what had come is loaded when the session closes; a straight republication heals",
    ),
    row(
        Op.CLOSE,
        Observed.REJECTED,
        _OPEN,
        _DIRTY,
        Evidence.REJECTED,
        _RESTART,
        "RUN: as FINISH; it replays a tensor that was rejected earlier",
    ),
    row(
        Op.READ,
        None,
        _HELD,
        _COMMITTED,
        Evidence.OWN_LABEL,
        _REPUBLISH,
        "RUN: FINISH sets the label after every rank has closed, whatever became of its reply; "
        "paused until it serves with the others",
    ),
    row(
        Op.PROBE,
        Observed.DONE,
        _HELD,
        _COMMITTED,
        Evidence.OWN_LABEL,
        None,
        "RUN: it serves exactly the new weights",
    ),
    row(
        Op.READ,
        Observed.DIFFERS,
        _SENT,
        _DIRTY,
        Evidence.OTHER_CHECKSUM,
        _REPUBLISH,
        "RUN: its session is closed, and a full session makes its bytes right",
    ),
    row(
        Op.PROBE,
        Observed.DIFFERS,
        _HELD,
        _DIRTY,
        Evidence.OTHER_SCORES,
        _REPUBLISH,
        "RUN: its session is closed, and a full session makes its scores right",
    ),
)

VERDICTS: Mapping[Seen, Verdict] = verdicts_of(ROWS)
