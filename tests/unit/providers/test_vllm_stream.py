"""Streamed replies of vLLM, by the same accumulation as unary ones."""

import json
from typing import Any

import numpy as np
import pytest

from genapi import FinishReason, IncompleteError, ProviderError, ReplyError
from tests.support.transcripts import exchange
from tests.support.vllm_wire import PROMPT, PROVIDER, choice, request, stream
from tests.support.wire import context, sse

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
SPANS = [{"version": "genapi:r:1:1", "start": 0, "end": 2}]


def frame(*choices: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"request_id": "generate-tokens-w", "usage": None, "choices": choices, **more}


def first(*choices: dict[str, Any]) -> dict[str, Any]:
    return frame(*choices, prompt_token_ids=PROMPT)


def test_a_recorded_stream_is_one_reply() -> None:
    recorded = exchange("vllm", "09", "stream")
    reply = stream(recorded.body, request(max_tokens=4, temperature=0.0, logprobs=1))
    unary = exchange("vllm", "08", "logprobs prompt_logprobs ids")
    once = PROVIDER.decode(unary.reply, context(request(max_tokens=4, temperature=0.0)))
    assert reply.output.token_ids == once.output.token_ids
    assert np.array_equal(reply.output.logprobs, once.output.logprobs)  # type: ignore[arg-type]
    assert reply.output.policy == once.output.policy
    assert reply.usage == once.usage
    assert reply.prompt_token_ids == PROMPT


def test_a_stream_hands_out_tokens_as_they_come() -> None:
    decoder = PROVIDER.stream_decoder(context(request(logprobs=0)))
    content = exchange("vllm", "09", "stream").body
    chunks = [c for i in range(0, len(content), 11) for c in decoder.feed(content[i : i + 11])]
    assert [c.token_ids.tolist() for c in chunks] == [[30], [234], [113], [142]]
    assert all(c.logprobs is not None and len(c.logprobs) == 1 for c in chunks)


@pytest.mark.case("STREAM-01")
@pytest.mark.parametrize("step", [None, 1, 2, 3, 7])
def test_a_character_cut_by_the_network_and_a_frame_of_usage_only_are_read(
    step: int | None,
) -> None:
    content = sse(
        first(choice([5], text="")),
        json.dumps(frame(choice([6], "stop", text="✅z")), ensure_ascii=False).encode(),
        frame(usage=USAGE),
    )
    reply = stream(content, request(), step=step)
    assert reply.output.text == "✅z"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (3, 2)


@pytest.mark.case("STREAM-03")
def test_an_error_after_the_200_is_raised_with_the_tokens_before_it() -> None:
    error = {"message": "kv load failed", "type": "InternalServerError", "code": 500, "param": None}
    with pytest.raises(ProviderError, match="kv load failed") as caught:
        stream(sse(first(choice([5])), {"error": error}), request())
    assert (caught.value.status, caught.value.code) == (500, "InternalServerError")
    out = caught.value.partial.output
    assert out.token_ids == [5]
    assert out.finish_reason is FinishReason.ERROR
    assert not out.is_complete


@pytest.mark.case("STREAM-05")
@pytest.mark.parametrize(
    ("frames", "done", "framed"),
    [
        ([first(choice([5])), frame(choice([6]))], False, True),
        ([first(choice([5])), frame(choice([6]))], True, True),
        ([first(choice([5])), frame(choice([6], "stop"))], False, False),
    ],
    ids=["nothing ends", "done without a reason", "close-delimited without done"],
)
def test_a_stream_that_ends_too_early_is_incomplete(
    frames: list[dict[str, Any]],
    done: bool,
    framed: bool,
) -> None:
    with pytest.raises(IncompleteError) as caught:
        stream(sse(*frames, done=done), request(), framed=framed)
    assert caught.value.partial.output.token_ids == [5, 6]


def test_a_framed_body_with_every_reason_needs_no_done() -> None:
    content = sse(first(choice([5], "stop")), done=False)
    assert stream(content, request(), framed=True).output.is_complete


