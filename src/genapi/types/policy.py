"""Which policy made which token: `PolicyVersion`, `Span`, `PolicyTrace`.

The rule of this file: a version is attested by an engine or is an interval with honest ends.
Whatever is not known is None, and None never equals, precedes or follows a version.
"""

import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Annotated, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, Field, model_validator

from genapi.errors import ConfigError
from genapi.types.arguments import Index, whole
from genapi.types.base import Value

__all__ = (
    "ContextRule",
    "PolicyArrays",
    "PolicyTrace",
    "PolicyVersion",
    "Span",
    "TraceSource",
    "is_updating_label",
    "parse_label",
    "parse_updating_label",
)

_RUN = r"[A-Za-z0-9._-]+"
_MOST_STEPS = 10**18
_LABEL = re.compile(rf"genapi:({_RUN}):(0|[1-9][0-9]{{0,17}}):([1-9][0-9]{{0,17}})")
_UPDATING = "!updating"

RunName = Annotated[str, Field(pattern=rf"^{_RUN}$")]


class PolicyVersion(Value):
    """One attempt to put one training step's weights into service.

    Equal means the same attempt. Order and lag look at run and step only, and versions of two
    runs do not compare (`TypeError`).

    Attributes:
        run: names the training run: letters, digits, `.`, `_`, `-`.
        step: the trainer's step, from 0 to 10**18 - 1, so that arrays of int64 hold it.
        attempt: which try to publish this step, from 1.
    """

    run: RunName
    step: Annotated[int, Field(ge=0, lt=_MOST_STEPS, strict=True), Index]
    attempt: Annotated[int, Field(ge=1, lt=_MOST_STEPS, strict=True), Index] = 1

    @property
    def label(self) -> str:
        """The version on the wire: `genapi:<run>:<step>:<attempt>`."""
        return f"genapi:{self.run}:{self.step}:{self.attempt}"

    @property
    def updating_label(self) -> str:
        """The write-ahead label of a worker that is being moved to this version."""
        return self.label + _UPDATING

    def __str__(self) -> str:
        return self.label

    def _step_of(self, other: object) -> int | None:
        return other.step if isinstance(other, PolicyVersion) and other.run == self.run else None

    def __lt__(self, other: object) -> bool:
        step = self._step_of(other)
        return NotImplemented if step is None else self.step < step

    def __le__(self, other: object) -> bool:
        step = self._step_of(other)
        return NotImplemented if step is None else self.step <= step

    def __gt__(self, other: object) -> bool:
        step = self._step_of(other)
        return NotImplemented if step is None else self.step > step

    def __ge__(self, other: object) -> bool:
        step = self._step_of(other)
        return NotImplemented if step is None else self.step >= step


