"""The worker against recorded exchanges of SGLang 0.5.23: statuses, bodies, frames."""

import base64
import json
import pickle
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genapi.embedded import Call, EngineConfig, Fault, policy
from tests.unit.embedded.harness import events, keys_of, parsed, until
from tests.unit.embedded.sglang_harness import (
    RECORDED,
    UPDATE,
    SglangClient,
    flights,
    recorded,
    replay,
    serving,
)

LARGE = EngineConfig(vocab=512, max_model_len=1024)
MODEL = "/models/tiny-llama-a"
WEIGHTS = policy.init(1, vocab=512)

NOT_REPLAYED = {
    "gateway_add_worker": "the gateway is another program",
    "gateway_generate": "the gateway is another program",
    "gateway_get_worker": "the gateway is another program",
    "gateway_list_workers": "the gateway is another program",
    "parse_function_call": "nobody asks for what the chat route has read already",
    "separate_reasoning": "nobody asks for what the chat route has read already",
    "set_internal_state": "the embedded scheduler has no such knobs",
}

FREE = {
    "text",
    "output_ids",
    "e2e_latency",
    "response_sent_to_client_ts",
    "created",
    "input_token_logprobs",
    "output_token_logprobs",
    "input_top_logprobs",
    "output_top_logprobs",
    "input_token_ids_logprobs",
    "output_token_ids_logprobs",
    "output_token_sampling_logprobs",
}
"""Values that depend on the model or the clock; their shapes do not."""

MEASURED = {
    "storage_prefetch_wait",
    "storage_staging_wait",
    "forward_entry_time",
    "prefill_finished_time",
    "queue_time",
    "request_received_ts",
    "first_token_latency",
    "api_server_dispatch_finish_ts",
    "request_finished_ts",
    "decode_throughput",
}
"""What `--enable-metrics` adds."""


def shape(value: Any, key: str = "", *, free: bool = False) -> Any:
    """A value with the kinds of what is free in place of it."""
    free = free or key in FREE
    match value:
        case dict():
            return {
                name: shape(one, name, free=free)
                for name, one in value.items()
                if name not in MEASURED
            }
        case list():
            return [shape(one, free=free) for one in value]
        case bool() | None:
            return value
        case int() | float() if free:
            return type(value).__name__
        case str() if free or (key == "id" and len(value) == 32):
            return "str"
        case _:
            return value


@pytest.fixture
async def client() -> AsyncIterator[SglangClient]:
    async with serving(engine=LARGE, model=MODEL) as running:
        yield running


async def same(
    client: SglangClient, name: str, *, change: Callable[[Any], Any] = lambda body: body
) -> Any:
    """Repeat a recording; the reply must be the recorded one but for what is free."""
    response = recorded(name)["response"]
    status, body, kind = await replay(client, name, change=change)
    assert status == response["status"], body
    assert shape(body) == shape(response["body"])
    if "content_type" in response:
        assert kind == response["content_type"]
    return body


REFUSED = [
    "auth_admin_route_user_key",
    "auth_generate_no_key",
    "continue_no_body",
    "error_404",
    "error_405",
    "error_bad_type",
    "error_empty_ids",
    "error_hidden_states",
    "error_init_missing_fields",
    "error_lora_disabled",
    "error_max_new_tokens_too_big",
    "error_negative_temperature",
    "error_no_input",
    "error_pause_bad_mode",
    "error_pause_no_body",
    "error_routed_dp_rank",
    "error_too_long",
    "error_unknown_sampling_param",
    "get_weights_by_name_unknown",
    "load_lora_disabled",
    "remote_instance_transfer_engine_info",
    "unload_lora_disabled",
    "update_weights_from_disk_missing",
    "weights_02_update_without_session",
    "weights_10_end_without_session",
    "weights_13_destroy_again",
]


