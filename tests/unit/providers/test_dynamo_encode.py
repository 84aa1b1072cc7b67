"""What a Dynamo frontend is asked."""

import json
from typing import Any

import pytest

from genapi import ConfigError, GenerateRequest, SamplingParams, UnsupportedError
from genapi.providers.base import Capabilities, Pin
from genapi.providers.dynamo import Options
from genapi.providers.vllm import Options as Foreign
from genapi.types.ids import WorkerId
from genapi.types.request import StructuredOutput
from tests.support.dynamo_wire import BIG, PROMPT, PROVIDER, request


def sent(asked: GenerateRequest, **more: Any) -> dict[str, Any]:
    wanted = {"wire_id": "genapi-1", "model": "tiny", "salt": None, "stream": False, **more}
    call = PROVIDER.encode(asked, **wanted)
    route = "/v1/completions" if asked.messages is None else "/v1/chat/completions"
    assert (call.method, call.path) == ("POST", route)
    assert call.headers == {"x-request-id": "genapi-1"}
    body: dict[str, Any] = json.loads(call.body or b"")
    return body


def worker(instance: int, component: str = "backend") -> WorkerId:
    return WorkerId(
        provider="dynamo", namespace="dynamo", component=component, instance=str(instance)
    )


def test_every_value_that_shapes_the_draw_is_sent_also_at_its_default() -> None:
    assert sent(request(max_tokens=7)) == {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 7,
        "min_tokens": 0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "ignore_eos": False,
        "logprobs": 1,
        "include_stop_str_in_output": False,
        "stream": False,
        "nvext": {
            "extra_fields": [
                "worker_id",
                "completion_token_ids",
                "prompt_token_ids",
                "engine_data",
                "stop_reason",
            ]
        },
    }


def test_what_is_asked_for_is_sent() -> None:
    asked = GenerateRequest(
        prompt="w7 w8",
        cache_salt="mine",
        sampling=SamplingParams(
            max_tokens=3,
            top_k=5,
            seed=-3,
            stop=("x",),
            stop_token_ids=[9],
            logprobs=None,
            prompt_logprobs=0,
            structured_output=StructuredOutput(choice=("a", "b")),
        ),
        options=Options(
            include_stop_str_in_output=True,
            max_thinking_tokens=4,
            extra_fields=("timing", "worker_id"),
            nvext={"agent_hints": {"priority": 3}},
            body={"user": "me"},
        ),
    )
    body = sent(asked, salt="genapi:r:3:1", stream=True)
    assert (body["prompt"], body["stop"], body["stop_token_ids"]) == ("w7 w8", ["x"], [9])
    assert (body["seed"], body["top_k"], body["prompt_logprobs"], body["user"]) == (-3, 5, 1, "me")
    assert (body["guided_choice"], body["stream_options"]) == (["a", "b"], {"include_usage": True})
    assert body["include_stop_str_in_output"] is True
    assert "logprobs" not in body
    nvext = body["nvext"]
    assert nvext["cache_salt"] == "genapi:r:3:1|mine"
    assert nvext["extra_fields"][-2:] == ["prompt_logprobs", "timing"]
    assert (nvext["agent_hints"], nvext["max_thinking_tokens"]) == ({"priority": 3}, 4)


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        (StructuredOutput(json_schema={"type": "object"}), {"guided_json": {"type": "object"}}),
        (StructuredOutput(regex="a+"), {"guided_regex": "a+"}),
        (StructuredOutput(grammar="x"), {"guided_grammar": "x"}),
    ],
)
def test_constraints_go_by_dynamos_names(wanted: StructuredOutput, field: dict[str, Any]) -> None:
    assert sent(request(structured_output=wanted)).items() >= field.items()


def test_a_pinned_request_names_its_worker_by_all_64_bits() -> None:
    both = sent(request(), pin=Pin(worker=worker(BIG)))["nvext"]
    assert both["backend_instance_id"] == BIG
    split = sent(request(), pin=Pin(worker=worker(BIG), prefill=worker(BIG - 1, "prefill")))
    assert split["nvext"]["decode_worker_id"] == BIG
    assert split["nvext"]["prefill_worker_id"] == BIG - 1
    assert "backend_instance_id" not in split["nvext"]


