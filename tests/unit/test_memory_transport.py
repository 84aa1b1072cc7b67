"""Calls to engines in this process, losses included."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest

from genapi.embedded import Cluster, Fault, Reply
from genapi.errors import TransportError
from genapi.transports.memory import MemoryTransport
from genapi.wire.http import HTTPCall, json_body

PATH = "/inference/v1/generate"


def generate(*, tokens: int = 4, stream: bool = False) -> HTTPCall:
    sampling = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    body = {"token_ids": [1, 2, 3], "sampling_params": sampling, "stream": stream}
    return HTTPCall(method="POST", path=PATH, body=json_body(body))


@asynccontextmanager
async def cluster(*faults: Fault) -> AsyncIterator[tuple[MemoryTransport, Cluster]]:
    engines = Cluster.from_query({"protocol": "vllm", "workers": "2"})
    for fault in faults:
        engines.workers[0].faults.add(fault)
    with anyio.fail_after(5):
        async with MemoryTransport(engines) as transport:
            yield transport, engines


async def failure(transport: MemoryTransport, call: HTTPCall) -> TransportError:
    with pytest.raises(TransportError) as caught:
        await transport.send("memory://0", call)
    return caught.value


async def test_a_call_is_answered_by_the_engine_it_names() -> None:
    async with cluster() as (transport, _):
        assert transport.urls == ("memory://0", "memory://1")
        reply = await transport.send("memory://1", generate(tokens=4))
        assert reply.status == 200
        assert len(msgspec.json.decode(reply.body)["choices"][0]["token_ids"]) == 4
        assert reply.url == f"memory://1{PATH}"


async def test_the_first_call_starts_engines_that_nobody_has_started() -> None:
    transport = MemoryTransport(Cluster.from_query({"protocol": "vllm"}))
    with anyio.fail_after(5):
        assert (await transport.send("memory://0", generate())).ok
        await transport.aclose()


async def test_a_stream_arrives_in_pieces() -> None:
    async with (
        cluster() as (transport, _),
        transport.stream("memory://0", generate(stream=True)) as reply,
    ):
        assert reply.framed
        assert reply.headers["content-type"].startswith("text/event-stream")
        chunks = [chunk async for chunk in reply.chunks]
    assert len(chunks) >= 4
    assert chunks[-1].endswith(b"data: [DONE]\n\n")


async def test_leaving_a_stream_early_ends_the_generation() -> None:
    async with cluster() as (transport, engines):
        call = generate(tokens=1000, stream=True)
        async with transport.stream("memory://0", call) as reply:
            await anext(reply.chunks)
            assert engines.workers[0].engine.num_running == 1
        while engines.workers[0].engine.num_running:
            await anyio.lowlevel.checkpoint()


async def test_cancelling_a_call_ends_the_generation() -> None:
    async with cluster() as (transport, engines):
        async with anyio.create_task_group() as group:
            group.start_soon(transport.send, "memory://0", generate(tokens=4000))
            while not engines.workers[0].engine.num_running:
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        while engines.workers[0].engine.num_running:
            await anyio.lowlevel.checkpoint()


async def test_a_server_that_does_not_listen_was_not_sent_to() -> None:
    async with cluster(Fault(PATH, "refuse")) as (transport, _):
        assert (await failure(transport, generate())).phase == "not_sent"


@pytest.mark.parametrize("action", ["lose_reply", "die_before", "die_after"])
async def test_a_server_that_goes_away_without_an_answer_may_have_acted(action: Any) -> None:
    async with cluster(Fault(PATH, action)) as (transport, _):
        error = await failure(transport, generate())
    assert error.phase == "may_have_run"
    assert error.url == f"memory://0{PATH}"


async def test_a_server_that_goes_away_in_a_body_had_answered() -> None:
    async with cluster(Fault(PATH, "die_during")) as (transport, _):
        error = await failure(transport, generate(tokens=1000, stream=True))
    assert error.phase == "answered"


async def test_closing_ends_calls_in_flight_and_refuses_later_ones() -> None:
    failures = []

    async def call() -> None:
        failures.append(await failure(transport, generate(tokens=4000)))

    async with cluster() as (transport, engines):
        async with anyio.create_task_group() as group:
            group.start_soon(call)
            while not engines.workers[0].engine.num_running:
                await anyio.lowlevel.checkpoint()
            await transport.aclose()
        failures.append(await failure(transport, generate()))
    assert [error.phase for error in failures] == ["may_have_run", "not_sent"]


async def test_headers_and_attachments_are_handed_over_as_they_are() -> None:
    class Recorder:
        """A cluster that keeps what it was handed."""

        names = ("memory://0",)

        def __init__(self) -> None:
            self.calls: list[Any] = []

        async def open(self) -> None: ...
        async def aclose(self) -> None: ...
        async def handle(self, worker: int, call: Any) -> Any:
            self.calls.append(call)
            return Reply(200, {"X-A": "b"}, b"{}")

    recorder, attachment = Recorder(), object()
    call = HTTPCall(
        method="POST",
        path="/update_weights",
        query={"a": "b"},
        headers={"X-One": "1"},
        body=b"{}",
        attachment=attachment,
    )
    transport = MemoryTransport(recorder)
    reply = await transport.send("memory://0", call, headers={"Authorization": "Bearer k"})
    assert reply.headers == {"x-a": "b"}
    (seen,) = recorder.calls
    assert seen.attachment is attachment
    assert (seen.method, seen.path, seen.query, seen.body) == (
        "POST",
        "/update_weights",
        {"a": "b"},
        b"{}",
    )
    assert seen.headers == {
        "content-type": "application/json",
        "x-one": "1",
        "authorization": "Bearer k",
    }


@pytest.mark.parametrize("url", ["memory://", "memory://x", "http://0", "memory://-1"])
async def test_an_address_that_is_none_in_memory_is_refused(url: str) -> None:
    async with cluster() as (transport, _):
        with pytest.raises(ValueError, match="memory://0"):
            await transport.send(url, generate())
