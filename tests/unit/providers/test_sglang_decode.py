"""Unary replies of SGLang as values."""

import json
from typing import Any

import numpy as np
import pytest

from genapi import FinishReason, IncompleteError, PolicyVersion, ProviderError, ReplyError
from tests.support.sglang_wire import (
    ABORT,
    LENGTH,
    PROMPT,
    PROVIDER,
    ROOT,
    STOP,
    asked_for,
    decode,
    output,
    recorded,
    request,
    scored,
)
from tests.support.wire import context

NAN = float("nan")


def same(actual: Any, expected: list[float]) -> bool:
    return np.array_equal(actual, np.array(expected, dtype=np.float32), equal_nan=True)


def test_a_recorded_reply_becomes_ids_scores_and_candidates() -> None:
    name = "generate_full_logprobs"
    reply = PROVIDER.decode(recorded(name), context(asked_for(name), logprobs_mode="scaled"))
    out = reply.output
    assert out.token_ids == [275, 2, 490, 292]
    assert same(
        out.logprobs,
        [-2.4208831787109375, -2.8665876388549805, -1.955358862876892, -2.718808174133301],
    )
    assert out.top_logprobs is not None
    assert [t.token_ids.tolist() for t in out.top_logprobs] == [
        [275, 408],
        [2, 72],
        [490, 36],
        [292, 506],
    ]
    assert same(
        reply.prompt_logprobs, [NAN, -3.6317365169525146, -8.524859428405762, -5.522346496582031]
    )
    assert reply.prompt_token_ids == PROMPT
    assert reply.usage.model_dump() == {
        "prompt_tokens": 4,
        "completion_tokens": 4,
        "cached_tokens": 0,
    }
    assert (out.text, out.finish_reason, reply.logprobs_mode) == (
        "iz br",
        FinishReason.LENGTH,
        "scaled",
    )


@pytest.mark.parametrize(
    "name",
    sorted(
        path.stem
        for path in ROOT.glob("*.json")
        if path.stem.startswith(("generate_", "weights_00", "weights_08", "gateway_generate"))
        and not any(part in path.stem for part in ("stream", "batch", "n2", "text"))
    ),
)
def test_every_recorded_reply_to_one_prompt_can_be_decoded(name: str) -> None:
    reply = PROVIDER.decode(recorded(name), context(asked_for(name)))
    assert reply.output.finish_raw in ("length", "stop", "abort")
    assert len(reply.output.policy) == len(reply.output.token_ids)


@pytest.mark.parametrize("name", ["generate_n2", "generate_batch"])
def test_a_list_of_replies_breaks_the_contract(name: str) -> None:
    with pytest.raises(ReplyError, match=r"2 outputs .* n=1"):
        PROVIDER.decode(recorded(name), context(request()))
    with pytest.raises(ReplyError, match=r"2 outputs .* n=3"):
        PROVIDER.decode(recorded(name), context(request(n=3)))


@pytest.mark.case("VER-02")
@pytest.mark.parametrize(
    ("name", "spans"),
    [
        ("generate_inflight_across_update_retract", [(0, 64), (64, 600)]),
        ("generate_inflight_across_update_in_place", [(0, 47), (47, 600)]),
    ],
)
def test_the_spans_of_a_request_that_lived_through_an_update_are_kept(
    name: str, spans: list[tuple[int, int]]
) -> None:
    trace = PROVIDER.decode(recorded(name), context(asked_for(name))).output.policy
    assert [(s.start, s.end) for s in trace.spans] == spans
    assert trace.source == "engine"


def test_spans_name_versions_of_the_run() -> None:
    spans = [
        {"version": "genapi:r:1:1", "start": 0, "end": 1},
        {"version": "genapi:r:2:1", "start": 1, "end": 1},
        {"version": "genapi:other:2:1", "start": 1, "end": 2},
    ]
    trace = decode(output([5, 6], STOP, weight_versions=spans), request(), run="r").output.policy
    assert trace.at(0).lo == PolicyVersion(run="r", step=1)
    assert trace.at(1).lo is None
    assert len(trace.spans) == 2


