"""Administration of a token server, and what its answers prove."""

from collections.abc import Mapping
from typing import Any

from genapi.errors import ConfigError, ReplyError
from genapi.providers.base import WorkerFacts
from genapi.providers.shapes.answers import matched, unless_failed
from genapi.providers.shapes.errors import error_text
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
from genapi.publication.plan import PausePlan
from genapi.publication.receivers import Receivers
from genapi.publication.rules import RULES
from genapi.types.worker import Evidence, Outcome, Recovery
from genapi.wire.flow import Flow, call
from genapi.wire.http import HTTPCall, HTTPReply, json_body

__all__ = ("ROWS", "TokensAdmin")

BACKEND = "genapi_memory"
_MODES = {"abort": "abort", "drain": "wait", "keep": "keep"}
_SENT, _HELD = Reached.SENT, Reached.HELD

# Tensors go into the live weights at once, and the label comes with the end of the session: what is
# closed and carries the attempt's own label holds all of it, everything else some of it.
ROWS: tuple[Row, ...] = (
    *RULES,
    row(
        Op.UPDATE,
        Observed.REJECTED,
        _SENT,
        Outcome.DIRTY,
        Evidence.REJECTED,
        Recovery.CLOSE_THEN_REPUBLISH,
        "RUN: the tensors before it are in",
    ),
    row(
        Op.UPDATE,
        Observed.PEER_LOST,
        _SENT,
        Outcome.DIRTY,
        Evidence.PEER_LOST,
        Recovery.CLOSE_THEN_REPUBLISH,
        "RUN: some tensors may be in",
    ),
    row(
        Op.CLOSE,
        Observed.DONE,
        _SENT,
        Outcome.DIRTY,
        Evidence.OTHER_LABEL,
        Recovery.REPUBLISH,
        "RUN: what had come is in, and the session is closed",
    ),
    row(
        Op.READ,
        None,
        _HELD,
        Outcome.COMMITTED,
        Evidence.OWN_LABEL,
        Recovery.REPUBLISH,
        "RUN: the label is set when the session has closed",
    ),
    row(
        Op.PROBE,
        Observed.DONE,
        _HELD,
        Outcome.COMMITTED,
        Evidence.OWN_LABEL,
        None,
        "RUN: it serves the new weights",
    ),
    row(
        Op.READ,
        Observed.DIFFERS,
        _SENT,
        Outcome.DIRTY,
        Evidence.OTHER_CHECKSUM,
        Recovery.REPUBLISH,
        "RUN: a full session makes its bytes right",
    ),
)

_PATTERNS = (
    Pattern("the sender went away", Observed.PEER_LOST, "RUN", (Op.UPDATE,)),
    Pattern("does not fit", Observed.REJECTED, "RUN", (Op.UPDATE,)),
)


def _post(path: str, attachment: object | None = None, **body: Any) -> HTTPCall:
    return HTTPCall(method="POST", path=path, body=json_body(body), attachment=attachment)


def _asked(op: Op, request: HTTPCall) -> Flow[Answer]:
    reply = yield from call(request)
    return _answer(op, reply)


def _answer(op: Op, reply: HTTPReply) -> Answer:
    done = unless_failed(reply)
    if done is not None:
        return done
    text = error_text(reply.body).message
    detail = f"{reply.status}: {text}"
    found = matched(op, reply, text=text, detail=detail, patterns=_PATTERNS)
    refused = 400 <= reply.status < 500
    return found or Answer(Observed.REFUSED if refused else Observed.REJECTED, detail)


class TokensAdmin:
    """The operations of one worker as flows; see `genapi.providers.base.Admin`."""

    verdicts: Mapping[Seen, Verdict] = verdicts_of(ROWS)
    finish_sets_label = True
    marks = True
    receivers: Receivers | None = None

    def check(self, plan: PausePlan, facts: WorkerFacts, *, backend: str) -> None:
        """Refuse what cannot be carried out."""
        del plan, facts
        if backend != BACKEND:
            raise ConfigError(f"a token server receives weights by {BACKEND!r}, not {backend!r}")

    def join(self, init_info: Mapping[str, Any], *, rank_offset: int, backend: str) -> Flow[Answer]:
        """Join the transfer group."""
        del backend
        request = _post("/join", rank=rank_offset, world=init_info["world_size"])
        return _asked(Op.JOIN, request)

    def pause(self, plan: PausePlan) -> Flow[Answer]:
        """Stop generating; the caches go with it where the plan says so."""
        return _asked(Op.PAUSE, _post("/pause", mode=_MODES[plan.mode], clear=_clears(plan)))

    def confirm(self) -> Flow[Answer]:
        """Read back that it is paused."""
        answer = yield from self.read()
        if answer.done and not answer.facts["paused"]:
            return Answer(Observed.REFUSED, "/state says that it runs", {"paused": False})
        return answer

    def heal(self) -> Flow[Answer]:
        """Close the session that an earlier failure left, if there is one."""
        reply = yield from call(_post("/close"))
        if error_text(reply.body).type == "session":
            return Answer(Observed.DONE)
        return _answer(Op.HEAL, reply)

    def begin(self) -> Flow[Answer]:
        """Open the session."""
        return _asked(Op.BEGIN, _post("/open"))

    def update(self, update_info: Mapping[str, Any], *, attachment: object | None) -> Flow[Answer]:
        """Receive one bucket."""
        info = {k: update_info[k] for k in ("names", "shapes", "data") if k in update_info}
        return _asked(Op.UPDATE, _post("/load", attachment, **info))

    def finish(self, label: str | None) -> Flow[Answer]:
        """Close the session, and set the label."""
        return _asked(Op.FINISH, _post("/close", label=label))

    def label(self, label: str) -> Flow[Answer]:
        """Set the label alone."""
        return _asked(Op.LABEL, _post("/label", label=label))

    def read(self) -> Flow[Answer]:
        """Read label and pause."""
        reply = yield from call(HTTPCall(method="GET", path="/state"))
        if not reply.ok:
            return _answer(Op.READ, reply)
        state = reply.json_object()
        facts = {"label": state["label"], "paused": state["paused"], "healthy": True}
        return Answer(Observed.DONE, facts=facts)

    def has_checksum(self) -> Flow[Answer]:
        """It always can."""
        yield from ()
        return Answer(Observed.DONE)

    def checksum(self) -> Flow[Answer]:
        """Digest every parameter."""
        reply = yield from call(_post("/digest"))
        if not reply.ok:
            raise ReplyError(f"expected digests from {reply.url}", body=reply.body)
        facts = {"checksums": reply.json_object(), "topology": "one", "blind": 0}
        return Answer(Observed.DONE, facts=facts)

    def resume(self, plan: PausePlan) -> Flow[Answer]:
        """Empty the caches once more where the plan says so, and generate."""
        return _asked(Op.RESUME, _post("/resume", clear=_clears(plan)))

    def close(self) -> Flow[Answer]:
        """Close a session after a failure."""
        return _asked(Op.CLOSE, _post("/close"))

    def leave(self) -> Flow[Answer]:
        """Leave the transfer group."""
        return _asked(Op.JOIN, _post("/leave"))


def _clears(plan: PausePlan) -> bool:
    """Whether running requests recompute, or cached prefixes go."""
    recomputes = plan.mode == "keep" and plan.in_flight_kv == "recompute"
    return recomputes or plan.prefix_cache == "flush"
