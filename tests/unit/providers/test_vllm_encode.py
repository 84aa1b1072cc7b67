"""What vLLM is sent, and what it is not asked."""

import json
from typing import Any

import pytest

import genapi
from genapi import ConfigError, GenerateRequest, UnsupportedError
from genapi.providers.base import Capabilities
from genapi.types.request import ProviderOptions, StructuredOutput
from tests.support.vllm_wire import PROMPT, PROVIDER, request

Options = genapi.providers.vllm.Options


def sent(asked: GenerateRequest, **how: Any) -> dict[str, Any]:
    options = {"wire_id": "w", "model": None, "salt": None, "stream": False, **how}
    call = PROVIDER.encode(asked, **options)
    assert (call.method, call.path) == ("POST", "/inference/v1/generate")
    assert call.body is not None
    decoded: dict[str, Any] = json.loads(call.body)
    return decoded


def test_every_value_that_shapes_the_draw_is_sent_at_its_default() -> None:
    assert sent(request()) == {
        "request_id": "w",
        "token_ids": PROMPT,
        "return_token_ids": True,
        "sampling_params": {
            "n": 1,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": 16,
            "min_tokens": 0,
            "ignore_eos": False,
            "seed": None,
            "stop": [],
            "stop_token_ids": [],
            "bad_words": [],
            "logprobs": 0,
            "prompt_logprobs": None,
            "include_stop_str_in_output": False,
        },
    }


@pytest.mark.case("LOGP-07")
def test_zero_alternatives_are_the_integer_zero() -> None:
    assert sent(request(logprobs=0))["sampling_params"]["logprobs"] == 0
    assert sent(request(logprobs=None))["sampling_params"]["logprobs"] is None


def test_every_other_sampling_value_arrives_in_vllms_words() -> None:
    asked = request(
        n=2,
        top_k=-1,
        seed=0,
        stop=("END",),
        stop_token_ids=[7],
        bad_words=("no",),
        logit_bias={5: -1.5},
        structured_output=StructuredOutput(json_schema={"type": "object"}),
        prompt_logprobs=0,
        ignore_eos=True,
    )
    wire = sent(asked)["sampling_params"]
    assert wire["top_k"] == 0
    assert wire["seed"] == 0
    assert (wire["stop"], wire["stop_token_ids"], wire["bad_words"]) == (["END"], [7], ["no"])
    assert wire["logit_bias"] == {"5": -1.5}
    assert wire["structured_outputs"] == {"json": {"type": "object"}}
    assert (wire["n"], wire["prompt_logprobs"], wire["ignore_eos"]) == (2, 0, True)


def test_a_stream_asks_for_usage() -> None:
    wire = sent(request(), stream=True)
    assert (wire["stream"], wire["stream_options"]) == (True, {"include_usage": True})


def test_an_adapter_takes_the_models_place() -> None:
    assert sent(request(), model="tiny")["model"] == "tiny"
    assert sent(request(lora="policy-a"), model="tiny")["model"] == "policy-a"


@pytest.mark.parametrize(
    ("user", "version", "wire"),
    [(None, None, None), ("u", None, "u"), (None, "v", "v"), ("u", "v", "v|u")],
)
def test_the_users_salt_and_the_versions_salt_both_count(
    user: str | None, version: str | None, wire: str | None
) -> None:
    asked = request().model_copy(update={"cache_salt": user})
    assert sent(asked, salt=version).get("cache_salt") == wire


def test_priority_is_sent_only_when_given() -> None:
    assert "priority" not in sent(request())
    assert sent(request().model_copy(update={"priority": -5}))["priority"] == -5


def test_what_is_the_users_alone_is_never_sent() -> None:
    asked = request().model_copy(update={"tag": "secret", "request_id": "mine", "session": "s1"})
    assert set(sent(asked)) == set(sent(request()))


def test_options_of_vllm_arrive_where_vllm_reads_them() -> None:
    options = Options(
        allowed_token_ids=[5, 6],
        text=True,
        include_stop_str_in_output=True,
        skip_reading_prefix_cache=True,
        thinking_token_budget=3,
        data_parallel_rank=1,
        kv_transfer_params={"do_remote_decode": True},
        extra_args={"a": 1},
        body={"reasoning_ended": True},
    )
    asked = request().model_copy(update={"options": options})
    wire = sent(asked)
    assert wire["output_mode"] == "text"
    assert wire["kv_transfer_params"] == {"do_remote_decode": True}
    assert wire["reasoning_ended"] is True
    expected = {
        "allowed_token_ids": [5, 6],
        "include_stop_str_in_output": True,
        "skip_reading_prefix_cache": True,
        "thinking_token_budget": 3,
        "extra_args": {"a": 1},
    }
    assert expected.items() <= wire["sampling_params"].items()
    call = PROVIDER.encode(asked, wire_id="w", model=None, salt=None, stream=False)
    assert call.headers == {"X-data-parallel-rank": "1"}


def test_further_body_fields_may_not_replace_genapis_own() -> None:
    asked = request().model_copy(update={"options": Options(body={"token_ids": [1]})})
    with pytest.raises(UnsupportedError, match="'token_ids'"):
        sent(asked)


def test_options_of_another_provider_are_refused() -> None:
    asked = request().model_copy(update={"options": ProviderOptions(provider="sglang")})
    with pytest.raises(UnsupportedError, match=r"genapi\.providers\.vllm\.Options"):
        PROVIDER.check(asked, None)


def test_a_stream_cannot_carry_prompt_scores() -> None:
    with pytest.raises(UnsupportedError, match="prompt_logprobs"):
        sent(request(prompt_logprobs=0), stream=True)


def test_candidates_cannot_be_had_with_text() -> None:
    asked = request(logprobs=2).model_copy(update={"options": Options(text=True)})
    with pytest.raises(UnsupportedError, match="logprobs=0"):
        PROVIDER.check(asked, None)


def test_a_seed_that_vllm_drops_silently_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="seed=-1"):
        PROVIDER.check(request(seed=-1), None)


def test_an_id_beyond_a_known_vocabulary_is_named() -> None:
    with pytest.raises(ConfigError, match=r"prompt_token_ids\[1\] is 512; .* 512 ids"):
        PROVIDER.check(request(prompt=[511, 512]), Capabilities(vocab_size=512))
    PROVIDER.check(request(prompt=[511]), Capabilities(vocab_size=512))


@pytest.mark.parametrize("missing", ["generate", "logprobs"])
def test_what_the_server_cannot_do_is_refused_with_the_remedy(missing: str) -> None:
    capabilities = Capabilities(missing={missing: "start it otherwise"})
    asked = request(logprobs=0).model_copy(update={"options": Options(route="native")})
    with pytest.raises(UnsupportedError, match="start it otherwise"):
        PROVIDER.check(asked, capabilities)


def test_a_server_that_gives_logits_still_generates_without_scores() -> None:
    PROVIDER.check(request(logprobs=None), Capabilities(missing={"logprobs": "it gives logits"}))


def test_aborting_names_the_id_as_each_route_has_it() -> None:
    (call,) = PROVIDER.abort(["a", "b"], outputs=2)
    assert (call.method, call.path) == ("POST", "/inference/v1/abort_requests")
    assert json.loads(call.body or b"") == {
        "request_ids": [
            "generate-tokens-a",
            "cmpl-a-0",
            "chatcmpl-a",
            "generate-tokens-b",
            "cmpl-b-0",
            "chatcmpl-b",
        ]
    }
