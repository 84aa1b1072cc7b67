"""What the answers of Dynamo's workers prove about their weights, and what heals them.

The rule of this file: a row is a claim about one engine version. RUN was seen on Dynamo 1.6.1 with
its Python worker of vLLM 0.31.0 over gloo; READ is in the source only, as is all of the sidecar and
of SGLang under Dynamo; RULE follows from how publications work whatever the engine does.
"""

import re
from collections.abc import Mapping

from genapi.providers.dynamo.errors import error_text
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

__all__ = ("NO_METHOD", "PATTERNS", "ROWS", "VERDICTS", "answer_of")

_WORKER = re.compile(r"Worker failed with error '(.*)', please check", re.DOTALL)

NO_METHOD = r"Worker' object has no attribute"
"""The engine knows no such method: nothing was done."""

PATTERNS: tuple[Pattern, ...] = (
    Pattern(r"EngineDeadError|EngineCore encountered an issue", Observed.DEAD, "RUN surprise 8"),
    Pattern(
        r"must be paused via pause_generation",
        Observed.REFUSED,
        "RUN vllm_admin_errors: the worker asks before it does anything",
    ),
    Pattern(NO_METHOD, Observed.REFUSED, "RUN vllm_admin_errors"),
    Pattern(NOT_CONFIGURED, Observed.REFUSED, "RUN vllm_admin_errors"),
    Pattern(r"Missing '\w+' in body|must be a JSON object", Observed.REFUSED, "RUN"),
    Pattern(
        r"while a weight update is already active|session is already open",
        Observed.SESSION_OPEN,
        "READ vLLM 0.31; SGLang",
    ),
    Pattern(
        r"called without a matching start_weight_update|start_weight_update must be called before|"
        r"no weight-update session is open",
        Observed.NO_SESSION,
        "READ vLLM 0.31; SGLang",
    ),
    Pattern(
        r"Invalid (init|update)_info|transfer not initialized|missing \d+ required",
        Observed.REFUSED,
        "READ vLLM 0.31",
    ),
    Pattern(
        r"update group broke|there is no update group|could not join the update group|"
        r"Failed to receive weights|[Cc]onnection (closed|reset) by peer|Broken pipe|"
        r"gloo/transport|client socket has timed out|[Tt]imed out|NCCL error",
        Observed.PEER_LOST,
        "RUN over gloo; NCCL: READ",
        (Op.JOIN, Op.UPDATE),
    ),
    Pattern(UNREADABLE, Observed.UNREADABLE, "RUN; the system's own errors: READ", (Op.UPDATE,)),
)


def answer_of(op: Op, reply: HTTPReply) -> Answer:
    """What a worker's reply to an operation is; an error inside a 200 is an error."""
    return unless_failed(reply) or _failure(op, reply)


def _failure(op: Op, reply: HTTPReply) -> Answer:
    text = error_text(reply.body).message
    inner = _WORKER.search(text)
    detail = f"{reply.status}: {inner[1] if inner else text}"
    known = matched(op, reply, text=text, detail=detail, patterns=PATTERNS)
    refuses = reply.status in (BAD_REQUEST, UNAUTHORIZED, FORBIDDEN, NOT_FOUND, NOT_ALLOWED)
    return known or Answer(Observed.REFUSED if refuses else Observed.REJECTED, detail)


_BEFORE, _EMPTY = Reached.NOT_BEGUN, Reached.EMPTY
_SENT, _HELD = Reached.SENT, Reached.HELD
_OPEN = (_EMPTY, _SENT)
_COMMITTED, _UNTOUCHED = Outcome.COMMITTED, Outcome.UNTOUCHED
_DIRTY, _UNKNOWN = Outcome.DIRTY, Outcome.UNKNOWN
_REPUBLISH = Recovery.REPUBLISH
_CLOSE = Recovery.CLOSE_THEN_REPUBLISH
_RESTART = Recovery.RESTART_THEN_PUBLISH

ROWS: tuple[Row, ...] = (
    *LABEL_RULES,
    row(
        Op.HEAL,
        Observed.REJECTED,
        _BEFORE,
        _DIRTY,
        Evidence.REJECTED,
        _RESTART,
        "RUN: after an update that broke off the next one fails on weight_loader",
    ),
    row(
        Op.BEGIN,
        Observed.SESSION_OPEN,
        _EMPTY,
        _UNKNOWN,
        Evidence.REJECTED,
        _CLOSE,
        "RUN: an empty finish, then a full publication, heals",
    ),
    row(
        Op.BEGIN,
        Observed.REJECTED,
        _EMPTY,
        _UNKNOWN,
        Evidence.REJECTED,
        _RESTART,
        "READ vLLM 0.31: preparing the reload failed half-way",
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
        "RUN: the session is dropped; earlier buckets are as after a lost peer",
    ),
    row(
        Op.UPDATE,
        Observed.REJECTED,
        _SENT,
        _DIRTY,
        Evidence.REJECTED,
        _RESTART,
        "RUN: a full session fails on weight_loader, and a token kills the engine",
    ),
    row(
        Op.UPDATE,
        Observed.PEER_LOST,
        _SENT,
        _DIRTY,
        Evidence.PEER_LOST,
        _CLOSE,
        "RUN over gloo: start, EMPTY finish, start, full update, finish serves exactly the new "
        "weights; after the empty finish alone it serves neither version's",
    ),
    row(
        Op.UPDATE,
        Observed.NO_SESSION,
        _SENT,
        _UNKNOWN,
        Evidence.REJECTED,
        _CLOSE,
        "RUN: somebody else closed the session",
    ),
    row(
        Op.UPDATE,
        Observed.LOST,
        _SENT,
        _UNKNOWN,
        Evidence.NO_ANSWER,
        _CLOSE,
        "RUN over gloo, as a lost peer; an NCCL receiver stays in its broadcast, and healing it "
        "then ends in a restart",
    ),
    row(
        Op.FINISH,
        Observed.REJECTED,
        _SENT,
        _DIRTY,
        Evidence.REJECTED,
        _RESTART,
        "RUN: a failed finish leaves the declared label alone, and the weights unfinished",
    ),
    row(
        Op.FINISH,
        Observed.NO_SESSION,
        _SENT,
        _UNKNOWN,
        Evidence.REJECTED,
        _RESTART,
        "RUN: somebody closed the session, which an empty one and a full one heal; or an update "
        "had failed unheard, which they may not",
    ),
    row(
        Op.CLOSE,
        Observed.DONE,
        _EMPTY,
        _UNTOUCHED,
        Evidence.SESSION_CLOSED_EMPTY,
        _REPUBLISH,
        "RUN: an empty session changes nothing",
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
        "RUN: as FINISH",
    ),
    row(
        Op.READ,
        None,
        _HELD,
        _COMMITTED,
        Evidence.OWN_LABEL,
        _REPUBLISH,
        "RUN: the worker declares the label after its engine has finished on every rank; paused "
        "until it serves with the others",
    ),
    row(
        Op.PROBE,
        Observed.DONE,
        _HELD,
        _COMMITTED,
        Evidence.OWN_LABEL,
        None,
        "RUN: it serves the new weights",
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
