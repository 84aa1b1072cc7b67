"""What a fleet promises of text and chat prompts, several outputs, and the routes it may take."""

import json
from typing import Any

import anyio
import pytest

import genapi
from genapi import (
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    IncompleteError,
    SamplingParams,
    TransportError,
    UnsupportedError,
)
from genapi.embedded import Cluster, Fault
from genapi.embedded.texts import THOUGHT, TOOL
from genapi.providers import sglang, vllm
from genapi.transports.memory import MemoryTransport
from genapi.types.response import Finished, TokenChunk
from genapi.wire.http import HTTPCall, HTTPReply
from tests.contract.embedded import Rig, rig
from tests.support.recorded import RecordedCalls

CHAT = [{"role": "user", "content": "7 8 9"}]
FORMS: list[dict[str, Any]] = [
    {"prompt_token_ids": [7, 8, 9]},
    {"prompt": "7 8 9"},
    {"messages": CHAT},
]
TOOLS = [{"type": "function", "function": {"name": "look"}}]


Route = vllm.Options | sglang.Options | None
OPTIONS: dict[str, Any] = {"vllm": vllm.Options, "sglang": sglang.Options}
PROTOCOLS = sorted(OPTIONS)
ROUTES = [(protocol, route) for protocol in PROTOCOLS for route in ("native", "openai")]


def asked(form: dict[str, Any], *, options: Route = None, **more: Any) -> GenerateRequest:
    names = ("request_id", "timeout_s", "min_version", "tools")
    fields = {name: more.pop(name) for name in names if name in more}
    sampling = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, **more}
    return GenerateRequest(
        sampling=SamplingParams(**sampling), options=options, **{**form, **fields}
    )


async def streamed(running: Rig, request: GenerateRequest) -> tuple[GenerateResponse, list[int]]:
    """The reply of a stream, and the ids that came in its chunks, by their output."""
    ids: list[int] = []
    reply: GenerateResponse | None = None
    async with running.fleet.stream(request) as events:
        async for event in events:
            if isinstance(event, TokenChunk) and event.index == 0:
                ids += event.token_ids
            elif isinstance(event, Finished):
                reply = event.reply
    assert reply is not None
    return reply, ids


def said(reply: GenerateResponse) -> list[dict[str, Any]]:
    """What does not differ between two replies to one request."""
    fields = {"token_ids", "text", "reasoning", "finish_reason", "stop_reason", "index"}
    return [
        o.model_dump(include=fields)
        | {"scores": None if o.logprobs is None else o.logprobs.tolist()}
        | {"calls": [call["function"] for call in o.tool_calls]}
        for o in reply.outputs
    ]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("form", FORMS[1:])
async def test_the_native_route_attests_text_and_chat_prompts(
    form: dict[str, Any], protocol: str
) -> None:
    async with rig(1, protocol=protocol) as running:
        reply = await running.fleet.generate(asked(form))
        assert reply.output.policy.source == "engine"
        assert reply.output.text


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("protocol", "route"), ROUTES)
async def test_a_stream_ends_in_the_reply_of_one_piece(
    form: dict[str, Any], protocol: str, route: Any
) -> None:
    async with rig(1, protocol=protocol) as running:
        request = asked(form, options=OPTIONS[protocol](route=route))
        if (protocol, route, [*form]) == ("sglang", "openai", ["messages"]):
            with pytest.raises(UnsupportedError, match="native"):
                await streamed(running, request)
            return
        whole = await running.fleet.generate(request)
        reply, ids = await streamed(running, request)
    assert said(reply) == said(whole)
    assert reply.prompt_token_ids == whole.prompt_token_ids
    assert ids == whole.output.token_ids.tolist()


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("form", FORMS)
async def test_both_routes_say_the_same(form: dict[str, Any], protocol: str) -> None:
    options = OPTIONS[protocol]
    async with rig(1, protocol=protocol) as running:
        native = await running.fleet.generate(asked(form, options=options(route="native")))
        openai = await running.fleet.generate(asked(form, options=options(route="openai")))
    expected = said(native)
    if "prompt_token_ids" in form:
        expected[0]["text"] = openai.output.text  # tokens in, tokens out
    assert said(openai) == expected
    assert openai.prompt_token_ids == native.prompt_token_ids


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("protocol", "route"), ROUTES)
async def test_several_outputs_come_by_index_streamed_or_not(
    form: dict[str, Any], protocol: str, route: Any
) -> None:
    flags: dict[str, Any] = (
        {"enable_deterministic_inference": "true"} if protocol == "sglang" else {}
    )
    async with rig(1, protocol=protocol, **flags) as running:
        options = OPTIONS[protocol](route=route)
        request = asked(form, options=options, n=3, temperature=1.0, seed=5)
        if (protocol, route) == ("sglang", "openai"):
            with pytest.raises(UnsupportedError, match="n=1"):
                await running.fleet.generate(request)
            return
        whole = await running.fleet.generate(request)
        reply, _ = await streamed(running, request)
    assert [o.index for o in whole.outputs] == [0, 1, 2]
    assert len({o.token_ids for o in whole.outputs}) == 3
    assert said(reply) == said(whole)


