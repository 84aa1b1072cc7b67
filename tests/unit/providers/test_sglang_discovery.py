"""What an inspection of an SGLang server finds out, and what it leaves alone."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from genapi import AuthError, ConfigError, GenAPIError, NotReadyError, ReplyError
from genapi.providers.base import WorkerFacts
from genapi.types.ids import Role
from genapi.wire.http import HTTPCall, HTTPReply
from tests.support.sglang_wire import PROVIDER, URL, recorded
from tests.support.transcripts import play

Answers = dict[str, HTTPReply | Any]
SECRETS = ("user-key-5f1", "admin-key-9c2")


def server_info(**changes: Any) -> dict[str, Any]:
    """The recorded server with one replica, and keys that are easy to find again."""
    info: dict[str, Any] = recorded("server_info_trimmed").json_object()
    return {**info, "dp_size": 1, "api_key": SECRETS[0], "admin_api_key": SECRETS[1], **changes}


def answers(**changes: Any) -> Answers:
    """An SGLang 0.5.23 that serves, by path; `changes` are to its /server_info."""
    return {
        "/ping": HTTPReply(200, b"", {}, f"{URL}/ping"),
        "/ready": recorded("ready"),
        "/model_info": recorded("model_info"),
        "/v1/models": recorded("v1_models"),
        "/server_info": server_info(**changes),
    }


def asks(found: Answers) -> Callable[[HTTPCall], HTTPReply]:
    def answer(call: HTTPCall) -> HTTPReply:
        missing = HTTPReply(404, b'{"detail":"Not Found"}', {}, URL + call.path)
        reply = found.get(call.path, missing)
        if isinstance(reply, HTTPReply):
            return reply
        return HTTPReply(200, json.dumps(reply).encode(), {}, URL + call.path)

    return answer


def inspect(found: Answers) -> WorkerFacts:
    return play(PROVIDER.inspect(), asks(found))[0]


def labelled(label: Any) -> Answers:
    model = recorded("model_info").json_object()
    return {"/model_info": {**model, "weight_version": label}}


def test_a_recorded_server_is_described_in_full() -> None:
    facts = inspect(answers())
    assert (facts.ranks, facts.places, facts.dp_group, facts.role) == (1, (0,), None, Role.UNIFIED)
    assert (facts.label, facts.paused, facts.asleep) == ("default", False, False)
    found = facts.capabilities
    assert (found.engine_version, found.models) == ("0.5.23", ("/models/tiny-llama-a",))
    assert (found.max_model_len, found.vocab_size) == (1024, None)
    assert (found.spans, found.logprobs_mode, found.weight_backend) == (True, "scaled", None)
    assert (found.pause_refuses, dict(found.missing)) == (False, {})


def test_an_inspection_is_five_reads_at_once_and_asks_nobody_to_generate() -> None:
    _, made = play(PROVIDER.inspect(), asks(answers()))
    assert sorted(call.path for call in made) == [
        "/model_info",
        "/ping",
        "/ready",
        "/server_info",
        "/v1/models",
    ]
    assert {(call.method, call.grant) for call in made} == {("GET", "data")}


def test_a_restart_is_another_instance_and_a_second_read_is_not() -> None:
    info = server_info()
    first, again = inspect(answers()), inspect(answers())
    assert first.instance == again.instance is not None
    other = {**info["startup_time"], "load_weight": 0.5723332060001668}
    assert inspect(answers(startup_time=other)).instance != first.instance
    turned = dict(reversed(list(info["startup_time"].items())))
    assert inspect(answers(startup_time=turned)).instance == first.instance
    assert inspect(answers(startup_time=None)).instance is None
    assert inspect(answers(startup_time="17")).instance == "17"


@pytest.mark.parametrize(
    ("version", "spans"),
    [("0.5.18", False), ("0.5.19", True), ("0.5.23.post1", True), ("0.6.0", True), (None, False)],
)
def test_whether_versions_are_attested_follows_from_the_release(
    version: str | None, spans: bool
) -> None:
    assert inspect(answers(version=version)).capabilities.spans is spans


@pytest.mark.parametrize(
    ("ready", "ping", "paused"),
    [(200, 200, False), (503, 200, True), (404, 200, None), (503, 503, None)],
)
def test_a_server_that_lives_and_is_not_ready_is_paused(
    ready: int, ping: int, paused: bool | None
) -> None:
    flags = {"/ready": HTTPReply(ready), "/ping": HTTPReply(ping)}
    found = {**answers(), **labelled("genapi:r:1:1!updating"), **flags}
    assert inspect(found).paused is paused


@pytest.mark.case("DISC-07")
@pytest.mark.parametrize("label", ["default", None, "step-1"])
def test_a_server_that_calls_itself_unhealthy_under_a_foreign_label_is_not_ready(
    label: str | None,
) -> None:
    flags = {"/ready": HTTPReply(503), "/ping": HTTPReply(503, b"", {}, f"{URL}/ping")}
    with pytest.raises(NotReadyError, match="starting, or unhealthy"):
        inspect({**answers(), **labelled(label), **flags})


@pytest.mark.parametrize(
    ("mode", "role"),
    [("prefill", Role.PREFILL), ("decode", Role.DECODE), ("null", Role.UNIFIED)],
)
def test_the_role_is_the_one_it_has_now(mode: str, role: Role) -> None:
    model = {**recorded("model_info").json_object(), "disaggregation_mode": mode}
    found = {**answers(disaggregation_mode="null"), "/model_info": model}
    assert inspect(found).role is role


def test_tensor_parallel_ranks_count_and_attention_data_parallel_is_among_them() -> None:
    facts = inspect(answers(tp_size=4, attn_dp_size=2))
    assert (facts.ranks, facts.places) == (4, (0, 1, 2, 3))
    assert "weights" not in facts.capabilities.missing


@pytest.mark.case("RANK-03")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dp_size": 2}, "--dp-size is 2"),
        ({"pp_size": 2, "tp_size": 2}, "--pp-size is 2"),
        ({"tokenizer_worker_num": 4}, "--tokenizer-worker-num is 4"),
    ],
)
def test_a_topology_that_cannot_be_published_to_says_why(
    changes: dict[str, int], reason: str
) -> None:
    missing = inspect(answers(**changes)).capabilities.missing
    assert reason in missing["weights"]
    assert "generate" not in missing


def test_the_recorded_server_of_two_replicas_is_one_of_them() -> None:
    found = {**answers(), "/server_info": recorded("server_info_trimmed")}
    assert "--dp-size is 2" in inspect(found).capabilities.missing["weights"]


@pytest.mark.parametrize(
    ("changes", "lacks"),
    [
        ({"enable_deterministic_inference": False}, "seed"),
        ({"enable_lora": False}, "lora"),
        ({"enable_priority_scheduling": False}, "priority"),
        (
            {
                "enable_priority_scheduling": True,
                "schedule_low_priority_values_first": False,
            },
            "priority",
        ),
        (
            {"enable_priority_scheduling": None, "abort_on_priority_when_disabled": True},
            "generate",
        ),
    ],
)
def test_what_a_server_would_ignore_is_a_missing_capability_with_the_flag(
    changes: dict[str, Any], lacks: str
) -> None:
    missing = inspect(answers(**changes)).capabilities.missing
    assert list(missing) == [lacks]
    assert "start SGLang with" in missing[lacks]


def test_a_server_with_every_flag_lacks_nothing() -> None:
    flags = (
        "enable_deterministic_inference",
        "enable_lora",
        "enable_priority_scheduling",
        "schedule_low_priority_values_first",
        "abort_on_priority_when_disabled",
    )
    assert not inspect(answers(**dict.fromkeys(flags, True))).capabilities.missing


def test_an_embedding_model_generates_nothing() -> None:
    model = {**recorded("model_info").json_object(), "is_generation": False}
    missing = inspect({**answers(), "/model_info": model}).capabilities.missing
    assert "embedding" in missing["generate"]


@pytest.mark.parametrize(
    ("states", "mode"),
    [
        ([], "scaled"),
        ([{}], "scaled"),
        ([{"env_vars": {"SGLANG_OTHER": "1"}}], "scaled"),
        ([{"env_vars": {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}}], "scaled"),
        ([{}, {"env_vars": {"SGLANG_RETURN_ORIGINAL_LOGPROB": "True"}}], "raw"),
    ],
)
def test_a_server_that_tells_its_environment_tells_its_scores(
    states: list[dict[str, Any]], mode: str
) -> None:
    assert inspect(answers(internal_states=states)).capabilities.logprobs_mode == mode


@pytest.mark.parametrize("where", ["server", "model"])
def test_a_vocabulary_is_known_where_the_server_tells_it(where: str) -> None:
    model = recorded("model_info").json_object()
    found = answers(vocab_size=512) if where == "server" else answers()
    if where == "model":
        found["/model_info"] = {**model, "vocab_size": 512}
    assert inspect(found).capabilities.vocab_size == 512


def test_adapters_are_no_models() -> None:
    listed = {
        "data": [
            {"id": "base", "parent": None, "max_model_len": 64},
            {"id": "a", "parent": "base", "max_model_len": None},
        ]
    }
    found = inspect({**answers(), "/v1/models": listed}).capabilities
    assert (found.models, found.max_model_len) == (("base",), 64)
    without = inspect({**answers(context_length=99), "/v1/models": HTTPReply(404)}).capabilities
    assert (without.models, without.max_model_len) == (("/models/tiny-llama-a",), 99)


@pytest.mark.case("AUTH-01")
@pytest.mark.parametrize("path", ["/ping", "/model_info", "/v1/models", "/server_info"])
def test_a_refused_key_is_an_error_of_the_key_of_requests(path: str) -> None:
    refused = HTTPReply(401, b'{"error":"Unauthorized"}', {}, URL + path)
    with pytest.raises(AuthError, match="check api_key"):
        inspect({**answers(), path: refused})


@pytest.mark.case("DISC-07")
@pytest.mark.parametrize("status", [502, 503])
@pytest.mark.parametrize("path", ["/model_info", "/server_info"])
def test_a_server_that_does_not_serve_yet_is_not_ready(path: str, status: int) -> None:
    with pytest.raises(NotReadyError):
        inspect({**answers(), path: HTTPReply(status, b"", {}, URL + path)})


@pytest.mark.parametrize(
    ("found", "who"),
    [
        ({"/version": {"version": "0.32.0"}, "/server_info": {"vllm_config": {}}}, "vllm://"),
        ({"/health": {"status": "healthy", "endpoints": [], "instances": []}}, "dynamo://"),
        ({"/workers": {"workers": [{"worker_type": "regular"}]}}, r"\?workers="),
        ({}, "another kind of server"),
    ],
)
def test_a_server_of_another_kind_is_told_by_name(found: Answers, who: str) -> None:
    with pytest.raises(ConfigError, match=who):
        inspect(found)


def test_a_server_that_fails_to_answer_is_not_taken_for_a_stranger() -> None:
    failing = HTTPReply(500, b"Internal Server Error", {}, f"{URL}/server_info")
    with pytest.raises(NotReadyError, match="is not ready"):
        inspect({**answers(), "/server_info": failing})


# ------------------------------------------------------------------------------- the server's keys

LEAKY = json.dumps(server_info()).encode()


@pytest.mark.case("AUTH-01")
def test_nothing_that_is_kept_of_a_server_holds_its_keys() -> None:
    facts = inspect(answers())
    for secret in SECRETS:
        assert secret not in repr(facts)
        assert secret not in facts.capabilities.model_dump_json()


@pytest.mark.case("AUTH-01")
@pytest.mark.parametrize(
    "reply",
    [
        HTTPReply(200, LEAKY[:-40], {}, f"{URL}/server_info"),
        HTTPReply(200, LEAKY.replace(b'"tp_size": 1', b'"tp_size": "user-key-5f1"'), {}, URL),
        HTTPReply(200, LEAKY.replace(b'"tp_size": 1', b'"tp_size": 0'), {}, URL),
        HTTPReply(200, b'"tp_size" ' + LEAKY, {}, URL),
        HTTPReply(503, LEAKY, {}, f"{URL}/server_info"),
        HTTPReply(500, LEAKY, {}, f"{URL}/server_info"),
        HTTPReply(200, LEAKY.replace(b'"tp_size"', b'"other"'), {}, f"{URL}/server_info"),
    ],
    ids=["cut", "another type", "no rank", "garbled", "503", "500", "a stranger's"],
)
def test_no_error_about_a_servers_information_holds_its_keys(reply: HTTPReply) -> None:
    with pytest.raises(GenAPIError) as caught:
        inspect({**answers(), "/server_info": reply})
    shown: BaseException | None = caught.value
    while shown is not None:
        held = f"{shown!s} {shown!r} {vars(shown)}"
        assert not [secret for secret in SECRETS if secret in held]
        shown = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)


@pytest.mark.parametrize("size", [0, -1, "x", None, 1.5])
def test_a_size_that_is_none_breaks_the_contract(size: Any) -> None:
    with pytest.raises(ReplyError):
        inspect(answers(tp_size=size))
