"""Flows and fan-outs: one deadline, every sibling awaited, nothing claimed that is not known."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import anyio
import pytest

from genapi.control import Control, fan_out, run_flow
from genapi.errors import ConfigError, GenAPIError, ReplyError, TransportError
from genapi.events import AdminCalled, Event, ignore
from genapi.transports.base import StreamReply
from genapi.wire.flow import Flow, call, calls
from genapi.wire.http import HTTPCall, HTTPReply

URL = "http://w1:8001"


def get(path: str) -> HTTPCall:
    return HTTPCall(method="GET", path=path)


class ScriptedTransport:
    """Answers every call as `script` says; a transport like any other."""

    in_process = False

    def __init__(self, script: Callable[[HTTPCall], Any]) -> None:
        self._script = script
        self.sent: list[tuple[str, str, Mapping[str, str]]] = []

    async def send(
        self, base_url: str, call: HTTPCall, *, headers: Mapping[str, str] = {}
    ) -> HTTPReply:
        self.sent.append((base_url, call.path, headers))
        reply: HTTPReply = await self._script(call)
        return reply

    def stream(
        self, base_url: str, call: HTTPCall, *, headers: Mapping[str, str] = {}
    ) -> AbstractAsyncContextManager[StreamReply]:
        raise NotImplementedError

    async def aclose(self) -> None:
        pass


async def echo(call: HTTPCall) -> HTTPReply:
    return HTTPReply(200, call.path.encode())


async def never(_: HTTPCall) -> HTTPReply:
    await anyio.sleep_forever()
    raise AssertionError


def no_headers(_grant: object) -> Mapping[str, str]:
    return {}


def lost(phase: Any) -> TransportError:
    return TransportError(f"lost: {phase}", phase=phase)


async def run(flow: Flow[Any], script: Any = echo, **more: Any) -> Any:
    options: dict[str, Any] = {
        "headers": no_headers,
        "timeout_s": 5,
        "observe": ignore,
        "operation": "op",
    }
    with anyio.fail_after(5):
        return await run_flow(flow, ScriptedTransport(script), URL, **(options | more))


def one_call(path: str = "/a") -> Flow[bytes]:
    reply = yield from call(get(path))
    return reply.body


# ---------------------------------------------------------------------------------------- flows


async def test_a_flow_is_sent_the_reply_to_each_of_its_calls() -> None:
    def flow() -> Flow[list[bytes]]:
        first = yield from call(get("/a"))
        second = yield from call(get("/b"))
        return [first.body, second.body]

    assert await run(flow()) == [b"/a", b"/b"]


async def test_a_flow_without_a_call_returns() -> None:
    def flow() -> Flow[int]:
        yield from ()
        return 3

    assert await run(flow()) == 3


async def test_calls_that_are_yielded_together_are_in_flight_together() -> None:
    arrived = 0
    both = anyio.Event()

    async def script(call: HTTPCall) -> HTTPReply:
        nonlocal arrived
        arrived += 1
        if arrived == 2:
            both.set()
        await both.wait()
        return HTTPReply(200, call.path.encode())

    def flow() -> Flow[list[bytes]]:
        replies = yield from calls(get("/a"), get("/b"))
        return [reply.body for reply in replies]

    assert await run(flow(), script) == [b"/a", b"/b"]


async def test_every_call_goes_to_the_worker_with_the_headers_for_it() -> None:
    transport = ScriptedTransport(echo)
    control = Control(transport, headers=lambda url, _: {"for": url}, observe=ignore)
    assert await control.run(URL, one_call(), operation="read", timeout_s=5) == b"/a"
    assert transport.sent == [(URL, "/a", {"for": URL})]


async def test_each_call_of_a_flow_carries_the_key_that_its_route_takes() -> None:
    def flow() -> Flow[None]:
        yield from call(HTTPCall(method="GET", path="/label", grant="data"))
        yield from calls(get("/pause"), HTTPCall(method="POST", path="/label", grant="admin"))

    transport = ScriptedTransport(echo)
    control = Control(transport, headers=lambda _, grant: {"key": str(grant)}, observe=ignore)
    await control.run(URL, flow(), operation="read", timeout_s=5)
    keys = sorted((path, headers["key"]) for _, path, headers in transport.sent)
    assert keys == [("/label", "admin"), ("/label", "data"), ("/pause", "None")]


async def test_a_call_to_another_address_goes_there_with_the_key_for_that_address() -> None:
    def flow() -> Flow[bytes]:
        mine, other = yield from calls(
            HTTPCall(method="GET", path="/a", grant="data"),
            HTTPCall(method="GET", path="/b", base="http://list:9", grant="admin"),
        )
        alone = yield from call(HTTPCall(method="GET", path="/c", base="http://list:9"))
        return mine.body + other.body + alone.body

    def headers(url: str, grant: object) -> Mapping[str, str]:
        return {"for": f"{url} {grant}"}

    transport = ScriptedTransport(echo)
    control = Control(transport, headers=headers, observe=ignore)
    assert await control.run(URL, flow(), operation="discover", timeout_s=5) == b"/a/b/c"
    assert sorted(transport.sent) == [
        ("http://list:9", "/b", {"for": "http://list:9 admin"}),
        ("http://list:9", "/c", {"for": "http://list:9 None"}),
        (URL, "/a", {"for": f"{URL} data"}),
    ]


async def test_a_lost_call_is_thrown_into_the_flow_which_may_handle_it() -> None:
    async def script(call: HTTPCall) -> HTTPReply:
        if call.path == "/a":
            raise lost("may_have_run")
        return await echo(call)

    def flow() -> Flow[tuple[str, bytes]]:
        try:
            yield from call(get("/a"))
        except TransportError as error:
            reply = yield from call(get("/b"))
            return error.phase, reply.body
        raise AssertionError

    assert await run(flow(), script) == ("may_have_run", b"/b")


async def test_a_lost_call_that_the_flow_leaves_alone_is_raised() -> None:
    error = lost("not_sent")

    async def script(_: HTTPCall) -> HTTPReply:
        raise error

    with pytest.raises(TransportError) as caught:
        await run(one_call(), script)
    assert caught.value is error


async def test_the_sibling_of_a_lost_call_is_awaited() -> None:
    ended = anyio.Event()
    may_end = anyio.Event()

    async def script(call: HTTPCall) -> HTTPReply:
        if call.path == "/lost":
            may_end.set()
            raise lost("not_sent")
        await may_end.wait()
        ended.set()
        return await echo(call)

    def flow() -> Flow[None]:
        yield from calls(get("/lost"), get("/slow"))

    with pytest.raises(TransportError):
        await run(flow(), script)
    assert ended.is_set()


async def test_of_several_lost_calls_the_flow_learns_of_one_that_may_have_run() -> None:
    async def script(call: HTTPCall) -> HTTPReply:
        raise lost("may_have_run" if call.path == "/b" else "not_sent")

    def flow() -> Flow[None]:
        yield from calls(get("/a"), get("/b"), get("/c"))

    with pytest.raises(TransportError) as caught:
        await run(flow(), script)
    assert caught.value.phase == "may_have_run"


async def test_what_a_flow_raises_reaches_the_caller() -> None:
    def flow() -> Flow[None]:
        yield from call(get("/a"))
        raise ReplyError("not what it should be")

    with pytest.raises(ReplyError, match="not what it should be"):
        await run(flow())


# ---------------------------------------------------------------------------------------- deadline


async def test_a_call_without_an_answer_in_time_may_have_run() -> None:
    with pytest.raises(TransportError) as caught:
        await run(one_call("/pause"), never, timeout_s=0.05, operation="pause")
    assert caught.value.phase == "may_have_run"
    assert "pause on http://w1:8001: no answer to GET /pause within 0.05 s" in str(caught.value)


async def test_the_deadline_is_one_for_the_whole_flow() -> None:
    async def script(_: HTTPCall) -> HTTPReply:
        await anyio.sleep(0.02)
        return HTTPReply(200)

    def flow() -> Flow[None]:
        while True:
            yield from call(get("/is_paused"))

    with pytest.raises(TransportError, match=r"within 0\.1 s"):
        await run(flow(), script, timeout_s=0.1)


async def test_nothing_is_sent_when_there_is_no_time() -> None:
    transport = ScriptedTransport(echo)
    with pytest.raises(TransportError) as caught:
        await run_flow(
            one_call(),
            transport,
            URL,
            headers=no_headers,
            timeout_s=0,
            observe=ignore,
            operation="begin",
        )
    assert caught.value.phase == "not_sent"
    assert not transport.sent


async def test_a_flow_may_conclude_when_its_time_is_up() -> None:
    def flow() -> Flow[str]:
        try:
            yield from call(get("/a"))
        except TransportError as error:
            return f"concluded: {error.phase}"
        raise AssertionError

    assert await run(flow(), never, timeout_s=0.05) == "concluded: may_have_run"


async def test_a_flow_is_sent_nothing_more_when_its_time_is_up() -> None:
    transport = ScriptedTransport(never)

    def flow() -> Flow[None]:
        try:
            yield from call(get("/a"))
        except TransportError:
            yield from call(get("/b"))

    with anyio.fail_after(5), pytest.raises(TransportError, match="GET /a within"):
        await run_flow(
            flow(),
            transport,
            URL,
            headers=no_headers,
            timeout_s=0.05,
            observe=ignore,
            operation="op",
        )
    assert [path for _, path, _ in transport.sent] == ["/a"]


# ---------------------------------------------------------------------------------------- events


async def test_a_flow_that_ends_is_told_once() -> None:
    events: list[Event] = []
    await run(one_call(), observe=events.append, operation="inspect")
    (event,) = events
    assert isinstance(event, AdminCalled)
    assert (event.worker, event.operation, event.error) == (URL, "inspect", None)
    assert event.seconds >= 0


async def test_a_flow_that_fails_is_told_with_its_error() -> None:
    events: list[Event] = []
    with pytest.raises(TransportError):
        await run(one_call("/x"), never, observe=events.append, timeout_s=0.01)
    (event,) = events
    assert isinstance(event, AdminCalled)
    assert event.error is not None
    assert "GET /x" in event.error


async def test_a_flow_that_is_cancelled_is_closed_and_told() -> None:
    events: list[Event] = []
    waiting = anyio.Event()
    closed = []

    async def script(_: HTTPCall) -> HTTPReply:
        waiting.set()
        await anyio.sleep_forever()
        raise AssertionError

    def flow() -> Flow[None]:
        try:
            yield from call(get("/a"))
        finally:
            closed.append(True)

    async with anyio.create_task_group() as group:
        group.start_soon(partial(run, flow(), script, observe=events.append))
        await waiting.wait()
        group.cancel_scope.cancel()
    assert closed == [True]
    (event,) = events
    assert isinstance(event, AdminCalled)
    assert event.error == "cancelled"


# ---------------------------------------------------------------------------------------- fan-out


async def test_a_fan_out_returns_results_and_errors_in_the_order_of_the_calls() -> None:
    async def fine() -> int:
        await anyio.lowlevel.checkpoint()
        return 1

    async def failing() -> int:
        raise ConfigError("no")

    results = await fan_out({"b": fine, "a": failing, "c": fine})
    assert list(results) == ["b", "a", "c"]
    assert results["b"] == results["c"] == 1
    assert isinstance(results["a"], ConfigError)


async def test_an_empty_fan_out_is_empty() -> None:
    empty: dict[str, Any] = {}
    assert await fan_out(empty) == {}


@pytest.mark.parametrize("error", [lost("may_have_run"), ValueError("a mistake of ours")])
async def test_every_sibling_ends_whatever_one_of_them_does(error: Exception) -> None:
    failed = anyio.Event()
    ended: list[int] = []

    async def failing() -> int:
        failed.set()
        raise error

    async def slow(number: int) -> int:
        await failed.wait()
        await anyio.sleep(0.01)
        ended.append(number)
        return number

    with anyio.fail_after(5):
        fan: dict[int, Callable[[], Awaitable[int]]]
        fan = {0: failing, 1: partial(slow, 1), 2: partial(slow, 2)}
        if isinstance(error, GenAPIError):
            assert await fan_out(fan) == {0: error, 1: 1, 2: 2}
        else:
            with pytest.raises(ValueError, match="a mistake of ours"):
                await fan_out(fan)
    assert sorted(ended) == [1, 2]


async def test_cancelling_a_fan_out_cancels_every_call() -> None:
    cancelled: list[int] = []
    running = 0
    all_run = anyio.Event()

    async def held(number: int) -> int:
        nonlocal running
        running += 1
        if running == 3:
            all_run.set()
        try:
            await anyio.sleep_forever()
        except BaseException:
            cancelled.append(number)
            raise
        raise AssertionError

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(fan_out, {n: partial(held, n) for n in range(3)})
            await all_run.wait()
            group.cancel_scope.cancel()
    assert sorted(cancelled) == [0, 1, 2]
