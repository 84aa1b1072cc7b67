"""Replies of a Dynamo frontend as values: unary and streamed."""

import json
from typing import Any

import numpy as np
import pytest

from genapi import (
    FinishReason,
    IncompleteError,
    NotReadyError,
    ProviderError,
    ReplyError,
)
from genapi.types.ids import WorkerId
from genapi.wire.http import HTTPReply
from tests.support.dynamo_wire import (
    BIG,
    PROMPT,
    PROVIDER,
    URL,
    Recorded,
    asked_for,
    chunk,
    context,
    decode,
    recorded,
    request,
    sse,
    stream,
    usage,
)

NAN = float("nan")


def same(actual: Any, expected: list[float]) -> bool:
    return np.array_equal(actual, np.array(expected, dtype=np.float32), equal_nan=True)


def worker(instance: int) -> WorkerId:
    return WorkerId(provider="dynamo", instance=str(instance))


def read(call: Recorded, **more: Any) -> Any:
    return PROVIDER.decode(call.reply, context(asked_for(call), **more))


def test_a_recorded_reply_of_a_real_worker_becomes_ids_scores_and_its_worker() -> None:
    (call,) = recorded("vllm_completions_token_in_out")
    reply = read(call, logprobs_mode="processed")
    out = reply.output
    assert out.token_ids == [1466, 143, 311]
    assert same(out.logprobs, [-7.1671743, -7.182731, -7.1083927])
    assert reply.prompt_token_ids == PROMPT
    assert same(reply.prompt_logprobs, [NAN, -7.580191612243652, -7.454683303833008])
    assert (out.text, out.finish_reason) == (" w1148� lazy", FinishReason.LENGTH)
    assert reply.usage.model_dump() == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "cached_tokens": 0,
    }
    assert reply.worker == worker(11520951515806797779)
    assert (reply.prefill_worker, reply.logprobs_mode) == (None, "processed")
    assert out.policy.oldest is None
    assert out.extra["engine_data"]["kv_cache_hit"] == {"prompt_tokens": 3, "reused_tokens": 0}
    assert out.extra["timing"]["ttft_ms"] > 0


def test_a_recorded_stream_gives_the_same_reply_as_one_in_one_piece() -> None:
    (call,) = recorded("vllm_completions_stream")
    reply = stream(call.reply.body, asked_for(call), step=7)
    assert reply.output.token_ids == [1466, 143]
    assert same(reply.output.logprobs, [-7.1671743, -7.182731])
    assert reply.usage.cached_tokens == 0
    assert reply.worker == worker(11520951515806797779)
    assert "migrated" not in reply.output.extra


def test_ids_of_workers_beyond_what_a_float_holds_are_exact() -> None:
    reply = decode(chunk([1], "stop", workers=(BIG - 1, BIG)), request())
    assert (reply.worker, reply.prefill_worker) == (worker(BIG), worker(BIG - 1))
    assert int(float(BIG)) != BIG


@pytest.mark.parametrize(
    "names",
    [
        None,
        {},
        {"decode_worker_id": BIG},
        {"prefill_worker_id": BIG},
        {"prefill_worker_id": BIG, "decode_worker_id": None},
    ],
)
def test_a_reply_that_does_not_name_both_of_its_workers_is_of_nobody_pinned_or_not(
    names: Any,
) -> None:
    body = chunk([1], "stop", worker_id=names)
    pinned = decode(body, request(), worker=worker(BIG))
    for reply in (
        pinned,
        decode(body, request()),
        stream(sse(body), request(), worker=worker(BIG)),
    ):
        assert (reply.worker, reply.prefill_worker) == (None, None)
        assert reply.attempts[-1].worker is None


def test_an_error_in_a_stream_that_ends_properly_is_an_error_that_keeps_the_tokens() -> None:
    call = recorded("stream_worker_killed_migration_0")[0]
    lines = [f for f in call.reply.body.split(b"\n\n") if not f.startswith(b"...")]
    decoder = PROVIDER.stream_decoder(context(request(prompt=[4, 5], max_tokens=60, logprobs=None)))
    with pytest.raises(NotReadyError, match="temporarily unavailable") as caught:
        decoder.feed(b"\n\n".join(lines))
    assert caught.value.status == 503
    assert caught.value.partial.output.token_ids == [1002, 1003, 1004, 1017]
    assert caught.value.partial.output.finish_reason == FinishReason.ERROR


