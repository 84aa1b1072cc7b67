"""How bodies of `/generate` become a `GenerateResponse`: unary and streamed alike.

The rule of this file: nothing is repaired and nothing is guessed. Frames of a stream hold either
all tokens so far or the new ones alone, as the server was started; each counts all of them in
`completion_tokens`, which tells the two apart. Lists that fit neither, a changed prompt, tokens
beyond the end are a broken reply (`ReplyError`); a value that the engine did not give is NaN and
is remarked upon.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from genapi.errors import ReplyError
from genapi.providers.base import DecodeContext
from genapi.providers.sglang.frames import (
    Body,
    Entry,
    Finish,
    MetaInfo,
    parse,
    parse_prompt_scores,
)
from genapi.providers.sglang.remarks import remark_on
from genapi.providers.shapes.spans import WireSpan, trace
from genapi.providers.shapes.tokens import Piece, compare_echo, ids_of, scores_of, top_of
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

__all__ = ("Accumulator", "Failed")

T = TypeVar("T")

NAN_HAPPENED = "NaN happened"
"""What SGLang says it matched after a draw beyond the vocabulary: broken scores, and a token that
it made up (READ schedule_batch.py)."""

_LEAST_ERROR = 400
_FINISH = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}
_KEPT = (
    "cached_tokens_details",
    "dp_rank",
    "e2e_latency",
    "num_retractions",
    "reasoning_tokens",
    "response_sent_to_client_ts",
    "routed_experts",
)
_KEPT_OF_TOKENS = ("output_token_sampling_mask", "output_token_sampling_logprobs")


class Failed:
    """An output that ended in an error.

    Attributes:
        message: SGLang's words.
        status: the status they stand for.
        not_finite: whether the model's scores are no numbers.
    """

    __slots__ = ("message", "not_finite", "status")

    def __init__(self, message: str, status: int, *, not_finite: bool = False) -> None:
        self.message = message
        self.status = status
        self.not_finite = not_finite


class Accumulator:
    """Takes in the bodies of one reply: a single one, or every frame of a stream."""

    def __init__(self, context: DecodeContext) -> None:
        sampling = context.request.sampling
        self._context = context
        self._request = context.request
        self._scored = sampling.logprobs is not None
        self._with_top = bool(sampling.logprobs)
        self._prompt = TokenIds(self._request.prompt_token_ids or ())
        self._echoed = False
        self._seen = False
        self._ids: list[int] = []
        self._scores: list[float | None] = []
        self._top: list[list[Entry] | None] = []
        self._text: str | None = None
        self._finish: Finish | None = None
        self._spans: list[WireSpan] | None = None
        self._prompt_scores: npt.NDArray[np.float32] | None = None
        self._usage = Usage()
        self._extra: dict[str, Any] = {}

    def add(self, body: bytes) -> tuple[list[Piece], Any]:
        """Take in one JSON body; return its new tokens, and the error it reports or None.

        Raises:
            ReplyError: the body breaks the contract.
        """
        frame, extra = parse(body)
        if frame.error is not None:
            return [], frame.error
        meta = frame.meta_info
        if meta is None or frame.output_ids is None:
            raise ReplyError("the reply has no output_ids and meta_info")
        if frame.index not in (None, 0):
            raise ReplyError(f"output index {frame.index} in the reply to a single request")
        self._seen = True
        piece = self._add_tokens(frame, frame.output_ids, meta)
        self._head(frame, meta)
        self._keep(meta, extra)
        if meta.finish_reason is not None:
            self._finish = meta.finish_reason
            failed = _failure(meta.finish_reason, self._request.sampling.stop)
            if failed is not None:
                return [], failed
        return [piece], None

    def unfinished(self) -> list[int]:
        """Indexes of the outputs that have no finish reason yet."""
        return [0] if self._finish is None else []

    def response(self) -> GenerateResponse:
        """The whole reply. Remarks go to the context.

        Raises:
            ReplyError: the weight spans do not fit the tokens.
        """
        built = self._build(self._policy())
        remark_on(built, self._request, remark=self._context.remark)
        return built

    def partial(self) -> GenerateResponse:
        """What has arrived; an output without a finish reason ends in ERROR, its policy unknown."""
        policy = PolicyTrace.unknown(len(self._ids))
        with contextlib.suppress(ReplyError):
            policy = self._policy()
        return self._build(policy)

    def _add_tokens(self, frame: Body, ids: list[int], meta: MetaInfo) -> Piece:
        before = len(self._ids)
        count = meta.completion_tokens
        total = len(ids) if count is None and before == 0 else count
        if total is None or total < before:
            raise ReplyError(
                f"a frame counts {total} completion_tokens after {before} tokens arrived"
            )
        new, repeats = self._new_ids(ids, total, aborted=_is_abort(meta))
        if new and self._finish is not None:
            raise ReplyError(
                f"the output goes on with {len(new)} tokens after its finish reason "
                f"{self._finish.type!r}"
            )
        limit = self._request.sampling.max_tokens
        if total > limit:
            raise ReplyError(f"the output has {total} tokens, max_tokens is {limit}")
        if repeats:
            # All of the text, after the new text where there is some.
            self._text = None if new else frame.text
        elif frame.text is not None:
            whole = len(ids) == total
            self._text = frame.text if whole else (self._text or "") + frame.text
        scores = self._new_scores(meta, new, total) if self._scored else None
        self._ids += new
        self._scores += scores or ()
        return Piece(0, new, scores)

    def _new_ids(self, ids: list[int], total: int, *, aborted: bool) -> tuple[list[int], bool]:
        """The new ids of a frame, and whether it repeats the last one."""
        before = len(self._ids)
        new = total - before
        if len(ids) == total and ids[:before] == self._ids:
            return ids[before:], False
        if len(ids) == new:
            return ids, False
        # A request that is aborted while it waits repeats its last token (READ
        # tokenizer_manager.py, incremental streams).
        if aborted and len(ids) == new + 1 and ids[-1:] == (self._ids + ids)[-2:-1]:
            return ids[:-1], True
        raise ReplyError(
            f"a frame has {len(ids)} token ids and counts {total} after {before} arrived, which "
            "is neither all of them nor the new ones"
        )

    def _new_scores(self, meta: MetaInfo, new: list[int], total: int) -> list[float | None]:
        entries = _aligned(meta.output_token_logprobs, len(new), total, aborted=_is_abort(meta))
        if self._with_top:
            top = _aligned(meta.output_top_logprobs, len(new), total, aborted=_is_abort(meta))
            self._top += top or [None] * len(new)
        if entries is None:
            return [None] * len(new)
        named = [entry[1] for entry in entries]
        if named != new:
            position = next(i for i, (a, b) in enumerate(zip(named, new, strict=True)) if a != b)
            raise ReplyError(
                f"output_token_logprobs score token {named[position]} at position "
                f"{len(self._ids) + position}, where {new[position]} was generated"
            )
        return [entry[0] for entry in entries]

    def _head(self, frame: Body, meta: MetaInfo) -> None:
        if meta.prompt_tokens is not None:
            self._usage = Usage(
                prompt_tokens=meta.prompt_tokens,
                completion_tokens=meta.completion_tokens,
                cached_tokens=meta.cached_tokens,
            )
        if meta.weight_versions is not None:
            self._spans = meta.weight_versions
        if frame.prompt_token_ids is not None:
            compare_echo(self._prompt, frame.prompt_token_ids)
            self._echoed = True
        wanted = self._request.sampling.prompt_logprobs is not None
        if wanted and self._prompt_scores is None and bytes(meta.input_token_logprobs) not in _NONE:
            self._prompt_scores = self._scores_of_prompt(
                parse_prompt_scores(meta.input_token_logprobs)
            )

    def _scores_of_prompt(self, entries: Sequence[Entry]) -> npt.NDArray[np.float32]:
        ids = self._prompt.tolist()
        if len(entries) != len(ids):
            raise ReplyError(f"{len(ids)} prompt ids with {len(entries)} input_token_logprobs")
        for position, (token, entry) in enumerate(zip(ids, entries, strict=True)):
            if entry[1] != token:
                raise ReplyError(
                    f"input_token_logprobs score token {entry[1]} at position {position} of the "
                    f"prompt, which has {token} there"
                )
        return scores_of([entry[0] for entry in entries])

    def _keep(self, meta: MetaInfo, extra: dict[str, Any]) -> None:
        for name in _KEPT:
            value = getattr(meta, name)
            if value is not None:
                self._extra[name] = value
        for name in _KEPT_OF_TOKENS:
            value = getattr(meta, name)
            if value is not None:
                held = self._extra.get(name, [])
                self._extra[name] = value if len(value) >= len(self._ids) else held + value
        self._extra |= extra

    def _policy(self) -> PolicyTrace:
        if self._request.lora is not None:
            # Spans name base weights; nothing is said of the adapter.
            return PolicyTrace.unknown(len(self._ids))
        return trace(self._spans, tokens=len(self._ids), run=self._context.run)

    def _build(self, policy: PolicyTrace) -> GenerateResponse:
        context = self._context
        return GenerateResponse(
            request_id=context.request_id,
            outputs=(self._output(policy),) if self._seen else (),
            prompt_token_ids=self._prompt if self._echoed else None,
            prompt_logprobs=self._prompt_scores,
            usage=self._usage,
            attempts=(Attempt(wire_id=context.wire_id, worker=context.worker),),
            worker=context.worker,
            logprobs_mode=context.logprobs_mode,
        )

    def _output(self, policy: PolicyTrace) -> GenerateOutput:
        finish = self._finish
        reason = FinishReason.ERROR
        extra = dict(self._extra)
        stop_reason = None
        if finish is not None:
            if _failure(finish, self._request.sampling.stop) is None:
                reason = _FINISH.get(finish.type, FinishReason.OTHER)
            stop_reason = self._stop_reason(finish)
            if finish.matched is not None:
                extra["matched"] = finish.matched
            if finish.message is not None:
                extra["abort_message"] = finish.message
        return GenerateOutput(
            index=0,
            token_ids=ids_of(self._ids),
            logprobs=scores_of(self._scores) if self._scored else None,
            top_logprobs=self._top_logprobs() if self._with_top else None,
            text=self._text,
            finish_reason=reason,
            finish_raw=None if finish is None else finish.type,
            stop_reason=stop_reason,
            policy=policy,
            extra=extra,
        )

    def _stop_reason(self, finish: Finish) -> str | int | None:
        """What of the request's own stops matched; the model's end token is none of them."""
        matched = finish.matched
        if isinstance(matched, str):
            return matched
        own = type(matched) is int and matched in TokenIds(self._request.sampling.stop_token_ids)
        return matched if own else None

    def _top_logprobs(self) -> tuple[TopLogprobs, ...]:
        positions = [entries or [] for entries in self._top]
        flat = [entry for entries in positions for entry in entries]
        return top_of([len(p) for p in positions], [e[1] for e in flat], [e[0] for e in flat])


_NONE = (b"null", b"[]")


def _aligned(values: list[T] | None, new: int, total: int, *, aborted: bool) -> list[T] | None:
    """The values of the `new` last tokens of `total`; None where there are none.

    Raises:
        ReplyError: they are neither those of all tokens nor those of the new ones.
    """
    if values is None:
        return None
    # Of a request that is aborted while it waits, an incremental stream may send those of the new
    # tokens and then those of all (READ tokenizer_manager.py).
    if len(values) == total or (aborted and len(values) == new + total):
        return values[len(values) - new :]
    if len(values) == new:
        return values
    raise ReplyError(f"{new} new token ids of {total} with {len(values)} logprobs")


def _is_abort(meta: MetaInfo) -> bool:
    return meta.finish_reason is not None and meta.finish_reason.type == "abort"


def _failure(finish: Finish, stops: Sequence[str]) -> Failed | None:
    """What kind of end is an error: aborts with a status are the server's own refusals."""
    if finish.type == "abort" and (finish.status_code or 0) >= _LEAST_ERROR:
        return Failed(finish.message or "aborted", finish.status_code or 0)
    if finish.matched == NAN_HAPPENED and NAN_HAPPENED not in stops:
        return Failed("the model's scores are NaN: its weights are broken", 500, not_finite=True)
    return None
