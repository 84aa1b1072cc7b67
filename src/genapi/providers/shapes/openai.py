"""Replies of the routes `/v1/completions` and `/v1/chat/completions`, whole or as a stream.

Engines agree on the envelope and differ in where they put token ids, versions and prompts: what
differs is a method of `OpenAIReply`, which a provider overrides.

The rule of this file: ids are never made from text. A reply that has text and names no ids, where
they were asked for, is broken; candidates that are named by text alone are kept as they came, in
`output.extra["top_logprobs"]`, and are no `top_logprobs`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from genapi.errors import ReplyError
from genapi.providers.shapes.bodies import fields_of, kept, parse_body, unknown_of
from genapi.providers.shapes.choices import NULL, Choices, Output
from genapi.providers.shapes.tokens import Id, Piece
from genapi.types.base import FrozenDict
from genapi.types.policy import PolicyTrace
from genapi.types.request import GenerateRequest, SamplingParams
from genapi.types.response import FinishReason, GenerateOutput, GenerateResponse, Usage
from genapi.wire.http import HTTPReply

__all__ = ("Body", "Choice", "Entry", "Message", "OpenAIReply", "Scores", "read_messages")

_TOKEN_ID = re.compile(r"token_id:(\d+)")


class Entry(Struct, gc=False):
    """One token with its score, or one candidate. Candidates are read only where they are kept."""

    token: str | None = None
    logprob: float | None = None
    token_id: Id | None = None
    top_logprobs: Raw = NULL

    @property
    def named(self) -> int | None:
        """The id, where the entry names one."""
        return self.token_id if self.token_id is not None else _id_of(self.token)


class Scores(Struct, gc=False):
    """Log-probabilities of a choice: chat has `content`, completions have the parallel lists.

    Candidates are read only where they are kept.
    """

    content: list[Entry | None] | None = None
    tokens: list[str | None] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: Raw = NULL


class Message(Struct, gc=False):
    """A chat message, or the next piece of one."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None


class Choice(Struct, gc=False):
    """One output, or the next piece of one."""

    index: int | None = None
    text: str | None = None
    message: Message | None = None
    delta: Message | None = None
    logprobs: Scores | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    matched_stop: Any = None
    token_ids: list[Id] | None = None
    response_token_ids: list[Id] | None = None
    prompt_token_ids: list[Id] | None = None
    prompt_logprobs: Raw = NULL
    meta_info: Raw = NULL
    routed_experts: Any = None


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
    id: str | None = None
    object: Any = None
    created: Any = None
    model: str | None = None
    usage: UsageCounts | None = None
    prompt_token_ids: list[Id] | None = None
    prompt_logprobs: Raw = NULL
    prompt_text: Any = None
    system_fingerprint: Any = None
    service_tier: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    metrics: Any = None
    metadata: Raw = NULL
    sglext: Raw = NULL
    nvext: Raw = NULL
    error: Any = None


class _ClosedMessage(Message, gc=False, forbid_unknown_fields=True):
    pass


class _ClosedChoice(Choice, gc=False, forbid_unknown_fields=True):
    message: _ClosedMessage | None = None
    delta: _ClosedMessage | None = None


class _ClosedBody(Body, gc=False, forbid_unknown_fields=True):
    choices: Sequence[_ClosedChoice] | None = None


_closed = msgspec.json.Decoder(_ClosedBody)
_open = msgspec.json.Decoder(Body)
_candidates_of_token = msgspec.json.Decoder(list[Entry | None] | None)
_candidates_of_all = msgspec.json.Decoder(list[dict[str, float | None] | None] | None)
_list_of_fields = msgspec.json.Decoder(list[dict[str, Raw]])
_ANY = GenerateRequest(prompt=" ", sampling=SamplingParams(max_tokens=1, logprobs=None))
"""For outputs of which nothing but text is read."""
_KEPT = ("kv_transfer_params", "ec_transfer_params", "metrics")
_KEPT_OF_MESSAGE = ("refusal", "annotations", "audio", "function_call")


