"""Every asynchronous test here ends in bounded time, whatever it waits for."""

import functools
import inspect
from typing import Any

import anyio
import pytest

LIMIT_S = 40.0


def pytest_itemcollected(item: pytest.Item) -> None:
    if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
        item.obj = _bounded(item.obj)


def _bounded(test: Any) -> Any:
    @functools.wraps(test)
    async def bounded(**fixtures: Any) -> None:
        with anyio.fail_after(LIMIT_S):
            await test(**fixtures)

    return bounded