@pytest.mark.parametrize("name", REFUSED)
async def test_refusals_are_the_recorded_ones(name: str) -> None:
    keys: dict[str, Any] = (
        {"api_key": "user", "admin_api_key": "adm"} if name.startswith("auth") else {}
    )
    async with serving(engine=LARGE, model=MODEL, **keys) as client:
        await same(client, name)


async def test_a_body_that_is_no_json(client: SglangClient) -> None:
    recording = recorded("error_bad_json")
    raw = recording["request"]["raw"].encode()
    status, body = parsed(await client.worker.handle(Call("POST", "/generate", body=raw)))
    assert (status, body) == (
        recording["response"]["status"],
        json.loads(recording["response"]["body"]),
    )


ANSWERED = [
    "begin_weight_update_dp2",
    "continue_generation",
    "error_init_weights_update_group_dp2",
    "flush_cache",
    "health",
    "health_generate",
    "pause_abort_default",
    "pause_in_place",
    "ready",
    "update_weight_version",
    "v1_models",
    "weights_03_pause_retract",
    "weights_04_begin",
    "weights_07_continue",
]


@pytest.mark.parametrize("name", ANSWERED)
async def test_answers_are_the_recorded_ones(name: str) -> None:
    size: dict[str, Any] = {"dp_size": 2} if name.endswith("dp2") else {}
    async with serving(engine=LARGE, model=MODEL, **size) as client:
        await same(client, name)


async def test_memory_is_released_and_resumed(client: SglangClient) -> None:
    await same(client, "release_memory_occupation")
    await same(client, "resume_memory_occupation")


async def test_health_takes_a_second_and_fails_after_twenty_while_paused(
    client: SglangClient,
) -> None:
    clock = client.worker.engine.clock
    for name in ("health", "health_while_paused"):
        if name == "health_while_paused":
            await client.pause("retract")
            await same(client, "ready_while_paused")
        began = clock.now()
        await same(client, name)
        assert clock.now() - began == pytest.approx(recorded(name)["elapsed_s"], abs=0.1)


async def test_facts(client: SglangClient) -> None:
    for name in ("model_info", "get_model_info"):
        response = recorded(name)["response"]
        status, body, kind = await replay(client, name)
        assert (status, kind) == (response["status"], response["content_type"])
        wanted = response["body"] | {
            "model_type": "tiny",
            "architectures": ["TinyForCausalLM"],
            "embedding": body["embedding"],
        }
        assert body == wanted
        assert list(body) == list(wanted)


async def test_the_server_tells_its_arguments_and_keys() -> None:
    response = recorded("server_info_trimmed")["response"]
    flags: dict[str, Any] = {"dp_size": 2, "api_key": "user", "admin_api_key": "adm"}
    async with serving(engine=LARGE, model=MODEL, **flags) as client:
        status, body, _ = await replay(client, "server_info_trimmed")
    assert status == response["status"]
    wanted = response["body"]
    states = body["internal_states"]
    assert len(states) == response["internal_states_len"]
    tail = response["internal_states_0_keys_tail"]
    assert {"world_size", "startup_time"} <= states[0].keys() & {*tail}
    differs = {"startup_time", "launch_command", "port", "enable_metrics", "max_total_num_tokens"}
    assert {key: body[key] for key in wanted.keys() - differs} == {
        key: wanted[key] for key in wanted.keys() - differs
    }
    assert differs <= body.keys()
    assert "--api-key user --admin-api-key adm" in wanted["launch_command"]
    assert "--api-key user --admin-api-key adm" in body["launch_command"]


async def test_loads_are_a_part_of_the_recorded_ones(client: SglangClient) -> None:
    status, body, _ = await replay(client, "v1_loads")
    wanted = recorded("v1_loads")["response"]
    assert status == wanted["status"]
    assert body.keys() <= wanted["body"].keys()
    assert len(body["loads"]) == len(wanted["body"]["loads"])
    assert body["loads"][0].keys() <= wanted["body"]["loads"][0].keys()


