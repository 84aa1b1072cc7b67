"""Clean-up that ends, in whichever way its caller is cancelled.

The rule of this file: what has to run is a task of its own. A shield of anyio's holds off its own
scopes, but not `Task.cancel()`, with which asyncio's time limits and groups end their tasks.
"""

import logging
import math
from collections.abc import Awaitable, Callable

import anyio

__all__ = ("to_the_end",)

_log = logging.getLogger(__name__)


async def to_the_end(
    work: Callable[[], Awaitable[object]], *, what: str, limit_s: float = math.inf
) -> None:
    """Run `work` for at most `limit_s` seconds, and be cancelled only when it has ended.

    What it raises is raised. That it did not end within its limit is logged, and said of `what`.
    """
    errors: list[Exception] = []

    async def run() -> None:
        with anyio.move_on_after(limit_s, shield=True) as limit:
            try:
                await work()
            except Exception as error:  # noqa: BLE001 - raised below, and in no group
                errors.append(error)
        if limit.cancelled_caught:
            _log.warning("%s was not closed within %g s; what is left of it is left", what, limit_s)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
    if errors:
        raise errors[0]
