"""What one SGLang server is and can do, read in one round of calls.

The rule of this file: nothing is generated to find something out (`/health` does, and answers 503
after 20 s while the server is paused), nothing is assumed that was not read, and of `/server_info`,
which repeats both keys of the server, nothing is kept but the fields of `_ServerInfo`: no error
holds its body.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Any

import msgspec

from genapi.errors import ConfigError, NotReadyError, ReplyError
from genapi.providers.base import Capabilities, WorkerFacts
from genapi.providers.sglang.errors import error_of, error_text
from genapi.providers.sglang.ranks import server_ranks
from genapi.providers.shapes.errors import BAD_GATEWAY, FORBIDDEN, UNAUTHORIZED, UNAVAILABLE
from genapi.types.ids import Role
from genapi.types.policy import is_updating_label, parse_label
from genapi.types.response import LogprobsMode
from genapi.wire.flow import Flow, calls
from genapi.wire.http import HTTPCall, HTTPReply

__all__ = ("inspect", "paused_of")

_VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")
_SPANS_SINCE = (0, 5, 19)
_ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}
_LENGTH = 16


class _Environment(msgspec.Struct):
    """What a scheduler says of its environment, where the server was started to say it."""

    original_logprob: str | None = msgspec.field(
        default=None, name="SGLANG_RETURN_ORIGINAL_LOGPROB"
    )


class _State(msgspec.Struct):
    """The state of one scheduler."""

    env_vars: _Environment | None = None


class _ServerInfo(msgspec.Struct):
    """The fields of `/server_info` that are looked at; keys and command lines are not decoded."""

    tp_size: int
    dp_size: int = 1
    attn_dp_size: int = 1
    pp_size: int = 1
    tokenizer_worker_num: int = 1
    version: str | None = None
    startup_time: Any = None
    disaggregation_mode: str | None = None
    context_length: int | None = None
    vocab_size: int | None = None
    enable_lora: bool | None = None
    enable_deterministic_inference: bool | None = None
    enable_priority_scheduling: bool | None = None
    schedule_low_priority_values_first: bool | None = None
    abort_on_priority_when_disabled: bool | None = None
    internal_states: list[_State] = []


_server_info = msgspec.json.Decoder(_ServerInfo)


def _get(path: str) -> HTTPCall:
    return HTTPCall(method="GET", path=path, grant="data")


def inspect() -> Flow[WorkerFacts]:
    """What this worker is and can do: five calls at once; more only where no SGLang answers.

    Raises:
        NotReadyError: it does not serve yet.
        AuthError: it refused the key.
        ConfigError: another kind of server answers there.
    """
    ping, ready, model, models, server = yield from calls(
        _get("/ping"), _get("/ready"), _get("/model_info"), _get("/v1/models"), _get("/server_info")
    )
    for reply in (ping, model, models, server):
        if reply.status in (UNAUTHORIZED, FORBIDDEN):
            raise error_of(reply, now=0.0)
    for reply in (model, server):
        if reply.status in (BAD_GATEWAY, UNAVAILABLE):
            raise error_of(replace(reply, body=b""), now=0.0)
    info = _info(server)
    if info is None or not model.ok:
        yield from _refuse_stranger(model, server)
    assert info is not None  # noqa: S101 - a stranger was refused
    described = model.json_object()
    label = described.get("weight_version")
    if ping.status == UNAVAILABLE and not _is_known(label):
        # A paused server that was asked for its health calls itself unhealthy, too; whose label no
        # publication wrote is starting.
        raise NotReadyError(f"{ping.url} is starting, or unhealthy", status=ping.status)
    return _facts(info, described, models, label, paused=paused_of(ping, ready))


def paused_of(ping: HTTPReply, ready: HTTPReply) -> bool | None:
    """Whether a server generates nothing now, by its two flags; None = it does not say.

    `/ready` came with 0.5.20. `/ping` is a flag since 0.5.23 and always 200 before, so that an
    older server which is starting looks paused (READ http_server.py).
    """
    if ready.ok:
        return False
    return True if ready.status == UNAVAILABLE and ping.ok else None


def _is_known(label: object) -> bool:
    return parse_label(label) is not None or is_updating_label(label)


def _info(reply: HTTPReply) -> _ServerInfo | None:
    """The fields of `/server_info`; None where something else answers.

    Raises:
        ReplyError: a field has another type. The body is not in it.
    """
    if not reply.ok or b'"tp_size"' not in reply.body:
        return None
    try:
        info = _server_info.decode(reply.body)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        # `from None`: the cause of the failure may show what surrounds it.
        where = str(error).rpartition("at `")[2].strip("`") or "it is not JSON"
        raise ReplyError(
            f"{reply.url} breaks its contract ({where})", status=reply.status, url=reply.url
        ) from None
    for name in ("tp_size", "dp_size", "pp_size"):
        if getattr(info, name) < 1:
            raise ReplyError(f"{reply.url} names a {name} of {getattr(info, name)}", url=reply.url)
    return info


def _facts(
    info: _ServerInfo,
    model: Mapping[str, Any],
    models: HTTPReply,
    label: object,
    *,
    paused: bool | None,
) -> WorkerFacts:
    release = _release(info.version)
    served, longest = _models(models)
    name = model.get("served_model_name")
    mode = model.get("disaggregation_mode", info.disaggregation_mode)
    return WorkerFacts(
        instance=_instance(info.startup_time),
        ranks=info.tp_size,
        # Stages and replicas cannot be published to (see `_missing`): the plan leaves them out.
        places=tuple(server_ranks(0, tp_size=info.tp_size)),
        role=_ROLES.get(str(mode), Role.UNIFIED),
        label=label if isinstance(label, str) else None,
        paused=paused,
        capabilities=Capabilities(
            engine_version=info.version,
            models=served or ((name,) if isinstance(name, str) else ()),
            max_model_len=longest or info.context_length,
            vocab_size=_vocabulary(info, model),
            spans=release is not None and release >= _SPANS_SINCE,
            logprobs_mode=_mode(info.internal_states),
            parsers=frozenset(
                name
                for name, key in (("reasoning", "reasoning_parser"), ("tools", "tool_call_parser"))
                if model.get(key)
            ),
            missing=_missing(info, model),
        ),
    )


def _missing(info: _ServerInfo, model: Mapping[str, Any]) -> dict[str, str]:
    missing: dict[str, str] = {}
    if model.get("is_generation") is False:
        missing["generate"] = "it serves an embedding model"
    if info.abort_on_priority_when_disabled and not info.enable_priority_scheduling:
        missing["generate"] = "start SGLang without --abort-on-priority-when-disabled"
    if info.dp_size > 1:
        missing["weights"] = (
            f"its --dp-size is {info.dp_size}, and SGLang gives replicas no ranks: publish with "
            "weights.Filesystem(dir), start a server for each, or use --attn-dp-size"
        )
    elif info.pp_size > 1:
        missing["weights"] = (
            f"its --pp-size is {info.pp_size}, and SGLang gives the stages of a pipeline one rank: "
            "publish with weights.Filesystem(dir), or start it with --tp-size alone"
        )
    if info.tokenizer_worker_num > 1:
        missing["weights"] = missing["files"] = (
            f"its --tokenizer-worker-num is {info.tokenizer_worker_num}, and each of them would "
            "show a label of its own: start it with one"
        )
    if info.enable_deterministic_inference is False:
        missing["seed"] = "start SGLang with --enable-deterministic-inference; it ignores seed else"
    if info.enable_priority_scheduling is False or info.schedule_low_priority_values_first is False:
        missing["priority"] = (
            "start SGLang with --enable-priority-scheduling and "
            "--schedule-low-priority-values-first, so that lower is served first"
        )
    if info.enable_lora is False:
        missing["lora"] = "start SGLang with --enable-lora"
    return missing


def _mode(states: list[_State]) -> LogprobsMode:
    told = (state.env_vars.original_logprob for state in states if state.env_vars is not None)
    return "raw" if any((text or "").lower() in ("1", "true") for text in told) else "scaled"


def _vocabulary(info: _ServerInfo, model: Mapping[str, Any]) -> int | None:
    size = info.vocab_size if info.vocab_size is not None else model.get("vocab_size")
    return size if type(size) is int and size > 0 else None


def _instance(startup_time: object) -> str | None:
    """How long each part of the start took: what one life of the process has of its own."""
    if startup_time in (None, {}, ""):
        return None
    if isinstance(startup_time, str | int | float):
        return str(startup_time)
    text = msgspec.json.encode(startup_time, order="sorted")
    return sha256(text).hexdigest()[:_LENGTH]


def _models(reply: HTTPReply) -> tuple[tuple[str, ...], int | None]:
    """The served models, adapters left out, and the longest context; both may be missing."""
    if not reply.ok:
        return (), None
    listed = reply.json_object().get("data")
    entries = [m for m in listed if isinstance(m, dict)] if isinstance(listed, list) else []
    base = [m for m in entries if m.get("parent") is None]
    lengths = [m["max_model_len"] for m in base if type(m.get("max_model_len")) is int]
    return tuple(str(m["id"]) for m in base if "id" in m), next(iter(lengths), None)


def _release(version: str | None) -> tuple[int, ...] | None:
    match = _VERSION.match(version or "")
    return tuple(map(int, match.groups())) if match else None


def _refuse_stranger(model: HTTPReply, server: HTTPReply) -> Flow[None]:
    """Say which server answers instead of SGLang."""
    version, health, workers = yield from calls(_get("/version"), _get("/health"), _get("/workers"))
    seen = "; ".join(
        f"{path} answered {reply.status} {error_text(reply.body).message[:80]!r}"
        for path, reply in (("/model_info", model), ("/version", version), ("/health", health))
    )
    who = "another kind of server answers"
    if version.ok and b'"version"' in version.body:
        who = "a vLLM server answers; use a target vllm://..."
    elif b'"endpoints"' in health.body or b'"instances"' in health.body:
        who = "a Dynamo frontend answers; use a target dynamo://..."
    elif workers.ok and b'"worker_type"' in workers.body:
        who = "an SGLang gateway answers; write ?workers=discover, or its workers as HOST:PORT,..."
    elif server.status >= 500:  # noqa: PLR2004 - any failure of the server's own
        raise NotReadyError(f"{server.url} is not ready: {seen}", status=server.status)
    raise ConfigError(f"no SGLang at {model.url or 'the address'}: {who} ({seen})")
