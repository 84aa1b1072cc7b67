"""From logits to one token and its scores; pure functions, one position at a time.

The order of the steps is that of the real engines: raw scores first, then the steps that can change
the most likely token (masks, biases, penalties), then temperature, then truncation, then the draw.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from .policy import Floats

__all__ = (
    "GREEDY",
    "Pick",
    "Sampling",
    "Score",
    "Support",
    "listed",
    "log_softmax",
    "pick",
    "rate",
)

GREEDY = 1e-5
"""Temperatures below this take the most likely token."""

Support: TypeAlias = tuple[tuple[int, ...], float]
"""Tokens that could have been drawn, the most likely one first, and the drawn one's logprob."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Checked sampling parameters; the names are those of the engines."""

    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logit_bias: tuple[tuple[int, float], ...] = field(default=())
    skip_reading_prefix_cache: bool | None = None
    prompt_start: int = 0
    """First position of the prompt whose score is wanted."""
    logprob_token_ids: tuple[int, ...] = ()
    keeps_support: bool = False

    @property
    def reusable(self) -> int | None:
        """How many positions may come from a cached prefix; None = any number.

        Positions whose score is wanted have to be computed, unless the request says otherwise.
        """
        if self.skip_reading_prefix_cache is None:
            return None if self.prompt_logprobs is None else self.prompt_start
        return 0 if self.skip_reading_prefix_cache else None


@dataclass(frozen=True, slots=True)
class Score:
    """One candidate: natural-log probability and its rank, 1 = most likely."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True, eq=False)
class Pick:
    """The chosen token, and the log-probabilities of the distribution it was drawn from."""

    token_id: int
    processed: Floats
    logits: Floats
    """Divided by the temperature, before truncation."""
    greedy: bool = False

    @property
    def scaled(self) -> Floats:
        """Log-probabilities before truncation."""
        return log_softmax(self.logits)

    def support(self) -> Support:
        """What the token was chosen from."""
        if self.greedy:
            return (self.token_id,), 0.0
        order = np.argsort(-self.processed, kind="stable")
        kept = order[: int(np.isfinite(self.processed).sum())]
        return tuple(kept.tolist()), float(np.float32(self.processed[self.token_id]))


def log_softmax(logits: Floats) -> Floats:
    """Natural-log probabilities over the last axis; masked entries stay -inf."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    out: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return out


def rate(logprobs: Floats, token_id: int, top: int) -> tuple[Score, ...]:
    """The scores of `token_id` first, then those of the `top` most likely other candidates.

    Values are rounded to float32, as engines report them.
    """
    rounded = logprobs.astype(np.float32)
    own = rounded[token_id]
    scores = [Score(token_id, float(own), int((rounded >= own).sum()))]
    if top > 0:
        best = np.argsort(-rounded, kind="stable")[:top]
        scores += [
            Score(int(other), float(rounded[other]), rank)
            for rank, other in enumerate(best, start=1)
            if other != token_id
        ]
    return tuple(scores)


def listed(logprobs: Floats, token_ids: Sequence[int]) -> tuple[float, ...]:
    """The scores of some tokens, in their order, rounded as in `rate`."""
    return tuple(float(np.float32(logprobs[token])) for token in token_ids)


def pick(
    logits: Floats,
    sampling: Sampling,
    *,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_ids: Sequence[int],
    rng: np.random.Generator,
) -> Pick:
    """Choose the next token; `stop_ids` are masked until `min_tokens` are out."""
    scores = _constrain(logits.copy(), sampling, output, stop_ids)
    scores = _penalize(scores, sampling, prompt, output)
    if sampling.temperature < GREEDY:
        return Pick(int(scores.argmax()), log_softmax(scores), scores, greedy=True)
    scaled = scores / sampling.temperature
    logprobs = log_softmax(_truncate(scaled.copy(), sampling))
    cumulative = np.exp(logprobs).cumsum()
    token = int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
    return Pick(min(token, len(cumulative) - 1), logprobs, scaled)


def _constrain(
    scores: Floats, sampling: Sampling, output: Sequence[int], stop_ids: Sequence[int]
) -> Floats:
    if sampling.allowed_token_ids is not None:
        keep = list(sampling.allowed_token_ids)
        allowed = np.full_like(scores, -np.inf)
        allowed[keep] = scores[keep]
        scores = allowed
    for word in sampling.bad_words:
        head = len(word) - 1
        if head == 0 or tuple(output[-head:]) == word[:-1]:
            scores[word[-1]] = -np.inf
    if len(output) < sampling.min_tokens:
        scores[list(stop_ids)] = -np.inf
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    return scores


def _penalize(
    scores: Floats, sampling: Sampling, prompt: Sequence[int], output: Sequence[int]
) -> Floats:
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(np.asarray([*prompt, *output], dtype=np.intp))
        penalty = sampling.repetition_penalty
        scores[seen] = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
    if output and (sampling.frequency_penalty or sampling.presence_penalty):
        counts = np.bincount(np.asarray(output, dtype=np.intp), minlength=len(scores))
        scores -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
    return scores


def _truncate(scores: Floats, sampling: Sampling) -> Floats:
    if sampling.min_p > 0.0:
        scores[scores < scores.max() + np.log(sampling.min_p)] = -np.inf
    if 0 < sampling.top_k < len(scores):
        scores[scores < np.sort(scores)[-sampling.top_k]] = -np.inf
    if sampling.top_p < 1.0:
        order = np.argsort(-scores, kind="stable")
        probs = np.exp(log_softmax(scores))[order]
        # a token stays while the mass before it is below top_p, so the most likely one always does
        scores[order[probs.cumsum() - probs >= sampling.top_p]] = -np.inf
    return scores
