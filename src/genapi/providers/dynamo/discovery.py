"""Which workers are behind a Dynamo frontend, what each is, and whether all of it serves.

The rule of this file: the list of `/v1/rl/workers` says who can be administered and not who serves;
`/v1/models/{model}/ready` says that, with counts; `/health` names every instance that may get a
request, also one that nobody can administer. All three are read, and what one of them lacks is
said. Both dialects of the list are read; instances are whole numbers of 64 bits.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final
from urllib.parse import quote, urlsplit, urlunsplit

import msgspec
from msgspec import Meta, Struct

from genapi.errors import ConfigError, NotReadyError, ProviderError, ReplyError
from genapi.providers.base import Capabilities, Listed, Listing, WorkerFacts
from genapi.providers.dynamo.errors import error_of, error_text
from genapi.providers.dynamo.ranks import worker_ranks
from genapi.providers.dynamo.routes import Family, family_of, lacking, no_files
from genapi.providers.shapes.answers import unless_failed
from genapi.providers.shapes.errors import (
    BAD_GATEWAY,
    FORBIDDEN,
    NOT_FOUND,
    UNAUTHORIZED,
    UNAVAILABLE,
)
from genapi.types.address import host_port
from genapi.types.ids import Role, WorkerId
from genapi.wire.flow import Flow, call, calls
from genapi.wire.http import HTTPCall, HTTPReply

__all__ = ("DynamoDirectory", "inspect")

_LIST: Final = "/v1/rl/workers"
_PROTOCOL: Final = 1
_MAX_PORT: Final = 65535
_WEB_PORTS: Final = (80, 443)
_SCHEMES: Final = ("http", "https", "memory")
_NO_ADMIN: Final = (
    "start it with DYN_ENABLE_RL=true (vLLM: --enable-rl) and DYN_SYSTEM_PORT, so that it is "
    f"listed in {_LIST} with its routes"
)
_NO_URL: Final = "it is listed without system_url: start it with DYN_SYSTEM_PORT=0 or a port"

_OPTIONAL: Final = ("destroy_weights_update_group", "liveness_probe")
"""Routes that a worker of a family may have or lack."""

_GENERATE: Final = "generate"
_BESIDE: Final = frozenset(
    {
        "clear_kv_blocks",
        "get_perf_metrics",
        "list_loras",
        "load_lora",
        "rl",
        "unload_lora",
    }
)
"""Endpoints that a worker keeps beside the one that generates, which sleep leaves registered."""
_FOR_ROUTERS: Final = "worker_kv_query_"

InstanceId = Annotated[int, Meta(ge=0)]


class _Worker(Struct):
    """One entry of the list, in either dialect."""

    component: str
    instance_id: InstanceId
    namespace: str | None = None
    model: str | None = None
    system_url: str | None = None
    admin_base_url: str | None = None
    routes: list[str] | None = None
    system_routes: list[str] | None = None
    world_size: Annotated[int, Meta(ge=1)] | None = None
    weight_transfer_backend: str | None = None
    error: str | None = None


class _List(Struct):
    """The whole list; the older dialect names no version of its protocol."""

    workers: list[_Worker]
    protocol_version: int | None = None
    namespace: str = ""


class _Instance(Struct):
    component: str
    endpoint: str
    namespace: str
    instance_id: InstanceId


class _Health(Struct):
    instances: list[_Instance] = []


class _Type(Struct):
    workers: int = 0


class _Namespace(Struct):
    ready: bool = False
    reason: str | None = None
    worker_types: dict[str, _Type] = {}
    missing_worker_types: list[str] = []


class _Ready(Struct):
    ready: bool
    reason: str | None = None
    namespaces: dict[str, _Namespace] = {}


class DynamoDirectory:
    """The workers behind a frontend; see `providers.base.Directory`."""

    always = True
    pins = True

    def address(self, frontend: str) -> str:
        """The listener of discovery: the same host, the next port, as Dynamo has it by default."""
        parts = urlsplit(frontend)
        if parts.scheme == "memory":
            return f"memory://{int(parts.netloc) + 1}"
        if parts.port is None or parts.port in _WEB_PORTS or parts.port >= _MAX_PORT:
            # Whatever answers on a port of the web has Dynamo behind it, on other ports.
            raise ConfigError(
                f"the list of workers is not next to {frontend!r}: name its address, as in "
                "?discovery=8001 or discovery_url="
            )
        beside = host_port(parts.hostname or "", parts.port + 1)
        return urlunsplit((parts.scheme, beside, "", "", ""))

    def read(self, discovery: str, *, model: str | None) -> Flow[Listing]:
        """Who is there, and whether the frontend serves: four calls."""
        listed, health, models = yield from calls(
            HTTPCall(method="GET", path=_LIST, base=discovery, grant="admin"),
            HTTPCall(method="GET", path="/health", grant="data"),
            HTTPCall(method="GET", path="/v1/models", grant="data"),
        )
        found, registered = _list(listed), _instances(health)
        instances = [one for one in registered if one.endpoint == _GENERATE]
        names = _names(models)
        if model is None and len(names) == 1:
            model = names[0]
        ready: _Ready | None = None
        if model is not None:
            reply = yield from call(
                HTTPCall(
                    method="GET", path=f"/v1/models/{quote(model, safe='')}/ready", grant="data"
                )
            )
            ready = _ready(reply)
        counts = _counts(ready)
        splits, routed = _splits(counts, instances), _routed(registered)
        workers = _workers(found, instances, model=model, splits=splits, routed=routed)
        return Listing(
            workers=workers,
            missing=_missing(workers, names, model=model, ready=ready, counts=counts),
        )


def inspect(known: WorkerFacts) -> Flow[WorkerFacts]:
    """What a worker says itself besides what the list says of it: its label, and that it lives.

    Its server's `/health` is not asked: it answers 503 for ever unless the worker was started to
    say more, and a pause does not show in it.

    Raises:
        NotReadyError: its engine is dead, or its server does not serve yet.
        ReplyError: it breaks its contract.
    """
    family = known.details.get("family")
    if family is None:
        return known
    paths = {
        Family.VLLM: "/engine/get_weight_version",
        Family.SGLANG: "/engine/get_weight_version",
    }
    path = paths.get(Family(family), "/engine/control/get_weight_version")
    asked = [HTTPCall(method="POST", path=path, body=b"{}")]
    if "liveness_probe" in known.details:
        asked.append(HTTPCall(method="POST", path="/engine/liveness_probe", body=b"{}"))
    paused: bool | None = None
    shows_pause = family in (Family.SIDECAR, Family.COLLECTIVE)
    if shows_pause:
        asked.append(HTTPCall(method="POST", path="/engine/control/is_paused", body=b"{}"))
    version, *more = yield from calls(*asked)
    if shows_pause:
        paused = require(more.pop()).get("is_paused") is True
    for reply in more:
        if require(reply).get("alive") is not True:
            raise NotReadyError(f"{reply.url}: the engine is dead", status=UNAVAILABLE)
    return replace(known, label=label_of(require(version)), paused=paused)


def label_of(body: Mapping[str, Any]) -> str | None:
    """The label in a worker's answer; families call it `version` or `weight_version`."""
    value = body.get("version", body.get("weight_version"))
    if value is None or isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode()


