"""Prompts in every form over every route of real vLLM and SGLang servers, and a real gateway.

Greedy tokens of each route are held against `transformers` on the prompt that the reply names.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import genapi
from genapi import FinishReason, GenerateRequest, GenerateResponse, SamplingParams
from genapi.providers import sglang, vllm
from genapi.types.response import Finished, TokenChunk
from tests.engines.kit.server import free_port
from tests.engines.test_vllm import LIMITS, target

if TYPE_CHECKING:
    import pathlib

    from tests.engines.conftest import Models, Reference, Serve
    from tests.engines.kit.server import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.anyio]

LIMIT_S = 60.0
COUNT = 8
CHAT = [{"role": "user", "content": "bada gomi"}]
FORMS: list[dict[str, Any]] = [
    {"prompt_token_ids": [5, 6, 7]},
    {"prompt": "bada gomi"},
    {"messages": CHAT},
]
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "string", "enum": ["here", "there"]}},
    "required": ["a"],
    "additionalProperties": False,
}
"""Few enough that a random model, which has to keep to them, ends its call."""
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": PARAMETERS, "strict": True}}
]
PARSED = {
    "vllm": ("--enable-auto-tool-choice", "--tool-call-parser=hermes"),
    "sglang": ("--tool-call-parser=qwen25",),
}
OPTIONS: dict[str, Any] = {"vllm": vllm.Options, "sglang": sglang.Options}


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of seed 0 that reads tool calls."""
    name = request.param
    serve: Serve = request.getfixturevalue("serve" if name == "vllm" else "serve_sglang")
    with serve(1, flags=PARSED[name]) as (started,):
        yield started


@contextlib.asynccontextmanager
async def connected(*servers: Server, **options: Any) -> AsyncIterator[genapi.Fleet]:
    async with genapi.connect(target(*servers), **options) as fleet:
        await fleet.wait_ready(timeout_s=LIMIT_S)
        yield fleet


def asked(form: dict[str, Any], *, options: Any = None, **more: Any) -> GenerateRequest:
    names = ("request_id", "tools", "min_version")
    fields = {name: more.pop(name) for name in names if name in more}
    sampling = {"max_tokens": COUNT, "temperature": 0.0, "ignore_eos": True, **more}
    return GenerateRequest(
        sampling=SamplingParams(**sampling), options=options, **{**form, **fields}
    )


async def streamed(fleet: genapi.Fleet, request: GenerateRequest) -> GenerateResponse:
    ids: dict[int, list[int]] = {}
    reply: GenerateResponse | None = None
    async with fleet.stream(request) as events:
        async for event in events:
            if isinstance(event, TokenChunk):
                ids.setdefault(event.index, []).extend(event.token_ids)
            else:
                assert isinstance(event, Finished)
                reply = event.reply
    assert reply is not None
    assert {o.index: o.token_ids.tolist() for o in reply.outputs} == ids
    return reply


def said(reply: GenerateResponse) -> list[tuple[Any, ...]]:
    """What does not differ between two greedy replies to one request, numbers aside.

    vLLM writes a call's arguments anew in a reply in one piece, and streams them as they came.
    """
    return [
        (
            *(o.token_ids, o.text, o.reasoning, o.finish_reason),
            [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in o.tool_calls],
        )
        for o in reply.outputs
    ]


@pytest.mark.parametrize("form", FORMS, ids=["ids", "text", "chat"])
async def test_every_route_says_what_the_model_says_streamed_or_not(
    server: Server, models: Models, reference: Reference, form: dict[str, Any]
) -> None:
    name = server.engine.scheme
    replies = []
    async with connected(server) as fleet:
        for route in ("native", "openai"):
            request = asked(form, options=OPTIONS[name](route=route))
            whole = await fleet.generate(request)
            assert whole.prompt_token_ids is not None
            expected = reference(models.seed0, whole.prompt_token_ids.tolist(), COUNT)
            expected.assert_said_by(whole.output.token_ids)
            assert whole.output.missing_logprobs == 0
            replies.append(whole)
            if (name, route, *form) == ("sglang", "openai", "messages"):
                with pytest.raises(genapi.UnsupportedError, match="native"):
                    await streamed(fleet, request)
                continue
            assert said(await streamed(fleet, request)) == said(whole)
    native, openai = replies
    assert native.prompt_token_ids == openai.prompt_token_ids
    assert native.output.token_ids == openai.output.token_ids
    if "prompt_token_ids" not in form:
        assert native.output.text == openai.output.text
        assert openai.output.text
    assert native.output.policy.source == "engine"
    assert openai.output.policy.source == ("inferred" if name == "vllm" else "engine")


@pytest.mark.parametrize("form", FORMS, ids=["ids", "text", "chat"])
@pytest.mark.parametrize("route", ["native", "openai"])
async def test_several_outputs_come_and_an_abort_ends_all_of_them(
    server: Server, form: dict[str, Any], route: Any
) -> None:
    name = server.engine.scheme
    options = OPTIONS[name](route=route)
    async with connected(server) as fleet:
        request = asked(form, options=options, n=2, temperature=1.0)
        if (name, route) == ("sglang", "openai"):
            with pytest.raises(genapi.UnsupportedError, match="n=1"):
                await fleet.generate(request)
            return
        for reply in (await fleet.generate(request), await streamed(fleet, request)):
            assert [o.index for o in reply.outputs] == [0, 1]
            assert all(len(o.token_ids) == COUNT for o in reply.outputs)
        endless = asked(
            form, options=options, n=2, temperature=1.0, max_tokens=3000, request_id="mine"
        )
        with anyio.fail_after(LIMIT_S):
            async with fleet.stream(endless) as events:
                first = await anext(events)
                assert isinstance(first, TokenChunk)
                assert await fleet.abort("mine") == 1
                last = [event async for event in events][-1]
        assert isinstance(last, Finished)
        ended = [o.finish_reason for o in last.reply.outputs]
        assert ended == [FinishReason.ABORT, FinishReason.ABORT]


