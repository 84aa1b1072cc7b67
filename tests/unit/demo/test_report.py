"""Counting a run, and how it is shown."""

import json

import pytest

from genapi import OffPolicyWindow, PolicyTrace, PolicyVersion, Span, WorkerId
from genapi.demo.report import Record, Step
from genapi.types.worker import Evidence, Outcome, PhaseTime, PublishReport, Receipt

KEYS = [
    *("steps", "final_version", "workers", "committed", "accepted", "dropped"),
    *("max_lag_accepted", "reward_first", "reward_last", "seconds"),
]


def version(step: int) -> PolicyVersion:
    return PolicyVersion(run="r", step=step)


def trace(*steps: int | None) -> PolicyTrace:
    """Two tokens of each step."""
    spans = []
    for index, step in enumerate(steps):
        held = None if step is None else version(step)
        spans.append(Span(start=2 * index, end=2 * index + 2, lo=held, hi=held, context=held))
    return PolicyTrace(spans=tuple(spans), source="engine")


def counted(*traces: PolicyTrace, max_lag: int = 1) -> Step:
    step = Step(number=1, version=5)
    window = OffPolicyWindow(max_lag=max_lag)
    for one in traces:
        step.count(one, window.judge(one, step.version))
    return step


def published(*, committed: bool = True) -> PublishReport:
    receipts = tuple(
        Receipt(
            worker=WorkerId(provider="vllm", component=f"w{index}", instance="1"),
            url=f"memory://{index}",
            outcome=Outcome.COMMITTED if committed else Outcome.UNKNOWN,
            evidence=Evidence.OWN_LABEL if committed else Evidence.NO_ANSWER,
            paused_s=paused_s,
        )
        for index, paused_s in enumerate((0.002, 0.0035))
    )
    phases = (PhaseTime(phase="pause", seconds=0.04),)
    return PublishReport(version=version(6), committed=committed, receipts=receipts, phases=phases)


def rewarded(*rewards: float) -> Record:
    record = Record()
    record.steps = [
        Step(number=n, version=n - 1, reward=reward) for n, reward in enumerate(rewards, start=1)
    ]
    return record


def test_a_step_counts_rollouts_by_verdict_and_tokens_by_lag() -> None:
    step = counted(trace(5), trace(4, 5), trace(3, 4), trace(None))
    assert (step.accepted, step.dropped, step.mixed, step.max_lag) == (2, 2, 2, 1)
    assert step.histogram == "0:4 1:4 2:2 ?:2"
    assert dict(step.reasons) == {"stale": 1, "unknown_version": 1}


def test_an_accepted_rollout_without_lag_makes_the_largest_lag_zero_and_none_makes_it_none() -> (
    None
):
    assert counted(trace(5)).max_lag == 0
    assert counted(trace(1)).max_lag is None


def test_the_progress_line_says_what_was_dropped_and_how_long_the_longest_pause_was() -> None:
    step = counted(trace(5), trace(1))
    step.reward, step.report = 0.25, published()
    assert step.line(steps=20) == (
        "step  1/20  reward 0.250  accepted 1/2  stale 1  "
        "version 6 published in 40 ms (paused 3.5 ms)"
    )


def test_a_publication_that_did_not_commit_is_not_called_published() -> None:
    step = counted(trace(5))
    step.report = published(committed=False)
    assert "version 6 NOT published" in step.line(steps=1)


def test_the_table_has_a_row_per_step_under_its_heading() -> None:
    record = Record()
    record.steps = [counted(trace(4, 5)), Step(number=2, version=6, reward=0.5)]
    record.steps[0].report = published()
    assert record.table().splitlines() == [
        "step  version  reward  accepted  dropped  mixed  lag:tokens  pause ms",
        "   1        5       -         1        0      1  0:2 1:2          3.5",
        "   2        6   0.500         0        0      0                     -",
    ]


def test_the_summary_has_exactly_the_ten_keys_in_order_and_is_json() -> None:
    record = rewarded(0.2, 0.5, 0.6, 0.7)
    record.workers, record.final_version = 2, 4
    record.publications = record.committed = 4
    record.steps[0].accepted, record.steps[1].dropped, record.steps[2].max_lag = 30, 2, 1
    summary = json.loads(json.dumps(record.summary(seconds=1.23456)))
    assert list(summary) == KEYS
    assert summary == {
        "steps": 4,
        "final_version": 4,
        "workers": 2,
        "committed": 4,
        "accepted": 30,
        "dropped": 2,
        "max_lag_accepted": 1,
        "reward_first": 0.2,
        "reward_last": 0.6,
        "seconds": 1.235,
    }


def test_a_run_that_did_nothing_has_the_same_keys() -> None:
    summary = Record().summary(seconds=0.0)
    assert list(summary) == KEYS
    assert summary["reward_first"] is summary["max_lag_accepted"] is None
    assert len(Record().table().splitlines()) == 1


@pytest.mark.parametrize(
    ("rewards", "complaint"),
    [
        ((0.2, 0.3, 0.5, 0.6), None),
        ((0.2, 0.3, 0.3, 0.3), "did not rise: 0.200 in the first step, 0.300 in the last three"),
        ((), None),
    ],
)
def test_a_reward_that_did_not_rise_is_complained_of(
    rewards: tuple[float, ...], complaint: str | None
) -> None:
    said = rewarded(*rewards).complaint()
    assert (said is None) if complaint is None else (complaint in str(said))


def test_a_publication_that_did_not_commit_is_complained_of_first() -> None:
    record = rewarded(0.2, 0.2)
    record.publications, record.committed = 3, 2
    assert record.complaint() == "1 of 3 publications did not commit"