def require(reply: HTTPReply) -> dict[str, Any]:
    """The object that a worker answered, which says itself that it did what was asked.

    Raises:
        ConfigError: no worker is administered there.
        GenAPIError: it says or shows otherwise.
    """
    if reply.status == NOT_FOUND:
        raise ConfigError(
            f"{reply.url} answered {NOT_FOUND}: {error_text(reply.body).message} (the list of "
            "workers names that address, where no Dynamo worker is administered: check the "
            "worker's DYN_SYSTEM_PORT, and what else listens there)"
        )
    if not reply.ok:
        raise error_of(reply, now=0.0)
    body = reply.json_object()
    if unless_failed(reply) is None:
        raise ProviderError(
            f"{reply.url}: {error_text(reply.body).message}", status=reply.status, body=reply.body
        )
    return body


def _list(reply: HTTPReply) -> list[_Worker]:
    """The entries of the list, each once.

    Raises:
        AuthError: the key is refused.
        NotReadyError: it cannot be read now.
        ConfigError: no such list is there, or it speaks another protocol.
        ReplyError: an entry breaks the contract.
    """
    if reply.status in (UNAUTHORIZED, FORBIDDEN):
        raise error_of(reply, now=0.0)
    if not reply.ok:
        text = error_text(reply.body).message
        if reply.status >= 500:  # noqa: PLR2004 - any failure of the listing's own
            raise NotReadyError(f"{reply.url} answered {reply.status}: {text}", status=reply.status)
        raise ConfigError(
            f"{reply.url} answered {reply.status}: {text} (start the frontend with "
            "DYN_ENABLE_RL=true and name its DYN_RL_PORT as ?discovery=PORT)"
        )
    try:
        found = msgspec.json.decode(reply.body, type=_List)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ReplyError(
            f"{reply.url} breaks its contract: {error}", body=reply.body, url=reply.url
        ) from None
    if found.protocol_version not in (None, _PROTOCOL):
        raise ConfigError(
            f"{reply.url} speaks protocol {found.protocol_version}; genapi reads {_PROTOCOL}"
        )
    for worker in found.workers:
        worker.namespace = found.namespace if worker.namespace is None else worker.namespace
        for url in (worker.system_url, worker.admin_base_url):
            if url is not None and not _is_origin(url):
                raise ReplyError(f"{reply.url} names the address {url!r}, which is none")
        if worker.admin_base_url is not None and worker.world_size is None:
            raise ReplyError(f"{reply.url} names an admin_base_url without a world_size")
    _once(reply, "instance", [(w.namespace, w.component, w.instance_id) for w in found.workers])
    _once(reply, "system_url", [w.system_url for w in found.workers if w.system_url is not None])
    return found.workers