def test_a_reply_that_moved_between_workers_is_recognised_and_names_none_of_them() -> None:
    before, moved = recorded("migration_on_worker_killed")
    whole = read(before)
    assert whole.worker == worker(494050885681282234)
    assert "migrated" not in whole.output.extra

    remarks: list[str] = []
    reply = read(moved, remark=remarks.append)
    assert reply.output.extra["migrated"] is True
    assert (reply.worker, reply.prefill_worker) == (None, None)
    assert len(reply.output.token_ids) == len(reply.output.logprobs) == 30
    assert reply.output.policy.is_mixed
    assert any("--migration-limit 0" in remark for remark in remarks)


@pytest.mark.parametrize(
    "last",
    [
        chunk([9], "length", engine_data={"completion_token_ids": [9]}),
        chunk([9], "length"),
    ],
)
def test_either_sign_of_a_migration_is_enough(last: dict[str, Any]) -> None:
    prompt = 3 if "engine_data" in last["nvext"] else 4
    body = sse(chunk([7]), last, usage(prompt, 2))
    reply = stream(body, request(logprobs=None))
    assert reply.output.extra["migrated"] is True


def frames_of(call: Recorded) -> list[bytes]:
    """The frames of a recorded stream, which ends in its usage and [DONE]."""
    return [frame + b"\n\n" for frame in call.reply.body.split(b"\n\n")[:-1]]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_recorded_stream_that_lost_a_frame_breaks_the_contract(lost: int) -> None:
    call = recorded("vllm_stops")[1]
    frames = frames_of(call)
    assert stream(b"".join(frames), asked_for(call)).output.token_ids == [1943, 696, 296, 1578]
    del frames[lost]
    with pytest.raises(
        ReplyError, match="3 tokens, which do not end in the 4 that the worker made"
    ):
        stream(b"".join(frames), asked_for(call))


@pytest.mark.parametrize("first", [0, 1])
def test_a_recorded_stream_with_frames_in_each_others_place_breaks_the_contract(first: int) -> None:
    call = recorded("vllm_stops")[1]
    frames = frames_of(call)
    frames[first : first + 2] = reversed(frames[first : first + 2])
    with pytest.raises(ReplyError, match="changed places"):
        stream(b"".join(frames), asked_for(call))


def test_tokens_whose_choice_was_taken_off_are_missed() -> None:
    bare = {**chunk([7]), "choices": []}
    body = sse(bare, chunk([8], "stop", engine_data={"completion_token_ids": [7, 8]}))
    with pytest.raises(ReplyError, match="1 tokens, which do not end in the 2"):
        stream(body, request(logprobs=None))


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_where_no_worker_lists_its_tokens_the_frontends_count_is_held_against_them(
    lost: int,
) -> None:
    call = recorded("vllm_stops")[3]  # a text ended it: the worker's own list does not come
    frames = frames_of(call)
    assert len(stream(b"".join(frames), asked_for(call)).output.token_ids) == 4
    del frames[lost]
    with pytest.raises(ReplyError, match="3 tokens, and usage counts 4"):
        stream(b"".join(frames), asked_for(call))


def test_a_reply_that_moved_and_lost_tokens_of_the_first_worker_breaks_the_contract() -> None:
    last = chunk([9], "length", engine_data={"completion_token_ids": [9]})
    with pytest.raises(ReplyError, match="2 tokens, and usage counts 3"):
        stream(sse(chunk([7]), last, usage(5, 3)), request(logprobs=None))


@pytest.mark.parametrize("candidates", [[{"a": -1.0}, {"b": -2.0}], {"of": "another shape"}])
def test_lists_that_the_reply_holds_already_or_nobody_asked_for_are_passed_over(
    candidates: Any,
) -> None:
    said = {"prompt_token_ids": PROMPT, "completion_logprobs": [-1.0, -2.0], "finished": True}
    body = chunk([7, 8], "stop", engine_data={**said, "completion_token_ids": [7, 8]})
    body["choices"][0]["logprobs"] = {
        "tokens": ["a", "b"],
        "token_logprobs": [-1.0, -2.0],
        "top_logprobs": candidates,
        "text_offset": [0, 1],
    }
    out = decode(body, request(logprobs=0)).output
    assert same(out.logprobs, [-1.0, -2.0])
    assert (out.top_logprobs, dict(out.extra)) == (None, {"engine_data": {"finished": True}})


@pytest.mark.parametrize("ids", [["a"], {}])
def test_tokens_of_a_worker_that_are_no_ids_break_the_contract(ids: Any) -> None:
    with pytest.raises(ReplyError, match="engine_data breaks its contract"):
        decode(chunk([7], "stop", engine_data={"completion_token_ids": ids}), request())