class OpenAIReply(Choices[Output]):
    """Takes in the bodies of one reply: a single one, or every frame of a stream.

    A provider overrides where it finds what only its engine sends.
    """

    def ids_of(self, body: Body, choice: Choice) -> list[int] | None:
        """The new ids of a choice; None where the frame does not name them."""
        del body
        return choice.token_ids

    def prompt_of(self, body: Body, choice: Choice) -> list[int] | None:
        """The prompt's ids; None where the frame does not name them."""
        return body.prompt_token_ids if choice.prompt_token_ids is None else choice.prompt_token_ids

    def stop_of(self, choice: Choice) -> str | int | None:
        """What of the request's own stops matched."""
        return choice.stop_reason

    def scores_of(
        self, output: Output, choice: Choice, ids: Sequence[int]
    ) -> list[float | None] | None:
        """The scores of a frame's tokens, candidates taken in; None where there are none.

        Raises:
            ReplyError: they are not those of the tokens.
        """
        return _scores(output, choice.logprobs, ids)

    def heed(self, body: Body) -> None:
        """Take in what a frame says besides its choices, after they were taken in."""

    def heed_choice(self, output: Output, choice: Choice) -> None:
        """Take in what a choice says besides tokens and text."""

    def add(self, body: bytes) -> tuple[list[Piece], Any]:
        """Take in one JSON body; return its new tokens, and the error it reports or None.

        Raises:
            ReplyError: the body breaks the contract.
        """
        frame, extra, of_choices = _parse(body)
        if frame.error is not None:
            return [], frame.error
        if frame.choices is None:
            raise ReplyError("the reply has no choices")
        self.extra |= extra
        pieces = []
        for position, choice in enumerate(frame.choices):
            output = self.output(choice.index)
            pieces.append(self._take(output, frame, choice))
            for name, value in of_choices[position].items() if of_choices else ():
                output.keep(name, value)
        self._head(frame)
        self.heed(frame)
        return pieces, None

    def new_output(self, index: int) -> Output:
        """An output that nothing came of yet."""
        return Output(index, self.request, hole=self.hole)

    def response(self) -> GenerateResponse:
        """The whole reply. Remarks go to the context.

        Raises:
            ReplyError: an output has text and names no token ids, or spans do not fit the tokens.
        """
        for output in self.outputs.values():
            if output.has_text and not output.ids and output.reason() is not FinishReason.ABORT:
                raise ReplyError(
                    f"choice {output.index} has text but names no token_ids, though they were "
                    "asked for: something between genapi and the engine takes them off, or it is "
                    "another engine; tokens are never made from text"
                )
        return super().response()

    def _take(self, output: Output, body: Body, choice: Choice) -> Piece:
        ids = self.ids_of(body, choice) or []
        self.echo(self.prompt_of(body, choice))
        self.prompt_scores(choice.prompt_logprobs)
        scores = self.scores_of(output, choice, ids) if output.scored else None
        piece = output.add(ids, scores)
        output.add_text(choice.text)
        for message in (choice.message, choice.delta):
            if message is not None:
                _add_message(output, message)
        if choice.finish_reason is not None:
            output.finish = choice.finish_reason
        stop = self.stop_of(choice)
        if stop is not None:
            output.stop_reason = stop
        if choice.routed_experts is not None:
            output.keep("routed_experts", choice.routed_experts)
        self.heed_choice(output, choice)
        return piece

    def _head(self, body: Body) -> None:
        for name in _KEPT:
            value = getattr(body, name)
            if value:
                self.extra[name] = value
        if body.model is not None:
            self.model = body.model
        if body.usage is not None:
            details = body.usage.prompt_tokens_details
            cached = details.cached_tokens if details is not None else None
            self.usage = Usage(
                prompt_tokens=body.usage.prompt_tokens,
                completion_tokens=body.usage.completion_tokens,
                cached_tokens=self.usage.cached_tokens if cached is None else cached,
            )
        if not body.choices:
            self.echo(body.prompt_token_ids)
        self.prompt_scores(body.prompt_logprobs)


def read_messages(reply: HTTPReply, response: GenerateResponse) -> GenerateResponse:
    """A reply with the text, reasoning, tool calls and finish reasons of a chat completion.

    Args:
        reply: the chat completion, which was made of the same outputs.
        response: the reply whose tokens, scores and versions are kept.

    Raises:
        ReplyError: it is none, or of other outputs.
    """
    frame, _, _ = _parse(reply.body)
    choices = {choice.index: choice for choice in frame.choices or ()}
    if choices.keys() != {output.index for output in response.outputs}:
        raise ReplyError(
            f"{reply.url} answered choices {sorted(map(str, choices))} for {len(response.outputs)} "
            "outputs",
            body=reply.body,
            url=reply.url,
        )
    return response.model_copy(
        update={"outputs": tuple(_with_message(o, choices[o.index]) for o in response.outputs)}
    )


