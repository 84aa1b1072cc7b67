"""An event loop whose time passes only when nothing else can happen, and costs nothing then.

Whoever waits for ten seconds gets them at once, and two equal runs take the same course: the
time of the loop jumps to the next timer when no callback is ready. Engines live in that time by
`LoopClock`. Threads that read a weight source are waited for, so that they take no time at all.
"""

import asyncio
import selectors
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

T = TypeVar("T")

_SOURCE = "genapi-weight-source"
_SOURCE_S = 5.0


class StandstillError(Exception):
    """Nothing is ready, no timer runs: whoever waits would wait for ever."""


class SimulatedLoop(asyncio.SelectorEventLoop):
    """A loop with a time of its own, from 0."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now


class _Selector(selectors.BaseSelector):
    """Moves the loop's time instead of waiting."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self._inner = selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        for thread in threading.enumerate():
            if thread.name == _SOURCE:
                thread.join(_SOURCE_S)
        ready = self._inner.select(0)
        if not ready and timeout != 0:
            if timeout is None:
                raise StandstillError
            self._loop.now += max(timeout, 1e-9)  # a wait too short to count must end all the same
        return ready

    def register(
        self, fileobj: "FileDescriptorLike", events: int, data: object = None
    ) -> selectors.SelectorKey:
        return self._inner.register(fileobj, events, data)

    def unregister(self, fileobj: "FileDescriptorLike") -> selectors.SelectorKey:
        return self._inner.unregister(fileobj)

    def modify(
        self, fileobj: "FileDescriptorLike", events: int, data: object = None
    ) -> selectors.SelectorKey:
        return self._inner.modify(fileobj, events, data)

    def close(self) -> None:
        self._inner.close()

    def get_map(self) -> Mapping["FileDescriptorLike", selectors.SelectorKey]:
        return self._inner.get_map()


class LoopClock:
    """The loop's time, as a clock of embedded engines.

    Args:
        loop: whose time; None = the running loop's.
        on_wake: called, with the seconds that were slept, before whoever slept goes on.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop | None = None,
        on_wake: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        self._loop = loop
        self._on_wake = on_wake

    def now(self) -> float:
        return (self._loop or asyncio.get_running_loop()).time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._on_wake(seconds)


def simulate(main: Callable[[], Awaitable[T]]) -> T:
    """What `main` returns, run in a loop of its own."""

    async def run() -> T:
        return await main()

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(run())
