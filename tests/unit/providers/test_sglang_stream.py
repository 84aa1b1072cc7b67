"""Streamed replies of SGLang: all tokens so far in each frame, or the new ones alone."""

from typing import Any

import numpy as np
import pytest

from genapi import (
    FinishReason,
    IncompleteError,
    OverlongPromptError,
    ProviderError,
    ReplyError,
)
from tests.support.sglang_wire import (
    ABORT,
    PROVIDER,
    STOP,
    asked_for,
    output,
    recorded,
    request,
    scored,
    stream,
)
from tests.support.wire import context, sse

SPANS = [{"version": "genapi:r:1:1", "start": 0, "end": 3}]


def test_a_recorded_stream_is_one_reply() -> None:
    body = recorded("generate_stream").body
    reply = stream(body, asked_for("generate_stream"))
    once = PROVIDER.decode(
        recorded("weights_00_generate_before"),
        context(asked_for("weights_00_generate_before")),
    )
    assert reply.output.token_ids == [275, 2, 490, 292]
    assert reply.output.token_ids == once.output.token_ids[:4]
    assert reply.output.text == "iz br"
    assert len(reply.output.policy.spans) == 1
    assert reply.usage.cached_tokens == 3


@pytest.mark.parametrize("step", [1, 2, 7, 100])
def test_a_stream_hands_out_each_token_once_however_it_is_cut(step: int) -> None:
    decoder = PROVIDER.stream_decoder(context(asked_for("generate_stream")))
    content = recorded("generate_stream").body
    pieces = [content[i : i + step] for i in range(0, len(content), step)]
    chunks = [c for piece in pieces for c in decoder.feed(piece)]
    assert [c.token_ids.tolist() for c in chunks] == [[275], [2], [490], [292]]
    assert all(c.logprobs is not None and len(c.logprobs) == 1 for c in chunks)


CUMULATIVE = [output([5]), output([5, 6]), output([5, 6, 7], STOP, weight_versions=SPANS)]
INCREMENTAL = [
    output([5]),
    output([6], total=2),
    output([7], STOP, total=3, weight_versions=SPANS),
]


def texts(frames: list[dict[str, Any]], *given: str) -> list[dict[str, Any]]:
    return [{**frame, "text": text} for frame, text in zip(frames, given, strict=True)]


@pytest.mark.parametrize(
    "frames",
    [
        texts(CUMULATIVE, "a", "ab", "abc"),
        texts(INCREMENTAL, "a", "b", "c"),
        texts([CUMULATIVE[0], CUMULATIVE[2]], "a", "abc"),
        texts(
            [
                INCREMENTAL[0],
                output([6, 7], STOP, total=3, weight_versions=SPANS),
            ],
            "a",
            "bc",
        ),
        texts([*INCREMENTAL[:2], output([7], total=3), output([], STOP, total=3)], *"abc", ""),
        texts(
            [*CUMULATIVE[:2], output([5, 6, 7]), output([5, 6, 7], STOP)], "a", "ab", *["abc"] * 2
        ),
    ],
    ids=["all", "new", "all, several at once", "new, several at once", "new, then the end", "same"],
)
def test_frames_with_all_tokens_and_with_the_new_ones_give_one_reply(
    frames: list[dict[str, Any]],
) -> None:
    out = stream(sse(*frames), request()).output
    assert (out.token_ids.tolist(), out.text) == ([5, 6, 7], "abc")
    assert np.array_equal(out.logprobs, np.array([-1, -1, -1], dtype=np.float32))  # type: ignore[arg-type]
    assert out.finish_reason is FinishReason.STOP


def test_tokens_that_repeat_themselves_are_not_taken_for_the_same_ones() -> None:
    new = [output([5]), output([5], total=2), output([5, 5], STOP, total=4)]
    assert stream(sse(*new), request()).output.token_ids == [5, 5, 5, 5]
    all_of_them = [output([5]), output([5, 5]), output([5, 5, 5, 5], STOP)]
    assert stream(sse(*all_of_them), request()).output.token_ids == [5, 5, 5, 5]


def test_candidates_follow_the_tokens_in_both_forms() -> None:
    top = [[[-1.0, 5, None], [-2.0, 9, None]], None, [[-1.0, 7, None], [-3.0, 8, None]]]
    for frames in (
        [
            output([5], output_top_logprobs=top[:1]),
            output([5, 6, 7], STOP, output_top_logprobs=top),
        ],
        [
            output([5], output_top_logprobs=top[:1]),
            output([6, 7], STOP, total=3, output_top_logprobs=top[1:]),
        ],
    ):
        found = stream(sse(*frames), request(logprobs=2)).output.top_logprobs
        assert found is not None
        assert [t.token_ids.tolist() for t in found] == [[5, 9], [], [7, 8]]


