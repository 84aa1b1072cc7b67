"""Things that wait inside an engine: an effect for its turn, a pause for an empty batch."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ("Drain", "Turn")

T = TypeVar("T")


class Turn(Generic[T]):
    """An effect that waits for the step in flight; it runs even if its caller is gone by then."""

    def __init__(self, effect: Callable[[], T]) -> None:
        self._effect = effect
        self.result: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def run(self) -> None:
        """Take effect and tell the caller."""
        try:
            value = self._effect()
        # the error is the caller's to handle, whatever it is
        except Exception as error:  # noqa: BLE001
            self.fail(error)
        else:
            if not self.result.done():
                self.result.set_result(value)

    def fail(self, error: Exception) -> None:
        """Tell the caller that it will not happen."""
        if not self.result.done():
            self.result.set_exception(error)
            self.result.exception()  # seen: a caller that left must not make the loop complain


class Drain:
    """A pause that is complete once nothing runs."""

    def __init__(self, *, clears_cache: bool) -> None:
        self.clears_cache = clears_cache
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def finish(self) -> None:
        """Tell the caller that it is complete."""
        if not self.over.done():
            self.over.set_result(None)

    def fail(self, error: Exception) -> None:
        """Tell the caller that it will not happen."""
        if not self.over.done():
            self.over.set_exception(error)
            self.over.exception()  # seen, as above
