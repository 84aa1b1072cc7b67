"""`RedisBoard`: a board under one key of a Redis server.

The key holds a hash of generation, nonce, the nonce that it followed, and the state as JSON. A
script compares and sets in one step. A write whose reply was lost is sent again, with its nonce:
the script knows it from the first time.

The rule of this file: redis is used here and nowhere else, and it tries nothing again by itself.
"""

import os
import socket
import uuid
from collections.abc import Sequence
from typing import Any

import anyio
from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from genapi.board.base import NOTHING, Reading, Token
from genapi.credentials import resolve
from genapi.ending import to_the_end
from genapi.errors import ConfigError, ReplyError, TransportError
from genapi.types.address import host_port
from genapi.types.arguments import seconds
from genapi.types.board import BoardState, decode_board, encode_board, parse_board
from genapi.types.config import Key

__all__ = ("RedisBoard",)

_WAITS_S = (0.0, 0.05, 0.15, 0.4)
"""Before each try; a try is one connection, or one command on it."""

_WRITTEN, _REFUSED = b"written", b"refused"

_SWAP = """
local held = redis.call('HMGET', KEYS[1], 'generation', 'nonce', 'after')
local generation, nonce, after = held[1] or '0', held[2] or '', held[3] or ''
if generation == ARGV[3] and nonce == ARGV[4] then return {'written', generation} end
if tonumber(generation) == tonumber(ARGV[3]) + 1 and after == ARGV[4] then
  return {'written', generation}
end
if generation ~= ARGV[1] or nonce ~= ARGV[2] then return {'refused', generation} end
redis.call('HSET', KEYS[1],
  'generation', ARGV[3], 'nonce', ARGV[4], 'after', ARGV[2], 'state', ARGV[5])
return {'written', ARGV[3]}
"""
"""Arguments: the generation and nonce expected, the new ones, the new state."""

_HOPELESS = (
    exceptions.AuthenticationError,
    exceptions.AuthorizationError,
    exceptions.NoPermissionError,
)


class RedisBoard:
    """A board on a Redis server, for several hosts. It belongs to one event loop.

    How durable it is, is the server's setting. A fail-over that loses the last writes takes the
    board back to an earlier record; whoever wrote a lost one is superseded at the next check.
    """

    def __init__(self, url: str, *, timeout_s: float = 10.0) -> None:
        """Contact nobody yet.

        Args:
            url: `redis://HOST:PORT/DB`, `rediss://` for TLS; `?key=` names the key,
                `?username=` and `?password=env:NAME` log in.
            timeout_s: bound on one operation, second tries included.

        Raises:
            ConfigError: the URL is not a Redis board's, or the bound is none.
        """
        self._address = parse_board(url)
        if self._address.scheme == "file":
            raise ConfigError(f"board {url!r} is not redis://HOST:PORT/DB")
        self._timeout_s = seconds("timeout_s", timeout_s)
        self._redis: Redis | None = None

    def __repr__(self) -> str:
        return f"RedisBoard({self._url!r})"

    @property
    def _url(self) -> str:
        at = self._address
        return f"{at.scheme}://{host_port(at.host, at.port)}/{at.db}?key={at.key}"

    async def read(self) -> Reading:
        """The newest record."""
        found = await self._ask("HMGET", self._address.key, "generation", "nonce", "state")
        match found:
            case [None, None, None]:
                return Reading(None, NOTHING)
            case [bytes() as generation, bytes() as nonce, bytes() as state] if (
                generation.isdigit()
            ):
                token = Token(int(generation), nonce.decode("ascii", "replace"))
                return Reading(decode_board(state, source=self._url), token)
        raise ReplyError(f"{self._url} does not hold a board's record", body=repr(found).encode())

    async def compare_and_set(self, token: Token, new: BoardState) -> Token | None:
        """Write `new` if the record is still the one that `token` was read with."""
        mine = Token(token.generation + 1, uuid.uuid4().hex)
        lost: list[BaseException] = []
        verdict, generation = await self._ask(
            "EVAL",
            _SWAP,
            1,
            self._address.key,
            *(token.generation, token.nonce, mine.generation, mine.nonce),
            encode_board(new),
            lost=lost,
        )
        if verdict == _WRITTEN:
            return mine
        if lost and int(generation) > mine.generation:
            message = (
                f"board {self._url}: the reply to writing generation {mine.generation} was lost, "
                f"and {int(generation)} is the newest by now"
            )
            raise TransportError(message, phase="may_have_run") from lost[-1]
        return None

    async def aclose(self) -> None:
        """Close the connections; the next operation opens new ones."""
        client, self._redis = self._redis, None
        if client is not None:
            await to_the_end(client.aclose, what=f"board {self._url}", limit_s=self._timeout_s)

    def _client(self) -> Redis:
        if self._redis is None:
            at = self._address
            password = resolve(Key(at.password) if at.password else None, environment=os.environ)
            limit_s = self._timeout_s / 2  # one connection that hangs leaves time for another
            self._redis = Redis(
                host=at.host,
                port=at.port,
                db=at.db,
                username=at.username,
                password=password,
                ssl=at.scheme == "rediss",
                socket_timeout=limit_s,
                socket_connect_timeout=limit_s,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
            )
        return self._redis

    async def _ask(self, *command: Any, lost: list[BaseException] | None = None) -> Sequence[Any]:
        """The reply to a command, which is sent again while none came.

        Args:
            command: the command; sending it twice has to be as good as once.
            lost: takes the failure of each try after which the command may have run.
        """
        lost = [] if lost is None else lost
        failure: BaseException | None = None
        under_way = False
        with anyio.move_on_after(self._timeout_s):
            for wait_s in _WAITS_S:
                await anyio.sleep(wait_s)
                under_way = True
                try:
                    return await self._execute(*command)
                except (exceptions.RedisError, OSError) as error:
                    failure = error
                    under_way = False
                    if not _is_unsent(error):
                        lost.append(error)
        raise TransportError(
            f"board {self._url}: no reply within {self._timeout_s:g} s ({failure})",
            phase="may_have_run" if lost or under_way else "not_sent",
        ) from failure

    async def _execute(self, *command: Any) -> Sequence[Any]:
        try:
            # redis-py leaves its commands without annotations.
            reply: Sequence[Any] = await self._client().execute_command(*command)  # type: ignore[no-untyped-call]
        except _HOPELESS as error:
            raise ConfigError(f"board {self._url}: {error}") from error
        except exceptions.ResponseError as error:
            raise self._refused(error) from error
        return reply

    def _refused(self, error: exceptions.ResponseError) -> ConfigError | ReplyError:
        text = str(error)
        if "WRONGTYPE" in text:
            return ConfigError(f"board {self._url}: the key is another program's ({text})")
        return ReplyError(f"board {self._url}: {text}")


def _is_unsent(error: BaseException | None) -> bool:
    """Whether no connection came about, so that nothing can have been sent."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError | socket.gaierror):
            return True
        error = error.__cause__ or error.__context__
    return False
