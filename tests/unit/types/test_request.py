"""What can be asked, and what is refused while it is being written down."""

import pickle
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from genapi import GenerateRequest, SamplingParams, TokenIds
from genapi.types.request import StructuredOutput


def test_a_prompt_of_any_int_sequence_is_held_as_token_ids() -> None:
    for prompt in ([1, 2], (1, 2), TokenIds([1, 2]), np.array([1, 2])):
        asked = GenerateRequest(prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=1))  # type: ignore[arg-type]
        assert isinstance(asked.prompt_token_ids, TokenIds)
        assert asked.prompt_token_ids == [1, 2]


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({}, "exactly one of"),
        ({"prompt_token_ids": [1], "prompt": "x"}, "exactly one of"),
        ({"prompt_token_ids": []}, "prompt_token_ids is empty"),
        ({"prompt": ""}, "prompt is empty"),
        ({"messages": []}, "messages is empty"),
        ({"prompt_token_ids": [1, -5]}, "position 1 is -5"),
        ({"prompt_token_ids": [1.5]}, r"position 0 is 1\.5"),
        ({"prompt_token_ids": [1], "cache_salt": ""}, "cache_salt"),
        ({"prompt_token_ids": [1], "timeout_s": 0}, "timeout_s"),
        ({"prompt_token_ids": [1], "min_version": -1}, "min_version"),
        ({"prompt_token_ids": [1], "lora": ""}, "lora"),
        ({"prompt_token_ids": [1], "typo": 1}, "typo"),
    ],
)
def test_a_request_that_cannot_be_is_refused(bad: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        GenerateRequest(sampling=SamplingParams(max_tokens=1), **bad)


@pytest.mark.parametrize(
    "bad",
    [
        {"max_tokens": 0},
        {"max_tokens": 1.0},
        {"max_tokens": 1, "min_tokens": 2},
        {"max_tokens": 1, "n": 0},
        {"max_tokens": 1, "temperature": -0.1},
        {"max_tokens": 1, "temperature": float("nan")},
        {"max_tokens": 1, "top_p": 0},
        {"max_tokens": 1, "top_k": -2},
        {"max_tokens": 1, "min_p": 1.1},
        {"max_tokens": 1, "repetition_penalty": 0},
        {"max_tokens": 1, "logprobs": -1},
        {"max_tokens": 1, "stop_token_ids": [-1]},
        {},
    ],
)
def test_sampling_that_cannot_be_is_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams(**bad)
    assert (list(bad)[-1] if bad else "max_tokens") in str(caught.value)


@pytest.mark.parametrize("fields", [{}, {"regex": "a", "choice": ("b",)}])
def test_a_constraint_is_of_exactly_one_kind(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="exactly one"):
        StructuredOutput(**fields)


def test_the_next_turn_keeps_everything_but_the_prompt() -> None:
    first = GenerateRequest(
        prompt_token_ids=[1, 2],
        sampling=SamplingParams(max_tokens=4),
        session="s",
        cache_salt="c",
    )
    second = first.extended(TokenIds([3]), [7, 8])
    assert second.prompt_token_ids == [1, 2, 3, 7, 8]
    assert second.model_copy(update={"prompt_token_ids": first.prompt_token_ids}) == first
    assert first.prompt_token_ids == [1, 2]


def test_only_a_prompt_of_ids_can_be_extended() -> None:
    asked = GenerateRequest(prompt="hi", sampling=SamplingParams(max_tokens=1))
    with pytest.raises(ValueError, match="prompt_token_ids"):
        asked.extended([1])


def test_a_request_survives_json_and_pickle() -> None:
    asked = GenerateRequest(
        prompt_token_ids=[1], sampling=SamplingParams(max_tokens=1, logit_bias={5: 1.0}), tag="t"
    )
    assert GenerateRequest.model_validate_json(asked.model_dump_json()) == asked
    assert pickle.loads(pickle.dumps(asked)) == asked  # noqa: S301 - our own bytes
