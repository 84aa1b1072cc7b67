"""Blocking work that the event loop can walk away from.

The rule of this file: threads are daemons of their own. An executor's threads are joined when
the process exits, and one that blocks for ever would keep it from exiting. These get a second:
an interpreter that ends under a thread on its way out of foreign code takes the process down.
"""

import asyncio
import atexit
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

__all__ = ("Once", "call_from_thread", "run_in_thread", "start_thread")

T = TypeVar("T")

_GRACE_S = 1.0


class Once(Generic[T]):
    """What several threads need and the first one makes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: list[T] = []

    def get(self, make: Callable[[], T]) -> T:
        """What the first `make` returned; the others wait for it. One that raises is no first."""
        with self._lock:
            if not self._made:
                self._made.append(make())
            return self._made[0]


def call_from_thread(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    """Have the loop call `function`; a loop that is gone hears nothing any more."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function)


def start_thread(function: Callable[[], T], *, name: str) -> "asyncio.Future[T]":
    """What `function` returns or raises in a new thread called `name`.

    Cancelling the future leaves the thread to itself: end what it waits for.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()
    # Nobody has to ask for the outcome: asyncio logs errors that were never looked at.
    outcome.add_done_callback(lambda done: done.cancelled() or done.exception())

    def run() -> None:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - whoever waits raises it
            call_from_thread(loop, partial(_fail, outcome, error))
        else:
            call_from_thread(loop, partial(_succeed, outcome, result))
        finally:
            atexit.unregister(thread.join)

    thread = threading.Thread(target=run, name=name, daemon=True)
    atexit.register(thread.join, _GRACE_S)
    thread.start()
    return outcome


async def run_in_thread(function: Callable[[], T], *, name: str) -> T:
    """As `start_thread`, awaited."""
    return await start_thread(function, name=name)


def _succeed(outcome: asyncio.Future[T], result: T) -> None:
    if not outcome.done():
        outcome.set_result(result)


def _fail(outcome: asyncio.Future[T], error: BaseException) -> None:
    if not outcome.done():
        outcome.set_exception(error)
