"""How bodies of `/v1/completions` become a `GenerateResponse`: unary and streamed alike.

The rule of this file: nothing is repaired and nothing is guessed. Lists that do not match, a
changed prompt, tokens beyond the end are a broken reply (`ReplyError`); a value that the engine did
not give is NaN and is remarked upon. No version is read from a reply: Dynamo's workers put none
into it, and what a worker of somebody's own may put there is in `extra`.

A request that the frontend moved to another worker while it ran names only one of them, and only
the last one's tokens in `engine_data`; its prompt counts the tokens of those before. Such a reply
is one of nobody in particular, which bounds its versions by all workers' (`extra["migrated"]`).
"""

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Raw

from genapi.errors import ReplyError
from genapi.providers.base import DecodeContext
from genapi.providers.dynamo.frames import Body, Choice, EngineData, NvExt, WorkerIds, parse
from genapi.providers.dynamo.frames import scores_by_id as prompt_scores_of
from genapi.providers.dynamo.remarks import remark_on
from genapi.providers.shapes.tokens import Piece, compare_echo, ids_of, scores_of
from genapi.types.ids import TokenIds, WorkerId
from genapi.types.policy import PolicyTrace
from genapi.types.response import Attempt, FinishReason, GenerateOutput, GenerateResponse, Usage

__all__ = ("Accumulator",)

_FINISH = {
    "stop": FinishReason.STOP,
    "eos": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "cancelled": FinishReason.ABORT,
    "abort": FinishReason.ABORT,
    "error": FinishReason.ERROR,
}
_NO_SCORE = -1e30
"""What workers write for a score that is not finite (READ vllm/handlers.py)."""
_NULL = Raw(b"null")
_LISTS = ("completion_token_ids", "prompt_token_ids", "completion_logprobs", "prompt_logprobs")
"""Of `engine_data`: what the reply holds already."""


