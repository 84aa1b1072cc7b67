"""The deployment against recorded exchanges of Dynamo 1.6.1: statuses, bodies, chunks."""

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genapi.embedded import EngineConfig, Worker, policy
from tests.unit.embedded.dynamo_harness import (
    FRONTEND,
    RECORDED,
    WORKER,
    DynamoClient,
    recorded,
    serving,
)
from tests.unit.embedded.harness import until

LARGE = EngineConfig(vocab=2048, width=8)

NOT_REPLAYED = {
    "custom_worker_handler_errors:0": "a route of the recording's own worker",
    "custom_worker_weight_version_in_engine_data:2": "what the recording's own worker says",
    "custom_worker_weight_version_in_engine_data:3": "what the recording's own worker says",
    "frontend_validation_errors:9": "the embedded frontend has no SGLang-shaped route",
    "migration_on_worker_killed:0": "the recording's own worker scores as nobody does",
    "mocker_generation:1": "the embedded frontend has no SGLang-shaped route",
}
"""Recorded calls that are not held against it, and why."""

FREE = {
    "id",
    "created",
    "text",
    "tokens",
    "token_logprobs",
    "top_logprobs",
    "completion_token_ids",
    "completion_logprobs",
    "token_ids",
    "content",
    "prompt_logprobs",
    "instance_id",
    "prefill_worker_id",
    "decode_worker_id",
    "tcp",
    "secs",
    "nanos",
    "system_url",
    "routes",
    "request_received_ms",
    "prefill_wait_time_ms",
    "prefill_time_ms",
    "ttft_ms",
    "total_time_ms",
    "context_window",
    "completion_tokens",
    "total_tokens",
    "world_size",
}
"""Values that depend on the model, the clock or the machine; their shapes do not."""
WORDED = FREE | {"actual", "prompt_tokens", "prompt_token_ids", "reused_tokens", "cached_tokens"}
"""What depends on the tokenizer too."""


def shape(value: Any, *, free: bool = False, names: Collection[str] = FREE) -> Any:
    """A value with the kinds of what is free in place of it."""
    if isinstance(value, dict):
        return {
            name: shape(one, free=free or name in names, names=names) for name, one in value.items()
        }
    if isinstance(value, list) and free:
        # Of the tokens of a chat the first tells what each of them is.
        told = value and isinstance(value[0], dict) and "token" in value[0]
        return shape(value[0], free=True) if told else "list"
    if isinstance(value, list):
        return [shape(one, names=names) for one in value]
    if free and isinstance(value, int | float) and not isinstance(value, bool):
        return "number"
    return "text" if free and isinstance(value, str) else value


def same(
    actual: tuple[int, Any],
    call: Mapping[str, Any],
    *,
    model: str = "tiny",
    names: Collection[str] = FREE,
) -> None:
    """Hold an answer against the recorded one; the lines of a stream one by one."""
    wanted = call["response"]
    if isinstance(wanted["body"], dict) and "sse_lines" in wanted["body"]:
        assert actual[0] == wanted["status"]
        lines = [line.replace(f'"{model}"', '"tiny"') for line in wanted["body"]["sse_lines"]]
        assert [shape(one, names=names) for one in chunks(actual[1])] == [
            shape(one, names=names) for one in chunks(lines)
        ]
        return
    body = json.loads(json.dumps(wanted["body"]).replace(f'"{model}"', '"tiny"'))
    body = json.loads(
        json.dumps(body).replace(f"`{model}`", "`tiny`").replace("vbackend", "backend")
    )
    assert actual == (wanted["status"], body) or (actual[0], shape(actual[1], names=names)) == (
        wanted["status"],
        shape(body, names=names),
    )


def chunks(lines: Sequence[str]) -> list[Any]:
    """What the events of a whole stream hold."""
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def renamed(call: Mapping[str, Any], *, model: str = "tinyv") -> dict[str, Any]:
    """The call, to the model that the embedded deployment serves."""
    found: dict[str, Any] = json.loads(json.dumps(call).replace(model, "tiny"))
    return found


