"""Administration of one vLLM server: pause, the weight update's four phases, labels, resume.

The rule of this file: every option is sent, none is left to a default of the server, and `/pause`
gets its options in the query (a JSON body is ignored, and the default aborts; transcript 31).

What vLLM can do about caches is in `shapes.caches`. A plan that clears does so twice, when pausing
and once more before resuming: the second answer says whether it was done, which the first does not.
"""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from genapi.errors import ConfigError, ReplyError, UnsupportedError
from genapi.providers.base import WorkerFacts
from genapi.providers.shapes.caches import clears
from genapi.providers.shapes.errors import NOT_FOUND
from genapi.providers.vllm.verdicts import VERDICTS, answer_of
from genapi.publication.evidence import Answer, Observed, Op, Seen, Verdict
from genapi.publication.plan import PausePlan
from genapi.publication.receivers import Receivers
from genapi.types.ids import Role
from genapi.wire.flow import Flow, call, calls
from genapi.wire.http import HTTPCall, json_body

__all__ = ("VLLMAdmin",)

_HEALTH = HTTPCall(method="GET", path="/health")
_LABEL = HTTPCall(method="GET", path="/weight_info")
_PAUSED = HTTPCall(method="GET", path="/is_paused")
_MODES = {"abort": "abort", "drain": "wait", "keep": "keep"}
_CONFIRMATIONS = 3
_NOTHING = sha256(b"").hexdigest()
"""The digest of a parameter that the model keeps elsewhere in another form."""
_RESETS = 3
_HERE = "this vLLM server"


def _post(path: str, body: Any = None, **query: str) -> HTTPCall:
    content = None if body is None else json_body(body)
    return HTTPCall(method="POST", path=path, query=query, body=content)