async def test_versions_of_a_route_that_names_none_are_inferred() -> None:
    async with rig(2, options={"run": "r"}) as running:
        async with genapi.WeightPublisher(
            running.fleet, transport=genapi.weights.Memory()
        ) as publisher:
            await publisher.adopt(4)
        reply = await running.fleet.generate(
            asked(FORMS[0], options=vllm.Options(route="openai"), min_version=4)
        )
    trace = reply.output.policy
    assert trace.source == "inferred"
    assert trace.oldest is not None
    assert trace.oldest.step == 4


async def test_without_the_native_route_openais_are_taken() -> None:
    async with rig(1, scale_out="false") as running:
        for form in FORMS:
            reply = await running.fleet.generate(asked(form))
            assert len(reply.output.token_ids) == 6
            assert reply.output.policy.source == "inferred"
            assert reply.prompt_token_ids is not None
        with pytest.raises(UnsupportedError, match="--enable-scale-out"):
            await running.fleet.generate(asked(FORMS[0], options=vllm.Options(route="native")))


@pytest.mark.parametrize(
    ("protocol", "route"), [("vllm", "native"), ("vllm", "openai"), ("sglang", "auto")]
)
async def test_a_tool_call_and_the_thought_before_it_are_told_apart(
    protocol: str, route: Any
) -> None:
    flags: dict[str, Any] = {"reasoning_parser": "true"}
    if protocol == "sglang":
        flags |= {"tool_call_parser": "true", "enable_deterministic_inference": "true"}
    async with rig(1, protocol=protocol, **flags) as running:
        for seed in range(50):
            request = asked(
                {"messages": CHAT},
                tools=TOOLS,
                temperature=1.0,
                seed=seed,
                logit_bias=dict.fromkeys((20, THOUGHT, 21, TOOL, 22), 100.0),
                options=OPTIONS[protocol](route=route),
            )
            whole = await running.fleet.generate(request)
            thought, _, rest = _parted(whole.output.token_ids.tolist(), THOUGHT)
            content, found, arguments = _parted(rest, TOOL)
            if found:
                break
        else:
            pytest.fail("no seed calls a tool")
        if protocol == "vllm":
            reply, _ = await streamed(running, request)
            assert said(reply) == said(whole)
    output = whole.output
    assert output.reasoning == _shown(thought)
    assert (output.text or "") == _shown(content)
    (call,) = output.tool_calls
    assert call["function"]["name"] == "look"
    assert json.loads(call["function"]["arguments"]) == {"ids": arguments}


def _parted(ids: list[int], mark: int) -> tuple[list[int], bool, list[int]]:
    if mark not in ids:
        return ids, False, []
    at = ids.index(mark)
    return ids[:at], True, ids[at + 1 :]


def _shown(ids: list[int]) -> str:
    return "".join(f"{token} " for token in ids)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("protocol", "route"), [*ROUTES[:1], *ROUTES[2:]])
@pytest.mark.parametrize("n", [1, 2])
async def test_an_abort_ends_all_outputs_of_its_request_on_any_route(
    form: dict[str, Any], protocol: str, route: Any, n: int
) -> None:
    async with rig(1, protocol=protocol) as running:
        request = asked(
            form,
            options=OPTIONS[protocol](route=route),
            request_id="mine",
            max_tokens=60,
            n=n,
            temperature=1.0,
        )
        async with running.fleet.stream(request) as events:
            reply = None
            async for event in events:
                if isinstance(event, Finished):
                    reply = event.reply
                else:
                    assert await running.fleet.abort("mine") == 1
    assert reply is not None
    assert [o.finish_reason for o in reply.outputs] == [FinishReason.ABORT] * n


