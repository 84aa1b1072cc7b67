"""How bodies of `/generate` become a `GenerateResponse`: unary and streamed alike.

The rule of this file: as in `shapes.choices`, nothing is repaired and nothing is guessed. Frames of
a stream hold either all tokens so far or the new ones alone, as the server was started; each counts
all of them in `completion_tokens`, which tells the two apart. Lists that fit neither are a broken
reply (`ReplyError`).
"""

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
from genapi.providers.shapes.choices import Choices, Output
from genapi.providers.shapes.tokens import Piece, scores_of
from genapi.types.ids import TokenIds
from genapi.types.request import GenerateRequest
from genapi.types.response import FinishReason, GenerateResponse, Usage

__all__ = ("Accumulator", "Failed", "keep_meta", "stop_reason")

T = TypeVar("T")

NAN_HAPPENED = "NaN happened"
"""What SGLang says it matched after a draw beyond the vocabulary: broken scores, and a token that
it made up (READ schedule_batch.py)."""

_LEAST_ERROR = 400
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


class _Output(Output):
    """One output while it arrives."""

    def __init__(self, index: int, request: GenerateRequest) -> None:
        super().__init__(index, request)
        self.usage = Usage()
        self._request = request
        self._failed: Failed | None = None

    def take(self, frame: Body, ids: list[int], meta: MetaInfo) -> tuple[Piece, Failed | None]:
        """Take in what a frame brings: its new tokens, and the error that it ends in."""
        before = len(self.ids)
        count = meta.completion_tokens
        total = len(ids) if count is None and before == 0 else count
        if total is None or total < before:
            raise ReplyError(
                f"a frame counts {total} completion_tokens after {before} tokens arrived"
            )
        if len(ids) > total and meta.finish_reason is None and ids[:before] == self.ids:
            # A frame that waits to be sent goes on to share its lists with what comes after it
            # (READ tokenizer_manager.py; RUN with several outputs): what it counts is its own.
            ids = ids[:total]
        new, repeats = self._new_ids(ids, total, aborted=_is_abort(meta))
        scores = self._new_scores(meta, new, total) if self.scored else None
        piece = self.add(new, scores)
        if repeats or len(ids) == total:
            # A frame that repeats has all of the text, after the new text where there is some.
            self.set_text(None if repeats and new else frame.text)
        else:
            self.add_text(frame.text)
        self._note(meta)
        return piece, self._failed

    def reason(self) -> FinishReason:
        """The finish reason; ERROR while there is none, and of an error."""
        return FinishReason.ERROR if self._failed is not None else super().reason()

    def _note(self, meta: MetaInfo) -> None:
        if meta.prompt_tokens is not None:
            self.usage = Usage(
                prompt_tokens=meta.prompt_tokens,
                completion_tokens=meta.completion_tokens,
                cached_tokens=meta.cached_tokens,
            )
        if meta.weight_versions is not None:
            self.spans = meta.weight_versions
        keep_meta(self, meta)
        finish = meta.finish_reason
        if finish is None:
            return
        self.finish = finish.type
        self.stop_reason = stop_reason(finish.matched, self._request)
        self._failed = _failure(finish, self._request.sampling.stop)
        if finish.matched is not None:
            self.extra["matched"] = finish.matched
        if finish.message is not None:
            self.extra["abort_message"] = finish.message

    def _new_ids(self, ids: list[int], total: int, *, aborted: bool) -> tuple[list[int], bool]:
        """The new ids of a frame, and whether it repeats the last one."""
        before = len(self.ids)
        new = total - before
        if len(ids) == total and ids[:before] == self.ids:
            return ids[before:], False
        if len(ids) == new:
            return ids, False
        # A request that is aborted while it waits repeats its last token (READ
        # tokenizer_manager.py, incremental streams).
        if aborted and len(ids) == new + 1 and ids[-1:] == (self.ids + ids)[-2:-1]:
            return ids[:-1], True
        raise ReplyError(
            f"a frame has {len(ids)} token ids and counts {total} after {before} arrived, which "
            "is neither all of them nor the new ones"
        )

    def _new_scores(self, meta: MetaInfo, new: list[int], total: int) -> list[float | None] | None:
        entries = _aligned(meta.output_token_logprobs, len(new), total, meta)
        if entries is not None:
            self.compare([entry[1] for entry in entries], new)
        if self.with_top:
            top = _aligned(meta.output_top_logprobs, len(new), total, meta)
            for listed in top or ():
                found = listed or []
                self.add_top([entry[1] for entry in found], [entry[0] for entry in found])
        return None if entries is None else [entry[0] for entry in entries]


