"""What greedy tokens have to be, recomputed from the weights and the context that a trace names.

Weights are named by their step: version `step` is `policy.init(step)`. The rule of this file: it
shares nothing with the engine but the policy's arithmetic.
"""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from genapi import GenerateOutput, PolicyVersion
from genapi.embedded import policy
from genapi.embedded.policy import Model


@cache
def weights_of(step: int) -> dict[str, NDArray[np.float32]]:
    """The weights of a step."""
    return policy.init(step)


@cache
def model(step: int) -> Model:
    """The policy of a step, ready to compute."""
    return policy.prepare(weights_of(step))


def fresh(step: int, prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """What would stand in the place of each token, if everything before it is computed anew."""
    return replay(prompt, tokens, [step] * len(tokens), recomputes=lambda _step: True)


def replay(
    prompt: Sequence[int],
    tokens: Sequence[int],
    steps: Sequence[int],
    *,
    recomputes: Callable[[int], bool],
) -> list[int]:
    """What would stand in the place of each token of a request that found no cached prefix.

    Args:
        prompt: the prompt.
        tokens: the output.
        steps: whose weights made each token.
        recomputes: whether the weights of a step, when they came in, computed everything before
            anew; if not, they went on from what others had computed.
    """
    best: list[int] = []
    known, hidden, last = 0, None, None
    sequence = [*prompt, *tokens]
    for index, step in enumerate(steps):
        if step != last and recomputes(step):
            known, hidden = 0, None
        weights = model(step)
        end = len(prompt) + index
        hidden = weights.fold(hidden, [weights.table[t] for t in sequence[known:end]])
        best.append(int(weights.readout(hidden).argmax()))
        known, last = end, step
    return best


def mismatches(prompt: Sequence[int], output: GenerateOutput) -> int:
    """How many tokens are not what the weights that their span names make of all before them.

    Raises:
        ValueError: a span names no version.
    """
    count = 0
    for span in output.policy.spans:
        if span.lo is None or span.lo != span.hi:
            raise ValueError(f"no version is attested: {span}")
        before = [*prompt, *output.token_ids[: span.start]]
        made = output.token_ids[span.start : span.end]
        count += differing(fresh(span.lo.step, before, made), made)
    return count


def differing(expected: Sequence[int], got: Sequence[int]) -> int:
    """How many places differ."""
    return sum(a != b for a, b in zip(expected, got, strict=True))


def is_whole(weights: policy.Weights, step: int) -> bool:
    """Whether these are the weights of that step, every one of them."""
    wanted = weights_of(step)
    return wanted.keys() == weights.keys() and all(
        np.array_equal(wanted[name], weights[name]) for name in wanted
    )


def step_of(version: PolicyVersion | None) -> int:
    """The step of a version that has to be known."""
    assert version is not None
    return version.step
