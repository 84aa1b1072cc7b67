"""Administration of one SGLang server: pause, update sessions, labels, resume.

The rule of this file: every option is sent, none is left to a default of the server. A body is
compulsory even where it is empty; `/update_weight_version` would abort every request by default,
`/update_weights_from_distributed` would flush.

What SGLang can do about caches (`CACHES`): `retract` frees the keys and values of running requests,
which are computed anew; `in_place` keeps them, and then nothing can be flushed. What requests find
in the prefix cache is another matter: they carry the salt of their time, so recomputing needs an
empty cache as well. It is emptied with the pause, in a call of its own:
an update call that asks for it and is refused answers 400 after the weights were swapped (RUN 17),
and a flush that is refused before anything began can still be taken back.

SGLang cannot drain. A session is `begin` and `end` since 0.5.21; before, both routes are 404 and
nothing has to be opened. The label is a call of its own after `end`: sent with an update it would
be set before the weights are finished (READ).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

from genapi.errors import ConfigError, ReplyError, UnsupportedError
from genapi.providers.base import WorkerFacts
from genapi.providers.sglang.discovery import paused_of
from genapi.providers.sglang.errors import error_text
from genapi.providers.sglang.verdicts import VERDICTS, answer_of
from genapi.providers.shapes.errors import (
    BAD_REQUEST,
    FORBIDDEN,
    NOT_FOUND,
    UNAUTHORIZED,
    UNAVAILABLE,
)
from genapi.publication.evidence import Answer, Observed, Op, Seen, Verdict
from genapi.publication.plan import InFlightKV, PauseMode, PausePlan, PrefixCache
from genapi.publication.receivers import Receivers
from genapi.types.ids import Role
from genapi.wire.flow import Flow, call, calls
from genapi.wire.http import HTTPCall, HTTPReply, json_body

__all__ = ("BACKENDS", "CACHES", "GROUP", "Caches", "SGLangAdmin")

GROUP: Final = "genapi"
"""Name of the group on every server; a trainer's store has its keys under it."""

BACKENDS: Final = ("nccl", "gloo", "genapi_memory")
"""What `/init_weights_update_group` may be told; the last only the embedded engine has."""

_CONFIRMATIONS = 3
_FLUSHES = 3
_IDLE_S = 10
"""How long a server that was told to abort may take to be idle: its last step is under way."""


@dataclass(frozen=True, slots=True)
class Caches:
    """How a plan is carried out.

    Attributes:
        mode: of `/pause_generation`.
        flush: whether the prefix cache is emptied while it is paused.
    """

    mode: str
    flush: bool


_NO_DRAIN = (
    "SGLang cannot let running requests finish and hold new ones back: use mode='keep', which goes "
    "on with them on the new weights, or mode='abort', or let the requests finish before publishing"
)

CACHES: Mapping[tuple[PauseMode, InFlightKV, PrefixCache], Caches | str] = MappingProxyType(
    {
        # how, or why it cannot be
        ("keep", "recompute", "flush"): Caches("retract", flush=True),
        ("keep", "recompute", "salt"): Caches("retract", flush=True),
        ("keep", "recompute", "stale"): (
            "SGLang cannot let retracted requests recompute and keep its prefix cache, where they "
            "would find their own old entries: use prefix_cache='flush' or 'salt', or "
            "in_flight_kv='stale'"
        ),
        ("keep", "stale", "flush"): (
            "SGLang cannot flush its prefix cache under requests that are paused in place: use "
            "prefix_cache='salt', or in_flight_kv='recompute'"
        ),
        ("keep", "stale", "salt"): Caches("in_place", flush=False),
        ("keep", "stale", "stale"): Caches("in_place", flush=False),
        ("abort", "recompute", "flush"): Caches("abort", flush=True),
        # Requests that wait at the gate carry the old salt.
        ("abort", "recompute", "salt"): Caches("abort", flush=True),
        ("abort", "recompute", "stale"): Caches("abort", flush=False),
        ("drain", "recompute", "flush"): _NO_DRAIN,
        ("drain", "recompute", "salt"): _NO_DRAIN,
        ("drain", "recompute", "stale"): _NO_DRAIN,
    }
)