class Accumulator(Choices[_Output]):
    """Takes in the bodies of one reply: a single one, or every frame of a stream."""

    def __init__(self, context: DecodeContext) -> None:
        super().__init__(context)

    def add(self, body: bytes) -> tuple[list[Piece], Any]:
        """Take in one JSON body; return its new tokens, and the error it reports or None.

        Raises:
            ReplyError: the body breaks the contract.
        """
        parsed, count = parse(body), self.request.sampling.n
        if len(parsed) > 1 or body.lstrip().startswith(b"["):
            # A list is the whole reply to a request for several outputs.
            if count == 1 or len(parsed) != count:
                raise ReplyError(f"{len(parsed)} outputs in the reply to a request with n={count}")
            for position, (frame, _) in enumerate(parsed):
                frame.index = position
        pieces = []
        for frame, extra in parsed:
            if frame.error is not None:
                return [], frame.error
            if frame.meta_info is None or frame.output_ids is None:
                raise ReplyError("the reply has no output_ids and meta_info")
            output = self.output(frame.index)
            piece, failed = output.take(frame, frame.output_ids, frame.meta_info)
            output.extra |= extra
            self._head(frame, frame.meta_info)
            if failed is not None:
                return [], failed
            pieces.append(piece)
        return pieces, None

    def new_output(self, index: int) -> _Output:
        """An output that nothing came of yet."""
        return _Output(index, self.request)

    def remark(self, response: GenerateResponse) -> None:
        """Say what the reply lacks."""
        remark_on(response, self.request, remark=self.context.remark)

    def _head(self, frame: Body, meta: MetaInfo) -> None:
        counts = [output.usage.completion_tokens for output in self.outputs.values()]
        # Every output counts the same prompt, and finds in the cache what the first one left.
        first = min(self.outputs.items())[1].usage
        self.usage = Usage(
            prompt_tokens=first.prompt_tokens,
            completion_tokens=None if None in counts else sum(c or 0 for c in counts),
            cached_tokens=first.cached_tokens,
        )
        self.echo(frame.prompt_token_ids)
        wanted = self.request.sampling.prompt_logprobs is not None and not self.has_prompt_scores
        if wanted and self.prompt is not None and bytes(meta.input_token_logprobs) not in _NONE:
            entries = parse_prompt_scores(meta.input_token_logprobs)
            self.set_prompt_scores(_scores_of_prompt(self.prompt, entries))


def keep_meta(output: Output, meta: MetaInfo) -> None:
    """Keep what `meta_info` says beyond what has a name; lists go with the tokens so far."""
    for name in _KEPT:
        value = getattr(meta, name)
        if value is not None:
            output.extra[name] = value
    for name in _KEPT_OF_TOKENS:
        value = getattr(meta, name)
        if value is not None:
            held = output.extra.get(name, [])
            output.extra[name] = value if len(value) >= len(output.ids) else held + value


def stop_reason(matched: object, request: GenerateRequest) -> str | int | None:
    """What of the request's own stops matched; the model's end token is none of them."""
    if isinstance(matched, str):
        return matched
    own = type(matched) is int and matched in TokenIds(request.sampling.stop_token_ids)
    return matched if own and isinstance(matched, int) else None


def _scores_of_prompt(prompt: TokenIds, entries: Sequence[Entry]) -> npt.NDArray[np.float32]:
    ids = prompt.tolist()
    if len(entries) != len(ids):
        raise ReplyError(f"{len(ids)} prompt ids with {len(entries)} input_token_logprobs")
    for position, (token, entry) in enumerate(zip(ids, entries, strict=True)):
        if entry[1] != token:
            raise ReplyError(
                f"input_token_logprobs score token {entry[1]} at position {position} of the "
                f"prompt, which has {token} there"
            )
    return scores_of([entry[0] for entry in entries])


_NONE = (b"null", b"[]")


def _aligned(values: list[T] | None, new: int, total: int, meta: MetaInfo) -> list[T] | None:
    """The values of the `new` last tokens of `total`; None where there are none.

    Raises:
        ReplyError: they are neither those of all tokens nor those of the new ones.
    """
    if values is None:
        return None
    if meta.finish_reason is None and meta.output_token_logprobs_length == total:
        values = values[:total]
    aborted = _is_abort(meta)
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