def _is_origin(url: str) -> bool:
    """Whether a URL is an origin and nothing else."""
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname) and (parts.port is not None or parts.scheme == "memory")
    except ValueError:
        return False
    bare = parts.path in ("", "/") and not parts.query and not parts.fragment
    return parts.scheme in _SCHEMES and named and bare and "@" not in parts.netloc


def _once(reply: HTTPReply, what: str, values: Sequence[object]) -> None:
    twice = [value for value, count in Counter(values).items() if count > 1]
    if twice:
        raise ReplyError(f"{reply.url} names the {what} {twice[0]!r} twice", url=reply.url)


def _instances(reply: HTTPReply) -> list[_Instance]:
    """Every endpoint of every instance."""
    if reply.status in (UNAUTHORIZED, FORBIDDEN, BAD_GATEWAY, UNAVAILABLE):
        raise error_of(reply, now=0.0)
    if not reply.ok or b'"instances"' not in reply.body:
        raise ConfigError(
            f"no Dynamo frontend at {reply.url}: it answered {reply.status} "
            f"{error_text(reply.body).message[:80]!r}"
        )
    try:
        health = msgspec.json.decode(reply.body, type=_Health)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ReplyError(f"{reply.url} breaks its contract: {error}", body=reply.body) from None
    return health.instances


def _routed(registered: Sequence[_Instance]) -> set[int]:
    """The instances that may get a request, whatever `--endpoint` calls what generates."""
    return {
        one.instance_id
        for one in registered
        if one.endpoint not in _BESIDE and not one.endpoint.startswith(_FOR_ROUTERS)
    }


def _names(reply: HTTPReply) -> list[str]:
    """The models that the frontend serves."""
    if not reply.ok:
        raise error_of(reply, now=0.0)
    listed = reply.json_field("data")
    entries = listed if isinstance(listed, list) else []
    return [str(m["id"]) for m in entries if isinstance(m, dict) and "id" in m]


def _ready(reply: HTTPReply) -> _Ready | None:
    """What the frontend says of one model; None = it does not know it (yet)."""
    if reply.status == NOT_FOUND:
        return None
    if not reply.ok and reply.status != UNAVAILABLE:
        raise error_of(reply, now=0.0)
    try:
        return msgspec.json.decode(reply.body, type=_Ready)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        if reply.status == UNAVAILABLE:
            raise error_of(reply, now=0.0) from None
        raise ReplyError(f"{reply.url} breaks its contract", body=reply.body) from None


def _counts(ready: _Ready | None) -> Counter[str]:
    """How many workers of each type serve."""
    counts: Counter[str] = Counter()
    for namespace in ready.namespaces.values() if ready is not None else ():
        for kind, type_ in namespace.worker_types.items():
            counts[kind] += type_.workers
    return counts


def _splits(counts: Mapping[str, int], instances: Sequence[_Instance]) -> bool:
    """Whether prefill and decode are done by different workers."""
    return "prefill" in counts or any("prefill" in i.component for i in instances)


def _role(component: str, *, splits: bool) -> Role:
    """A worker's role, which no list names: only the name of its component tells."""
    if "prefill" in component:
        return Role.PREFILL
    return Role.DECODE if splits or "decode" in component else Role.UNIFIED


_ORDER = {Role.UNIFIED: 0, Role.PREFILL: 1, Role.DECODE: 2}


def _workers(
    listed: Sequence[_Worker],
    instances: Sequence[_Instance],
    *,
    model: str | None,
    splits: bool,
    routed: Collection[int],
) -> tuple[Listed, ...]:
    known = {(worker.namespace, worker.instance_id) for worker in listed}
    mine = [w for w in listed if model is None or w.model in (None, model)]
    splits = splits or any("prefill" in w.component for w in mine)
    found = [_of_list(worker, model=model, splits=splits, routed=routed) for worker in mine]
    # Of several models one cannot tell whose an instance is that names none.
    others = instances if len({w.model for w in listed} - {None}) <= 1 else ()
    found += [
        _of_frontend(one, model=model, splits=splits)
        for one in others
        if (one.namespace, one.instance_id) not in known
    ]
    return tuple(sorted(found, key=_place))


