"""What `/inference/v1/generate` sends, as typed structs: a whole reply or one frame of a stream.

The rule of this file: one pass. Known fields are decoded straight into structs; only a body that
holds a field which is not known here is read once more, to keep that field.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from genapi.providers.shapes.bodies import fields_of, kept, parse_body, unknown_of
from genapi.providers.shapes.choices import NULL
from genapi.providers.shapes.spans import WireSpan
from genapi.providers.shapes.tokens import Id

__all__ = ("Body", "Candidate", "Choice", "Entry", "TopEntry", "parse")


class Candidate(Struct, gc=False):
    """One candidate at one position."""

    token_id: Id | None = None
    logprob: float | None = None


class Entry(Candidate, gc=False):
    """The sampled token of one position."""


class TopEntry(Entry, gc=False):
    """The sampled token of one position and the best candidates there, itself first."""

    top_logprobs: list[Candidate | None] = []


class Scores(Struct, gc=False):
    """The log-probabilities of one choice."""

    content: Sequence[Entry | None] | None = None


class TopScores(Scores, gc=False):
    """The same with candidates."""

    content: Sequence[TopEntry | None] | None = None


class Choice(Struct, gc=False):
    """One output, or the next piece of one."""

    index: int | None = None
    token_ids: list[Id] | None = None
    logprobs: Scores | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    weight_versions: list[WireSpan] | None = None
    text: str | None = None
    routed_experts: Any = None
    sampling_mask: Any = None


class TopChoice(Choice, gc=False):
    """The same with candidates."""

    logprobs: TopScores | None = None


class PromptDetails(Struct, gc=False):
    """How the prompt was served."""

    cached_tokens: int | None = None


class UsageCounts(Struct, gc=False):
    """Token counts."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class Body(Struct, gc=False):
    """A whole reply, or one frame of a stream."""

    choices: Sequence[Choice] | None = None
    request_id: str | None = None
    model: str | None = None
    created: Any = None
    usage: UsageCounts | None = None
    prompt_token_ids: list[Id] | None = None
    prompt_logprobs: Raw = NULL
    output_mode: Any = None
    error: Any = None
    prompt_token_id_logprobs: Any = None
    mm_placeholders: Any = None
    metrics: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None


class _TopBody(Body, gc=False):
    choices: Sequence[TopChoice] | None = None


class _ClosedChoice(Choice, gc=False, forbid_unknown_fields=True):
    pass


class _ClosedTopChoice(TopChoice, gc=False, forbid_unknown_fields=True):
    pass


class _ClosedBody(Body, gc=False, forbid_unknown_fields=True):
    choices: Sequence[_ClosedChoice] | None = None


class _ClosedTopBody(Body, gc=False, forbid_unknown_fields=True):
    choices: Sequence[_ClosedTopChoice] | None = None


_closed = msgspec.json.Decoder(_ClosedBody)
_closed_top = msgspec.json.Decoder(_ClosedTopBody)
_open = msgspec.json.Decoder(Body)
_open_top = msgspec.json.Decoder(_TopBody)
_list_of_fields = msgspec.json.Decoder(list[dict[str, Raw]])


def parse(body: bytes, *, top: bool) -> tuple[Body, dict[str, Any], list[dict[str, Any]]]:
    """The typed body, its fields that have no name here, and those of each choice.

    Args:
        body: one JSON document.
        top: whether candidates are wanted.

    Raises:
        ReplyError: it is not JSON, or a known field has another type.
    """
    closed, opened = (_closed_top, _open_top) if top else (_closed, _open)
    typed, whole = parse_body(body, closed=closed, opened=opened)
    if whole:
        return typed, {}, []
    with kept():
        fields = fields_of(body)
        choices = _list_of_fields.decode(fields["choices"]) if typed.choices else []
        return typed, unknown_of(fields, Body), [unknown_of(choice, Choice) for choice in choices]
