"""vLLM's replies to `/inference/v1/generate`: whole, or as a stream of server-sent events.

Field order, nulls and number formats are those of the recorded replies.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import msgspec

from .engine import EngineDeadError
from .requests import Request, Track, text_of
from .sampling import Score
from .vllm_request import GenerateBody
from .vllm_shapes import error_body

__all__ = ("ENGINE_DEAD", "MASKED", "Renderer", "event", "prompt_logprobs", "usage_of")

ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
MASKED = -9999.0


@dataclass(frozen=True, slots=True)
class Renderer:
    """How one request's outputs are put into replies."""

    body: GenerateBody
    request: Request
    model: str
    created: int
    show_cached: bool
    attests: bool
    """Whether replies carry the weight versions of their tokens (vLLM 0.32 and later)."""

    def whole(self) -> dict[str, Any]:
        """The reply of a finished request."""
        tracks = self.request.tracks
        usage = usage_of(self.request)
        details = None
        if self.show_cached:
            details = {
                "cached_tokens": self.request.cached_tokens,
                "created_cache_tokens": None,
                "multimodal_tokens": None,
            }
        return {
            "request_id": self.request.request_id,
            "model": self.model,
            "created": self.created,
            "usage": usage | {"prompt_tokens_details": details, "completion_tokens_details": None},
            "prompt_logprobs": prompt_logprobs(self.request),
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": list(self.request.prompt) if self.body.return_token_ids else None,
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "output_mode": "text" if self.body.text else "tokens",
            "choices": [self._choice(track, 0, last=True) for track in tracks],
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The reply as server-sent events; steps merge when the reader is slow."""
        sent = [0] * len(self.request.tracks)
        closed = [False] * len(self.request.tracks)
        first = True
        try:
            while not all(closed):
                await self.request.changed()
                for track in self.request.tracks:
                    start, last = sent[track.index], track.finish_reason is not None
                    if closed[track.index] or (start == len(track.output) and not last):
                        continue
                    sent[track.index], closed[track.index] = len(track.output), last
                    yield event(self._chunk([self._choice(track, start, last=last)], first=first))
                    first = False
        except EngineDeadError:
            yield event(error_body(500, ENGINE_DEAD, "InternalServerError"))
        else:
            if self.body.include_usage:
                details = {"prompt_tokens_details": {"cached_tokens": self.request.cached_tokens}}
                yield event(
                    self._chunk(
                        [], usage=usage_of(self.request) | (details if self.show_cached else {})
                    )
                )
        yield b"data: [DONE]\n\n"

    def _chunk(
        self,
        choices: list[dict[str, Any]],
        *,
        first: bool = False,
        usage: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        chunk: dict[str, Any] = {"request_id": self.request.request_id, "usage": usage}
        if choices and self.body.continuous_usage:
            chunk["usage"] = usage_of(self.request)
        if first and self.body.return_token_ids:
            chunk["prompt_token_ids"] = list(self.request.prompt)
        if first and self.request.prompt_scores is not None:
            chunk["prompt_logprobs"] = prompt_logprobs(self.request)
        return chunk | {"output_mode": "text" if self.body.text else "tokens", "choices": choices}

    def _choice(self, track: Track, start: int, *, last: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": track.index,
            "finish_reason": track.finish_reason,
            "stop_reason": track.stop_reason,
            "token_ids": track.output[start:],
            "routed_experts": None,
            "sampling_mask": None,
        }
        if self.attests:
            spans = [
                {"version": label, "start": begin, "end": end}
                for label, begin, end in track.spans()
            ]
            choice["weight_versions"] = spans if last else None
        if self.body.text:
            choice["text"] = self._text(track, start)
        choice["logprobs"] = None
        if self.request.sampling.logprobs is not None:
            entry = self._text_entry if self.body.text else self._token_entry
            choice["logprobs"] = {"content": [entry(scores) for scores in track.scores[start:]]}
        return choice

    def _text(self, track: Track, start: int) -> str:
        text = text_of(track.output)
        if isinstance(track.stop_reason, str):
            end = text.index(track.stop_reason)
            if self.request.sampling.include_stop_str_in_output:
                end += len(track.stop_reason)
            text = text[:end]
        return text[len(text_of(track.output[:start])) :]

    def _token_entry(self, scores: tuple[Score, ...]) -> dict[str, Any]:
        listed = [_score(score) for score in scores[: max(self.request.sampling.logprobs or 0, 1)]]
        return _score(scores[0]) | {"top_logprobs": listed}

    def _text_entry(self, scores: tuple[Score, ...]) -> dict[str, Any]:
        listed = [
            _text_score(score) for score in scores[: max(self.request.sampling.logprobs or 0, 1)]
        ]
        return _text_score(scores[0]) | {"top_logprobs": listed}


def prompt_logprobs(request: Request) -> list[dict[str, Any] | None] | None:
    """The scores of a prompt by id; None where they were not asked for."""
    if request.prompt_scores is None:
        return None
    return [None, *(_prompt_entry(scores) for scores in request.prompt_scores)]


def _prompt_entry(scores: tuple[Score, ...]) -> dict[str, Any]:
    return {
        str(score.token_id): {
            "logprob": score.logprob,
            "rank": score.rank,
            "decoded_token": text_of([score.token_id]),
        }
        for score in scores
    }


def usage_of(request: Request) -> dict[str, Any]:
    """Token counts."""
    prompt, out = len(request.prompt), sum(len(track.output) for track in request.tracks)
    return {"prompt_tokens": prompt, "total_tokens": prompt + out, "completion_tokens": out}


def _score(score: Score) -> dict[str, Any]:
    return {"token_id": score.token_id, "logprob": max(score.logprob, MASKED), "rank": score.rank}


def _text_score(score: Score) -> dict[str, Any]:
    token = text_of([score.token_id])
    return {"token": token, "logprob": max(score.logprob, MASKED), "bytes": list(token.encode())}


def event(chunk: object) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
