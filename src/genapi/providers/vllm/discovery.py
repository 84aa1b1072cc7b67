"""What one vLLM server is and can do, read in two rounds of calls; in one if it is known already.

The rule of this file: nothing is generated to find something out, and nothing is assumed of a
server that was not read. A route that is missing becomes a missing capability with its remedy.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from genapi.errors import ConfigError, NotReadyError, ReplyError
from genapi.providers.base import Capabilities, WorkerFacts
from genapi.providers.shapes.errors import (
    BAD_GATEWAY,
    FORBIDDEN,
    NOT_ALLOWED,
    NOT_FOUND,
    UNAUTHORIZED,
    UNAVAILABLE,
    error_text,
)
from genapi.providers.vllm.errors import ADMIN_REMEDY, SCALE_OUT_REMEDY, error_of
from genapi.providers.vllm.generate import ABORT_PATH
from genapi.providers.vllm.ranks import server_ranks
from genapi.types.ids import Role
from genapi.types.response import LogprobsMode
from genapi.wire.flow import Flow, call, calls
from genapi.wire.http import HTTPCall, HTTPReply

__all__ = ("inspect",)

_RELEASE = re.compile(r"v?(\d+)\.(\d+)")
_SPANS_SINCE = (0, 32)
_REFUSES_SINCE = (0, 33)  # READ: 0.33 answers 503 while paused by abort or wait
_MODES: dict[str, LogprobsMode] = {"raw_logprobs": "raw", "processed_logprobs": "processed"}
_ROLES = {"kv_producer": Role.PREFILL, "kv_consumer": Role.DECODE}
_EMPTIED = ("OffloadingConnector", "SimpleCPUOffloadConnector")
"""The connectors that do what a reset asks; vLLM takes any other's silence for success."""

# An id that nobody has: this route answers 200 where it exists, and aborts nothing (transcript
# 40). Without ids it would answer 400, and the server would print a traceback each time.
_SCALE_OUT_PROBE = HTTPCall(
    method="POST", path=ABORT_PATH, body=b'{"request_ids":["genapi-probe"]}'
)
_HEALTH = HTTPCall(method="GET", path="/health")
_VERSION = HTTPCall(method="GET", path="/version")
_MODELS = HTTPCall(method="GET", path="/v1/models")
_INFO = HTTPCall(method="GET", path="/server_info", query={"config_format": "json"})
_LABEL = HTTPCall(method="GET", path="/weight_info")
_PAUSED = HTTPCall(method="GET", path="/is_paused")
_SLEEPING = HTTPCall(method="GET", path="/is_sleeping")
_RANKS = HTTPCall(method="GET", path="/get_world_size")


def inspect(known: WorkerFacts | None = None) -> Flow[WorkerFacts]:
    """What this worker is and can do: at most ten calls, five when it is who it was before.

    `/server_info` takes seconds the first time in a server's life and milliseconds afterwards;
    it alone names the instance, so it is asked for along with the rest.

    Args:
        known: what it was when last read. Of the same instance only what may have changed since is
            taken from this read; of whatever else answers, everything is read.

    Raises:
        NotReadyError: it does not serve yet.
        AuthError: it refused the key.
        ConfigError: another kind of server answers there.
    """
    if known is not None and known.instance is not None:
        now = yield from _again(known)
        if now is not None:
            return now
    health, version, models = yield from calls(_HEALTH, _VERSION, _MODELS)
    if health.status in (BAD_GATEWAY, UNAVAILABLE):
        raise error_of(health, now=0.0)
    for reply in (health, version, models):
        if reply.status in (UNAUTHORIZED, FORBIDDEN):
            raise error_of(reply, now=0.0)
    engine_version = _engine_version(version)
    if engine_version is None or not health.ok or not models.ok:
        yield from _refuse_stranger(health, version, models)
    replies = yield from calls(
        _SCALE_OUT_PROBE,
        _INFO,
        _LABEL,
        _PAUSED,
        _SLEEPING,
        _RANKS,
    )
    for reply in replies:
        if reply.status == UNAUTHORIZED:
            raise error_of(reply, now=0.0)
    return _facts(engine_version, models.json_object(), replies)


def _again(known: WorkerFacts) -> Flow[WorkerFacts | None]:
    """What may have changed in the life of one instance; None = another one may answer."""
    replies = yield from calls(
        _HEALTH,
        _INFO,
        _LABEL,
        _PAUSED,
        _SLEEPING,
    )
    if not all(reply.ok for reply in replies):
        return None
    _, info, label, paused, sleeping = replies
    config = _read(info, "vllm_config", {})
    if config.get("instance_id") is None or str(config["instance_id"]) != known.instance:
        return None
    return replace(
        known,
        label=_read(label, "weight_version", None),
        paused=_read(paused, "is_paused", None),
        asleep=_asleep(config, paused=paused, sleeping=sleeping),
    )


