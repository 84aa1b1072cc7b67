"""Text and chat prompts on vLLM's native route: what the server is asked before and after."""

import json
from typing import Any

import pytest

from genapi import GenerateRequest, GenerateResponse, ProviderError, ReplyError, SamplingParams
from genapi.providers.base import Capabilities
from genapi.providers.vllm import Options
from genapi.wire.http import HTTPCall, HTTPReply
from tests.support.transcripts import exchange, play
from tests.support.vllm_wire import PROVIDER
from tests.support.wire import context, sse

BADA = [{"role": "user", "content": "bada"}]
TOOL = exchange("vllm", "62", "render chat, tools").json["tools"][0]
RENDERED = exchange("vllm", "62", "render chat").reply.json_field("token_ids")


def recorded(name: str) -> HTTPReply:
    return exchange("vllm", "62", name).reply


def asked(options: Options | None = None, **prompt: Any) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    return GenerateRequest(sampling=sampling, options=options, **prompt)


def render(
    request: GenerateRequest, reply: HTTPReply, *known: Capabilities
) -> tuple[GenerateRequest, list[HTTPCall]]:
    flow = PROVIDER.render(request, model="tiny", capabilities=known)
    return play(flow, lambda _: reply)


def body_of(call: HTTPCall) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(call.body or b"")
    return found


def encoded(request: GenerateRequest) -> dict[str, Any]:
    call = PROVIDER.encode(request, wire_id="w", model="tiny", salt=None, stream=False)
    assert call.path == "/inference/v1/generate"
    return body_of(call)


def test_ids_are_not_asked_about() -> None:
    request = asked(prompt_token_ids=[1, 2])
    assert render(request, HTTPReply(500)) == (request, [])


def test_a_text_becomes_the_servers_ids() -> None:
    reply = HTTPReply(200, b'{"tokens": [5, 6], "count": 2}')
    rendered, calls = render(asked(prompt="hi"), reply)
    assert [(call.path, body_of(call)) for call in calls] == [
        ("/tokenize", {"prompt": "hi", "add_special_tokens": True, "model": "tiny"})
    ]
    assert encoded(rendered).items() >= {"token_ids": [5, 6], "output_mode": "text"}.items()


def test_a_chat_becomes_the_ids_of_its_template() -> None:
    rendered, (call,) = render(asked(messages=BADA), recorded("render chat"))
    assert call.path == "/v1/chat/completions/render"
    assert body_of(call).items() >= {"messages": BADA, "model": "tiny", "max_tokens": 8}.items()
    assert encoded(rendered)["token_ids"] == RENDERED


def test_what_the_template_asks_of_the_draw_is_asked() -> None:
    request = asked(messages=BADA, tools=[TOOL], options=Options(chat={"tool_choice": "required"}))
    rendered, (call,) = render(request, recorded("render chat, a tool required"))
    assert body_of(call).items() >= {"tools": [TOOL], "tool_choice": "required"}.items()
    sampling = encoded(rendered)["sampling_params"]
    assert sampling["skip_special_tokens"] is False
    (name,) = sampling["structured_outputs"]
    assert name == "structural_tag"
    assert '"at_least_one": true' in sampling["structured_outputs"][name]


@pytest.mark.parametrize(
    "fields",
    [
        {"features": {"mm_hashes": {}}},
        {"reasoning_ended": False, "reasoning_parser_kwargs": {"chat_template_kwargs": {}}},
    ],
)
def test_what_goes_with_the_ids_is_sent_with_them(fields: dict[str, Any]) -> None:
    reply = HTTPReply(200, json.dumps({"token_ids": [1], "sampling_params": {}, **fields}).encode())
    rendered, _ = render(asked(messages=BADA), reply)
    assert encoded(rendered).items() >= fields.items()


def test_a_server_without_the_native_route_gets_the_prompt_as_it_is() -> None:
    known = Capabilities(missing={"generate": "start vLLM with --enable-scale-out"})
    for prompt, path in (
        ({"prompt": "hi"}, "/v1/completions"),
        ({"messages": BADA}, "/v1/chat/completions"),
    ):
        rendered, calls = render(asked(**prompt), HTTPReply(500), known)
        assert calls == []
        call = PROVIDER.encode(rendered, wire_id="w", model=None, salt=None, stream=False)
        assert call.path == path
        assert body_of(call).items() >= prompt.items()


