"""Dynamo's own part of a reply, `nvext`, as typed structs.

The rule of this file: ids of workers are whole numbers of 64 bits, most of which no float can hold:
they are decoded as integers and never leave that form but as text.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from genapi.providers.shapes.bodies import fields_of, kept, parse_body, unknown_of
from genapi.providers.shapes.choices import NULL
from genapi.providers.shapes.tokens import Id

__all__ = ("EngineData", "NvExt", "WorkerIds", "parse_nvext")

InstanceId = Annotated[int, Meta(ge=0)]


class WorkerIds(Struct, gc=False):
    """Who served it; a worker that does both is named twice."""

    prefill_worker_id: InstanceId | None = None
    decode_worker_id: InstanceId | None = None
    prefill_dp_rank: int | None = None
    decode_dp_rank: int | None = None


class EngineData(Struct, gc=False):
    """What the last worker itself says, at the end; the frontend passes it on unread."""

    completion_token_ids: list[Id] | None = None


class NvExt(Struct, gc=False):
    """Dynamo's own part of a reply, or of one chunk."""

    worker_id: WorkerIds | None = None
    completion_token_ids: list[Id] | None = None
    prompt_token_ids: list[Id] | None = None
    prompt_logprobs: Raw = NULL
    engine_data: Raw = NULL
    stop_reason: str | int | None = None
    timing: Any = None


class _Closed(NvExt, gc=False, forbid_unknown_fields=True):
    pass


_closed = msgspec.json.Decoder(_Closed)
_open = msgspec.json.Decoder(NvExt)
_NOTHING = NvExt()


def parse_nvext(raw: Raw) -> tuple[NvExt, dict[str, Any]]:
    """The typed part, and its fields that have no name here.

    Raises:
        ReplyError: a known field has another type.
    """
    if raw == NULL:
        return _NOTHING, {}
    typed, whole = parse_body(bytes(raw), closed=_closed, opened=_open)
    if whole:
        return typed, {}
    with kept():
        return typed, unknown_of(fields_of(raw), NvExt)