def made(worker: Worker) -> int:
    """How many tokens its oldest request has."""
    return len(worker.engine.requests[0].tracks[0].output)


def asked(call: Mapping[str, Any]) -> Any:
    return call["request"]["body"]


async def replay(
    client: DynamoClient, name: str, *numbers: int, names: Collection[str] = FREE
) -> None:
    """Replay these calls of a recording, or all that are not excepted, in their order."""
    calls = recorded(name)
    for number in numbers or range(len(calls)):
        if f"{name}:{number}" not in NOT_REPLAYED:
            call = renamed(calls[number])
            same(await client.replay(call), calls[number], model="tinyv", names=names)


async def test_a_real_workers_replies_have_the_recorded_shape() -> None:
    async with serving(engine=LARGE) as client:
        await replay(client, "vllm_completions_token_in_out")


async def test_the_native_route_answers_once_the_frontend_has_it() -> None:
    async with serving(engine=LARGE, inference_generate=True) as client:
        await replay(client, "vllm_inference_v1_generate")
    async with serving(engine=LARGE) as client:
        status, _ = await client.replay(renamed(recorded("vllm_inference_v1_generate")[0]))
        assert status == 404


async def test_a_stream_has_the_recorded_chunks() -> None:
    async with serving(engine=LARGE) as client:
        await replay(client, "vllm_completions_stream")


async def test_a_chat_is_answered_in_the_recorded_shape_streamed_or_not() -> None:
    async with serving(engine=LARGE) as client:
        await replay(client, "vllm_chat_token_data")
        await replay(client, "vllm_chat", names=WORDED)


async def test_candidates_are_named_as_recorded_by_texts_or_by_ids() -> None:
    async with serving(engine=LARGE) as client:
        await replay(client, "vllm_candidates", 0, 1, 2, 3, 4, 5, names=WORDED)


async def test_a_chat_is_refused_in_the_recorded_words() -> None:
    async with serving(engine=LARGE) as client:
        await replay(client, "frontend_chat_errors")


async def test_a_prompt_without_room_is_refused_in_the_recorded_words() -> None:
    async with serving(engine=LARGE) as client:
        await replay(client, "frontend_context_length", names=WORDED)
        room = LARGE.max_model_len
        refusals = {}
        for size, asked in ((room - 3, 4), (room - 1, 2), (room, 1), (room + 1, 1)):
            status, body = await client.complete([5] * size, asked)
            assert status == 400
            refusals[size] = body["details"]["actual"]
        assert refusals == {
            room - 3: room + 1,
            room - 1: room + 1,
            room: room,
            room + 1: room + 1,
        }
        assert (await client.complete([5] * (room - 3), 3))[0] == 200


async def test_without_a_length_an_output_takes_the_room_that_there_is() -> None:
    async with serving() as client:
        status, body = await client.complete([5] * 4000, 1, max_tokens=None, ignore_eos=True)
    assert (status, body["usage"]["total_tokens"]) == (200, 4096)


@pytest.mark.parametrize(
    ("number", "stop"),
    [
        (0, "id"),
        (1, "id"),
        (2, "text"),
        (3, "text over two tokens"),
        (4, "id"),
        (5, "text"),
    ],
)
async def test_what_ended_an_output_is_told_as_recorded(number: int, stop: str) -> None:
    call = renamed(recorded("vllm_stops")[number])
    body = call["request"]["body"]
    async with serving(engine=LARGE) as client:
        free = {**body, "stop": None, "stop_token_ids": None, "stream": False}
        free.pop("stream_options", None)
        _, reply = await client.replay(call, body=free)
        ids = reply["nvext"]["completion_token_ids"]
        last = call["response"]["body"]
        if isinstance(last, dict) and "sse_lines" in last:
            made = sum(
                len(c["nvext"]["completion_token_ids"]) for c in chunks(last["sse_lines"])[:-1]
            )
        else:
            made = len(last["nvext"]["completion_token_ids"])
        stops: dict[str, tuple[str, Any]] = {
            "id": ("stop_token_ids", ids[made - 1]),
            "text": ("stop", f"{ids[made - 1]} "[1:]),
            "text over two tokens": ("stop", f"{ids[made - 2]} {ids[made - 1]}"),
        }
        field, ends = stops[stop]
        answer = await client.replay(call, body={**body, field: [ends]})
    same(answer, call, names=WORDED | {"stop_reason"})
    told = chunks(answer[1])[-2] if body["stream"] else answer[1]
    assert told["nvext"]["stop_reason"] == ends
    said = "".join(_said(one) for one in (chunks(answer[1]) if body["stream"] else [answer[1]]))
    whole = "".join(f"{token} " for token in ids[:made])
    assert said == (whole.removesuffix(f"{ends} ") if stop == "id" else whole.partition(ends)[0])


