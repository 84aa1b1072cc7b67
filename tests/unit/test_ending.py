"""What a log says of clean-up that does not end."""

import anyio
import pytest

from genapi.ending import to_the_end

pytestmark = pytest.mark.anyio


async def test_what_does_not_end_within_its_limit_is_left_and_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with anyio.fail_after(30):
        await to_the_end(anyio.sleep_forever, what="the fleet", limit_s=0.01)
    assert "the fleet was not closed within 0.01 s" in caplog.text


async def test_what_does_not_end_is_named_also_where_its_caller_was_cancelled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        await to_the_end(anyio.sleep_forever, what="the fleet", limit_s=0.01)
    assert scope.cancelled_caught
    assert "the fleet was not closed within 0.01 s" in caplog.text


async def test_nothing_is_logged_of_what_ends_or_fails_within_its_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fails() -> None:
        message = "no"
        raise LookupError(message)

    await to_the_end(anyio.lowlevel.checkpoint, what="the fleet", limit_s=30)
    with pytest.raises(LookupError):
        await to_the_end(fails, what="the fleet", limit_s=30)
    assert caplog.text == ""