def test_spans_that_do_not_cover_the_tokens_break_the_contract() -> None:
    spans = [{"version": "x", "start": 0, "end": 1}]
    with pytest.raises(ReplyError, match="cover 1 tokens of an output of 2"):
        decode(output([5, 6], STOP, weight_versions=spans), request())


def test_nothing_is_attested_of_an_adapter_or_by_an_older_server() -> None:
    spans = [{"version": "genapi:r:1:1", "start": 0, "end": 1}]
    adapted = decode(output([5], STOP, weight_versions=spans), request(lora="a"))
    assert adapted.output.policy.at(0).lo is None
    assert decode(output([5], STOP), request()).output.policy.at(0).lo is None


@pytest.mark.case("FIN-01", "FIN-03")
@pytest.mark.parametrize(
    ("finish", "reason", "stop_reason", "complete"),
    [
        ({"type": "stop", "matched": 292}, FinishReason.STOP, 292, True),
        ({"type": "stop", "matched": 2}, FinishReason.STOP, None, True),
        ({"type": "stop", "matched": "END"}, FinishReason.STOP, "END", True),
        ({"type": "stop", "matched": [3, 4]}, FinishReason.STOP, None, True),
        (LENGTH, FinishReason.LENGTH, None, True),
        (ABORT, FinishReason.ABORT, None, False),
        ({"type": "abort", "message": "Abort in waiting queue"}, FinishReason.ABORT, None, False),
        ({"type": "new"}, FinishReason.OTHER, None, True),
    ],
)
def test_every_way_to_end_is_named_and_only_the_requests_own_stops_are_a_stop_reason(
    finish: dict[str, Any], reason: FinishReason, stop_reason: object, complete: bool
) -> None:
    out = decode(output([5, 292], finish), request(stop_token_ids=[292], stop=("END",))).output
    assert (out.finish_reason, out.stop_reason, out.is_complete) == (reason, stop_reason, complete)
    assert out.finish_raw == finish["type"]
    assert out.extra.get("matched") == finish.get("matched")


def test_an_abort_by_the_engine_is_data_with_the_tokens_so_far() -> None:
    name = "generate_inflight_pause_abort"
    out = PROVIDER.decode(recorded(name), context(asked_for(name))).output
    assert (len(out.token_ids), out.finish_reason) == (118, FinishReason.ABORT)
    assert not out.is_complete
    assert out.extra["abort_message"] == "Aborted"


@pytest.mark.case("FIN-06")
@pytest.mark.parametrize("sampling", [{}, {"logprobs": None}, {"prompt_logprobs": 0}])
def test_an_abort_in_the_queue_needs_no_counters(sampling: dict[str, Any]) -> None:
    finish = {"type": "abort", "message": "Abort in waiting queue"}
    meta = {"id": "r", "finish_reason": finish, "weight_version": "default", "completion_tokens": 0}
    reply = decode({"text": "", "output_ids": [], "meta_info": meta}, request(**sampling))
    assert (reply.output.finish_reason, len(reply.output.token_ids)) == (FinishReason.ABORT, 0)
    assert (reply.usage.prompt_tokens, reply.usage.cached_tokens) == (None, None)
    assert reply.output.policy.newest is None


@pytest.mark.case("FIN-03")
@pytest.mark.parametrize(("status", "kind"), [(503, "OverloadedError"), (500, "ProviderError")])
def test_an_abort_with_a_status_is_the_servers_own_error(status: int, kind: str) -> None:
    finish = {"type": "abort", "message": "The request queue is full.", "status_code": status}
    with pytest.raises(ProviderError, match="queue is full") as caught:
        decode(output([5], finish), request())
    assert type(caught.value).__name__ == kind
    assert caught.value.status == status
    assert caught.value.partial.output.token_ids == [5]
    assert caught.value.partial.output.finish_reason is FinishReason.ERROR


