"""A board of the user's own, whose errors and silence are those that a board may have.

The rule of this file: whatever a board does, who calls it hears in time, and of an error of
genapi's that names the board.
"""

from collections.abc import Awaitable
from typing import TypeVar

import anyio

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

    def __repr__(self) -> str:
        return repr(self._board)

    async def read(self) -> Reading:
        """The newest record."""
        return await self._heard(self._board.read(), phase="not_sent")

    async def compare_and_set(self, token: Token, new: BoardState) -> Token | None:
        """Write `new` if the record is still the one that `token` was read with."""
        return await self._heard(self._board.compare_and_set(token, new), phase="may_have_run")

    async def aclose(self) -> None:
        """Let go of what the board holds."""
        await self._heard(self._board.aclose(), phase="may_have_run")

    async def _heard(self, asked: Awaitable[T], *, phase: Phase) -> T:
        try:
            with anyio.move_on_after(self._timeout_s):
                return await asked
        except GenAPIError:
            raise
        except Exception as error:
            why = f"board {self._board!r} failed ({type(error).__name__}: {error})"
            raise TransportError(why, phase=phase) from error
        late = f"board {self._board!r} gave no answer within {self._timeout_s:g} s"
        raise TransportError(late, phase=phase)
