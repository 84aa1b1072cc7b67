"""`Board`: what every backend does, and waiting for one to change.

The rule of this file: a board only compares and sets. What the record means is in `lease`.
"""

from typing import NamedTuple, Protocol

import anyio

from genapi.types.board import BoardState

__all__ = ("NOTHING", "Board", "Reading", "Token", "wait_for_change")


class Token(NamedTuple):
    """Which writing of the record was seen: how many there were, and the mark of the last."""

    generation: int
    nonce: str


class Reading(NamedTuple):
    """What a read found: the state (None = nobody ever wrote one), and the token to write with."""

    state: BoardState | None
    token: Token


NOTHING = Token(0, "")
"""The token of a board that nobody ever wrote to."""


class Board(Protocol):
    """One small record that several processes read, and replace only if nobody else did.

    Passed to `connect`, whatever else it raises, and no answer in time, is a `TransportError`.
    """

    async def read(self) -> Reading:
        """The newest record.

        Raises:
            ConfigError: the board cannot be there: no such directory, no right, a wrong key.
            ReplyError: what is there is no board's record.
            TransportError: it could not be read in time.
        """
        ...

    async def compare_and_set(self, token: Token, new: BoardState) -> Token | None:
        """Write `new` if the record is still the one that `token` was read with.

        Returns:
            The token of the new record; None: somebody else wrote first, and nothing was written.

        Raises:
            ConfigError: as `read`; nothing was written.
            ReplyError: as `read`; nothing was written.
            TransportError: with `phase="not_sent"` nothing was written. With `may_have_run`
                nobody can say yet: read again, and write again with what was read.
        """
        ...

    async def aclose(self) -> None:
        """Let go of connections. The record stays."""
        ...


async def wait_for_change(
    board: Board, token: Token, *, timeout_s: float, poll_s: float = 0.2
) -> Reading | None:
    """The first reading with another token than `token`; None when there was none in time.

    Args:
        board: where to look.
        token: what was seen already.
        timeout_s: how long to look; 0 looks once.
        poll_s: seconds between two looks.

    Raises:
        ConfigError, ReplyError, TransportError: as `Board.read`.
    """
    deadline = anyio.current_time() + timeout_s
    while True:
        reading = await board.read()
        if reading.token != token:
            return reading
        left_s = deadline - anyio.current_time()
        if left_s <= 0:
            return None
        await anyio.sleep(min(poll_s, left_s))
