"""Boards of every kind, and a Redis server for those that need one."""

import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from genapi.board import Board, MemoryBoard, open_board
from tests.support.redis_server import redis_server

OpenBoard = Callable[[], Board]


@pytest.fixture(scope="session")
def redis_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a server that all tests share; each has a key of its own."""
    with redis_server(tmp_path_factory.mktemp("redis")) as port:
        yield port


@pytest.fixture
def redis_url(redis_port: int) -> str:
    return f"redis://127.0.0.1:{redis_port}/0?key=test:{uuid.uuid4().hex}"


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    return f"file:{tmp_path / 'board'}"


@pytest.fixture(params=["file", "redis"])
def shared_url(request: pytest.FixtureRequest) -> str:
    """The URL of a board that other processes can open too."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture(params=["memory", "file", "redis"])
def board_source(request: pytest.FixtureRequest) -> str | Board:
    if request.param == "memory":
        return MemoryBoard()
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
async def open_again(board_source: str | Board) -> AsyncIterator[OpenBoard]:
    """Opens the same record once more; what was opened is closed after the test."""
    opened: list[Board] = []

    def open_one() -> Board:
        opened.append(open_board(board_source))
        return opened[-1]

    yield open_one
    for board in opened:
        await board.aclose()


@pytest.fixture
def board(open_again: OpenBoard) -> Board:
    return open_again()
