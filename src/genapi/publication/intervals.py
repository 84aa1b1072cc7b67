"""Versions of tokens that nobody attests: intervals from what was read before and after a call.

The rule of this file: order comes from calls that ended before others started, never from a clock.
A read that ended before the request was sent bounds its versions from below, since labels only
advance; a read that started after the last byte came bounds them from above. Where a read is
missing, or a worker's life changed between the two, nothing is known.
"""

from collections.abc import Mapping
from typing import NamedTuple

from genapi.types.ids import WorkerId
from genapi.types.policy import (
    PolicyTrace,
    PolicyVersion,
    Span,
    TraceSource,
    parse_label,
    parse_updating_label,
)

__all__ = ("Interval", "Reading", "Rounds", "Sight", "Sights", "infer", "inferred_trace")


class Sight(NamedTuple):
    """What one read, from its start to its end, showed of one worker.

    Attributes:
        worker: which life of the server answered.
        label: its weight label.
        proved: False when the worker is fenced: its label then says nothing of its weights.
        held: the last label that an earlier read of the same life showed and that named a version.
    """

    worker: WorkerId
    label: object
    proved: bool = True
    held: object = None

    def version(self, run: str | None) -> PolicyVersion | None:
        """The policy it holds; None = UNKNOWN."""
        return parse_label(self.label, run=run) if self.proved else None

    def floor(self, run: str | None) -> PolicyVersion | None:
        """The oldest policy that it may serve from now on: while it is updated, the last one."""
        if not self.proved:
            return None
        updating = parse_updating_label(self.label, run=run) is not None
        return parse_label(self.held if updating else self.label, run=run)

    def ceiling(self, run: str | None) -> PolicyVersion | None:
        """The newest policy that it may have served: while it is updated, that comes next."""
        if not self.proved:
            return None
        return parse_label(self.label, run=run) or parse_updating_label(self.label, run=run)


Sights = Mapping[str, Sight | None]
"""By address, of every worker that may serve a request; None = it could not be read."""


class Reading(NamedTuple):
    """What one read of several workers showed.

    Attributes:
        sights: the workers.
        feed: the highest version, committed or only intended, that a record of versions showed in
            the same read; None = there is no such record, or it shows none.
    """

    sights: Sights
    feed: PolicyVersion | None = None


class Interval(NamedTuple):
    """The versions that may have made some tokens; None = that end is UNKNOWN."""

    lo: PolicyVersion | None = None
    hi: PolicyVersion | None = None


def infer(before: Sights, after: Reading, *, run: str | None) -> Interval:
    """The versions of tokens made between two reads.

    Args:
        before: what reads that were completed before the request was sent showed of every worker
            that may have served it.
        after: what a read that started after the last byte came shows of the same workers.
        run: labels of another run are UNKNOWN; None = any one run.
    """
    if not before or not _same_lives(before, after.sights):
        return Interval()
    lows = [sight.floor(run) for sight in before.values() if sight is not None]
    highs = [sight.ceiling(run) for sight in after.sights.values() if sight is not None]
    if after.feed is not None:
        highs = [after.feed, *[version for version in highs if version is not None]]
    lo, hi = _end(lows, newest=False), _end(highs, newest=True)
    if lo is not None and hi is not None and (lo.run != hi.run or _age(lo) > _age(hi)):
        # Labels that do not advance within one run prove nothing.
        return Interval()
    return Interval(lo, hi)


def _same_lives(before: Sights, after: Sights) -> bool:
    if before.keys() != after.keys():
        return False
    for url, sight in before.items():
        later = after[url]
        if sight is None or later is None or sight.worker != later.worker:
            return False
    return True


def _end(versions: list[PolicyVersion | None], *, newest: bool) -> PolicyVersion | None:
    known = [version for version in versions if version is not None]
    if len(known) != len(versions) or len({version.run for version in known}) != 1:
        return None
    return max(known, key=_age) if newest else min(known, key=_age)


def _age(version: PolicyVersion) -> tuple[int, int]:
    return version.step, version.attempt


def inferred_trace(tokens: int, interval: Interval) -> PolicyTrace:
    """The trace of an output of `tokens` tokens that may all be of any version in the interval."""
    spans = (Span(start=0, end=tokens, lo=interval.lo, hi=interval.hi),) if tokens else ()
    return PolicyTrace(spans=spans, source=TraceSource.INFERRED)


class Rounds:
    """Which read answers whom: the first one that starts after they asked.

    Reads are numbered from 1 and follow one another. Whoever asks while one is under way is
    answered by the next, together with everyone else who asked meanwhile.
    """

    __slots__ = ("ended", "started", "wanted")

    def __init__(self) -> None:
        self.wanted = 0
        self.started = 0
        self.ended = 0

    def ask(self) -> int:
        """The number of the read that answers someone who asks now."""
        self.wanted = self.started + 1
        return self.wanted

    @property
    def is_due(self) -> bool:
        """Whether a read has to start now."""
        return self.started == self.ended and self.wanted > self.started

    def start(self) -> int:
        """Start the next read; returns its number."""
        if not self.is_due:
            raise ValueError("no read is due")
        self.started += 1
        return self.started

    def end(self) -> None:
        """End the read that is under way."""
        if self.started == self.ended:
            raise ValueError("no read is under way")
        self.ended = self.started
