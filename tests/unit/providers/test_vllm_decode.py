"""Unary replies of vLLM as values."""

import json
from typing import Any

import numpy as np
import pytest

from genapi import FinishReason, IncompleteError, PolicyVersion, ProviderError, ReplyError
from tests.support.transcripts import exchange, exchanges
from tests.support.vllm_wire import PROMPT, PROVIDER, body, choice, decode, request, scores
from tests.support.wire import context

NAN = float("nan")


def same(actual: Any, expected: list[float]) -> bool:
    return np.array_equal(actual, np.array(expected, dtype=np.float32), equal_nan=True)


def test_a_recorded_reply_becomes_ids_scores_and_candidates() -> None:
    recorded = exchange("vllm", "08", "logprobs prompt_logprobs ids")
    asked = request(max_tokens=4, temperature=0.0, logprobs=2, prompt_logprobs=1)
    reply = PROVIDER.decode(recorded.reply, context(asked, logprobs_mode="raw"))
    assert reply.output.token_ids == [30, 234, 113, 142]
    assert same(
        reply.output.logprobs,
        [-2.3580448627471924, -2.0310466289520264, -1.6244313716888428, -2.6459178924560547],
    )
    assert reply.output.top_logprobs is not None
    assert [t.token_ids.tolist() for t in reply.output.top_logprobs] == [
        [30, 479],
        [234, 258],
        [113, 380],
        [142, 45],
    ]
    assert same(reply.prompt_logprobs, [NAN, -9.0577392578125, -9.633844375610352])
    assert reply.prompt_token_ids == PROMPT
    assert reply.usage.model_dump() == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "cached_tokens": 0,
    }
    assert (reply.model, reply.logprobs_mode) == ("tiny", "raw")


def test_a_reply_to_n_2_has_both_outputs_by_index() -> None:
    recorded = exchange("vllm", "08", "n=2 seed")
    reply = PROVIDER.decode(recorded.reply, context(request(max_tokens=4, n=2, seed=5)))
    assert [o.token_ids.tolist() for o in reply.outputs] == [[23, 452, 113, 50], [23, 48, 261, 45]]
    with pytest.raises(ValueError, match="2 outputs"):
        _ = reply.output


@pytest.mark.parametrize("number", ["08", "20", "42", "46", "49", "51", "52", "53"])
def test_every_recorded_token_reply_can_be_decoded(number: str) -> None:
    for recorded in exchanges("vllm", number):
        shortened = b'more"' in recorded.body
        if not recorded.path.endswith("/generate") or recorded.status != 200 or shortened:
            continue
        sent = recorded.json
        sampling = {k: v for k, v in sent["sampling_params"].items() if k in _SHARED}
        sampling.setdefault("logprobs", None)
        if sent.get("output_mode") == "text":
            sampling["logprobs"] = 0 if sampling["logprobs"] is not None else None
        asked = request(prompt=sent["token_ids"], **{"max_tokens": 4096, **sampling})
        for output in PROVIDER.decode(recorded.reply, context(asked)).outputs:
            assert output.finish_raw is not None
            assert len(output.policy) == len(output.token_ids)


_SHARED = ("max_tokens", "temperature", "logprobs", "prompt_logprobs", "n", "seed", "stop", "top_k")


@pytest.mark.case("WIRE-01")
@pytest.mark.parametrize("order", [1, -1], ids=["as sent", "reversed"])
def test_prompt_scores_are_looked_up_by_the_prompts_own_ids(order: int) -> None:
    entries = [
        ("40", {"logprob": -7.5, "rank": 9, "decoded_token": " a"}),
        ("17", {"logprob": -0.4, "rank": 1, "decoded_token": " b"}),
    ]
    content = json.dumps(
        {
            "prompt_token_ids": [1, 40, 7],
            "prompt_logprobs": [None, dict(entries[::order]), {"7": {"logprob": -0.2, "rank": 1}}],
            "choices": [choice([5], "length")],
        }
    ).encode()
    reply = decode(content, request(prompt=[1, 40, 7], prompt_logprobs=1))
    assert same(reply.prompt_logprobs, [NAN, -7.5, -0.2])


@pytest.mark.case("WIRE-01")
def test_prompt_scores_without_the_prompts_own_id_break_the_contract() -> None:
    content = body(choice([5], "length"), prompt_logprobs=[None, {"17": {"logprob": -0.4}}, None])
    with pytest.raises(ReplyError, match="position 1 lack the prompt's own id 301"):
        decode(content, request(prompt_logprobs=1))


