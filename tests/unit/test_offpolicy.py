"""What an off-policy window says of samples of every kind."""

from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genapi import (
    DropReason,
    FinishReason,
    GenerateOutput,
    GenerateResponse,
    OffPolicyWindow,
    PolicyTrace,
    PolicyVersion,
    Span,
    TokenIds,
)
from genapi.offpolicy import Verdict

OnStale = Literal["drop", "mask", "keep", "withhold"]
Basis = Literal["oldest", "start", "per_token"]


def version(step: int, run: str = "r") -> PolicyVersion:
    return PolicyVersion(run=run, step=step)


def trace(*steps: int | None, pure: bool = True) -> PolicyTrace:
    """One token per step; None = UNKNOWN."""
    spans = []
    for at, step in enumerate(steps):
        made = None if step is None else version(step)
        context = made if pure else None
        spans.append(Span(start=at, end=at + 1, lo=made, hi=made, context=context))
    return PolicyTrace(spans=tuple(spans), source="engine")


def output(policy: PolicyTrace, reason: FinishReason = FinishReason.STOP) -> GenerateOutput:
    ids = TokenIds(range(len(policy)))
    return GenerateOutput(token_ids=ids, finish_reason=reason, policy=policy)


def said(verdict: Verdict) -> tuple[bool, int | None, list[bool], DropReason | None]:
    return (
        verdict.accepted,
        verdict.lag,
        [bool(kept) for kept in verdict.token_mask],
        verdict.reason,
    )


STALE = DropReason.STALE
UNKNOWN = DropReason.UNKNOWN_VERSION
Y, N = True, False


@pytest.mark.case("VER-06")
@pytest.mark.parametrize(
    ("steps", "consumer", "lag"),
    [((5, 5), 5, 0), ((5, 6), 6, 1), ((5, 6), 9, 4)],
)
def test_the_lag_is_the_consumers_step_minus_the_oldest_tokens(
    steps: tuple[int, ...], consumer: int, lag: int
) -> None:
    assert OffPolicyWindow(max_lag=lag).judge(trace(*steps), consumer).accepted
    if lag:
        refused = OffPolicyWindow(max_lag=lag - 1).judge(trace(*steps), consumer)
        assert said(refused) == (N, lag, [N, N], STALE)


@pytest.mark.parametrize(
    ("on_stale", "basis", "steps", "expected"),
    [
        ("drop", "oldest", (5, 8), (N, 4, [N, N], STALE)),
        ("drop", "start", (5, 8), (N, 4, [N, N], STALE)),
        ("drop", "start", (8, 5), (Y, 1, [Y, Y], None)),
        ("drop", "oldest", (8, 5), (N, 4, [N, N], STALE)),
        ("drop", "per_token", (5, 8), (Y, 1, [N, Y], STALE)),
        ("drop", "per_token", (5, 5), (N, 4, [N, N], STALE)),
        ("mask", "oldest", (5, 8, 7), (Y, 2, [N, Y, Y], STALE)),
        ("mask", "per_token", (5, 8, 7), (Y, 2, [N, Y, Y], STALE)),
        ("mask", "start", (5, 8), (N, 4, [N, N], STALE)),
        ("mask", "oldest", (5, 6), (N, 4, [N, N], STALE)),
        ("keep", "oldest", (5, 8), (Y, 4, [Y, Y], STALE)),
        ("keep", "per_token", (5, 8), (Y, 4, [Y, Y], STALE)),
        ("withhold", "oldest", (5, 8), (Y, 4, [N, N], STALE)),
        ("drop", "oldest", (None, 8), (N, None, [N, N], UNKNOWN)),
        ("mask", "oldest", (None, 8), (Y, 1, [N, Y], UNKNOWN)),
        ("keep", "oldest", (None, 8), (Y, None, [Y, Y], UNKNOWN)),
        ("withhold", "oldest", (None,), (Y, None, [N], UNKNOWN)),
        ("drop", "start", (None, 8), (N, None, [N, N], UNKNOWN)),
        ("drop", "start", (8, None), (Y, 1, [Y, Y], None)),
        ("drop", "oldest", (12,), (Y, -3, [Y], None)),
    ],
)
def test_what_happens_to_a_sample_by_its_versions(
    on_stale: OnStale,
    basis: Basis,
    steps: tuple[int | None, ...],
    expected: tuple[bool, int | None, list[bool], DropReason | None],
) -> None:
    window = OffPolicyWindow(max_lag=2, on_stale=on_stale, basis=basis)
    assert said(window.judge(trace(*steps), 9)) == expected


@pytest.mark.parametrize("on_stale", ["drop", "mask", "keep", "withhold"])
@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_an_incomplete_output_never_counts(on_stale: OnStale, reason: FinishReason) -> None:
    window = OffPolicyWindow(max_lag=9, on_stale=on_stale)
    verdict = window.judge(output(trace(5, 5), reason), 5)
    assert said(verdict) == (N, 0, [N, N], DropReason.INCOMPLETE)