def _said(body: Mapping[str, Any]) -> str:
    """The text of a body's choices."""
    found = ""
    for choice in body["choices"]:
        message = choice.get("message") or choice.get("delta") or {}
        found += choice.get("text") or message.get("content") or ""
    return found


async def test_discovery_lists_what_a_real_one_does() -> None:
    async with serving() as client:
        await replay(client, "vllm_rl_workers")
        listed = (await client.replay(recorded("vllm_rl_workers")[0]))[1]["workers"]
        assert (
            listed[0]["routes"]
            == recorded("vllm_rl_workers")[0]["response"]["body"]["workers"][0]["routes"]
        )
    async with serving(workers=2) as client:
        await replay(client, "custom_worker_rl_workers_two")


async def test_prefill_and_decode_are_listed_and_counted() -> None:
    calls = recorded("custom_worker_prefill_decode_discovery")
    async with serving(workers=3, prefill=1) as client:
        status, body = await client.replay(calls[0])
        wanted = calls[0]["response"]["body"]["workers"]
        wanted[0]["system_url"] = ""  # that one was started without a server of its own
        assert status == 200
        assert [shape(w) for w in body["workers"]] == [shape(w) for w in wanted]
        same(await client.replay(calls[1]), calls[1])


async def test_the_frontend_says_of_itself_what_a_real_one_does() -> None:
    calls = recorded("frontend_health_models_ready")
    async with serving(workers=2) as client:
        for call in calls:
            same(await client.replay(call), call)


async def test_the_frontend_refuses_in_the_recorded_words() -> None:
    async with serving(inference_generate=True) as client:
        await replay(client, "frontend_validation_errors")


async def test_a_worker_refuses_in_the_recorded_words() -> None:
    async with serving(weight_transfer=False) as client:
        await replay(client, "vllm_admin_errors")


async def test_a_workers_own_server_refuses_in_the_recorded_words() -> None:
    calls = recorded("custom_worker_handler_errors")
    async with serving() as client:
        same(await client.replay(calls[1]), calls[1])
        # `echo` was a route of the recording's own worker: any other reads its body alike.
        bad = json.loads(json.dumps(calls[2]).replace("/engine/echo", "/engine/flush_cache"))
        same(await client.replay(bad), calls[2])
        await client.engine("set_weight_version", {"weight_version": 1})
        same(await client.replay(calls[3]), calls[3])


async def test_a_label_is_set_in_the_recorded_words() -> None:
    async with serving(workers=2) as client:
        await replay(client, "custom_worker_weight_version_in_engine_data", 0, 1)


async def test_a_group_is_used_in_the_recorded_words() -> None:
    async with serving(extension=True) as client:
        await replay(client, "vllm_admin_nccl_group_shape")


async def test_a_checkpoint_is_loaded_in_the_recorded_words(tmp_path: Path) -> None:
    weights = policy.init(1, vocab=64)
    save(tmp_path, weights)
    async with serving() as client:
        await client.engine("set_weight_version", {"weight_version": "step-2"})
        for call in recorded("vllm_admin_update_from_disk"):
            body = asked(call)
            if isinstance(body, dict) and "model_path" in body:
                body = body | {"model_path": str(tmp_path)}
            got = await client.replay(call, body=body)
            if call["request"]["url"].endswith("/health"):
                assert got[0] == call["response"]["status"]
                assert got[1]["status"] == call["response"]["body"]["status"]
            else:
                same(got, call)
        _, reply = await client.complete([1, 2, 3], 8)
        assert reply["nvext"]["completion_token_ids"] == policy.greedy(weights, [1, 2, 3], 8)


