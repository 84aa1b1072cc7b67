"""A reply of one or several outputs while it arrives: what does not depend on whose reply it is.

The rule of this file: nothing is repaired. Tokens beyond the end, more tokens than were asked for
and an output that was not asked for are a broken reply (`ReplyError`); a value that the engine did
not give is NaN.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Raw, Struct

from genapi.errors import ReplyError
from genapi.providers.base import DecodeContext
from genapi.providers.shapes.spans import WireSpan, trace
from genapi.providers.shapes.tokens import (
    Id,
    Piece,
    Scores,
    compare_echo,
    ids_of,
    scores_of,
    top_of,
)
from genapi.types.ids import TokenIds
from genapi.types.policy import PolicyTrace
from genapi.types.request import GenerateRequest
from genapi.types.response import (
    Attempt,
    FinishReason,
    GenerateOutput,
    GenerateResponse,
    TopLogprobs,
    Usage,
)

__all__ = ("NULL", "Choices", "Output", "prompt_scores")

NULL = Raw(b"null")
_FINISH = {str(reason): reason for reason in FinishReason if reason is not FinishReason.OTHER}


class Output:
    """One output while it arrives."""

    def __init__(self, index: int, request: GenerateRequest, *, hole: float | None = None) -> None:
        """Begin an output.

        Args:
            index: which of the request's outputs.
            request: what was asked.
            hole: a number that the engine writes in place of a score.
        """
        sampling = request.sampling
        self.index = index
        self.scored = sampling.logprobs is not None
        self.with_top = bool(sampling.logprobs)
        self.ids: list[int] = []
        self.finish: str | None = None
        self.stop_reason: str | int | None = None
        self.spans: list[WireSpan] | None = None
        self.extra: dict[str, Any] = {}
        self._limit = sampling.max_tokens
        self._hole = hole
        self._scores: list[float | None] = []
        self._counts: list[int] = []
        self._top_ids: list[int] = []
        self._top_scores: list[float | None] = []
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}

    def add(self, ids: Sequence[int], scores: Scores | None) -> Piece:
        """Take in tokens; without scores theirs are missing.

        Raises:
            ReplyError: the output had ended, or they are more than were asked for.
        """
        if ids and self.finish is not None:
            raise ReplyError(
                f"choice {self.index} goes on with {len(ids)} tokens after its finish reason "
                f"{self.finish!r}"
            )
        if self.scored and scores is None:
            scores = [None] * len(ids)
        self.ids += ids
        self._scores += scores or ()
        self._counts += [0] * (len(self.ids) - len(self._counts))
        if len(self.ids) > self._limit:
            raise ReplyError(
                f"choice {self.index} has {len(self.ids)} tokens, max_tokens is {self._limit}"
            )
        return Piece(self.index, ids, scores if self.scored else None, hole=self._hole)

    def add_top(self, ids: Sequence[int], scores: Scores) -> None:
        """Take in the candidates of the next position, before its token."""
        self._counts.append(len(ids))
        self._top_ids += ids
        self._top_scores += scores

    def add_text(self, text: str | None) -> None:
        """Take in more text."""
        if text is not None:
            self._text.append(text)

    def set_text(self, text: str | None) -> None:
        """Take in all of the text."""
        self._text = [] if text is None else [text]

    def add_reasoning(self, text: str | None) -> None:
        """Take in more of what the model thought."""
        if text is not None:
            self._reasoning.append(text)

    def add_tool_calls(self, calls: Sequence[Mapping[str, Any]]) -> None:
        """Take in calls of tools, or pieces of them, which are joined by their index."""
        for position, call in enumerate(calls):
            index = call.get("index")
            at = index if type(index) is int else position
            _join(self._calls.setdefault(at, {}), call)

    def keep(self, name: str, value: Any) -> None:
        """Keep a field that has no name of its own; lists of several frames are joined."""
        before = self.extra.get(name)
        joined = isinstance(before, list) and isinstance(value, list)
        self.extra[name] = before + value if joined else value

    def compare(self, named: Sequence[int | None], ids: Sequence[int]) -> None:
        """Hold the tokens that scores name against the ids, which come next.

        Raises:
            ReplyError: they differ.
        """
        for position, (name, token) in enumerate(zip(named, ids, strict=True)):
            if name is not None and name != token:
                raise ReplyError(
                    f"choice {self.index} scores token {name} at position "
                    f"{len(self.ids) + position}, where it generated {token}"
                )

    @property
    def has_text(self) -> bool:
        """Whether anything came that tokens stand behind."""
        return any(self._text) or any(self._reasoning) or bool(self._calls)

    def reason(self) -> FinishReason:
        """The finish reason; ERROR while there is none."""
        if self.finish is None:
            return FinishReason.ERROR
        return _FINISH.get(self.finish, FinishReason.OTHER)

    def build(self, policy: PolicyTrace) -> GenerateOutput:
        """The output as a value."""
        return GenerateOutput(
            index=self.index,
            token_ids=ids_of(self.ids),
            logprobs=scores_of(self._scores, hole=self._hole) if self.scored else None,
            top_logprobs=self._top() if self.with_top else None,
            text="".join(self._text) if self._text else None,
            reasoning="".join(self._reasoning) if self._reasoning else None,
            tool_calls=tuple(call for _, call in sorted(self._calls.items())),
            finish_reason=self.reason(),
            finish_raw=self.finish,
            stop_reason=self.stop_reason,
            policy=policy,
            extra=self.extra,
        )

    def _top(self) -> tuple[TopLogprobs, ...]:
        return top_of(self._counts, self._top_ids, self._top_scores, hole=self._hole)


def _join(known: dict[str, Any], piece: Mapping[str, Any]) -> None:
    for name, value in piece.items():
        if name == "function" and isinstance(value, Mapping):
            function = known.setdefault("function", {})
            for part, text in value.items():
                if part == "arguments" and isinstance(text, str):
                    function[part] = function.get(part, "") + text
                elif text is not None and not function.get(part):
                    function[part] = text
        elif name != "index" and value is not None and not known.get(name):
            known[name] = value


T = TypeVar("T", bound=Output)


class Choices(Generic[T]):
    """The outputs of one reply, and what is said of all of them."""

    def __init__(self, context: DecodeContext, *, hole: float | None = None) -> None:
        """Begin a reply.

        Args:
            context: what was asked.
            hole: a number that the engine writes in place of a score.
        """
        request = context.request
        self.context = context
        self.request = request
        self.hole = hole
        self.outputs: dict[int, T] = {}
        self.prompt = (
            None if request.prompt_token_ids is None else TokenIds(request.prompt_token_ids)
        )
        self.echoed = False
        self.model: str | None = None
        self.usage = Usage()
        self.extra: dict[str, Any] = {}
        self._prompt_scores: npt.NDArray[np.float32] | None = None
        self._prompt_raw: Raw | None = None

    # What an engine does its own way.

    def new_output(self, index: int) -> T:
        """An output that nothing came of yet."""
        raise NotImplementedError

    def remark(self, response: GenerateResponse) -> None:
        """Say what the reply lacks."""
        raise NotImplementedError

    def policy(self, output: T) -> PolicyTrace:
        """Which policy made which token of an output.

        Raises:
            ReplyError: the weight spans do not fit the tokens.
        """
        if self.request.lora is not None:
            # Spans name base weights; nothing is said of the adapter.
            return PolicyTrace.unknown(len(output.ids))
        return trace(output.spans, tokens=len(output.ids), run=self.context.run)

    # What holds for all.

    def output(self, index: int | None) -> T:
        """The output that a choice belongs to.

        Raises:
            ReplyError: none like it was asked for.
        """
        count = self.request.sampling.n
        if index is None and count == 1:
            index = 0
        if index is None or not 0 <= index < count:
            raise ReplyError(f"choice index {index} in the reply to a request with n={count}")
        if index not in self.outputs:
            self.outputs[index] = self.new_output(index)
        return self.outputs[index]

    def sorted(self) -> Iterator[T]:
        """The outputs by index."""
        return (output for _, output in sorted(self.outputs.items()))

    def echo(self, ids: Sequence[int] | None) -> None:
        """Take in the prompt that the server says it saw.

        Raises:
            ReplyError: another one was sent.
        """
        if ids is None:
            return
        if self.prompt is not None:
            compare_echo(self.prompt, ids)
        else:
            self.prompt = ids_of(ids)
        self.echoed = True

    def prompt_scores(self, raw: Raw) -> None:
        """Take in the prompt's scores by stringified id, to be read when its ids are known."""
        if self.request.sampling.prompt_logprobs is not None and raw != NULL:
            self._prompt_raw = Raw(bytes(raw))

    def set_prompt_scores(self, scores: npt.NDArray[np.float32]) -> None:
        """Take in the prompt's scores."""
        self._prompt_scores = scores

    @property
    def has_prompt_scores(self) -> bool:
        """Whether the prompt's scores came."""
        return self._prompt_scores is not None

    def unfinished(self) -> list[int]:
        """Indexes of the outputs that have no finish reason yet."""
        wanted = range(self.request.sampling.n)
        return [i for i in wanted if i not in self.outputs or self.outputs[i].finish is None]

    def response(self) -> GenerateResponse:
        """The whole reply. Remarks go to the context.

        Raises:
            ReplyError: the weight spans do not fit the tokens, or scores the prompt.
        """
        self._read_prompt_scores()
        built = self._build([output.build(self.policy(output)) for output in self.sorted()])
        self.remark(built)
        return built

    def partial(self) -> GenerateResponse:
        """What has arrived; an output without a finish reason ends in ERROR, its policy unknown."""
        outputs = []
        for output in self.sorted():
            policy = PolicyTrace.unknown(len(output.ids))
            with contextlib.suppress(ReplyError):
                policy = self.policy(output)
            outputs.append(output.build(policy))
        with contextlib.suppress(ReplyError):
            self._read_prompt_scores()
        return self._build(outputs)

    def _read_prompt_scores(self) -> None:
        if self._prompt_raw is not None and self.prompt is not None:
            self._prompt_scores = prompt_scores(self._prompt_raw, self.prompt, hole=self.hole)

    def _build(self, outputs: list[GenerateOutput]) -> GenerateResponse:
        context = self.context
        return GenerateResponse(
            request_id=context.request_id,
            outputs=tuple(outputs),
            prompt_token_ids=self.prompt if self.echoed else None,
            prompt_logprobs=self._prompt_scores,
            usage=self.usage,
            attempts=(Attempt(wire_id=context.wire_id, worker=context.worker),),
            worker=context.worker,
            logprobs_mode=context.logprobs_mode,
            model=self.model,
            extra=self.extra,
        )