async def test_text_becomes_ids(client: SglangClient) -> None:
    status, body, _ = await replay(client, "tokenize")
    wanted = recorded("tokenize")["response"]["body"]
    assert status == 200
    assert body.keys() == wanted.keys()
    assert body["max_model_len"] == wanted["max_model_len"]
    await same(client, "generate_text", change=lambda body: body | {"text": "hello big world"})


# generation

OPENAI_REFUSED = [
    "openai_chat_stream_ids_refused",
    "openai_error_missing_messages",
    "openai_error_too_long",
    "tokenize_no_messages",
]


@pytest.mark.parametrize("name", OPENAI_REFUSED)
async def test_what_openais_routes_refuse_is_what_was_recorded(
    client: SglangClient, name: str
) -> None:
    await same(client, name)


TOKENIZED = ["tokenize_chat", "tokenize_chat_tools", "tokenize_text"]


@pytest.mark.parametrize("name", TOKENIZED)
async def test_texts_and_chats_become_ids_with_the_recorded_keys(
    client: SglangClient, name: str
) -> None:
    status, body, _ = await replay(client, name)
    assert status == 200
    assert body.keys() == recorded(name)["response"]["body"].keys()
    assert body["count"] == len(body["tokens"])


OPENAI = [
    "openai_chat_input_ids",
    "openai_chat_meta_info",
    "openai_chat_n2",
    "openai_chat_token_ids",
    "openai_chat_tool_required",
    "openai_completions_text",
    "openai_completions_token_ids",
]


@pytest.mark.parametrize("name", OPENAI)
async def test_replies_of_openais_routes_have_the_recorded_keys(name: str) -> None:
    thinks = name in ("openai_chat_meta_info", "openai_chat_n2")
    async with serving(engine=LARGE, model=MODEL, reasoning_parser=thinks) as client:
        response = recorded(name)["response"]
        status, body, _ = await replay(client, name)
        assert status == response["status"]
        # What a tool is called with, cached and counted depends on the model.
        for one in (body, response["body"]):
            for choice in one["choices"]:
                (choice.get("message") or {}).pop("tool_calls", None)
                (choice.get("meta_info") or {}).pop("cached_tokens_details", None)
                if choice["logprobs"] is not None:
                    choice["logprobs"].pop("top_logprobs", None)
                    for entry in choice["logprobs"].get("content", ()):
                        for scored in (entry, *entry["top_logprobs"]):
                            scored["bytes"] = None
        assert keys_of(body) == keys_of(response["body"])


async def test_chunks_of_completions_have_the_recorded_keys(client: SglangClient) -> None:
    recording = recorded("openai_completions_stream")
    reply = await client.send("POST", "/v1/completions", recording["request"]["json"])
    lines = [line.removeprefix("data: ") for line in recording["response"]["raw_lines"] if line]
    wanted = [line if line == "[DONE]" else json.loads(line) for line in lines]
    got = await events(reply)
    assert got.pop() == wanted.pop() == "[DONE]"
    for position in (0, 1, -2, -1):
        for chunk in (got[position], wanted[position]):
            for choice in chunk["choices"]:
                choice["logprobs"].pop("top_logprobs")
        assert keys_of(got[position]) == keys_of(wanted[position])


BATCHES = ["generate_n2_as_batch", "generate_text_n2"]


@pytest.mark.parametrize("name", BATCHES)
async def test_a_batch_of_one_prompt_has_the_recorded_keys_and_ids(
    client: SglangClient, name: str
) -> None:
    response = recorded(name)["response"]
    status, body, _ = await replay(client, name)
    assert status == response["status"]
    assert [keys_of(one) for one in body] == [keys_of(one) for one in response["body"]] or [
        one.keys() for one in body
    ] == [one.keys() for one in response["body"]]
    assert [one["meta_info"]["id"] for one in body] == [
        one["meta_info"]["id"] for one in response["body"]
    ]


