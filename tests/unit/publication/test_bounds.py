"""What `min_version` and `exact_version` admit."""

import pytest

from genapi import GenerateRequest, PolicyTrace, PolicyVersion, SamplingParams, Span
from genapi.errors import ConfigError
from genapi.publication.bounds import Bound, bounds_of, describe


def v(step: int, attempt: int = 1, run: str = "r") -> PolicyVersion:
    return PolicyVersion(run=run, step=step, attempt=attempt)


def trace(*ends: tuple[PolicyVersion | None, PolicyVersion | None]) -> PolicyTrace:
    spans = (Span(start=i, end=i + 1, lo=lo, hi=hi) for i, (lo, hi) in enumerate(ends))
    return PolicyTrace(spans=tuple(spans))


def asked(**bounds: int | PolicyVersion) -> GenerateRequest:
    return GenerateRequest.model_validate(
        {"prompt_token_ids": [1], "sampling": SamplingParams(max_tokens=1), **bounds}
    )


@pytest.mark.parametrize(
    ("bound", "admitted", "refused"),
    [
        (Bound("min_version", 7, "r"), [v(7), v(8), v(7, 2)], [v(6), v(9, run="x"), None]),
        (Bound("exact_version", 7, "r"), [v(7), v(7, 2)], [v(6), v(8), v(7, run="x"), None]),
        (Bound("exact_version", 7, "r", 2), [v(7, 2)], [v(7), v(7, 3), v(8, 2), None]),
        (Bound("exact_version", 7, None), [v(7), v(7, run="x")], [v(8), None]),
    ],
)
def test_a_bound_admits_versions_and_never_what_is_unknown(
    bound: Bound, admitted: list[PolicyVersion], refused: list[PolicyVersion | None]
) -> None:
    assert [version for version in [*admitted, *refused] if bound.admits(version)] == admitted


def test_every_token_has_to_meet_a_bound_wherever_in_its_interval_it_lies() -> None:
    least, exact = Bound("min_version", 7, "r"), Bound("exact_version", 7, "r")
    for covered in (trace((v(7), v(8))), trace((v(8), None)), trace()):
        assert least.covers(covered)
    assert not least.covers(trace((v(8), v(8)), (v(6), v(7))))
    for covered in (trace((v(7), v(7))), trace((v(7), v(7, 2))), trace()):
        assert exact.covers(covered)
    for refused in (trace((v(7), v(8))), trace((v(7), None)), trace((None, v(7)))):
        assert not exact.covers(refused)


def test_an_exact_version_is_past_when_a_worker_is_beyond_it_and_a_least_one_never() -> None:
    step, attempt = Bound("exact_version", 7, "r"), Bound("exact_version", 7, "r", 2)
    assert [step.is_past(x) for x in (v(6), v(7), v(8), v(8, run="x"), None)] == [
        False,
        False,
        True,
        False,
        False,
    ]
    assert [attempt.is_past(x) for x in (v(7), v(7, 2), v(7, 3), v(8))] == [
        False,
        False,
        True,
        True,
    ]
    assert not Bound("min_version", 7, "r").is_past(v(9))


def test_a_bound_is_beyond_a_version_when_only_a_newer_one_could_meet_it() -> None:
    least, exact = Bound("min_version", 7, "r"), Bound("exact_version", 7, None)
    attempt = Bound("exact_version", 7, "r", 2)
    for bound in (least, exact, attempt):
        assert [bound.is_beyond(x) for x in (v(6), v(6, 3), v(8))] == [True, True, False]
    assert [attempt.is_beyond(x) for x in (v(7), v(7, 2), v(7, 3))] == [True, False, False]
    assert not least.is_beyond(v(7))
    assert not exact.is_beyond(v(7))
    assert not least.is_beyond(v(6, run="x"))
    assert exact.is_beyond(v(6, run="x"))


def test_a_step_is_of_the_fleets_run_or_of_the_one_that_the_labels_agree_on() -> None:
    labels = ["default", None, "genapi:a:3:1", "genapi:a:4:1"]
    assert bounds_of(asked(min_version=3), run="r", labels=labels)[0].run == "r"
    assert bounds_of(asked(min_version=3), run=None, labels=labels)[0].run == "a"
    assert bounds_of(asked(min_version=3), run=None, labels=["default"])[0].run is None
    with pytest.raises(ConfigError, match=r"a, b.*run="):
        bounds_of(asked(exact_version=3), run=None, labels=[*labels, "genapi:b:3:1"])


def test_a_whole_version_brings_its_own_run_and_only_an_exact_one_its_attempt() -> None:
    least, exact = bounds_of(
        asked(min_version=v(7, 2), exact_version=v(8, 2)), run=None, labels=["genapi:a:1:1"]
    )
    assert (least.run, least.attempt) == ("r", None)
    assert (exact.run, exact.attempt) == ("r", 2)
    assert str(exact) == "exact_version=8, attempt 2 of run 'r'"
    with pytest.raises(ConfigError, match=r"'r'.*'other'"):
        bounds_of(asked(min_version=v(7)), run="other", labels=[])


def test_a_trace_is_described_in_the_order_of_its_tokens() -> None:
    mixed = trace((v(7), v(7)), (v(7), v(7)), (v(7), v(8)), (None, None))
    assert describe(mixed) == ("genapi:r:7:1 then genapi:r:7:1..genapi:r:8:1 then UNKNOWN..UNKNOWN")


def test_a_bound_reads_as_it_was_asked_for() -> None:
    assert str(Bound("min_version", 7, None)) == "min_version=7"
    assert str(Bound("min_version", 7, "r")) == "min_version=7 of run 'r'"
    assert str(Bound("exact_version", 7, "r", 2)) == "exact_version=7, attempt 2 of run 'r'"


def test_bounds_of_a_request_are_named_and_of_the_fleets_run() -> None:
    both = asked(min_version=3, exact_version=5)
    assert bounds_of(both, run="r", labels=[v(1, run="other").label]) == (
        Bound("min_version", 3, "r"),
        Bound("exact_version", 5, "r"),
    )
    whole = asked(min_version=v(3, 2), exact_version=v(5, 2))
    assert bounds_of(whole, run=None, labels=[]) == (
        Bound("min_version", 3, "r"),
        Bound("exact_version", 5, "r", 2),
    )


def test_a_step_that_could_be_of_several_runs_says_what_to_do() -> None:
    labels = [v(1, run="b").label, v(1, run="a").label, "default"]
    with pytest.raises(ConfigError) as caught:
        bounds_of(asked(min_version=1), run=None, labels=labels)
    assert str(caught.value) == (
        "the workers' labels name several runs (a, b), so a step alone names no version: connect "
        "with run=..., or give a PolicyVersion"
    )
