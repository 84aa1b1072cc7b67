"""When a generation is sent again, and after how long. The clock and the chance are arguments."""

import math
from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genapi.errors import (
    AuthError,
    GenAPIError,
    NotReadyError,
    OverloadedError,
    OverlongPromptError,
    ProviderError,
    ReplyError,
    TransportError,
)
from genapi.types.config import RetryPolicy
from genapi.wire.retry import retry_after_s, retry_wait_s

NOW = 1_800_000_000.0
POLICY = RetryPolicy(max_attempts=3, backoff_s=0.5, max_backoff_s=8, jitter=0.25)


def overloaded(retry_after: float | None) -> OverloadedError:
    error = OverloadedError("busy", status=503)
    error.retry_after_s = retry_after
    return error


def wait(error: GenAPIError, *, attempt: int = 1, chance: float = 0.0) -> float | None:
    return retry_wait_s(error, POLICY, attempt=attempt, chance=chance)


@pytest.mark.case("RETRY-01")
@pytest.mark.parametrize(
    ("headers", "asked", "waits"),
    [
        ({"retry-after": "2"}, 2.0, 2.0),
        ({"retry-after": "0"}, None, 0.5),
        ({"retry-after": "-1"}, None, 0.5),
        ({"retry-after": "nan"}, None, 0.5),
        ({"retry-after": "inf"}, None, 0.5),
        ({"retry-after": "abc"}, None, 0.5),
        ({"retry-after": ""}, None, 0.5),
        ({"retry-after": "600"}, 600.0, None),
        ({"retry-after": formatdate(NOW + 3, usegmt=True)}, 3.0, 3.0),
        ({"retry-after": formatdate(NOW - 3, usegmt=True)}, None, 0.5),
        ({"retry-after-ms": "250"}, 0.25, 0.25),
        ({"retry-after-ms": "250", "retry-after": "2"}, 0.25, 0.25),
        ({"retry-after-ms": "junk", "retry-after": "2"}, 2.0, 2.0),
        ({}, None, 0.5),
    ],
    ids=str,
)
def test_a_servers_advice_is_followed_when_it_is_usable(
    headers: dict[str, str], asked: float | None, waits: float | None
) -> None:
    found = retry_after_s(headers, now=NOW)
    assert found == (None if asked is None else pytest.approx(asked))
    assert wait(overloaded(found)) == (None if waits is None else pytest.approx(waits))


@given(st.text(), st.text())
def test_no_text_of_a_server_is_an_error_or_a_useless_wait(first: str, second: str) -> None:
    found = retry_after_s({"retry-after-ms": first, "retry-after": second}, now=NOW)
    assert found is None or (math.isfinite(found) and found > 0)


@pytest.mark.parametrize(
    "date",
    [
        "Fri, 31 Dec 9999 23:59:59 GMT",
        "Mon, 01 Jan 0001 00:00:00 +2359",
        "Mon, 99999999999999999999 Jan 2020 00:00:00 GMT",
        "Mon, 01 Jan 99999999999999999999 00:00:00 GMT",
        "Fri, 15 Jan 2027 08:00:03",
    ],
)
def test_no_date_of_a_server_is_an_error(date: str) -> None:
    found = retry_after_s({"retry-after": date}, now=NOW)
    assert found is None or found > 0


def test_own_waits_double_up_to_the_limit() -> None:
    policy = RetryPolicy(max_attempts=10, backoff_s=0.5, max_backoff_s=8)
    error = overloaded(None)
    waits = [retry_wait_s(error, policy, attempt=n, chance=0.0) for n in range(1, 10)]
    assert waits == [0.5, 1, 2, 4, 8, 8, 8, 8, 8]


def test_chance_shortens_own_waits_by_no_more_than_the_jitter() -> None:
    assert wait(overloaded(None), chance=0.0) == 0.5
    assert wait(overloaded(None), chance=0.999) == pytest.approx(0.375, abs=0.001)
    assert wait(overloaded(2.0), chance=0.999) == 2.0


def test_the_last_attempt_is_the_last() -> None:
    assert wait(overloaded(None), attempt=2) == 1.0
    assert wait(overloaded(None), attempt=3) is None
    assert wait(overloaded(1.0), attempt=3) is None


def test_waits_of_many_attempts_are_finite() -> None:
    policy = RetryPolicy(max_attempts=10**6)
    assert retry_wait_s(overloaded(None), policy, attempt=5000, chance=0.0) == 8.0


def test_a_server_that_is_not_ready_is_asked_again() -> None:
    error = NotReadyError("paused", status=503)
    assert wait(error) == 0.5
    error.retry_after_s = 4.0
    assert wait(error) == 4.0


@pytest.mark.parametrize("phase", ["not_sent", "may_have_run", "answered"])
def test_a_lost_reply_is_asked_for_again_only_where_the_policy_allows_it(phase: str) -> None:
    careful = POLICY.model_copy(update={"retry_lost_replies": False})
    error = TransportError("lost", phase=phase)  # type: ignore[arg-type]
    assert retry_wait_s(error, POLICY, attempt=1, chance=0.0) == 0.5
    again = retry_wait_s(error, careful, attempt=1, chance=0.0)
    assert again == (0.5 if phase == "not_sent" else None)


@pytest.mark.parametrize(
    "error",
    [
        ProviderError("bad", status=400),
        ProviderError("broken", status=500),
        AuthError("no", status=401),
        OverlongPromptError("long", status=400),
        ReplyError("nonsense"),
    ],
    ids=repr,
)
def test_what_sending_again_does_not_mend_is_not_sent_again(error: GenAPIError) -> None:
    assert wait(error) is None


def test_a_wait_that_a_server_asks_for_may_be_as_long_as_the_policy_says() -> None:
    policy = RetryPolicy(max_retry_after_s=3.0)
    for asked, wait in ((3.0, 3.0), (3.1, None)):
        error = OverloadedError("later", status=429)
        error.retry_after_s = asked
        assert retry_wait_s(error, policy, attempt=1, chance=0.5) == wait
