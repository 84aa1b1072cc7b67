"""SGLang's pause modes, its probes meanwhile, and its keys."""

from typing import Any

import anyio
import pytest

from genapi.embedded import Call, Cluster, policy
from tests.unit.embedded.harness import until
from tests.unit.embedded.sglang_harness import PROMPT, flights, request, serving

GREEDY = policy.greedy(policy.init(0), PROMPT, 60)
PAUSED = {"message": "Generation paused successfully.", "status": "ok"}


async def test_abort_ends_what_runs_and_returns_when_nobody_is_left() -> None:
    async with flights() as (client, sky):
        flying = await sky.fly(PROMPT, 900)
        assert await client.post("/pause_generation", {}) == (200, PAUSED)
        await until(flying.over)
        assert flying.meta["finish_reason"]["type"] == "abort"
        count = len(flying.body["output_ids"])
        assert flying.body["output_ids"] == policy.greedy(policy.init(0), PROMPT, count)
        assert client.worker.engine.requests == ()


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_what_is_held_goes_on_where_it_was(mode: str) -> None:
    async with flights() as (client, sky):
        flying = await sky.fly(PROMPT, 60)
        await client.pause(mode)
        (held,) = client.worker.engine.requests
        await client.worker.engine.clock.sleep(0.01)
        seen = len(held.tracks[0].output)
        await client.worker.engine.clock.sleep(1.0)
        assert len(held.tracks[0].output) == seen < 60
        assert client.worker.engine.num_waiting == (1 if mode == "retract" else 0)
        await client.resume()
        await until(flying.over)
    assert flying.body["output_ids"] == GREEDY
    assert flying.meta["num_retractions"] == (1 if mode == "retract" else 0)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_new_requests_hang_at_the_gate(mode: str) -> None:
    async with flights() as (client, sky):
        await client.pause(mode)
        flying = sky.launch(PROMPT, 5)
        await client.worker.engine.clock.sleep(30.0)
        assert not flying.over()
        assert client.worker.engine.requests == ()
        await client.resume()
        await until(flying.over)
        assert flying.body["output_ids"] == GREEDY[:5]


async def test_a_stream_at_the_gate_has_its_headers_already() -> None:
    async with serving() as client:
        await client.pause("retract")
        reply = await client.send("POST", "/generate", request(PROMPT, 5, stream=True))
        assert reply.status == 200
        with anyio.move_on_after(0.01) as scope:
            await anext(reply.body)  # type: ignore[arg-type]
        assert scope.cancelled_caught
        await client.resume()
        await client.worker.engine.clock.sleep(0.1)
        assert client.worker.engine.requests == ()


async def test_pausing_twice_and_resuming_for_nothing_are_fine() -> None:
    async with serving() as client:
        await client.resume()
        for mode in ("abort", "in_place", "retract", "retract", "abort"):
            await client.pause(mode)
        await client.resume()
        assert await client.tokens(PROMPT, 5) == GREEDY[:5]


async def test_a_pause_that_aborts_what_is_frozen_never_returns_and_nothing_resumes_it() -> None:
    async with flights() as (client, sky):
        flying = await sky.fly(PROMPT, 900)
        await client.pause("in_place")
        pause = sky.call("/pause_generation", {"mode": "abort"})
        resume = sky.call("/continue_generation", {})
        await client.worker.engine.clock.sleep(60.0)
        assert [call.over() for call in (pause, resume, flying)] == [False, False, False]


async def test_a_pause_that_aborts_ends_what_was_retracted() -> None:
    async with flights() as (client, sky):
        flying = await sky.fly(PROMPT, 900)
        await client.pause("retract")
        await client.pause("abort")
        await until(flying.over)
        assert flying.meta["finish_reason"]["message"] == "Abort in waiting queue"


@pytest.mark.parametrize(
    ("mode", "flushed"), [("abort", True), ("retract", True), ("in_place", False)]
)
async def test_whether_the_cache_can_be_flushed_while_paused(mode: str, flushed: bool) -> None:
    async with flights() as (client, sky):
        await sky.fly(PROMPT, 900)
        await client.pause(mode)
        await client.worker.engine.clock.sleep(0.01)
        reply = await client.send("POST", "/flush_cache")
        assert reply.status == (200 if flushed else 400)
        assert (len(client.worker.engine.cache) == 0) == flushed
        if not flushed:
            assert reply.body == b"Flush cache failed.\n"