class VLLMAdmin:
    """The operations of one worker as flows; see `providers.base.Admin`."""

    verdicts: Mapping[Seen, Verdict] = VERDICTS
    finish_sets_label = True
    receivers: Receivers | None = None
    marks = True  # RUN recovery.md: set while paused it aborts nothing and leaves no span

    def check(self, plan: PausePlan, facts: WorkerFacts, *, backend: str) -> None:
        """Refuse a worker that cannot be published to.

        Raises:
            UnsupportedError: it has no admin routes, it is half of a prefill/decode pair, or the
                plan cannot be carried out.
            ConfigError: it sleeps, or receives weights by another backend.
        """
        self.check_server(plan, facts)
        own = facts.capabilities.weight_backend
        if own != backend:
            raise ConfigError(
                f"the server receives weights by {own or 'no backend'}, the transport sends by "
                f"{backend!r}: start vLLM with --weight-transfer-config "
                f'\'{{"backend": "{backend}"}}\''
            )

    def check_server(self, plan: PausePlan, facts: WorkerFacts) -> None:
        """Refuse a worker that cannot be published to, however weights come to it."""
        clears(plan)
        facts.capabilities.require("admin", where=_HERE)
        if facts.role is not Role.UNIFIED:
            raise UnsupportedError(
                f"the server is a {facts.role} worker, to which genapi does not publish: keys and "
                "values on their way between such servers would outlive their weights unseen; "
                "start vLLM without --kv-transfer-config"
            )
        if plan.prefix_cache != "stale":
            facts.capabilities.require("drop_caches", where=_HERE)
        if facts.asleep:
            raise ConfigError(
                "the server sleeps, and an update would kill its engine: wake it with "
                "POST /wake_up first"
            )

    def join(self, init_info: Mapping[str, Any], *, rank_offset: int, backend: str) -> Flow[Answer]:
        """Join the transfer group; vLLM was started with its backend (see `check`)."""
        del backend
        info = {**init_info, "rank_offset": rank_offset}
        reply = yield from call(_post("/init_weight_transfer_engine", {"init_info": info}))
        return answer_of(Op.JOIN, reply)

    def pause(self, plan: PausePlan) -> Flow[Answer]:
        """Stop generating, as the plan says; answers when the engine is idle."""
        clear = "true" if clears(plan) else "false"
        reply = yield from call(_post("/pause", mode=_MODES[plan.mode], clear_cache=clear))
        return answer_of(Op.PAUSE, reply)

    def confirm(self) -> Flow[Answer]:
        """Read several times whether it is paused: each read may meet another API server."""
        replies = yield from calls(*[_PAUSED] * _CONFIRMATIONS)
        for reply in replies:
            if not reply.ok:
                return answer_of(Op.CONFIRM, reply)
        seen = [reply.json_field("is_paused") is True for reply in replies]
        if all(seen):
            return Answer(Observed.DONE, facts={"paused": True})
        return Answer(
            Observed.REFUSED,
            f"{seen.count(False)} of {len(seen)} reads of /is_paused say that it runs",
            {"paused": False},
        )

    def heal(self) -> Flow[Answer]:
        """Close what an earlier publication left: start, unless it is open, and an empty finish."""
        reply = yield from call(_post("/start_weight_update"))
        started = answer_of(Op.BEGIN, reply)
        if started.observed not in (Observed.DONE, Observed.SESSION_OPEN):
            return started
        reply = yield from call(_post("/finish_weight_update"))
        return answer_of(Op.FINISH, reply)

    def begin(self) -> Flow[Answer]:
        """Open the update session. From here on a generated token kills the engine."""
        reply = yield from call(_post("/start_weight_update"))
        return answer_of(Op.BEGIN, reply)

    def update(self, update_info: Mapping[str, Any], *, attachment: object | None) -> Flow[Answer]:
        """Receive one bucket; answers when it was received on every rank."""
        body = json_body({"update_info": update_info})
        reply = yield from call(
            HTTPCall(method="POST", path="/update_weights", body=body, attachment=attachment)
        )
        return answer_of(Op.UPDATE, reply)

    def finish(self, label: str | None) -> Flow[Answer]:
        """Close the session; with a label, set it after every rank has closed."""
        body = None if label is None else {"weight_version": label}
        reply = yield from call(_post("/finish_weight_update", body))
        return answer_of(Op.FINISH, reply)

    def label(self, label: str) -> Flow[Answer]:
        """Set the label alone: to adopt weights, or to write ahead."""
        reply = yield from call(_post("/update_weight_version", {"new_version": label}))
        return answer_of(Op.LABEL, reply)

    def read(self) -> Flow[Answer]:
        """Read label, pause and health. Facts: `label`, `paused`, `healthy`."""
        health, label, paused = yield from calls(_HEALTH, _LABEL, _PAUSED)
        if not health.ok:
            return Answer(Observed.DEAD, f"/health answered {health.status}", {"healthy": False})
        for reply in (label, paused):
            if not reply.ok:
                return answer_of(Op.READ, reply)
        facts = {
            "label": label.json_field("weight_version"),
            "paused": paused.json_field("is_paused"),
            "healthy": True,
        }
        return Answer(Observed.DONE, facts=facts)

    def has_checksum(self) -> Flow[Answer]:
        """Whether /weight_checker is there: it takes POST alone, and refuses GET where it is."""
        reply = yield from call(HTTPCall(method="GET", path="/weight_checker"))
        if reply.status == NOT_FOUND:
            return Answer(
                Observed.REFUSED,
                "verify=('checksum',) needs the route /weight_checker, which came with vLLM 0.32: "
                "use verify=('probe',), or a newer vLLM",
            )
        return Answer(Observed.DONE)

    def checksum(self) -> Flow[Answer]:
        """Digest every parameter as the model holds it (transcript 20).

        On a CPU linear weights are repacked: what is left under their names is empty.
        """
        reply = yield from call(_post("/weight_checker", {"action": "checksum"}))
        if not reply.ok:
            return answer_of(Op.READ, reply)
        sums = reply.json_field("checksums")
        if not isinstance(sums, dict):
            raise ReplyError(f"expected checksums by name from {reply.url}", body=reply.body)
        facts = {
            "checksums": {str(name): str(digest) for name, digest in sums.items()},
            "topology": " ".join(sorted({str(name).rpartition(":")[0] for name in sums})),
            "blind": sum(digest == _NOTHING for digest in sums.values()),
        }
        return Answer(Observed.DONE, facts=facts)

    def resume(self, plan: PausePlan) -> Flow[Answer]:
        """Go on; a plan that clears is carried out first, and without success nobody goes on."""
        if clears(plan):
            for _ in range(_RESETS):
                reset = yield from call(
                    _post(
                        "/reset_prefix_cache", reset_running_requests="true", reset_external="true"
                    )
                )
                if not reset.ok:
                    return answer_of(Op.RESUME, reset)
                if reset.json_field("success") is True:
                    break
            else:
                return Answer(
                    Observed.REFUSED, "/reset_prefix_cache answered success=false: still paused"
                )
        reply = yield from call(_post("/resume"))
        return answer_of(Op.RESUME, reply)

    def close(self) -> Flow[Answer]:
        """Close a session after a failure, without a label."""
        reply = yield from call(_post("/finish_weight_update"))
        return answer_of(Op.CLOSE, reply)

    def leave(self) -> Flow[Answer]:
        """Leave the transfer group (0.32 and later; 0.31 has no route and answers 404)."""
        reply = yield from call(_post("/shutdown_weight_transfer_engine"))
        return answer_of(Op.JOIN, reply)