async def test_frames_of_a_batch_of_one_prompt_have_the_recorded_ids(
    client: SglangClient,
) -> None:
    recording = recorded("generate_n2_as_batch_stream")
    reply = await client.send("POST", "/generate", recording["request"]["json"])
    frames = [frame for frame in await events(reply) if frame != "[DONE]"]
    assert {(f["index"], f["meta_info"]["id"]) for f in frames} == {
        (0, "genapi-2_0"),
        (1, "genapi-2_1"),
    }


GENERATED = [
    "error_both_inputs",
    "error_routed_experts_disabled",
    "error_unknown_top_field",
    "generate_batch",
    "generate_batch_rid_prefix",
    "generate_full_logprobs",
    "generate_n2",
    "generate_stop_token_id",
    "generate_with_metrics_dp2",
    "weights_00_generate_before",
]


def sequences(body: Any) -> Iterator[tuple[list[int], int]]:
    """Prompts of a recorded request, with how much of each was cached."""
    wanted = body["response"]["body"]
    ids = body["request"]["json"]["input_ids"]
    prompts = ids if isinstance(ids[0], list) else [ids] * (2 if isinstance(wanted, list) else 1)
    replies = wanted if isinstance(wanted, list) else [wanted]
    for prompt, reply in zip(prompts, replies, strict=True):
        yield prompt, reply["meta_info"]["cached_tokens"]


async def warm(client: SglangClient, name: str) -> None:
    """Put into the cache what was in it when this was recorded."""
    for prompt, cached in sequences(recorded(name)):
        if cached and name != "generate_n2":
            await client.generate(prompt[:cached], 0)


@pytest.mark.parametrize("name", GENERATED)
async def test_generation_replies_are_the_recorded_ones(name: str) -> None:
    flags: dict[str, Any] = {"dp_size": 2} if "dp2" in name else {}
    async with serving(engine=LARGE, model=MODEL, **flags) as client:
        await warm(client, name)
        stop = 0
        if "stop" in name:
            stop = (await client.tokens([5, 6, 7, 8], 4, cache_salt="aside"))[-1]

        def change(body: Any) -> Any:
            if stop:
                body["sampling_params"]["stop_token_ids"] = [stop]
            return body

        response = recorded(name)["response"]
        status, body, _ = await replay(client, name, change=change)
        wanted = response["body"]
        if stop:
            wanted["meta_info"]["finish_reason"]["matched"] = stop
        assert status == response["status"], body
        assert shape(body) == shape(wanted)


async def test_sampling_masks_have_the_recorded_shape(client: SglangClient) -> None:
    await warm(client, "generate_sampled_mask")
    _, body, _ = await replay(client, "generate_sampled_mask")
    wanted = recorded("generate_sampled_mask")["response"]["body"]
    for reply in (body, wanted):
        meta = reply["meta_info"]
        masks = meta.pop("output_token_sampling_mask")
        assert len(masks) == meta["output_token_sampling_mask_length"]
        for token, mask, (own, _, _), kept in zip(
            reply["output_ids"],
            masks,
            meta["output_token_logprobs"],
            meta["output_token_sampling_logprobs"],
            strict=True,
        ):
            assert token in mask
            assert len(mask) <= 50
            assert kept > own
    assert shape(body) == shape(wanted)


async def test_an_id_that_is_in_use_is_refused() -> None:
    async with flights(engine=LARGE) as (client, sky):
        await sky.fly([5, 6], 500, rid="dup")
        await same(client, "error_duplicate_rid")


