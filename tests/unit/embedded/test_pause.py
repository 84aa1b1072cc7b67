"""Pause modes, what waits, what ends, and what the labels say afterwards."""

from typing import Any

import anyio
import pytest

from genapi.embedded import EngineConfig, policy
from tests.unit.embedded.harness import Client, events, request, serving, until

GENERATE = "/inference/v1/generate"
PROMPT = [1, 2, 3]


async def flying(client: Client, n: int = 40, tokens: int = 3, **fields: Any) -> Any:
    """A stream that has brought some tokens already."""
    before = set(client.worker.engine.requests)
    reply = await client.send("POST", GENERATE, request(PROMPT, n, **fields) | {"stream": True})
    (new,) = set(client.worker.engine.requests) - before
    await until(lambda: len(new.tracks[0].output) >= tokens)
    return reply


async def ends(reply: Any) -> tuple[list[int], dict[str, Any]]:
    chunks = [c for chunk in (await events(reply))[:-1] for c in chunk["choices"]]
    return [token for c in chunks for token in c["token_ids"]], chunks[-1]


async def test_abort_ends_what_runs_with_what_it_has() -> None:
    async with serving() as client:
        reply = await flying(client)
        assert await client.post("/pause") == (200, {"status": "paused"})
        assert await client.get("/is_paused") == (200, {"is_paused": True})
        tokens, last = await ends(reply)
    assert 3 <= len(tokens) < 40
    assert tokens == policy.greedy(policy.init(0), PROMPT, len(tokens))
    assert last["finish_reason"] == "abort"
    assert last["weight_versions"] == [{"version": "default", "start": 0, "end": len(tokens)}]


async def test_wait_returns_when_what_runs_has_ended() -> None:
    async with serving() as client:
        reply = await flying(client)
        assert await client.post("/pause", query={"mode": "wait"}) == (200, {"status": "paused"})
        assert client.worker.engine.num_running == 0
        tokens, last = await ends(reply)
    assert (len(tokens), last["finish_reason"]) == (40, "length")


async def test_keep_freezes_and_goes_on() -> None:
    async with serving() as client:
        reply = await flying(client)
        await client.post("/pause", query={"mode": "keep"})
        (frozen,) = client.worker.engine.requests
        seen = len(frozen.tracks[0].output)
        await client.worker.engine.clock.sleep(1.0)
        assert len(frozen.tracks[0].output) == seen
        await client.post("/resume")
        tokens, last = await ends(reply)
    assert tokens == policy.greedy(policy.init(0), PROMPT, 40)
    assert last["weight_versions"] == [{"version": "default", "start": 0, "end": 40}]


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.33.0"])
async def test_new_requests_while_paused(mode: str, version: str) -> None:
    """Queued until resume, but 0.33 turns them away in two modes."""
    async with serving(version=version) as client:
        await client.post("/pause", query={"mode": mode})
        reply = await client.send("POST", GENERATE, request(PROMPT, 4) | {"stream": True})
        if version == "0.33.0" and mode != "keep":
            assert reply.status == 503
            assert isinstance(reply.body, bytes)
            assert b"Generation is paused. Please retry after it resumes." in reply.body
            return
        await client.worker.engine.clock.sleep(1.0)
        assert client.worker.engine.num_waiting == 1
        await client.post("/resume")
        tokens, last = await ends(reply)
    assert tokens == policy.greedy(policy.init(0), PROMPT, 4)
    assert ("weight_versions" in last) == (version != "0.31.0")


async def test_a_second_abort_pause_ends_the_queued_requests() -> None:
    async with serving() as client:
        await client.post("/pause")
        reply = await client.send("POST", GENERATE, request(PROMPT, 4) | {"stream": True})
        await client.post("/pause")
        tokens, last = await ends(reply)
    assert (tokens, last["finish_reason"], last["weight_versions"]) == ([], "abort", [])


async def test_a_json_body_does_not_choose_the_mode() -> None:
    async with serving() as client:
        reply = await flying(client)
        await client.post("/pause", {"mode": "keep", "clear_cache": False})
        _, last = await ends(reply)
    assert last["finish_reason"] == "abort"


