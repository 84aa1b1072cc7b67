"""Clean-up that ends, in whichever way its caller is cancelled.

The rule of this file: what has to run is a task of its own. A shield of anyio's holds off its own
scopes, but not `Task.cancel()`, with which asyncio's time limits and groups end their tasks.
"""

import math
from collections.abc import Awaitable, Callable

import anyio

__all__ = ("to_the_end",)


async def to_the_end(work: Callable[[], Awaitable[object]], *, limit_s: float = math.inf) -> bool:
    """Run `work` for at most `limit_s` seconds, and be cancelled only when it has ended.

    Returns whether it ended within its limit; what it raises is raised.
    """
    in_time = False
    errors: list[Exception] = []

    async def run() -> None:
        nonlocal in_time
        with anyio.move_on_after(limit_s, shield=True):
            try:
                await work()
            except Exception as error:  # noqa: BLE001 - raised below, and in no group
                errors.append(error)
            in_time = True

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
    if errors:
        raise errors[0]
    return in_time
