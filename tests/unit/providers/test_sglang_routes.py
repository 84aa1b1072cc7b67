"""SGLang's other routes and prompts: several outputs, texts, chats, and OpenAI's routes."""

import json
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from genapi import (
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    OverlongPromptError,
    ProviderError,
    ReplyError,
    SamplingParams,
    UnsupportedError,
)
from genapi.providers.base import Capabilities
from genapi.providers.sglang import Options
from genapi.wire.http import HTTPCall, HTTPReply
from tests.support.sglang_wire import (
    ABORT,
    LENGTH,
    PROVIDER,
    STOP,
    decode,
    load,
    output,
    recorded,
    request,
    stream,
)
from tests.support.transcripts import play
from tests.support.wire import context, sse

BADA = [{"role": "user", "content": "bada"}]
TOOLS = load("openai_chat_tool_required")["request"]["json"]["tools"]
READS = Capabilities(parsers=frozenset({"reasoning", "tools"}))


def asked(options: Options | None = None, *, form: Any = None, **sampling: Any) -> GenerateRequest:
    prompt: dict[str, Any] = form if form is not None else {"messages": BADA}
    return GenerateRequest(
        sampling=SamplingParams(**{"max_tokens": 64, **sampling}), options=options, **prompt
    )


def sent(wanted: GenerateRequest, *, stream: bool = False) -> tuple[str, dict[str, Any]]:
    call = PROVIDER.encode(wanted, wire_id="w", model="tiny", salt="s", stream=stream)
    assert call.grant == "data"
    return call.path, json.loads(call.body or b"")


def rendered(
    wanted: GenerateRequest, *known: Capabilities, reply: HTTPReply | None = None
) -> tuple[GenerateRequest, list[HTTPCall]]:
    flow = PROVIDER.render(wanted, model="tiny", capabilities=known)
    return play(flow, lambda _: reply or HTTPReply(500))


# several outputs


def test_a_recorded_batch_of_one_prompt_is_a_reply_with_several_outputs() -> None:
    for name in ("generate_n2_as_batch", "generate_n2_as_batch_stream"):
        wanted = request(prompt=[5, 6, 7], n=2, max_tokens=4)
        take = stream if name.endswith("stream") else decode
        reply = take(recorded(name).body, wanted)
        assert [o.index for o in reply.outputs] == [0, 1]
        assert all(len(o.token_ids) == 4 and o.logprobs is not None for o in reply.outputs)
        assert all(o.finish_reason is FinishReason.LENGTH for o in reply.outputs)
        assert all(o.policy.source == "engine" for o in reply.outputs)
        assert reply.prompt_token_ids == [5, 6, 7]
        assert reply.usage.completion_tokens == 8


@pytest.mark.case("STREAM-07")
def test_frames_of_several_outputs_may_interleave() -> None:
    frames = {
        0: [output([5]), output([5, 6], STOP)],
        1: [output([8]), output([8, 9]), output([8, 9, 10], LENGTH)],
    }
    for order in set(permutations((0, 0, 1, 1, 1))):
        left = {index: iter(found) for index, found in frames.items()}
        body = sse(*({**next(left[index]), "index": index} for index in order))
        reply = stream(body, request(n=2))
        assert [o.token_ids.tolist() for o in reply.outputs] == [[5, 6], [8, 9, 10]]
        assert [o.finish_raw for o in reply.outputs] == ["stop", "length"]


def test_a_frame_may_hold_tokens_of_the_next_one_already() -> None:
    ahead = output([5, 6, 7], total=2, output_token_logprobs_length=2)
    last = output([5, 6, 7], STOP, output_token_logprobs_length=3)
    decoder = PROVIDER.stream_decoder(context(request()))
    chunks = [chunk for frame in (ahead, last) for chunk in decoder.feed(sse(frame, done=False))]
    assert [chunk.token_ids.tolist() for chunk in chunks] == [[5, 6], [7]]
    assert decoder.finish(framed=True).output.token_ids == [5, 6, 7]


def test_one_output_that_is_aborted_leaves_the_others_as_they_are() -> None:
    reply = decode([output([5], ABORT), output([6, 7], STOP)], request(n=2))
    assert [o.is_complete for o in reply.outputs] == [False, True]


def test_one_output_that_fails_fails_the_reply_with_what_had_come() -> None:
    failed = {"type": "abort", "message": "m", "status_code": 500, "err_type": "X"}
    with pytest.raises(ProviderError) as raised:
        decode([output([5], STOP), output([6], failed)], request(n=2))
    assert raised.value.partial is not None
    assert [o.token_ids.tolist() for o in raised.value.partial.outputs] == [[5], [6]]


# texts and chats on the native route


def test_the_prompt_of_a_text_is_what_the_server_says_it_is() -> None:
    reply = decode(
        recorded("generate_text_n2").body, asked(form={"prompt": "bada"}, n=2, max_tokens=4)
    )
    assert reply.prompt_token_ids == [273, 70, 67]


