"""What a run of the demo did: counted while it runs, shown as a table and one line of JSON.

The rule of this file: it counts what it is told and decides nothing about rollouts or weights.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from genapi.offpolicy import DropReason, Verdict
from genapi.types.policy import PolicyTrace
from genapi.types.worker import PublishReport

__all__ = ("RISE", "Record", "Step")

RISE = 0.2
"""How much the reward has to rise; that of a policy that stays as it is moves by less than half."""

_LAST_STEPS = 3
_COLUMNS = ("step", "version", "reward", "accepted", "dropped", "mixed", "lag:tokens", "pause ms")
_LEFT = ("lag:tokens",)


@dataclass(slots=True, kw_only=True)
class Step:
    """One step: the rollouts that were taken, and the publication that followed.

    Attributes:
        number: which step, from 1.
        version: the version whose gradient was computed: what the rollouts were judged by.
        reward: mean over all tokens of all rollouts, accepted or not; None = not rewarded.
        accepted: rollouts that the window accepted.
        dropped: those that it did not.
        reasons: what the window remarked, also on rollouts that it accepted.
        mixed: rollouts of more than one version.
        lags: tokens by how many versions old they are; None = UNKNOWN.
        max_lag: largest lag of an accepted rollout; None = none was accepted, or not known.
        report: the publication that followed, however it ended; None = there was none.
    """

    number: int
    version: int
    reward: float | None = None
    accepted: int = 0
    dropped: int = 0
    reasons: Counter[DropReason] = field(default_factory=Counter)
    mixed: int = 0
    lags: Counter[int | None] = field(default_factory=Counter)
    max_lag: int | None = None
    report: PublishReport | None = None

    def count(self, trace: PolicyTrace, verdict: Verdict) -> None:
        """Take one rollout in."""
        self.accepted += verdict.accepted
        self.dropped += not verdict.accepted
        self.mixed += trace.is_mixed and trace.oldest is not None
        if verdict.reason is not None:
            self.reasons[verdict.reason] += 1
        if verdict.accepted and verdict.lag is not None:
            self.max_lag = max(verdict.lag, self.max_lag or 0)
        steps, tokens = np.unique(trace.arrays().lo, return_counts=True)
        for step, count in zip(steps.tolist(), tokens.tolist(), strict=True):
            self.lags[self.version - step if step >= 0 else None] += count

    @property
    def paused_ms(self) -> float | None:
        """The longest pause of a worker in the publication; None = there was none."""
        if self.report is None:
            return None
        return 1e3 * max((r.paused_s for r in self.report.receipts), default=0.0)

    @property
    def histogram(self) -> str:
        """Tokens by lag, such as `0:384 1:128`; `?` is UNKNOWN."""
        known = sorted(lag for lag in self.lags if lag is not None)
        shown = [f"{lag}:{self.lags[lag]}" for lag in known]
        return " ".join([*shown, f"?:{self.lags[None]}"] if None in self.lags else shown)

    def line(self, *, steps: int) -> str:
        """The step in one line, for showing progress."""
        parts = [f"step {self.number:>2}/{steps}"]
        if self.reward is not None:
            parts.append(f"reward {self.reward:.3f}")
        parts.append(f"accepted {self.accepted}/{self.accepted + self.dropped}")
        if self.reasons:
            parts.append(", ".join(f"{reason} {n}" for reason, n in self.reasons.items()))
        if self.report is not None:
            state = "published" if self.report.committed else "NOT published"
            parts.append(
                f"version {self.report.version.step} {state} in {1e3 * self.report.seconds:.0f} ms"
                f" (paused {self.paused_ms:.1f} ms)"
            )
        return "  ".join(parts)


@dataclass(slots=True)
class Record:
    """Everything that a run did so far.

    Attributes:
        workers: how many there are.
        final_version: the newest version that every worker was proved to hold; None = UNKNOWN.
        publications: how many were begun; adopting is none.
        committed: how many of them committed.
        steps: the steps whose rollouts were taken.
        superseded: rollouts that finished and were never taken, since newer ones came.
        stopped_by: the signal that ended it early; None = none did.
    """

    workers: int = 0
    final_version: int | None = None
    publications: int = 0
    committed: int = 0
    steps: list[Step] = field(default_factory=list)
    superseded: int = 0
    stopped_by: int | None = None

    @property
    def reward_first(self) -> float | None:
        """Mean reward of the first step."""
        return self.steps[0].reward if self.steps else None

    @property
    def reward_last(self) -> float | None:
        """Mean reward of the last three steps."""
        rewards = [s.reward for s in self.steps[-_LAST_STEPS:] if s.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None

    def complaint(self) -> str | None:
        """What is wrong with a run that went to its end; None = nothing."""
        if self.committed < self.publications:
            missed = self.publications - self.committed
            return f"{missed} of {self.publications} publications did not commit"
        first, last = self.reward_first, self.reward_last
        if first is not None and last is not None and last - first < RISE:
            return (
                f"the reward did not rise: {first:.3f} in the first step, {last:.3f} in the last "
                f"three; it has to be at least {RISE} more"
            )
        return None

    def table(self) -> str:
        """One line per step under a heading."""
        rows = [_COLUMNS, *(_cells(step) for step in self.steps)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(_aligned(row, widths) for row in rows)

    def summary(self, *, seconds: float) -> dict[str, int | float | None]:
        """The run in ten numbers."""
        lags = [step.max_lag for step in self.steps if step.max_lag is not None]
        return {
            "steps": len(self.steps),
            "final_version": self.final_version,
            "workers": self.workers,
            "committed": self.committed,
            "accepted": sum(step.accepted for step in self.steps),
            "dropped": sum(step.dropped for step in self.steps),
            "max_lag_accepted": max(lags, default=None),
            "reward_first": _rounded(self.reward_first),
            "reward_last": _rounded(self.reward_last),
            "seconds": round(seconds, 3),
        }


def _cells(step: Step) -> tuple[str, ...]:
    return (
        str(step.number),
        str(step.version),
        "-" if step.reward is None else f"{step.reward:.3f}",
        str(step.accepted),
        str(step.dropped),
        str(step.mixed),
        step.histogram,
        "-" if step.paused_ms is None else f"{step.paused_ms:.1f}",
    )


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    columns = zip(_COLUMNS, cells, widths, strict=True)
    return "  ".join(
        cell.ljust(width) if name in _LEFT else cell.rjust(width) for name, cell, width in columns
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