def _with_message(output: GenerateOutput, choice: Choice) -> GenerateOutput:
    read = Output(output.index, _ANY)
    if choice.message is not None:
        _add_message(read, choice.message)
    read.finish = choice.finish_reason or output.finish_raw
    built = read.build(PolicyTrace())
    update = {
        "text": built.text,
        "reasoning": built.reasoning,
        "tool_calls": built.tool_calls,
        "extra": FrozenDict({**output.extra, **built.extra}),
    }
    if output.is_complete:
        update |= {"finish_reason": built.finish_reason, "finish_raw": built.finish_raw}
    return output.model_copy(update=update)


def _parse(body: bytes) -> tuple[Body, dict[str, Any], list[dict[str, Any]]]:
    """The typed body, its fields that have no name here, and those of each choice.

    Raises:
        ReplyError: it is not JSON, or a known field has another type.
    """
    typed, whole = parse_body(body, closed=_closed, opened=_open)
    if whole:
        return typed, {}, []
    with kept():
        fields = fields_of(body)
        choices = _list_of_fields.decode(fields["choices"]) if typed.choices else []
        return typed, unknown_of(fields, Body), [_unknown_of_choice(choice) for choice in choices]


def _unknown_of_choice(choice: Mapping[str, Raw]) -> dict[str, Any]:
    found = unknown_of(choice, Choice)
    for name in ("message", "delta"):
        if choice.get(name, NULL) != NULL:
            found |= unknown_of(fields_of(choice[name]), Message)
    return found


def _add_message(output: Output, message: Message) -> None:
    output.add_text(message.content)
    thought, also = message.reasoning, message.reasoning_content
    if thought is not None and also is not None and thought != also:
        raise ReplyError(
            f"choice {output.index} has reasoning and reasoning_content, and they differ"
        )
    output.add_reasoning(also if thought is None else thought)
    output.add_tool_calls(message.tool_calls or ())
    for name in _KEPT_OF_MESSAGE:
        value = getattr(message, name)
        if value is not None:
            output.keep(name, value)


def _scores(output: Output, scores: Scores | None, ids: Sequence[int]) -> list[float | None] | None:
    """The scores of a frame's tokens, candidates taken in; None where there are none.

    Raises:
        ReplyError: they are not those of the tokens.
    """
    if scores is None or (scores.content is None and scores.token_logprobs is None):
        return None
    if scores.content is not None:
        entries = [entry or Entry() for entry in scores.content]
        found = [entry.logprob for entry in entries]
        named = [entry.named for entry in entries]
    else:
        found = scores.token_logprobs or []
        named = [_id_of(token) for token in scores.tokens or [None] * len(found)]
    if not len(found) == len(named) == len(ids):
        raise ReplyError(
            f"choice {output.index} has {len(ids)} token ids with {len(found)} logprobs"
        )
    if named != ids and named.count(None) < len(named):
        output.compare(named, ids)
    if output.with_top or "top_logprobs" in output.extra:
        try:
            _keep_candidates(output, _candidates(scores, len(found)))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ReplyError(f"top_logprobs break their contract: {error}") from None
    return found


def _candidates(scores: Scores, count: int) -> Sequence[Sequence[Entry | None] | None]:
    if scores.content is not None:
        return [_candidates_of_token.decode(e.top_logprobs) if e else None for e in scores.content]
    top = _candidates_of_all.decode(scores.top_logprobs)
    if not top:
        return [None] * count
    if len(top) != count:
        raise ReplyError(f"{count} logprobs with the candidates of {len(top)} positions")
    return [
        [Entry(token=token, logprob=score) for token, score in (one or {}).items()] for one in top
    ]


def _keep_candidates(output: Output, positions: Sequence[Sequence[Entry | None] | None]) -> None:
    for position in positions:
        listed = [entry for entry in position or () if entry is not None]
        ids = [entry.named for entry in listed]
        named = [token for token in ids if token is not None]
        if len(named) == len(ids) and output.with_top:
            output.add_top(named, [entry.logprob for entry in listed])
            continue
        # Texts do not tell tokens apart: several candidates may share one.
        output.with_top = False
        output.keep("top_logprobs_complete", False)  # noqa: FBT003 - a value to keep
    if not output.with_top:
        output.keep(
            "top_logprobs",
            [
                {entry.token or "": entry.logprob for entry in position or () if entry is not None}
                for position in positions
            ],
        )


def _id_of(token: str | None) -> int | None:
    if token is None or not token.startswith("token_id:"):
        return None
    match = _TOKEN_ID.fullmatch(token)
    return None if match is None else int(match[1])