def test_a_frame_cut_in_two_by_the_end_of_the_body_is_incomplete() -> None:
    content = sse(first(choice([5], "stop")), done=False) + b'data: {"choices":'
    with pytest.raises(IncompleteError, match="broke off"):
        stream(content, request(), framed=True)


def test_an_empty_body_is_incomplete() -> None:
    with pytest.raises(IncompleteError) as caught:
        stream(b"", request(), framed=True)
    assert caught.value.partial.outputs == ()


@pytest.mark.case("STREAM-07")
def test_choices_that_interleave_stay_apart() -> None:
    content = sse(
        first(choice([1], index=0)),
        frame(choice([11], index=1)),
        frame(choice([2], index=0)),
        frame(choice([12], "length", index=1)),
        frame(choice([3], "stop", index=0)),
    )
    one, two = stream(content, request(n=2)).outputs
    assert (one.token_ids.tolist(), one.finish_reason.value) == ([1, 2, 3], "stop")
    assert (two.token_ids.tolist(), two.finish_reason.value) == ([11, 12], "length")


@pytest.mark.case("STREAM-07")
def test_a_missing_index_is_the_only_choice_and_nothing_else() -> None:
    nameless = {"token_ids": [5], "finish_reason": "stop", "logprobs": None}
    assert stream(sse(first(nameless)), request(logprobs=None)).output.index == 0
    with pytest.raises(ReplyError, match="choice index None"):
        stream(sse(first(nameless)), request(n=2))


@pytest.mark.case("STREAM-12")
def test_tokens_that_ride_with_the_finish_reason_are_kept() -> None:
    reply = stream(sse(first(choice([5])), frame(choice([6, 7], "length"))), request())
    assert reply.output.token_ids == [5, 6, 7]


@pytest.mark.case("STREAM-12")
def test_tokens_after_the_finish_reason_break_the_contract() -> None:
    content = sse(first(choice([5], "length")), frame(choice([6])))
    with pytest.raises(ReplyError, match="after its finish reason 'length'"):
        stream(content, request())


def test_an_empty_tail_frame_after_the_finish_reason_is_harmless() -> None:
    content = sse(first(choice([5], "length")), frame(choice([])))
    assert stream(content, request()).output.finish_reason == "length"


def test_spans_arrive_with_the_last_frame_of_a_choice() -> None:
    content = sse(first(choice([5])), frame(choice([6], "stop", weight_versions=SPANS)))
    policy = stream(content, request(), run="r").output.policy
    assert (policy.source, len(policy)) == ("engine", 2)


def test_a_lost_frame_shows_in_the_spans() -> None:
    content = sse(first(choice([6], "stop", weight_versions=SPANS)))
    with pytest.raises(ReplyError, match="cover 2 tokens of an output of 1"):
        stream(content, request())


@pytest.mark.case("FIN-01")
def test_an_abort_before_the_first_token_still_ends_the_stream() -> None:
    content = sse(first(choice([], "abort", weight_versions=[], logprobs={"content": []})))
    out = stream(content, request()).output
    assert (out.finish_reason, len(out.token_ids), out.is_complete) == ("abort", 0, False)


def test_a_frame_that_is_not_json_breaks_the_contract() -> None:
    with pytest.raises(ReplyError, match="not JSON") as caught:
        stream(sse(b"{oops"), request())
    assert caught.value.body == b"{oops"


def test_fields_of_several_frames_that_have_no_name_are_joined() -> None:
    content = sse(
        first(choice([5], sampling_mask=[[5, 6]], novel=1)),
        frame(choice([6], "stop", sampling_mask=[[6]], novel=2), novel=3),
    )
    reply = stream(content, request())
    assert reply.output.extra == {"sampling_mask": [[5, 6], [6]], "novel": 2}
    assert reply.extra == {"novel": 3}


def test_what_has_arrived_can_be_read_at_any_time() -> None:
    decoder = PROVIDER.stream_decoder(context(request()))
    assert decoder.partial().outputs == ()
    decoder.feed(sse(first(choice([5])), done=False))
    out = decoder.partial().output
    assert (out.token_ids.tolist(), out.finish_reason.value) == ([5], "error")
    assert out.policy.oldest is None