@pytest.mark.parametrize(
    "frame",
    [
        output([9, 6], total=2),
        output([6, 7], total=2),
        output([6], total=4),
        output([], total=0),
        output([5, 5], STOP, total=1),
        {**output([6]), "meta_info": {"finish_reason": None}},
    ],
    ids=["changed", "neither", "too few", "fewer", "too many", "not counted"],
)
def test_a_frame_that_is_neither_all_tokens_nor_the_new_ones_breaks_the_contract(
    frame: dict[str, Any],
) -> None:
    with pytest.raises(ReplyError, match="a frame"):
        stream(sse(output([5]), frame), request())


@pytest.mark.parametrize(
    ("frames", "ids"),
    [
        ([output([5]), output([6], total=2), output([6], ABORT, total=2)], [5, 6]),
        ([output([5]), output([6, 6], ABORT, total=2)], [5, 6]),
        ([output([5]), output([6, 7, 7], ABORT, total=3)], [5, 6, 7]),
        ([output([5]), output([5], ABORT, total=1)], [5]),
        ([output([], ABORT, total=0)], []),
    ],
)
def test_an_abort_while_waiting_may_repeat_the_last_token_which_counts_once(
    frames: list[dict[str, Any]], ids: list[int]
) -> None:
    out = stream(sse(*frames), request(logprobs=None)).output
    assert (out.token_ids.tolist(), out.finish_reason) == (ids, FinishReason.ABORT)
    assert not out.is_complete


def test_scores_of_such_an_abort_belong_to_the_tokens_they_name() -> None:
    last = output([6, 7, 7], ABORT, total=3)
    last["meta_info"]["output_token_logprobs"] = scored([6, 7], -2, -3) + scored(
        [5, 6, 7], -1, -2, -3
    )
    out = stream(sse(output([5]), last), request()).output
    assert np.array_equal(out.logprobs, np.array([-1, -2, -3], dtype=np.float32))  # type: ignore[arg-type]


@pytest.mark.case("STREAM-03")
def test_an_error_in_place_of_a_stream_is_raised_as_what_it_is() -> None:
    with pytest.raises(OverlongPromptError, match="longer than the model's context length"):
        stream(recorded("generate_stream_error").body, request())


@pytest.mark.case("STREAM-03")
def test_an_error_after_tokens_is_raised_with_them() -> None:
    error = {"error": {"message": "gone", "type": "x", "code": 500, "retryable": False}}
    with pytest.raises(ProviderError, match="gone") as caught:
        stream(sse(output([5]), error), request())
    assert (caught.value.status, caught.value.code) == (500, "x")
    assert caught.value.partial.output.token_ids == [5]
    assert caught.value.partial.output.finish_reason is FinishReason.ERROR


def test_an_abort_frame_with_a_status_is_an_error_with_the_tokens() -> None:
    finish = {"type": "abort", "message": "The request queue is full.", "status_code": 503}
    with pytest.raises(ProviderError, match="queue is full") as caught:
        stream(sse(output([5]), output([5], finish)), request())
    assert caught.value.partial.output.token_ids == [5]


@pytest.mark.case("STREAM-05")
@pytest.mark.parametrize(
    ("frames", "done", "framed"),
    [
        ([output([5]), output([5, 6])], False, True),
        ([output([5]), output([5, 6])], True, True),
        ([output([5]), output([5, 6], STOP)], False, False),
    ],
    ids=["nothing ends", "done without a reason", "close-delimited without done"],
)
def test_a_stream_that_ends_too_early_is_incomplete(
    frames: list[dict[str, Any]], done: bool, framed: bool
) -> None:
    with pytest.raises(IncompleteError) as caught:
        stream(sse(*frames, done=done), request(), framed=framed)
    assert caught.value.partial.output.token_ids == [5, 6]


def test_an_empty_body_is_incomplete() -> None:
    with pytest.raises(IncompleteError) as caught:
        stream(b"", request(), framed=True)
    assert caught.value.partial.outputs == ()


def test_tokens_after_the_finish_reason_break_the_contract() -> None:
    with pytest.raises(ReplyError, match="after its finish reason 'stop'"):
        stream(sse(output([5], STOP), output([5, 6])), request())


def test_the_prompts_scores_are_read_from_whichever_frame_has_them() -> None:
    entries = scored([5, 6, 7, 8], None, -1.0, -2.0, -3.0)
    first = output([5], input_token_logprobs=entries)
    for last in (output([5, 6], STOP), output([5, 6], STOP, input_token_logprobs=entries)):
        reply = stream(sse(first, last), request(prompt_logprobs=0))
        assert reply.prompt_logprobs is not None
        assert reply.prompt_logprobs.tolist()[1:] == [-1, -2, -3]
