"""Administration of the workers behind a Dynamo frontend, each at its own address.

The rule of this file: success is a 2xx answer whose body says so, every option is sent, and what
is asked of a worker follows from the routes that it advertises (`routes.Family`):

- `VLLM`: Dynamo's Python worker. `engine_rpc` names a method of the engine, whose result is
  dropped; the worker keeps the label and declares it when the method named last has returned.
- `SIDECAR`: the native sidecar, with routes of its own for each phase (READ, driven on the embedded
  engine only).
- `COLLECTIVE`: a sidecar whose engine takes weights by the collective RPC of its own server (READ).
- `SGLANG`: SGLang's routes behind the worker's server (READ).

The Python worker has no route that says whether it is paused. It refuses an update unless it is,
before it does anything: asked for a method that only looks (`check_health`) that is a read.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Literal

from genapi.errors import ConfigError, ReplyError, UnsupportedError
from genapi.providers.base import Admin, WorkerFacts
from genapi.providers.dynamo.discovery import label_of
from genapi.providers.dynamo.ranks import JOIN_S
from genapi.providers.dynamo.routes import Family
from genapi.providers.dynamo.verdicts import NO_METHOD, VERDICTS, answer_of
from genapi.providers.shapes.answers import in_need_of_sessions
from genapi.providers.shapes.caches import clears
from genapi.publication.evidence import Answer, Observed, Op, Seen, Verdict
from genapi.publication.plan import PausePlan
from genapi.publication.receivers import Receivers
from genapi.types.ids import Role
from genapi.wire.flow import Flow, call, calls, nothing_to_ask
from genapi.wire.http import HTTPCall, HTTPReply, json_body

__all__ = (
    "CollectiveWorker",
    "DynamoWorker",
    "PythonWorker",
    "admin_of",
    "family_in",
)

_MODES: Final = {"abort": "abort", "drain": "wait", "keep": "keep"}
_CONFIRMATIONS: Final = 3
_GROUP: Final = "genapi"
_HERE: Final = "this Dynamo worker"
_NO_SUMS: Final = (
    "verify=('checksum',) needs a route that Dynamo's workers lack: use verify=('probe',)"
)


def _engine(route: str, body: Mapping[str, Any], *, attachment: object | None = None) -> HTTPCall:
    return HTTPCall(
        method="POST", path=f"/engine/{route}", body=json_body(body), attachment=attachment
    )


def family_in(facts: WorkerFacts | None) -> Family:
    """The family of a worker; of an unread one, the first."""
    return Family.VLLM if facts is None else Family(facts.details.get("family", Family.VLLM))


def admin_of(facts: WorkerFacts | None) -> Admin:
    """The administration of a worker that is sent weights, by the routes that it advertises."""
    details = {} if facts is None else facts.details
    match family_in(facts):
        case Family.SIDECAR:
            return _Sidecar()
        case Family.COLLECTIVE:
            return CollectiveWorker(details["server"])
        case Family.SGLANG:
            return _SGLang()
        case _:
            return PythonWorker(can_leave="destroy_weights_update_group" in details)


class DynamoWorker:
    """What all families do alike."""

    verdicts: Mapping[Seen, Verdict] = VERDICTS
    finish_sets_label = True
    receivers: Receivers | None = None
    # READ, and RUN on the engine: a label that is set while paused aborts nothing.
    marks = True

    def check(self, plan: PausePlan, facts: WorkerFacts, *, backend: str) -> None:
        """Refuse a worker that cannot be sent weights.

        Raises:
            UnsupportedError: it advertises no routes for it, or the plan cannot be carried out.
            ConfigError: it receives weights by another backend, or sleeps.
        """
        self.check_server(plan, facts, receives="weights")
        own = facts.capabilities.weight_backend
        if own is not None and own != backend:
            raise ConfigError(
                f"the worker receives weights by {own!r}, the transport sends by {backend!r}: "
                "start its engine with that backend"
            )

    def check_server(
        self, plan: PausePlan, facts: WorkerFacts, *, receives: Literal["weights", "files"]
    ) -> None:
        """Refuse a worker that cannot be told to take weights so, however they travel."""
        facts.capabilities.require("admin", where=_HERE)
        facts.capabilities.require(receives, where=_HERE)
        self.check_caches(plan)
        if facts.asleep:
            raise ConfigError(
                "the frontend has taken the worker out of its routing: it sleeps, and an update "
                "would go to memory that it released. Wake it with POST /engine/control/wake_up"
            )
        keeps = plan.mode == "keep" and plan.in_flight_kv == "recompute"
        if facts.role is not Role.UNIFIED and keeps:
            raise UnsupportedError(
                f"this is a {facts.role} worker: keys and values on their way between workers are "
                "not computed anew: use mode='drain' or 'abort', or in_flight_kv='stale'"
            )

    def check_caches(self, plan: PausePlan) -> None:
        """Refuse a plan that the engine cannot carry out."""
        clears(plan)

    def checksum(self) -> Flow[Answer]:
        """There is none."""
        return self.has_checksum()

    def has_checksum(self) -> Flow[Answer]:
        """No worker of Dynamo digests what it holds."""
        return nothing_to_ask(Answer(Observed.REFUSED, _NO_SUMS))


class PythonWorker(DynamoWorker):
    """Dynamo's Python worker of vLLM."""

    def __init__(self, *, can_leave: bool) -> None:
        self._can_leave = can_leave

    def join(self, init_info: Mapping[str, Any], *, rank_offset: int, backend: str) -> Flow[Answer]:
        """Join the transfer group; it replaces an older one.

        A worker's process ends when this takes `JOIN_ENDS_S`: the engine gives up before that.
        """
        del backend
        info = {**init_info, "rank_offset": rank_offset}
        if "timeout_s" in info:
            info["timeout_s"] = min(info["timeout_s"], JOIN_S)
        body = {"engine_rpc": "init_weight_transfer_engine", "init_info": info}
        reply = yield from call(_engine("init_weights_update_group", body))
        return answer_of(Op.JOIN, reply)

    def pause(self, plan: PausePlan) -> Flow[Answer]:
        """Stop generating, as the plan says; answers when the engine is idle."""
        body = {"mode": _MODES[plan.mode], "clear_cache": clears(plan)}
        reply = yield from call(_engine("pause_generation", body))
        return answer_of(Op.PAUSE, reply)

    def confirm(self) -> Flow[Answer]:
        """Ask for an update that only looks, which is refused unless it is paused."""
        reply = yield from call(self._rpc("check_health", reset=False))
        answer = answer_of(Op.CONFIRM, reply)
        if answer.done or NO_METHOD in answer.detail:
            return Answer(Observed.DONE, facts={"paused": True})
        return answer

    def heal(self) -> Flow[Answer]:
        """Close what an earlier publication left: start, unless it is open, and an empty finish."""
        reply = yield from call(self._rpc("start_weight_update", reset=False))
        started = answer_of(Op.BEGIN, reply)
        if started.observed not in (Observed.DONE, Observed.SESSION_OPEN):
            return in_need_of_sessions(started)
        reply = yield from call(self._rpc("finish_weight_update", reset=True))
        return answer_of(Op.FINISH, reply)

    def begin(self) -> Flow[Answer]:
        """Open the update session. From here on a generated token kills the engine."""
        reply = yield from call(self._rpc("start_weight_update", reset=False))
        return answer_of(Op.BEGIN, reply)

    def update(self, update_info: Mapping[str, Any], *, attachment: object | None) -> Flow[Answer]:
        """Receive one bucket; answers when it was received on every rank."""
        reply = yield from call(
            self._rpc("update_weights", reset=False, attachment=attachment, update_info=update_info)
        )
        return answer_of(Op.UPDATE, reply)

    def finish(self, label: str | None) -> Flow[Answer]:
        """Close the session; with a label, declare it after every rank has closed."""
        more = {} if label is None else {"weight_version": label}
        reply = yield from call(self._rpc("finish_weight_update", reset=True, **more))
        return answer_of(Op.FINISH, reply)

    def label(self, label: str) -> Flow[Answer]:
        """Declare the label alone."""
        reply = yield from call(_engine("set_weight_version", {"weight_version": label}))
        return answer_of(Op.LABEL, reply)

    def read(self) -> Flow[Answer]:
        """Read the label, and that the engine lives. Facts: `label`, `paused`, `healthy`."""
        alive, version = yield from calls(
            _engine("liveness_probe", {}), _engine("get_weight_version", {})
        )
        dead = _dead(alive)
        if dead is not None:
            return dead
        return _labelled(version, paused=None)

    def resume(self, plan: PausePlan) -> Flow[Answer]:
        """Generate again; what the plan says of caches was done with the pause."""
        del plan
        reply = yield from call(_engine("resume_generation", {}))
        return answer_of(Op.RESUME, reply)

    def close(self) -> Flow[Answer]:
        """Close a session after a failure, without a label."""
        reply = yield from call(self._rpc("finish_weight_update", reset=True))
        return answer_of(Op.CLOSE, reply)

    def leave(self) -> Flow[Answer]:
        """Leave the transfer group, where the engine can: vLLM 0.31 cannot, and need not.

        There a later group replaces this one.
        """
        if not self._can_leave:
            return Answer(Observed.DONE)
        body = {"engine_rpc": "shutdown_weight_transfer_engine"}
        reply = yield from call(_engine("destroy_weights_update_group", body))
        answer = answer_of(Op.JOIN, reply)
        return Answer(Observed.DONE) if NO_METHOD in answer.detail else answer

    def _rpc(
        self, method: str, *, reset: bool, attachment: object | None = None, **more: Any
    ) -> HTTPCall:
        body = {"engine_rpc": method, "allow_unpaused": False, "reset_prefix_cache": reset, **more}
        return _engine("update_weights_from_distributed", body, attachment=attachment)


