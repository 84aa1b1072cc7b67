"""The codec: a request as a call, a reply and a stream as values. No I/O."""

import math
from collections.abc import Sequence
from typing import Any

from genapi import FinishReason, GenerateOutput, GenerateRequest, GenerateResponse, TokenIds
from genapi.errors import (
    AuthError,
    NotReadyError,
    OverlongPromptError,
    ProviderError,
    ReplyError,
    UnsupportedError,
)
from genapi.providers.base import Capabilities, DecodeContext
from genapi.providers.shapes import remarks
from genapi.providers.shapes.errors import error_text
from genapi.providers.shapes.frames import FrameStream, decode_whole
from genapi.providers.shapes.spans import WireSpan, trace
from genapi.providers.shapes.tokens import (
    Piece,
    check_vocabulary,
    compare_echo,
    ids_of,
    scores_of,
    top_of,
)
from genapi.types.response import Usage
from genapi.wire.http import HTTPCall, HTTPReply, json_body

__all__ = ("check", "decode", "encode", "error_of", "stream_decoder")

_ENDS = {"stop", "length", "abort"}
_UNKNOWN_OPTIONS = ("bad_words", "logit_bias", "structured_output", "stop")


def check(request: GenerateRequest, capabilities: Capabilities | None) -> None:
    """Raise, before any I/O, what this protocol has no field for."""
    if request.prompt_token_ids is None:
        raise UnsupportedError("a token server takes prompt_token_ids; tokenize first")
    asked = [name for name in _UNKNOWN_OPTIONS if getattr(request.sampling, name)]
    if request.sampling.n > 1 or request.lora is not None or asked:
        raise UnsupportedError(f"a token server has no n > 1, lora or {', '.join(asked)}")
    if capabilities is not None:
        check_vocabulary(request.prompt_token_ids, capabilities.vocab_size)


def encode(request: GenerateRequest, *, wire_id: str, salt: str | None, stream: bool) -> HTTPCall:
    """The call that asks for this generation."""
    sampling = request.sampling
    salts = [part for part in (salt, request.cache_salt) if part is not None]
    body = {
        "id": wire_id,
        "prompt": TokenIds(request.prompt_token_ids or ()).tolist(),
        "count": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "stop_token_ids": TokenIds(sampling.stop_token_ids).tolist(),
        "min_tokens": sampling.min_tokens,
        "ignore_eos": sampling.ignore_eos,
        "logprobs": sampling.logprobs,
        "prompt_logprobs": sampling.prompt_logprobs,
        "salt": "|".join(salts) or None,
        "stream": stream,
    }
    return HTTPCall(method="POST", path="/tokens", body=json_body(body))


def decode(reply: HTTPReply, context: DecodeContext) -> GenerateResponse:
    """A reply in one piece as a value."""
    if not reply.ok:
        raise error_of(reply)
    return decode_whole(reply, _Accumulator(context), lambda _error, body: error_of(body))


def stream_decoder(context: DecodeContext) -> FrameStream:
    """A decoder for one stream, by the same accumulation."""
    return FrameStream(_Accumulator(context), lambda _error, body: error_of(body))


def error_of(reply: HTTPReply) -> ProviderError:
    """The typed error that an answer other than 2xx is."""
    error = error_text(reply.body)
    kinds = {401: AuthError, 503: NotReadyError}
    kind = OverlongPromptError if error.type == "overlong" else kinds.get(reply.status)
    message = f"{reply.url} answered {reply.status}: {error.message}"
    return (kind or ProviderError)(
        message, status=reply.status, code=error.type, body=reply.body, url=reply.url
    )


class _Accumulator:
    """Takes in the frames of one reply; a reply in one piece is one frame."""

    def __init__(self, context: DecodeContext) -> None:
        self._context = context
        self._scored = context.request.sampling.logprobs is not None
        self._ids: list[int] = []
        self._scores: list[float | None] = []
        self._candidates: list[list[tuple[int, float]]] = []
        self._last: dict[str, Any] = {}

    def add(self, body: bytes) -> tuple[Sequence[Piece], Any]:
        """Take in one frame."""
        frame = HTTPReply(200, body).json_object()
        if "error" in frame:
            return (), frame["error"]
        ids = frame.get("tokens")
        if not isinstance(ids, list) or self._last:
            raise ReplyError("a frame has no tokens, or comes after the last one")
        scores = frame.get("scores") if self._scored else None
        if self._scored and (not isinstance(scores, list) or len(scores) != len(ids)):
            raise ReplyError(f"{len(ids)} tokens came with {scores!r} for scores")
        self._ids += ids
        self._scores += scores or []
        self._candidates += frame.get("candidates", [])
        if "end" in frame:
            self._last = frame
        return [Piece(0, ids, scores)], None

    def unfinished(self) -> list[int]:
        """The only output, until its last frame came."""
        return [] if self._last else [0]

    def response(self) -> GenerateResponse:
        """The whole reply, held against its request."""
        end = self._last["end"]
        reason = FinishReason(end["why"]) if end["why"] in _ENDS else FinishReason.OTHER
        reply = self._built(reason, end["stop"])
        request, remark = self._context.request, self._context.remark
        remarks.on_counts(reply, remark)
        if self._scored:
            remedy = "ask the server's author for processed ones"
            remarks.on_raw_scores(reply, request.sampling, remark, remedy=remedy)
        return reply

    def partial(self) -> GenerateResponse:
        """What has arrived."""
        return self._built(FinishReason.ERROR, None)

    def _built(self, reason: FinishReason, stop: int | None) -> GenerateResponse:
        context, sampling = self._context, self._context.request.sampling
        spans = [WireSpan(**span) for span in self._last["versions"]] if self._last else None
        output = GenerateOutput(
            token_ids=ids_of(self._ids),
            logprobs=scores_of(self._scores) if self._scored else None,
            top_logprobs=self._top() if sampling.logprobs else None,
            finish_reason=reason,
            stop_reason=stop,
            policy=trace(spans, tokens=len(self._ids), run=context.run),
        )
        prompt = TokenIds(context.request.prompt_token_ids or ())
        if self._last:
            compare_echo(prompt, self._last["prompt"])
        scores = self._last.get("prompt_scores")
        return GenerateResponse(
            request_id=context.request_id,
            outputs=(output,),
            prompt_token_ids=prompt,
            prompt_logprobs=None if scores is None else scores_of(scores),
            usage=Usage(
                prompt_tokens=len(prompt),
                completion_tokens=len(self._ids),
                cached_tokens=self._last.get("cached"),
            ),
            worker=context.worker,
            logprobs_mode=context.logprobs_mode,
        )

    def _top(self) -> Any:
        flat = [pair for row in self._candidates for pair in row]
        counts = [len(row) for row in self._candidates]
        scores = [score if math.isfinite(score) else None for _, score in flat]
        return top_of(counts, [token for token, _ in flat], scores)