class Accumulator:
    """Takes in the bodies of one reply: a single one, or every chunk of a stream."""

    def __init__(self, context: DecodeContext) -> None:
        sampling = context.request.sampling
        self._context = context
        self._request = context.request
        self._scored = sampling.logprobs is not None
        ids = self._request.prompt_token_ids
        self._sent = None if ids is None else TokenIds(ids)
        self._prompt: TokenIds | None = None
        self._prompt_raw: Raw | None = None
        self._seen = False
        self._ids: list[int] = []
        self._scores: list[float | None] = []
        self._text: list[str] = []
        self._finish: str | None = None
        self._stop_reason: str | int | None = None
        self._workers = WorkerIds()
        self._usage = Usage()
        self._engine_data: dict[str, Any] = {}
        self._last_ids: list[int] | None = None
        self._model: str | None = None
        self._extra: dict[str, Any] = {}

    def add(self, body: bytes) -> tuple[list[Piece], Any]:
        """Take in one JSON body; return its new tokens, and the error it reports or None.

        Raises:
            ReplyError: the body breaks the contract.
        """
        frame, extra = parse(body)
        if frame.error is not None:
            return [], frame.error
        if frame.choices is None:
            raise ReplyError("the reply has no choices")
        self._head(frame, extra)
        if not frame.choices:
            return [], None
        if len(frame.choices) > 1 or frame.choices[0].index != 0:
            raise ReplyError("several outputs in the reply to a request for one")
        self._seen = True
        choice = frame.choices[0]
        piece = self._add_tokens(choice, (frame.nvext or NvExt()).completion_token_ids)
        if choice.finish_reason is not None:
            self._finish = choice.finish_reason
        return [piece], None

    def unfinished(self) -> list[int]:
        """Indexes of the outputs that have no finish reason yet."""
        return [0] if self._finish is None else []

    def response(self) -> GenerateResponse:
        """The whole reply. Remarks go to the context.

        Raises:
            ReplyError: scores of the prompt do not fit it, or tokens came without their ids.
        """
        if not self._ids and any(self._text):
            raise ReplyError("the reply has text and no nvext.completion_token_ids")
        built = self._build(self._prompt_scores())
        remark = self._context.remark
        remark_on(built, self._request, migrated=self._is_migrated(), remark=remark)
        return built

    def partial(self) -> GenerateResponse:
        """What has arrived; an output without a finish reason ends in ERROR."""
        return self._build(None)

    def _add_tokens(self, choice: Choice, ids: list[int] | None) -> Piece:
        new = ids or []
        before = len(self._ids)
        if new and self._finish is not None:
            raise ReplyError(
                f"the output goes on with {len(new)} tokens after its finish reason "
                f"{self._finish!r}"
            )
        limit = self._request.sampling.max_tokens
        if before + len(new) > limit:
            raise ReplyError(f"the output has {before + len(new)} tokens, max_tokens is {limit}")
        scores = self._new_scores(choice, len(new)) if self._scored else None
        self._ids += new
        self._scores += scores or ()
        if choice.text is not None:
            self._text.append(choice.text)
        return Piece(0, new, scores)

    def _new_scores(self, choice: Choice, count: int) -> list[float | None]:
        scores = None if choice.logprobs is None else choice.logprobs.token_logprobs
        if not scores and (count == 0 or scores is None):
            return [None] * count
        if len(scores or ()) != count:
            raise ReplyError(f"{count} new token ids with {len(scores or ())} token_logprobs")
        return [None if s is None or s <= _NO_SCORE else s for s in scores or ()]

    def _head(self, frame: Body, extra: dict[str, Any]) -> None:
        self._extra |= extra
        if frame.model is not None:
            self._model = frame.model
        if frame.usage is not None:
            details = frame.usage.prompt_tokens_details
            self._usage = Usage(
                prompt_tokens=frame.usage.prompt_tokens,
                completion_tokens=frame.usage.completion_tokens,
                cached_tokens=None if details is None else details.cached_tokens,
            )
        if frame.nvext is not None:
            self._take(frame.nvext)

    def _take(self, nvext: NvExt) -> None:
        if nvext.worker_id is not None:
            self._workers = nvext.worker_id
        if nvext.prompt_token_ids is not None:
            if self._sent is not None:
                compare_echo(self._sent, nvext.prompt_token_ids)
            self._prompt = ids_of(nvext.prompt_token_ids)
        if nvext.prompt_logprobs != _NULL and self._prompt_raw is None:
            self._prompt_raw = Raw(bytes(nvext.prompt_logprobs))
        if nvext.stop_reason is not None:
            self._stop_reason = nvext.stop_reason
        if nvext.timing is not None:
            self._extra["timing"] = nvext.timing
        if nvext.engine_data != _NULL:
            self._take_engine_data(nvext.engine_data)

    def _take_engine_data(self, raw: Raw) -> None:
        try:
            data = msgspec.json.decode(raw)
            typed = msgspec.convert(data, EngineData) if isinstance(data, dict) else EngineData()
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ReplyError(f"nvext.engine_data breaks its contract: {error}") from None
        self._last_ids = typed.completion_token_ids
        if isinstance(data, dict):
            data = {name: value for name, value in data.items() if name not in _LISTS}
        self._extra["engine_data"] = data

    def _is_migrated(self) -> bool:
        """Whether one worker went on with what another had begun."""
        counted, prompt = self._usage.prompt_tokens, self._prompt or self._sent
        longer = counted is not None and prompt is not None and counted > len(prompt)
        last = self._last_ids
        return longer or (last is not None and len(last) < len(self._ids))

    def _prompt_scores(self) -> npt.NDArray[np.float32] | None:
        if self._request.sampling.prompt_logprobs is None or self._prompt_raw is None:
            return None
        ids = self._prompt or self._sent
        if ids is None:
            raise ReplyError("prompt_logprobs came without the prompt's ids")
        found = prompt_scores_of(self._prompt_raw, ids.tolist())
        return scores_of([None if s is None or s <= _NO_SCORE else s for s in found])

    def _build(self, prompt_scores: npt.NDArray[np.float32] | None) -> GenerateResponse:
        context, migrated = self._context, self._is_migrated()
        decode, prefill = self._workers.decode_worker_id, self._workers.prefill_worker_id
        if decode is None:
            decode, prefill = prefill, None
        worker = None if migrated else _worker(decode) or context.worker
        return GenerateResponse(
            request_id=context.request_id,
            outputs=(self._output(migrated),) if self._seen else (),
            prompt_token_ids=self._prompt,
            prompt_logprobs=prompt_scores,
            usage=self._usage,
            attempts=(Attempt(wire_id=context.wire_id, worker=worker),),
            worker=worker,
            prefill_worker=None if migrated or prefill == decode else _worker(prefill),
            logprobs_mode=context.logprobs_mode,
            model=self._model,
        )

    def _output(self, migrated: bool) -> GenerateOutput:  # noqa: FBT001 - only called above
        extra = dict(self._extra)
        for name in ("prefill_dp_rank", "decode_dp_rank"):
            rank = getattr(self._workers, name)
            if rank is not None:
                extra[name] = rank
        if migrated:
            extra["migrated"] = True
        reason = FinishReason.ERROR
        if self._finish is not None:
            reason = _FINISH.get(self._finish, FinishReason.OTHER)
        return GenerateOutput(
            index=0,
            token_ids=ids_of(self._ids),
            logprobs=scores_of(self._scores) if self._scored else None,
            text="".join(self._text) if self._text else None,
            finish_reason=reason,
            finish_raw=self._finish,
            stop_reason=self._stop_reason,
            policy=PolicyTrace.unknown(len(self._ids)),
            extra=extra,
        )


def _worker(instance: int | None) -> WorkerId | None:
    """A worker by its instance alone; the fleet knows the rest of its name."""
    return None if instance is None else WorkerId(provider="dynamo", instance=str(instance))