@pytest.mark.case("CONF-03")
def test_a_prompt_that_the_server_changed_breaks_the_contract() -> None:
    content = body(choice([5], "length"), prompt_token_ids=[128000, 128000, 9906])
    with pytest.raises(ReplyError, match=r"prompt changed by server.*position 1"):
        decode(content, request(prompt=[128000, 9906]))


def test_a_prompt_that_was_not_echoed_is_remarked_upon() -> None:
    remarks: list[str] = []
    content = body(choice([5], "length"), prompt_token_ids=None)
    reply = decode(content, request(), remark=remarks.append)
    assert reply.prompt_token_ids is None
    assert "did not echo" in remarks[0]


@pytest.mark.case("LOGP-01")
@pytest.mark.parametrize("hole", [None, {"token": "x"}, {"token_id": 6, "logprob": None}])
def test_a_hole_among_the_scores_is_nan_in_its_place(hole: object) -> None:
    remarks: list[str] = []
    content = [{"logprob": -0.1}, hole, {"logprob": -0.3}]
    reply = decode(
        body(choice([5, 6, 7], "stop", logprobs={"content": content})),
        request(),
        remark=remarks.append,
    )
    assert same(reply.output.logprobs, [-0.1, NAN, -0.3])
    assert reply.output.missing_logprobs == 1
    assert remarks == ["1 of 3 tokens have no usable logprob (NaN)"]


@pytest.mark.case("LOGP-03")
@pytest.mark.parametrize(("ids", "count"), [([11, 12], 3), ([11, 12, 2], 2), ([], 1)])
def test_ids_and_scores_of_different_length_are_never_zipped(ids: list[int], count: int) -> None:
    content = body(choice(ids, "stop", logprobs=scores(*[-1.0] * count)))
    with pytest.raises(ReplyError, match=rf"{len(ids)} token ids with {count} logprobs"):
        decode(content, request())


def test_a_score_of_another_token_breaks_the_contract() -> None:
    content = body(choice([11, 12], "stop", logprobs=scores(-1, -1, ids=[11, 13])))
    with pytest.raises(ReplyError, match="scores token 13 at position 1, where it generated 12"):
        decode(content, request())


@pytest.mark.case("LOGP-07")
def test_zero_alternatives_still_score_the_chosen_tokens() -> None:
    recorded = exchange("vllm", "08", "n=2 seed")
    reply = PROVIDER.decode(recorded.reply, context(request(max_tokens=4, n=2, logprobs=0)))
    assert same(reply.outputs[0].logprobs[:2], [-2.6255953311920166, -5.413498878479004])  # type: ignore[index]
    assert reply.outputs[0].top_logprobs is None


def test_scores_that_were_not_asked_for_are_left_out() -> None:
    assert decode(body(choice([5], "stop")), request(logprobs=None)).output.logprobs is None


def test_scores_that_were_asked_for_and_did_not_come_are_all_missing() -> None:
    remarks: list[str] = []
    reply = decode(body(choice([5, 6], "stop", logprobs=None)), request(), remark=remarks.append)
    assert same(reply.output.logprobs, [NAN, NAN])
    assert "2 of 2 tokens" in remarks[0]


@pytest.mark.case("LOGP-12")
def test_text_and_ids_may_differ_by_the_matched_stop_text() -> None:
    content = choice([5, 6, 7], "stop", text="so", stop_reason="END", logprobs=scores(-1, -2, -3))
    out = decode(body(content, output_mode="text"), request(stop=("END",))).output
    assert (out.text, out.stop_reason, out.token_ids.tolist()) == ("so", "END", [5, 6, 7])
    assert same(out.logprobs, [-1, -2, -3])


@pytest.mark.case("NUM-01")
@pytest.mark.parametrize("spelling", [-9999.0, None])
def test_both_spellings_of_minus_infinity_are_no_number(spelling: float | None) -> None:
    remarks: list[str] = []
    content = body(choice([5, 6], "stop", logprobs=scores(-1.0, spelling, ids=[5, 6])))
    out = decode(content, request(), remark=remarks.append).output
    assert same(out.logprobs, [-1.0, NAN])
    assert remarks == ["1 of 2 tokens have no usable logprob (NaN)"]


@pytest.mark.case("NUM-01")
def test_a_score_near_the_sentinel_is_a_number() -> None:
    content = body(choice([5], "stop", logprobs=scores(-9998.5, ids=[5])))
    assert same(decode(content, request()).output.logprobs, [-9998.5])


def test_a_score_beyond_float32_is_no_number() -> None:
    content = body(choice([5], "stop", logprobs=scores(-1e300, ids=[5])))
    assert same(decode(content, request()).output.logprobs, [NAN])


