"""What both HTTP clients do, on a server that misbehaves on order."""

import asyncio
import gc
import pathlib
import socket
import sys
import threading
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import anyio
import httpx
import pytest

import genapi
from genapi.embedded import Cluster
from genapi.errors import TransportError
from genapi.transports.base import Plane, Transport
from genapi.transports.http_aiohttp import AiohttpTransport
from genapi.transports.http_httpx import HttpxTransport
from genapi.transports.memory import MemoryTransport
from genapi.wire.http import HTTPCall
from genapi.wire.sse import SSEDecoder
from tests.contract.embedded import request
from tests.support.raw_server import (
    Exchange,
    RawServer,
    Script,
    answer,
    flooding,
    never_accepting,
    refusing,
    serving,
)

CLIENTS: dict[str, Callable[[Plane], Transport]] = {
    "aiohttp": AiohttpTransport,
    "httpx": HttpxTransport,
}
GET = HTTPCall(method="GET", path="/health")
POST = HTTPCall(method="POST", path="/inference/v1/generate", body=b'{"n":1}')
ADMIN = Plane(keep_alive=False)


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest) -> Callable[[Plane], Transport]:
    """One of the clients."""
    return CLIENTS[request.param]


@asynccontextmanager
async def opened(
    client: Callable[[Plane], Transport], plane: Plane | None = None
) -> AsyncIterator[Transport]:
    transport = client(plane or Plane())
    try:
        yield transport
    finally:
        with anyio.fail_after(5):
            await transport.aclose()


@asynccontextmanager
async def pair(
    client: Callable[[Plane], Transport], script: Script = answer, plane: Plane | None = None
) -> AsyncIterator[tuple[Transport, RawServer]]:
    """A transport and a server, with five seconds for the whole block."""
    with anyio.fail_after(5):
        async with serving(script) as server, opened(client, plane) as transport:
            yield transport, server


async def failure(transport: Transport, url: str, call: HTTPCall = POST) -> TransportError:
    with pytest.raises(TransportError) as caught:
        await transport.send(url, call)
    return caught.value


async def collect(transport: Transport, url: str, call: HTTPCall = POST) -> list[bytes]:
    async with transport.stream(url, call) as reply:
        return [chunk async for chunk in reply.chunks]


# ------------------------------------------------------------------------------- what is sent


async def test_a_call_arrives_as_it_was_written(client: Any) -> None:
    call = HTTPCall(
        method="POST",
        path="/pause",
        query={"mode": "keep", "label": "genapi:run:3:1!updating &x=1"},
        headers={"X-Request-Id": "r1"},
        body=b'{"a":1}',
    )
    async with pair(client) as (transport, server):
        await transport.send(server.url + "/prefix", call, headers={"Authorization": "Bearer k"})
    (request,) = server.requests
    assert request.method == "POST"
    assert request.target == (
        "/prefix/pause?mode=keep&label=genapi%3Arun%3A3%3A1%21updating%20%26x%3D1"
    )
    assert request.body == b'{"a":1}'
    assert request.headers["x-request-id"] == "r1"
    assert request.headers["authorization"] == "Bearer k"
    assert request.headers["content-type"] == "application/json"
    assert request.headers["accept-encoding"] == "identity"
    assert "cookie" not in request.headers


async def test_a_post_without_a_body_has_length_zero_and_no_content_type(client: Any) -> None:
    async with pair(client) as (transport, server):
        await transport.send(server.url, HTTPCall(method="POST", path="/resume"))
    (request,) = server.requests
    assert request.headers["content-length"] == "0"
    assert "content-type" not in request.headers


async def test_a_body_of_many_megabytes_arrives_whole(client: Any) -> None:
    body = bytes(range(256)) * 2**15
    async with pair(client) as (transport, server):
        await transport.send(server.url, HTTPCall(method="POST", path="/", body=body))
    assert server.requests[0].body == body
    assert server.requests[0].headers["content-length"] == str(len(body))


async def test_an_attachment_is_refused_before_anything_is_sent(client: Any) -> None:
    call = HTTPCall(method="POST", path="/update_weights", body=b"{}", attachment=object())
    async with pair(client) as (transport, server):
        with pytest.raises(TypeError, match="attachment"):
            await transport.send(server.url, call)
        with pytest.raises(TypeError, match="attachment"):
            async with transport.stream(server.url, call):
                pass
    assert not server.requests