class _Sidecar(DynamoWorker):
    """The native sidecar (READ; driven on the embedded engine)."""

    def join(self, init_info: Mapping[str, Any], *, rank_offset: int, backend: str) -> Flow[Answer]:
        """Join the transfer group."""
        del backend
        info = {**init_info, "rank_offset": rank_offset}
        reply = yield from call(_engine("update/init_weight_transfer_engine", {"init_info": info}))
        return answer_of(Op.JOIN, reply)

    def pause(self, plan: PausePlan) -> Flow[Answer]:
        """Stop generating, as the plan says; the frontend routes nothing to it until it resumes."""
        body = {"mode": _MODES[plan.mode], "clear_cache": clears(plan)}
        reply = yield from call(_engine("control/pause_generation", body))
        return answer_of(Op.PAUSE, reply)

    def confirm(self) -> Flow[Answer]:
        """Read several times whether it is paused."""
        replies = yield from calls(*[_engine("control/is_paused", {})] * _CONFIRMATIONS)
        for reply in replies:
            answer = answer_of(Op.CONFIRM, reply)
            if not answer.done:
                return answer
        if all(reply.json_object().get("is_paused") is True for reply in replies):
            return Answer(Observed.DONE, facts={"paused": True})
        return Answer(Observed.REFUSED, "control/is_paused says that it runs", {"paused": False})

    def heal(self) -> Flow[Answer]:
        """Close what an earlier publication left: start, unless it is open, and an empty finish."""
        started = yield from self._start()
        if started.observed not in (Observed.DONE, Observed.SESSION_OPEN):
            return in_need_of_sessions(started)
        return (yield from self._end(Op.FINISH, None))

    def begin(self) -> Flow[Answer]:
        """Open the update session."""
        return self._start()

    def update(self, update_info: Mapping[str, Any], *, attachment: object | None) -> Flow[Answer]:
        """Receive one bucket."""
        body = {"update_info": update_info}
        reply = yield from call(_engine("update/update_weights", body, attachment=attachment))
        return answer_of(Op.UPDATE, reply)

    def finish(self, label: str | None) -> Flow[Answer]:
        """Close the session; with a label, set it after every rank has closed."""
        return self._end(Op.FINISH, label)

    def label(self, label: str) -> Flow[Answer]:
        """Set the label alone."""
        reply = yield from call(_engine("update/update_weight_version", {"new_version": label}))
        return answer_of(Op.LABEL, reply)

    def read(self) -> Flow[Answer]:
        """Read label and pause. Facts: `label`, `paused`, `healthy`."""
        paused, version = yield from calls(
            _engine("control/is_paused", {}), _engine("control/get_weight_version", {})
        )
        answer = answer_of(Op.READ, paused)
        if not answer.done:
            return answer
        return _labelled(version, paused=paused.json_object().get("is_paused") is True)

    def resume(self, plan: PausePlan) -> Flow[Answer]:
        """Generate again, and be routed to."""
        del plan
        reply = yield from call(_engine("control/resume_generation", {}))
        return answer_of(Op.RESUME, reply)

    def close(self) -> Flow[Answer]:
        """Close a session after a failure, without a label."""
        return self._end(Op.CLOSE, None)

    def leave(self) -> Flow[Answer]:
        """A later group replaces this one: the sidecar has no route to leave it."""
        return nothing_to_ask(Answer(Observed.DONE))

    def _start(self) -> Flow[Answer]:
        reply = yield from call(_engine("update/start_weight_update", {}))
        return answer_of(Op.BEGIN, reply)

    def _end(self, op: Op, label: str | None) -> Flow[Answer]:
        body = {} if label is None else {"weight_version": label}
        reply = yield from call(_engine("update/finish_weight_update", body))
        return answer_of(op, reply)


