"""vLLM's OpenAI routes: what is sent, and replies and streams as values."""

import json
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from genapi import (
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    IncompleteError,
    ProviderError,
    ReplyError,
    SamplingParams,
    UnsupportedError,
)
from genapi.providers.base import Capabilities
from genapi.providers.vllm import Options
from genapi.wire.http import HTTPReply
from tests.support.transcripts import Exchange, exchange, exchanges
from tests.support.vllm_wire import PROVIDER
from tests.support.wire import context, sse

COMPLETIONS = "http://w1:8000/v1/completions"
CHAT = "http://w1:8000/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
NO_SCALE_OUT = Capabilities(missing={"generate": "start vLLM with --enable-scale-out"})
NAN = float("nan")


def asked(form: Any = None, *, options: Options | None = None, **sampling: Any) -> GenerateRequest:
    """A request over OpenAI's routes: messages unless another prompt is given."""
    prompt: dict[str, Any] = form if form is not None else {"messages": HI}
    return GenerateRequest(
        sampling=SamplingParams(**{"max_tokens": 16, **sampling}),
        options=options or Options(route="openai"),
        **prompt,
    )


def decode(body: Any, request: GenerateRequest, **more: Any) -> GenerateResponse:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return PROVIDER.decode(HTTPReply(200, raw, {}, CHAT), context(request, **more))


def streamed(
    content: bytes, request: GenerateRequest, *, framed: bool = True, cuts: tuple[int, ...] = ()
) -> GenerateResponse:
    decoder = PROVIDER.stream_decoder(context(request))
    for start, end in zip((0, *cuts), (*cuts, len(content)), strict=True):
        decoder.feed(content[start:end])
    return decoder.finish(framed=framed)


def message(ids: list[int] | None, finish: str | None = "stop", **more: Any) -> dict[str, Any]:
    """A chat reply of one choice whose message has `more`."""
    said = {"role": "assistant", "content": "text", **more}
    logprobs = {"content": [{"token": "x", "logprob": -1.0} for _ in ids or ()]}
    return {
        "choices": [
            {
                "index": 0,
                "message": said,
                "logprobs": logprobs,
                "finish_reason": finish,
                "token_ids": ids,
            }
        ]
    }


def frame(
    ids: list[int],
    finish: str | None = None,
    *,
    index: int | None = 0,
    scores: list[float | None] | None = None,
    **delta: Any,
) -> dict[str, Any]:
    """A frame of a chat stream."""
    values = [-1.0] * len(ids) if scores is None else scores
    choice: dict[str, Any] = {
        "delta": delta,
        "logprobs": {"content": [{"token": "x", "logprob": v} for v in values]},
        "finish_reason": finish,
        "token_ids": ids,
    }
    return {"choices": [choice if index is None else {"index": index, **choice}]}


def same(actual: Any, expected: list[float]) -> bool:
    return np.array_equal(actual, np.array(expected, dtype=np.float32), equal_nan=True)


# what is sent


@pytest.mark.parametrize(
    ("form", "path", "sent"),
    [
        ({"prompt_token_ids": [1, 2]}, "/v1/completions", {"prompt": [1, 2]}),
        ({"prompt": "hi"}, "/v1/completions", {"prompt": "hi"}),
        ({"messages": HI}, "/v1/chat/completions", {"messages": HI}),
    ],
)
def test_each_form_of_a_prompt_goes_to_its_route_as_it_is(
    form: Any, path: str, sent: dict[str, Any]
) -> None:
    call = PROVIDER.encode(asked(form), wire_id="w", model="tiny", salt="s", stream=False)
    body = json.loads(call.body or b"")
    assert (call.method, call.path) == ("POST", path)
    assert body.items() >= {**sent, "request_id": "w", "model": "tiny", "cache_salt": "s"}.items()
    assert body["return_token_ids"] is True
    assert body["return_tokens_as_token_ids"] is True


@pytest.mark.case("CONF-03")
def test_no_special_token_is_put_before_ids() -> None:
    call = PROVIDER.encode(
        asked({"prompt_token_ids": [128000, 9906]}),
        wire_id="w",
        model=None,
        salt=None,
        stream=False,
    )
    assert json.loads(call.body or b"")["add_special_tokens"] is False