def version_given(name: str, version: object) -> int | PolicyVersion:
    """A version as users pass it: a step as an int, or a `PolicyVersion`.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(version, PolicyVersion):
        return version
    step = whole(name, version, least=0, more=", or a PolicyVersion")
    if step >= _MOST_STEPS:
        raise ConfigError(f"{name}={version!r}: pass a step below 10**18")
    return step


def parse_label(label: object, *, run: str | None = None) -> PolicyVersion | None:
    """The version that a wire label names; None (UNKNOWN) for everything else.

    Args:
        label: what the engine says its weights are: `"default"`, None, a path, a label.
        run: when given, labels of another run are UNKNOWN as well.
    """
    match = _LABEL.fullmatch(label) if isinstance(label, str) else None
    if match is None or (run is not None and match[1] != run):
        return None
    return PolicyVersion(run=match[1], step=int(match[2]), attempt=int(match[3]))


def parse_updating_label(label: object, *, run: str | None = None) -> PolicyVersion | None:
    """The version that a write-ahead label moves its worker to; None for every other label."""
    if not isinstance(label, str) or not label.endswith(_UPDATING):
        return None
    return parse_label(label.removesuffix(_UPDATING), run=run)


def is_updating_label(label: object) -> bool:
    """Whether the label is a write-ahead label: its worker was left in mid-update."""
    return parse_updating_label(label) is not None


ContextRule = Literal["own", "carried", "unknown"]
"""Tokens of a version attended only to keys and values of that version; also to those of earlier
versions in the same output or under the same salt; or it is not known."""


class Span(Value):
    """Tokens `[start, end)` of one output and the versions that may have made them.

    Attributes:
        start: first token, from 0.
        end: one past the last token; more than `start`.
        lo: oldest version that may have made them; None = UNKNOWN.
        hi: newest version that may have made them; `lo == hi` means attested.
        context: oldest version whose keys and values they may have attended to; None = UNKNOWN.
    """

    start: Annotated[int, Field(ge=0)]
    end: Annotated[int, Field(gt=0)]
    lo: PolicyVersion | None = None
    hi: PolicyVersion | None = None
    context: PolicyVersion | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.end <= self.start:
            message = f"a span holds at least one token, got [{self.start}, {self.end})"
            raise ValueError(message)
        if self.lo is not None and self.hi is not None:
            if self.lo.run != self.hi.run:
                message = f"a span lies within one run, got {self.lo} and {self.hi}"
                raise ValueError(message)
            if self.lo > self.hi:
                message = f"lo is newer than hi: {self.lo} > {self.hi}"
                raise ValueError(message)
        return self

    @property
    def is_attested(self) -> bool:
        """Whether exactly one version made these tokens."""
        return self.lo is not None and self.lo == self.hi


class TraceSource(StrEnum):
    """How the versions of a trace are known."""

    ENGINE = "engine"
    INFERRED = "inferred"
    FROZEN = "frozen"


class PolicyArrays(NamedTuple):
    """Per-token steps of a trace, each int64 of shape (tokens,); -1 = UNKNOWN."""

    lo: npt.NDArray[np.int64]
    hi: npt.NDArray[np.int64]
    context: npt.NDArray[np.int64]


def _oldest(versions: Iterable[PolicyVersion | None]) -> PolicyVersion | None:
    known = list(versions)
    if not known or None in known:
        return None
    present = [v for v in known if v is not None]
    return min(present, key=lambda v: v.step) if len({v.run for v in present}) == 1 else None


def _newest(versions: Iterable[PolicyVersion | None]) -> PolicyVersion | None:
    known = list(versions)
    if not known or None in known:
        return None
    present = [v for v in known if v is not None]
    return max(present, key=lambda v: v.step) if len({v.run for v in present}) == 1 else None


class PolicyTrace(Value):
    """The versions behind the tokens of one output, or of several turns joined.

    Attributes:
        spans: contiguous from 0, covering every token; empty when there is no token.
        source: `engine`: the engine attests them; `inferred`: intervals from reads around the
            call; `frozen`: a model that never changes, which is never stale.
    """

    spans: tuple[Span, ...] = ()
    source: Annotated[
        TraceSource | Literal["engine", "inferred", "frozen"], AfterValidator(TraceSource)
    ] = TraceSource.INFERRED

    @model_validator(mode="after")
    def _check(self) -> Self:
        at = 0
        for span in self.spans:
            if span.start != at:
                message = f"spans are contiguous from 0: expected start {at}, got {span.start}"
                raise ValueError(message)
            at = span.end
        return self

    @classmethod
    def unknown(cls, tokens: int) -> Self:
        """A trace of `tokens` tokens of which no version is known."""
        return cls(spans=(Span(start=0, end=tokens),) if tokens else ())

    @classmethod
    def join(cls, traces: Iterable[Self]) -> Self:
        """One trace over the concatenated tokens of several turns, in order."""
        turns = list(traces)
        spans: list[Span] = []
        at = 0
        for turn in turns:
            spans.extend(
                span.model_copy(update={"start": at + span.start, "end": at + span.end})
                for span in turn.spans
            )
            at += len(turn)
        sources = {TraceSource(turn.source) for turn in turns}
        source = sources.pop() if len(sources) == 1 else TraceSource.INFERRED
        return cls(spans=tuple(spans), source=source)

    def __len__(self) -> int:
        """How many tokens the trace covers."""
        return self.spans[-1].end if self.spans else 0

    @property
    def oldest(self) -> PolicyVersion | None:
        """The oldest version that may have made any token; None = UNKNOWN."""
        return _oldest(span.lo for span in self.spans)

    @property
    def newest(self) -> PolicyVersion | None:
        """The newest version that may have made any token; None = UNKNOWN."""
        return _newest(span.hi for span in self.spans)

    @property
    def is_mixed(self) -> bool:
        """Whether more than one version may have made the tokens; UNKNOWN counts as mixed."""
        versions = {v for span in self.spans for v in (span.lo, span.hi)}
        return len(versions) > 1 or None in versions

    @property
    def is_pure(self) -> bool:
        """Whether one version made every token and everything those tokens attended to."""
        if self.source == TraceSource.FROZEN:
            return True
        versions = {v for span in self.spans for v in (span.lo, span.hi, span.context)}
        return len(versions) == 1 and None not in versions

    def at(self, index: int) -> Span:
        """The span of token `index` (negative counts from the end).

        Raises:
            IndexError: there is no such token.
        """
        position = index + len(self) if index < 0 else index
        for span in self.spans:
            if span.start <= position < span.end:
                return span
        message = f"no token {index} in a trace of {len(self)} tokens"
        raise IndexError(message)

    def lag(self, consumer_version: "int | PolicyVersion") -> int | None:
        """Steps from the oldest token's version to the consumer's; None = UNKNOWN.

        Args:
            consumer_version: the version whose gradient is computed. An int is a step of the
                trace's own run; a `PolicyVersion` of another run gives None.

        Raises:
            ConfigError: it is neither a step nor a version.
        """
        consumer_version = version_given("consumer_version", consumer_version)
        if self.source == TraceSource.FROZEN:
            return 0
        return version_lag(self.oldest, consumer_version)

    def arrays(self) -> PolicyArrays:
        """The steps of every token as three arrays."""
        counts = [span.end - span.start for span in self.spans]

        def column(versions: Sequence[PolicyVersion | None]) -> npt.NDArray[np.int64]:
            steps = [-1 if v is None else v.step for v in versions]
            return np.repeat(np.array(steps, dtype=np.int64), counts)

        return PolicyArrays(
            column([s.lo for s in self.spans]),
            column([s.hi for s in self.spans]),
            column([s.context for s in self.spans]),
        )


def version_lag(version: PolicyVersion | None, consumer: int | PolicyVersion) -> int | None:
    """Steps from `version` to `consumer`; None when either run or version is not known."""
    if version is None:
        return None
    if isinstance(consumer, PolicyVersion):
        return consumer.step - version.step if consumer.run == version.run else None
    return consumer - version.step