def test_a_text_is_not_asked_about() -> None:
    wanted = asked(form={"prompt": "bada"})
    assert rendered(wanted) == (wanted, [])


def test_a_text_that_several_outputs_go_on_from_becomes_ids() -> None:
    ids = load("tokenize_text")["response"]["body"]["tokens"]
    ready, (call,) = rendered(asked(form={"prompt": "bada"}, n=2), reply=recorded("tokenize_text"))
    assert json.loads(call.body or b"") == {
        "prompt": "bada",
        "add_special_tokens": True,
        "model": "tiny",
    }
    assert sent(ready)[1]["input_ids"] == [ids, ids]


def test_a_chat_becomes_the_ids_of_its_template() -> None:
    ids = load("tokenize_chat")["response"]["body"]["tokens"]
    ready, (call,) = rendered(asked(), reply=recorded("tokenize_chat"))
    assert (call.path, call.grant) == ("/v1/tokenize", "data")
    assert json.loads(call.body or b"") == {"messages": BADA, "model": "tiny"}
    path, body = sent(ready, stream=True)
    assert (path, body["input_ids"], body["stream"]) == ("/generate", ids, True)


def test_tools_reach_the_template_where_the_native_route_is_asked_for() -> None:
    wanted = asked(
        Options(route="native", chat={"tool_choice": "auto"}),
        form={"messages": BADA, "tools": TOOLS},
    )
    _, (call,) = rendered(wanted, READS, reply=recorded("tokenize_chat_tools"))
    assert json.loads(call.body or b"").items() >= {"tools": TOOLS, "tool_choice": "auto"}.items()


def test_a_chat_that_the_server_refuses_is_its_error() -> None:
    with pytest.raises(ProviderError, match="cannot be empty"):
        rendered(asked(), reply=recorded("tokenize_no_messages"))


def test_a_chat_goes_to_the_chat_route_behind_a_gateway_that_makes_no_ids_of_it() -> None:
    refusal = HTTPReply(422, b"Failed to deserialize the JSON body: missing field `prompt`")
    ready, _ = rendered(asked(), reply=refusal)
    assert sent(ready)[0] == "/v1/chat/completions"
    with pytest.raises(UnsupportedError, match="n=1"):
        rendered(asked(n=2), reply=refusal)
    with pytest.raises(ProviderError, match="missing field"):
        rendered(asked(Options(route="native")), reply=refusal)


def test_an_answer_without_ids_is_a_broken_reply() -> None:
    with pytest.raises(ReplyError, match="no ids"):
        rendered(asked(), reply=HTTPReply(200, b'{"tokens": []}'))


# the second path


@pytest.mark.parametrize(
    ("form", "known", "path"),
    [
        ({"messages": BADA, "tools": TOOLS}, (), "/v1/chat/completions"),
        ({"messages": BADA}, (READS,), "/v1/chat/completions"),
        ({"prompt": "x"}, (READS,), "/generate"),
        ({"prompt_token_ids": [1]}, (READS,), "/generate"),
    ],
)
def test_the_chat_route_is_taken_where_it_reads_something_out(
    form: Any, known: tuple[Capabilities, ...], path: str
) -> None:
    ready, calls = rendered(asked(form=form), *known)
    assert calls == []
    assert sent(ready)[0] == path


@pytest.mark.parametrize(
    ("form", "path"),
    [
        ({"prompt_token_ids": [5, 6]}, "/v1/completions"),
        ({"prompt": "x"}, "/v1/completions"),
        ({"messages": BADA}, "/v1/chat/completions"),
    ],
)
def test_openais_routes_get_every_value_by_their_own_names(form: Any, path: str) -> None:
    options = Options(route="openai", stop_regex=("x",), routed_dp_rank=1)
    found, body = sent(asked(options, form=form, seed=3, logit_bias={7: 1.0}))
    assert found == path
    assert (
        body.items()
        >= {
            "rid": "w",
            "model": "tiny",
            "extra_key": "s",
            "max_tokens": 64,
            "min_tokens": 0,
            "n": 1,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": 3,
            "logit_bias": {"7": 1.0},
            "stop_regex": ["x"],
            "routed_dp_rank": 1,
            "return_token_ids": True,
        }.items()
    )
    assert ("return_meta_info" in body) == (path == "/v1/chat/completions")


@pytest.mark.parametrize(
    ("wanted", "remedy"),
    [
        (asked(Options(route="openai"), n=2), "n=1"),
        (asked(Options(route="openai"), prompt_logprobs=0), "native"),
        (asked(Options(route="openai", structural_tag="t")), "native"),
        (asked(Options(route="openai", sampling_params={"x": 1})), "native"),
        (asked(form={"messages": BADA, "tools": TOOLS}, n=2), "n=1"),
        (asked(Options(chat={"tool_choice": "none"}), form={"prompt": "x"}), "messages="),
    ],
)
def test_what_the_second_path_cannot_do_is_refused_with_the_remedy(
    wanted: GenerateRequest, remedy: str
) -> None:
    with pytest.raises(UnsupportedError, match=remedy):
        PROVIDER.check(wanted, None)


