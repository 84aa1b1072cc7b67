"""Values through JSON and through Python's own operators."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from genapi import PolicyTrace, PolicyVersion, Span, TokenIds
from genapi.types.base import Float32Array, Value
from genapi.types.policy import parse_label

ids = st.lists(st.integers(0, 2**31 - 1), max_size=40)


class Holder(Value):
    """A value with one array."""

    scores: Float32Array


@given(
    nps.arrays(np.float32, st.integers(0, 30), elements=st.floats(width=32, allow_infinity=False))
)
def test_float32_survives_json_bit_for_bit_with_nan_as_null(array: np.ndarray) -> None:
    held = Holder(scores=array)
    text = held.model_dump_json()
    again = Holder.model_validate_json(text)
    finite = ~np.isnan(array)
    assert again.scores.dtype == np.float32
    assert again.scores[finite].tobytes() == array[finite].tobytes()
    assert np.array_equal(np.isnan(again.scores), ~finite)
    assert text.count("null") == int((~finite).sum())
    assert again == held


@given(ids, ids, st.integers(-45, 45), st.integers(-45, 45))
def test_token_ids_do_what_a_tuple_does(left: list[int], right: list[int], a: int, b: int) -> None:
    one, two = TokenIds(left), TokenIds(right)
    assert tuple(one + two) == tuple(left) + tuple(right)
    assert one + right == left + two == tuple(left + right)
    assert np.array(left, dtype=np.int32) + two == left + right
    assert tuple(one[a:b]) == tuple(left[a:b])
    assert (one == two) == (left == right)
    assert hash(one) == hash(tuple(left))
    assert len(one) == len(left)


@given(st.from_regex(r"[A-Za-z0-9._-]+", fullmatch=True), st.integers(0, 10**9), st.integers(1, 99))
def test_every_version_is_read_back_from_its_label(run: str, step: int, attempt: int) -> None:
    version = PolicyVersion(run=run, step=step, attempt=attempt)
    assert parse_label(version.label) == version
    assert parse_label(version.updating_label) is None


@given(st.text(max_size=30))
def test_a_text_names_a_version_only_if_it_is_that_versions_label(text: str) -> None:
    version = parse_label(text)
    assert version is None or version.label == text


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 5), st.none() | st.integers(0, 9)), max_size=3),
        max_size=4,
    )
)
def test_joining_turns_keeps_every_token_and_its_version(
    turns: list[list[tuple[int, int | None]]],
) -> None:
    traces = [_trace(turn) for turn in turns]
    joined = PolicyTrace.join(traces)
    assert len(joined) == sum(map(len, traces))
    assert joined.arrays().lo.tolist() == [s for t in traces for s in t.arrays().lo.tolist()]
    steps = [s for t in turns for _, s in t]
    known = [s for s in steps if s is not None]
    expected = min(known) if known and len(known) == len(steps) else None
    assert (joined.oldest.step if joined.oldest else None) == expected


def _trace(turn: list[tuple[int, int | None]]) -> PolicyTrace:
    spans = []
    at = 0
    for count, step in turn:
        version = None if step is None else PolicyVersion(run="r", step=step)
        spans.append(Span(start=at, end=at + count, lo=version, hi=version, context=version))
        at += count
    return PolicyTrace(spans=tuple(spans), source="engine")