def test_what_a_worker_says_in_another_form_than_an_object_is_kept_as_it_came() -> None:
    out = decode(chunk([7], "stop", engine_data=["x", 1]), request(logprobs=None)).output
    assert out.extra["engine_data"] == ["x", 1]
    assert "migrated" not in out.extra


def test_what_a_worker_of_ones_own_says_is_kept_and_not_believed() -> None:
    *_, first, second = recorded("custom_worker_weight_version_in_engine_data")
    reply = read(first)
    assert reply.output.extra["engine_data"]["weight_version"] == 1
    assert reply.output.policy.oldest is None
    assert reply.worker == worker(5363937753380972144)
    assert read(second).worker == worker(BIG)


def test_a_worker_without_scores_gives_nan_and_is_remarked_upon() -> None:
    call = recorded("mocker_generation")[0]
    remarks: list[str] = []
    reply = read(call, remark=remarks.append)
    assert reply.output.token_ids == [1935, 1424]
    assert np.isnan(reply.output.logprobs).all()
    assert remarks == ["2 of 2 tokens have no usable logprob (NaN)"]


def test_the_number_that_stands_for_no_score_is_nan() -> None:
    body = chunk([1, 2], "stop", scores=[-1e30, -0.5])
    reply = decode(body, request())
    assert same(reply.output.logprobs, [NAN, -0.5])


def test_a_score_of_more_than_certainty_is_no_number() -> None:
    remarks: list[str] = []
    reply = decode(chunk([1, 2], "stop", scores=[1.5, -0.5]), request(), remark=remarks.append)
    assert same(reply.output.logprobs, [NAN, -0.5])
    assert "1 of 2 tokens have no usable logprob (NaN)" in remarks


def test_a_prompt_as_text_comes_back_as_ids() -> None:
    asked = request().model_copy(update={"prompt_token_ids": None, "prompt": "w7 w8"})
    reply = decode(chunk([1], "stop", prompt_token_ids=[89, 25]), asked)
    assert reply.prompt_token_ids == [89, 25]


@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        ("stop", FinishReason.STOP),
        ("length", FinishReason.LENGTH),
        ("cancelled", FinishReason.ABORT),
        ("error", FinishReason.ERROR),
        ("content_filter", FinishReason.OTHER),
    ],
)
def test_finish_reasons_are_named(finish: str, reason: FinishReason) -> None:
    out = decode(chunk([1], finish), request()).output
    assert (out.finish_reason, out.finish_raw) == (reason, finish)


@pytest.mark.parametrize(
    ("body", "match"),
    [
        ({"id": "x"}, "no choices"),
        (chunk([1, 2], "stop", scores=[-1.0]), "2 token ids with 1 logprobs"),
        (chunk([1], "stop", prompt_token_ids=[4, 5, 7]), "prompt changed by server"),
        (chunk(list(range(17)), "stop"), "17 tokens, max_tokens is 16"),
        (chunk([-1], "stop"), "breaks its contract"),
        ({"choices": [{"text": "a", "index": 0, "finish_reason": "stop"}]}, "names no token_ids"),
        (b"<html>", "not JSON"),
    ],
)
def test_a_broken_reply_is_an_error_that_keeps_the_body(body: Any, match: str) -> None:
    with pytest.raises(ReplyError, match=match) as caught:
        decode(body, request())
    assert caught.value.body


def test_scores_of_the_prompt_that_lack_its_own_id_break_the_contract() -> None:
    scores = [None, {"7": {"logprob": -1.0, "rank": 1}}, {"6": {"logprob": -1.0, "rank": 1}}]
    body = chunk([1], "stop", prompt_token_ids=PROMPT, prompt_logprobs=scores)
    with pytest.raises(ReplyError, match="position 1 lack the prompt's own id 5"):
        decode(body, request(prompt_logprobs=0))


def test_tokens_after_the_finish_reason_break_the_contract() -> None:
    with pytest.raises(ReplyError, match="goes on with 1 tokens after its finish reason 'stop'"):
        stream(sse(chunk([1], "stop"), chunk([2])), request())


@pytest.mark.parametrize(
    ("body", "framed"),
    [
        (sse(chunk([1])), True),
        (sse(chunk([1], "stop"), done=False), False),
        (sse(chunk([1], "stop"), done=False)[:-4], False),
    ],
)
def test_a_stream_without_an_end_is_incomplete(body: bytes, framed: bool) -> None:
    with pytest.raises(IncompleteError) as caught:
        stream(body, request(), framed=framed)
    assert caught.value.partial is not None


def test_unknown_fields_are_kept() -> None:
    body = chunk([1], "stop", routed_experts=[[1]])
    body["choices"][0]["later"] = 1
    body["newest"] = "x"
    reply = decode(body, request())
    extra = reply.output.extra
    assert (extra["routed_experts"], extra["later"]) == ([[1]], 1)
    assert reply.extra["newest"] == "x"