def test_scores_that_are_no_numbers_are_an_error_unless_the_text_is_the_requests_own_stop() -> None:
    finish = {"type": "stop", "matched": "NaN happened"}
    with pytest.raises(ProviderError, match="weights are broken") as caught:
        decode(output([5], finish), request())
    assert caught.value.code == "not_finite"
    assert decode(output([5], finish), request(stop=("NaN happened",))).output.is_complete


@pytest.mark.case("LOGP-01")
def test_a_score_that_is_null_is_nan_in_its_place() -> None:
    remarks: list[str] = []
    body = output([5, 6, 7], STOP, output_token_logprobs=scored([5, 6, 7], -0.1, None, -0.3))
    reply = decode(body, request(), remark=remarks.append)
    assert same(reply.output.logprobs, [-0.1, NAN, -0.3])
    assert remarks == ["1 of 3 tokens have no usable logprob (NaN)"]


def test_a_score_of_more_than_certainty_is_no_number() -> None:
    remarks: list[str] = []
    body = output([5, 6, 7], STOP, output_token_logprobs=scored([5, 6, 7], 1.5, 9e18, -0.3))
    reply = decode(body, request(), remark=remarks.append)
    assert same(reply.output.logprobs, [NAN, NAN, -0.3])
    assert remarks == ["2 of 3 tokens have no usable logprob (NaN)"]


def test_scores_that_are_missing_altogether_are_holes() -> None:
    remarks: list[str] = []
    body = output([5, 6], STOP, output_token_logprobs=None)
    assert decode(body, request(), remark=remarks.append).output.missing_logprobs == 2
    assert remarks == ["2 of 2 tokens have no usable logprob (NaN)"]


@pytest.mark.case("LOGP-03")
@pytest.mark.parametrize(("ids", "count"), [([11, 12], 3), ([11, 12, 2], 2), ([], 1)])
def test_ids_and_scores_of_different_length_are_never_zipped(ids: list[int], count: int) -> None:
    body = output(ids, STOP, output_token_logprobs=scored([11] * count))
    with pytest.raises(ReplyError, match=f"with {count} logprobs"):
        decode(body, request())


def test_a_score_of_another_token_breaks_the_contract() -> None:
    body = output([11, 12], STOP, output_token_logprobs=scored([11, 13]))
    with pytest.raises(ReplyError, match="scores token 13 at position 1, where it generated 12"):
        decode(body, request())


@pytest.mark.case("WIRE-01")
def test_prompt_scores_belong_to_the_prompts_own_ids() -> None:
    asked = request(prompt_logprobs=0)
    good = output([5], STOP, input_token_logprobs=scored(PROMPT, None, -1.0, -2.0, -3.0))
    assert same(decode(good, asked).prompt_logprobs, [NAN, -1, -2, -3])
    other = output([5], STOP, input_token_logprobs=scored([5, 6, 9, 8]))
    with pytest.raises(ReplyError, match="score token 9 at position 2 of the prompt, which has 7"):
        decode(other, asked)
    short = output([5], STOP, input_token_logprobs=scored([5, 6]))
    with pytest.raises(ReplyError, match="4 prompt ids with 2 input_token_logprobs"):
        decode(short, asked)


@pytest.mark.parametrize("sent", [[], None])
def test_prompt_scores_that_did_not_come_are_remarked_upon(sent: list[Any] | None) -> None:
    remarks: list[str] = []
    body = output([5], STOP, input_token_logprobs=sent)
    assert decode(body, request(prompt_logprobs=0), remark=remarks.append).prompt_logprobs is None
    assert remarks == ["prompt_logprobs were asked for and did not come"]


