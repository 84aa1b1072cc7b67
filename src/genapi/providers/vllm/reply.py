"""How bodies of `/inference/v1/generate` become a `GenerateResponse`: unary and streamed alike.

The rule of this file: nothing is repaired. Lists that do not match, a changed prompt, tokens
beyond the end are a broken reply (`ReplyError`); a value that the engine did not give is NaN and
is remarked upon.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Raw

from genapi.errors import ReplyError
from genapi.providers.base import DecodeContext
from genapi.providers.shapes.spans import WireSpan, trace
from genapi.providers.shapes.tokens import Piece, compare_echo, ids_of, scores_of, top_of
from genapi.providers.vllm.frames import (
    NULL,
    Body,
    Candidate,
    Choice,
    Entry,
    TopEntry,
    parse,
    parse_prompt_scores,
)
from genapi.providers.vllm.remarks import remark_on
from genapi.types.ids import TokenIds
from genapi.types.policy import PolicyTrace
from genapi.types.response import (
    Attempt,
    FinishReason,
    GenerateOutput,
    GenerateResponse,
    TopLogprobs,
    Usage,
)

__all__ = ("Accumulator",)

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
_FINISH = {str(reason): reason for reason in FinishReason if reason is not FinishReason.OTHER}
_HOLE = TopEntry()


class _Output:
    """One output while it arrives."""

    def __init__(self, index: int, context: DecodeContext) -> None:
        sampling = context.request.sampling
        self.index = index
        self.scored = sampling.logprobs is not None
        self.with_top = bool(sampling.logprobs)
        self.limit = sampling.max_tokens
        self.ids: list[int] = []
        self.scores: list[float | None] = []
        self.top: list[list[Candidate]] = []
        self.text: list[str] = []
        self.finish: str | None = None
        self.stop_reason: str | int | None = None
        self.spans: list[WireSpan] | None = None
        self.extra: dict[str, Any] = {}

    def add(self, choice: Choice) -> Piece:
        """Take in what a choice brings."""
        ids = choice.token_ids or []
        if ids and self.finish is not None:
            raise ReplyError(
                f"choice {self.index} goes on with {len(ids)} tokens after its finish reason "
                f"{self.finish!r}"
            )
        scores = self._scores(choice, ids) if self.scored else None
        self.ids += ids
        self.scores += scores or ()
        if len(self.ids) > self.limit:
            raise ReplyError(
                f"choice {self.index} has {len(self.ids)} tokens, max_tokens is {self.limit}"
            )
        if choice.text is not None:
            self.text.append(choice.text)
        self._end(choice)
        for name in _KEPT_OF_CHOICE:
            value = getattr(choice, name)
            if value is not None:
                self.keep(name, value)
        return Piece(self.index, ids, scores, hole=NO_SCORE)

    def keep(self, name: str, value: Any) -> None:
        """Keep a field that has no name of its own; lists of several frames are joined."""
        before = self.extra.get(name)
        joined = isinstance(before, list) and isinstance(value, list)
        self.extra[name] = before + value if joined else value

    def reason(self, *, missing: FinishReason) -> FinishReason:
        """The finish reason; `missing` when there is none yet."""
        return missing if self.finish is None else _FINISH.get(self.finish, FinishReason.OTHER)

    def build(self, policy: PolicyTrace, finish: FinishReason) -> GenerateOutput:
        """The output as a value."""
        return GenerateOutput(
            index=self.index,
            token_ids=ids_of(self.ids),
            logprobs=scores_of(self.scores, hole=NO_SCORE) if self.scored else None,
            top_logprobs=self._top() if self.with_top else None,
            text="".join(self.text) if self.text else None,
            finish_reason=finish,
            finish_raw=self.finish,
            stop_reason=self.stop_reason,
            policy=policy,
            extra=self.extra,
        )

    def _end(self, choice: Choice) -> None:
        if choice.finish_reason is not None:
            self.finish = choice.finish_reason
        if choice.stop_reason is not None:
            self.stop_reason = choice.stop_reason
        if choice.weight_versions is not None:
            self.spans = choice.weight_versions

    def _scores(self, choice: Choice, ids: list[int]) -> list[float | None]:
        content = choice.logprobs.content if choice.logprobs is not None else None
        if content is None:
            if self.with_top:
                self.top += [[]] * len(ids)
            return [None] * len(ids)
        if len(content) != len(ids):
            raise ReplyError(
                f"choice {self.index} has {len(ids)} token ids with {len(content)} logprobs"
            )
        entries = [entry or _HOLE for entry in content]
        named = [entry.token_id for entry in entries]
        if named != ids:
            self._compare(named, ids)
        if self.with_top:
            self._keep_candidates(entries)
        return [entry.logprob for entry in entries]

    def _compare(self, named: Sequence[int | None], ids: list[int]) -> None:
        for position, (name, token) in enumerate(zip(named, ids, strict=True)):
            if name is not None and name != token:
                raise ReplyError(
                    f"choice {self.index} scores token {name} at position "
                    f"{len(self.ids) + position}, where it generated {token}"
                )

    def _keep_candidates(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            sent = entry.top_logprobs if isinstance(entry, TopEntry) else []
            candidates = [c for c in sent if c is not None]
            if any(c.token_id is None for c in candidates):
                raise ReplyError(f"choice {self.index} has candidates without token ids")
            self.top.append(candidates)

    def _top(self) -> tuple[TopLogprobs, ...]:
        flat = [c for candidates in self.top for c in candidates]
        ids = [c.token_id for c in flat if c.token_id is not None]
        return top_of([len(c) for c in self.top], ids, [c.logprob for c in flat], hole=NO_SCORE)


class Accumulator:
    """Takes in the bodies of one reply: a single one, or every frame of a stream."""

    def __init__(self, context: DecodeContext) -> None:
        self._context = context
        self._request = context.request
        self._outputs: dict[int, _Output] = {}
        self._prompt = TokenIds(self._request.prompt_token_ids or ())
        self._echoed = False
        self._prompt_scores: npt.NDArray[np.float32] | None = None
        self._model: str | None = None
        self._usage = Usage()
        self._extra: dict[str, Any] = {}

    def add(self, body: bytes) -> tuple[list[Piece], Any]:
        """Take in one JSON body; return its new tokens, and the error it reports or None.

        Raises:
            ReplyError: the body breaks the contract.
        """
        frame, extra, of_choices = parse(body, top=bool(self._request.sampling.logprobs))
        if frame.error is not None:
            return [], frame.error
        if frame.choices is None:
            raise ReplyError("the reply has no choices")
        self._head(frame)
        self._extra |= extra
        pieces = []
        for position, choice in enumerate(frame.choices):
            output = self._output(choice.index)
            pieces.append(output.add(choice))
            for name, value in of_choices[position].items() if of_choices else ():
                output.keep(name, value)
        return pieces, None

    def unfinished(self) -> list[int]:
        """Indexes of the outputs that have no finish reason yet."""
        wanted = range(self._request.sampling.n)
        return [i for i in wanted if i not in self._outputs or self._outputs[i].finish is None]

    def response(self) -> GenerateResponse:
        """The whole reply. Remarks go to the context.

        Raises:
            ReplyError: the weight spans do not fit the tokens.
        """
        built = self._build(
            [
                output.build(self._policy(output), output.reason(missing=FinishReason.ERROR))
                for output in self._sorted()
            ]
        )
        remark_on(built, self._request, remark=self._context.remark)
        return built

    def partial(self) -> GenerateResponse:
        """What has arrived; an output without a finish reason ends in ERROR, its policy unknown."""
        outputs = []
        for output in self._sorted():
            policy = PolicyTrace.unknown(len(output.ids))
            with contextlib.suppress(ReplyError):
                policy = self._policy(output)
            outputs.append(output.build(policy, output.reason(missing=FinishReason.ERROR)))
        return self._build(outputs)

    def _sorted(self) -> list[_Output]:
        return [output for _, output in sorted(self._outputs.items())]

    def _head(self, frame: Body) -> None:
        for name in _KEPT:
            value = getattr(frame, name)
            if value:
                self._extra[name] = value
        if frame.model is not None:
            self._model = frame.model
        if frame.usage is not None:
            details = frame.usage.prompt_tokens_details
            self._usage = Usage(
                prompt_tokens=frame.usage.prompt_tokens,
                completion_tokens=frame.usage.completion_tokens,
                cached_tokens=details.cached_tokens if details is not None else None,
            )
        if frame.prompt_token_ids is not None:
            compare_echo(self._prompt, frame.prompt_token_ids)
            self._echoed = True
        if self._request.sampling.prompt_logprobs is not None and frame.prompt_logprobs != NULL:
            self._prompt_scores = self._scores_of_prompt(frame.prompt_logprobs)

    def _output(self, index: int | None) -> _Output:
        count = self._request.sampling.n
        if index is None and count == 1:
            index = 0
        if index is None or not 0 <= index < count:
            raise ReplyError(f"choice index {index} in the reply to a request with n={count}")
        if index not in self._outputs:
            self._outputs[index] = _Output(index, self._context)
        return self._outputs[index]

    def _scores_of_prompt(self, raw: Raw) -> npt.NDArray[np.float32]:
        positions = parse_prompt_scores(raw)
        ids = self._prompt.tolist()
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
        return scores_of(scores, hole=NO_SCORE)

    def _policy(self, output: _Output) -> PolicyTrace:
        if self._request.lora is not None:
            # Spans name base weights; nothing is said of the adapter.
            return PolicyTrace.unknown(len(output.ids))
        return trace(output.spans, tokens=len(output.ids), run=self._context.run)

    def _build(self, outputs: list[GenerateOutput]) -> GenerateResponse:
        context = self._context
        return GenerateResponse(
            request_id=context.request_id,
            outputs=tuple(outputs),
            prompt_token_ids=self._prompt if self._echoed else None,
            prompt_logprobs=self._prompt_scores,
            usage=self._usage,
            attempts=(Attempt(wire_id=context.wire_id, worker=context.worker),),
            worker=context.worker,
            logprobs_mode=context.logprobs_mode,
            model=self._model,
            extra=self._extra,
        )