@pytest.mark.parametrize("score", [0.5, 1.5, 9e18, 1e300])
def test_a_score_of_more_than_certainty_is_no_number(score: float) -> None:
    remarks: list[str] = []
    content = body(choice([5, 6], "stop", logprobs=scores(-1.0, score, ids=[5, 6])))
    assert same(decode(content, request(), remark=remarks.append).output.logprobs, [-1.0, NAN])
    assert remarks == ["1 of 2 tokens have no usable logprob (NaN)"]


@pytest.mark.parametrize("score", [0.0, 2**-23, 0.0078])
def test_a_score_that_rounding_took_above_certainty_is_kept(score: float) -> None:
    content = body(choice([5], "stop", logprobs=scores(score, ids=[5])))
    assert same(decode(content, request()).output.logprobs, [score])


@pytest.mark.case("NUM-03")
@pytest.mark.parametrize(
    ("mode", "sampling", "remarked"),
    [
        ("raw", {"temperature": 0.7, "top_p": 0.9}, "before temperature"),
        ("processed", {"temperature": 0.7, "top_p": 0.9}, "renormalised"),
        ("processed", {"top_k": 5}, "renormalised"),
        ("processed", {"min_p": 0.1}, "renormalised"),
        ("raw", {"temperature": 1.0}, None),
        ("raw", {"temperature": 0.0}, None),
        ("processed", {"temperature": 0.7}, None),
        ("processed", {"temperature": 0.0, "top_k": 5}, None),
        (None, {"temperature": 0.7}, None),
        ("raw", {"temperature": 0.7, "logprobs": None}, None),
    ],
)
def test_scores_that_are_not_those_of_the_draw_are_remarked_upon(
    mode: str | None, sampling: dict[str, Any], remarked: str | None
) -> None:
    remarks: list[str] = []
    reply = decode(
        body(choice([5], "stop")), request(**sampling), logprobs_mode=mode, remark=remarks.append
    )
    assert reply.logprobs_mode == mode
    assert [remarked in text for text in remarks if remarked] == ([True] if remarked else [])
    assert len(remarks) == (1 if remarked else 0)


def test_a_temperature_that_vllm_raises_is_remarked_upon() -> None:
    remarks: list[str] = []
    decode(body(choice([5], "stop")), request(temperature=0.001), remark=remarks.append)
    assert remarks == ["vLLM raises temperature 0.001 to 0.01"]


@pytest.mark.case("FIN-01")
def test_an_abort_is_data_and_keeps_its_tokens() -> None:
    spans = [{"version": "genapi:r:3:1", "start": 0, "end": 2}]
    out = decode(body(choice([5, 6], "abort", weight_versions=spans)), request()).output
    assert out.finish_reason is FinishReason.ABORT
    assert not out.is_complete
    assert out.token_ids == [5, 6]
    assert out.policy.oldest == PolicyVersion(run="r", step=3)


def test_an_abort_before_the_first_token_is_an_empty_output() -> None:
    content = choice([], "abort", weight_versions=[], logprobs={"content": []})
    out = decode(body(content), request()).output
    assert (len(out.token_ids), len(out.policy), out.finish_reason) == (0, 0, "abort")


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ("stop", "stop"),
        ("length", "length"),
        ("tool_calls", "tool_calls"),
        ("error", "error"),
        ("repetition", "other"),
        ("other", "other"),
    ],
)
def test_the_engines_own_word_is_kept_beside_the_reason(raw: str, reason: str) -> None:
    out = decode(body(choice([5], raw)), request()).output
    assert (out.finish_reason, out.finish_raw) == (reason, raw)


def test_more_tokens_than_were_asked_for_break_the_contract() -> None:
    with pytest.raises(ReplyError, match="2 tokens, max_tokens is 1"):
        decode(body(choice([5, 6], "length")), request(max_tokens=1))


@pytest.mark.parametrize("index", [1, -1, None])
def test_an_index_that_was_not_asked_for_breaks_the_contract(index: int | None) -> None:
    asked = request(n=2) if index is None else request()
    with pytest.raises(ReplyError, match="choice index"):
        decode(body(choice([5], "stop", index=index)), asked)


def test_a_missing_choice_is_an_incomplete_reply() -> None:
    with pytest.raises(IncompleteError, match=r"choice \[1\]") as caught:
        decode(body(choice([5], "stop")), request(n=2))
    assert caught.value.partial.outputs[0].token_ids == [5]


def test_versions_of_a_reply_on_an_adapter_are_unknown() -> None:
    spans = [{"version": "genapi:r:3:1", "start": 0, "end": 1}]
    out = decode(body(choice([5], "stop", weight_versions=spans)), request(lora="a")).output
    assert out.policy.oldest is None
    assert out.policy.source == "inferred"