def test_every_value_that_shapes_the_draw_is_sent_at_its_default() -> None:
    for form in ({"prompt": "hi"}, {"messages": HI}):
        call = PROVIDER.encode(asked(form), wire_id="w", model=None, salt=None, stream=False)
        body = json.loads(call.body or b"")
        assert (
            body.items()
            >= {
                "n": 1,
                "max_tokens": 16,
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "repetition_penalty": 1.0,
                "min_tokens": 0,
                "ignore_eos": False,
            }.items()
        )


@pytest.mark.case("LOGP-07")
def test_no_alternatives_are_asked_for_with_the_number_0() -> None:
    completions = PROVIDER.encode(
        asked({"prompt": "x"}, logprobs=0), wire_id="w", model=None, salt=None, stream=False
    )
    assert json.loads(completions.body or b"")["logprobs"] == 0
    chat = PROVIDER.encode(asked(logprobs=0), wire_id="w", model=None, salt=None, stream=False)
    assert json.loads(chat.body or b"").items() >= {"logprobs": True, "top_logprobs": 0}.items()
    off = PROVIDER.encode(asked(logprobs=None), wire_id="w", model=None, salt=None, stream=False)
    assert json.loads(off.body or b"")["logprobs"] is False


def test_tools_and_what_goes_with_them_reach_the_chat_route() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    options = Options(route="openai", chat={"tool_choice": "required"})
    request = asked({"messages": HI, "tools": tools}, options=options)
    body = json.loads(
        PROVIDER.encode(request, wire_id="w", model=None, salt=None, stream=False).body or b""
    )
    assert body.items() >= {"tools": tools, "tool_choice": "required"}.items()


def test_tools_without_messages_are_refused() -> None:
    with pytest.raises(ValueError, match="tools= goes with messages="):
        asked({"prompt": "x", "tools": [{"type": "function"}]})


@pytest.mark.parametrize(
    ("form", "options", "remedy"),
    [
        (None, Options(route="openai", skip_reading_prefix_cache=True), "cache_salt"),
        ({"prompt": "x"}, Options(route="openai", chat={"tool_choice": "none"}), "messages="),
    ],
)
def test_what_the_routes_have_no_field_for_is_refused_before_any_call(
    form: Any, options: Options, remedy: str
) -> None:
    with pytest.raises(UnsupportedError, match=remedy):
        PROVIDER.check(asked(form, options=options), None)


def test_an_option_may_not_set_what_genapi_sets() -> None:
    with pytest.raises(UnsupportedError, match="'messages'"):
        PROVIDER.encode(
            asked(options=Options(route="openai", chat={"messages": []})),
            wire_id="w",
            model=None,
            salt=None,
            stream=False,
        )


def test_a_server_without_the_native_route_is_asked_over_openais() -> None:
    request = asked({"prompt_token_ids": [1]}, options=Options())
    PROVIDER.check(request, NO_SCALE_OUT)
    with pytest.raises(UnsupportedError, match="--enable-scale-out"):
        PROVIDER.check(
            request.model_copy(update={"options": Options(route="native")}), NO_SCALE_OUT
        )


# recorded replies


def sampling_of(recorded: Exchange) -> dict[str, Any]:
    sent = recorded.json
    names = ("max_tokens", "temperature", "n", "seed", "stop", "ignore_eos", "min_tokens")
    found = {name: sent[name] for name in names if name in sent}
    scored = sent.get("logprobs")
    found["logprobs"] = (sent.get("top_logprobs") or 0) if scored is True else scored
    found["prompt_logprobs"] = sent.get("prompt_logprobs")
    return found


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (recorded_number, recorded.name)
        for recorded_number in ("04", "06", "51")
        for recorded in exchanges("vllm", recorded_number)
        if recorded.path.endswith("completions")
        and recorded.json.get("return_token_ids")
        and not recorded.json.get("echo")
        and recorded.name != "two prompts"
    ],
)
def test_every_recorded_reply_with_ids_becomes_a_value(number: str, name: str) -> None:
    recorded = exchange("vllm", number, name)
    form = {k: v for k, v in recorded.json.items() if k in ("prompt", "messages")}
    if isinstance(form.get("prompt"), list):
        form = {"prompt_token_ids": form["prompt"]}
    request = asked(form, **sampling_of(recorded))
    reply = PROVIDER.decode(recorded.reply, context(request))
    choices = json.loads(recorded.body)["choices"]
    assert [o.token_ids.tolist() for o in reply.outputs] == [c["token_ids"] for c in choices]
    texts = [c.get("text") or (c.get("message") or {}).get("content") for c in choices]
    assert [o.text or "" for o in reply.outputs] == [text or "" for text in texts]
    assert all(o.policy.source == "inferred" and o.policy.newest is None for o in reply.outputs)
    assert reply.prompt_token_ids is not None
    assert reply.usage.prompt_tokens == len(reply.prompt_token_ids)