def test_a_chat_stream_that_would_name_no_ids_is_refused_with_the_remedy() -> None:
    with pytest.raises(UnsupportedError, match=r"generate.*route='native'"):
        sent(asked(Options(route="openai")), stream=True)


def openai(name: str, **sampling: Any) -> GenerateResponse:
    body = load(name)["request"]["json"]
    form = {k: v for k, v in body.items() if k in ("messages", "prompt", "tools")}
    if isinstance(form.get("prompt"), list):
        form = {"prompt_token_ids": form["prompt"]}
    wanted = asked(Options(route="openai"), form=form, **sampling)
    if "raw_lines" in load(name)["response"]:
        return stream(recorded(name).body, wanted)
    return PROVIDER.decode(recorded(name), context(wanted))


def test_a_recorded_chat_reply_has_ids_scores_candidates_and_versions() -> None:
    reply = openai("openai_chat_meta_info", logprobs=2)
    out = reply.output
    assert out.token_ids == [1659, 631, 722, 1964]
    assert (out.text, out.reasoning) == ("", " pepa fifu fute saka")
    assert out.top_logprobs is not None
    assert [len(t.token_ids) for t in out.top_logprobs] == [2] * 4
    assert out.top_logprobs[0].token_ids[0] == 1659
    assert out.logprobs is not None
    assert out.logprobs[0] == np.float32(-1.9771428108215332)
    assert out.policy.source == "engine"
    assert reply.prompt_token_ids is not None
    assert len(reply.prompt_token_ids) == 21


@pytest.mark.case("STREAM-09")
def test_a_recorded_tool_call_is_kept() -> None:
    out = openai("openai_chat_tool_required", logprobs=None).output
    (call,) = out.tool_calls
    assert (call["type"], call["function"]) == ("function", {"name": "f", "arguments": "-Infinity"})
    assert len(out.token_ids) == 60
    assert out.policy.source == "engine"


@pytest.mark.parametrize("name", ["openai_completions_token_ids", "openai_completions_text"])
def test_a_recorded_completion_in_one_piece_attests_its_versions(name: str) -> None:
    reply = openai(name)
    assert len(reply.output.token_ids) == 4
    assert reply.output.policy.source == "engine"
    assert reply.prompt_token_ids is not None
    assert not PROVIDER.attests(asked(Options(route="openai")))


def test_a_recorded_stream_of_completions_names_ids_and_no_version() -> None:
    reply = openai("openai_completions_stream")
    assert reply.output.token_ids == [275, 2, 490, 292]
    assert reply.output.text == "iz br"
    assert reply.output.policy.source == "inferred"
    assert reply.usage.prompt_tokens == 4


@pytest.mark.case("LOGP-05")
def test_candidates_of_completions_are_kept_by_text_and_said_to_be_incomplete() -> None:
    out = openai("openai_completions_token_ids", logprobs=1).output
    assert out.top_logprobs is None
    assert out.extra["top_logprobs_complete"] is False
    assert out.extra["top_logprobs"][0] == {"iz": -2.420884132385254}
    assert out.logprobs is not None


@pytest.mark.case("WIRE-05")
def test_a_chat_reply_without_ids_is_a_broken_reply() -> None:
    body = json.loads(recorded("openai_chat_meta_info").body)
    for name in ("response_token_ids", "meta_info"):
        del body["choices"][0][name]
    body["choices"][0]["logprobs"] = None
    with pytest.raises(ReplyError, match="token_ids"):
        decode(body, asked(Options(route="openai")))


@pytest.mark.case("FIN-01")
def test_an_aborted_chat_reply_is_not_complete() -> None:
    body = json.loads(recorded("openai_chat_meta_info").body)
    body["choices"][0]["finish_reason"] = "abort"
    out = decode(body, asked(Options(route="openai"), logprobs=None)).output
    assert out.finish_reason is FinishReason.ABORT
    assert not out.is_complete
    assert len(out.token_ids) == 4


def test_a_recorded_refusal_of_openais_routes_is_its_error() -> None:
    with pytest.raises(ProviderError, match="not supported with streaming"):
        PROVIDER.decode(
            recorded("openai_chat_stream_ids_refused"), context(asked(Options(route="openai")))
        )
    with pytest.raises(OverlongPromptError):
        PROVIDER.decode(recorded("error_too_long"), context(asked(Options(route="openai"))))


# ids that are matched by their beginning


def test_no_live_id_is_the_beginning_of_another_requests() -> None:
    ids = [f"genapi-{number:032x}" for number in (1, 11, 0x111)]
    named = {
        json.loads(call.body or b"")["rid"]
        for wire_id in ids
        for call in PROVIDER.abort([wire_id], outputs=12)
    }
    for mine in ids:
        assert {n for n in named if n.startswith(mine)} == {f"{mine}_{i}" for i in range(12)}