class CollectiveWorker(_Sidecar):
    """A sidecar whose engine's own server takes weights by its collective RPC (READ)."""

    finish_sets_label = False

    def __init__(self, server: str) -> None:
        self._server = server

    def join(self, init_info: Mapping[str, Any], *, rank_offset: int, backend: str) -> Flow[Answer]:
        """Join the transfer group."""
        del backend
        info = {**init_info, "rank_offset": rank_offset}
        return self.rpc(Op.JOIN, "init_weight_transfer_engine", init_info=info)

    def update(self, update_info: Mapping[str, Any], *, attachment: object | None) -> Flow[Answer]:
        """Receive one bucket."""
        return self.rpc(Op.UPDATE, "update_weights", attachment=attachment, update_info=update_info)

    def _start(self) -> Flow[Answer]:
        return self.rpc(Op.BEGIN, "start_weight_update")

    def _end(self, op: Op, label: str | None) -> Flow[Answer]:
        del label  # it is a call of its own
        return self.rpc(op, "finish_weight_update")

    def rpc(
        self, op: Op, method: str, *, attachment: object | None = None, **arguments: Any
    ) -> Flow[Answer]:
        """Have every rank of the engine run a method that has nothing to say."""
        body = {"method": method, "args": [], "kwargs": arguments}
        reply = yield from call(
            HTTPCall(
                method="POST",
                path="/collective_rpc",
                body=json_body(body),
                attachment=attachment,
                base=self._server,
            )
        )
        answer = answer_of(op, reply)
        if not answer.done:
            return answer
        results = reply.json_object().get("results")
        if not isinstance(results, list) or {*map(type, results)} != {type(None)}:
            # Every rank answers for itself, and none of these methods has anything to say.
            return Answer(Observed.REJECTED, f"collective_rpc {method} answered {results!r}")
        return answer