def test_a_recorded_chat_reply_scores_its_prompt() -> None:
    recorded = exchange("vllm", "06", "chat prompt_logprobs")
    reply = PROVIDER.decode(recorded.reply, context(asked(max_tokens=4, prompt_logprobs=0)))
    assert reply.prompt_logprobs is not None
    assert len(reply.prompt_logprobs) == 12
    assert same(reply.prompt_logprobs[:3], [NAN, -9.692045211791992, -11.484997749328613])


@pytest.mark.parametrize("number", ["05", "07", "62"])
def test_a_recorded_stream_becomes_the_value_of_its_whole_reply(number: str) -> None:
    recorded = next(e for e in exchanges("vllm", number) if b"data: " in e.body[:10])
    form = {k: v for k, v in recorded.json.items() if k in ("prompt", "messages", "tools")}
    if isinstance(form.get("prompt"), list):
        form = {"prompt_token_ids": form["prompt"]}
    reply = streamed(recorded.body, asked(form, **sampling_of(recorded)))
    frames = [json.loads(e[6:]) for e in recorded.body.decode().split("\n\n") if "{" in e]
    ids = [i for f in frames for c in f["choices"] for i in c.get("token_ids") or ()]
    assert reply.output.token_ids == ids
    assert reply.usage.completion_tokens == len(ids)
    assert reply.prompt_token_ids is not None
    if number == "62":
        (call,) = reply.output.tool_calls
        assert call["function"] == {"name": "f", "arguments": "false"}
        assert reply.output.text in (None, "")


def test_an_answer_that_is_an_error_raises_it() -> None:
    recorded = exchange("vllm", "90", "n=2 temperature=1 seed")
    with pytest.raises(ProviderError) as raised:
        PROVIDER.decode(recorded.reply, context(asked({"prompt": "x"})))
    assert raised.value.code == "engine_dead"


# reasoning, tool calls, ids


@pytest.mark.case("WIRE-03")
@pytest.mark.parametrize(
    "said",
    [
        {"reasoning": "t"},
        {"reasoning_content": "t"},
        {"reasoning": "t", "reasoning_content": "t"},
    ],
)
def test_reasoning_is_kept_under_either_name(said: dict[str, Any]) -> None:
    whole = decode(message([1, 2], **said), asked())
    assert (whole.output.reasoning, whole.output.text) == ("t", "text")
    assert whole.output.token_ids == [1, 2]
    assert same(whole.output.logprobs, [-1.0, -1.0])
    stream = streamed(sse(frame([1], **said), frame([2], "stop", content="text")), asked())
    assert (stream.output.reasoning, stream.output.text) == ("t", "text")
    assert stream.output.token_ids == [1, 2]


@pytest.mark.case("WIRE-03")
def test_two_names_of_the_reasoning_that_differ_are_a_broken_reply() -> None:
    with pytest.raises(ReplyError, match="they differ"):
        decode(message([1], reasoning="t", reasoning_content="u"), asked())


@pytest.mark.case("WIRE-05")
@pytest.mark.parametrize("ids", [None, []])
def test_text_without_the_ids_that_were_asked_for_is_a_broken_reply(ids: Any) -> None:
    with pytest.raises(ReplyError, match="token_ids") as raised:
        decode(message(ids), asked())
    assert raised.value.url == CHAT


@pytest.mark.case("FIN-01")
def test_an_abort_is_an_output_that_is_not_complete() -> None:
    reply = decode(message([7, 8], "abort", content="par"), asked())
    assert reply.output.finish_reason is FinishReason.ABORT
    assert not reply.output.is_complete
    assert (reply.output.token_ids.tolist(), reply.output.text) == ([7, 8], "par")