async def test_a_label_moved_without_a_pause_makes_a_boundary() -> None:
    async with serving() as client:
        reply = await flying(client)
        await client.post("/update_weight_version", {"new_version": "moved"})
        tokens, last = await ends(reply)
    first, second = last["weight_versions"]
    assert (first["version"], second["version"]) == ("default", "moved")
    assert first["end"] == second["start"] >= 3
    assert tokens == policy.greedy(policy.init(0), PROMPT, 40)


async def test_a_label_that_made_no_token_leaves_no_trace() -> None:
    async with serving() as client:
        reply = await flying(client)
        await client.post("/pause", query={"mode": "keep"})
        for label in ("g:r:1:1!updating", "default"):
            await client.post("/update_weight_version", {"new_version": label})
        assert await client.get("/weight_info") == (200, {"weight_version": "default"})
        await client.post("/resume")
        _, last = await ends(reply)
    assert last["weight_versions"] == [{"version": "default", "start": 0, "end": 40}]


async def test_every_choice_has_its_own_spans() -> None:
    async with serving() as client:
        fields: dict[str, Any] = {
            "sampling": {"n": 2, "temperature": 1.0, "seed": 3, "stop_token_ids": []}
        }
        reply = await flying(client, **fields)
        await client.post("/pause", query={"mode": "keep"})
        await client.post("/update_weight_version", {"new_version": "moved"})
        await client.post("/resume")
        chunks = (await events(reply))[:-1]
    finals = [c for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(c["index"] for c in finals) == [0, 1]
    for choice in finals:
        spans = choice["weight_versions"]
        assert [span["version"] for span in spans] == ["default", "moved"]
        assert spans[0]["start"] == 0
        assert spans[-1]["end"] == 40


async def test_a_pause_takes_effect_although_its_caller_left() -> None:
    async with serving() as client:
        await flying(client, n=200)
        with anyio.move_on_after(0):
            await client.post("/pause", query={"mode": "keep"})
        await client.worker.engine.clock.sleep(0.01)
        assert await client.get("/is_paused") == (200, {"is_paused": True})


async def test_disconnecting_aborts_at_once() -> None:
    async with serving() as client:
        reply = await flying(client)
        await reply.body.aclose()
        assert client.worker.engine.requests == ()
        unread = await client.send("POST", GENERATE, request(PROMPT, 9) | {"stream": True})
        await unread.body.aclose()  # type: ignore[union-attr]
        assert client.worker.engine.requests == ()
        async with anyio.create_task_group() as group:
            group.start_soon(client.generate, PROMPT, 40)
            await until(lambda: client.worker.engine.num_running)
            group.cancel_scope.cancel()
        assert client.worker.engine.requests == ()


async def test_a_cancelled_read_is_a_client_that_left() -> None:
    async with serving() as client:
        await client.post("/pause", query={"mode": "keep"})
        reply = await client.send("POST", GENERATE, request(PROMPT, 9) | {"stream": True})
        assert client.worker.engine.num_waiting == 1
        with anyio.move_on_after(0.01) as scope:
            await anext(reply.body)  # type: ignore[arg-type]
        assert scope.cancelled_caught
        assert client.worker.engine.num_waiting == 0


async def test_requests_beyond_the_batch_wait_their_turn() -> None:
    async with serving(engine=EngineConfig(max_num_seqs=2)) as client:
        replies = [
            await client.send("POST", GENERATE, request([first], 5) | {"stream": True})
            for first in range(5)
        ]
        await until(lambda: client.worker.engine.num_running == 2)
        assert client.worker.engine.num_waiting == 3
        for first, reply in enumerate(replies):
            assert (await ends(reply))[0] == policy.greedy(policy.init(0), [first], 5)


async def test_sleep_levels_pause() -> None:
    async with serving() as client:
        query = {"level": 0, "mode": "keep"}
        assert (await client.post("/sleep", query=query))[1] == {"status": "sleeping", "level": 0}
        assert (await client.get("/is_sleeping"))[1] == {"is_sleeping": True}
        assert (await client.get("/is_paused"))[1] == {"is_paused": True}
        woken = await client.post("/wake_up", query={"tags": "scheduling"})
        assert woken == (200, {"status": "awake", "tags": ["scheduling"]})
        assert (await client.get("/is_paused"))[1] == {"is_paused": False}
        assert (await client.post("/wake_up"))[1] == {"status": "awake", "tags": None}
