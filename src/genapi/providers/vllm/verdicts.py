"""What vLLM's answers prove about a worker's weights, and what heals it.

The rule of this file: a row is a claim about one engine version. RUN was seen on vLLM 0.32.0
over gloo (`contracts/recovery.md`, transcripts by number); READ is in its source only; RULE
follows from design section 6 whatever the engine does.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from genapi.errors import ReplyError
from genapi.providers.vllm.errors import (
    BAD_GATEWAY,
    FORBIDDEN,
    NOT_ALLOWED,
    NOT_FOUND,
    UNAUTHORIZED,
    error_text,
)
from genapi.publication.evidence import Answer, Observed, Op, Verdict
from genapi.types.worker import Evidence, Outcome, Recovery
from genapi.wire.http import HTTPReply

__all__ = ("PATTERNS", "ROWS", "VERDICTS", "Pattern", "Row", "answer_of")

_GATEWAY_TIMEOUT = 504
_BAD_REQUEST = 400
_FAILED = ("error", "failed")  # vLLM itself says "paused" and "resumed"
_WORKER = re.compile(r"Worker failed with error '(.*)', please check", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Pattern:
    """What a text in an error answer to one of `ops` shows; the first that fits counts.

    Attributes:
        text: a regular expression.
        observed: what it shows.
        source: where this was seen.
        ops: the operations it counts for; empty = all.
    """

    text: str
    observed: Observed
    source: str
    ops: tuple[Op, ...] = ()


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
    Pattern(r"Weight transfer not configured", Observed.REFUSED, "RUN 50"),
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
        "RUN 42, recovery.md; NCCL: READ",
        (Op.JOIN, Op.UPDATE),
    ),
    Pattern(r"\d+ validation error", Observed.REFUSED, "RUN 42"),
)


def answer_of(op: Op, reply: HTTPReply) -> Answer:
    """What a worker's reply to an operation is; an error inside a 200 is an error."""
    if reply.ok:
        try:
            body = reply.json_object() if reply.body else {}
        except ReplyError as error:
            # Something in between has written it: what the worker did nobody can say.
            return Answer(Observed.LOST, str(error))
        failed = body.get("error") or body.get("success") is False
        if not failed and body.get("status") not in _FAILED:
            return Answer(Observed.DONE)
    text = error_text(reply.body).message
    inner = _WORKER.search(text)
    detail = f"{reply.status}: {inner[1] if inner else text}"
    for pattern in PATTERNS:
        if (not pattern.ops or op in pattern.ops) and re.search(pattern.text, text):
            return Answer(pattern.observed, detail)
    if reply.status in (BAD_GATEWAY, _GATEWAY_TIMEOUT):
        # Something in between gave up on the worker, which may have acted.
        return Answer(Observed.LOST, detail)
    if reply.status in (_BAD_REQUEST, UNAUTHORIZED, FORBIDDEN, NOT_FOUND, NOT_ALLOWED):
        return Answer(Observed.REFUSED, detail)
    return Answer(Observed.REJECTED, detail)


@dataclass(frozen=True, slots=True)
class Row:
    """What one observation proves.

    Attributes:
        op: what was asked.
        observed: what came back, and was the first that went wrong.
        verdict: where the worker's weights are and what heals them.
        source: where this was seen.
    """

    op: Op
    observed: Observed
    verdict: Verdict
    source: str


def _row(  # noqa: PLR0917 - one column each
    op: Op,
    observed: Observed,
    outcome: Outcome,
    evidence: Evidence,
    recovery: Recovery,
    source: str,
) -> Row:
    return Row(op, observed, Verdict(outcome, evidence, recovery), source)


_CLOSE = Recovery.CLOSE_THEN_REPUBLISH
_RESTART = Recovery.RESTART_THEN_PUBLISH
_DIRTY, _UNKNOWN = Outcome.DIRTY, Outcome.UNKNOWN

