"""Whether, and after how long, a generation is sent again. Clocks and chance come in as values."""

from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from math import isfinite

from genapi.errors import GenAPIError, NotReadyError, OverloadedError, TransportError
from genapi.types.config import RetryPolicy

__all__ = ("retry_after_s", "retry_wait_s")

_DOUBLINGS = 62
"""No wait doubles more often; keeps a wait of many attempts a number."""


def retry_after_s(headers: Mapping[str, str], *, now: float) -> float | None:
    """The wait in seconds that a server asks for; None when it gives no usable one.

    Args:
        headers: by lower-case name.
        now: wall-clock seconds since the epoch, for the date form.
    """
    for name, scale in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        text = headers.get(name)
        if text is None:
            continue
        try:
            value = float(text) / scale
        except ValueError:
            value = _until(text, now)
        if isfinite(value) and value > 0:
            return value
    return None


def _until(text: str, now: float) -> float:
    try:
        when = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return 0.0
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return (when - datetime.fromtimestamp(now, UTC)).total_seconds()


def retry_wait_s(
    error: GenAPIError, policy: RetryPolicy, *, attempt: int, chance: float
) -> float | None:
    """Seconds to wait before the next sending; None = give up with this error.

    Args:
        error: why the last sending failed.
        policy: the limits.
        attempt: how many sendings there have been, from 1.
        chance: a random number in [0, 1) that spreads the waits.
    """
    if attempt >= policy.max_attempts:
        return None
    asked: float | None = None
    if isinstance(error, OverloadedError | NotReadyError):
        asked = error.retry_after_s
    elif isinstance(error, TransportError):
        if error.phase != "not_sent" and not policy.retry_lost_replies:
            return None
    else:
        return None
    if asked is not None:
        return asked if asked <= policy.max_retry_after_s else None
    wait = min(policy.backoff_s * 2.0 ** min(attempt - 1, _DOUBLINGS), policy.max_backoff_s)
    return wait * (1 - policy.jitter * chance)
