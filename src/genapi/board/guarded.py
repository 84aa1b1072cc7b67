"""A board of the user's own, whose errors and silence are those that a board may have.

The rule of this file: whatever a board does, who calls it hears in time, and of an error of
genapi's that names the board.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from genapi.board.base import Board, Reading, Token
from genapi.errors import GenAPIError, Phase, TransportError
from genapi.types.board import BoardState

__all__ = ("GuardedBoard",)

T = TypeVar("T")


class GuardedBoard:
    """A board, bounded in time, whose errors are `GenAPIError`s."""

    def __init__(self, board: Board, *, timeout_s: float) -> None:
        """Ask for nothing yet.

        Args:
            board: what is asked.
            timeout_s: bound on one operation.
        """
        self._board = board
        self._timeout_s = timeout_s
        self._asked: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        return repr(self._board)

    async def read(self) -> Reading:
        """The newest record."""
        return await self._heard(self._board.read, phase="not_sent")

    async def compare_and_set(self, token: Token, new: BoardState) -> Token | None:
        """Write `new` if the record is still the one that `token` was read with."""
        ask = partial(self._board.compare_and_set, token, new)
        return await self._heard(ask, phase="may_have_run")

    async def aclose(self) -> None:
        """Let go of what the board holds."""
        await self._heard(self._board.aclose, phase="may_have_run")

    async def _heard(self, ask: Callable[[], Awaitable[T]], *, phase: Phase) -> T:
        async def asked() -> T:
            return await ask()

        # A task, since one that waits for a thread ends no sooner than that, cancelled or not.
        task = asyncio.create_task(asked())  # noqa: TID251 - cancelled below, and then left
        self._asked.add(task)
        task.add_done_callback(self._ended)
        try:
            done, _ = await asyncio.wait([task], timeout=self._timeout_s)
        finally:
            task.cancel()
        if not done:
            late = f"board {self._board!r} gave no answer within {self._timeout_s:g} s"
            raise TransportError(late, phase=phase)
        try:
            return task.result()
        except GenAPIError:
            raise
        except (Exception, asyncio.CancelledError) as error:
            why = f"board {self._board!r} failed ({type(error).__name__}: {error})"
            raise TransportError(why, phase=phase) from error

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._asked.discard(task)
        if not task.cancelled():
            task.exception()  # nobody may listen any more