class _Scored(Struct, gc=False):
    """One candidate at one position of a prompt."""

    logprob: float | None = None
    token_id: Id | None = None


_prompt_positions = msgspec.json.Decoder(list[dict[str, _Scored] | None])


def prompt_scores(
    raw: Raw, prompt: TokenIds, *, hole: float | None = None
) -> npt.NDArray[np.float32]:
    """The scores of a prompt's own ids, of `[null, {"<id>": {"logprob"}, ...}, ...]`.

    Args:
        raw: the JSON as it came.
        prompt: the ids.
        hole: a number that the engine writes in place of a score.

    Raises:
        ReplyError: they have another shape, or do not belong to these ids.
    """
    try:
        positions = _prompt_positions.decode(raw)
    except msgspec.ValidationError as error:
        raise ReplyError(f"prompt_logprobs break their contract: {error}") from None
    ids = prompt.tolist()
    if len(positions) != len(ids):
        raise ReplyError(f"{len(ids)} prompt ids with {len(positions)} prompt_logprobs")
    scores: list[float | None] = []
    for position, (token, candidates) in enumerate(zip(ids, positions, strict=True)):
        if candidates is None:
            scores.append(None)
        elif str(token) in candidates:
            scores.append(candidates[str(token)].logprob)
        else:
            raise ReplyError(
                f"prompt_logprobs at position {position} lack the prompt's own id {token}"
            )
    return scores_of(scores, hole=hole)
