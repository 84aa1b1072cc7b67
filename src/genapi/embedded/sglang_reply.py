"""SGLang's replies to `/generate`: what one sequence's output looks like, whole or on its way.

Field order, nulls and number formats are those of the recorded replies. Frames are cumulative
unless the server streams increments. The rule of this file: a reply shows what the front end has
heard, which for a sequence that is not streamed lags behind what the scheduler has computed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .requests import Request, Track, text_of
from .sampling import Score
from .sglang_request import Item

__all__ = ("Flight", "Moment")

_FORCED_INTERVAL = 50
"""Output of a request that is not streamed reaches the front end this many tokens at a time."""


@dataclass(frozen=True, slots=True)
class Moment:
    """When a reply is written, and what the two halves of the server call the weights then."""

    now: float
    epoch_s: float
    front: str
    scheduler: str
    vocab: int


class Flight:
    """One sequence from its arrival at the front end to its reply."""

    def __init__(self, item: Item, *, now: float, interval: int) -> None:
        self.item = item
        self.request: Request | None = None
        self.rejected: str | None = None
        self.abort_sent = False
        self.dp_rank: int | None = None
        self.over = False
        self._born = now
        self._interval = item.params.get("stream_interval") or interval
        self._sent = 0
        self._answered = False

    @property
    def ready(self) -> bool:
        """Whether a frame is due."""
        track = self._track
        if track.finish_reason is not None:
            return True
        unsent = len(track.output) - self._sent
        due = unsent >= self._interval or (unsent > 0 and self._sent == 0)
        return due and not _may_become(text_of(track.output), track.request.sampling.stop)

    def reply(self, at: Moment) -> dict[str, Any]:
        """The whole reply, once the sequence has ended."""
        self.over = True
        return self._frame(0, at)

    def frame(self, at: Moment, *, increments: bool) -> dict[str, Any]:
        """The next frame of a stream."""
        start = self._sent if increments else 0
        track = self._track
        self.over = track.finish_reason is not None
        if self.over and track.request.ended_queued and increments:
            # the last id once more, and all of the text
            start = max(len(track.output) - 1, 0)
        frame = self._frame(start, at)
        self._sent = len(track.output)
        return frame

    @property
    def _track(self) -> Track:
        if self.request is None:
            raise RuntimeError(f"request {self.item.rid!r} is not with the scheduler")
        return self.request.tracks[0]

    def _frame(self, start: int, at: Moment) -> dict[str, Any]:
        track = self._track
        if self.over and track.request.ended_queued:
            meta = self._queued(track, at)
            shown = meta["completion_tokens"]
            whole = text_of(track.output[:shown])
        else:
            meta = self._meta(track, start, at)
            shown = len(track.output)
            whole = self._text(track)[len(text_of(track.output[:start])) :]
            if self.over:
                meta["e2e_latency"] = at.now - self._born
        if not self._answered:
            self._answered = True
            meta["response_sent_to_client_ts"] = at.epoch_s + at.now
        frame = {"text": whole, "output_ids": track.output[start:shown], "meta_info": meta}
        if self.item.prompt_token_ids:
            frame["prompt_token_ids"] = list(self.item.token_ids)
        return frame

    def _meta(self, track: Track, start: int, at: Moment) -> dict[str, Any]:
        request, cached = track.request, track.request.cached_tokens
        spans = _spans(track, len(track.output), at) if self.over else None
        meta: dict[str, Any] = {
            "id": self.item.rid,
            "finish_reason": self._finish(track) if self.over else None,
            "prompt_tokens": len(request.prompt),
            "weight_version": at.front if spans is None else spans[-1]["version"],
            "num_retractions": track.preemptions,
        }
        if self.item.return_logprob:
            meta |= self._logprobs(track, start, len(track.output), at)
        if self.item.sampling_mask:
            meta["output_token_sampling_mask"] = [list(ids) for ids, _ in track.supports[start:]]
            meta["output_token_sampling_logprobs"] = [own for _, own in track.supports[start:]]
            meta["output_token_sampling_mask_length"] = len(track.supports)
        meta |= {
            "reasoning_tokens": 0,
            "completion_tokens": len(track.output),
            "cached_tokens": cached,
        }
        if spans is not None:
            meta["weight_versions"] = spans
        return meta | {
            "cached_tokens_details": {"device": cached, "host": 0} if cached else None,
            "dp_rank": self.dp_rank,
        }

    def _queued(self, track: Track, at: Moment) -> dict[str, Any]:
        """What is said of a request that was aborted while it waited: not much."""
        heard = len(track.output)
        if not self.item.stream:
            heard -= heard % _FORCED_INTERVAL
        spans = _spans(track, heard, at)
        meta: dict[str, Any] = {
            "id": self.item.rid,
            "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
            "weight_version": spans[-1]["version"],
            "e2e_latency": at.now - self._born,
            "weight_versions": spans,
        }
        if self.item.return_logprob:
            meta |= self._logprobs(track, 0, heard, at)
        return meta | {"completion_tokens": heard}

    def _finish(self, track: Track) -> dict[str, Any]:
        if self.rejected is not None:
            return _aborted(self.rejected, status=400, kind="BadRequestError")
        match track.finish_reason:
            case "stop":
                matched = track.stop_reason
                return {"type": "stop", "matched": track.output[-1] if matched is None else matched}
            case "length":
                return {"type": "length", "length": track.request.sampling.max_tokens}
            case _:
                return _aborted("Aborted", status=None, kind=None)

    def _text(self, track: Track) -> str:
        text = text_of(track.output)
        if track.finish_reason != "stop":
            return text
        if isinstance(track.stop_reason, str):
            at = text.index(track.stop_reason)
            return text[: at if self.item.trims_stop else at + len(track.stop_reason)]
        return text_of(track.output[:-1]) if self.item.trims_stop else text

    def _logprobs(self, track: Track, start: int, end: int, at: Moment) -> dict[str, Any]:
        item, request = self.item, track.request
        first = item.logprob_start_len
        prompt: list[Any] = []
        if request.prompt_scores is not None:
            # the token before the first one is not scored, and the last id is shown as 0
            ids = [token if token < at.vocab - 1 else 0 for token in request.prompt[first:]]
            own = [None, *(scores[0].logprob for scores in request.prompt_scores[first:])]
            prompt = [self._entry(score, token) for score, token in zip(own, ids, strict=True)]
        found: dict[str, Any] = {
            "input_token_logprobs": prompt,
            "output_token_logprobs": [
                self._entry(scores[0].logprob, scores[0].token_id)
                for scores in track.scores[start:end]
            ],
            "output_token_logprobs_length": end,
        }
        if item.top_logprobs_num > 0:
            found["input_top_logprobs"] = self._prompt_lists(request.prompt_scores, self._top)
            found["output_top_logprobs"] = [self._top(s) for s in track.scores[start:end]]
        if item.token_ids_logprob is not None:
            found["input_token_ids_logprobs"] = self._prompt_lists(
                None if request.prompt_scores is None else request.prompt_listed,
                self._listed,
            )
            found["output_token_ids_logprobs"] = [
                self._listed(values) for values in track.listed[start:end]
            ]
        return found

    def _prompt_lists(self, scored: Sequence[Any] | None, show: Callable[[Any], Any]) -> list[Any]:
        if scored is None:
            return []
        return [None, *(show(one) for one in scored[self.item.logprob_start_len :])]

    def _top(self, scores: Sequence[Score]) -> list[list[Any]]:
        """The most likely tokens, the best one first."""
        most = self.item.top_logprobs_num
        own, others = scores[0], list(scores[1:])
        if len(others) < most:
            ranks = {score.rank for score in others}
            rank = next(rank for rank in range(1, most + 1) if rank not in ranks)
            others.insert(rank - 1, own)
        return [self._entry(score.logprob, score.token_id) for score in others]

    def _listed(self, values: Sequence[float]) -> list[list[Any]]:
        ids = self.item.token_ids_logprob or ()
        return [self._entry(value, token) for value, token in zip(values, ids, strict=True)]

    def _entry(self, logprob: float | None, token: int) -> list[Any]:
        return [logprob, token, text_of([token]) if self.item.text_in_logprobs else None]


def _aborted(message: str, *, status: int | None, kind: str | None) -> dict[str, Any]:
    return {"type": "abort", "message": message, "status_code": status, "err_type": kind}


def _spans(track: Track, shown: int, at: Moment) -> list[dict[str, Any]]:
    """Versions of the first `shown` tokens; an empty output has one empty span."""
    spans: Sequence[Mapping[str, Any]] = [
        {"version": label, "start": start, "end": end} for label, start, end in track.spans()
    ]
    if not spans:
        return [{"version": at.scheduler, "start": 0, "end": 0}]
    return [
        {**span, "end": min(span["end"], shown)}
        for span in spans
        if span["start"] < shown or span["start"] == 0
    ]


def _may_become(text: str, stops: Sequence[str]) -> bool:
    """Whether the end of a text could be the beginning of a stop string."""
    return any(text.endswith(stop[:end]) for stop in stops for end in range(1, len(stop)))
