"""The learner: policy gradient on the embedded engine's own policy, in numpy.

The rule of this file: no I/O and no version. It is handed samples that somebody else judged, and
every update makes new arrays, since published ones are read by reference while rollouts go on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from genapi.embedded import policy

__all__ = ("Learner", "Parameters", "Sample", "token_rewards")

Floats: TypeAlias = NDArray[np.float64]
Parameters: TypeAlias = Mapping[str, NDArray[np.float32]]

_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8
_LARGEST_RATIO = 2.0
"""Importance ratios are cut here, so that one unlikely old token cannot rule a step."""


def token_rewards(token_ids: Sequence[int], *, vocab: int) -> Floats:
    """1 for each token in the lowest quarter of the vocabulary, else 0."""
    return (np.asarray(token_ids) < vocab // 4).astype(np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One rollout to learn from.

    Attributes:
        prompt: ids of the prompt; every sample of a step has a prompt of the same length.
        tokens: ids that were generated.
        rewards: one per token.
        logprobs: what the behaviour policy gave each token; NaN = not known, which leaves the
            token out.
        mask: True = learn from this token.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    rewards: NDArray[np.floating]
    logprobs: NDArray[np.floating]
    mask: NDArray[np.bool_]


class Learner:
    """Adam on a policy gradient with a normalised advantage and cut importance ratios.

    Attributes:
        parameters: the weights now.
    """

    def __init__(self, parameters: Parameters, *, rate: float = 0.01) -> None:
        self.parameters = parameters
        self._rate = rate
        self._updates = 0
        self._first = {name: np.zeros(array.shape) for name, array in parameters.items()}
        self._second = {name: np.zeros(array.shape) for name, array in parameters.items()}

    def step(self, samples: Sequence[Sample]) -> Parameters:
        """The weights after one step on these samples; unchanged when nothing is left of them."""
        samples = [sample for sample in samples if len(sample.tokens)]
        if samples:
            prompt_len = len(samples[0].prompt)
            ids, rewards, logprobs, mask = _padded(samples)
            mask &= np.isfinite(logprobs)
            if mask.any():
                now = policy.logprobs(self.parameters, ids)[:, prompt_len:]
                log_ratios = np.where(mask, now - np.where(mask, logprobs, 0.0), 0.0)
                ratios = np.minimum(np.exp(log_ratios), _LARGEST_RATIO)
                advantages = _normalised(rewards, mask)
                gradient = policy.grad(
                    self.parameters,
                    ids,
                    prompt_len=prompt_len,
                    coeff_per_token=advantages * ratios / mask.sum(),
                )
                self.parameters = self._adam(gradient)
        return self.parameters

    def _adam(self, gradient: Mapping[str, Floats]) -> Parameters:
        """The weights one step up the gradient."""
        self._updates += 1
        moved = {}
        for name, array in self.parameters.items():
            slope = gradient[name]
            first = self._first[name] = _BETA1 * self._first[name] + (1 - _BETA1) * slope
            second = self._second[name] = _BETA2 * self._second[name] + (1 - _BETA2) * slope**2
            mean = first / (1 - _BETA1**self._updates)
            scale = np.sqrt(second / (1 - _BETA2**self._updates)) + _EPSILON
            moved[name] = (array + self._rate * mean / scale).astype(np.float32)
        return moved


def _normalised(rewards: Floats, mask: NDArray[np.bool_]) -> Floats:
    """Rewards of masked-in tokens with mean 0 and deviation 1; 0 elsewhere."""
    kept = rewards[mask]
    advantages: Floats = np.where(mask, rewards - kept.mean(), 0.0) / (kept.std() + _EPSILON)
    return advantages


def _padded(
    samples: Sequence[Sample],
) -> tuple[NDArray[np.intp], Floats, Floats, NDArray[np.bool_]]:
    """Ids with prompts, rewards, logprobs and mask as rectangles; what is padded is masked out."""
    prompt_len = len(samples[0].prompt)
    shape = len(samples), max(len(sample.tokens) for sample in samples)
    ids = np.zeros((shape[0], prompt_len + shape[1]), dtype=np.intp)
    rewards, logprobs = np.zeros(shape), np.full(shape, np.nan)
    mask = np.zeros(shape, dtype=np.bool_)
    for row, sample in enumerate(samples):
        size = len(sample.tokens)
        ids[row, :prompt_len] = sample.prompt
        ids[row, prompt_len : prompt_len + size] = sample.tokens
        rewards[row, :size] = sample.rewards
        logprobs[row, :size] = sample.logprobs
        mask[row, :size] = sample.mask
    return ids, rewards, logprobs, mask
