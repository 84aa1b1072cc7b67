"""Every fault: what the caller sees, what took effect, and what the process is afterwards."""

import json
from typing import Any

import anyio
import pytest

from genapi.embedded import ByteStream, EngineConfig, Fault, RealClock, parse_faults, policy
from tests.unit.embedded.harness import Client, events, request, serving, until

LABEL = "/update_weight_version"
GENERATE = "/inference/v1/generate"


async def move(client: Client, label: str = "moved") -> tuple[int, Any]:
    return await client.post(LABEL, {"new_version": label})


def alive(client: Client) -> bool:
    return client.worker.alive


async def label_of(client: Client) -> object:
    return (await client.get("/weight_info"))[1]["weight_version"]


async def test_a_lost_reply_has_taken_effect() -> None:
    async with serving(faults=[Fault(LABEL, "lose_reply")]) as client:
        with pytest.raises(ConnectionResetError):
            await move(client)
        assert await label_of(client) == "moved"


async def test_a_refused_call_has_not() -> None:
    async with serving(faults=[Fault(LABEL, "refuse")]) as client:
        with pytest.raises(ConnectionRefusedError):
            await move(client)
        assert await label_of(client) == "default"


@pytest.mark.parametrize("action", ["die_before", "die_during", "die_after"])
async def test_a_death_loses_everything(action: str) -> None:
    async with serving(faults=[Fault(LABEL, action)]) as client:  # type: ignore[arg-type]
        instance = client.worker.instance_id
        with pytest.raises(ConnectionResetError):
            await move(client)
        with pytest.raises(ConnectionRefusedError):
            await client.get("/health")
        assert alive(client) is False
        client.worker.restart()
        assert alive(client) is True
        assert client.worker.instance_id != instance
        assert await label_of(client) == "default"
        choice = await client.choice([1, 2, 3], 8)
        assert choice["token_ids"] == policy.greedy(policy.init(0), [1, 2, 3], 8)


async def test_a_restart_does_not_wait_for_the_end_of_a_dead_engine() -> None:
    async with serving(engine=EngineConfig(exit_s=60.0), clock=RealClock()) as client:
        await client.post("/start_weight_update")
        await client.post(GENERATE, request([1], 1))
        client.worker.restart()
        assert (await client.choice([1, 2, 3], 8))["finish_reason"] == "length"


async def test_dying_during_a_stream_resets_it() -> None:
    async with serving(faults=[Fault(GENERATE, "die_during")]) as client:
        reply = await client.send("POST", GENERATE, request([1], 20) | {"stream": True})
        assert reply.status == 200
        with pytest.raises(ConnectionResetError):
            await events(reply)


async def test_a_kill_resets_what_is_in_flight() -> None:
    async with serving() as client:
        reply = await client.send("POST", GENERATE, request([1], 200) | {"stream": True})
        assert isinstance(reply.body, ByteStream)
        await anext(reply.body)
        outcomes: list[type[BaseException]] = []

        async def unary() -> None:
            try:
                await client.generate([2], 200)
            except ConnectionResetError as error:
                outcomes.append(type(error))

        async with anyio.create_task_group() as group:
            group.start_soon(unary)
            await until(lambda: client.worker.engine.num_running == 2)
            client.worker.kill()
        with pytest.raises(ConnectionResetError):
            await events(reply)
        assert outcomes == [ConnectionResetError]


async def test_no_answer_until_the_caller_gives_up() -> None:
    async with serving(faults=[Fault(LABEL, "never_answer")]) as client:
        with anyio.move_on_after(0.01) as scope:
            await move(client)
        assert scope.cancelled_caught
        assert await label_of(client) == "default"


async def test_a_late_answer_has_taken_effect_long_before() -> None:
    async with serving(faults=[Fault(LABEL, "answer_late", delay_s=30.0)]) as client:
        async with anyio.create_task_group() as group:
            group.start_soon(move, client)
            await until(lambda: client.worker.engine.label == "moved")
            assert client.worker.engine.clock.now() < 1.0
        assert client.worker.engine.clock.now() > 30.0


async def test_a_garbled_reply_is_no_json() -> None:
    async with serving(faults=[Fault(LABEL, "garble")]) as client:
        with pytest.raises(json.JSONDecodeError):
            await move(client)
        assert await label_of(client) == "moved"


async def test_an_error_on_order_has_no_effect() -> None:
    fault = Fault(LABEL, "error", status=502, body='"no"')
    async with serving(faults=[fault]) as client:
        assert await move(client) == (502, "no")
        assert await label_of(client) == "default"


async def test_a_fault_hits_the_call_it_counts() -> None:
    async with serving(faults=[Fault(LABEL, "error", nth=2, status=418)]) as client:
        found = [(await move(client))[0] for _ in range(3)]
        client.worker.faults.add(Fault(LABEL, "error", nth=2, status=419))
        found += [(await move(client))[0] for _ in range(3)]
    assert found == [200, 418, 200, 200, 419, 200]


def test_faults_from_json() -> None:
    text = (
        '[{"path": "/resume", "action": "lose_reply"}, {"path": "/p", "action": "error", "nth": 3}]'
    )
    assert parse_faults(text) == (Fault("/resume", "lose_reply"), Fault("/p", "error", nth=3))
    for wrong in (
        '[{"path": "/p", "action": "explode"}]',
        '[{"path": "/p", "action": "error", "nth": 0}]',
    ):
        with pytest.raises(ValueError, match=r"explode|nth|Invalid"):
            parse_faults(wrong)