async def test_an_abort_before_the_first_token_is_an_abort_though_the_route_says_nothing() -> None:
    async with rig(1) as running:
        await running.cluster.workers[0].engine.hold("keep", clear_cache=False)
        request = asked(FORMS[1], options=vllm.Options(route="openai"), request_id="mine")
        replies: list[GenerateResponse] = []

        async def run() -> None:
            reply, _ = await streamed(running, request)
            replies.append(reply)

        with anyio.fail_after(5):
            async with anyio.create_task_group() as group:
                group.start_soon(run)
                while not running.cluster.workers[0].engine.requests:
                    await anyio.lowlevel.checkpoint()
                await running.fleet.abort("mine")
    assert replies[0].output.finish_reason is FinishReason.ABORT
    assert len(replies[0].output.token_ids) == 0


async def test_a_prompt_that_could_not_be_rendered_was_not_sent() -> None:
    options = {"retry": genapi.RetryPolicy(max_attempts=1)}
    async with rig(1, options=options) as running:
        running.fail(0, "/tokenize", "lose_reply")
        with pytest.raises(TransportError) as raised:
            await running.fleet.generate(asked({"prompt": "7"}))
    assert raised.value.phase == "not_sent"


async def test_a_prompt_is_rendered_again_where_it_is_sent_again() -> None:
    async with rig(2) as running:
        running.fail(0, "/tokenize", "lose_reply")
        running.fail(1, "/tokenize", "lose_reply")
        reply = await running.fleet.generate(asked({"prompt": "7 8"}))
    assert reply.prompt_token_ids == [7, 8]
    assert len(reply.attempts) > 1


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "failure",
    [
        {"action": "error", "status": 503},
        {"action": "error", "status": 400},
        {"action": "lose_reply"},
    ],
)
async def test_tokens_that_the_server_could_not_read_are_kept_and_not_made_anew(
    failure: dict[str, Any], streams: bool
) -> None:
    cluster = Cluster.from_query({"protocol": "vllm", "reasoning_parser": "true"})
    transport = RecordedCalls(cluster)
    request = asked({"messages": CHAT}, tools=TOOLS)
    async with genapi.connect("embedded://?protocol=vllm", transport=transport) as fleet:
        await fleet.wait_ready(timeout_s=5)
        whole = await fleet.generate(request)
        transport.calls.clear()
        cluster.workers[0].faults.add(Fault("/v1/chat/completions/derender", **failure))
        with pytest.raises(IncompleteError, match="could not read them") as raised:
            await (_drained(fleet, request) if streams else fleet.generate(request))
    assert raised.value.partial.output.token_ids == whole.output.token_ids
    assert len(transport.bodies("/inference/v1/generate")["memory://0"]) == 1


async def _drained(fleet: genapi.Fleet, request: GenerateRequest) -> None:
    async with fleet.stream(request) as events:
        async for _ in events:
            pass


class _Holding(MemoryTransport):
    """Holds prompts back that are made ids, until it is let go."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.asked, self.go_on = anyio.Event(), anyio.Event()

    async def send(self, base_url: str, call: HTTPCall, **more: Any) -> HTTPReply:
        if call.path == "/tokenize":
            self.asked.set()
            await self.go_on.wait()
        return await super().send(base_url, call, **more)


async def test_a_prompt_that_was_rendered_waits_while_a_publication_is_verified() -> None:
    cluster = Cluster.from_query({"protocol": "vllm"})
    transport = _Holding(cluster)
    replies: list[GenerateResponse] = []
    async with genapi.connect("embedded://?protocol=vllm", transport=transport) as fleet:

        async def run() -> None:
            replies.append(await fleet.generate(asked({"prompt": "7 8"})))

        with anyio.fail_after(5):
            async with anyio.create_task_group() as group:
                group.start_soon(run)
                await transport.asked.wait()
                fleet.membership.close()
                transport.go_on.set()
                for _ in range(100):
                    await anyio.lowlevel.checkpoint()
                assert not cluster.workers[0].engine.requests
                assert not replies
                fleet.membership.open()
    assert replies[0].prompt_token_ids == [7, 8]


async def test_a_broken_stream_of_nobody_aborted_is_incomplete() -> None:
    async with rig(1) as running:
        request = asked(FORMS[1], options=vllm.Options(route="openai"), max_tokens=50)
        with pytest.raises((IncompleteError, TransportError)):  # noqa: PT012 - what comes first
            async with running.fleet.stream(request) as events:
                async for _ in events:
                    running.cluster.workers[0].kill()