def _place(worker: Listed) -> tuple[int, str, int, str]:
    identity = worker.facts.id
    assert identity is not None  # noqa: S101 - a listed worker has a name
    order = _ORDER[worker.facts.role]
    return order, identity.component, int(identity.instance), worker.url


def _of_list(
    worker: _Worker, *, model: str | None, splits: bool, routed: Collection[int]
) -> Listed:
    routes = worker.routes if worker.routes is not None else worker.system_routes or []
    family = family_of(routes, has_server=worker.admin_base_url is not None)
    identity = WorkerId(
        provider="dynamo",
        namespace=worker.namespace or "",
        component=worker.component,
        instance=str(worker.instance_id),
    )
    missing: dict[str, str] = {}
    if worker.system_url is None:
        missing["admin"] = _NO_URL
    elif family is None:
        missing["admin"] = f"it advertises no routes of a family that genapi knows: {routes}"
    else:
        lacks = lacking(family, routes)
        if lacks:
            missing["weights"] = f"it does not advertise {', '.join(lacks)}"
        reason = no_files(family, routes, has_server=worker.admin_base_url is not None)
        if reason is not None:
            missing["files"] = reason
    role = _role(worker.component, splits=splits)
    if role is not Role.UNIFIED:
        missing["probe"] = (
            "the scores of a prompt are its prefill worker's alone: use verify=('label',)"
        )
    details = {}
    if family is not None and worker.system_url is not None:
        details["family"] = str(family)
        details |= {route: route for route in _OPTIONAL if route in routes}
        if worker.admin_base_url is not None:
            details["server"] = worker.admin_base_url.rstrip("/")
    ranks = worker.world_size or 1
    return Listed(
        url=_nowhere(identity) if worker.system_url is None else worker.system_url.rstrip("/"),
        error=worker.error,
        facts=WorkerFacts(
            instance=identity.instance,
            id=identity,
            ranks=ranks,
            places=tuple(worker_ranks(0, world_size=ranks)),
            role=role,
            # A pause leaves vLLM's worker in the routing, unlike that of others; sleep does not.
            asleep=family is Family.VLLM and worker.instance_id not in routed,
            sleep_is_sure=family is Family.VLLM,
            details=details,
            capabilities=Capabilities(
                models=tuple(name for name in (worker.model or model,) if name is not None),
                # READ vllm/args.py: --enable-rl asks for them.
                logprobs_mode="processed" if family is Family.VLLM else None,
                weight_backend=worker.weight_transfer_backend,
                aborts_as_stop=True,
                missing=missing,
            ),
        ),
    )


def _of_frontend(instance: _Instance, *, model: str | None, splits: bool) -> Listed:
    """A worker that gets requests and that nobody can administer."""
    identity = WorkerId(
        provider="dynamo",
        namespace=instance.namespace,
        component=instance.component,
        instance=str(instance.instance_id),
    )
    return Listed(
        url=_nowhere(identity),
        facts=WorkerFacts(
            instance=identity.instance,
            id=identity,
            role=_role(instance.component, splits=splits),
            capabilities=Capabilities(
                models=() if model is None else (model,), missing={"admin": _NO_ADMIN}
            ),
        ),
    )


def _nowhere(identity: WorkerId) -> str:
    """What stands for the address of a worker that has none."""
    return f"dyn://{identity.namespace}.{identity.component}/{identity.instance}"


def _missing(
    workers: Sequence[Listed],
    names: Sequence[str],
    *,
    model: str | None,
    ready: _Ready | None,
    counts: Mapping[str, int],
) -> str | None:
    """What the frontend lacks, in words."""
    if model is None:
        served = ", ".join(names) or "none"
        return f"the frontend serves {served}: pass model= unless it serves exactly one"
    if ready is None:
        return f"the frontend does not know the model {model!r}"
    if not ready.ready:
        reasons = [n.reason for n in ready.namespaces.values() if n.reason]
        return f"the frontend does not serve {model!r}: {'; '.join(reasons) or ready.reason}"
    dead = [f"{w.facts.id}: {w.error}" for w in workers if w.error is not None]
    if dead:
        return f"discovery cannot reach {'; '.join(dead)}"
    there, serving = len(workers), sum(counts.values())
    if serving != there:
        return f"{there} workers are there and {serving} serve ({dict(counts)})"
    return None