@pytest.mark.case("CONF-03")
def test_a_prompt_that_the_server_changed_breaks_the_contract() -> None:
    body = {**output([5], STOP), "prompt_token_ids": [5, 6, 7, 9]}
    with pytest.raises(ReplyError, match=r"prompt changed by server.*position 3"):
        decode(body, request())


def test_a_prompt_that_was_not_echoed_is_remarked_upon() -> None:
    remarks: list[str] = []
    body = {**output([5], STOP), "prompt_token_ids": None}
    assert decode(body, request(), remark=remarks.append).prompt_token_ids is None
    assert "did not echo" in remarks[0]


@pytest.mark.parametrize(
    ("sampling", "remarks"),
    [
        ({"temperature": 0.7}, 0),
        ({"temperature": 0.7, "top_k": 5}, 1),
        ({"top_p": 0.9}, 1),
        ({"min_p": 0.1}, 1),
        ({"temperature": 0.0, "top_k": 5}, 0),
        ({"top_k": 5, "logprobs": None}, 0),
    ],
)
def test_scores_from_before_the_truncation_are_remarked_upon_where_it_matters(
    sampling: dict[str, Any], remarks: int
) -> None:
    told: list[str] = []
    decode(output([5], STOP), request(**sampling), logprobs_mode="scaled", remark=told.append)
    assert len([t for t in told if "before top_k, top_p and min_p" in t]) == remarks


@pytest.mark.parametrize(("temperature", "remarks"), [(0.7, 1), (1.0, 0), (0.0, 0)])
def test_raw_scores_are_remarked_upon_where_temperature_matters(
    temperature: float, remarks: int
) -> None:
    told: list[str] = []
    asked = request(temperature=temperature)
    decode(output([5], STOP), asked, logprobs_mode="raw", remark=told.append)
    assert len([t for t in told if "SGLANG_RETURN_ORIGINAL_LOGPROB" in t]) == remarks


def test_a_temperature_that_is_taken_for_greedy_and_an_early_stop_are_remarked_upon() -> None:
    told: list[str] = []
    asked = request(temperature=1e-7, min_tokens=3)
    decode(output([5], STOP), asked, remark=told.append)
    assert told == [
        "SGLang takes temperature 1e-07 for greedy",
        "min_tokens is 3, stopped after 1",
    ]


def test_more_tokens_than_were_asked_for_break_the_contract() -> None:
    with pytest.raises(ReplyError, match="3 tokens, max_tokens is 2"):
        decode(output([1, 2, 3], LENGTH), request(max_tokens=2))


def test_a_reply_without_an_end_is_incomplete() -> None:
    with pytest.raises(IncompleteError) as caught:
        decode(output([5]), request())
    assert caught.value.partial.output.token_ids == [5]


def test_what_has_no_name_of_its_own_is_kept() -> None:
    name = "generate_with_metrics_dp2"
    extra = PROVIDER.decode(recorded(name), context(asked_for(name))).output.extra
    assert (extra["dp_rank"], extra["num_retractions"]) == (0, 0)
    assert extra["queue_time"] > 0
    name = "generate_sampled_mask"
    extra = PROVIDER.decode(recorded(name), context(asked_for(name))).output.extra
    assert [len(support) for support in extra["output_token_sampling_mask"]] == [49, 50, 50, 50]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{}",
        b'{"output_ids":[1]}',
        b'{"output_ids":[1],"meta_info":null}',
        b'{"output_ids":[-1],"meta_info":{"completion_tokens":1}}',
        b'{"output_ids":[1],"meta_info":{"completion_tokens":2}}',
        b'{"output_ids":[1],"meta_info":{"completion_tokens":1,"finish_reason":"stop"}}',
        json.dumps({**output([5], STOP), "index": 1}).encode(),
    ],
)
def test_a_body_of_another_shape_breaks_the_contract_and_is_kept(body: bytes) -> None:
    with pytest.raises(ReplyError) as caught:
        decode(body, request())
    assert caught.value.body == body
