"""What reads before and after a reply say of the versions of its tokens."""

import pytest

from genapi import PolicyTrace, PolicyVersion, Span
from genapi.publication.intervals import Interval, Reading, Rounds, Sight, infer, inferred_trace
from genapi.types.ids import WorkerId

A, B = (WorkerId(provider="vllm", component=name, instance="1") for name in "ab")


def v(step: int, attempt: int = 1, run: str = "r") -> PolicyVersion:
    return PolicyVersion(run=run, step=step, attempt=attempt)


def sight(step: int, attempt: int = 1, *, worker: WorkerId = A, run: str = "r") -> Sight:
    return Sight(worker, v(step, attempt, run).label)


def between(before: Sight | None, after: Sight | None, *, run: str | None = "r") -> Interval:
    return infer({"a": before}, Reading({"a": after}), run=run)


def test_a_label_is_a_version_of_the_run_that_is_asked_for() -> None:
    assert sight(7, 2).version("r") == v(7, 2)
    assert sight(7).version(None) == v(7)
    assert sight(7).version("x") is None
    assert (sight(7).floor("x"), sight(7).ceiling("x")) == (None, None)
    assert Sight(A, "default").version("r") is None


def test_a_label_proves_nothing_of_a_fenced_worker() -> None:
    fenced = Sight(A, v(7).label, proved=False, held=v(6).label)
    assert (fenced.version("r"), fenced.floor("r"), fenced.ceiling("r")) == (None, None, None)


def test_a_worker_in_an_update_lies_between_what_it_held_and_what_comes() -> None:
    updating = Sight(A, v(8).updating_label, held=v(7).label)
    assert (updating.version("r"), updating.floor("r"), updating.ceiling("r")) == (None, v(7), v(8))
    assert updating.floor(None) == v(7)
    assert updating.ceiling(None) == v(8)
    assert (updating.floor("x"), updating.ceiling("x")) == (None, None)
    another = Sight(A, v(8, run="x").updating_label, held=v(7).label)
    assert (another.floor("r"), another.ceiling("r")) == (None, None)
    assert Sight(A, v(8).updating_label).floor("r") is None


def test_what_it_held_before_says_nothing_of_a_worker_whose_label_is_whole() -> None:
    moved = Sight(A, v(8).label, held=v(7).label)
    assert (moved.floor("r"), moved.ceiling("r")) == (v(8), v(8))
    lost = Sight(A, "default", held=v(7).label)
    assert (lost.floor("r"), lost.ceiling("r")) == (None, None)


@pytest.mark.parametrize(
    ("before", "after", "interval"),
    [
        (sight(7), sight(7), Interval(v(7), v(7))),
        (sight(7), sight(8), Interval(v(7), v(8))),
        (sight(7, 1), sight(7, 2), Interval(v(7, 1), v(7, 2))),
        (sight(7, 2), sight(8, 1), Interval(v(7, 2), v(8, 1))),
        (sight(8), sight(7), Interval()),
        (sight(7, 2), sight(7, 1), Interval()),
        (Sight(A, "default"), sight(7), Interval(None, v(7))),
        (sight(7), Sight(A, "default"), Interval(v(7), None)),
        (sight(7), sight(7, worker=A.model_copy(update={"instance": "2"})), Interval()),
        (None, sight(7), Interval()),
        (sight(7), None, Interval()),
    ],
)
def test_tokens_lie_between_the_labels_before_and_after_them(
    before: Sight | None, after: Sight | None, interval: Interval
) -> None:
    assert between(before, after) == interval


def test_labels_of_two_runs_bound_nothing_together() -> None:
    assert between(sight(7), sight(8, run="x"), run=None) == Interval()
    both = {"a": sight(7), "b": sight(7, worker=B, run="x")}
    assert infer(both, Reading(both), run=None) == Interval()
    assert infer(both, Reading(both), run="r") == Interval()
    assert between(sight(7, run="x"), sight(8, run="x")) == Interval()
    assert between(sight(7, run="x"), sight(8, run="x"), run=None) == Interval(
        v(7, run="x"), v(8, run="x")
    )


def test_the_oldest_and_the_newest_of_all_who_may_have_served_bound_a_reply() -> None:
    before = {"a": sight(8), "b": sight(7, worker=B)}
    after = {"a": sight(8), "b": sight(9, worker=B)}
    assert infer(before, Reading(after), run="r") == Interval(v(7), v(9))
    for first, second in ((1, 2), (2, 1)):
        tried = {"a": sight(7, first), "b": sight(7, second, worker=B)}
        assert infer(tried, Reading(tried), run="r") == Interval(v(7, 1), v(7, 2))
    assert infer(before, Reading({"a": sight(9)}), run="r") == Interval()
    assert infer({}, Reading({}), run="r") == Interval()


def test_the_newest_version_of_a_record_bounds_what_labels_do_not_show() -> None:
    one = {"a": sight(7)}
    assert infer(one, Reading(one, feed=v(8)), run="r") == Interval(v(7), v(8))
    assert infer(one, Reading({"a": sight(9)}, feed=v(8)), run="r") == Interval(v(7), v(9))
    unread = Reading({"a": Sight(A, "default")}, feed=v(8))
    assert infer(one, unread, run="r") == Interval(v(7), v(8))


def test_an_inferred_trace_is_one_span_and_none_without_tokens() -> None:
    trace = inferred_trace(3, Interval(v(7), v(8)))
    assert trace == PolicyTrace(spans=(Span(start=0, end=3, lo=v(7), hi=v(8)),), source="inferred")
    assert inferred_trace(0, Interval(v(7), v(8))) == PolicyTrace(source="inferred")


def due(rounds: Rounds) -> bool:
    return rounds.is_due


def test_whoever_asks_during_a_read_is_answered_by_the_next_one() -> None:
    rounds = Rounds()
    assert not due(rounds)
    with pytest.raises(ValueError, match=r"^no read is due$"):
        rounds.start()
    with pytest.raises(ValueError, match=r"^no read is under way$"):
        rounds.end()
    assert (rounds.ask(), rounds.ask()) == (1, 1)
    assert due(rounds)
    assert rounds.start() == 1
    assert not due(rounds)
    assert (rounds.ask(), rounds.ask()) == (2, 2)
    assert not due(rounds)
    rounds.end()
    assert due(rounds)
    assert rounds.start() == 2
    rounds.end()
    assert not due(rounds)
    assert rounds.ask() == 3
