"""What `/v1/completions` of a Dynamo frontend sends, as typed structs: a whole reply or one chunk.

The rule of this file: one pass, as in the other providers. Ids of workers are whole numbers of 64
bits, most of which no float can hold: they are decoded as integers and never leave that form but as
text.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from genapi.errors import ReplyError
from genapi.providers.shapes.bodies import fields_of, kept, parse_body, unknown_of
from genapi.types.ids import MAX_ID

__all__ = (
    "Body",
    "Choice",
    "EngineData",
    "Logprobs",
    "NvExt",
    "WorkerIds",
    "parse",
    "scores_by_id",
)

Id = Annotated[int, Meta(ge=0, le=MAX_ID)]
InstanceId = Annotated[int, Meta(ge=0)]


class Logprobs(Struct, gc=False):
    """Scores of the new tokens; candidates go by their texts, which name no ids."""

    token_logprobs: list[float | None] | None = None
    tokens: Any = None
    top_logprobs: Any = None
    text_offset: Any = None


class Choice(Struct, gc=False):
    """The new part of the only output."""

    text: str | None = None
    index: int = 0
    finish_reason: str | None = None
    logprobs: Logprobs | None = None


class CachedTokens(Struct, gc=False):
    """What of the prompt was found in a cache."""

    cached_tokens: int | None = None
    audio_tokens: Any = None


class Usage(Struct, gc=False):
    """Counts of tokens."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: CachedTokens | None = None
    completion_tokens_details: Any = None


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
    """Dynamo's own part of a reply."""

    worker_id: WorkerIds | None = None
    completion_token_ids: list[Id] | None = None
    prompt_token_ids: list[Id] | None = None
    prompt_logprobs: Raw = Raw(b"null")
    engine_data: Raw = Raw(b"null")
    stop_reason: str | int | None = None
    timing: Any = None


class Body(Struct, gc=False):
    """A whole reply, or one chunk of a stream."""

    id: str | None = None
    choices: tuple[Choice, ...] | None = None
    model: str | None = None
    usage: Usage | None = None
    nvext: NvExt | None = None
    error: Any = None
    created: Any = None
    object: Any = None
    system_fingerprint: Any = None
    message: str | None = None


class _ClosedNvExt(NvExt, gc=False, forbid_unknown_fields=True):
    pass


class _ClosedChoice(Choice, gc=False, forbid_unknown_fields=True):
    pass


class _ClosedBody(Body, gc=False, forbid_unknown_fields=True):
    choices: tuple[_ClosedChoice, ...] | None = None
    nvext: _ClosedNvExt | None = None


class _Score(Struct, gc=False):
    logprob: float | None = None


_closed = msgspec.json.Decoder(_ClosedBody)
_open = msgspec.json.Decoder(Body)
_scores = msgspec.json.Decoder(list[dict[str, _Score] | None])


def parse(body: bytes) -> tuple[Body, dict[str, Any]]:
    """The typed body, and the fields that have no name here, of its choice and `nvext` too.

    Raises:
        ReplyError: it is not JSON, or a known field has another type.
    """
    typed, whole = parse_body(body, closed=_closed, opened=_open)
    if whole:
        return typed, {}
    with kept():
        fields = fields_of(body)
        extra = unknown_of(fields, Body)
        if typed.nvext is not None:
            extra |= unknown_of(fields_of(fields["nvext"]), NvExt)
        if typed.choices:
            first, *_ = msgspec.json.decode(fields["choices"], type=list[dict[str, Raw]])
            extra |= unknown_of(first, Choice)
    return typed, extra


def scores_by_id(raw: Raw, ids: list[int]) -> list[float | None]:
    """The score of each id of the prompt among the candidates of its position.

    Raises:
        ReplyError: they have another shape, or lack a score of the prompt's own id.
    """
    try:
        positions = _scores.decode(raw)
    except msgspec.ValidationError as error:
        raise ReplyError(f"nvext.prompt_logprobs break their contract: {error}") from None
    if len(positions) != len(ids):
        raise ReplyError(f"{len(ids)} prompt ids with {len(positions)} prompt_logprobs")
    found: list[float | None] = []
    for position, (token, scores) in enumerate(zip(ids, positions, strict=True)):
        if scores is None:
            found.append(None)
        elif str(token) in scores:
            found.append(scores[str(token)].logprob)
        else:
            raise ReplyError(
                f"prompt_logprobs do not score token {token} at position {position} of the prompt"
            )
    return found
