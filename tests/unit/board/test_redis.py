"""A board on a real redis-server: replies that get lost, servers that are away or refuse."""

import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import anyio
import pytest
from anyio import fail_after
from anyio.abc import SocketAttribute, SocketStream
from redis.asyncio import Redis

from genapi.board import NOTHING, Board, Token, open_board, take_epoch
from genapi.board.redis import RedisBoard
from genapi.errors import ConfigError, ReplyError, SupersededError, TransportError
from genapi.types.board import BoardState, BoardWorker
from genapi.types.policy import PolicyVersion
from tests.support.redis_server import redis_server

LIMIT_S = 30
HUNG_UP = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)
Lost = Literal["request", "reply"]


def state(epoch: int) -> BoardState:
    return BoardState(epoch=epoch, holder=f"holder {epoch}")


async def write(board: Board, token: Token, epoch: int) -> Token:
    written = await board.compare_and_set(token, state(epoch))
    assert written is not None
    return written


@dataclass
class Proxy:
    """Stands between a board and its server, and loses requests to write or their replies."""

    port: int
    lost: list[Lost] = field(default_factory=list)
    meanwhile: Callable[[], Awaitable[None]] | None = None

    async def carry(self, client: SocketStream) -> None:
        async with (
            client,
            await anyio.connect_tcp("127.0.0.1", self.port) as server,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(self._replies, server, client)
            await self._requests(client, server)
            tasks.cancel_scope.cancel()

    async def _requests(self, client: SocketStream, server: SocketStream) -> None:
        while data := await received(client):
            if b"EVAL" in data and self.lost:
                while not data.endswith(b"}\r\n"):
                    data += await received(client)
                await self._lose(self.lost.pop(0), data)
                return
            await server.send(data)

    async def _replies(self, server: SocketStream, client: SocketStream) -> None:
        while data := await received(server):
            await client.send(data)

    async def _lose(self, what: Lost, request: bytes) -> None:
        if what == "reply":
            async with await anyio.connect_tcp("127.0.0.1", self.port) as server:
                await server.send(request)
                await server.receive()
        if self.meanwhile is not None:
            await self.meanwhile()


async def received(stream: SocketStream) -> bytes:
    try:
        return await stream.receive()
    except HUNG_UP:
        return b""


@asynccontextmanager
async def behind(proxy: Proxy, key: str) -> AsyncIterator[Board]:
    """A board that reaches its server through the proxy."""
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
    port = listener.extra_attributes[SocketAttribute.local_port]()
    with fail_after(LIMIT_S):
        async with listener, anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, proxy.carry)
            board = RedisBoard(f"redis://127.0.0.1:{port}/0?key={key}", timeout_s=5)
            try:
                yield board
            finally:
                await board.aclose()
                tasks.cancel_scope.cancel()


@pytest.fixture
def key() -> str:
    return f"test:{uuid.uuid4().hex}"


@pytest.fixture
async def direct(redis_port: int, key: str) -> AsyncIterator[Board]:
    board = open_board(f"redis://127.0.0.1:{redis_port}/0?key={key}")
    yield board
    await board.aclose()


@pytest.fixture
async def client(redis_port: int) -> AsyncIterator[Redis]:
    async with Redis(host="127.0.0.1", port=redis_port) as client:
        yield client


@pytest.mark.parametrize("lost", [["reply"], ["request"], ["request", "reply", "reply"]])
async def test_a_write_whose_reply_was_lost_counts_once(
    redis_port: int, key: str, direct: Board, lost: list[Lost]
) -> None:
    async with behind(Proxy(redis_port, lost), key) as board:
        token = await board.compare_and_set(NOTHING, state(1))
        assert await direct.read() == (state(1), token)
        assert token is not None
        assert token.generation == 1


async def test_a_write_that_is_lost_every_time_has_an_unknown_outcome(
    redis_port: int, key: str, direct: Board
) -> None:
    async with behind(Proxy(redis_port, ["request"] * 9), key) as board:
        with pytest.raises(TransportError, match=key) as caught:
            await board.compare_and_set(NOTHING, state(1))
    assert caught.value.phase == "may_have_run"
    assert await direct.read() == (None, NOTHING)


async def test_a_write_whose_reply_was_lost_is_known_though_somebody_wrote_after_it(
    redis_port: int, key: str, direct: Board
) -> None:
    async def overtake() -> None:
        await write(direct, (await direct.read()).token, 2)

    async with behind(Proxy(redis_port, ["reply"], overtake), key) as board:
        token = await board.compare_and_set(NOTHING, state(1))
    assert token is not None
    found = await direct.read()
    assert (found.state, found.token.generation) == (state(2), 2)


async def test_whose_the_write_before_the_last_was_cannot_be_seen_any_more(
    redis_port: int, key: str, direct: Board
) -> None:
    async def overtake() -> None:
        token = await write(direct, (await direct.read()).token, 2)
        await write(direct, token, 3)

    async with behind(Proxy(redis_port, ["reply"], overtake), key) as board:
        with pytest.raises(TransportError, match="3 is the newest") as caught:
            await board.compare_and_set(NOTHING, state(1))
    assert caught.value.phase == "may_have_run"


async def test_a_write_that_never_arrived_loses_to_one_that_did(
    redis_port: int, key: str, direct: Board
) -> None:
    async def overtake() -> None:
        await write(direct, NOTHING, 2)

    async with behind(Proxy(redis_port, ["request"], overtake), key) as board:
        assert await board.compare_and_set(NOTHING, state(1)) is None
    assert (await direct.read()).state == state(2)


