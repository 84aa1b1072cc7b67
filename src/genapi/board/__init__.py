"""The board: one small record that outlives every publisher.

Publishers take it over, write what they are about to do and what they have done; every other
process reads which version is committed, and which workers to keep away from.

What a board does is in `base`, the three kinds in `memory`, `file` and `redis`, what holds one of a
user's own to that in `guarded`, what publishers do with one in `lease`, and the record in
`genapi.types.board`. The rule of this file: it opens boards, and only here is one chosen by its
URL.
"""

from genapi.board.base import NOTHING, Board, Reading, Token, wait_for_change
from genapi.board.file import FileBoard
from genapi.board.lease import Lease, new_holder, take_epoch
from genapi.board.memory import MemoryBoard
from genapi.errors import ConfigError
from genapi.types.board import parse_board

__all__ = (
    "NOTHING",
    "Board",
    "FileBoard",
    "Lease",
    "MemoryBoard",
    "Reading",
    "Token",
    "new_holder",
    "open_board",
    "take_epoch",
    "wait_for_change",
)


def open_board(board: str | Board) -> Board:
    """The board that a URL names; one that is a board already is returned as it is.

    Nothing is contacted yet. Whoever opened a board closes it, with `aclose`.

    Args:
        board: `file:/DIRECTORY`, `redis://HOST:PORT/DB`, `rediss://HOST:PORT/DB`, or a board.

    Raises:
        ConfigError: the URL is none of these, or the `redis` extra is not installed.
    """
    if not isinstance(board, str):
        return board
    address = parse_board(board)
    if address.scheme == "file":
        return FileBoard(address.path)
    try:
        from genapi.board.redis import RedisBoard  # noqa: PLC0415 - redis is an extra
    except ImportError as error:
        if error.name != "redis":
            raise
        raise ConfigError(
            "a redis:// board needs redis-py: install genapi with its extra 'redis'"
        ) from error
    return RedisBoard(board)