def checkpoints(root: Path) -> None:
    """Directories with the names of the recording, each with what was done to it there."""
    weights = policy.init(1, vocab=64)
    names = list(weights)
    for folder in ("seed1", "first", "last", "empty"):
        (root / folder).mkdir()
    for folder in ("seed1", "first", "last"):
        save(root / folder, {name: weights[name] for name in names[:1]})
        (root / folder / "model.safetensors").rename(root / folder / "a.safetensors")
        save(root / folder, {name: weights[name] for name in names[1:]})
    for folder, file in (("first", "a"), ("last", "model")):
        cut = root / folder / f"{file}.safetensors"
        cut.write_bytes(cut.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("vllm_admin_disk_failures", {}),
        ("vllm_admin_disk_without_sessions", {"weight_transfer": False}),
    ],
)
async def test_loads_that_fail_say_the_recorded_words_and_leave_the_recorded_state(
    name: str, flags: dict[str, Any], tmp_path: Path
) -> None:
    checkpoints(tmp_path)
    async with serving(**flags) as client:
        for call in json.loads(json.dumps(recorded(name)).replace("/ckpt", str(tmp_path))):
            same(await client.replay(call), call)
        _, reply = await client.complete([1, 2, 3], 8)
        made = policy.greedy(policy.init(1, vocab=64), [1, 2, 3], 8)
        assert reply["nvext"]["completion_token_ids"] == made


async def test_a_load_by_another_method_names_the_directory_as_weight_path(tmp_path: Path) -> None:
    async with serving() as client:
        await client.engine("pause_generation", {"mode": "keep", "clear_cache": True})
        body = {"model_path": str(tmp_path), "engine_rpc": "finish_weight_update"}
        reply = await client.engine("update_weights_from_disk", body)
        assert "unexpected keyword argument 'weight_path'" in reply["message"]


async def test_a_pause_that_aborts_is_reported_as_the_recorded_stop() -> None:
    calls = recorded("vllm_pause_abort_masks_as_stop")
    async with serving(inference_generate=True) as client:
        for pause, resume, generate in (calls[:3], calls[3:]):
            async with asyncio.TaskGroup() as tasks:
                flying = tasks.create_task(client.replay(renamed(generate)))
                engine = client.cluster.workers[0].engine
                await until(lambda engine=engine: engine.num_running > 0)
                same(await client.replay(pause), pause)
                same(await client.replay(resume), resume)
            same(flying.result(), generate, model="tinyv")


async def test_a_worker_that_sleeps_stays_listed_and_gets_nothing() -> None:
    async with serving() as client:
        await replay(client, "vllm_sleep_wake")


async def test_a_worker_that_sleeps_gets_requests_once_it_is_woken_and_not_once_it_is_resumed() -> (
    None
):
    async with serving() as client:

        async def routed() -> set[str]:
            _, health = await client.get(FRONTEND, "/health")
            return {one["endpoint"] for one in health["instances"]}

        await client.engine("control/sleep")
        for route in ("pause_generation", "resume_generation"):
            await client.engine(route)
            assert "generate" not in await routed()
        await client.engine("control/wake_up")
        assert "generate" in await routed()


async def test_a_simulated_worker_has_neither_routes_nor_scores() -> None:
    async with serving(family="mocker", engine=LARGE) as client:
        calls = recorded("mocker_no_rl_no_engine_routes")
        for call in (calls[0], *calls[2:]):
            same(await client.replay(call), call)
        status, body = await client.replay(calls[1])
        wanted = calls[1]["response"]
        assert (status, body["status"]) == (wanted["status"], wanted["body"]["status"])
        generation = recorded("mocker_generation")[0]
        same(await client.replay(generation), generation)


