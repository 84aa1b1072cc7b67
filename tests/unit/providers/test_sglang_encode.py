"""What SGLang is sent, and what it is not asked."""

import json
from typing import Any

import pytest

import genapi
from genapi import ConfigError, GenerateRequest, SamplingParams, UnsupportedError
from genapi.providers.base import Capabilities
from genapi.types.request import StructuredOutput
from tests.support.sglang_wire import PROMPT, PROVIDER, load, request

Options = genapi.providers.sglang.Options


def sent(asked: GenerateRequest, **how: Any) -> dict[str, Any]:
    options = {"wire_id": "w", "model": None, "salt": None, "stream": False, **how}
    call = PROVIDER.encode(asked, **options)
    assert (call.method, call.path, call.grant) == ("POST", "/generate", "data")
    assert call.body is not None
    decoded: dict[str, Any] = json.loads(call.body)
    return decoded


def test_every_value_that_shapes_the_draw_is_sent_at_its_default() -> None:
    assert sent(request()) == {
        "rid": "w",
        "input_ids": PROMPT,
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "return_text_in_logprobs": False,
        "return_prompt_token_ids": True,
        "stream": False,
        "priority": 0,
        "sampling_params": {
            "n": 1,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "max_new_tokens": 16,
            "min_new_tokens": 0,
            "ignore_eos": False,
            "sampling_seed": None,
            "stop": [],
            "stop_token_ids": [],
            "stop_regex": [],
            "logit_bias": None,
            "json_schema": None,
            "regex": None,
            "ebnf": None,
            "structural_tag": None,
            "no_stop_trim": False,
            "skip_special_tokens": True,
            "spaces_between_special_tokens": True,
        },
    }


def test_every_other_value_arrives_in_sglangs_words() -> None:
    asked = request(top_k=5, seed=0, stop=("END",), stop_token_ids=[7], logit_bias={5: -1.5})
    wire = sent(asked.model_copy(update={"priority": -2}))
    sampling = wire["sampling_params"]
    assert (sampling["top_k"], sampling["sampling_seed"]) == (5, 0)
    assert sent(request(ignore_eos=True))["sampling_params"]["ignore_eos"] is True
    assert (sampling["stop"], sampling["stop_token_ids"]) == (["END"], [7])
    assert sampling["logit_bias"] == {"5": -1.5}
    assert wire["priority"] == -2


@pytest.mark.case("LOGP-07")
@pytest.mark.parametrize(
    ("logprobs", "prompt", "wire"),
    [
        (None, None, (False, -1, 0)),
        (0, None, (True, -1, 0)),
        (3, None, (True, -1, 3)),
        (None, 0, (True, 0, 0)),
        (2, 1, (True, 0, 2)),
    ],
)
def test_scores_are_asked_for_from_the_first_token_that_needs_one(
    logprobs: int | None, prompt: int | None, wire: tuple[bool, int, int]
) -> None:
    body = sent(request(logprobs=logprobs, prompt_logprobs=prompt))
    found = (body["return_logprob"], body["logprob_start_len"], body["top_logprobs_num"])
    assert found == wire


@pytest.mark.parametrize(
    ("wanted", "field", "value"),
    [
        (StructuredOutput(regex="a+"), "regex", "a+"),
        (StructuredOutput(grammar='root ::= "a"'), "ebnf", 'root ::= "a"'),
        (StructuredOutput(json_schema={"type": "object"}), "json_schema", '{"type":"object"}'),
    ],
)
def test_a_constraint_on_the_text_goes_by_sglangs_name_for_it(
    wanted: StructuredOutput, field: str, value: str
) -> None:
    wire = sent(request(structured_output=wanted))["sampling_params"]
    given = {name: wire[name] for name in ("regex", "ebnf", "json_schema") if wire[name]}
    assert given == {field: value}


@pytest.mark.parametrize(
    ("user", "version", "wire"),
    [(None, None, None), ("a", None, "a"), (None, "v1", "v1"), ("a", "v1", "v1|a")],
)
def test_salts_separate_the_prefix_cache_by_its_extra_key(
    user: str | None, version: str | None, wire: str | None
) -> None:
    asked = request().model_copy(update={"cache_salt": user})
    assert sent(asked, salt=version).get("extra_key") == wire


def test_an_adapter_is_named_and_the_models_name_is_not() -> None:
    wire = sent(request(lora="policy-a"), model="tiny")
    assert wire["lora_path"] == "policy-a"
    assert "tiny" not in json.dumps(wire)


def test_a_stream_is_asked_for_with_the_same_body() -> None:
    asked = request(prompt_logprobs=0)
    assert sent(asked, stream=True) == {**sent(asked), "stream": True}