@pytest.mark.parametrize(
    ("sampling", "match"),
    [
        ({"n": 2}, "send 2 requests with n=1"),
        ({"logit_bias": {3: 1.0}}, "drops logit_bias"),
        ({"bad_words": ["x"]}, "drops bad_words"),
        ({"ignore_eos": True, "stop": ["x"]}, "under ignore_eos Dynamo drops stop"),
        ({"ignore_eos": True, "stop_token_ids": [3]}, "under ignore_eos Dynamo drops stop"),
    ],
)
def test_what_the_frontend_would_drop_is_refused_before_any_call(
    sampling: dict[str, Any], match: str
) -> None:
    with pytest.raises(UnsupportedError, match=match):
        PROVIDER.check(request(**sampling), None)


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 2.5}, {"repetition_penalty": 3.0}, {"seed": 2**63}, {"logprobs": 6}],
)
def test_values_beyond_dynamos_bounds_are_refused_before_any_call(sampling: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(sampling))):
        PROVIDER.check(request(**sampling), None)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"priority": 3}, "agent_hints"),
        ({"lora": "a"}, "model= as the adapter's"),
        ({"options": Foreign()}, "this fleet speaks Dynamo"),
    ],
)
def test_what_dynamo_cannot_do_is_refused(change: dict[str, Any], match: str) -> None:
    with pytest.raises(UnsupportedError, match=match):
        PROVIDER.check(request().model_copy(update=change), None)


def test_a_worker_that_cannot_do_it_is_not_asked() -> None:
    mute = Capabilities(missing={"logprobs": "it is simulated"})
    with pytest.raises(UnsupportedError, match="it is simulated"):
        PROVIDER.check(request(), mute)
    PROVIDER.check(request(logprobs=None), mute)


def test_without_a_model_nothing_can_be_asked() -> None:
    with pytest.raises(ConfigError, match="pass model="):
        sent(request(), model=None)


@pytest.mark.parametrize("name", ["body", "nvext"])
def test_an_option_may_not_set_what_genapi_sets(name: str) -> None:
    field = "prompt" if name == "body" else "extra_fields"
    options = Options().model_copy(update={name: {field: []}})
    asked = request().model_copy(update={"options": options})
    with pytest.raises(UnsupportedError, match=f"may not set '{field}'"):
        sent(asked)


def test_there_is_no_call_that_aborts() -> None:
    assert PROVIDER.abort(["genapi-1"]) == ()


def test_a_chat_goes_to_the_route_for_chats() -> None:
    asked = request(temperature=0.5).model_copy(
        update={"prompt_token_ids": None, "messages": [{"role": "user", "content": "hi"}]}
    )
    call = PROVIDER.encode(asked, wire_id="genapi-1", model="tiny", salt=None, stream=False)
    body = json.loads(call.body or b"")
    assert call.path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert (body["logprobs"], body["top_logprobs"]) == (True, 1)
    assert "prompt" not in body
    assert "completion_token_ids" in body["nvext"]["extra_fields"]


@pytest.mark.parametrize("form", [{"prompt": "hi"}, {"messages": [{"role": "user"}]}])
def test_candidates_are_asked_for_by_their_ids(form: dict[str, Any]) -> None:
    asked = request(logprobs=3).model_copy(update={"prompt_token_ids": None, **form})
    PROVIDER.check(asked, None)
    body = sent(asked)
    chat = {"logprobs": True, "top_logprobs": 3}
    assert body.items() >= (chat if "messages" in form else {"logprobs": 3}).items()
    assert body["return_tokens_as_token_ids"] is True
    assert "return_tokens_as_token_ids" not in sent(request(logprobs=0))


def test_a_chat_may_have_more_candidates() -> None:
    chat = {"prompt_token_ids": None, "messages": [{"role": "user"}]}
    PROVIDER.check(request(logprobs=20).model_copy(update=chat), None)
    with pytest.raises(ConfigError, match="logprobs=21"):
        PROVIDER.check(request(logprobs=21).model_copy(update=chat), None)