@pytest.mark.parametrize("lost", [["reply"], ["request"], ["reply"] * 4, ["request"] * 4])
async def test_a_lease_outlives_lost_replies(
    redis_port: int, key: str, direct: Board, lost: list[Lost]
) -> None:
    proxy = Proxy(redis_port)
    async with behind(proxy, key) as board:
        proxy.lost[:] = lost
        lease = await take_epoch(board, "one")
        assert proxy.lost == []
        proxy.lost[:] = lost
        written = await lease.write(workers=())
        assert proxy.lost == []
        assert await lease.check() == written
    assert (await direct.read()).state == written


async def test_a_server_that_is_away_is_not_waited_for_longer_than_asked() -> None:
    with socket.socket() as nobody:  # bound, and not listening
        nobody.bind(("127.0.0.1", 0))
        board = open_board(f"redis://127.0.0.1:{nobody.getsockname()[1]}/0")
        with fail_after(LIMIT_S):
            for call in (board.read, lambda: board.compare_and_set(NOTHING, state(1))):
                with pytest.raises(TransportError, match="no reply") as caught:
                    await call()
                assert caught.value.phase == "not_sent"
                assert caught.value.refused


async def test_a_server_that_says_nothing_is_not_waited_for_longer_than_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        board = RedisBoard(url, timeout_s=0.05)
        with fail_after(LIMIT_S):
            with pytest.raises(TransportError, match="no reply") as caught:
                await board.compare_and_set(NOTHING, state(1))
            await board.aclose()
    assert caught.value.phase == "may_have_run"


async def test_a_call_that_was_cancelled_leaves_the_board_usable(
    redis_port: int, key: str, direct: Board
) -> None:
    stuck = anyio.Event()

    async def stand_still() -> None:
        stuck.set()
        await anyio.sleep_forever()

    proxy = Proxy(redis_port, ["request"], stand_still)
    async with behind(proxy, key) as board:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(board.compare_and_set, NOTHING, state(1))
            await stuck.wait()
            tasks.cancel_scope.cancel()
        token = await write(board, NOTHING, 2)
        assert await direct.read() == (state(2), token)


async def test_a_record_that_is_gone_supersedes_its_holder(
    direct: Board, client: Redis, key: str
) -> None:
    lease = await take_epoch(direct, "one")
    await client.delete(key)
    with pytest.raises(SupersededError, match="no record; it lost what this one wrote") as caught:
        await lease.check()
    assert (caught.value.holder, caught.value.epoch) == (None, None)
    with pytest.raises(SupersededError, match="no record"):
        await lease.write(workers=())
    assert await direct.read() == (None, NOTHING)


async def test_a_board_that_went_back_is_brought_forward_by_the_next_write(
    direct: Board, client: Redis, key: str
) -> None:
    lease = await take_epoch(direct, "one", "r")
    before = await lease.write(committed=PolicyVersion(run="r", step=1))
    saved = await client.dump(key)
    assert saved is not None
    await lease.write(committed=PolicyVersion(run="r", step=2))
    await client.restore(key, 0, saved, replace=True)
    assert await lease.check() == before
    written = await lease.write(workers=[BoardWorker(id="vllm/a")])
    assert written.committed == PolicyVersion(run="r", step=2)
    assert (await direct.read()).state == written


async def test_another_programs_key_is_a_mistake_in_the_configuration(
    direct: Board, client: Redis, key: str
) -> None:
    await client.set(key, "mine")
    with pytest.raises(ConfigError, match="another program's"):
        await direct.read()
    with pytest.raises(ConfigError, match="another program's"):
        await direct.compare_and_set(NOTHING, state(1))
    assert await client.get(key) == b"mine"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"generation": "1", "nonce": "a"}, "does not hold a board's record"),
        ({"generation": "one", "nonce": "a", "state": "{}"}, "does not hold a board's record"),
        ({"generation": "1", "nonce": "a", "state": "{"}, "holds no JSON"),
    ],
)
async def test_a_record_that_cannot_be_read_is_an_error_that_names_its_key(
    direct: Board, client: Redis, key: str, fields: dict[str, str], said: str
) -> None:
    for name, value in fields.items():
        await client.execute_command("HSET", key, name, value)  # type: ignore[no-untyped-call]
    with pytest.raises(ReplyError, match=said) as caught:
        await direct.read()
    assert key in str(caught.value)


async def test_an_answer_that_is_an_error_is_reported_as_one(tmp_path: Path, key: str) -> None:
    with redis_server(tmp_path, "--min-replicas-to-write", "1") as port:
        board = open_board(f"redis://127.0.0.1:{port}/0?key={key}")
        with pytest.raises(ReplyError, match="NOREPLICAS"):
            await board.compare_and_set(NOTHING, state(1))
        assert await board.read() == (None, NOTHING)
        await board.aclose()


async def test_a_password_is_looked_up_where_it_is_needed_and_shown_nowhere(
    tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "redis://127.0.0.1:{port}/0?password=env:BOARD_PASSWORD&key=" + key
    with redis_server(tmp_path, "--requirepass", "hush") as port:
        for password in ("", "s3same"):
            monkeypatch.setenv("BOARD_PASSWORD", password)
            board = open_board(url.format(port=port))
            with pytest.raises(ConfigError) as caught:
                await board.read()
            await board.aclose()
            assert "s3same" not in str(caught.value)
        monkeypatch.setenv("BOARD_PASSWORD", "hush")
        board = open_board(url.format(port=port))
        assert await board.read() == (None, NOTHING)
        assert "hush" not in repr(board)
        await board.aclose()