async def test_a_stream_of_a_killed_worker_ends_in_the_recorded_error() -> None:
    first, second, listed = recorded("stream_worker_killed_migration_0")
    async with serving(workers=2) as client:
        async with asyncio.TaskGroup() as tasks:
            flying = tasks.create_task(client.replay(first))
            workers = client.cluster.workers
            await until(lambda: any(w.engine.num_running for w in workers))
            dead = next(i for i, w in enumerate(workers) if w.engine.num_running)
            await until(lambda: made(workers[dead]) >= 5)
            workers[dead].kill()
        _, lines = flying.result()
        assert lines[-2:] == first["response"]["body"]["sse_lines"][-2:]
        chunk, wanted = (
            json.loads(of.removeprefix("data: "))
            for of in (lines[0], first["response"]["body"]["sse_lines"][0])
        )
        assert shape(chunk) == shape(wanted)
        _, lines = await client.replay(second)
        assert len(lines) == 61
        status, body = await client.replay(listed)
        by_error = sorted(body["workers"], key=lambda w: "error" not in w)
        expected = sorted(listed["response"]["body"]["workers"], key=lambda w: "error" not in w)
        assert status == 200
        assert [w.keys() for w in by_error] == [w.keys() for w in expected]
        assert by_error[0]["routes"] == expected[0]["routes"] == []


async def test_a_migrated_reply_has_the_recorded_signature() -> None:
    moved = recorded("migration_on_worker_killed")[1]
    wanted = moved["response"]["body"]
    async with serving(workers=2, migration_limit=3) as client:
        async with asyncio.TaskGroup() as tasks:
            flying = tasks.create_task(client.replay(moved))
            workers = client.cluster.workers
            await until(lambda: any(w.engine.num_running for w in workers))
            dead = next(w for w in workers if w.engine.num_running)
            await until(lambda: made(dead) >= 15)
            first = dead.engine
            dead.kill()
        status, body = flying.result()
        nvext, data = body["nvext"], body["nvext"]["engine_data"]
        assert status == 200
        assert first.error is not None
        assert body["usage"]["prompt_tokens"] == 2 + 30 - len(data["completion_token_ids"])
        assert len(nvext["completion_token_ids"]) == len(wanted["nvext"]["completion_token_ids"])
        assert (
            nvext["completion_token_ids"][-len(data["completion_token_ids"]) :]
            == (data["completion_token_ids"])
        )
        assert len(body["choices"][0]["logprobs"]["token_logprobs"]) == 30
        assert nvext["worker_id"].keys() == wanted["nvext"]["worker_id"].keys()
        assert nvext["prompt_token_ids"] == [4, 5]


def save(folder: Path, weights: policy.Weights) -> None:
    """One file of safetensors."""
    head, blob = {}, b""
    for name, array in weights.items():
        raw = np.ascontiguousarray(array, dtype="<f4").tobytes()
        offsets = [len(blob), len(blob) + len(raw)]
        head[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": offsets}
        blob += raw
    text = json.dumps(head).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + blob)


def test_every_recording_is_replayed_or_has_a_reason_why_not() -> None:
    source = Path(__file__).read_text()
    body = source.split('"""Recorded calls that are not held against it, and why."""')[1]
    files = {path.stem for path in RECORDED.glob("*.json")}
    excepted = {name.split(":")[0] for name in NOT_REPLAYED}
    whole = {
        f for f in excepted if all(f"{f}:{n}" in NOT_REPLAYED for n in range(len(recorded(f))))
    }
    named = {name for name in files if f'"{name}"' in body}
    assert named | whole == files
    assert not named & whole
    assert all(int(name.split(":")[1]) < len(recorded(name.split(":")[0])) for name in NOT_REPLAYED)


@pytest.mark.parametrize("address", [FRONTEND, WORKER])
async def test_an_unknown_path_is_a_404(address: int) -> None:
    async with serving() as client:
        assert (await client.get(address, "/nowhere"))[0] == 404