_SGLANG_MODES: Final = {
    ("keep", "stale", "salt"): "in_place",
    ("keep", "stale", "stale"): "in_place",
    ("abort", "recompute", "stale"): "abort",
}
"""What can be done without a route that empties the prefix cache."""


def _sglang_mode(plan: PausePlan) -> str:
    mode = _SGLANG_MODES.get((plan.mode, plan.in_flight_kv, plan.prefix_cache))
    if mode is None:
        raise UnsupportedError(
            "SGLang under Dynamo offers no route that empties its prefix cache, and cannot drain: "
            "use mode='keep' with in_flight_kv='stale' and prefix_cache='salt', or mode='abort' "
            "with prefix_cache='stale'"
        )
    return mode


class _SGLang(DynamoWorker):
    """SGLang behind a worker's server (READ; not driven)."""

    finish_sets_label = False
    receivers: Receivers | None = Receivers(store_prefixes=(_GROUP, f"{_GROUP}/"))

    def check_caches(self, plan: PausePlan) -> None:
        """Refuse a plan that the engine cannot carry out."""
        _sglang_mode(plan)

    def join(self, init_info: Mapping[str, Any], *, rank_offset: int, backend: str) -> Flow[Answer]:
        """Join the transfer group."""
        body = {
            "master_address": init_info.get("master_address", ""),
            "master_port": init_info.get("master_port", 0),
            "rank_offset": rank_offset,
            "world_size": init_info["world_size"],
            "group_name": _GROUP,
            "backend": backend,
        }
        reply = yield from call(_engine("init_weights_update_group", body))
        return answer_of(Op.JOIN, reply)

    def pause(self, plan: PausePlan) -> Flow[Answer]:
        """Stop generating; the frontend routes nothing to it until it goes on."""
        reply = yield from call(_engine("pause_generation", {"mode": _sglang_mode(plan)}))
        return answer_of(Op.PAUSE, reply)

    def confirm(self) -> Flow[Answer]:
        """Nothing reads it back: the pause itself was answered, and calls keep their order."""
        return nothing_to_ask(Answer(Observed.DONE, facts={"paused": True}))

    def heal(self) -> Flow[Answer]:
        """There are no sessions here: a full publication loads every tensor anew."""
        return nothing_to_ask(Answer(Observed.DONE))

    def begin(self) -> Flow[Answer]:
        """There are no sessions here."""
        return nothing_to_ask(Answer(Observed.DONE))

    def update(self, update_info: Mapping[str, Any], *, attachment: object | None) -> Flow[Answer]:
        """Receive one bucket; it is loaded as it comes."""
        body = {
            "names": update_info["names"],
            "dtypes": update_info["dtype_names"],
            "shapes": update_info["shapes"],
            "group_name": _GROUP,
            "flush_cache": False,
            "abort_all_requests": False,
            "weight_version": None,
            "load_format": "flattened_bucket" if update_info.get("packed") else None,
        }
        reply = yield from call(
            _engine("control/update_weights_from_distributed", body, attachment=attachment)
        )
        return answer_of(Op.UPDATE, reply)

    def finish(self, label: str | None) -> Flow[Answer]:
        """There are no sessions here, and the label is a call of its own."""
        del label
        return nothing_to_ask(Answer(Observed.DONE))

    def label(self, label: str) -> Flow[Answer]:
        """Set the label alone, aborting nothing."""
        body = {"new_version": label, "abort_all_requests": False}
        reply = yield from call(_engine("control/update_weight_version", body))
        return answer_of(Op.LABEL, reply)

    def read(self) -> Flow[Answer]:
        """Read the label. Facts: `label`, `paused`, `healthy`."""
        reply = yield from call(_engine("get_weight_version", {}))
        return _labelled(reply, paused=None)

    def resume(self, plan: PausePlan) -> Flow[Answer]:
        """Generate again, and be routed to."""
        del plan
        reply = yield from call(_engine("continue_generation", {}))
        return answer_of(Op.RESUME, reply)

    def close(self) -> Flow[Answer]:
        """There are no sessions here."""
        return nothing_to_ask(Answer(Observed.DONE))

    def leave(self) -> Flow[Answer]:
        """A later group replaces this one."""
        return nothing_to_ask(Answer(Observed.DONE))


def _dead(alive: HTTPReply) -> Answer | None:
    """The answer of a worker whose engine does not live; None = it lives, or does not say."""
    answer = answer_of(Op.READ, alive)
    if not answer.done:
        return answer
    if alive.json_object().get("alive") is False:
        return Answer(Observed.DEAD, str(alive.json_object().get("message", "not alive")))
    return None


def _labelled(reply: HTTPReply, *, paused: bool | None) -> Answer:
    answer = answer_of(Op.READ, reply)
    if not answer.done:
        return answer
    body = reply.json_object()
    if not {"version", "weight_version"} & body.keys():
        raise ReplyError(f"expected a version from {reply.url}", body=reply.body, url=reply.url)
    facts = {"label": label_of(body), "paused": paused, "healthy": True}
    return replace(answer, facts=facts)
