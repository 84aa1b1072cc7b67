"""The worker against recorded exchanges of vLLM 0.32: statuses, messages, keys."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from genapi.embedded import Call, EngineConfig, policy
from genapi.embedded.texts import TOOL
from tests.unit.embedded.harness import (
    Client,
    events,
    exchanges,
    info_of,
    keys_of,
    parsed,
    recorded,
    request,
    serving,
    until,
)

LARGE = EngineConfig(vocab=512, max_model_len=16384)
WEIGHTS = policy.init(1, vocab=512)
GENERATE = "/inference/v1/generate"


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with serving(engine=LARGE) as running:
        yield running


def expected(message: str) -> str:
    """A recorded message in the words of the embedded backend."""
    for real, ours in (
        (r"for Gloo: register\.<locals>\.Init\.", "for GenapiMemory: InitInfo."),
        (r"for Gloo: register\.<locals>\.Update\.", "for GenapiMemory: UpdateInfo."),
        (r"named 'nope' in Qwen2Model\..*(?=', please)", "named 'model.nope.weight' in <model>"),
        (r"\[64\]\)", "[32, 32])"),
    ):
        message = re.sub(real, ours, message, flags=re.DOTALL)
    return message


def got(message: str) -> str:
    return re.sub(r"in TinyForCausalLM\..*(?=', please)", "in <model>", message, flags=re.DOTALL)


def translated(body: Any) -> tuple[Any, Any]:
    """A recorded update in tensors of the embedded policy: body and attachment."""
    info = (body or {}).get("update_info")
    if info is None or "dtype_names" not in info or not info["names"]:
        return body, None
    if len(info["names"]) == 1:
        unknown = "nope" in info["names"][0]
        info = info | {"names": info["names"] if unknown else [policy.VALUE]}
        return {"update_info": info}, [[0.0] * info["shapes"][0][0]]
    part = dict(list(WEIGHTS.items())[: 1 if len(info["names"]) < 20 else None])
    return {"update_info": info_of(part)}, list(part.values())


async def replay(client: Client, name: str, *, skip: str = r"^$") -> int:
    """Repeat a recording; every reply must be the recorded one but for weights and ids."""
    count = 0
    for label, call, response in exchanges(name):
        known = client.worker.engine.error is None
        if re.search(skip, f"{label} {call['path']}"):
            continue
        body, attachment = translated(call.get("json"))
        status, reply = (
            await client.post(call["path"], body, query=call.get("query"), attachment=attachment)
            if call["method"] == "POST"
            else await client.get(call["path"], query=call.get("query"))
        )
        assert status == response["status"], (label, reply)
        want = response.get("body")
        if isinstance(want, dict) and "error" in want and isinstance(want["error"], dict):
            assert got(reply["error"]["message"]) == expected(want["error"]["message"]), label
            assert {**reply["error"], "message": ""} == {**want["error"], "message": ""}, label
        elif isinstance(want, dict) and "choices" not in want and "data" not in want:
            assert reply == want, label
        else:
            assert keys_of(reply) == keys_of(want), label
        count += known
    return count


async def test_facts(client: Client) -> None:
    assert await replay(client, "01_health_info", skip="/ping|/load|kv_event") == 8


async def test_generation_replies_have_the_recorded_keys() -> None:
    async with serving(engine=LARGE, prompt_tokens_details=True) as client:
        assert await replay(client, "08_generate", skip="stop") == 7


async def test_text_mode_has_the_recorded_keys(client: Client) -> None:
    recording = next(r["body"] for label, _, r in exchanges("08_generate") if "text" in label)
    body = request([300, 301], 50, sampling={"stop": ["1"], "logprobs": 0}, output_mode="text")
    _, reply = await client.post(GENERATE, body)
    recording["usage"]["prompt_tokens_details"] = None
    assert keys_of(reply) == keys_of(recording)
    choice = reply["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == "1"
    assert "1" not in choice["text"]
    assert "1" in str(choice["token_ids"][-1])


@pytest.mark.parametrize("index", [0, 1])
async def test_stream_chunks_have_the_recorded_keys(index: int) -> None:
    entry = recorded("09_generate_stream")[index]
    async with serving(engine=LARGE, prompt_tokens_details=True) as client:
        body = entry["request"]["json"]
        reply = await client.send("POST", entry["request"]["path"], body)
        chunks = await events(reply)
    assert dict(reply.headers) == {
        "content-type": entry["response"]["headers"]["content-type"],
        "vary": "Origin",
    }
    lines = [line.removeprefix("data: ") for line in entry["response"]["sse"]]
    assert chunks.pop() == lines.pop() == "[DONE]"
    assert len(chunks) == len(lines)
    for chunk, line in zip(chunks, lines, strict=True):
        assert keys_of(chunk) == keys_of(json.loads(line))
    finals = [c for chunk in chunks for c in chunk["choices"] if c["weight_versions"]]
    assert [c["index"] for c in finals] == list(range(body["sampling_params"].get("n", 1)))


def shape_of(body: Any) -> Any:
    """The keys of a reply, but for those that are texts of its vocabulary."""
    if isinstance(body, dict):
        texts = {"bytes": None, "top_logprobs": None}
        return {k: texts.get(k, shape_of(v)) for k, v in body.items() if k != "decoded_token"}
    return keys_of(body) if not isinstance(body, list) else [shape_of(one) for one in body[:1]]


@pytest.mark.parametrize("number", ["04_completions", "06_chat"])
async def test_replies_of_openais_routes_have_the_recorded_keys(number: str) -> None:
    count = 0
    async with serving(engine=LARGE, prompt_tokens_details=True) as client:
        for label, call, response in exchanges(number):
            # Several prompts and echo are not there; scores of a prompt are named by its ids.
            if re.search("two prompts|echo|prompt_?logprobs", label):
                continue
            status, reply = await client.post(call["path"], call["json"])
            assert status == response["status"], label
            assert shape_of(reply) == shape_of(response["body"]), label
            count += 1
    assert count >= 2


async def test_texts_and_chats_become_ids_as_recorded(client: Client) -> None:
    for label, call, response in exchanges("03_tokenize"):
        if call["path"] == "/detokenize":
            continue
        status, reply = await client.post(call["path"], call["json"])
        assert status == response["status"], label
        assert keys_of(reply) == keys_of(response["body"]), label
        assert reply["count"] == len(reply["tokens"])


@pytest.mark.parametrize("name", ["render chat", "derender plain", "derender a tool call"])
async def test_rendering_has_the_recorded_keys(client: Client, name: str) -> None:
    call, response = next((c, r) for label, c, r in exchanges("62_render") if label == name)
    body = json.loads(json.dumps(call["json"]))
    if "generate_response" in body:
        body["generate_response"]["choices"][0]["token_ids"] = [7, TOOL, 8]
    status, reply = await client.post(call["path"], body)
    assert status == response["status"]
    # A rendered request lists those sampling parameters that are not at their default.
    for shown in (reply, response["body"]):
        shown.pop("sampling_params", None)
    assert keys_of(reply) == keys_of(response["body"])


async def test_a_reply_of_a_server_that_parses_is_not_read_without_its_request() -> None:
    name = "derender without the chat request"
    call, response = next((c, r) for label, c, r in exchanges("62_render") if label == name)
    async with serving(engine=LARGE, reasoning_parser=True) as client:
        assert await client.post(call["path"], call["json"]) == (400, response["body"])


@pytest.mark.parametrize("name", ["05_completions_stream", "07_chat_stream"])
async def test_streams_of_openais_routes_have_the_recorded_keys(name: str) -> None:
    (entry,) = recorded(name)
    async with serving(engine=LARGE, prompt_tokens_details=True) as client:
        reply = await client.send("POST", entry["request"]["path"], entry["request"]["json"])
        chunks = await events(reply)
    lines = [line.removeprefix("data: ") for line in entry["response"]["sse"]]
    assert chunks.pop() == lines.pop() == "[DONE]"
    # Steps may be merged: first, last and closing frames tell all keys.
    for position in (0, -2, -1):
        assert shape_of(chunks[position]) == shape_of(json.loads(lines[position]))


async def test_pause_parameters(client: Client) -> None:
    assert await replay(client, "31_pause_params") == 9


async def test_refused_requests(client: Client) -> None:
    assert await replay(client, "46_errors", skip="streaming|json|content") >= 15


async def test_refused_values(client: Client) -> None:
    body = request([300] * 16390, 2)
    status, reply = await client.post(GENERATE, body)
    answers = {label: r["body"] for label, _, r in exchanges("46_errors_x")}
    assert (status, reply) == (400, answers["prompt too long generate"])
    status, reply = await client.post(GENERATE, request([1], 1, sampling={"logprobs": -1}))
    assert (status, reply) == (400, answers["logprobs -1"])
    body = {"model": "tiny", "prompt": [300] * 16390, "max_tokens": 2}
    status, reply = await client.post("/v1/completions", body)
    assert (status, reply) == (400, answers["prompt too long completions"])
    long = await client.generate([300] * 16380, 100)
    assert long["usage"]["completion_tokens"] == 4


async def test_a_body_that_is_no_json(client: Client) -> None:
    recording = next(r["body"] for label, _, r in exchanges("46_errors") if label == "bad json")
    reply = await client.worker.handle(Call("POST", GENERATE, body=b"{"))
    assert parsed(reply) == (400, recording)
    headers = {"content-type": "text/plain"}
    status, refusal = await client.post(GENERATE, {}, headers=headers)
    wrong = next(r["body"] for label, _, r in exchanges("46_errors") if "content" in label)
    assert (status, refusal) == (400, wrong)


async def test_updates_as_recorded(client: Client) -> None:
    assert await replay(client, "20_gloo_weight_update", skip="weight_checker") >= 20


async def test_weight_calls_out_of_order(client: Client) -> None:
    await client.post("/update_weight_version", {"new_version": "mid-flight"})
    await client.post("/start_weight_update")
    skipped = "timeout_s=2|draft"
    assert await replay(client, "42_weight_errors", skip=skipped) >= 20


async def test_generating_in_an_open_session_kills(client: Client) -> None:
    answers = {label: r for label, _, r in exchanges("47_weight_hazards")}
    await client.join()
    await client.post("/start_weight_update")
    status, reply = await client.post(GENERATE, request([300, 301], 8))
    recording = answers["generate with an update session open (no pause), nothing sent yet"]
    assert (status, reply) == (recording["status"], recording["body"])
    await client.worker.exited()
    with pytest.raises(ConnectionRefusedError):
        await client.get("/health")


async def test_failed_updates_while_paused(client: Client) -> None:
    await replay(client, "49_weight_hazards_paused")
    assert client.worker.engine.error is not None


async def test_no_recovery_after_a_rejected_tensor(client: Client) -> None:
    assert await replay(client, "49b_recovery_after_failed_update") == 8


async def test_keys() -> None:
    async with serving(engine=LARGE, api_key="secret", weight_transfer=False) as locked:
        for label, call, response in exchanges("50_auth"):
            if re.search("metrics|okenize|rpc|load|invocations|server_info", call["path"]):
                continue
            headers = call.get("headers")
            reply = await locked.send(
                call["method"], call["path"], call.get("json"), headers=headers
            )
            assert reply.status == response["status"], label
            if reply.status in (401, 500):
                assert parsed(reply)[1] == response["body"], label


async def test_data_parallel_ranks() -> None:
    async with serving(engine=LARGE, data_parallel_size=2) as wide:
        for label, call, response in exchanges("61_dp2_api2_admin"):
            if re.search("collective|abort|checksum", label):
                continue
            reply = await wide.send(
                call["method"],
                call["path"],
                call.get("json"),
                query=call.get("query"),
                headers=call.get("headers"),
            )
            assert reply.status == response["status"], label
            if "choices" not in response["body"]:
                assert parsed(reply)[1] == response["body"], label


async def test_checksums_compare_as_recorded() -> None:
    async with serving(data_parallel_size=2) as client:
        await client.join(world=3)
        _, before = await client.post("/weight_checker", {"action": "checksum"})
        names = [f"dp{dp}:pp0:pcp0:tp0:{name}" for dp in range(2) for name in policy.shapes()]
        assert list(before["checksums"]) == names
        await client.publish(policy.init(1), "step-1")
        compare = {"action": "compare", "baseline": before["checksums"]}
        _, after = await client.post("/weight_checker", compare)
        assert after == {"match": False, "mismatches": sorted(names)}
        await client.publish(policy.init(0), "step-2")
        _, again = await client.post("/weight_checker", compare)
        assert again == {"match": True, "mismatches": []}


ABORTS = [
    (call["request"], outcome["result"])
    for call, outcome in zip(recorded("40_abort"), recorded("40_abort")[1:], strict=False)
    if "request" in call and "result" in outcome
]


@pytest.mark.parametrize(("call", "outcome"), ABORTS)
async def test_aborts_as_recorded(
    client: Client, call: dict[str, Any], outcome: dict[str, Any]
) -> None:
    """By the prefixed id only, whatever the reply says."""
    found: list[dict[str, Any]] = []

    async def run() -> None:
        found.append(await client.generate([300], 60, request_id="rid-1"))

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await until(lambda: any(r.tracks[0].output for r in client.worker.engine.requests))
        status, reply = await client.post(call["path"], call["json"])
        assert status == 200
        assert reply in ("", {"status": "aborted", "aborted": 1})
    assert found[0]["request_id"] == outcome["request_id"]
    choice = found[0]["choices"][0]
    assert choice["finish_reason"] == outcome["finish_reason"]
    end = len(choice["token_ids"])
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": end}]
    assert (end == 60) == (outcome["finish_reason"] == "length")