@pytest.mark.parametrize("name", ["generate_stream", "generate_stream_batch"])
async def test_frames_are_the_recorded_ones(client: SglangClient, name: str) -> None:
    recording = recorded(name)
    prompts = recording["request"]["json"]["input_ids"]
    await client.generate([5, 6, 7] if name == "generate_stream" else [5], 0)
    reply = await client.send("POST", "/generate", recording["request"]["json"])
    assert reply.headers["content-type"] == recording["response"]["content_type"]
    lines = [line.removeprefix("data: ") for line in recording["response"]["raw_lines"] if line]
    wanted = [line if line == "[DONE]" else json.loads(line) for line in lines]
    got = await events(reply)
    assert got.pop() == wanted.pop() == "[DONE]"
    if name == "generate_stream":
        assert shape(got) == shape(wanted)
        return
    for index in range(len(prompts)):  # how the two interleave is not determined
        mine, theirs = ([f for f in frames if f["index"] == index] for frames in (got, wanted))
        assert shape(mine[-1]) == shape(theirs[-1]) | {
            "meta_info": shape(theirs[-1]["meta_info"])
            | (
                {"response_sent_to_client_ts": "float"}
                if "response_sent_to_client_ts" in mine[-1]["meta_info"]
                else {}
            )
        }


async def test_an_error_in_a_stream_is_a_frame(client: SglangClient) -> None:
    recording = recorded("generate_stream_error")
    reply = await client.send("POST", "/generate", recording["request"]["json"])
    assert reply.status == recording["response"]["status"]
    assert isinstance(reply.body, object)
    lines = [line.removeprefix("data: ") for line in recording["response"]["raw_lines"] if line]
    assert await events(reply) == [json.loads(lines[0]), "[DONE]"]


async def test_an_id_out_of_vocabulary_kills_the_server(client: SglangClient) -> None:
    recording = recorded("error_bad_token_id_kills_server")
    assert recording["response"].startswith("connection closed without a response")
    with pytest.raises(ConnectionResetError):
        await client.post("/generate", recording["request"]["json"])
    await client.worker.exited()
    with pytest.raises(ConnectionRefusedError):
        await client.get("/ping")


# in flight


async def test_an_abort_matches_by_prefix() -> None:
    wanted = recorded("generate_aborted_by_prefix")
    async with flights(engine=LARGE, weight_version="v-E") as (client, sky):
        await client.generate([5, 6, 7], 0)
        call = wanted["request"]["json"]
        await sky.fly([1], 600, rid="abc")
        flying = await sky.fly(
            call["input_ids"], 600, rid=call["rid"], sampling={"ignore_eos": True}, seen=20
        )
        await same(client, "abort_request")
        await until_over(flying)
        check_ended(flying.body, wanted["response"]["body"])


async def test_a_pause_that_aborts_gives_what_there_is() -> None:
    wanted = recorded("generate_inflight_pause_abort")
    async with flights(engine=LARGE, weight_version="v-C") as (client, sky):
        await client.generate([5, 6, 7], 0)
        flying = await sky.fly([5, 6, 7, 8], 600, rid="long-abort", seen=20)
        began = client.worker.engine.clock.now()
        await same(client, "pause_abort_default")
        assert client.worker.engine.clock.now() - began == pytest.approx(
            recorded("pause_abort_default")["elapsed_s"], abs=0.1
        )
        await until_over(flying)
        check_ended(flying.body, wanted["response"]["body"])


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_requests_that_live_through_an_update(mode: str) -> None:
    wanted = recorded(f"generate_inflight_across_update_{mode}")
    before, after = [
        s["version"] for s in wanted["response"]["body"]["meta_info"]["weight_versions"]
    ]
    rid = wanted["request"]["json"]["rid"]
    async with flights(engine=LARGE, weight_version=before) as (client, sky):
        await client.generate([5, 6, 7], 0)
        flying = await sky.fly([5, 6, 7, 8], 600, rid=rid, seen=40)
        await same(client, "weights_03_pause_retract" if mode == "retract" else "pause_in_place")
        await client.join_group()
        await client.publish(WEIGHTS, after, flush_cache=mode == "retract")
        await same(client, "continue_generation")
        await until_over(flying)
        check_ended(flying.body, wanted["response"]["body"])


async def test_a_flush_that_waits_in_vain() -> None:
    async with flights(engine=LARGE) as (client, sky):
        await sky.fly([5], 1000)
        await same(client, "flush_cache_busy")


