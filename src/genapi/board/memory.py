"""`MemoryBoard`: a board inside one process.

The rule of this file: any thread and any event loop of the process may use it, and nobody waits.
"""

import threading
import uuid

from genapi.board.base import NOTHING, Reading, Token
from genapi.types.board import BoardState

__all__ = ("MemoryBoard",)


class MemoryBoard:
    """A board for the publishers and fleets of one process; it ends with the object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reading = Reading(None, NOTHING)

    async def read(self) -> Reading:
        """The newest record."""
        return self._reading

    async def compare_and_set(self, token: Token, new: BoardState) -> Token | None:
        """Write `new` if the record is still the one that `token` was read with."""
        with self._lock:
            if token != self._reading.token:
                return None
            token = Token(token.generation + 1, uuid.uuid4().hex)
            self._reading = Reading(new, token)
            return token

    async def aclose(self) -> None:
        """Do nothing: whoever else has the board goes on using it."""