def _read(path: str) -> HTTPCall:
    return HTTPCall(method="GET", path=path, grant="data")


def _post(path: str, body: Mapping[str, Any] | None = None, **query: str) -> HTTPCall:
    content = json_body({} if body is None else body)
    return HTTPCall(method="POST", path=path, query=query, body=content, grant="admin")


_BEGIN = _post("/begin_weight_update")
_END = _post("/end_weight_update")
_CONTINUE = _post("/continue_generation", {"torch_empty_cache": True})
_DESTROY = _post("/destroy_weights_update_group", {"group_name": GROUP})


def _caches(plan: PausePlan) -> Caches:
    row = CACHES[plan.mode, plan.in_flight_kv, plan.prefix_cache]
    if isinstance(row, str):
        raise UnsupportedError(row)
    return row


class SGLangAdmin:
    """The operations of one worker as flows; see `providers.base.Admin`."""

    verdicts: Mapping[Seen, Verdict] = VERDICTS
    finish_sets_label = False
    receivers: Receivers | None = Receivers(store_prefixes=(GROUP, f"{GROUP}/"))
    marks = True  # RUN recovery.md, both pauses: aborts nothing, leaves no span

    def check(self, plan: PausePlan, facts: WorkerFacts, *, backend: str) -> None:
        """Refuse a worker that cannot be published to.

        Raises:
            UnsupportedError: its topology, its role or the plan cannot be carried out.
            ConfigError: SGLang has no such backend.
        """
        self.check_server(plan, facts, receives="weights")
        if backend not in BACKENDS:
            raise ConfigError(
                f"the transport sends by {backend!r}; SGLang receives weights by "
                f"{', '.join(BACKENDS[:-1])}"
            )

    def check_server(
        self, plan: PausePlan, facts: WorkerFacts, *, receives: Literal["weights", "files"]
    ) -> None:
        """Refuse a worker that cannot be published to, by the way that weights come to it."""
        caches = _caches(plan)
        reason = facts.capabilities.missing.get(receives)
        if reason is not None:
            raise UnsupportedError(f"this SGLang server cannot receive {receives}: {reason}")
        if facts.role is Role.PREFILL and caches.mode == "retract":
            # READ scheduler.py
            raise UnsupportedError(
                "a prefill worker of SGLang keeps the old keys and values of a prompt that it is "
                "in the middle of: use mode='abort' or in_flight_kv='stale'"
            )

    def join(self, init_info: Mapping[str, Any], *, rank_offset: int, backend: str) -> Flow[Answer]:
        """Join the transfer group anew; answers when every rank has joined.

        A group of this name that an earlier trainer left is destroyed first: it outlives the
        trainer, and joining again would be refused.
        """
        left = yield from call(_DESTROY)
        if not left.ok and left.status != BAD_REQUEST:
            return answer_of(Op.JOIN, left)
        own = {"digest": init_info["digest"]} if "digest" in init_info else {}
        reply = yield from call(
            _post(
                "/init_weights_update_group",
                {
                    "master_address": init_info.get("master_address", ""),
                    "master_port": init_info.get("master_port", 0),
                    "rank_offset": rank_offset,
                    "world_size": init_info["world_size"],
                    "group_name": GROUP,
                    "backend": backend,
                    **own,
                },
            )
        )
        return answer_of(Op.JOIN, reply)

    def pause(self, plan: PausePlan) -> Flow[Answer]:
        """Stop generating, and empty the prefix cache where the plan says so.

        A pause whose flush is refused is taken back, where it was this call that paused. What is
        paused in place already never ends by an abort alone: it is retracted first (READ).
        """
        caches = _caches(plan)
        before = yield from call(_read("/ready"))
        retracts = caches.mode == "abort" and not before.ok
        for mode in ("retract", "abort") if retracts else (caches.mode,):
            reply = yield from call(_post("/pause_generation", {"mode": mode}))
            answer = answer_of(Op.PAUSE, reply)
            if not answer.done:
                return answer
        if not caches.flush:
            return Answer(Observed.DONE)
        refused = yield from _flush(caches)
        if refused is None:
            return Answer(Observed.DONE)
        if before.ok:
            yield from call(_CONTINUE)
        return refused

    def confirm(self) -> Flow[Answer]:
        """Read several times that it serves nobody.

        A server that was asked for its health while paused calls itself unhealthy, which says
        nothing against the pause.
        """
        replies = yield from calls(*[_read("/ready"), _read("/ping")] * _CONFIRMATIONS)
        ready, ping = replies[::2], replies[1::2]
        if all(reply.status == NOT_FOUND for reply in ready):
            # Before 0.5.20 nothing shows it: the pause itself was answered, and calls keep
            # their order.
            return Answer(Observed.DONE, "there is no /ready to read it back", {"paused": True})
        serving = sum(reply.ok for reply in ready)
        if serving:
            return Answer(
                Observed.REFUSED,
                f"{serving} of {len(ready)} reads of /ready say that it serves",
                {"paused": False},
            )
        for reply in (*ready, *ping):
            if not reply.ok and reply.status != UNAVAILABLE:
                return answer_of(Op.CONFIRM, reply)
        unwell = any(not reply.ok for reply in ping)
        detail = "it calls itself unhealthy, as after a /health while paused" if unwell else ""
        return Answer(Observed.DONE, detail, {"paused": True})

    def heal(self) -> Flow[Answer]:
        """Close the session that an earlier publication left open, if there is one."""
        answer = yield from self.close()
        return Answer(Observed.DONE) if answer.observed is Observed.NO_SESSION else answer

    def begin(self) -> Flow[Answer]:
        """Open the update session; before 0.5.21 there are none."""
        reply = yield from call(_BEGIN)
        return _session_answer(Op.BEGIN, reply)

    def update(self, update_info: Mapping[str, Any], *, attachment: object | None) -> Flow[Answer]:
        """Receive one bucket; answers when it was loaded on every rank."""
        body: dict[str, Any] = {
            "names": update_info["names"],
            "dtypes": [name.removeprefix("torch.") for name in update_info["dtype_names"]],
            "shapes": update_info["shapes"],
            "group_name": GROUP,
            "flush_cache": False,
            "abort_all_requests": False,
            "weight_version": None,
            "load_format": "flattened_bucket" if update_info.get("packed") else None,
        }
        for name in ("data", "digest"):
            if name in update_info:
                body[name] = update_info[name]
        reply = yield from call(
            HTTPCall(
                method="POST",
                path="/update_weights_from_distributed",
                body=json_body(body),
                attachment=attachment,
                grant="admin",
            )
        )
        return answer_of(Op.UPDATE, reply)

    def finish(self, label: str | None) -> Flow[Answer]:
        """Close the session; the label is a call of its own."""
        del label
        reply = yield from call(_END)
        return _session_answer(Op.FINISH, reply)

    def label(self, label: str) -> Flow[Answer]:
        """Set the label alone, aborting nothing."""
        reply = yield from call(
            _post("/update_weight_version", {"new_version": label, "abort_all_requests": False})
        )
        return answer_of(Op.LABEL, reply)

    def read(self) -> Flow[Answer]:
        """Read label, pause and health. Facts: `label`, `paused`, `healthy`.

        A server that calls itself unhealthy is not dead: one whose scheduler died does not listen.
        """
        ping, ready, model = yield from calls(_read("/ping"), _read("/ready"), _read("/model_info"))
        for reply in (model, ping):
            if not reply.ok and reply.status != UNAVAILABLE:
                return answer_of(Op.READ, reply)
        if not model.ok:
            return answer_of(Op.READ, model)
        facts = {
            "label": model.json_field("weight_version"),
            "paused": paused_of(ping, ready),
            "healthy": ping.ok,
        }
        return Answer(Observed.DONE, facts=facts)

    def has_checksum(self) -> Flow[Answer]:
        """Whether /weights_checker is there: it takes GET and POST, and refuses PUT where it is."""
        reply = yield from call(HTTPCall(method="PUT", path="/weights_checker", grant="data"))
        if reply.status in (UNAUTHORIZED, FORBIDDEN):
            return answer_of(Op.READ, reply)
        if reply.status == NOT_FOUND:
            return Answer(
                Observed.REFUSED,
                "verify=('checksum',) needs the route /weights_checker, which this SGLang lacks: "
                "use verify=('probe',), or a newer SGLang",
            )
        return Answer(Observed.DONE)

    def checksum(self) -> Flow[Answer]:
        """Digest every parameter as the model holds it, fused and sharded as it is."""
        reply = yield from call(_post("/weights_checker", {"action": "checksum"}))
        answer = answer_of(Op.READ, reply)
        if not answer.done:
            return answer
        ranks = reply.json_field("ranks")
        if not isinstance(ranks, list) or not ranks:
            raise _no_sums(reply)
        sums: dict[str, str] = {}
        places: list[str] = []
        for rank in ranks:
            held = rank.get("checksums") if isinstance(rank, dict) else None
            if not isinstance(held, dict):
                raise _no_sums(reply)
            place = _place(rank.get("parallelism_info"), len(places))
            places.append(place)
            sums |= {f"{place}:{name}": str(digest) for name, digest in held.items()}
        return Answer(
            Observed.DONE,
            facts={"checksums": sums, "topology": " ".join(sorted(places)), "blind": 0},
        )

    def resume(self, plan: PausePlan) -> Flow[Answer]:
        """Generate again; what the plan says of caches was done with the pause."""
        del plan
        reply = yield from call(_CONTINUE)
        return answer_of(Op.RESUME, reply)

    def close(self) -> Flow[Answer]:
        """Close a session after a failure, without a label."""
        reply = yield from call(_END)
        return _session_answer(Op.CLOSE, reply)

    def leave(self) -> Flow[Answer]:
        """Leave the transfer group; one that is gone already was left."""
        reply = yield from call(_DESTROY)
        if reply.status == BAD_REQUEST and "does not exist" in error_text(reply.body).message:
            return Answer(Observed.DONE)
        return answer_of(Op.JOIN, reply)