ROWS: tuple[Row, ...] = (
    _row(
        Op.HEAL,
        Observed.REJECTED,
        _DIRTY,
        Evidence.REJECTED,
        _RESTART,
        "RUN 49b: after a rejected tensor the empty finish replays it",
    ),
    _row(
        Op.BEGIN,
        Observed.NOT_SENT,
        Outcome.UNTOUCHED,
        Evidence.NOT_BEGUN,
        Recovery.REPUBLISH,
        "RULE: a call that was not sent began nothing",
    ),
    _row(
        Op.BEGIN,
        Observed.REFUSED,
        _UNKNOWN,
        Evidence.REJECTED,
        _CLOSE,
        "RUN 50: the text shows no session; RULE: untouched needs more than a text",
    ),
    _row(
        Op.BEGIN,
        Observed.SESSION_OPEN,
        _UNKNOWN,
        Evidence.REJECTED,
        _CLOSE,
        "RUN 42, recovery.md: an empty finish, then a full publication, heals",
    ),
    _row(
        Op.BEGIN,
        Observed.REJECTED,
        _UNKNOWN,
        Evidence.REJECTED,
        _RESTART,
        "READ gpu_worker.py: preparing the reload failed half-way",
    ),
    _row(
        Op.BEGIN,
        Observed.LOST,
        _UNKNOWN,
        Evidence.NO_ANSWER,
        _CLOSE,
        "RUN recovery.md: publisher gone after start, no bytes moved",
    ),
    _row(
        Op.UPDATE,
        Observed.REFUSED,
        _DIRTY,
        Evidence.REJECTED,
        _CLOSE,
        "RUN 42: session dropped, nothing of this bucket touched; earlier buckets as after a "
        "lost peer",
    ),
    _row(
        Op.UPDATE,
        Observed.REJECTED,
        _DIRTY,
        Evidence.REJECTED,
        _RESTART,
        "RUN 49, 49b: generating kills the engine, a full session fails on weight_loader",
    ),
    _row(
        Op.UPDATE,
        Observed.PEER_LOST,
        _DIRTY,
        Evidence.PEER_LOST,
        _CLOSE,
        "RUN recovery.md: start, EMPTY finish, start, full update, finish, 3 of 3",
    ),
    _row(
        Op.UPDATE,
        Observed.NO_SESSION,
        _UNKNOWN,
        Evidence.REJECTED,
        _CLOSE,
        "RUN 42: somebody else closed the session",
    ),
    _row(
        Op.UPDATE,
        Observed.NOT_SENT,
        _UNKNOWN,
        Evidence.NO_ANSWER,
        _CLOSE,
        "RULE: earlier buckets may have arrived",
    ),
    _row(
        Op.UPDATE,
        Observed.LOST,
        _UNKNOWN,
        Evidence.NO_ANSWER,
        _CLOSE,
        "RUN recovery.md over gloo; an NCCL receiver stays in its broadcast, and healing it "
        "then ends in a restart",
    ),
    _row(
        Op.FINISH,
        Observed.REFUSED,
        _DIRTY,
        Evidence.REJECTED,
        _CLOSE,
        "RUN 42: a label that is no text is refused before anything happens",
    ),
    _row(
        Op.FINISH,
        Observed.REJECTED,
        _DIRTY,
        Evidence.REJECTED,
        _RESTART,
        "RUN recovery.md: finish replays a bad tensor",
    ),
    _row(
        Op.FINISH,
        Observed.NO_SESSION,
        _UNKNOWN,
        Evidence.REJECTED,
        _RESTART,
        "RUN 42, 49: an update whose answer was lost had failed, for a cause nobody knows",
    ),
    _row(
        Op.FINISH,
        Observed.NOT_SENT,
        _UNKNOWN,
        Evidence.NO_ANSWER,
        _CLOSE,
        "RULE: the session is open still",
    ),
    _row(
        Op.FINISH,
        Observed.LOST,
        _UNKNOWN,
        Evidence.NO_ANSWER,
        _CLOSE,
        "RUN recovery.md: only the label read back decides",
    ),
    _row(
        Op.READ,
        Observed.REFUSED,
        _UNKNOWN,
        Evidence.OTHER_LABEL,
        _CLOSE,
        "RUN recovery.md: any other label after BEGIN proves nothing",
    ),
    _row(
        Op.READ, Observed.LOST, _UNKNOWN, Evidence.NO_ANSWER, _CLOSE, "RULE: nothing was read back"
    ),
    *(
        _row(op, Observed.DEAD, _UNKNOWN, Evidence.DEAD, _RESTART, "RUN 47, 90")
        for op in (Op.BEGIN, Op.UPDATE, Op.FINISH, Op.READ)
    ),
)

VERDICTS: Mapping[tuple[Op, Observed], Verdict] = MappingProxyType(
    {(row.op, row.observed): row.verdict for row in ROWS}
)