async def until_over(flying: Any) -> None:
    await until(flying.over)


def check_ended(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Equal but for where exactly it was interrupted."""
    for reply in (got, wanted):
        meta = reply["meta_info"]
        assert len(reply["output_ids"]) == meta.pop("completion_tokens")
        spans = meta["weight_versions"]
        assert spans[0]["start"] == 0
        assert spans[-1]["end"] == len(reply["output_ids"])
        meta["weight_versions"] = [span["version"] for span in spans]
        reply["output_ids"] = []
    assert shape(got) == shape(wanted)


# weights


def translated(body: Any) -> tuple[Any, Any]:
    """A recorded update in tensors of the embedded policy: body and attachment."""
    if "backend" in body:
        return body | {"backend": "genapi_memory"}, None
    if "names" not in body:
        return body, None
    if len(body["names"]) > 1:
        names = list(WEIGHTS)
        facts = {
            "names": names,
            "dtypes": ["float32"] * len(names),
            "shapes": [list(array.shape) for array in WEIGHTS.values()],
        }
        return body | facts, list(WEIGHTS.values())
    name, size = body["names"][0], body["shapes"][0]
    if name == "model.norm.weight":
        body = body | {"names": [policy.VALUE]}
    return body, [np.zeros(size, dtype=np.float32)]


def in_our_sizes(message: str) -> str:
    return message.replace("(torch.Size([64]))", "(torch.Size([32, 32]))")


async def step(client: SglangClient, name: str, **fields: Any) -> None:
    """One recorded call of the story, in tensors of the embedded policy."""
    recording = recorded(name)
    body, arrays = translated(recording["request"]["json"] | fields)
    status, reply = await client.post(recording["request"]["path"], body, attachment=arrays)
    assert status == recording["response"]["status"], (name, reply)
    wanted = recording["response"]["body"]
    assert reply == wanted | {"message": in_our_sizes(wanted["message"])}, name


async def test_an_update_as_recorded(client: SglangClient) -> None:
    await step(client, "weights_01_init_group_gloo")
    await step(client, "weights_02_update_without_session")
    await same(client, "weights_03_pause_retract")
    await step(client, "weights_04_begin")
    await step(client, "weights_04b_begin_twice")
    await step(client, "weights_05_update_distributed")
    await step(client, "weights_06_end")
    await same(client, "weights_07_continue")
    response = recorded("weights_08_generate_after")["response"]
    status, body, _ = await replay(client, "weights_08_generate_after")
    assert status == response["status"]
    assert shape(body) == shape(response["body"])
    assert body["output_ids"] == policy.greedy(WEIGHTS, [5, 6, 7, 8], 8)


async def test_group_and_tensor_failures_as_recorded() -> None:
    async with flights(engine=LARGE) as (client, sky):
        await client.join_group(group_name="g2")
        await step(client, "weights_04_begin")
        await step(client, "weights_09_update_flattened_bucket")
        await step(client, "weights_11_update_unknown_group")
        await client.join_group(group_name="genapi_wu")
        await step(client, "weights_14_init_same_name_again")
        await step(client, "weights_12_destroy")
        await step(client, "weights_13_destroy_again")
        await step(client, "weights_15_unknown_param_name")
        assert await client.label() == "bad"
        await step(client, "weights_16_wrong_shape")
        assert await client.label() == "bad"
        await sky.fly([5], 900)
        await same(client, "pause_in_place")
        await client.join_group(group_name="g3")
        await step(client, "weights_17_in_place_flush_true_fails")
        assert await client.label() == "bad"
        await step(client, "weights_18_in_place_flush_false")
        assert await client.label() == "v-B"
        await step(client, "weights_06_end")
        await step(client, "weights_10_end_without_session")


async def test_a_trainer_that_dies_before_the_broadcast_as_recorded() -> None:
    async with serving(engine=LARGE, faults=[Fault(UPDATE, "peer_lost")]) as client:
        await client.join_group(group_name="dead")
        await client.post("/begin_weight_update", {})
        recording = recorded("weights_19_trainer_dies_before_broadcast")
        body, arrays = translated(recording["request"]["json"])
        status, reply = await client.post(UPDATE, body, attachment=arrays)
        assert status == recording["response"]["status"]
        wanted = recording["response"]["body"]["message"]
        for message in (reply["message"], wanted):
            assert message.startswith("Failed to receive weights: [")
            assert "Connection closed by peer [127.0.0.1]" in message
        assert await client.label() == "default"


async def test_a_group_of_two_ranks_as_recorded() -> None:
    async with serving(engine=LARGE, tp_size=2) as client:
        await step(client, "tp2_init_group_world3")
        await client.post("/begin_weight_update", {})
        await step(client, "tp2_update")
        await step(client, "tp2_destroy")


async def test_pickles_by_value_as_recorded(client: SglangClient) -> None:
    await client.post("/begin_weight_update", {})
    recording = recorded("update_weights_from_tensor_pickle_by_value")
    payload = base64.b64encode(pickle.dumps(list(WEIGHTS.items()))).decode()
    body = recording["request"]["json"] | {"serialized_named_tensors": [payload]}
    reply = await client.post(recording["request"]["path"], body)
    assert reply == (recording["response"]["status"], recording["response"]["body"])
    assert await client.serves(WEIGHTS)


def save(folder: Path, weights: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """A folder with a safetensors file, written by hand."""
    header, data = {}, b""
    for name, array in weights.items():
        raw = array.tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    head = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + data)
    return str(folder)


@pytest.mark.parametrize("name", ["update_weights_from_disk", "update_weights_from_disk_dp2"])
async def test_an_update_from_disk_as_recorded(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path / "b", WEIGHTS)
    size: dict[str, Any] = {"dp_size": 2} if name.endswith("dp2") else {}
    async with serving(engine=LARGE, model=MODEL, **size) as client:
        await same(client, name, change=lambda body: body | {"model_path": folder})
        facts = (await client.get("/model_info"))[1]
        assert facts["model_path"] == facts["served_model_name"] == folder
        assert facts["weight_version"] == recorded(name)["request"]["json"]["weight_version"]
        assert await client.serves(WEIGHTS)


async def test_parameters_are_shown_by_name(client: SglangClient) -> None:
    status, rows, _ = await replay(
        client, "get_weights_by_name", change=lambda body: body | {"name": policy.HEAD}
    )
    wanted = recorded("get_weights_by_name")
    assert status == wanted["response"]["status"]
    assert len(rows) == len(wanted["response"]["body"])
    assert rows == policy.init(0, vocab=512)[policy.HEAD][:4].tolist()


async def test_checksums_have_the_recorded_shape(client: SglangClient) -> None:
    recording = recorded("weights_checker")
    status, body, _ = await replay(client, "weights_checker")
    wanted = recording["response"]["body"]
    assert status == recording["response"]["status"]
    for reply in (body, wanted):
        assert len(reply.pop("per_engine_checksum")) == 64
        for rank in reply["ranks"]:
            assert len(rank.pop("per_gpu_checksum")) == 64
            assert {len(digest) for digest in rank.pop("checksums").values()} == {16}
    assert body == wanted


def test_every_recording_is_replayed_or_has_a_reason_why_not() -> None:
    source = Path(__file__).read_text()
    files = {path.stem for path in RECORDED.glob("*.json")}
    pairs = {f"generate_inflight_across_update_{mode}" for mode in ("retract", "in_place")}
    unused = {name for name in files - pairs if f'"{name}"' not in source}
    assert unused == set()
    assert NOT_REPLAYED.keys() <= files
    body, described = source.split("NOT_REPLAYED = {")[0], source.split("}\n\nFREE")[1]
    assert not [name for name in NOT_REPLAYED if f'"{name}"' in body + described]