def _flush(caches: Caches) -> Flow[Answer | None]:
    """Empty the prefix cache; None when it was done.

    Retracted requests wait in the queue: asked to wait until the server is idle it would wait for
    them (READ flush_wrapper.py). After an abort its last step may still be under way.
    """
    waits, tries = ({"timeout": str(_IDLE_S)}, 1) if caches.mode == "abort" else ({}, _FLUSHES)
    text = ""
    for _ in range(tries):
        reply = yield from call(
            HTTPCall(method="POST", path="/flush_cache", query=waits, grant="admin")
        )
        if reply.ok:
            return None
        if reply.status != BAD_REQUEST:
            return answer_of(Op.PAUSE, reply)
        text = error_text(reply.body).message
    return Answer(
        Observed.REFUSED,
        f"/flush_cache was refused ({text}): a request may be waiting for its "
        "grammar, or SGLang is older than 0.5.21 and requests wait; publish again, or with "
        "mode='abort'",
    )


def _session_answer(op: Op, reply: HTTPReply) -> Answer:
    if reply.status == NOT_FOUND:
        return Answer(Observed.DONE, "before 0.5.21 there are no update sessions")
    return answer_of(op, reply)


def _place(info: object, number: int) -> str:
    """The name of a rank by its place in the model, such as `tp0/2:pp0/1:dp0/1`."""
    target = info[0] if isinstance(info, list) and info else info
    if not isinstance(target, dict):
        return f"rank{number}"
    sizes = (f"{k}{target.get(f'{k}_rank')}/{target.get(f'{k}_size')}" for k in ("tp", "pp", "dp"))
    return ":".join(sizes)


def _no_sums(reply: HTTPReply) -> ReplyError:
    return ReplyError(f"expected checksums by rank from {reply.url}", body=reply.body)