# ------------------------------------------------------------------------------- what comes back


async def test_every_status_is_an_answer_and_not_an_error(client: Any) -> None:
    async def script(exchange: Exchange) -> None:
        status = int(exchange.request.target[1:])
        await exchange.reply(status, b"" if status == 204 else b"why", "X-Kind: Teapot")

    async with pair(client, script) as (transport, server):
        for status in (200, 204, 400, 401, 404, 422, 429, 500, 503):
            reply = await transport.send(server.url, HTTPCall(method="GET", path=f"/{status}"))
            assert (reply.status, reply.body) == (status, b"" if status == 204 else b"why")
            assert reply.headers["x-kind"] == "Teapot"
            assert reply.url == f"{server.url}/{status}"


async def test_a_redirect_is_an_answer_and_is_not_followed(client: Any) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.reply(307, b"", "Location: /elsewhere")

    async with pair(client, script) as (transport, server):
        reply = await transport.send(server.url, POST)
    assert (reply.status, reply.headers["location"]) == (307, "/elsewhere")
    assert len(server.requests) == 1


async def test_cookies_are_not_kept(client: Any) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.reply(200, b"{}", "Set-Cookie: a=b; Path=/")

    async with pair(client, script) as (transport, server):
        await transport.send(server.url, GET)
        await transport.send(server.url, GET)
    assert "cookie" not in server.requests[1].headers


async def test_a_body_is_handed_over_as_it_came_whatever_its_encoding(client: Any) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.reply(200, b"not gzip at all", "Content-Encoding: gzip")

    async with pair(client, script) as (transport, server):
        assert (await transport.send(server.url, GET)).body == b"not gzip at all"


async def test_an_informational_answer_is_passed_over(client: Any) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n")
        await exchange.reply(200, b"real")

    async with pair(client, script) as (transport, server):
        assert (await transport.send(server.url, POST)).body == b"real"


@pytest.mark.case("STREAM-01")
async def test_a_body_that_dribbles_in_split_characters_arrives_exactly(client: Any) -> None:
    text = "✅z".encode()

    async def script(exchange: Exchange) -> None:
        await exchange.start_chunked()
        for position in range(len(text)):
            await exchange.chunk(text[position : position + 1])
        await exchange.write(b"0\r\n\r\n")

    async with pair(client, script) as (transport, server):
        assert b"".join(await collect(transport, server.url)) == text
        assert (await transport.send(server.url, POST)).body == text


async def test_a_stream_hands_over_each_piece_when_it_arrives(client: Any) -> None:
    more = anyio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.start_chunked()
        await exchange.chunk(b"one")
        await more.wait()
        await exchange.chunk(b"two")
        await exchange.write(b"0\r\n\r\n")

    async with (
        pair(client, script) as (transport, server),
        transport.stream(server.url, POST) as reply,
    ):
        assert reply.status == 200
        assert await anext(reply.chunks) == b"one"
        more.set()
        assert await anext(reply.chunks) == b"two"
        with pytest.raises(StopAsyncIteration):
            await anext(reply.chunks)


