"""What `min_version` and `exact_version` ask for, and whether a worker or a reply meets it.

The rule of this file: what is UNKNOWN meets nothing, and a version that has passed never returns,
because labels only advance.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from genapi.errors import ConfigError
from genapi.types.policy import PolicyTrace, PolicyVersion, parse_label
from genapi.types.request import GenerateRequest

__all__ = ("Bound", "bounds_of", "describe")


@dataclass(frozen=True, slots=True)
class Bound:
    """One of the two bounds on the policy behind a reply.

    Attributes:
        name: which field of the request asks for it.
        step: the step.
        run: whose step it is; None = of the run that the workers' labels will name.
        attempt: which attempt, where a whole version was asked for exactly; None = any.
    """

    name: Literal["min_version", "exact_version"]
    step: int
    run: str | None
    attempt: int | None = None

    def __str__(self) -> str:
        run = "" if self.run is None else f" of run {self.run!r}"
        attempt = "" if self.attempt is None else f", attempt {self.attempt}"
        return f"{self.name}={self.step}{attempt}{run}"

    def admits(self, version: PolicyVersion | None) -> bool:
        """Whether tokens of that version are what was asked for."""
        if version is None or self.run not in (None, version.run):
            return False
        if self.name == "min_version":
            return version.step >= self.step
        return version.step == self.step and self.attempt in (None, version.attempt)

    def covers(self, trace: PolicyTrace) -> bool:
        """Whether every token of the trace is what was asked for."""
        if self.name == "min_version":
            return all(self.admits(span.lo) for span in trace.spans)
        return all(self.admits(span.lo) and self.admits(span.hi) for span in trace.spans)

    def is_past(self, version: PolicyVersion | None) -> bool:
        """Whether a worker of that version can never again make what was asked for."""
        if self.name == "min_version" or version is None or self.run not in (None, version.run):
            return False
        if version.step == self.step and self.attempt is not None:
            return version.attempt > self.attempt
        return version.step > self.step

    def is_beyond(self, last: PolicyVersion) -> bool:
        """Whether only a newer version than `last` could make what was asked for."""
        if self.run not in (None, last.run):
            return False
        if last.step == self.step and self.attempt is not None:
            return self.attempt > last.attempt
        return self.step > last.step


def bounds_of(
    request: GenerateRequest, *, run: str | None, labels: Iterable[object]
) -> tuple[Bound, ...]:
    """The bounds that a request asks for.

    Args:
        request: the request.
        run: the fleet's run; None = not known yet, and then a step is one of the run that the
            labels name.
        labels: the workers' labels.

    Raises:
        ConfigError: a bound names another run than the fleet's, or a step could be of several.
    """
    bounds = []
    if request.min_version is not None:
        bounds.append(_bound("min_version", request.min_version, run, labels))
    if request.exact_version is not None:
        bounds.append(_bound("exact_version", request.exact_version, run, labels))
    return tuple(bounds)


def _bound(
    name: Literal["min_version", "exact_version"],
    wanted: int | PolicyVersion,
    run: str | None,
    labels: Iterable[object],
) -> Bound:
    if not isinstance(wanted, PolicyVersion):
        return Bound(name, wanted, run or _run_of(labels))
    if run is not None and wanted.run != run:
        message = f"{name} {wanted} is of run {wanted.run!r}, but the fleet's run is {run!r}"
        raise ConfigError(message)
    return Bound(name, wanted.step, wanted.run, wanted.attempt if name == "exact_version" else None)


def describe(trace: PolicyTrace) -> str:
    """The versions of a trace in the order of its tokens, for messages."""
    names = [
        str(span.lo) if span.is_attested else f"{span.lo or 'UNKNOWN'}..{span.hi or 'UNKNOWN'}"
        for span in trace.spans
    ]
    return " then ".join(dict.fromkeys(names))


def _run_of(labels: Iterable[object]) -> str | None:
    runs = {version.run for label in labels if (version := parse_label(label)) is not None}
    if len(runs) > 1:
        message = (
            f"the workers' labels name several runs ({', '.join(sorted(runs))}), so a step alone "
            "names no version: connect with run=..., or give a PolicyVersion"
        )
        raise ConfigError(message)
    return runs.pop() if runs else None
