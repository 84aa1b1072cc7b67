"""What comes back, as values that do not change."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from genapi import GenerateOutput, GenerateResponse, PolicyTrace, TokenIds
from genapi.types.response import TopLogprobs


def output(**more: Any) -> GenerateOutput:
    base = {
        "token_ids": [5, 6],
        "logprobs": [-0.5, None],
        "finish_reason": "stop",
        "policy": PolicyTrace.unknown(2),
    }
    return GenerateOutput(**{**base, **more})


def test_missing_scores_are_nan_and_counted() -> None:
    out = output()
    assert out.logprobs is not None
    assert np.isnan(out.logprobs[1])
    assert out.missing_logprobs == 1
    assert output(logprobs=None).missing_logprobs == 0


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"logprobs": [-0.5]}, "2 token ids with 1 logprobs"),
        ({"policy": PolicyTrace.unknown(1)}, "trace of 1 tokens"),
        ({"top_logprobs": ()}, "2 token ids with 0 top_logprobs"),
        ({"logprobs": [[-0.5, -0.5]]}, "flat list"),
    ],
)
def test_parts_that_do_not_fit_are_refused(bad: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        output(**bad)


def test_candidates_and_their_scores_have_one_length() -> None:
    with pytest.raises(ValidationError, match="1 ids with 2 logprobs"):
        TopLogprobs(token_ids=TokenIds([1]), logprobs=[-1.0, -2.0])  # type: ignore[arg-type]


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls", "other"])
def test_an_output_that_ended_by_itself_is_complete(reason: str) -> None:
    assert output(finish_reason=reason).is_complete


@pytest.mark.case("FIN-01")
@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_output_that_was_ended_is_not_complete(reason: str) -> None:
    assert not output(finish_reason=reason).is_complete


def test_the_only_output_is_at_hand_and_several_are_not_mistaken_for_one() -> None:
    one, two = output(), output(index=1)
    assert GenerateResponse(request_id="r", outputs=(one,)).output is one
    with pytest.raises(ValueError, match=r"2 outputs; use reply\.outputs"):
        _ = GenerateResponse(request_id="r", outputs=(one, two)).output


@pytest.mark.parametrize(
    "through",
    [
        lambda v: pickle.loads(pickle.dumps(v)),  # noqa: S301 - our own bytes
        copy.copy,
        copy.deepcopy,
        lambda v: v.model_copy(),
        lambda v: v.model_copy(deep=True),
        lambda v: type(v).model_validate_json(v.model_dump_json()),
        lambda v: type(v).model_validate(v.model_dump()),
    ],
    ids=["pickle", "copy", "deepcopy", "model_copy", "model_copy deep", "json", "dump"],
)
def test_a_copy_is_equal_and_its_arrays_stay_read_only(through: Any) -> None:
    original = output()
    again = through(original)
    assert again == original
    assert again.logprobs.dtype == np.float32
    with pytest.raises(ValueError, match="read-only"):
        again.logprobs[0] = 0.0


def test_values_that_differ_in_one_score_are_not_equal() -> None:
    assert output() != output(logprobs=[-0.5, -0.25])
    assert output(logprobs=[None, None]) == output(logprobs=[None, None])
