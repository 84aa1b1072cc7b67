"""What SGLang's answers prove about a worker's weights, and what heals it.

The rule of this file: a row is a claim about one engine version. RUN was seen on SGLang 0.5.23
over gloo (transcripts `weights_NN`); READ is in its source only and was not run; RULE follows from
how publications work whatever the engine does.

An update that failed leaves its session open, so every way back from one begins with closing it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from genapi.errors import ReplyError
from genapi.providers.sglang.errors import (
    BAD_GATEWAY,
    BAD_REQUEST,
    FORBIDDEN,
    NOT_ALLOWED,
    NOT_FOUND,
    UNAUTHORIZED,
    error_text,
    key_hint,
)
from genapi.publication.evidence import Answer, Observed, Op, Verdict
from genapi.types.worker import Evidence, Outcome, Recovery
from genapi.wire.http import HTTPReply

__all__ = ("PATTERNS", "ROWS", "VERDICTS", "Pattern", "Row", "answer_of")

_GATEWAY_TIMEOUT = 504
_TOUCHES = (Op.HEAL, Op.BEGIN, Op.UPDATE, Op.FINISH, Op.CLOSE)
"""A refusal of these that nobody knows may have left the weights half-written."""


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
    Pattern(r"\d+ validation error", Observed.REFUSED, "RUN"),
)


def answer_of(op: Op, reply: HTTPReply) -> Answer:
    """What a worker's reply to an operation is; an error inside a 200 is an error."""
    if reply.ok:
        try:
            body = reply.json_object() if reply.body else {}
        except ReplyError as error:
            # Something in between has written it: what the worker did nobody can say.
            return Answer(Observed.LOST, str(error))
        failed = body.get("error") or body.get("success") is False or body.get("status") == "error"
        if not failed:
            return Answer(Observed.DONE)
    text = error_text(reply.body).message
    detail = f"{reply.status}: {text}"
    for pattern in PATTERNS:
        if (not pattern.ops or op in pattern.ops) and re.search(pattern.text, text):
            return Answer(pattern.observed, detail)
    if reply.status in (BAD_GATEWAY, _GATEWAY_TIMEOUT):
        # Something in between gave up on the worker, which may have acted.
        return Answer(Observed.LOST, detail)
    if reply.status in (UNAUTHORIZED, FORBIDDEN):
        return Answer(Observed.REFUSED, f"{detail} ({key_hint(reply.url)})")
    if reply.status in (NOT_FOUND, NOT_ALLOWED):
        return Answer(Observed.REFUSED, detail)
    if reply.status == BAD_REQUEST and op not in _TOUCHES:
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


_AGAIN = Recovery.REPUBLISH
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
        "READ weight_updater.py: finishing the weights failed half-way",
    ),
    _row(
        Op.BEGIN,
        Observed.NOT_SENT,
        Outcome.UNTOUCHED,
        Evidence.NOT_BEGUN,
        _AGAIN,
        "RULE: a call that was not sent began nothing",
    ),
    _row(
        Op.BEGIN,
        Observed.REFUSED,
        _UNKNOWN,
        Evidence.REJECTED,
        _CLOSE,
        "RULE: untouched needs more than a text",
    ),
    _row(
        Op.BEGIN,
        Observed.SESSION_OPEN,
        _UNKNOWN,
        Evidence.REJECTED,
        _CLOSE,
        "RUN 04b: end closes it; that a full publication then heals is READ",
    ),
    _row(
        Op.BEGIN,
        Observed.REJECTED,
        _UNKNOWN,
        Evidence.REJECTED,
        _RESTART,
        "READ weight_updater.py: restoring packed weights failed half-way",
    ),
    _row(
        Op.BEGIN,
        Observed.LOST,
        _UNKNOWN,
        Evidence.NO_ANSWER,
        _CLOSE,
        "READ weight_updater.py: an open session is closed by end",
    ),
    _row(
        Op.UPDATE,
        Observed.REFUSED,
        _DIRTY,
        Evidence.REJECTED,
        _CLOSE,
        "RUN 11: nothing of this bucket was received; earlier buckets are loaded",
    ),
    _row(
        Op.UPDATE,
        Observed.REJECTED,
        _DIRTY,
        Evidence.REJECTED,
        _CLOSE,
        "RUN 16: partially updated, to be discarded; that a full session heals it is READ",
    ),
    _row(
        Op.UPDATE,
        Observed.PEER_LOST,
        _DIRTY,
        Evidence.PEER_LOST,
        _CLOSE,
        "RUN 19: weights of this bucket untouched, the server fine after end; earlier buckets "
        "are loaded",
    ),
    _row(
        Op.UPDATE,
        Observed.NO_SESSION,
        _UNKNOWN,
        Evidence.REJECTED,
        _CLOSE,
        "RUN 02: somebody else closed the session, and nothing was received",
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
        "READ: over gloo the receiver fails when the sender leaves; an NCCL receiver stays in its "
        "broadcast, and healing it then ends in a restart",
    ),
    _row(
        Op.FINISH,
        Observed.REFUSED,
        _DIRTY,
        Evidence.REJECTED,
        _CLOSE,
        "RULE: the session is open still",
    ),
    _row(
        Op.FINISH,
        Observed.REJECTED,
        _DIRTY,
        Evidence.REJECTED,
        _RESTART,
        "READ weight_updater.py: finishing the weights failed half-way",
    ),
    _row(
        Op.FINISH,
        Observed.NO_SESSION,
        _UNKNOWN,
        Evidence.REJECTED,
        _CLOSE,
        "RUN 10: somebody else closed the session",
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
        "RULE: the label comes later, so nothing shows whether it was closed",
    ),
    *(
        _row(
            Op.LABEL,
            observed,
            _UNKNOWN,
            Evidence.OTHER_LABEL,
            _AGAIN,
            "RULE: the session is closed, and the label is not this attempt's",
        )
        for observed in (Observed.REFUSED, Observed.REJECTED, Observed.NOT_SENT, Observed.LOST)
    ),
    _row(
        Op.READ,
        Observed.REFUSED,
        _UNKNOWN,
        Evidence.OTHER_LABEL,
        _CLOSE,
        "RULE: any other label after BEGIN proves nothing",
    ),
    _row(
        Op.READ, Observed.LOST, _UNKNOWN, Evidence.NO_ANSWER, _CLOSE, "RULE: nothing was read back"
    ),
    *(
        _row(
            op,
            Observed.DEAD,
            _UNKNOWN,
            Evidence.DEAD,
            _RESTART,
            "RUN: a scheduler that dies takes the whole server with it",
        )
        for op in (Op.BEGIN, Op.UPDATE, Op.FINISH, Op.LABEL, Op.READ)
    ),
)

VERDICTS: Mapping[tuple[Op, Observed], Verdict] = MappingProxyType(
    {(row.op, row.observed): row.verdict for row in ROWS}
)