@pytest.mark.case("STREAM-09")
@pytest.mark.parametrize("reason", ["tool_calls", "stop"])
def test_pieces_of_a_tool_call_are_joined_to_the_last_one(reason: str) -> None:
    begun = {"index": 0, "id": "k1", "type": "function", "function": {"name": "f", "arguments": ""}}
    pieces = [
        [begun],
        [{"index": 0, "function": {"arguments": '{"a":'}}],
        [{"index": 0, "function": {"arguments": "1}"}}],
    ]
    frames = [
        frame([position], reason if position == len(pieces) - 1 else None, tool_calls=piece)
        for position, piece in enumerate(pieces)
    ]
    output = streamed(sse(*frames), asked()).output
    function = {"name": "f", "arguments": '{"a":1}'}
    assert output.tool_calls == ({"id": "k1", "type": "function", "function": function},)
    assert output.finish_raw == reason
    assert output.token_ids == [0, 1, 2]


def test_fields_that_no_name_is_known_for_are_kept() -> None:
    body = message([1], novel_of_message=1)
    body["choices"][0]["novel_of_choice"] = 2
    reply = decode({**body, "novel": 3}, asked())
    assert reply.output.extra == {"novel_of_message": 1, "novel_of_choice": 2}
    assert reply.extra == {"novel": 3}


# scores


@pytest.mark.case("LOGP-01")
@pytest.mark.parametrize("hole", [None, {"token": "x"}])
def test_a_score_that_is_missing_stays_a_hole(hole: Any) -> None:
    body = message([5, 6, 7])
    body["choices"][0]["logprobs"] = {"content": [{"logprob": -0.1}, hole, {"logprob": -0.3}]}
    remarks: list[str] = []
    reply = decode(body, asked(), remark=remarks.append)
    assert same(reply.output.logprobs, [-0.1, NAN, -0.3])
    assert any("no usable logprob" in remark for remark in remarks)


@pytest.mark.case("LOGP-03")
@pytest.mark.parametrize(("ids", "count"), [([11, 12], 3), ([11, 12, 2], 2)])
def test_scores_that_are_not_one_for_each_token_are_a_broken_reply(
    ids: list[int], count: int
) -> None:
    body = message(ids)
    body["choices"][0]["logprobs"] = {"content": [{"logprob": -1.0}] * count}
    with pytest.raises(ReplyError, match=f"{len(ids)} token ids with {count} logprobs"):
        decode(body, asked())


def completion(ids: list[int], logprobs: dict[str, Any]) -> dict[str, Any]:
    choice = {"index": 0, "text": "t", "logprobs": logprobs, "finish_reason": "stop"}
    return {"choices": [{**choice, "token_ids": ids, "prompt_token_ids": [9]}]}


@pytest.mark.case("LOGP-05")
def test_candidates_that_are_named_by_id_are_kept_though_they_read_the_same() -> None:
    logprobs = {
        "tokens": ["token_id:1565"],
        "token_logprobs": [-1.57],
        "top_logprobs": [{"token_id:1565": -1.57, "token_id:3009": -1.6}],
    }
    output = decode(completion([1565], logprobs), asked({"prompt": "x"}, logprobs=2)).output
    assert output.top_logprobs is not None
    assert output.top_logprobs[0].token_ids == [1565, 3009]
    assert same(output.top_logprobs[0].logprobs, [-1.57, -1.6])


@pytest.mark.case("LOGP-05")
def test_candidates_that_are_named_by_text_are_no_top_logprobs() -> None:
    listed = [{"true": -1.57, "null": -8.4}, {"x": -0.5}]
    logprobs = {"tokens": ["other", "x"], "token_logprobs": [-2.5, -0.5], "top_logprobs": listed}
    output = decode(completion([1565, 3], logprobs), asked({"prompt": "x"}, logprobs=4)).output
    assert output.top_logprobs is None
    assert output.extra == {"top_logprobs": listed, "top_logprobs_complete": False}
    assert same(output.logprobs, [-2.5, -0.5])


