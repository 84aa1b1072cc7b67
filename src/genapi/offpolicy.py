"""Whether a sample may still be trained on: `OffPolicyWindow` and its verdict.

The rule of this file: staleness is judged when a sample is consumed, from versions the trace
names (intervals by their older end). An UNKNOWN version is stale.
"""

from enum import StrEnum
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from genapi.types.arguments import Index
from genapi.types.base import BoolMask, Value
from genapi.types.policy import (
    PolicyTrace,
    PolicyVersion,
    TraceSource,
    version_given,
    version_lag,
)
from genapi.types.response import GenerateOutput, GenerateResponse

__all__ = ("DropReason", "OffPolicyWindow", "Verdict")

BoolArray = npt.NDArray[np.bool_]


class DropReason(StrEnum):
    """Why a sample, or part of it, is not trained on."""

    STALE = "stale"
    UNKNOWN_VERSION = "unknown_version"
    IMPURE = "impure"
    INCOMPLETE = "incomplete"


class Verdict(Value):
    """What an `OffPolicyWindow` says of one sample.

    Attributes:
        accepted: whether the sample counts.
        lag: steps from the version it was judged by to the consumer's; None = UNKNOWN.
        token_mask: read-only bool of shape (tokens,); True = train on this token.
        reason: what was found wrong, also when the window accepts it; None = nothing.
    """

    accepted: bool
    lag: int | None
    token_mask: BoolMask
    reason: DropReason | None = None


class OffPolicyWindow(Value):
    """How old a sample may be, and what happens to an older one.

    Attributes:
        max_lag: largest accepted lag in steps; 0 with `require_pure` is strictly on-policy.
        on_stale: what happens to a sample with stale tokens. `drop`: it does not count. `mask`:
            its stale tokens are masked, and it counts if any token is left. `withhold`: it counts
            (for a group's baseline, say) with every token masked. `keep`: it is trained on whole.
        require_pure: accept only samples of one version whose context is of that version too.
        basis: what the lag is counted from. `oldest`: the oldest token. `start`: the first
            token, whose version stands for the whole sample. `per_token`: every token for
            itself, so that `drop` drops tokens and not samples, as `mask` does; the lag is that
            of the oldest token kept.
    """

    max_lag: Annotated[int, Field(ge=0, strict=True), Index]
    on_stale: Literal["drop", "mask", "keep", "withhold"] = "drop"
    require_pure: bool = False
    basis: Literal["oldest", "start", "per_token"] = "oldest"

    def judge(
        self,
        sample: GenerateOutput | PolicyTrace | GenerateResponse,
        consumer_version: int | PolicyVersion,
    ) -> Verdict:
        """The verdict on one sample.

        Args:
            sample: an output, a trace, or a reply with exactly one output.
            consumer_version: the version whose gradient is computed.

        Raises:
            ValueError: the reply has more than one output.
            ConfigError: the version is neither a step nor a version.
        """
        consumer_version = version_given("consumer_version", consumer_version)
        output = sample.output if isinstance(sample, GenerateResponse) else sample
        trace = output if isinstance(output, PolicyTrace) else output.policy
        tokens = len(trace)
        lag = self._lag(trace, consumer_version)
        if isinstance(output, GenerateOutput) and not output.is_complete:
            return _rejected(tokens, lag, DropReason.INCOMPLETE)
        if trace.source == TraceSource.FROZEN:
            return Verdict(accepted=True, lag=0, token_mask=_mask(tokens, value=True))
        if self.require_pure and not trace.is_pure:
            unknown = trace.oldest is None
            return _rejected(
                tokens, lag, DropReason.UNKNOWN_VERSION if unknown else DropReason.IMPURE
            )
        fresh = self._fresh(trace, consumer_version)
        if tokens and fresh.all():
            return Verdict(accepted=True, lag=lag, token_mask=fresh)
        reason = DropReason.UNKNOWN_VERSION if lag is None else DropReason.STALE
        return self._stale(trace, consumer_version, fresh, lag, reason)

    def _lag(self, trace: PolicyTrace, consumer: int | PolicyVersion) -> int | None:
        if self.basis == "start" and trace.spans and trace.source != TraceSource.FROZEN:
            return version_lag(trace.spans[0].lo, consumer)
        return trace.lag(consumer)

    def _fresh(self, trace: PolicyTrace, consumer: int | PolicyVersion) -> BoolArray:
        first = trace.spans[0].lo if trace.spans else None
        mask = np.zeros(len(trace), dtype=np.bool_)
        for span in trace.spans:
            lag = version_lag(first if self.basis == "start" else span.lo, consumer)
            mask[span.start : span.end] = lag is not None and lag <= self.max_lag
        return mask

    def _stale(
        self,
        trace: PolicyTrace,
        consumer: int | PolicyVersion,
        fresh: BoolArray,
        lag: int | None,
        reason: DropReason,
    ) -> Verdict:
        tokens = len(trace)
        if self.on_stale == "keep" and tokens:
            return Verdict(
                accepted=True, lag=lag, token_mask=_mask(tokens, value=True), reason=reason
            )
        if self.on_stale == "withhold" and tokens:
            return Verdict(
                accepted=True, lag=lag, token_mask=_mask(tokens, value=False), reason=reason
            )
        by_token = self.on_stale == "mask" or (
            self.on_stale == "drop" and self.basis == "per_token"
        )
        if by_token and fresh.any():
            kept = [version_lag(s.lo, consumer) for s in trace.spans if fresh[s.start]]
            oldest = max(k for k in kept if k is not None)
            return Verdict(accepted=True, lag=oldest, token_mask=fresh, reason=reason)
        return _rejected(tokens, lag, reason)


def _mask(tokens: int, *, value: bool) -> BoolArray:
    return np.full(tokens, value, dtype=np.bool_)


def _rejected(tokens: int, lag: int | None, reason: DropReason) -> Verdict:
    return Verdict(accepted=False, lag=lag, token_mask=_mask(tokens, value=False), reason=reason)