@pytest.mark.parametrize(
    ("head", "body", "framed"),
    [
        (b"Content-Length: 3\r\n\r\n", b"abc", True),
        (b"Transfer-Encoding: chunked\r\n\r\n", b"3\r\nabc\r\n0\r\n\r\n", True),
        (b"Connection: close\r\n\r\n", b"abc", False),
    ],
    ids=["length", "chunked", "close"],
)
async def test_a_reply_says_whether_its_framing_tells_its_end(
    client: Any, head: bytes, body: bytes, framed: bool
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.1 200 OK\r\n" + head + body)
        if not framed:
            await exchange.close()

    async with pair(client, script) as (transport, server):
        async with transport.stream(server.url, POST) as reply:
            assert reply.framed is framed
            assert b"".join([chunk async for chunk in reply.chunks]) == b"abc"
        assert (await transport.send(server.url, POST)).body == b"abc"


# ------------------------------------------------------------------------------- what is lost


async def test_a_refused_connection_is_not_sent(client: Any) -> None:
    with refusing() as url:
        async with pair(client) as (transport, _):
            error = await failure(transport, url)
    assert error.phase == "not_sent"
    assert error.url == url + POST.path


async def test_a_name_that_is_not_found_is_not_sent(client: Any) -> None:
    async with pair(client, plane=Plane(connect_timeout_s=2)) as (transport, _):
        assert (await failure(transport, "http://nowhere.invalid:8000")).phase == "not_sent"


async def test_a_look_up_that_hangs_is_given_up_and_not_sent(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    def hang(*_: object, **__: object) -> Any:
        release.wait(10)
        raise socket.gaierror(socket.EAI_NONAME, "released")

    async with pair(client, plane=Plane(connect_timeout_s=0.1)) as (transport, _):
        monkeypatch.setattr(socket, "getaddrinfo", hang)
        try:
            assert (await failure(transport, "http://slow.example:8000")).phase == "not_sent"
        finally:
            release.set()


async def test_a_connect_that_hangs_is_given_up_and_not_sent(client: Any) -> None:
    with never_accepting() as url:
        async with pair(client, plane=Plane(connect_timeout_s=0.1)) as (transport, _):
            error = await failure(transport, url)
    assert error.phase == "not_sent"
    assert "within 0.1 s" in str(error)


@pytest.mark.parametrize("hangs_up", [True, False], ids=["hangs up", "hangs"])
async def test_a_tls_handshake_that_fails_is_not_sent(client: Any, hangs_up: bool) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not hangs_up:
            await done.wait()
        writer.close()

    done = anyio.Event()
    with anyio.fail_after(5):
        listener = await asyncio.start_server(greet, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        async with opened(client, Plane(connect_timeout_s=0.2)) as transport:
            error = await failure(transport, f"https://127.0.0.1:{port}")
        done.set()
        listener.close()
    assert error.phase == "not_sent"


async def close(exchange: Exchange) -> None:
    await exchange.close()


async def reset(exchange: Exchange) -> None:
    await exchange.reset()


async def close_in_headers(exchange: Exchange) -> None:
    await exchange.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\nX-Hea")
    await exchange.close()


async def garbage(exchange: Exchange) -> None:
    await exchange.write(b"\x15\x03\x01\x00\x02\x02\x46 no http here\r\n\r\n")
    await exchange.close()


@pytest.mark.parametrize("script", [close, reset, close_in_headers, garbage])
@pytest.mark.parametrize("call", [POST, GET], ids=["POST", "GET"])
async def test_a_loss_before_complete_headers_may_have_run_and_is_not_tried_again(
    client: Any, script: Script, call: HTTPCall
) -> None:
    async with pair(client, script) as (transport, server):
        assert (await failure(transport, server.url, call)).phase == "may_have_run"
        with pytest.raises(TransportError) as caught:
            await collect(transport, server.url, call)
    assert caught.value.phase == "may_have_run"
    assert len(server.requests) == 2


async def short_body(exchange: Exchange) -> None:
    await exchange.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhal")
    await exchange.close()


async def short_chunk(exchange: Exchange) -> None:
    await exchange.start_chunked()
    await exchange.write(b"a\r\nhal")
    await exchange.close()


async def no_last_chunk(exchange: Exchange) -> None:
    await exchange.start_chunked()
    await exchange.chunk(b"hal")
    await exchange.close()


async def reset_in_body(exchange: Exchange) -> None:
    await exchange.start_chunked()
    await exchange.chunk(b"hal")
    await exchange.reset()


async def reset_in_unframed_body(exchange: Exchange) -> None:
    await exchange.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhal")
    await exchange.reset()


BROKEN_BODIES = (short_body, short_chunk, no_last_chunk, reset_in_body, reset_in_unframed_body)


@pytest.mark.parametrize("script", BROKEN_BODIES)
async def test_a_body_that_breaks_off_was_answered(client: Any, script: Script) -> None:
    async with pair(client, script) as (transport, server):
        assert (await failure(transport, server.url)).phase == "answered"
        with pytest.raises(TransportError) as caught:
            await collect(transport, server.url)
    assert caught.value.phase == "answered"
    assert len(server.requests) == 2


async def test_a_body_with_nonsense_for_framing_is_lost_after_it_was_sent(client: Any) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.start_chunked()
        await exchange.write(b"zz\r\n")
        await exchange.gone()

    async with pair(client, script) as (transport, server):
        assert (await failure(transport, server.url)).phase in ("may_have_run", "answered")
        await server.all_gone()


async def test_what_arrived_before_a_body_broke_off_is_handed_over(client: Any) -> None:
    sent = anyio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.start_chunked()
        await exchange.chunk(b"hal")
        await sent.wait()
        await exchange.close()

    async with (
        pair(client, script) as (transport, server),
        transport.stream(server.url, POST) as reply,
    ):
        assert await anext(reply.chunks) == b"hal"
        sent.set()
        with pytest.raises(TransportError) as caught:
            await anext(reply.chunks)
    assert caught.value.phase == "answered"


async def test_a_peer_that_never_answers_is_given_up_after_the_idle_timeout(client: Any) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.gone()

    async with pair(client, script, Plane(idle_timeout_s=0.1)) as (transport, server):
        error = await failure(transport, server.url)
        await server.all_gone()
    assert error.phase == "may_have_run"
    assert "silent for 0.1 s" in str(error)


async def test_a_peer_that_falls_silent_in_a_body_was_answered(client: Any) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.start_chunked()
        await exchange.chunk(b"hal")
        await exchange.gone()

    async with pair(client, script, Plane(idle_timeout_s=0.1)) as (transport, server):
        with pytest.raises(TransportError) as caught:
            await collect(transport, server.url)
        await server.all_gone()
    assert caught.value.phase == "answered"


@pytest.mark.parametrize("script", [close, garbage, short_body])
async def test_a_message_names_the_call_and_no_key(client: Any, script: Script) -> None:
    key = "sk-very-secret"
    async with pair(client, script) as (transport, server):
        with pytest.raises(TransportError) as caught:
            await transport.send(server.url, POST, headers={"authorization": f"Bearer {key}"})
    error: BaseException | None = caught.value
    assert f"POST /inference/v1/generate to {server.url}" in str(error)
    while error is not None:
        assert key not in str(error) + repr(error)
        error = error.__cause__


# ------------------------------------------------------------------------------- connections


async def test_the_request_plane_reuses_a_connection(client: Any) -> None:
    async with pair(client) as (transport, server):
        for _ in range(3):
            await transport.send(server.url, POST)
            await collect(transport, server.url)
    assert server.connections == 1


async def test_the_administration_plane_never_reuses_a_connection(client: Any) -> None:
    async with pair(client, plane=ADMIN) as (transport, server):
        for _ in range(3):
            await transport.send(server.url, POST)
    assert server.connections == 3
    assert {request.headers["connection"] for request in server.requests} == {"close"}


async def test_a_server_that_closes_after_an_error_does_not_hurt_the_next_admin_call(
    client: Any,
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.reply(500, b"engine", "Connection: keep-alive")
        await exchange.close()

    async with pair(client, script, ADMIN) as (transport, server):
        for _ in range(3):
            assert (await transport.send(server.url, POST)).status == 500
    assert len(server.requests) == 3


async def test_a_reused_connection_that_dies_over_a_request_may_have_run_and_is_posted_once(
    client: Any,
) -> None:
    async def script(exchange: Exchange) -> None:
        if len(server.requests) == 1:
            await exchange.reply()
        else:
            await exchange.close()

    async with pair(client, script) as (transport, server):
        await transport.send(server.url, POST)
        assert (await failure(transport, server.url)).phase == "may_have_run"
    assert [request.connection for request in server.requests] == [1, 1]


def kernel_timer(client_port: int, server_port: int) -> str:
    """The running timer of the client's end of a TCP connection; "02" is the keepalive timer."""
    table = pathlib.Path("/proc/net/tcp").read_text(encoding="ascii")
    rows = (line.split() for line in table.splitlines()[1:])
    ends = f":{client_port:04X}", f":{server_port:04X}"
    (timer,) = (row[5][:2] for row in rows if (row[1][-5:], row[2][-5:]) == ends)
    return timer


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
async def test_the_kernel_probes_a_connection_that_waits_for_a_long_answer(client: Any) -> None:
    async def script(exchange: Exchange) -> None:
        # Until what was sent is acknowledged another timer runs, and the kernel tells nobody.
        while kernel_timer(exchange.client_port, server.port) != "02":  # noqa: ASYNC110
            await anyio.sleep(0.01)
        await exchange.reply()

    async with pair(client, script) as (transport, server):
        assert (await transport.send(server.url, POST)).ok


@pytest.mark.case("RETRY-03")
async def test_one_call_is_exactly_one_post_whatever_the_status(client: Any) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.reply(503, b"busy", "Retry-After: 0")

    async with pair(client, script) as (transport, server):
        assert (await transport.send(server.url, POST)).status == 503
    assert len(server.requests) == 1


@pytest.mark.case("POOL-01")
@pytest.mark.parametrize(("name", "count"), [("aiohttp", 300), ("httpx", 64)])
async def test_all_concurrent_calls_are_in_flight_at_once(name: str, count: int) -> None:
    async def script(exchange: Exchange) -> None:
        await server.arrived(count)
        await exchange.reply()

    async with pair(CLIENTS[name], script) as (transport, server):
        call = partial(transport.send, server.url, POST)
        async with anyio.create_task_group() as group:
            for _ in range(count):
                group.start_soon(call)
    assert server.connections == count


async def test_a_limit_queues_calls_and_queueing_is_no_timeout(client: Any) -> None:
    release = anyio.Event()

    async def script(exchange: Exchange) -> None:
        await release.wait()
        await exchange.reply()

    plane = Plane(max_connections=2, connect_timeout_s=0.1)
    async with pair(client, script, plane) as (transport, server):
        call = partial(transport.send, server.url, POST)
        async with anyio.create_task_group() as group:
            for _ in range(6):
                group.start_soon(call)
            await server.arrived(2)
            await anyio.sleep(0.3)  # three times the bound on a connect
            assert server.connections == 2
            release.set()
    assert len(server.requests) == 6


@pytest.mark.case("POOL-03")
async def test_proxies_of_the_environment_are_ignored(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refusing() as dead:
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, dead)
        monkeypatch.setenv("no_proxy", "localhost")
        async with pair(client) as (transport, server):
            assert (await transport.send(server.url, POST)).ok


@pytest.mark.case("POOL-03")
async def test_a_trusted_environment_still_reaches_this_host_directly(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refusing() as dead:
        monkeypatch.setenv("http_proxy", dead)
        async with pair(client, plane=Plane(trust_env=True)) as (transport, server):
            assert (await transport.send(server.url, POST)).ok


async def test_a_trusted_environment_sends_other_hosts_through_its_proxy(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(client, plane=Plane(trust_env=True)) as (transport, proxy):
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        assert (await transport.send("http://engine.example:8000", POST)).ok
    assert proxy.requests[0].target == "http://engine.example:8000/inference/v1/generate"


async def test_passwords_of_the_netrc_file_are_never_sent(
    client: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("default login me password secret\n", encoding="utf-8")
    monkeypatch.setenv("NETRC", str(netrc))
    async with pair(client, plane=Plane(trust_env=True)) as (transport, server):
        await transport.send(server.url, POST)
    assert "authorization" not in server.requests[0].headers


# ------------------------------------------------------------------------------- giving up


async def hold(exchange: Exchange) -> None:
    await exchange.gone()


async def hold_in_body(exchange: Exchange) -> None:
    await exchange.start_chunked()
    await exchange.chunk(b"one")
    await exchange.gone()


@pytest.mark.parametrize("plane", [Plane(), ADMIN], ids=["requests", "administration"])
@pytest.mark.parametrize("script", [hold, hold_in_body])
async def test_cancelling_a_call_closes_its_connection(
    client: Any, script: Script, plane: Plane
) -> None:
    async with pair(client, script, plane) as (transport, server):
        async with anyio.create_task_group() as group:
            group.start_soon(transport.send, server.url, POST)
            await server.arrived(1)
            group.cancel_scope.cancel()
        await server.all_gone()


async def test_cancelling_a_stream_closes_its_connection(client: Any) -> None:
    async with pair(client, hold_in_body) as (transport, server):
        with anyio.CancelScope() as scope:
            async with transport.stream(server.url, POST) as reply:
                assert await anext(reply.chunks) == b"one"
                scope.cancel()
                await anext(reply.chunks)
        assert scope.cancelled_caught
        await server.all_gone()


async def test_leaving_a_stream_early_closes_its_connection(client: Any) -> None:
    async with pair(client, hold_in_body) as (transport, server):
        async with transport.stream(server.url, POST) as reply:
            assert await anext(reply.chunks) == b"one"
        await server.all_gone()
        server.script = answer
        await transport.send(server.url, POST)


def open_sockets() -> int:
    """How many sockets this process holds."""
    count = 0
    for descriptor in pathlib.Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            count += descriptor.readlink().name.startswith("socket:")
    return count


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("how", ["cancelled", "closed"])
async def test_an_upload_that_is_given_up_ends_although_the_peer_does_not_read(
    client: Any, how: str
) -> None:
    accepted, given_up, ended = anyio.Event(), anyio.Event(), anyio.Event()
    body, received = bytes(2**25), 0

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal received
        accepted.set()
        await given_up.wait()
        with suppress(ConnectionError):
            while data := await reader.read(2**20):
                received += len(data)
        writer.close()
        ended.set()

    async def upload() -> None:
        call = HTTPCall(method="POST", path="/", body=body)
        assert (await failure(transport, f"http://127.0.0.1:{port}", call)).phase == "may_have_run"

    with anyio.fail_after(5):
        listener = await asyncio.start_server(deaf, "127.0.0.1", 0, limit=2**10)
        port = listener.sockets[0].getsockname()[1]
        async with opened(client) as transport:
            async with anyio.create_task_group() as group:
                group.start_soon(upload)
                await accepted.wait()
                await anyio.wait_all_tasks_blocked()
                both_ends = open_sockets()
                if how == "cancelled":
                    group.cancel_scope.cancel()
                else:
                    await transport.aclose()
            while open_sockets() == both_ends:
                await anyio.lowlevel.checkpoint()
            given_up.set()
            await ended.wait()
        listener.close()
    assert received < len(body)


async def test_many_cancelled_calls_leave_the_pool_usable() -> None:
    async def script(exchange: Exchange) -> None:
        if exchange.request.target == "/hold":
            await exchange.gone()
        else:
            await exchange.reply()

    held = HTTPCall(method="POST", path="/hold", body=b"{}")
    async with pair(AiohttpTransport, script, Plane(max_connections=4)) as (transport, server):
        for round_ in range(1, 6):
            async with anyio.create_task_group() as group:
                for _ in range(12):
                    group.start_soon(transport.send, server.url, held)
                await server.arrived(4 * round_)
                group.cancel_scope.cancel()
        await server.all_gone()
        for _ in range(5):
            assert (await transport.send(server.url, GET)).ok


@pytest.mark.parametrize(("script", "phase"), [(hold, "may_have_run"), (hold_in_body, "answered")])
async def test_closing_the_transport_ends_calls_in_flight(
    client: Any, script: Script, phase: str
) -> None:
    failures: list[TransportError] = []

    async def call() -> None:
        failures.append(await failure(transport, server.url))

    async with pair(client, script) as (transport, server):
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(call)
            await server.arrived(3)
            await anyio.wait_all_tasks_blocked()
            await transport.aclose()
        await server.all_gone()
    assert [error.phase for error in failures] == [phase] * 3


async def test_a_cancelled_call_stays_cancelled_when_the_transport_closes(client: Any) -> None:
    async with pair(client, hold) as (transport, server):
        async with anyio.create_task_group() as group:
            group.start_soon(transport.send, server.url, POST)
            await server.arrived(1)
            group.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await transport.aclose()
        await server.all_gone()


async def test_closing_the_transport_ends_calls_that_wait_for_a_connection() -> None:
    failures: list[TransportError] = []

    async def call() -> None:
        failures.append(await failure(transport, server.url))

    async with (
        pair(AiohttpTransport, hold, Plane(max_connections=1)) as (transport, server),
        anyio.create_task_group() as group,
    ):
        group.start_soon(call)
        await server.arrived(1)
        group.start_soon(call)
        await anyio.wait_all_tasks_blocked()
        await transport.aclose()
    assert sorted(error.phase for error in failures) == ["may_have_run", "not_sent"]


async def test_a_closed_transport_sends_nothing(client: Any) -> None:
    async with pair(client) as (transport, server):
        await transport.send(server.url, POST)
        await transport.aclose()
        error = await failure(transport, server.url)
        await transport.aclose()
    assert error.phase == "not_sent"
    assert len(server.requests) == 1


async def test_closing_leaves_no_connection_and_no_task(client: Any) -> None:
    async with serving() as server:
        before = asyncio.all_tasks()
        with anyio.fail_after(5), warnings.catch_warnings():
            warnings.simplefilter("error", ResourceWarning)
            async with opened(client) as transport:
                for _ in range(3):
                    await transport.send(server.url, POST)
                async with transport.stream(server.url, POST):
                    pass
            await server.all_gone()
            del transport
            gc.collect()
        assert asyncio.all_tasks() <= before


async def test_a_transport_that_was_never_used_closes(client: Any) -> None:
    await client(Plane()).aclose()


def test_another_event_loop_is_told_so(client: Any) -> None:
    transport = client(ADMIN)

    async def use() -> None:
        async with serving() as server:
            await transport.send(server.url, GET)

    async def misuse() -> None:
        with pytest.raises(RuntimeError, match="another event loop"):
            await use()

    with asyncio.Runner() as first, asyncio.Runner() as second:
        first.run(use())
        second.run(misuse())
        first.run(transport.aclose())


# ------------------------------------------------------------------------------- a body that rushes


class Rush(httpx.AsyncByteStream):
    """A body whose next piece is always there already; far too long for any test."""

    def __init__(self, piece: bytes) -> None:
        self._piece = piece

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for _ in range(3_000_000):
            yield self._piece


class Rushing(httpx.AsyncBaseTransport):
    """Embedded engines, one of whose paths answers in a rush."""

    def __init__(self, path: str, media: str, piece: bytes) -> None:
        self._path = path
        self._media = media
        self._piece = piece
        self._engines = MemoryTransport(Cluster.from_query({}))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == self._path:
            return httpx.Response(
                200, headers={"content-type": self._media}, stream=Rush(self._piece)
            )
        call = HTTPCall(
            method=request.method,
            path=path,
            query=dict(request.url.params),
            body=await request.aread() or None,
        )
        reply = await self._engines.send("memory://0", call)
        return httpx.Response(reply.status, headers=reply.headers, content=reply.body)

    async def aclose(self) -> None:
        await self._engines.aclose()


@asynccontextmanager
async def rushing(path: str, media: str, piece: bytes, **more: Any) -> AsyncIterator[genapi.Fleet]:
    """A fleet of one engine, which answers at one path in a rush."""
    async with (
        httpx.AsyncClient(transport=Rushing(path, media, piece)) as own,
        genapi.connect(
            "vllm://127.0.0.1:1", transport=HttpxTransport(Plane(), own), **more
        ) as fleet,
    ):
        yield fleet


EVENTS = "text/event-stream"
RUSHES = {
    "comments": b": still here\n\n" * 10,
    "blank lines": b"\n" * 100,
    "frames without tokens": b'data: {"request_id":"r","choices":[]}\n\n',
}


@pytest.mark.parametrize("piece", RUSHES.values(), ids=RUSHES)
async def test_a_stream_that_never_pauses_ends_at_its_timeout(piece: bytes) -> None:
    async with rushing(POST.path, EVENTS, piece) as fleet:
        await fleet.wait_ready(timeout_s=5)
        with pytest.raises(genapi.IncompleteError, match=r"within timeout_s=0\.05"):
            async with fleet.stream(request(timeout_s=0.05)) as events:
                assert [event async for event in events]


async def test_a_reply_that_never_pauses_ends_at_its_timeout() -> None:
    async with rushing(POST.path, "application/json", b" ") as fleet:
        await fleet.wait_ready(timeout_s=5)
        with pytest.raises(TransportError, match=r"within timeout_s=0\.05"):
            await fleet.generate(request(timeout_s=0.05))


async def test_an_administrative_answer_that_never_pauses_ends_at_its_timeout() -> None:
    async with rushing("/version", "application/json", b" ", admin_timeout_s=0.05) as fleet:
        with pytest.raises(genapi.FleetError, match=r"GET /version and .* within 0\.05 s"):
            await fleet.wait_ready(timeout_s=0.5)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_reply_that_is_far_too_large_is_a_broken_one(streamed: bool) -> None:
    async with rushing(POST.path, "application/json", b" " * 2**20) as fleet:
        await fleet.wait_ready(timeout_s=5)
        asking = fleet.stream(request()).__aenter__() if streamed else fleet.generate(request())
        with pytest.raises(genapi.ReplyError, match="answered more than 268435456 bytes"):
            await asking


async def test_an_administrative_answer_that_is_far_too_large_is_named() -> None:
    async with rushing("/version", "application/json", b" " * 2**20) as fleet:
        with pytest.raises(genapi.FleetError, match="/version answered more than 268435456 bytes"):
            await fleet.wait_ready(timeout_s=0.5)


async def test_a_body_up_to_the_planes_limit_is_read_and_a_larger_one_closes_its_connection(
    client: Any,
) -> None:
    async def script(exchange: Exchange) -> None:
        size = int(exchange.request.target[1:])
        await exchange.start_chunked()
        for _ in range(size // 10):
            await exchange.chunk(b"x" * 10)
        if size > 100:
            await exchange.gone()
        else:
            await exchange.write(b"0\r\n\r\n")

    async with pair(client, script, Plane(largest_body=100)) as (transport, server):
        whole = await transport.send(server.url, HTTPCall(method="GET", path="/100"))
        assert whole.body == b"x" * 100
        with pytest.raises(genapi.ReplyError, match="/110 answered more than 100 bytes") as caught:
            await transport.send(server.url, HTTPCall(method="GET", path="/110"))
        assert (caught.value.url, caught.value.status) == (f"{server.url}/110", 200)
        await server.all_gone()


async def test_others_get_their_turn_while_a_stream_never_pauses() -> None:
    ended = False
    async with rushing(POST.path, EVENTS, RUSHES["comments"]) as fleet:
        await fleet.wait_ready(timeout_s=5)

        async def read() -> None:
            nonlocal ended
            with suppress(genapi.IncompleteError):
                async with fleet.stream(request()) as events:
                    assert not [event async for event in events]
            ended = True

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            for _ in range(100):
                await anyio.lowlevel.checkpoint()
            assert not ended
            group.cancel_scope.cancel()
    assert not ended


async def test_a_time_limit_on_each_piece_of_a_flood_is_kept(client: Any) -> None:
    with flooding(RUSHES["comments"]) as url:
        async with opened(client) as transport, transport.stream(url, POST) as reply:
            end = anyio.current_time() + 0.2
            events = SSEDecoder()

            async def read_on() -> None:
                while anyio.current_time() < end + 5:  # no scope bounds who starves them
                    with anyio.fail_after(end - anyio.current_time()):
                        piece = await anext(reply.chunks)
                    events.feed(piece)

            with pytest.raises(TimeoutError):
                await read_on()


# ------------------------------------------------------------------------------- bring your own


async def test_a_mock_transport_of_the_users_can_be_brought() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"path": request.url.path, "key": request.headers["x-k"]})

    async with httpx.AsyncClient(transport=httpx.MockTransport(handler)) as own:
        transport = HttpxTransport(Plane(), own)
        reply = await transport.send("http://engine:1", POST, headers={"X-K": "v"})
        await transport.aclose()
        assert reply.json() == {"path": "/inference/v1/generate", "key": "v"}
        assert not own.is_closed


async def test_an_asgi_application_can_be_brought() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        start = {"type": "http.response.start", "status": 201, "headers": [(b"X-A", b"b")]}
        await send(start)
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await send({"type": "http.response.body", "body": b"two", "more_body": False})

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as own:
        reply = await HttpxTransport(Plane(), own).send("http://engine:1", POST)
    assert (reply.status, reply.body, reply.headers["x-a"]) == (201, b"onetwo", "b")


async def test_a_clients_short_default_timeout_does_not_cut_a_generation() -> None:
    async def script(exchange: Exchange) -> None:
        await anyio.sleep(0.2)
        await exchange.reply()

    with anyio.fail_after(5):
        async with serving(script) as server, httpx.AsyncClient(timeout=0.05) as own:
            assert (await HttpxTransport(Plane(), own).send(server.url, POST)).ok