def test_an_output_that_ran_to_its_length_is_complete() -> None:
    assert OffPolicyWindow(max_lag=0).judge(output(trace(5), FinishReason.LENGTH), 5).accepted


def test_a_window_that_wants_purity_refuses_mixed_samples_and_unknown_contexts() -> None:
    strict = OffPolicyWindow(max_lag=0, require_pure=True)
    assert strict.judge(trace(5, 5), 5).accepted
    assert strict.judge(trace(5, 6), 6).reason is DropReason.IMPURE
    assert strict.judge(trace(5, pure=False), 5).reason is DropReason.IMPURE
    assert strict.judge(trace(None), 5).reason is UNKNOWN


@pytest.mark.parametrize("on_stale", ["drop", "mask", "keep", "withhold"])
def test_a_frozen_model_is_never_stale(on_stale: OnStale) -> None:
    frozen = PolicyTrace(spans=(Span(start=0, end=2),), source="frozen")
    window = OffPolicyWindow(max_lag=0, require_pure=True, on_stale=on_stale)
    assert said(window.judge(frozen, 1000)) == (Y, 0, [Y, Y], None)


@pytest.mark.parametrize("on_stale", ["drop", "mask", "keep", "withhold"])
def test_a_sample_without_a_token_has_nothing_to_train_on(on_stale: OnStale) -> None:
    window = OffPolicyWindow(max_lag=9, on_stale=on_stale)
    assert said(window.judge(trace(), 5)) == (N, None, [], UNKNOWN)


def test_a_version_of_another_run_is_unknown_to_the_consumer() -> None:
    window = OffPolicyWindow(max_lag=9)
    assert window.judge(trace(5), version(5)).accepted
    assert window.judge(trace(5), version(5, run="other")).reason is UNKNOWN


def test_a_reply_is_judged_by_its_only_output() -> None:
    one = GenerateResponse(request_id="x", outputs=(output(trace(5)),))
    assert OffPolicyWindow(max_lag=0).judge(one, 5).accepted
    two = GenerateResponse(request_id="x", outputs=(output(trace(5)), output(trace(5))))
    with pytest.raises(ValueError, match="2 outputs"):
        OffPolicyWindow(max_lag=0).judge(two, 5)


@pytest.mark.case("VER-10")
def test_several_turns_are_judged_by_the_oldest_that_is_left() -> None:
    turns = [trace(4), trace(5), trace(5, 6)]
    window = OffPolicyWindow(max_lag=1)
    assert window.judge(PolicyTrace.join(turns), 6).lag == 2
    assert not window.judge(PolicyTrace.join(turns), 6).accepted
    assert window.judge(PolicyTrace.join(turns[1:]), 6).accepted


def test_intervals_are_judged_by_their_older_end() -> None:
    span = Span(start=0, end=1, lo=version(4), hi=version(6))
    inferred = PolicyTrace(spans=(span,), source="inferred")
    assert OffPolicyWindow(max_lag=1).judge(inferred, 6).lag == 2


@given(
    steps=st.lists(st.none() | st.integers(0, 9), max_size=6),
    consumer=st.integers(0, 9),
    max_lag=st.integers(0, 9),
    on_stale=st.sampled_from(["drop", "mask", "keep", "withhold"]),
    basis=st.sampled_from(["oldest", "start", "per_token"]),
)
def test_no_token_older_than_the_window_is_trained_on_unless_the_user_keeps_it(
    steps: list[int | None], consumer: int, max_lag: int, on_stale: OnStale, basis: Basis
) -> None:
    window = OffPolicyWindow(max_lag=max_lag, on_stale=on_stale, basis=basis)
    verdict = window.judge(trace(*steps), consumer)
    assert len(verdict.token_mask) == len(steps)
    assert not verdict.token_mask.flags.writeable
    if not verdict.accepted:
        assert not verdict.token_mask.any()
        assert verdict.reason is not None
    if on_stale != "keep" and basis != "start":
        for step, kept in zip(steps, verdict.token_mask, strict=True):
            assert not kept or (step is not None and consumer - step <= max_lag)
    if np.all(verdict.token_mask) and steps and verdict.reason is None:
        assert verdict.accepted


def test_an_impure_sample_that_is_dropped_still_says_how_old_it_is() -> None:
    window = OffPolicyWindow(max_lag=3, require_pure=True)
    assert said(window.judge(trace(4, pure=False), 6)) == (N, 2, [N], DropReason.IMPURE)
    assert said(window.judge(trace(None, pure=False), 6)) == (N, None, [N], UNKNOWN)


@pytest.mark.parametrize("on_stale", ["drop", "mask", "keep", "withhold"])
def test_every_mask_is_of_booleans_and_read_only(on_stale: OnStale) -> None:
    window = OffPolicyWindow(max_lag=1, on_stale=on_stale)
    for sample in (trace(5, 5), trace(1, 5), trace(1, 1), trace()):
        mask = window.judge(sample, 5).token_mask
        assert mask.dtype == np.bool_
        assert not mask.flags.writeable
