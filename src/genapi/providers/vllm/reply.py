"""How bodies of `/inference/v1/generate` become a `GenerateResponse`: unary and streamed alike.

The rule of this file: as in `shapes.choices`, nothing is repaired.
"""

from collections.abc import Sequence
from typing import Any

from genapi.errors import ReplyError
from genapi.providers.base import DecodeContext
from genapi.providers.shapes.choices import Choices, Output
from genapi.providers.shapes.tokens import Piece
from genapi.providers.vllm.frames import Body, Choice, Entry, TopEntry, parse
from genapi.providers.vllm.remarks import remark_on
from genapi.types.response import GenerateResponse, Usage

__all__ = ("NO_SCORE", "Accumulator")

NO_SCORE = -9999.0
"""What vLLM writes for minus infinity, NaN and a sampled token without a score."""

_KEPT = (
    "prompt_token_id_logprobs",
    "mm_placeholders",
    "metrics",
    "kv_transfer_params",
    "ec_transfer_params",
)
_KEPT_OF_CHOICE = ("routed_experts", "sampling_mask")
_HOLE = TopEntry()


class _Output(Output):
    """One output while it arrives."""

    def take(self, choice: Choice) -> Piece:
        """Take in what a choice brings."""
        ids = choice.token_ids or []
        scores = self._scores_of(choice, ids) if self.scored else None
        piece = self.add(ids, scores)
        self.add_text(choice.text)
        if choice.finish_reason is not None:
            self.finish = choice.finish_reason
        if choice.stop_reason is not None:
            self.stop_reason = choice.stop_reason
        if choice.weight_versions is not None:
            self.spans = choice.weight_versions
        for name in _KEPT_OF_CHOICE:
            value = getattr(choice, name)
            if value is not None:
                self.keep(name, value)
        return piece

    def _scores_of(self, choice: Choice, ids: list[int]) -> list[float | None] | None:
        content = choice.logprobs.content if choice.logprobs is not None else None
        if content is None:
            return None
        if len(content) != len(ids):
            raise ReplyError(
                f"choice {self.index} has {len(ids)} token ids with {len(content)} logprobs"
            )
        entries = [entry or _HOLE for entry in content]
        named = [entry.token_id for entry in entries]
        if named != ids:
            self.compare(named, ids)
        if self.with_top:
            self._keep_candidates(entries)
        return [entry.logprob for entry in entries]

    def _keep_candidates(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            sent = entry.top_logprobs if isinstance(entry, TopEntry) else []
            candidates = [c for c in sent if c is not None]
            ids = [c.token_id for c in candidates if c.token_id is not None]
            if len(ids) != len(candidates):
                raise ReplyError(f"choice {self.index} has candidates without token ids")
            self.add_top(ids, [c.logprob for c in candidates])


class Accumulator(Choices[_Output]):
    """Takes in the bodies of one reply: a single one, or every frame of a stream."""

    def __init__(self, context: DecodeContext) -> None:
        super().__init__(context, hole=NO_SCORE)

    def add(self, body: bytes) -> tuple[list[Piece], Any]:
        """Take in one JSON body; return its new tokens, and the error it reports or None.

        Raises:
            ReplyError: the body breaks the contract.
        """
        frame, extra, of_choices = parse(body, top=bool(self.request.sampling.logprobs))
        if frame.error is not None:
            return [], frame.error
        if frame.choices is None:
            raise ReplyError("the reply has no choices")
        self._head(frame)
        self.extra |= extra
        pieces = []
        for position, choice in enumerate(frame.choices):
            output = self.output(choice.index)
            pieces.append(output.take(choice))
            for name, value in of_choices[position].items() if of_choices else ():
                output.keep(name, value)
        return pieces, None

    def new_output(self, index: int) -> _Output:
        """An output that nothing came of yet."""
        return _Output(index, self.request, hole=NO_SCORE)

    def remark(self, response: GenerateResponse) -> None:
        """Say what the reply lacks."""
        remark_on(response, self.request, remark=self.context.remark)

    def _head(self, frame: Body) -> None:
        for name in _KEPT:
            value = getattr(frame, name)
            if value:
                self.extra[name] = value
        if frame.model is not None:
            self.model = frame.model
        if frame.usage is not None:
            details = frame.usage.prompt_tokens_details
            self.usage = Usage(
                prompt_tokens=frame.usage.prompt_tokens,
                completion_tokens=frame.usage.completion_tokens,
                cached_tokens=details.cached_tokens if details is not None else None,
            )
        self.echo(frame.prompt_token_ids)
        self.prompt_scores(frame.prompt_logprobs)