def _facts(
    engine_version: str | None, models: Mapping[str, Any], replies: tuple[HTTPReply, ...]
) -> WorkerFacts:
    probe, info, label, paused, sleeping, ranks = replies
    config = _read(info, "vllm_config", {})
    backend = (config.get("weight_transfer_config") or {}).get("backend")
    mode = str((config.get("model_config") or {}).get("logprobs_mode", ""))
    missing: dict[str, str] = {}
    if probe.status in (FORBIDDEN, NOT_FOUND, NOT_ALLOWED):
        missing["generate"] = SCALE_OUT_REMEDY
    if mode.endswith("_logits"):
        missing["logprobs"] = f"it gives logits ({mode}); start vLLM with another --logprobs-mode"
    if label.status == NOT_FOUND:
        missing["admin"] = ADMIN_REMEDY
    elif backend is None:
        missing["weights"] = 'start vLLM with --weight-transfer-config \'{"backend": "..."}\''
    connector = _kv_connector(config)
    if connector is not None and connector not in _EMPTIED:
        missing["drop_caches"] = (
            f"keys and values of older weights stay in its KV connector {connector!r}, which "
            "vLLM does not empty: start it without --kv-transfer-config, or publish with "
            "prefix_cache='stale' (under mode='keep' also in_flight_kv='stale')"
        )
    release = _release(engine_version)
    world_size = _read(ranks, "world_size", 1)
    if type(world_size) is not int or world_size < 1:
        raise ReplyError(f"{ranks.url} names a world size of {world_size!r}", url=ranks.url)
    served = models.get("data")
    entries = [m for m in served if isinstance(m, dict)] if isinstance(served, list) else []
    instance = config.get("instance_id")
    return WorkerFacts(
        instance=None if instance is None else str(instance),
        ranks=world_size,
        places=_places(config.get("parallel_config") or {}, world_size),
        dp_group=_dp_group(config.get("parallel_config") or {}),
        role=_role(config),
        label=_read(label, "weight_version", None),
        paused=_read(paused, "is_paused", None),
        asleep=_asleep(config, paused=paused, sleeping=sleeping),
        capabilities=Capabilities(
            engine_version=engine_version,
            models=tuple(str(m["id"]) for m in entries if "id" in m),
            max_model_len=_max_model_len(entries),
            spans=release is not None and release >= _SPANS_SINCE and "generate" not in missing,
            logprobs_mode=_MODES.get(mode),
            weight_backend=backend,
            pause_refuses=release is not None and release >= _REFUSES_SINCE,
            missing=missing,
        ),
    )


def _read(reply: HTTPReply, name: str, default: Any) -> Any:
    """Field `name` of an answer; `default` where the route is missing.

    Raises:
        ReplyError: the route answered, and not with this field.
        GenAPIError: it answered an error.
    """
    if reply.status in (NOT_FOUND, NOT_ALLOWED):
        return default
    if not reply.ok:
        raise error_of(reply, now=0.0)
    return reply.json_field(name)


def _asleep(config: Mapping[str, Any], *, paused: HTTPReply, sleeping: HTTPReply) -> bool:
    """Whether memory may have been released.

    0.32 answers `is_sleeping` for a server that is merely paused, too. Only one that was started
    with --enable-sleep-mode can release anything; there the two cannot be told apart.
    """
    if _read(sleeping, "is_sleeping", None) is not True:
        return False
    enabled = (config.get("model_config") or {}).get("enable_sleep_mode") is True
    return enabled or _read(paused, "is_paused", None) is not True


def _engine_version(reply: HTTPReply) -> str | None:
    try:
        value = reply.json_object().get("version") if reply.ok else None
    except ReplyError:
        return None
    return value if isinstance(value, str) else None


def _release(version: str | None) -> tuple[int, int] | None:
    match = _RELEASE.match(version or "")
    return (int(match[1]), int(match[2])) if match else None


def _max_model_len(models: list[dict[str, Any]]) -> int | None:
    lengths = [m.get("max_model_len") for m in models]
    return next((n for n in lengths if isinstance(n, int)), None)


def _dp_group(parallel: Mapping[str, Any]) -> str | None:
    """External and hybrid data parallel: every server of the group answers the whole size."""
    outside = parallel.get("data_parallel_external_lb") or parallel.get("data_parallel_hybrid_lb")
    size = parallel.get("data_parallel_size", 1)
    if not outside or size == 1:
        return None
    address = parallel.get("data_parallel_master_ip")
    return f"{address}:{parallel.get('data_parallel_rpc_port')}/{size}"


def _places(parallel: Mapping[str, Any], world_size: int) -> tuple[int, ...]:
    """What this server's processes add to their rank offset."""
    if _dp_group(parallel) is None:
        return tuple(range(world_size))
    replica = world_size // parallel["data_parallel_size"]
    first = parallel.get("data_parallel_index", parallel.get("data_parallel_rank", 0))
    local = parallel.get("data_parallel_size_local", 1)
    return tuple(
        server_ranks(0, data_parallel_indexes=range(first, first + local), replica_size=replica)
    )


def _kv_connector(config: Mapping[str, Any]) -> str | None:
    name = (config.get("kv_transfer_config") or {}).get("kv_connector")
    return None if name is None else str(name)


def _role(config: Mapping[str, Any]) -> Role:
    """A role without a connector means nothing to vLLM."""
    if _kv_connector(config) is None:
        return Role.UNIFIED
    return _ROLES.get(str(config["kv_transfer_config"].get("kv_role")), Role.UNIFIED)


def _refuse_stranger(health: HTTPReply, version: HTTPReply, models: HTTPReply) -> Flow[None]:
    """Say which server answers instead of vLLM; one more call to know SGLang by name."""
    sglang = yield from call(HTTPCall(method="GET", path="/get_server_info"))
    seen = "; ".join(
        f"{path} answered {reply.status} {error_text(reply.body).message[:80]!r}"
        for path, reply in (("/health", health), ("/version", version), ("/v1/models", models))
    )
    who = "another kind of server answers"
    if sglang.ok and b"tp_size" in sglang.body:
        who = "an SGLang server answers; use a target sglang://..."
    elif b'"endpoints"' in health.body or b'"instances"' in health.body:
        who = "a Dynamo frontend answers; use a target dynamo://..."
    elif health.status >= 500:  # noqa: PLR2004 - any failure of the server's own
        raise NotReadyError(
            f"{health.url} is not ready: {seen}", status=health.status, body=health.body
        )
    raise ConfigError(f"no vLLM at {health.url or 'the address'}: {who} ({seen})")
