"""A fleet of SGLang servers from outside: targets, the two keys, aborts."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import anyio
import pytest

import genapi
from genapi import AuthError, Fleet, UnsupportedError
from genapi.transports.base import StreamReply
from genapi.wire.http import HTTPCall, HTTPReply
from tests.support.sglang_wire import STOP, output, recorded, request
from tests.support.wire import sse

NORMAL = ("/generate", "/model_info", "/ping", "/server_info", "/v1/models")
OPEN = ("/health", "/ready")


class Servers:
    """Scripted SGLang servers with two keys; a transport like any other."""

    in_process = False

    def __init__(self, user: str | None = "user", admin: str | None = "admin") -> None:
        self._keys = {True: user, False: admin or user}
        self.sent: list[tuple[str, HTTPCall, str | None]] = []
        self.asked = anyio.Event()
        self.let_go = anyio.Event()
        self.let_go.set()

    async def send(
        self, base_url: str, call: HTTPCall, *, headers: Mapping[str, str] = {}
    ) -> HTTPReply:
        self.sent.append((base_url, call, headers.get("authorization")))
        url = base_url + call.path
        wanted = self._keys[call.path in NORMAL]
        if call.path not in OPEN and wanted and headers.get("authorization") != f"Bearer {wanted}":
            return HTTPReply(401, b'{"error":"Unauthorized"}', {}, url)
        if call.path == "/generate":
            self.asked.set()
            await self.let_go.wait()
            asked = json.loads(call.body or b"")
            reply = {**output([9, 2], STOP), "prompt_token_ids": asked["input_ids"]}
            return HTTPReply(200, json.dumps(reply).encode(), {}, url)
        if call.path == "/abort_request":
            self.let_go.set()
        return self._read(call.path, url)

    def _read(self, path: str, url: str) -> HTTPReply:
        names = {"/model_info": "model_info", "/v1/models": "v1_models"}
        if path in names:
            return HTTPReply(200, recorded(names[path]).body, {}, url)
        if path == "/server_info":
            told = recorded("server_info_trimmed").json_object()
            lives = told["startup_time"] | {"tokenizer_e2e": urlsplit(url).port}
            info = {**told, "dp_size": 1, "startup_time": lives}
            return HTTPReply(200, json.dumps(info).encode(), {}, url)
        return HTTPReply(200, b"", {}, url)

    @asynccontextmanager
    async def stream(
        self, base_url: str, call: HTTPCall, *, headers: Mapping[str, str] = {}
    ) -> AsyncIterator[StreamReply]:
        self.sent.append((base_url, call, headers.get("authorization")))
        asked = json.loads(call.body or b"")["input_ids"]
        frames = [output([9]), output([9, 2], STOP)]
        content = sse(*[{**frame, "prompt_token_ids": asked} for frame in frames])

        async def chunks() -> AsyncIterator[bytes]:
            yield content[:50]
            yield content[50:]

        yield StreamReply(
            status=200,
            headers={"content-type": "text/event-stream"},
            chunks=chunks(),
            framed=True,
            url=base_url + call.path,
        )

    async def aclose(self) -> None:
        pass

    def keys(self) -> dict[str, set[str | None]]:
        """The keys that each route was asked with."""
        found: dict[str, set[str | None]] = {}
        for _, call, key in self.sent:
            found.setdefault(call.path, set()).add(key)
        return found


def fleet_of(
    servers: Servers, target: str = "sglang://127.0.0.1:30000,127.0.0.1:30001", **options: Any
) -> Fleet:
    keys = {"api_key": "user", "admin_api_key": "admin"}
    return genapi.connect(target, transport=servers, **{**keys, **options})


async def test_a_target_of_sglang_servers_generates_and_streams() -> None:
    async with fleet_of(Servers()) as fleet:
        snapshot = await fleet.wait_ready(timeout_s=5)
        reply = await fleet.generate(request())
        async with fleet.stream(request()) as events:
            last = [event async for event in events][-1]
    assert [w.label for w in snapshot.workers] == ["default", "default"]
    assert all(w.id.provider == "sglang" for w in snapshot.workers)
    assert (reply.output.token_ids.tolist(), reply.logprobs_mode) == ([9, 2], "scaled")
    assert isinstance(last, genapi.Finished)
    assert last.reply.output.token_ids == reply.output.token_ids


@pytest.mark.case("AUTH-01")
async def test_each_route_is_asked_with_the_key_it_takes_and_with_no_other() -> None:
    servers = Servers()
    servers.let_go = anyio.Event()
    async with fleet_of(servers) as fleet, anyio.create_task_group() as group:
        asked = request().model_copy(update={"request_id": "mine"})
        group.start_soon(fleet.generate, asked)
        with anyio.fail_after(5):
            await servers.asked.wait()
        assert await fleet.abort("mine") == 1
    keys = servers.keys()
    assert keys.pop("/abort_request") == {"Bearer admin"}
    assert keys.pop("/ready") <= {"Bearer user", None}
    assert set(keys) == set(NORMAL)
    assert set().union(*keys.values()) == {"Bearer user"}


@pytest.mark.case("AUTH-01")
async def test_behind_a_router_workers_are_read_with_the_key_of_requests_and_it_gets_no_other() -> (
    None
):
    servers = Servers()
    servers.let_go = anyio.Event()
    target = "sglang://127.0.0.1:30000?workers=127.0.0.1:30001"
    async with fleet_of(servers, target) as fleet, anyio.create_task_group() as group:
        asked = request().model_copy(update={"request_id": "mine"})
        group.start_soon(fleet.generate, asked)
        with anyio.fail_after(5):
            await servers.asked.wait()
        assert await fleet.abort("mine") == 1
    router = [key for url, _, key in servers.sent if url.endswith(":30000")]
    assert set(router) == {"Bearer user"}
    worker = {(call.path, key) for url, call, key in servers.sent if url.endswith(":30001")}
    assert ("/server_info", "Bearer user") in worker
    assert ("/abort_request", "Bearer admin") in worker


@pytest.mark.case("AUTH-01")
@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"api_key": "wrong"}, "check api_key"),
        ({"api_key": None}, "check api_key"),
    ],
)
async def test_a_wrong_key_names_the_one_that_was_refused(
    options: dict[str, Any], remedy: str
) -> None:
    async with fleet_of(Servers(), **options) as fleet:
        with pytest.raises(AuthError, match=remedy):
            await fleet.wait_ready(timeout_s=5)


async def test_one_key_opens_a_server_that_has_one() -> None:
    async with fleet_of(Servers(admin=None), admin_api_key=None) as fleet:
        await fleet.wait_ready(timeout_s=5)
        assert (await fleet.generate(request())).output.is_complete


async def test_a_server_without_a_key_for_requests_is_read_with_the_admin_key_alone() -> None:
    async with fleet_of(Servers(user=None), api_key=None) as fleet:
        await fleet.wait_ready(timeout_s=5)
        assert (await fleet.generate(request())).output.is_complete


async def test_the_ids_on_the_wire_are_of_one_length_so_that_none_begins_another() -> None:
    servers = Servers()
    async with fleet_of(servers) as fleet:
        for _ in range(5):
            await fleet.generate(request())
    bodies = [json.loads(c.body or b"") for _, c, _ in servers.sent if c.path == "/generate"]
    ids = {body["rid"] for body in bodies}
    assert (len(ids), len({len(rid) for rid in ids})) == (5, 1)


class Unlike(Servers):
    """Servers of which the second was started without priorities."""

    async def send(
        self, base_url: str, call: HTTPCall, *, headers: Mapping[str, str] = {}
    ) -> HTTPReply:
        reply = await super().send(base_url, call, headers=headers)
        if call.path != "/server_info":
            return reply
        first = base_url.endswith(":30000")
        info = {
            **reply.json_object(),
            "enable_priority_scheduling": first,
            "schedule_low_priority_values_first": first,
        }
        return HTTPReply(reply.status, json.dumps(info).encode(), {}, reply.url)


async def test_what_only_the_worker_that_was_chosen_cannot_do_is_refused_before_it_is_asked() -> (
    None
):
    servers = Unlike()
    refused = 0
    async with fleet_of(servers) as fleet:
        await fleet.wait_ready(timeout_s=5)
        for session in range(16):
            try:
                asked = request().model_copy(update={"priority": 1, "session": str(session)})
                await fleet.generate(asked)
            except UnsupportedError as error:
                assert "--enable-priority-scheduling" in str(error)  # noqa: PT017 - some pass
                refused += 1
    sent = [url for url, call, _ in servers.sent if call.path == "/generate"]
    assert set(sent) == {"http://127.0.0.1:30000"}
    assert refused == 16 - len(sent) > 0
