"""What an engine knows of one request: its sequences, their output, and who waits for it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from .cache import root_key
from .policy import Floats
from .sampling import Sampling, Score, Support

__all__ = ("Request", "Track", "text_of")


def text_of(tokens: Sequence[int]) -> str:
    """Text of ids under the toy vocabulary: each token is its id and one blank."""
    return "".join(f"{token} " for token in tokens)


@dataclass(slots=True, eq=False)
class Track:
    """One sequence of a request (one of its `n` choices)."""

    request: "Request"
    index: int
    rng: np.random.Generator
    tokens: list[int]
    """Prompt and output."""
    output: list[int] = field(default_factory=list)
    scores: list[tuple[Score, ...]] = field(default_factory=list)
    listed: list[tuple[float, ...]] = field(default_factory=list)
    """Of the token ids that the request named, for each output token."""
    supports: list[Support] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    """Weight label of the engine at the moment each output token was computed."""
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    rows: list[Floats] = field(default_factory=list)
    """Values of the computed positions, each of the weights of its time."""
    hidden: Floats | None = None
    cache_key: bytes = b""
    kept: int = 0
    """Positions that went into the cache, up to the block behind `cache_key`."""
    preemptions: int = 0

    def append(self, token: int, *, label: str) -> None:
        """Take one more output token, computed while the weights were called `label`."""
        self.tokens.append(token)
        self.output.append(token)
        self.labels.append(label)

    def spans(self) -> list[tuple[str, int, int]]:
        """Runs of output tokens under one label: (label, start, end)."""
        spans, start = [], 0
        for label, run in groupby(self.labels):
            end = start + sum(1 for _ in run)
            spans.append((label, start, end))
            start = end
        return spans

    def forget(self) -> None:
        """Drop everything computed; the next step computes all positions anew."""
        self.rows = []
        self.hidden = None
        self.cache_key = root_key(self.request.salt)
        self.kept = 0


class Request:
    """A generation in the engine; `tracks` are its choices, in index order."""

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        salt: str | None,
        rngs: Sequence[np.random.Generator],
    ) -> None:
        self.request_id = request_id
        self.prompt = tuple(prompt)
        self.sampling = sampling
        self.salt = salt
        self.cached_tokens = 0
        self.handed: Sequence[Floats] | None = None
        """Values of its first positions from another engine, until they are taken over."""
        self.prompt_scores: list[tuple[Score, ...]] | None = None
        self.prompt_listed: list[tuple[float, ...]] = []
        self.ending = False
        """Whether it is aborted with the next step it takes."""
        self.ended_queued = False
        """Whether it was aborted while it was not in the batch."""
        self.tracks = tuple(Track(self, index, rng, list(prompt)) for index, rng in enumerate(rngs))
        for track in self.tracks:
            track.forget()
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self._over = asyncio.Event()

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self._error is not None or all(
            track.finish_reason is not None for track in self.tracks
        )

    @property
    def has_nan(self) -> bool:
        """Whether a score that was asked for is no number."""
        scored = [*(self.prompt_scores or []), *(s for t in self.tracks for s in t.scores)]
        return any(score.logprob != score.logprob for scores in scored for score in scores)

    def fail(self, error: Exception) -> None:
        """End the request with an error, unless it is over already."""
        if not self.done:
            self._error = error
            self.notify()

    def notify(self) -> None:
        """Tell whoever waits that something came out."""
        self._changed.set()
        if self.done:
            self._over.set()

    async def changed(self) -> None:
        """Wait for the next output, or for the end; one reader does.

        Raises:
            Exception: What the request failed with.
        """
        if not self.done:
            await self._changed.wait()
        if not self.done:
            self._changed = asyncio.Event()
        if self._error is not None:
            raise self._error

    async def finished(self) -> None:
        """Wait for the end, whoever else reads; raises like `changed`."""
        await self._over.wait()
        if self._error is not None:
            raise self._error
