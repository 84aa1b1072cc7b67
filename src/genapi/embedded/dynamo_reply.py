"""A Dynamo frontend's replies: whole, or as a stream of server-sent events.

What the frontend was asked for in `nvext.extra_fields` is there and nothing else; a field that it
does not know is left out without a word.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .dynamo_request import Generate
from .engine import Engine
from .requests import Request, text_of
from .sampling import Score

__all__ = ("Leg", "Rendered", "finish_of", "inference_choice")

_NO_SCORE = -1e30


@dataclass(slots=True)
class Leg:
    """The part of a reply that one worker makes.

    Attributes:
        engine: of the worker.
        request: as the worker has it.
        decode: its id.
        prefill: who prefilled for it, which may be itself.
        simulates: whether the worker only acts as if it had a model.
    """

    engine: Engine
    request: Request
    decode: int
    prefill: int
    simulates: bool

    @property
    def output(self) -> list[int]:
        """What it has made."""
        return self.request.tracks[0].output


@dataclass(slots=True)
class Rendered:
    """How the outputs of one request are put into replies.

    Attributes:
        wanted: what was asked.
        reply_id: of the reply.
        model: its name.
        created: seconds since 1970.
        legs: the workers that made it, in order; one, unless it was migrated.
        tell_versions: whether the label of each token is told.
    """

    wanted: Generate
    reply_id: str
    model: str
    created: int
    tell_versions: bool
    legs: list[Leg] = field(default_factory=list)

    def whole(self) -> dict[str, Any]:
        """The reply of a finished request."""
        choice: dict[str, Any] = {"text": "", "index": 0}
        ids: list[int] = []
        scores: list[tuple[Score, ...]] = []
        for leg in self.legs:
            ids += leg.output
            scores += leg.request.tracks[0].scores
        choice["text"] = self._text(ids)
        choice |= self._logprobs(ids, scores)
        choice["finish_reason"] = finish_of(self.legs[-1].request)
        return self._frame([choice], usage=self.usage(), nvext=self._nvext(ids, last=True))

    def chunk(self, start: int, *, last: bool) -> dict[str, Any]:
        """The output of the present worker from `start` on."""
        track = self.legs[-1].request.tracks[0]
        ids, scores = track.output[start:], track.scores[start:]
        choice: dict[str, Any] = {"text": text_of(ids), "index": 0}
        choice |= self._logprobs(ids, scores)
        if last:
            choice["finish_reason"] = finish_of(self.legs[-1].request)
        return self._frame([choice], usage=None, nvext=self._nvext(ids, last=last))

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream that wants it."""
        return self._frame([], usage=self.usage(), nvext={})

    def usage(self) -> dict[str, Any]:
        """Counts; of a migrated request the last worker's prompt, which has the output before."""
        last, made = self.legs[-1], sum(len(leg.output) for leg in self.legs)
        prompt = len(last.request.prompt)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
        }
        cached = last.request.cached_tokens
        usage["prompt_tokens_details"] = {"audio_tokens": None, "cached_tokens": cached}
        return usage

    def _frame(
        self, choices: list[Any], *, usage: dict[str, Any] | None, nvext: dict[str, Any]
    ) -> dict[str, Any]:
        frame: dict[str, Any] = {
            "id": self.reply_id,
            "choices": choices,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "object": "text_completion",
            "usage": usage,
        }
        return frame | ({"nvext": nvext} if nvext else {})

    def _text(self, ids: Sequence[int]) -> str:
        text, stop = text_of(ids), self.legs[-1].request.tracks[0].stop_reason
        if not isinstance(stop, str):
            return text
        end = text.index(stop)
        return text[: end + len(stop) if self.wanted.sampling.include_stop_str_in_output else end]

    def _logprobs(self, ids: Sequence[int], scores: Sequence[tuple[Score, ...]]) -> dict[str, Any]:
        top = self.wanted.sampling.logprobs
        if top is None or self.legs[-1].simulates:
            return {}
        chosen = [_finite(rated[0].logprob) for rated in scores]
        candidates = [
            {text_of([s.token_id]): _finite(s.logprob) for s in rated[: max(top, 1)]}
            for rated in scores
        ]
        return {
            "logprobs": {
                "tokens": [text_of([token]) for token in ids],
                "token_logprobs": [_short(value) for value in chosen],
                "top_logprobs": candidates if top else [],
                "text_offset": [],
            }
        }

    def _nvext(self, ids: Sequence[int], *, last: bool) -> dict[str, Any]:
        asked, first = self.wanted.fields, self.legs[0]
        nvext: dict[str, Any] = {}
        if "worker_id" in asked:
            # Of a migrated request the first worker, who is gone.
            nvext["worker_id"] = {
                "prefill_worker_id": first.prefill,
                "decode_worker_id": first.decode,
            }
        if "completion_token_ids" in asked:
            nvext["completion_token_ids"] = list(ids)
        if last:
            nvext |= self._last(asked)
        return nvext

    def _last(self, asked: frozenset[str]) -> dict[str, Any]:
        """What only the last chunk has."""
        request, nvext = self.legs[-1].request, dict[str, Any]()
        if "engine_data" in asked and not self.legs[-1].simulates:
            nvext["engine_data"] = self._engine_data(request)
        if "prompt_token_ids" in asked:
            nvext["prompt_token_ids"] = list(self.wanted.prompt)
        if "prompt_logprobs" in asked and self.legs[0].request.prompt_scores is not None:
            nvext["prompt_logprobs"] = prompt_logprobs(self.legs[0].request)
        if "timing" in asked:
            nvext["timing"] = {
                "request_received_ms": 1000 * self.created,
                "prefill_wait_time_ms": 0.1,
                "prefill_time_ms": 1.0,
                "ttft_ms": 1.1,
                "total_time_ms": 2.0,
            }
        return nvext

    def _engine_data(self, request: Request) -> dict[str, Any]:
        track = request.tracks[0]
        data: dict[str, Any] = {
            "prompt_token_ids": list(request.prompt),
            "kv_cache_hit": {
                "prompt_tokens": len(request.prompt),
                "reused_tokens": request.cached_tokens,
            },
            "completion_token_ids": list(track.output),
            "finished": True,
        }
        if request.prompt_scores is not None:
            data["prompt_logprobs"] = prompt_logprobs(request)
        if request.sampling.logprobs is not None:
            data["completion_logprobs"] = [_finite(s[0].logprob) for s in track.scores]
        if self.tell_versions:
            data["true_versions"] = list(track.labels)
        return data