async def test_a_flush_may_wait_for_what_runs() -> None:
    async with flights() as (client, sky):
        await sky.fly(PROMPT, 60)
        assert (await client.send("POST", "/flush_cache")).status == 400
        assert (await client.send("POST", "/flush_cache", query={"timeout": 9})).status == 200


# probes


async def status(client: Any, path: str) -> int:
    reply = await client.send("GET", path)
    assert reply.body == b""
    return int(reply.status)


async def test_a_pause_shows_in_ready_alone() -> None:
    async with serving() as client:
        assert [await status(client, path) for path in ("/ready", "/ping")] == [200, 200]
        await client.pause("retract")
        assert [await status(client, path) for path in ("/ready", "/ping")] == [503, 200]
        await client.resume()
        assert await status(client, "/ready") == 200


async def test_a_health_call_while_paused_leaves_the_server_unready_until_the_next_one() -> None:
    async with serving() as client:
        await client.pause("retract")
        assert await status(client, "/health") == 503
        await client.resume()
        assert [await status(client, path) for path in ("/ready", "/ping")] == [503, 503]
        assert await client.tokens(PROMPT, 5) == GREEDY[:5]
        assert await status(client, "/ready") == 503
        assert await status(client, "/health") == 200
        assert [await status(client, path) for path in ("/ready", "/ping")] == [200, 200]


async def test_any_answer_of_the_scheduler_makes_a_paused_server_healthy() -> None:
    async with serving() as client, anyio.create_task_group() as group:
        await client.pause("retract")
        found: list[int] = []

        async def probe() -> None:
            found.append(await status(client, "/health"))

        group.start_soon(probe)
        await client.worker.engine.clock.sleep(3.5)
        await client.get("/server_info")
        await until(lambda: found)
    assert found == [200]


async def test_health_without_generation_is_a_flag_of_the_server() -> None:
    async with serving(health_generation=False) as client:
        await client.pause("retract")
        assert await status(client, "/health") == 200
        assert await status(client, "/health_generate") == 503


async def test_the_times_of_the_start_tell_one_process_from_the_next() -> None:
    async with Cluster.from_query({"protocol": "sglang", "workers": "2"}) as cluster:
        seen = []
        for _ in range(2):
            for index in range(2):
                reply = await cluster.handle(index, Call("GET", "/server_info"))
                assert isinstance(reply.body, bytes)
                seen.append(reply.body)
                cluster.workers[index].restart()
    assert len(set(seen)) == 4


# keys

EVERYBODY, USERS, ADMINS = "/health", "/server_info", "/weights_checker"


@pytest.mark.parametrize(
    ("keys", "given", "allowed"),
    [
        ({}, None, {EVERYBODY, USERS, ADMINS}),
        ({"api_key": "u"}, None, {EVERYBODY}),
        ({"api_key": "u"}, "u", {EVERYBODY, USERS, ADMINS}),
        ({"admin_api_key": "a"}, None, {EVERYBODY, USERS}),
        ({"admin_api_key": "a"}, "a", {EVERYBODY, USERS, ADMINS}),
        ({"api_key": "u", "admin_api_key": "a"}, None, {EVERYBODY}),
        ({"api_key": "u", "admin_api_key": "a"}, "u", {EVERYBODY, USERS}),
        ({"api_key": "u", "admin_api_key": "a"}, "a", {EVERYBODY, ADMINS}),
    ],
)
async def test_which_key_opens_what(
    keys: dict[str, Any], given: str | None, allowed: set[str]
) -> None:
    headers = {} if given is None else {"Authorization": f"Bearer {given}"}
    async with serving(**keys) as client:
        for path in (EVERYBODY, USERS, ADMINS):
            reply = await client.send("GET", path, headers=headers)
            assert (reply.status == 200) == (path in allowed)
            assert reply.status in (200, 401)
        unknown = await client.send("GET", "/nope", headers=headers)
        assert unknown.status == (404 if USERS in allowed else 401)