@pytest.mark.parametrize("listed", [{"token_id:3": -1.0}, [{"token_id:3": "x"}], [[-1.0]]])
def test_candidates_of_another_shape_break_the_contract_where_they_were_asked_for(
    listed: Any,
) -> None:
    logprobs = {"tokens": ["token_id:3"], "token_logprobs": [-1.0], "top_logprobs": listed}
    body = completion([3], logprobs)
    with pytest.raises(ReplyError, match="top_logprobs break their contract"):
        decode(body, asked({"prompt": "x"}, logprobs=2))
    assert decode(body, asked({"prompt": "x"}, logprobs=0)).output.top_logprobs is None


@pytest.mark.case("LOGP-12")
def test_text_that_lacks_the_matched_stop_does_not_touch_ids_and_scores() -> None:
    logprobs = {"tokens": ["a", "END"], "token_logprobs": [-1.0, -2.0]}
    body = completion([4, 5], logprobs)
    body["choices"][0] |= {"text": "a", "stop_reason": "END"}
    output = decode(body, asked({"prompt": "x"}, stop=("END",))).output
    assert (output.text, output.stop_reason, output.token_ids.tolist()) == ("a", "END", [4, 5])
    assert same(output.logprobs, [-1.0, -2.0])


# streams


@pytest.mark.case("STREAM-01")
def test_a_character_may_be_cut_anywhere_and_the_usage_come_alone() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    first = json.dumps(frame([1, 2], "stop", content="✅z"), ensure_ascii=False).encode()
    content = sse(first, {"choices": [], "usage": usage})
    for cut in range(1, len(content)):
        reply = streamed(content, asked(), cuts=(cut,))
        assert reply.output.text == "✅z"
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (3, 2)


@pytest.mark.case("STREAM-03")
def test_a_failure_after_the_status_raises_with_what_had_come() -> None:
    error = {"message": "kv load failed", "type": "InternalServerError", "code": 500}
    content = sse(frame([1], content="a"), {"error": {**error, "param": None}})
    with pytest.raises(ProviderError, match="kv load failed") as raised:
        streamed(content, asked())
    assert raised.value.status == 500
    assert raised.value.partial is not None
    assert raised.value.partial.output.token_ids == [1]


@pytest.mark.case("STREAM-05")
@pytest.mark.parametrize("done", [False, True])
def test_a_stream_without_a_finish_reason_is_incomplete(done: bool) -> None:
    with pytest.raises(IncompleteError) as raised:
        streamed(sse(frame([1]), frame([2]), done=done), asked())
    assert raised.value.partial is not None
    assert raised.value.partial.output.token_ids == [1, 2]


@pytest.mark.case("STREAM-07")
def test_choices_may_interleave_in_any_order() -> None:
    mine = {
        0: [frame([1], scores=[-0.1]), frame([2], "stop", scores=[-0.2])],
        1: [
            frame([5], index=1, scores=[-0.5]),
            frame([6], index=1, scores=[-0.6]),
            frame([7], "length", index=1, scores=[-0.7]),
        ],
    }
    for order in set(permutations((0, 0, 1, 1, 1))):
        left = {index: iter(frames) for index, frames in mine.items()}
        reply = streamed(sse(*(next(left[index]) for index in order)), asked(n=2))
        assert [o.token_ids.tolist() for o in reply.outputs] == [[1, 2], [5, 6, 7]]
        assert same(reply.outputs[1].logprobs, [-0.5, -0.6, -0.7])
        assert [o.finish_raw for o in reply.outputs] == ["stop", "length"]


@pytest.mark.case("STREAM-07")
def test_a_missing_index_means_the_only_choice() -> None:
    assert streamed(sse(frame([1], "stop", index=None)), asked()).output.token_ids == [1]
    with pytest.raises(ReplyError, match="n=2"):
        streamed(sse(frame([1], "stop", index=None)), asked(n=2))


@pytest.mark.case("STREAM-12")
def test_tokens_come_with_the_finish_reason_and_none_after_it() -> None:
    reply = streamed(sse(frame([1]), frame([2, 3], "length")), asked())
    assert reply.output.token_ids == [1, 2, 3]
    with pytest.raises(ReplyError, match="after its finish reason"):
        streamed(sse(frame([1], "length"), frame([2])), asked())