def finish_of(request: Request) -> str | None:
    """Why it ended, in the frontend's words: an abort becomes a cancellation, and that a stop."""
    reason = request.tracks[0].finish_reason
    return "stop" if reason == "abort" else reason


def prompt_logprobs(request: Request) -> list[Any]:
    """The scores of a prompt by id."""
    rows = request.prompt_scores or []
    return [
        None,
        *(
            {str(s.token_id): {"logprob": _finite(s.logprob), "rank": s.rank} for s in scores}
            for scores in rows
        ),
    ]


def inference_choice(request: Request) -> dict[str, Any]:
    """The choice of a reply to `/inference/v1/generate`."""
    track = request.tracks[0]
    logprobs = None
    if request.sampling.logprobs is not None:
        count = max(request.sampling.logprobs, 1)
        logprobs = {
            "content": [
                _entry(scores[0]) | {"top_logprobs": [_entry(s) for s in scores[:count]]}
                for scores in track.scores
            ]
        }
    return {
        "index": 0,
        "token_ids": list(track.output),
        "logprobs": logprobs,
        "finish_reason": track.finish_reason,
        "routed_experts": None,
        "sampling_mask": None,
    }


def _entry(score: Score) -> dict[str, Any]:
    token = f"token_id:{score.token_id}"
    return {"token": token, "logprob": _finite(score.logprob), "bytes": list(token.encode())}


def _finite(value: float) -> float:
    return value if np.isfinite(value) else _NO_SCORE


def _short(value: float) -> float:
    """A number as the frontend prints one of 32 bits."""
    return float(str(np.float32(value)))
