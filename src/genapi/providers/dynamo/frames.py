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

__all__ = ("NvExt", "WorkerIds", "parse_engine_data", "parse_nvext")

InstanceId = Annotated[int, Meta(ge=0)]


class WorkerIds(Struct, gc=False):
    """Who served it; a worker that does both is named twice."""

    prefill_worker_id: InstanceId | None = None
    decode_worker_id: InstanceId | None = None
    prefill_dp_rank: int | None = None
    decode_dp_rank: int | None = None


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
_ids = msgspec.json.Decoder(list[Id] | None)
_NOTHING = NvExt()
_HELD = ("prompt_token_ids", "completion_logprobs", "prompt_logprobs")
"""Lists of `engine_data` that the reply holds already: they are passed over unread."""


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


def parse_engine_data(raw: Raw) -> tuple[list[int] | None, Any]:
    """The tokens that the last worker made, and what else it says itself at the end.

    The frontend passes it on unread.

    Raises:
        msgspec.MsgspecError, RecursionError: it is not JSON, or its tokens are no ids.
    """
    try:
        found = fields_of(raw)
    except msgspec.ValidationError:
        return None, msgspec.json.decode(raw)  # no object
    fields = {name: value for name, value in found.items() if name not in _HELD}
    made = _ids.decode(fields.pop("completion_token_ids", NULL))
    return made, {name: msgspec.json.decode(value) for name, value in fields.items()}