@pytest.mark.parametrize(
    ("sampling", "remedy"),
    [
        ({"bad_words": ("no",)}, "logit_bias"),
        ({"ignore_eos": True, "stop_token_ids": [7]}, "leave one of them out"),
        ({"structured_output": StructuredOutput(choice=("a", "b"))}, "use regex"),
    ],
)
def test_what_sglang_cannot_do_is_refused_with_the_remedy(
    sampling: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(UnsupportedError, match=remedy):
        PROVIDER.check(request(**sampling), None)


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1])
def test_a_seed_of_more_than_64_bits_is_refused(seed: int) -> None:
    with pytest.raises(ConfigError, match="64 bits"):
        PROVIDER.check(request(seed=seed), None)


def test_an_id_beyond_the_vocabulary_is_refused_because_the_server_would_die_of_it() -> None:
    known = Capabilities(vocab_size=512)
    PROVIDER.check(request(prompt=[0, 511]), known)
    with pytest.raises(ConfigError, match=r"prompt_token_ids\[1\] is 512"):
        PROVIDER.check(request(prompt=[0, 512]), known)
    PROVIDER.check(request(prompt=[99999]), Capabilities())


@pytest.mark.parametrize(
    ("missing", "asked"),
    [
        ("generate", request()),
        ("seed", request(seed=1)),
        ("lora", request(lora="a")),
        ("priority", request().model_copy(update={"priority": 1})),
    ],
)
def test_what_this_server_lacks_is_refused_where_it_is_asked_for(
    missing: str, asked: GenerateRequest
) -> None:
    with pytest.raises(UnsupportedError, match="start it with a flag"):
        PROVIDER.check(asked, Capabilities(missing={missing: "start it with a flag"}))
    if missing != "generate":
        PROVIDER.check(request(), Capabilities(missing={missing: "start it with a flag"}))


def test_options_add_fields_and_never_replace_genapis_own() -> None:
    options = Options(
        stop_regex=("a+",),
        no_stop_trim=True,
        routed_dp_rank=1,
        sampling_params={"custom_params": {"k": 1}},
        body={"return_sampling_mask": True},
    )
    wire = sent(request().model_copy(update={"options": options}))
    sampling = wire["sampling_params"]
    assert (sampling["stop_regex"], sampling["no_stop_trim"]) == (["a+"], True)
    assert (sampling["custom_params"], wire["routed_dp_rank"]) == ({"k": 1}, 1)
    assert wire["return_sampling_mask"] is True
    for clash in (Options(body={"rid": "x"}), Options(sampling_params={"n": 2})):
        with pytest.raises(UnsupportedError, match="genapi sets it"):
            sent(request().model_copy(update={"options": clash}))


def test_options_of_another_provider_are_refused() -> None:
    asked = request().model_copy(update={"options": genapi.providers.vllm.Options()})
    with pytest.raises(UnsupportedError, match="speaks SGLang"):
        PROVIDER.check(asked, None)


def test_an_abort_names_one_request_and_never_all() -> None:
    (call,) = PROVIDER.abort(["genapi-1"])
    assert (call.method, call.path, call.grant) == ("POST", "/abort_request", "admin")
    assert json.loads(call.body or b"") == {"rid": "genapi-1", "abort_all": False}
    with pytest.raises(UnsupportedError, match="every request"):
        PROVIDER.abort([""])


def test_an_abort_names_every_output_by_the_id_that_the_server_gave_it() -> None:
    recorded = load("generate_n2_as_batch")
    ids = [one["meta_info"]["id"] for one in recorded["response"]["body"]]
    calls = PROVIDER.abort([recorded["request"]["json"]["rid"]], outputs=2)
    assert [json.loads(call.body or b"")["rid"] for call in calls] == ids


def test_several_outputs_are_a_batch_of_one_prompt_with_a_seed_each() -> None:
    body = sent(request(n=2, seed=7))
    assert body["input_ids"] == [PROMPT, PROMPT]
    assert body["rid"] == "w"
    assert [one["sampling_seed"] for one in body["sampling_params"]] == [7, 8]
    assert all(one["n"] == 1 for one in body["sampling_params"])
    assert sent(request(n=2))["sampling_params"]["sampling_seed"] is None
    largest = sent(request(n=2, seed=2**63 - 1))
    assert [one["sampling_seed"] for one in largest["sampling_params"]] == [2**63 - 1, -(2**63)]


def test_a_text_goes_as_it_is() -> None:
    asked = GenerateRequest(prompt="hello", sampling=SamplingParams(max_tokens=1))
    body = sent(asked)
    assert body["text"] == "hello"
    assert "input_ids" not in body
