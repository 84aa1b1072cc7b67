"""What the answers of Dynamo's workers prove about their weights, and what heals them.

The rule of this file: a row is a claim about one engine version. RUN was seen on Dynamo 1.6.1 with
its Python worker of vLLM 0.31.0 over gloo; READ is in the source only, as is all of the sidecar and
of SGLang under Dynamo; RULE follows from how publications work whatever the engine does. Where
vLLM's own servers heal and Dynamo's worker was seen to do so only sometimes, it is restarted.
"""

import re
from collections.abc import Mapping

from genapi.providers.dynamo.errors import error_text
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
from genapi.publication.rules import RULES
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
    Pattern(r"Weight transfer not configured", Observed.REFUSED, "RUN vllm_admin_errors"),
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
    *RULES,
    row(
        Op.JOIN,
        Observed.LOST,
        _BEFORE,
        _UNTOUCHED,
        Evidence.NOT_BEGUN,
        _REPUBLISH,
        "RUN: a worker that waits for its trainer past DYN_RL_INIT_WEIGHTS_TIMEOUT_S exits without "
        "an answer; the next publication reads it again",
    ),
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
        None,
        Observed.DEAD,
        _BEFORE,
        _UNTOUCHED,
        Evidence.DEAD,
        _RESTART,
        "RUN: the worker's main process exits with its engine",
    ),
    row(
        Op.BEGIN,
        Observed.SESSION_OPEN,
        _EMPTY,
        _UNKNOWN,
        Evidence.REJECTED,
        _CLOSE,
        "READ vLLM 0.31: an empty finish closes it; a full publication heals",
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
        "RUN: a trainer that dies before any tensor is healed by joining anew and a full session",
    ),
    row(
        Op.UPDATE,
        Observed.REFUSED,
        _SENT,
        _DIRTY,
        Evidence.REJECTED,
        _RESTART,
        "READ vLLM 0.31: the session is dropped, and earlier buckets may be half-loaded",
    ),
    row(
        Op.UPDATE,
        Observed.REJECTED,
        _SENT,
        _DIRTY,
        Evidence.REJECTED,
        _RESTART,
        "RUN: resuming it would kill the engine",
    ),
    row(
        Op.UPDATE,
        Observed.PEER_LOST,
        _SENT,
        _DIRTY,
        Evidence.PEER_LOST,
        _RESTART,
        "RUN: its liveness says ok, a resume would kill the engine, the next update fails on "
        "weight_loader; a later reload was right 3 of 3 times, which nobody promises",
    ),
    row(
        Op.UPDATE,
        Observed.NO_SESSION,
        _SENT,
        _UNKNOWN,
        Evidence.REJECTED,
        _RESTART,
        "READ vLLM 0.31: somebody else closed the session, or an earlier update dropped it",
    ),
    row(
        Op.UPDATE,
        Observed.LOST,
        _SENT,
        _UNKNOWN,
        Evidence.NO_ANSWER,
        _RESTART,
        "RUN: as when the trainer dies in the middle of an update",
    ),
    row(
        Op.FINISH,
        Observed.REFUSED,
        _SENT,
        _DIRTY,
        Evidence.REJECTED,
        _CLOSE,
        "RULE: the session is open still",
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
        "READ vLLM 0.31: somebody closed the session, or an update had failed unheard",
    ),
    row(
        Op.LABEL,
        None,
        _OPEN,
        _UNKNOWN,
        Evidence.OTHER_LABEL,
        _REPUBLISH,
        "RULE: the session is closed, and the label is not this attempt's",
    ),
    row(
        Op.CLOSE,
        Observed.DONE,
        _EMPTY,
        _UNKNOWN,
        Evidence.SESSION_CLOSED_EMPTY,
        _REPUBLISH,
        "READ vLLM 0.31: an empty session changes nothing; a full publication heals (RUN)",
    ),
    row(
        Op.CLOSE,
        Observed.DONE,
        _SENT,
        _DIRTY,
        Evidence.OTHER_LABEL,
        _REPUBLISH,
        "READ vLLM 0.31: what had come is loaded when the session closes",
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
        Observed.OTHER_LABEL,
        _OPEN,
        _UNKNOWN,
        Evidence.OTHER_LABEL,
        _CLOSE,
        "RUN: a label that nobody declared since the process started, or an older one, proves "
        "nothing after BEGIN",
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
        Observed.OTHER_LABEL,
        _HELD,
        _UNKNOWN,
        Evidence.OTHER_LABEL,
        _REPUBLISH,
        "RULE: somebody labelled it, or another process came up at its address",
    ),
    row(
        Op.PROBE,
        Observed.DIFFERS,
        _HELD,
        _DIRTY,
        Evidence.OTHER_SCORES,
        _REPUBLISH,
        "RULE: its session is closed, and a full session loads every tensor anew",
    ),
    row(
        None,
        Observed.DEAD,
        _OPEN,
        _UNKNOWN,
        Evidence.DEAD,
        _RESTART,
        "RUN: a killed worker comes back with the weights of its files",
    ),
)

VERDICTS: Mapping[Seen, Verdict] = verdicts_of(ROWS)