async def test_a_tool_call_that_is_required_is_made_and_read(server: Server) -> None:
    name = server.engine.scheme
    routes = ("native", "openai") if name == "vllm" else ("auto",)
    async with connected(server) as fleet:
        for route in routes:
            options = OPTIONS[name](route=route, chat={"tool_choice": "required"})
            request = asked(
                {"messages": CHAT}, tools=TOOLS, options=options, max_tokens=160, ignore_eos=False
            )
            reply = await fleet.generate(request)
            (call,) = reply.output.tool_calls[:1]
            assert call["type"] == "function"
            assert call["function"]["name"] == "look"
            assert json.loads(call["function"]["arguments"])["a"] in ("here", "there")
            assert len(reply.output.token_ids) > 0
            if name == "vllm":
                assert said(await streamed(fleet, request)) == said(reply)


async def test_versions_of_openais_routes_hold_what_the_native_one_attests(
    server: Server,
) -> None:
    name = server.engine.scheme
    async with connected(server, run="routes") as fleet:
        async with genapi.WeightPublisher(
            fleet, transport=genapi.weights.Gloo(), timeouts=LIMITS
        ) as publisher:
            await publisher.adopt(7)
        native = await fleet.generate(asked(FORMS[0], min_version=7))
        openai = await fleet.generate(
            asked(FORMS[0], options=OPTIONS[name](route="openai"), min_version=7)
        )
    assert native.output.policy.newest == native.output.policy.oldest
    assert openai.output.policy.oldest == openai.output.policy.newest
    assert openai.output.policy.oldest == native.output.policy.oldest


async def test_without_the_native_route_vllm_is_asked_over_openais(
    serve: Serve, models: Models, reference: Reference
) -> None:
    with serve(1, flags=["--no-enable-scale-out"]) as (plain,):
        async with connected(plain) as fleet:
            for form in FORMS:
                reply = await fleet.generate(asked(form))
                assert reply.output.policy.source == "inferred"
                assert reply.prompt_token_ids is not None
                said_by = reference(models.seed0, reply.prompt_token_ids.tolist(), COUNT)
                said_by.assert_said_by(reply.output.token_ids)


@contextlib.contextmanager
def gateway(environment: pathlib.Path, folder: pathlib.Path, *servers: Server) -> Iterator[str]:
    """A real gateway before these servers; its address."""
    port, metrics = free_port(), free_port()
    urls = [server.url for server in servers]
    program = str(environment / "bin" / "smg")
    with (folder / "gateway.txt").open("wb") as log:
        process = subprocess.Popen(
            [
                *(program, "launch", "--worker-urls", *urls),
                *("--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"),
                *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(LIMIT_S)


async def test_a_gateway_lists_its_workers_and_passes_requests_on(
    smg_environment: pathlib.Path, sglang_pair: tuple[Server, Server], tmp_path: pathlib.Path
) -> None:
    with gateway(smg_environment, tmp_path, *sglang_pair) as address:
        config = genapi.connect(f"sglang://{address}?workers=discover", run="gateway").config
        assert json.loads(config.model_dump_json())["target"].endswith("discover")
        expect = genapi.Topology(workers=2)
        async with genapi.connect(config, expect=expect) as fleet:
            snapshot = await fleet.wait_ready(timeout_s=LIMIT_S)
            assert {w.url for w in snapshot.workers} == {server.url for server in sglang_pair}
            async with genapi.WeightPublisher(
                fleet, transport=genapi.weights.Gloo(), timeouts=LIMITS
            ) as publisher:
                await publisher.adopt(2)
            for form in FORMS:
                request = asked(form, min_version=2)
                replies = [await fleet.generate(request) for _ in range(2)]
                assert all(r.output.policy.oldest is not None for r in replies)
                assert replies[0].output.token_ids == replies[1].output.token_ids
            several = await streamed(fleet, asked(FORMS[0], n=2))
            assert len({o.token_ids for o in several.outputs}) == 1


async def test_a_chat_goes_through_a_gateway_after_files_have_renamed_its_workers_model(
    smg_environment: pathlib.Path,
    sglang_pair: tuple[Server, Server],
    models: Models,
    tmp_path: pathlib.Path,
) -> None:
    with gateway(smg_environment, tmp_path, *sglang_pair) as address:
        target = f"sglang://{address}?workers=discover"
        async with genapi.connect(target, run="renamed") as fleet:
            await fleet.wait_ready(timeout_s=LIMIT_S)
            names = {_served(server) for server in sglang_pair}
            transport = genapi.weights.Filesystem(tmp_path / "files", base=models.seed0)
            weights = genapi.weights.from_safetensors(models.seed0)
            async with genapi.WeightPublisher(
                fleet, transport=transport, timeouts=LIMITS
            ) as publisher:
                report = await publisher.publish(3, weights)
            assert names.isdisjoint({_served(server) for server in sglang_pair})
            reply = await fleet.generate(asked({"messages": CHAT}, min_version=3))
            assert reply.output.policy.oldest == report.version


def _served(server: Server) -> str:
    _, listed = server.request("GET", "/v1/models")
    name: str = listed["data"][0]["id"]
    return name