def test_an_error_inside_a_200_is_an_error() -> None:
    body = json.dumps({"error": {"message": "boom", "type": "x", "code": 500}}).encode()
    with pytest.raises(ProviderError, match="500: boom"):
        PROVIDER.decode(HTTPReply(200, body, {}, URL), context(request()))


def test_a_recorded_chat_is_read_with_its_ids() -> None:
    (call,) = recorded("vllm_chat_token_data")
    asked = request(prompt=call.json["nvext"]["token_data"], max_tokens=2)
    reply = PROVIDER.decode(call.reply, context(asked))
    out = reply.output
    assert out.token_ids == [1466, 143]
    assert same(out.logprobs, [-7.1671743, -7.182731])
    assert (out.text, out.finish_reason) == (" w1148�", FinishReason.LENGTH)
    assert reply.worker == worker(11520951515806797779)
    assert reply.prompt_token_ids == [4, 5, 6]
    assert "migrated" not in out.extra


def whole_or_streamed(call: Recorded, asked: Any) -> Any:
    if call.json["stream"]:
        return stream(call.reply.body, asked, step=7)
    return PROVIDER.decode(call.reply, context(asked))


@pytest.mark.parametrize("number", [0, 1])
def test_a_recorded_chat_has_the_ids_that_its_template_made(number: int) -> None:
    call = recorded("vllm_chat")[number]
    reply = whole_or_streamed(call, chat(call))
    out = reply.output
    assert out.token_ids == [1441, 534, 564]
    assert same(out.logprobs, [-1.7941078, -2.5774252, -2.6189573])
    assert (out.text, out.finish_reason) == (" naku duma faka", FinishReason.LENGTH)
    assert reply.prompt_token_ids is not None
    assert reply.prompt_token_ids[:5] == [1, 87, 85, 71, 84]
    assert len(reply.prompt_token_ids) == reply.usage.prompt_tokens == 23
    assert reply.worker == worker(13773257563131759842)
    assert out.top_logprobs is None


def chat(call: Recorded, **sampling: Any) -> Any:
    given = {"max_tokens": call.json.get("max_tokens", 16), **sampling}
    form = {"prompt_token_ids": None, "messages": call.json["messages"]}
    return request(**given).model_copy(update=form)


def test_scores_of_a_chats_prompt_are_read() -> None:
    call = recorded("vllm_chat")[3]
    reply = PROVIDER.decode(call.reply, context(chat(call, prompt_logprobs=0)))
    assert reply.prompt_logprobs is not None
    assert len(reply.prompt_logprobs) == 23
    assert same(reply.prompt_logprobs[:3], [NAN, -11.251754760742188, -11.776223182678223])


@pytest.mark.parametrize(
    ("number", "first"),
    [
        (0, {1943: -2.840588, 1737: -2.9004579, 298: -3.3240213}),
        (1, {1681: -3.9401383, 1943: -2.840588, 1737: -2.9004579}),
        (3, {1441: -1.7941078, 1938: -2.8289785, 436: -3.064323}),
        (6, {1441: -1.7941078, 1938: -2.8289785, 436: -3.064323}),
    ],
)
def test_recorded_candidates_are_read_by_their_ids(number: int, first: dict[int, float]) -> None:
    call = recorded("vllm_candidates")[number]
    more = {"logprobs": call.json.get("top_logprobs", call.json["logprobs"])}
    asked = chat(call, **more) if "messages" in call.json else request(prompt=[1, 2, 3], **more)
    out = whole_or_streamed(call, asked).output
    assert out.top_logprobs is not None
    assert out.top_logprobs[0].token_ids == list(first)
    assert same(out.top_logprobs[0].logprobs, list(first.values()))
    assert [top.token_ids[0] for top in out.top_logprobs] == list(out.token_ids)


@pytest.mark.parametrize(("number", "stop"), [(0, 1578), (1, 1578), (2, "re"), (3, "re nu")])
def test_a_recorded_reply_says_what_ended_it(number: int, stop: int | str) -> None:
    call = recorded("vllm_stops")[number]
    more = {"stop_token_ids": [stop]} if isinstance(stop, int) else {"stop": [stop]}
    out = whole_or_streamed(call, request(prompt=[1, 2, 3], **more)).output
    assert (out.finish_reason, out.stop_reason) == (FinishReason.STOP, stop)
    assert out.token_ids == [1943, 696, 296, 1578][: 3 if stop == "re" else 4]
    assert "migrated" not in out.extra
