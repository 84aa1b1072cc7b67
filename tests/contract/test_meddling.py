"""What arrives, and what comes back, when a test lets a call go wrong on its way to a server."""

import anyio
import pytest

from genapi.errors import TransportError
from genapi.testing.contract.meddling import Action, Meddling, Trouble
from genapi.transports.base import Plane
from genapi.transports.http_aiohttp import AiohttpTransport
from genapi.wire.http import HTTPCall
from tests.support.raw_server import Exchange, serving

pytestmark = pytest.mark.anyio

SENT, OTHER = b'{"op":"begin","n":1}', b'{"op":"end"}'
RAN = "may_have_run"


async def count(exchange: Exchange) -> None:
    await exchange.reply(200, b'{"arrived":%d}' % exchange.request.body.count(b"n"))


def nobody(worker: int) -> None:
    raise AssertionError(f"worker {worker} was to go on")


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("action", "arrived", "came_back"),
    [
        ("lose_reply", [SENT], RAN),
        ("swallow", [], RAN),
        ("refuse", [], "not_sent"),
        ("error", [], 503),
        ("change", [b'{"op":"begin","n":2}'], 200),
        ("twice", [SENT, SENT], 200),
    ],
)
async def test_a_call_that_goes_wrong_arrives_so_often_and_comes_back_so(
    action: Action, arrived: list[bytes], came_back: str | int, *, streamed: bool
) -> None:
    told: list[bytes | None] = []
    with anyio.fail_after(5):
        async with serving(count) as server:
            meddling = Meddling(
                AiohttpTransport(Plane()), nobody, nobody, told=lambda call: told.append(call.body)
            )
            meddling.add(
                Trouble("/x begin", action, nth=2, status=503, change=lambda body: body | {"n": 2})
            )

            async def ask(body: bytes) -> str | int:
                call = HTTPCall(method="POST", path="/x", body=body)
                try:
                    if not streamed:
                        return (await meddling.send(server.url, call)).status
                    async with meddling.stream(server.url, call) as reply:
                        assert [chunk async for chunk in reply.chunks]
                        return reply.status
                except TransportError as error:
                    return error.phase

            assert [await ask(body) for body in (SENT, OTHER)] == [200, 200]
            assert meddling.done == 0
            assert await ask(SENT) == came_back
            assert meddling.done == 1
            assert await ask(SENT) == 200
            await meddling.aclose()
        assert [request.body for request in server.requests] == [SENT, OTHER, *arrived, SENT]
        assert told == [SENT, OTHER, SENT, SENT]
        assert meddling.sent("/x begin") == 3