def test_a_prompt_that_the_server_refuses_is_its_error() -> None:
    with pytest.raises(ProviderError, match="empty conversation"):
        render(asked(messages=BADA), recorded("render nothing"))


@pytest.mark.parametrize("body", [b"{}", b'{"tokens": []}', b'{"tokens": "x"}', b"[]"])
def test_an_answer_without_ids_is_a_broken_reply(body: bytes) -> None:
    with pytest.raises(ReplyError):
        render(asked(prompt="hi"), HTTPReply(200, body))


def generated(request: GenerateRequest, ids: list[int], **more: Any) -> GenerateResponse:
    choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", **more}
    spans = [{"version": "genapi:r:3:1", "start": 0, "end": len(ids)}]
    body = {"choices": [{**choice, "weight_versions": spans}]}
    asked = context(request.model_copy(update={"sampling": SamplingParams(max_tokens=99)}))
    return PROVIDER.decode(HTTPReply(200, json.dumps(body).encode()), asked)


def test_a_tool_call_is_read_by_the_server_and_tokens_and_versions_stay() -> None:
    rendered, _ = render(asked(messages=BADA, tools=[TOOL]), recorded("render chat, tools"))
    ids = exchange("vllm", "62", "tokenize a tool call").reply.json_field("tokens")
    reply = generated(rendered, ids)
    refined, (call,) = play(
        PROVIDER.refine(reply, rendered, model="tiny"), lambda _: recorded("derender a tool call")
    )
    assert call.path == "/v1/chat/completions/derender"
    sent = body_of(call)
    assert sent["prompt_token_ids"] == RENDERED
    assert sent["generate_response"]["choices"][0]["token_ids"] == ids
    assert sent["chat_request"]["tools"] == [TOOL]
    output = refined.output
    assert output.tool_calls[0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert output.text is None
    assert output.token_ids == ids
    assert output.policy == reply.output.policy
    assert output.policy.newest is not None


def test_what_nothing_has_to_be_read_out_of_is_not_asked_about() -> None:
    rendered, _ = render(asked(messages=BADA), recorded("render chat"))
    reply = generated(rendered, [1], text="t")
    assert play(PROVIDER.refine(reply, rendered, model=None), lambda _: HTTPReply(500)) == (
        reply,
        [],
    )


def test_text_comes_with_candidates_too() -> None:
    sampling = SamplingParams(max_tokens=8, logprobs=2)
    request = asked(messages=BADA).model_copy(update={"sampling": sampling})
    rendered, _ = render(request, recorded("render chat"))
    assert "output_mode" not in encoded(rendered)
    reply = generated(rendered, [1])
    refined, _ = play(
        PROVIDER.refine(reply, rendered, model=None), lambda _: recorded("derender plain")
    )
    assert refined.output.text is not None
    assert refined.output.text.startswith("<tool_call>")


def test_a_message_of_another_output_is_a_broken_reply() -> None:
    rendered, _ = render(asked(messages=BADA, tools=[TOOL]), recorded("render chat, tools"))
    other = HTTPReply(200, b'{"choices": [{"index": 3, "message": {"content": "x"}}]}')
    with pytest.raises(ReplyError, match="choices"):
        play(PROVIDER.refine(generated(rendered, [1]), rendered, model=None), lambda _: other)


def test_a_stream_is_decoded_by_the_route_that_was_asked() -> None:
    rendered, _ = render(asked(messages=BADA), recorded("render chat"))
    decoder = PROVIDER.stream_decoder(context(rendered))
    frame = {"prompt_token_ids": RENDERED, "choices": [{"index": 0, "token_ids": [1]}]}
    last = {"choices": [{"index": 0, "token_ids": [2], "finish_reason": "stop", "text": "t"}]}
    decoder.feed(sse(frame, last))
    reply = decoder.finish(framed=True)
    assert reply.output.token_ids == [1, 2]
    assert reply.prompt_token_ids == RENDERED
