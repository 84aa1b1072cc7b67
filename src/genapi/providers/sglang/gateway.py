"""The workers behind an SGLang gateway (`smg`), as its `GET /workers` lists them.

A gateway passes generations on and nothing of administration (RUN smg 1.13), so each worker is
administered at its own address, and read there: which life it is, and what it can do. What the
gateway thinks of its health is no proof of anything, since a paused worker fails its checks. A
chat goes to a model by the name that the gateway read when it took the worker in; a server that
loads files takes another one (RUN smg 1.13 before SGLang 0.5.23).
The rule of this file: a list that cannot be read is an error, and never an empty list.
"""

from contextlib import suppress
from typing import Any

import msgspec

from genapi.errors import ConfigError, ReplyError
from genapi.providers.base import Listed, Listing, WorkerFacts
from genapi.providers.sglang.errors import error_of
from genapi.providers.shapes.errors import NOT_ALLOWED, NOT_FOUND
from genapi.types.config import base_url
from genapi.wire.flow import Flow, call
from genapi.wire.http import HTTPCall, HTTPReply

__all__ = ("GatewayDirectory",)

_LIST = "/workers"


class _Model(msgspec.Struct):
    """A model that a worker serves."""

    id: str


class _Worker(msgspec.Struct):
    """A worker as a gateway lists it."""

    url: str
    model_id: str | None = None
    models: list[_Model] = []
    connection_mode: str = "http"
    runtime_type: str = "sglang"
    is_healthy: bool | None = None
    status: Any = None


class _Workers(msgspec.Struct):
    """The list."""

    workers: list[_Worker]


_workers = msgspec.json.Decoder(_Workers)


class GatewayDirectory:
    """The workers behind a gateway; see `providers.base.Directory`."""

    always = False
    pins = False

    def address(self, frontend: str) -> str:
        """The gateway lists its workers itself."""
        return frontend

    def read(self, discovery: str, *, model: str | None) -> Flow[Listing]:
        """Who is there: one call. With a model's name those that serve another are left out."""
        reply = yield from call(HTTPCall(method="GET", path=_LIST, base=discovery, grant="data"))
        listed = [worker for worker in _read(reply) if _serves(worker, model)]
        healthy = any(worker.is_healthy is not False for worker in listed)
        found = {worker.url: worker for worker in map(_listed, listed)}
        return Listing(
            # A gateway lists in no order; ranks need one.
            workers=tuple(worker for _, worker in sorted(found.items())),
            missing=None if healthy else _missing(discovery, len(listed), model),
        )


def _read(reply: HTTPReply) -> list[_Worker]:
    if reply.status in (NOT_FOUND, NOT_ALLOWED):
        raise ConfigError(
            f"{reply.url} answered {reply.status}: no SGLang gateway lists workers there; name "
            "them as ?workers=HOST:PORT,..., or the gateway's address as ?discovery=HOST:PORT"
        )
    if not reply.ok:
        raise error_of(reply, now=0.0)
    try:
        return _workers.decode(reply.body).workers
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise ReplyError(
            f"{reply.url} lists no workers: {error}",
            body=reply.body,
            status=reply.status,
            url=reply.url,
        ) from None


def _serves(worker: _Worker, model: str | None) -> bool:
    names = {worker.model_id, *(one.id for one in worker.models)} - {None}
    return model is None or not names or model in names


def _listed(worker: _Worker) -> Listed:
    address = _server(worker.url)
    facts = WorkerFacts(instance=None)
    if worker.connection_mode != "http" or worker.runtime_type != "sglang":
        how = f"{worker.runtime_type} over {worker.connection_mode}"
        return Listed(url=address, facts=facts, error=f"it is {how}, not SGLang over http")
    model = worker.model_id or next((one.id for one in worker.models), None)
    try:
        return Listed(url=base_url(address, scheme="http"), facts=facts, model=model)
    except ConfigError as error:
        return Listed(url=worker.url, facts=facts, error=str(error))


def _server(url: str) -> str:
    # With --dp-aware a gateway lists each replica of a server as URL@RANK.
    head, _, rank = url.rpartition("@")
    if rank.isdecimal():
        with suppress(ConfigError):  # what stands before an @ may be a password
            return base_url(head, scheme="http")
    return url


def _missing(discovery: str, count: int, model: str | None) -> str | None:
    if count:
        return f"the gateway at {discovery} calls none of its {count} workers healthy"
    of = "" if model is None else f" of model {model!r}"
    return f"the gateway at {discovery} has no workers{of}"
