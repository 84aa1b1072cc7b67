"""The learner goes up the reward, on what it may learn from, and leaves published weights alone."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from genapi.demo.learner import Learner, Parameters, Sample, token_rewards
from genapi.embedded import policy

VOCAB, WIDTH, PROMPT, TOKENS = 16, 8, 2, 6
START = policy.init(0, vocab=VOCAB, width=WIDTH)


def sample(rng: np.random.Generator, weights: Parameters, *, tokens: int = TOKENS) -> Sample:
    """A rollout drawn from the policy at these weights."""
    prompt = rng.integers(VOCAB, size=PROMPT).tolist()
    ids, logprobs = list(prompt), []
    for _ in range(tokens):
        scores = policy.logits(weights, ids)[-1]
        chances = np.exp(scores - scores.max())
        chances /= chances.sum()
        token = int(rng.choice(VOCAB, p=chances))
        ids.append(token)
        logprobs.append(np.log(chances[token]))
    return Sample(
        prompt=prompt,
        tokens=ids[PROMPT:],
        rewards=token_rewards(ids[PROMPT:], vocab=VOCAB),
        logprobs=np.asarray(logprobs, dtype=np.float32),
        mask=np.ones(tokens, dtype=np.bool_),
    )


def batch(weights: Parameters = START, *, seed: int = 0, size: int = 32) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [sample(rng, weights) for _ in range(size)]


def expected_reward(weights: Parameters, prompts: Sequence[Sequence[int]]) -> float:
    """The exact chance of a rewarded token right after each prompt, on average."""
    chances = [np.exp(policy.logits(weights, prompt)[-1]) for prompt in prompts]
    return float(np.mean([c[: VOCAB // 4].sum() / c.sum() for c in chances]))


def same(left: Parameters, right: Parameters) -> bool:
    return all(np.array_equal(left[name], right[name]) for name in START)


def test_a_token_of_the_lowest_quarter_is_rewarded_and_no_other() -> None:
    assert token_rewards([0, 15, 16, 63], vocab=64).tolist() == [1.0, 1.0, 0.0, 0.0]


def test_steps_go_up_the_expected_reward() -> None:
    learner = Learner(START)
    prompts = [[token, token] for token in range(VOCAB)]
    rewards = [expected_reward(START, prompts)]
    for step in range(16):
        learner.step(batch(learner.parameters, seed=step))
        rewards.append(expected_reward(learner.parameters, prompts))
    assert rewards[-1] > rewards[0] + 0.2
    assert sum(later > earlier for earlier, later in itertools.pairwise(rewards)) >= 13


def test_samples_of_older_weights_still_lead_up() -> None:
    learner = Learner(START)
    samples = batch(size=64)
    for _ in range(5):
        learner.step(samples)
    prompts = [s.prompt for s in samples]
    assert expected_reward(learner.parameters, prompts) > expected_reward(START, prompts) + 0.03


def test_published_arrays_are_never_written_to() -> None:
    learner = Learner(START)
    first = learner.step(batch())
    before = {name: array.copy() for name, array in first.items()}
    second = learner.step(batch(seed=1))
    assert same(first, before)
    assert not same(first, second)
    assert all(array.dtype == np.float32 for array in second.values())


@pytest.mark.parametrize(
    "samples",
    [
        pytest.param([], id="no sample"),
        pytest.param(
            [dataclasses.replace(s, mask=np.zeros(TOKENS, dtype=np.bool_)) for s in batch(size=2)],
            id="every token masked",
        ),
        pytest.param(
            [dataclasses.replace(s, logprobs=np.full(TOKENS, np.nan)) for s in batch(size=2)],
            id="no usable logprob",
        ),
    ],
)
def test_without_a_token_to_learn_from_the_weights_stay(samples: list[Sample]) -> None:
    assert Learner(START).step(samples) is START


def test_what_is_masked_and_what_follows_a_short_rollout_changes_nothing() -> None:
    rng = np.random.default_rng(3)
    short, long = sample(rng, START, tokens=3), sample(rng, START)
    longer = Sample(
        prompt=short.prompt,
        tokens=[*short.tokens, 9, 9, 9],
        rewards=np.concatenate([short.rewards, np.full(3, 7.0)]),
        logprobs=np.concatenate([short.logprobs, np.full(3, -0.5)]),
        mask=np.array([True] * 3 + [False] * 3),
    )
    assert same(Learner(START).step([short, long]), Learner(START).step([longer, long]))


def test_an_importance_ratio_weighs_a_token_up_to_its_cut() -> None:
    samples = batch(size=8)

    def stepped(shift: float) -> Parameters:
        # Adam's first step knows only the sign of each slope: a second, equal batch shows weights.
        learner = Learner(START)
        learner.step(samples)
        changed = [dataclasses.replace(samples[0], logprobs=samples[0].logprobs + shift)]
        return learner.step([*changed, *samples[1:]])

    assert not same(stepped(0.0), stepped(1.0))  # the behaviour policy liked it more: less weight
    assert same(stepped(-3.0), stepped(-6.0))  # beyond the cut, nothing more
