"""What `/generate` sends, as typed structs: a whole reply or one frame of a stream.

The rule of this file: one pass. Known fields are decoded straight into structs; only a body that
holds a field which is not known here is read once more, to keep that field.
"""

from typing import Any

import msgspec
from msgspec import Raw, Struct

from genapi.errors import ReplyError
from genapi.providers.shapes.bodies import fields_of, kept, parse_body, unknown_of
from genapi.providers.shapes.spans import WireSpan
from genapi.providers.shapes.tokens import Id

__all__ = ("Body", "Entry", "Finish", "MetaInfo", "parse", "parse_meta", "parse_prompt_scores")

_NULL = Raw(b"null")

Entry = tuple[float | None, Id, Any]
"""`[logprob, token id, text]`; the text is null unless it was asked for."""


class Finish(Struct, gc=False):
    """Why an output ended."""

    type: str
    matched: Any = None
    length: Any = None
    message: str | None = None
    status_code: int | None = None
    err_type: Any = None


class MetaInfo(Struct, gc=False):
    """Everything about an output but its tokens."""

    id: str | None = None
    finish_reason: Finish | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    weight_version: Any = None
    weight_versions: list[WireSpan] | None = None
    input_token_logprobs: Raw = _NULL
    output_token_logprobs: list[Entry] | None = None
    output_token_logprobs_length: Any = None
    output_top_logprobs: list[list[Entry] | None] | None = None
    input_top_logprobs: Any = None
    cached_tokens_details: Any = None
    num_retractions: Any = None
    reasoning_tokens: Any = None
    dp_rank: Any = None
    e2e_latency: Any = None
    response_sent_to_client_ts: Any = None
    routed_experts: Any = None
    output_token_sampling_mask: list[Any] | None = None
    output_token_sampling_logprobs: list[Any] | None = None
    output_token_sampling_mask_length: Any = None


class Body(Struct, gc=False):
    """A whole reply, or one frame of a stream."""

    output_ids: list[Id] | None = None
    text: str | None = None
    meta_info: MetaInfo | None = None
    prompt_token_ids: list[Id] | None = None
    index: int | None = None
    error: Any = None


class _ClosedMeta(MetaInfo, gc=False, forbid_unknown_fields=True):
    pass


class _ClosedBody(Body, gc=False, forbid_unknown_fields=True):
    meta_info: _ClosedMeta | None = None


_closed = msgspec.json.Decoder(_ClosedBody)
_open = msgspec.json.Decoder(Body)
_meta = msgspec.json.Decoder(MetaInfo)
_several = msgspec.json.Decoder(list[Raw])
_prompt_scores = msgspec.json.Decoder(list[Entry])


def parse(body: bytes) -> list[tuple[Body, dict[str, Any]]]:
    """The typed outputs of a body, in order, each with its fields that have no name here.

    A body holds one output or frame, or a list of outputs.

    Raises:
        ReplyError: it is not JSON, or a known field has another type.
    """
    if not body.lstrip().startswith(b"["):
        return [_parse_one(body)]
    try:
        listed = _several.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise ReplyError(f"the reply is not JSON: {error}") from None
    return [_parse_one(bytes(one)) for one in listed]


def _parse_one(body: bytes) -> tuple[Body, dict[str, Any]]:
    typed, whole = parse_body(body, closed=_closed, opened=_open)
    if whole:
        return typed, {}
    with kept():
        fields = fields_of(body)
        extra = unknown_of(fields, Body)
        if typed.meta_info is not None:
            extra |= unknown_of(fields_of(fields["meta_info"]), MetaInfo)
    return typed, extra


def parse_meta(raw: Raw) -> MetaInfo:
    """A `meta_info` by itself, as OpenAI's routes hold it.

    Raises:
        ReplyError: it has another shape.
    """
    try:
        return _meta.decode(raw)
    except msgspec.ValidationError as error:
        raise ReplyError(f"meta_info breaks its contract: {error}") from None


def parse_prompt_scores(raw: Raw) -> list[Entry]:
    """`input_token_logprobs`: one entry for each token of the prompt, the first without a score.

    Raises:
        ReplyError: they have another shape.
    """
    try:
        return _prompt_scores.decode(raw)
    except msgspec.ValidationError as error:
        raise ReplyError(f"input_token_logprobs break their contract: {error}") from None
