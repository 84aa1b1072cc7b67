"""What an inspection of a vLLM server finds out."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from genapi import AuthError, ConfigError, NotReadyError, ReplyError
from genapi.providers.base import WorkerFacts
from genapi.types.ids import Role
from genapi.wire.http import HTTPCall, HTTPReply
from tests.support.transcripts import exchange, play
from tests.support.vllm_wire import PROVIDER

Answers = dict[str, HTTPReply | Any]


def recorded() -> Answers:
    """A vLLM 0.32 with everything on, by path."""
    names = [
        "/health",
        "/version",
        "/v1/models",
        "/get_world_size",
        "/weight_info",
        "/is_paused",
        "/is_sleeping",
    ]
    answers: Answers = {p: exchange("vllm", "01", f"GET {p}").reply for p in names}
    answers["/server_info"] = exchange("vllm", "02", "server_info json").reply
    answers["/inference/v1/abort_requests"] = exchange(
        "vllm", "40", "/inference/v1/abort_requests unprefixed"
    ).reply
    return answers


def asks(answers: Answers) -> Callable[[HTTPCall], HTTPReply]:
    missing = HTTPReply(404, b'{"detail":"Not Found"}', {}, "http://w1:8000")

    def answer(call: HTTPCall) -> HTTPReply:
        found = answers.get(call.path, missing)
        if isinstance(found, HTTPReply):
            return found
        return HTTPReply(200, json.dumps(found).encode(), {}, f"http://w1:8000{call.path}")

    return answer


def inspect(answers: Answers) -> WorkerFacts:
    return play(PROVIDER.inspect(), asks(answers))[0]


def configured(**changes: Any) -> Answers:
    """The recorded server with changes to its configuration."""
    answers = recorded()
    info = answers["/server_info"].json_object()
    for part, fields in changes.items():
        info["vllm_config"][part] = {**(info["vllm_config"][part] or {}), **fields}
    return {**answers, "/server_info": info}


def test_a_recorded_server_is_described_in_full() -> None:
    facts = inspect(recorded())
    assert facts.instance == "1795950947554628407"
    assert (facts.ranks, facts.dp_group, facts.role) == (1, None, Role.UNIFIED)
    assert (facts.label, facts.paused, facts.asleep) == ("default", False, False)
    found = facts.capabilities
    assert (found.engine_version, found.models, found.max_model_len) == ("0.32.0", ("tiny",), 256)
    assert (found.spans, found.logprobs_mode, found.weight_backend) == (True, "raw", "nccl")
    assert (found.pause_refuses, dict(found.missing)) == (False, {})


def test_an_inspection_is_nine_calls_that_change_nothing() -> None:
    _, made = play(PROVIDER.inspect(), asks(recorded()))
    assert len(made) == 9
    posts = [call for call in made if call.method == "POST"]
    assert [(call.path, call.body) for call in posts] == [
        ("/inference/v1/abort_requests", b'{"request_ids":["genapi-probe"]}')
    ]


@pytest.mark.parametrize(
    ("version", "spans", "refuses"),
    [
        ("0.31.0", False, False),
        ("0.32.1+cpu", True, False),
        ("0.33.0", True, True),
        ("1.0.0", True, True),
        ("dev", False, False),
    ],
)
def test_what_a_release_can_do_follows_from_its_version(
    version: str,
    spans: bool,
    refuses: bool,
) -> None:
    found = inspect({**recorded(), "/version": {"version": version}}).capabilities
    assert (found.spans, found.pause_refuses) == (spans, refuses)


@pytest.mark.parametrize("status", [403, 404, 405])
def test_scale_out_that_is_off_is_a_missing_capability(status: int) -> None:
    answers = {**recorded(), "/inference/v1/abort_requests": HTTPReply(status, b"{}")}
    assert "--enable-scale-out" in inspect(answers).capabilities.missing["generate"]


def test_a_server_without_admin_routes_can_still_generate() -> None:
    kept = ("/health", "/version", "/v1/models", "/inference/v1/abort_requests")
    facts = inspect({path: recorded()[path] for path in kept})
    assert "VLLM_SERVER_DEV_MODE=1" in facts.capabilities.missing["admin"]
    assert "generate" not in facts.capabilities.missing
    assert (facts.instance, facts.label, facts.paused, facts.ranks) == (None, None, None, 1)


def test_a_server_without_a_weight_backend_says_which_flag_it_lacks() -> None:
    answers = recorded()
    info = answers["/server_info"].json_object()
    info["vllm_config"]["weight_transfer_config"] = None
    found = inspect({**answers, "/server_info": info}).capabilities
    assert "--weight-transfer-config" in found.missing["weights"]
    assert found.weight_backend is None


@pytest.mark.parametrize(
    ("mode", "known"), [("processed_logprobs", "processed"), ("raw_logprobs", "raw")]
)
def test_the_logprobs_mode_is_read(mode: str, known: str) -> None:
    assert (
        inspect(configured(model_config={"logprobs_mode": mode})).capabilities.logprobs_mode
        == known
    )


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_logits_are_not_taken_for_logprobs(mode: str) -> None:
    found = inspect(configured(model_config={"logprobs_mode": mode})).capabilities
    assert found.logprobs_mode is None
    assert mode in found.missing["logprobs"]


@pytest.mark.parametrize(
    ("kv_role", "role"),
    [("kv_producer", Role.PREFILL), ("kv_consumer", Role.DECODE), ("kv_both", Role.UNIFIED)],
)
def test_the_role_follows_from_the_kv_connector(kv_role: str, role: Role) -> None:
    transfer = {"kv_connector": "NixlConnector", "kv_role": kv_role}
    assert inspect(configured(kv_transfer_config=transfer)).role is role


def test_a_role_without_a_connector_means_nothing() -> None:
    transfer = {"kv_connector": None, "kv_role": "kv_producer"}
    facts = inspect(configured(kv_transfer_config=transfer))
    assert (facts.role, dict(facts.capabilities.missing)) == (Role.UNIFIED, {})


@pytest.mark.parametrize(
    ("connector", "is_emptied"),
    [
        ("OffloadingConnector", True),
        ("SimpleCPUOffloadConnector", True),
        ("ExampleConnector", False),
        ("NixlConnector", False),
        ("MultiConnector", False),
        ("one of the users own", False),
    ],
)
def test_a_connector_that_vllm_does_not_empty_keeps_what_older_weights_made(
    connector: str, is_emptied: bool
) -> None:
    transfer = {"kv_connector": connector, "kv_role": "kv_both"}
    missing = inspect(configured(kv_transfer_config=transfer)).capabilities.missing
    assert ("drop_caches" not in missing) == is_emptied
    if not is_emptied:
        assert repr(connector) in missing["drop_caches"]
        assert "prefix_cache='stale'" in missing["drop_caches"]


def test_internal_data_parallel_is_one_server_with_all_ranks() -> None:
    answers = configured(parallel_config={"data_parallel_size": 2})
    facts = inspect({**answers, "/get_world_size": {"world_size": 2}})
    assert (facts.ranks, facts.dp_group) == (2, None)


@pytest.mark.parametrize("balancer", ["data_parallel_external_lb", "data_parallel_hybrid_lb"])
def test_servers_of_one_external_data_parallel_group_name_the_same_group(balancer: str) -> None:
    parallel = {
        balancer: True,
        "data_parallel_size": 4,
        "data_parallel_master_ip": "10.0.0.1",
        "data_parallel_rpc_port": 29550,
    }
    groups = {
        inspect(configured(parallel_config={**parallel, "data_parallel_index": i})).dp_group
        for i in range(4)
    }
    assert groups == {"10.0.0.1:29550/4"}


@pytest.mark.parametrize("status", [502, 503])
def test_a_server_that_is_starting_is_not_ready(status: int) -> None:
    with pytest.raises(NotReadyError):
        inspect({**recorded(), "/health": HTTPReply(status)})


@pytest.mark.parametrize(
    "path", ["/health", "/version", "/v1/models", "/server_info", "/inference/v1/abort_requests"]
)
def test_a_refused_key_is_named(path: str) -> None:
    refused = exchange("vllm", "50", "wrong key").reply
    with pytest.raises(AuthError, match="check the API key"):
        inspect({**recorded(), path: refused})


HTML = HTTPReply(200, b"<!doctype html><title>Grafana</title>", {}, "http://w1:8000/health")


@pytest.mark.parametrize(
    ("answers", "who"),
    [
        ({}, "another kind of server answers"),
        ({"/health": HTML, "/version": HTML, "/v1/models": HTML}, "Grafana"),
        (
            {
                "/health": HTTPReply(200),
                "/v1/models": {"data": []},
                "/get_server_info": {"tp_size": 1},
            },
            "sglang://",
        ),
        (
            {"/health": {"status": "healthy", "endpoints": []}, "/v1/models": {"data": []}},
            "dynamo://",
        ),
        (
            {"/health": HTTPReply(200), "/version": {"version": 3}, "/v1/models": {"data": []}},
            "no vLLM at",
        ),
    ],
    ids=["nothing known", "web page", "SGLang", "Dynamo", "no version"],
)
def test_another_server_at_the_address_is_named(answers: Answers, who: str) -> None:
    with pytest.raises(ConfigError, match="no vLLM at") as caught:
        inspect(answers)
    assert who in str(caught.value)


def test_an_answer_without_its_field_breaks_the_contract() -> None:
    with pytest.raises(ReplyError, match="expected 'is_paused'"):
        inspect({**recorded(), "/is_paused": {"paused": False}})


# ------------------------------------------------------------------- a worker that is known already


def again(answers: Answers, known: WorkerFacts) -> tuple[WorkerFacts, list[str]]:
    found, made = play(PROVIDER.inspect(known), asks(answers))
    return found, [call.path for call in made]


READ_AGAIN = ["/health", "/server_info", "/weight_info", "/is_paused", "/is_sleeping"]


def test_of_the_same_instance_only_what_may_have_changed_is_read() -> None:
    known = inspect(recorded())
    changed = {
        **recorded(),
        "/weight_info": {"weight_version": "genapi:r:1:1"},
        "/is_paused": {"is_paused": True},
        "/is_sleeping": {"is_sleeping": True},
    }
    found, made = again(changed, known)
    assert made == READ_AGAIN
    assert found == inspect(changed)
    assert (found.label, found.paused) == ("genapi:r:1:1", True)


def test_another_instance_is_read_in_full() -> None:
    known = replace(inspect(recorded()), instance="another", ranks=7, label="before")
    found, made = again(recorded(), known)
    assert found == inspect(recorded())
    assert made[: len(READ_AGAIN)] == READ_AGAIN
    assert {"/version", "/v1/models", "/get_world_size"} <= set(made)


def test_of_what_names_no_instance_nothing_is_taken_for_granted() -> None:
    nameless = {p: a for p, a in recorded().items() if p != "/server_info"}
    known = inspect(nameless)
    assert known.instance is None
    found, made = again(nameless, known)
    assert found == known
    assert "/v1/models" in made


def test_a_known_worker_that_names_no_instance_any_more_is_read_in_full() -> None:
    nameless = {p: a for p, a in recorded().items() if p != "/server_info"}
    found, _ = again(nameless, inspect(recorded()))
    assert found == inspect(nameless)


@pytest.mark.parametrize("path", READ_AGAIN)
@pytest.mark.parametrize(("status", "error"), [(401, AuthError), (503, NotReadyError)])
def test_a_known_worker_that_answers_an_error_raises_it(
    path: str, status: int, error: type[Exception]
) -> None:
    answers = {**recorded(), path: HTTPReply(status, b"{}")}
    with pytest.raises(error):
        inspect(answers)
    with pytest.raises(error):
        again(answers, inspect(recorded()))
