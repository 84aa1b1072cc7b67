"""Versions, spans and traces: what is known of the policy behind tokens."""

import pickle

import pytest
from pydantic import ValidationError

from genapi import PolicyTrace, PolicyVersion, Span
from genapi.types.policy import is_updating_label, parse_label


def version(step: int, *, run: str = "r", attempt: int = 1) -> PolicyVersion:
    return PolicyVersion(run=run, step=step, attempt=attempt)


def trace(*steps: int | None, tokens: int = 2) -> PolicyTrace:
    """A trace of spans of `tokens` tokens that are attested at these steps."""
    spans = []
    for i, step in enumerate(steps):
        v = None if step is None else version(step)
        spans.append(Span(start=i * tokens, end=(i + 1) * tokens, lo=v, hi=v, context=v))
    return PolicyTrace(spans=tuple(spans), source="engine")


def test_a_version_and_its_label_say_the_same() -> None:
    v = PolicyVersion(run="lr-1e.3_b", step=12, attempt=2)
    assert v.label == str(v) == "genapi:lr-1e.3_b:12:2"
    assert parse_label(v.label) == v
    assert parse_label(v.label, run="lr-1e.3_b") == v


@pytest.mark.case("VER-04")
@pytest.mark.parametrize(
    "label",
    [
        "default",
        "initial",
        "unknown",
        None,
        "",
        7.5,
        "7",
        "genapi:r:7",
        "genapi:r:07:1",
        "genapi:r:7:0",
        "genapi:r:-7:1",
        "genapi:a b:7:1",
        "genapi:r:7:1 ",
        "genapi:r:7:1!updating",
        "/ckpt/7",
    ],
)
def test_what_is_no_label_of_ours_names_no_version(label: object) -> None:
    assert parse_label(label) is None


def test_a_label_of_another_run_names_no_version() -> None:
    assert parse_label("genapi:other:7:1", run="r") is None


def test_a_write_ahead_label_says_so() -> None:
    assert is_updating_label(version(3).updating_label)
    assert not any(map(is_updating_label, ("x!updating", version(3).label, None)))


def test_equality_sees_the_attempt_and_order_does_not() -> None:
    first, second = version(3), version(3, attempt=2)
    assert first != second
    assert first <= second
    assert second <= first
    assert not first < second
    assert version(2) < first < version(4)


def test_versions_of_two_runs_do_not_compare() -> None:
    with pytest.raises(TypeError):
        _ = version(1) < version(2, run="other")


@pytest.mark.parametrize(
    "bad",
    [{"run": "a b"}, {"run": ""}, {"step": -1}, {"step": 1.0}, {"attempt": 0}, {"step": True}],
)
def test_a_version_that_cannot_be_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(bad))):
        PolicyVersion(**{"run": "r", "step": 1, **bad})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"start": 2, "end": 2}, "at least one token"),
        ({"lo": version(2), "hi": version(1)}, "lo is newer than hi"),
        ({"lo": version(1), "hi": version(1, run="x")}, "within one run"),
    ],
)
def test_a_span_that_cannot_be_is_refused(bad: dict[str, object], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        Span(**{"start": 0, "end": 2, **bad})  # type: ignore[arg-type]


def test_spans_of_a_trace_leave_no_gap() -> None:
    with pytest.raises(ValidationError, match="expected start 2, got 3"):
        PolicyTrace(spans=(Span(start=0, end=2), Span(start=3, end=4)))


@pytest.mark.case("VER-02")
def test_a_trace_knows_its_oldest_and_newest_version() -> None:
    mixed = trace(7, 8)
    assert (mixed.oldest, mixed.newest) == (version(7), version(8))
    assert mixed.is_mixed
    assert not mixed.is_pure
    assert (mixed.at(1).lo, mixed.at(2).lo, mixed.at(-1).lo) == (version(7), version(8), version(8))
    assert mixed.arrays().lo.tolist() == [7, 7, 8, 8]
    with pytest.raises(IndexError, match="no token 4"):
        mixed.at(4)


@pytest.mark.case("VER-04")
def test_one_unknown_span_makes_the_whole_trace_unknown() -> None:
    partly = trace(7, None)
    assert (partly.oldest, partly.newest, partly.lag(7)) == (None, None, None)
    assert partly.is_mixed
    assert not partly.is_pure
    assert partly.arrays().lo.tolist() == [7, 7, -1, -1]
    assert PolicyTrace.unknown(0).spans == ()


def test_stale_context_is_not_pure() -> None:
    span = Span(start=0, end=2, lo=version(8), hi=version(8), context=version(7))
    carried = PolicyTrace(spans=(span,), source="engine")
    assert not carried.is_mixed
    assert not carried.is_pure
    assert trace(8).is_pure


@pytest.mark.case("VER-06")
@pytest.mark.parametrize(("steps", "consumer", "lag"), [((5,), 5, 0), ((5, 6), 6, 1), ((5,), 9, 4)])
def test_lag_counts_from_the_oldest_version_to_the_consumers(
    steps: tuple[int, ...], consumer: int, lag: int
) -> None:
    assert trace(*steps).lag(consumer) == lag
    assert trace(*steps).lag(version(consumer)) == lag
    assert trace(*steps).lag(version(consumer, attempt=9)) == lag


def test_lag_to_a_version_of_another_run_is_unknown() -> None:
    assert trace(5).lag(version(5, run="other")) is None


def test_a_frozen_model_never_lags() -> None:
    frozen = PolicyTrace(spans=(Span(start=0, end=2),), source="frozen")
    assert frozen.lag(99) == 0
    assert frozen.is_pure


@pytest.mark.case("VER-10")
def test_turns_join_into_one_trace_and_dropping_one_makes_it_younger() -> None:
    turns = [trace(4), trace(5), trace(5, 6)]
    joined = PolicyTrace.join(turns)
    assert (joined.oldest, joined.newest, len(joined)) == (version(4), version(6), 8)
    assert joined.source == "engine"
    assert PolicyTrace.join(turns[1:]).oldest == version(5)
    assert PolicyTrace.join([]) == PolicyTrace()


def test_turns_of_different_sources_join_as_inferred() -> None:
    assert PolicyTrace.join([trace(4), PolicyTrace.unknown(2)]).source == "inferred"


def test_a_trace_survives_json_and_pickle() -> None:
    mixed = trace(7, 8)
    assert PolicyTrace.model_validate_json(mixed.model_dump_json()) == mixed
    assert pickle.loads(pickle.dumps(mixed)) == mixed  # noqa: S301 - our own bytes


def test_a_trace_over_two_runs_has_neither_an_oldest_nor_a_newest_version() -> None:
    ours, theirs = PolicyVersion(run="r", step=7), PolicyVersion(run="other", step=8)
    spans = [Span(start=n, end=n + 1, lo=v, hi=v) for n, v in enumerate((ours, theirs))]
    trace = PolicyTrace(spans=tuple(spans), source="engine")
    assert trace.oldest is None
    assert trace.newest is None
    assert trace.lag(9) is None
    assert trace.is_mixed
