"""The toy policy: exact sums, an exact gradient, and outputs worth generating."""

import numpy as np
import pytest

from genapi.embedded import policy

PROMPT = [1, 2, 3]


def test_logits_of_a_whole_sequence_equal_those_of_one_token_after_the_other() -> None:
    weights = policy.init(3)
    tokens = [*PROMPT, *policy.greedy(weights, PROMPT, 40)]
    whole = policy.logits(weights, tokens)
    model, h = policy.prepare(weights), None
    for position, row in enumerate(policy.values(weights, tokens)):
        h = model.fold(h, [row])
        assert np.array_equal(model.readout(h), whole[position])


def test_greedy_takes_the_most_likely_token() -> None:
    weights = policy.init(0)
    output = policy.greedy(weights, PROMPT, 12)
    scores = policy.logits(weights, [*PROMPT, *output])
    assert output == scores[len(PROMPT) - 1 : -1].argmax(axis=-1).tolist()


def test_outputs_wander_and_differ_between_seeds() -> None:
    outputs = [policy.greedy(policy.init(seed), PROMPT, 32) for seed in range(8)]
    assert len({tuple(output) for output in outputs}) == 8
    assert min(len(set(output)) for output in outputs) >= 8


def test_fresh_policy_is_close_to_uniform() -> None:
    for seed in range(4):
        scores = policy.logits(policy.init(seed), list(range(64)))
        probs = np.exp(scores - scores.max(axis=-1, keepdims=True))
        probs /= probs.sum(axis=-1, keepdims=True)
        entropy = -(probs * np.log(probs)).sum(axis=-1).mean()
        assert 0.95 * np.log(64) < entropy < np.log(64)
        assert 0.2 < probs[:, :16].sum(axis=-1).mean() < 0.3


@pytest.mark.parametrize("name", [policy.EMBED, policy.VALUE, policy.HEAD])
def test_gradient_matches_finite_differences(name: str) -> None:
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, 12, (3, 9))
    coeff = rng.standard_normal((3, 5))
    weights = {key: w.astype(np.float64) for key, w in policy.init(5, vocab=12, width=6).items()}

    def objective(shifted: object, at: tuple[int, ...], by: float) -> float:
        moved = {key: array.copy() for key, array in weights.items()}
        moved[name][at] += by
        return float((policy.logprobs(moved, tokens)[:, 4:] * coeff).sum())  # type: ignore[arg-type]

    found = policy.grad(
        weights,  # type: ignore[arg-type]
        tokens,
        prompt_len=4,
        coeff_per_token=coeff,
    )[name]
    for at in np.ndindex(found.shape):
        slope = (objective(weights, at, 1e-5) - objective(weights, at, -1e-5)) / 2e-5
        assert found[at] == pytest.approx(slope, abs=1e-7)


def test_gradient_of_a_batch_is_the_sum_over_its_sequences() -> None:
    weights = policy.init(1)
    tokens = np.random.default_rng(0).integers(0, 64, (4, 10))
    coeff = np.arange(4.0)[:, None]
    whole = policy.grad(weights, tokens, prompt_len=3, coeff_per_token=coeff)
    parts = [
        policy.grad(weights, row, prompt_len=3, coeff_per_token=c)
        for row, c in zip(tokens, coeff, strict=True)
    ]
    for name, total in whole.items():
        np.testing.assert_allclose(total, sum(part[name] for part in parts), atol=1e-12)
