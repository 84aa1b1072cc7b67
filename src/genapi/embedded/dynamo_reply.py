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
        ids: list[int] = []
        scores: list[tuple[Score, ...]] = []
        for leg in self.legs:
            ids += leg.output
            scores += leg.request.tracks[0].scores
        text, finish = self._text(ids, last=True), finish_of(self.legs[-1].request)
        nvext = self._nvext(ids, last=True)
        if not self.wanted.chat:
            choice = {"text": text, "index": 0, **self._logprobs(ids, scores, last=True)}
            choice["finish_reason"] = finish
            return self._frame([choice], usage=self.usage(), nvext=nvext)
        choice = {
            "index": 0,
            "message": {"content": text or None, "refusal": None, "role": "assistant"},
            "finish_reason": finish,
            "logprobs": self._content(ids, scores, last=True),
        }
        frame = self._frame([choice], usage=self.usage(), nvext=nvext)
        if "prompt_logprobs" in nvext:
            frame["prompt_logprobs"] = prompt_logprobs(self.legs[0].request)
        return frame

    def chunk(self, start: int, *, last: bool) -> dict[str, Any]:
        """The output of the present worker from `start` on."""
        track = self.legs[-1].request.tracks[0]
        ids, scores = track.output[start:], track.scores[start:]
        shown = len(self._text(track.output[:start], last=False))
        text = self._text(track.output, last=last)[shown:]
        finish = finish_of(self.legs[-1].request) if last else None
        nvext = self._nvext(ids, last=last)
        if not self.wanted.chat:
            choice = {"text": text, "index": 0, **self._logprobs(ids, scores, last=last)}
            choice |= {"finish_reason": finish} if last else {}
            return self._frame([choice], usage=None, nvext=nvext)
        delta = {"content": text} if text else {}
        if start == 0 and len(self.legs) == 1:
            delta["role"] = "assistant"
        choice = {
            "index": 0,
            "delta": delta,
            "finish_reason": finish,
            "logprobs": self._content(ids, scores, last=last),
        }
        return self._frame([choice], usage=None, nvext=nvext)

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
        audio = {} if self.wanted.chat else {"audio_tokens": None}
        usage["prompt_tokens_details"] = audio | {"cached_tokens": last.request.cached_tokens}
        return usage

    def _frame(
        self, choices: list[Any], *, usage: dict[str, Any] | None, nvext: dict[str, Any]
    ) -> dict[str, Any]:
        frame: dict[str, Any] = {
            "id": self.reply_id,
            "choices": choices,
            "created": self.created,
            "model": self.model,
        }
        if self.wanted.chat:
            frame["object"] = "chat.completion.chunk" if self.wanted.stream else "chat.completion"
            frame |= {} if usage is None else {"usage": usage}
        else:
            frame["system_fingerprint"] = None
            frame |= {"object": "text_completion", "usage": usage}
        return frame | ({"nvext": nvext} if nvext else {})

    def _text(self, ids: Sequence[int], *, last: bool) -> str:
        """The text of an output so far: without its stop, or what may yet become one."""
        sampling, stop = self.wanted.sampling, self.legs[-1].request.tracks[0].stop_reason
        text = text_of(ids[:-1] if last and isinstance(stop, int) else ids)
        if last and isinstance(stop, str):
            end = text.index(stop)
            return text[: end + len(stop) if sampling.include_stop_str_in_output else end]
        begun = () if last else (stop[:size] for stop in sampling.stop for size in range(len(stop)))
        held = max((len(start) for start in begun if text.endswith(start)), default=0)
        return text[: len(text) - held]

    def _logprobs(
        self, ids: Sequence[int], scores: Sequence[tuple[Score, ...]], *, last: bool
    ) -> dict[str, Any]:
        if self._most is None:
            return {}
        chosen = [_finite(rated[0].logprob) for rated in scores]
        return {
            "logprobs": {
                "tokens": self._names(ids, last=last),
                "token_logprobs": [_short(value) for value in chosen],
                "top_logprobs": [
                    {self._name(s.token_id): _finite(s.logprob) for s in rated} for rated in scores
                ],
                "text_offset": [],
            }
        }

    def _content(
        self, ids: Sequence[int], scores: Sequence[tuple[Score, ...]], *, last: bool
    ) -> dict[str, Any] | None:
        """The scores of a chat: zero candidates are none, unlike those of completions."""
        if self._most is None:
            return None
        content = [
            {
                **_entry(name, _short(_finite(rated[0].logprob))),
                "token_id": token,
                "top_logprobs": [
                    _entry(self._name(s.token_id), _short(_finite(s.logprob)))
                    for s in (rated if self._most else ())
                ],
            }
            for name, token, rated in zip(self._names(ids, last=last), ids, scores, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _names(self, ids: Sequence[int], *, last: bool) -> list[str]:
        """What tokens are called; an id that ended the output has no text."""
        names = [self._name(token) for token in ids]
        stop = self.legs[-1].request.tracks[0].stop_reason
        if last and isinstance(stop, int) and not self.wanted.ids_as_tokens:
            names[-1] = ""
        return names

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self.wanted.ids_as_tokens else text_of([token])

    @property
    def _most(self) -> int | None:
        """How many candidates are shown besides the chosen tokens; None = no scores at all."""
        return None if self.legs[-1].simulates else self.wanted.sampling.logprobs

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
        stop = request.tracks[0].stop_reason
        if "stop_reason" in asked and stop is not None:
            nvext["stop_reason"] = stop
        # A text is seen by the frontend, which then waits for the worker no longer.
        if "engine_data" in asked and not (self.legs[-1].simulates or isinstance(stop, str)):
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
                _by_id(scores[0]) | {"top_logprobs": [_by_id(s) for s in scores[:count]]}
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


def _entry(name: str, logprob: float) -> dict[str, Any]:
    return {"token": name, "logprob": logprob, "bytes": list(name.encode()) or None}


def _by_id(score: Score) -> dict[str, Any]:
    return _entry(f"token_id:{score.token_id}", _finite(score.logprob))


def _finite(value: float) -> float:
    return value if np.isfinite(value) else _NO_SCORE


def _short(value: float) -> float:
    """A number as the frontend prints one of 32 bits."""
    return float(str(np.float32(value)))