def test_unknown_fields_are_kept_where_they_were() -> None:
    content = body(
        choice([5], "stop", novel={"a": 1}, routed_experts="AAAA"),
        kv_transfer_params={"remote": 1},
        system_fingerprint="x",
    )
    reply = decode(content, request())
    assert reply.extra == {"kv_transfer_params": {"remote": 1}, "system_fingerprint": "x"}
    assert reply.output.extra == {"novel": {"a": 1}, "routed_experts": "AAAA"}
    assert reply.output.token_ids == [5]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b'{"choices":{}}',
        b'{"choices":[{"index":0,"token_ids":[1.5],"finish_reason":"stop"}]}',
        b'{"choices":[{"index":0,"token_ids":[-1],"finish_reason":"stop"}]}',
        b'{"choices":[{"index":0,"token_ids":[2147483648],"finish_reason":"stop"}]}',
        b'{"choices":[{"index":0,"token_ids":[true],"finish_reason":"stop"}]}',
        b'{"choices":[{"index":0,"token_ids":[1],"finish_reason":{"type":"stop"}}]}',
    ],
)
def test_a_body_of_another_shape_breaks_the_contract_and_is_kept(content: bytes) -> None:
    with pytest.raises(ReplyError) as caught:
        decode(content, request())
    assert caught.value.body == content
    assert caught.value.url is not None


def test_an_error_inside_a_200_is_the_servers_error() -> None:
    content = json.dumps(
        {"error": {"message": "kv load failed", "type": "X", "code": 500}}
    ).encode()
    with pytest.raises(ProviderError, match="kv load failed") as caught:
        decode(content, request())
    assert (caught.value.status, caught.value.code) == (500, "X")


def test_a_count_that_does_not_fit_the_tokens_is_remarked_upon() -> None:
    remarks: list[str] = []
    usage = {"prompt_tokens": 3, "completion_tokens": 3}
    decode(body(choice([5, 6], "stop"), usage=usage), request(), remark=remarks.append)
    assert remarks == ["usage counts 3 tokens, 2 arrived"]


def test_an_output_shorter_than_asked_is_remarked_upon() -> None:
    remarks: list[str] = []
    decode(body(choice([5], "stop")), request(min_tokens=2), remark=remarks.append)
    assert remarks == ["min_tokens is 2, stopped after 1"]


def test_an_answer_of_another_model_than_the_adapter_is_remarked_upon() -> None:
    remarks: list[str] = []
    decode(body(choice([5], "stop"), model="tiny"), request(lora="a"), remark=remarks.append)
    assert remarks == ["adapter 'a' was asked for, 'tiny' generated"]


def test_candidates_without_ids_break_the_contract() -> None:
    entry = {"token_id": 5, "logprob": -1.0, "top_logprobs": [{"token": "x", "logprob": -1.0}]}
    content = body(choice([5], "stop", logprobs={"content": [entry]}))
    with pytest.raises(ReplyError, match="candidates without token ids"):
        decode(content, request(logprobs=1))


def test_prompt_scores_of_another_length_break_the_contract() -> None:
    content = body(choice([5], "stop"), prompt_logprobs=[None])
    with pytest.raises(ReplyError, match="3 prompt ids with 1 prompt_logprobs"):
        decode(content, request(prompt_logprobs=0))


def test_labels_of_another_run_are_unknown() -> None:
    spans = [{"version": "genapi:other:3:1", "start": 0, "end": 1}]
    content = body(choice([5], "stop", weight_versions=spans))
    assert decode(content, request(), run="r").output.policy.oldest is None
    assert decode(content, request()).output.policy.oldest is not None


def test_a_prompt_score_that_is_missing_is_nan_and_remarked_upon() -> None:
    remarks: list[str] = []
    positions = [None, {"301": {"logprob": -9999.0}}, {"302": {"logprob": -0.5}}]
    content = body(choice([5], "stop"), prompt_logprobs=positions)
    reply = decode(content, request(prompt_logprobs=0), remark=remarks.append)
    assert same(reply.prompt_logprobs, [NAN, NAN, -0.5])
    assert remarks == ["1 prompt tokens have no usable logprob (NaN)"]


def test_prompt_scores_that_did_not_come_are_remarked_upon() -> None:
    remarks: list[str] = []
    content = body(choice([5], "stop"))
    reply = decode(content, request(prompt_logprobs=0), remark=remarks.append)
    assert reply.prompt_logprobs is None
    assert remarks == ["prompt_logprobs were asked for and did not come"]
