"""Which workers are behind a Dynamo frontend, and whether all of it serves."""

import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from genapi import (
    AuthError,
    ConfigError,
    FleetError,
    GenAPIError,
    NotReadyError,
    ProviderError,
    ReplyError,
)
from genapi.providers.base import Listing, WorkerFacts
from genapi.types.ids import Role, WorkerId
from genapi.wire.http import HTTPCall, HTTPReply
from tests.support.dynamo_wire import BIG, PROVIDER, Recorded, recorded
from tests.support.transcripts import play

LIST = "http://frontend:8001"
VLLM = recorded("vllm_rl_workers")[0]
assert PROVIDER.directory is not None
DIRECTORY = PROVIDER.directory

Answers = Mapping[str, HTTPReply]


def answer(body: Any, status: int = 200) -> HTTPReply:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return HTTPReply(status, content, {}, "http://recorded")


def models(*names: str) -> HTTPReply:
    return answer({"object": "list", "data": [{"id": name} for name in names]})


def ready(**counts: int) -> HTTPReply:
    types = {kind: {"workers": count, "needs": []} for kind, count in counts.items()}
    state = {"ready": True, "worker_types": types, "present": [], "missing_worker_types": []}
    return answer({"model": "tiny", "ready": True, "namespaces": {"dynamo": state}})


def instances(*ids: int, component: str = "backend") -> list[dict[str, Any]]:
    return [
        {"component": component, "endpoint": end, "namespace": "dynamo", "instance_id": one}
        for one in ids
        for end in ("generate", "worker_kv_query_source_1b83")
    ]


def health(*found: dict[str, Any]) -> HTTPReply:
    return answer({"status": "healthy", "endpoints": [], "instances": list(found)})


def worker(instance: int, **more: Any) -> dict[str, Any]:
    entry = json.loads(VLLM.reply.body)["workers"][0]
    url = f"http://w{instance % 1000}:8081"
    return {**entry, "component": "backend", "instance_id": instance, "system_url": url, **more}


def listing(*workers: dict[str, Any], **more: Any) -> HTTPReply:
    return answer({"protocol_version": 1, "namespace": "dynamo", "workers": [*workers], **more})


def read(answers: Answers, *, model: str | None = None) -> tuple[Listing, list[HTTPCall]]:
    return play(DIRECTORY.read(LIST, model=model), lambda call: answers[call.path])


def whole(
    *workers: dict[str, Any], counts: Mapping[str, int] | None = None, **more: HTTPReply
) -> dict[str, HTTPReply]:
    """What a deployment of these workers answers."""
    there = [i for w in workers for i in instances(w["instance_id"], component=w["component"])]
    return {
        "/v1/rl/workers": listing(*workers),
        "/health": health(*there),
        "/v1/models": models("tinyv"),
        "/v1/models/tinyv/ready": ready(**(counts or {"aggregated": len(workers)})),
        **{f"/{name}": reply for name, reply in more.items()},
    }


def test_a_recorded_list_becomes_workers_with_their_whole_names() -> None:
    first, second = json.loads(recorded("custom_worker_rl_workers_two")[0].reply.body)["workers"]
    health_, _, models_, ready_, *_ = recorded("frontend_health_models_ready")
    found, calls = read(
        {
            "/v1/rl/workers": recorded("custom_worker_rl_workers_two")[0].reply,
            "/health": health_.reply,
            "/v1/models": models_.reply,
            "/v1/models/tiny/ready": ready_.reply,
        }
    )
    assert found.missing is None
    assert [w.url for w in found.workers] == [first["system_url"], second["system_url"]]
    assert [w.facts.id for w in found.workers] == [
        WorkerId(provider="dynamo", namespace="dynamo", component="backend", instance=str(one))
        for one in (5363937753380972144, BIG)
    ]
    assert [(w.facts.ranks, w.facts.places, w.facts.role) for w in found.workers] == [
        (1, (0,), Role.UNIFIED)
    ] * 2
    # It has the routes of pause and label, and none for weights.
    assert "weights" in found.workers[0].facts.capabilities.missing
    assert [call.base for call in calls if call.path == "/v1/rl/workers"] == [LIST]


def test_a_real_worker_can_be_administered_and_scores_what_it_drew_from() -> None:
    found, _ = read(whole(worker(BIG)))
    facts = found.workers[0].facts
    assert facts.capabilities.missing == {}
    assert (facts.details["family"], facts.capabilities.logprobs_mode) == ("vllm", "processed")
    assert facts.capabilities.models == ("tinyv",)
    assert facts.capabilities.aborts_as_stop


def test_the_older_dialect_is_read_too() -> None:
    old = {
        "component": "backend",
        "instance_id": BIG,
        "system_url": "http://w1:8081",
        "model": "tinyv",
        "routes": worker(BIG)["routes"],
        "error": None,
    }
    answers = whole(worker(BIG))
    answers["/v1/rl/workers"] = answer({"namespace": "dynamo", "workers": [old]})
    found, _ = read(answers)
    assert found.missing is None
    facts = found.workers[0].facts
    assert facts.id is not None
    assert (facts.id.namespace, facts.ranks) == ("dynamo", 1)


def test_roles_come_from_components_and_ranks_follow_them() -> None:
    found, _ = read(
        {
            "/v1/rl/workers": recorded("custom_worker_prefill_decode_discovery")[0].reply,
            "/health": health(),
            "/v1/models": models("tiny"),
            "/v1/models/tiny/ready": recorded("custom_worker_prefill_decode_discovery")[1].reply,
        }
    )
    assert [(w.facts.role, w.facts.ranks) for w in found.workers] == [
        (Role.PREFILL, 1),
        (Role.DECODE, 2),
        (Role.DECODE, 2),
    ]
    prefill, first, second = (w.facts.instance for w in found.workers)
    assert prefill == "17586643486198386701"
    assert (first, second) == ("2688879905137832476", "13643708329993079264")
    # One of them was started without a server of its own.
    assert "DYN_SYSTEM_PORT" in found.workers[1].facts.capabilities.missing["admin"]
    assert found.workers[1].url == "dyn://dynamo.backend/2688879905137832476"


def test_who_serves_and_cannot_be_administered_is_known_all_the_same() -> None:
    answers = whole(counts={"aggregated": 2})
    answers["/health"] = health(*instances(7, BIG))
    found, _ = read(answers)
    assert [w.facts.instance for w in found.workers] == ["7", str(BIG)]
    assert all("DYN_ENABLE_RL" in w.facts.capabilities.missing["admin"] for w in found.workers)
    assert found.missing is None


def test_workers_of_another_model_are_not_this_fleets() -> None:
    answers = whole(worker(7), worker(8, model="other"), counts={"aggregated": 1})
    found, _ = read(answers, model="tinyv")
    assert [w.facts.instance for w in found.workers] == ["7"]


def test_a_worker_that_discovery_cannot_reach_is_listed_with_why() -> None:
    dead = recorded("stream_worker_killed_migration_0")[-1]
    answers = whole()
    answers |= {"/v1/rl/workers": dead.reply, "/v1/models": models("tiny")}
    answers["/v1/models/tiny/ready"] = ready(aggregated=1)
    found, _ = read(answers)
    assert [w.error is None for w in found.workers] == [False, True]
    assert "TCP connection to 127.0.0.1:35645 failed" in str(found.missing)


def sleeping() -> dict[str, HTTPReply]:
    """A worker that sleeps: still listed, and it gets no traffic."""
    _, listed, unready, *_ = recorded("vllm_sleep_wake")
    return {
        "/v1/rl/workers": listed.reply,
        "/health": health(),
        "/v1/models": models("tinyv"),
        "/v1/models/tinyv/ready": unready.reply,
    }


@pytest.mark.parametrize(
    ("answers", "model", "missing"),
    [
        (sleeping(), None, "does not serve 'tinyv': missing worker types: aggregated"),
        (whole(worker(7), worker(8), counts={"aggregated": 1}), None, "2 workers are there and 1"),
        ({**whole(worker(7)), "/v1/models": models()}, None, "serves none"),
        ({**whole(worker(7)), "/v1/models": models("a", "tinyv")}, None, "pass model="),
        (
            {
                **whole(worker(7, model="nope")),
                "/v1/models/nope/ready": recorded("frontend_health_models_ready")[4].reply,
            },
            "nope",
            "does not know the model 'nope'",
        ),
    ],
)
def test_what_a_frontend_lacks_is_said(answers: Answers, model: str | None, missing: str) -> None:
    found, _ = read(answers, model=model)
    assert missing in str(found.missing)


@pytest.mark.case("WIRE-07")
def test_an_empty_list_has_no_workers_and_what_is_no_list_is_an_error_that_keeps_it() -> None:
    assert read(whole(counts={"aggregated": 0}))[0].workers == ()
    for body in (
        {"protocol_version": 1, "namespace": "dynamo", "workers": None},
        {"detail": "Not Found"},
        b"<html>gateway</html>",
    ):
        reply = answer(body)
        with pytest.raises(ReplyError, match="breaks its contract") as caught:
            read({**whole(worker(7)), "/v1/rl/workers": reply})
        assert caught.value.body == reply.body


@pytest.mark.case("DISC-03")
@pytest.mark.parametrize(
    ("workers", "match"),
    [
        ([worker(7), worker(8, system_url=worker(7)["system_url"])], "system_url .* twice"),
        ([worker(7), worker(7, system_url="http://other:1")], "instance .* twice"),
        ([worker(7, system_url="")], "names the address ''"),
        ([worker(7, system_url="http://u:p@w:1")], "names the address"),
        ([worker(7, system_url="http://w:1/engine")], "names the address"),
        ([worker(7, system_url="ftp://w:1")], "names the address"),
        ([worker(-1)], "breaks its contract"),
        ([worker(True)], "breaks its contract"),
        ([worker(7, world_size=0)], "breaks its contract"),
        ([worker(7, admin_base_url="http://w:2", world_size=None)], "without a world_size"),
    ],
)
def test_a_list_with_bad_entries_is_no_list(workers: list[dict[str, Any]], match: str) -> None:
    answers = {**whole(worker(7)), "/v1/rl/workers": listing(*workers)}
    with pytest.raises(ReplyError, match=match):
        read(answers)


@pytest.mark.parametrize(
    "workers",
    [
        [worker(7, system_url="http://user:hunter2@w:1")],
        [worker(7, admin_base_url="http://user:hunter2@w:1")],
        [worker(7, system_url="http://user:hunter2@w:1", instance_id="none")],
        [{"system_url": "http://user:hunter2@w:1"}],
        [{"pad": "x" * 145, "system_url": "http://user:hunter2@w:1"}],
    ],
)
def test_the_user_info_of_a_listed_address_is_in_no_error(workers: list[dict[str, Any]]) -> None:
    answers = {**whole(worker(7)), "/v1/rl/workers": listing(*workers)}
    with pytest.raises(ReplyError) as caught:
        read(answers)
    assert "hunter" not in str(caught.value)
    assert "hunter" not in repr(caught.value)
    assert b"hunter2" not in pickle.dumps(caught.value.args)


def test_the_user_info_of_a_listed_address_is_not_in_what_discovery_says_of_a_worker() -> None:
    error = "http://user:hunter2@w:1/engine: connection refused"
    found, _ = read({**whole(worker(7)), "/v1/rl/workers": listing(worker(7, error=error))})
    assert "hunter2" not in str(FleetError(found.missing))


@pytest.mark.case("DISC-03")
def test_a_worker_that_lacks_a_route_is_named_with_what_it_lacks() -> None:
    routes = [r for r in worker(7)["routes"] if r != "resume_generation"]
    found, _ = read(whole(worker(7, routes=routes)))
    assert "advertises no routes" in found.workers[0].facts.capabilities.missing["admin"]
    routes = [r for r in worker(7)["routes"] if r != "update_weights_from_disk"]
    found, _ = read(whole(worker(7, routes=routes)))
    reason = "it does not advertise update_weights_from_disk"
    assert found.workers[0].facts.capabilities.missing == {"files": reason}


SIDECAR = [
    "control/get_weight_version",
    "control/is_paused",
    "control/pause_generation",
    "control/resume_generation",
    "update/update_weight_version",
]
SGLANG = [
    "continue_generation",
    "control/update_weight_version",
    "control/update_weights_from_disk",
    "get_weight_version",
    "pause_generation",
]


@pytest.mark.parametrize(
    ("routes", "more", "reason"),
    [
        (SIDECAR, {}, "name it the HTTP server of its engine"),
        (SIDECAR, {"admin_base_url": "http://w7:9", "world_size": 1}, None),
        (SGLANG, {}, "was never seen"),
    ],
)
def test_a_worker_that_cannot_be_told_to_load_files_says_what_to_do(
    routes: list[str], more: dict[str, Any], reason: str | None
) -> None:
    found, _ = read(whole(worker(7, routes=routes, **more)))
    missing = found.workers[0].facts.capabilities.missing.get("files")
    assert (missing is None) == (reason is None)
    assert (reason or "") in (missing or "")


@pytest.mark.parametrize(
    ("routes", "more", "family"),
    [
        (
            ["pause_generation", "resume_generation", "get_weight_version", "set_weight_version"],
            {},
            "vllm",
        ),
        (
            [
                "control/pause_generation",
                "control/resume_generation",
                "control/is_paused",
                "control/get_weight_version",
                "update/update_weight_version",
                "update/init_weight_transfer_engine",
                "update/start_weight_update",
                "update/update_weights",
                "update/finish_weight_update",
            ],
            {"admin_base_url": "http://w:9"},
            "sidecar",
        ),
        (
            [
                "control/pause_generation",
                "control/resume_generation",
                "control/is_paused",
                "control/get_weight_version",
                "update/update_weight_version",
            ],
            {"admin_base_url": "http://w:9"},
            "collective",
        ),
        (
            [
                "pause_generation",
                "continue_generation",
                "get_weight_version",
                "control/update_weight_version",
                "control/update_weights_from_distributed",
                "init_weights_update_group",
            ],
            {},
            "sglang",
        ),
    ],
)
def test_the_family_is_told_from_the_routes(
    routes: list[str], more: dict[str, Any], family: str
) -> None:
    found, _ = read(whole(worker(7, routes=routes, **more)))
    assert found.workers[0].facts.details["family"] == family
    answers = whole(worker(7, routes=None, system_routes=routes, **more))
    assert read(answers)[0].workers[0].facts.details["family"] == family


@pytest.mark.parametrize(
    ("path", "reply", "kind", "match"),
    [
        ("/v1/rl/workers", answer({"error": "discovery_failed"}, 500), NotReadyError, "500"),
        ("/v1/rl/workers", HTTPReply(404, b"", {}, LIST), ConfigError, "DYN_ENABLE_RL"),
        ("/v1/rl/workers", answer({"message": "x"}, 401), AuthError, "in front of it"),
        ("/v1/rl/workers", answer({"message": "x"}, 403), AuthError, "in front of it"),
        ("/v1/rl/workers", listing(protocol_version=2), ConfigError, "speaks protocol 2"),
        ("/v1/rl/workers", answer(b"<html>"), ReplyError, "breaks its contract"),
        ("/health", answer({"status": "ok"}), ConfigError, "no Dynamo frontend"),
        ("/health", answer(b"nope", 404), ConfigError, "no Dynamo frontend"),
        ("/health", answer({"message": "x"}, 503), NotReadyError, "503"),
        ("/health", answer({"message": "x"}, 401), AuthError, "in front of it"),
        ("/v1/models", answer({"message": "x"}, 503), NotReadyError, "503"),
        ("/v1/models/tinyv/ready", answer(b"busy", 503), NotReadyError, "503"),
        ("/v1/models/tinyv/ready", answer(b"[]"), ReplyError, "breaks its contract"),
    ],
)
def test_whatever_else_answers_is_told_apart(
    path: str, reply: HTTPReply, kind: type[GenAPIError], match: str
) -> None:
    with pytest.raises(kind, match=match):
        read({**whole(worker(7)), path: reply})


@pytest.mark.case("DISC-05")
@pytest.mark.parametrize(
    ("frontend", "listed"),
    [
        ("http://h:8000", "http://h:8001"),
        ("http://[::1]:8000", "http://[::1]:8001"),
        ("https://h:8443", "https://h:8444"),
        ("memory://0", "memory://1"),
    ],
)
def test_the_list_is_on_the_next_port(frontend: str, listed: str) -> None:
    assert DIRECTORY.address(frontend) == listed


@pytest.mark.case("DISC-05")
@pytest.mark.parametrize("frontend", ["http://h:65535", "https://h:443", "http://h:80", "http://h"])
def test_where_the_next_port_means_nothing_an_address_is_asked_for(frontend: str) -> None:
    with pytest.raises(ConfigError, match="discovery"):
        DIRECTORY.address(frontend)


def facts(**change: Any) -> WorkerFacts:
    return replace(read(whole(worker(7, **change)))[0].workers[0].facts)


def inspect(
    known: WorkerFacts, answers: Callable[[HTTPCall], HTTPReply]
) -> tuple[WorkerFacts, list[HTTPCall]]:
    return play(PROVIDER.inspect(known), answers)


def test_a_worker_itself_says_its_label_and_that_it_lives() -> None:
    version = recorded("vllm_admin_update_from_disk")[0]
    replies = {version.path: version.reply, "/engine/liveness_probe": answer({"alive": True})}
    now, calls = inspect(facts(), lambda call: replies[call.path])
    assert (now.label, now.paused, now.id) == ("step-2", None, facts().id)
    assert {call.method for call in calls} == {"POST"}


@pytest.mark.parametrize(
    ("version", "label"),
    [
        ({"status": "ok", "version": None, "version_declared": False}, None),
        ({"status": "ok", "version": 1, "version_declared": True}, "1"),
        ({"status": "ok", "version": "genapi:r:1:1"}, "genapi:r:1:1"),
    ],
)
def test_a_label_may_be_any_json(version: Any, label: str | None) -> None:
    def replies(call: HTTPCall) -> HTTPReply:
        return answer({"alive": True} if "liveness" in call.path else version)

    assert inspect(facts(), replies)[0].label == label


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (answer({"status": "ok", "alive": False, "message": "dead"}), NotReadyError),
        (answer({"status": "error", "message": "x"}), ProviderError),
        (answer(b"oops", 500), ProviderError),
        (answer({}, 503), NotReadyError),
    ],
)
def test_a_worker_that_does_not_say_that_it_lives_is_an_error(
    reply: HTTPReply, kind: type[GenAPIError]
) -> None:
    with pytest.raises(kind):
        inspect(facts(), lambda call: reply if "liveness" in call.path else answer({"version": 1}))


@pytest.mark.parametrize(
    "failure",
    [
        {"status": "error", "message": "x"},
        {"status": "failed", "message": "x"},
        {"error": "x"},
        {"success": False, "message": "x"},
    ],
)
def test_a_failure_inside_a_200_is_no_label(failure: dict[str, Any]) -> None:
    def replies(call: HTTPCall) -> HTTPReply:
        return answer({"alive": True} if "liveness" in call.path else failure)

    with pytest.raises(ProviderError):
        inspect(facts(), replies)


def test_nobody_is_asked_about_a_worker_without_an_address() -> None:
    known = facts(system_url=None)
    assert inspect(known, lambda _: answer({}, 500)) == (known, [])


def test_a_sidecar_says_whether_it_is_paused() -> None:
    routes = ["control/is_paused", "control/pause_generation", "control/resume_generation"]
    routes += ["control/get_weight_version", "update/update_weight_version"]

    def replies(call: HTTPCall) -> HTTPReply:
        told = (
            {"is_paused": True} if "is_paused" in call.path else {"weight_version": "genapi:r:2:1"}
        )
        return answer(told)

    now, _ = inspect(facts(routes=routes), replies)
    assert (now.label, now.paused) == ("genapi:r:2:1", True)


def test_the_mocker_is_in_no_list() -> None:
    empty: Recorded = recorded("mocker_no_rl_no_engine_routes")[0]
    answers = {**whole(), "/v1/rl/workers": empty.reply, "/health": health(*instances(7))}
    answers["/v1/models/tinyv/ready"] = ready(aggregated=1)
    found, _ = read(answers)
    assert [w.facts.instance for w in found.workers] == ["7"]


def endpoints(*names: str) -> list[dict[str, Any]]:
    """Endpoints of one instance."""
    return [{**instances(7)[0], "endpoint": name} for name in names]


BESIDE = (
    "rl",
    "clear_kv_blocks",
    "load_lora",
    "unload_lora",
    "list_loras",
    "get_perf_metrics",
    "worker_kv_query_source_1b83",
)


@pytest.mark.parametrize("name", ["generate", "sample"])
def test_a_worker_sleeps_when_nothing_of_it_generates_whatever_that_is_called(name: str) -> None:
    answers = whole(worker(7))
    for there, asleep in ((endpoints(name, *BESIDE), False), (endpoints(*BESIDE), True)):
        found, _ = read({**answers, "/health": health(*there)})
        assert [w.facts.asleep for w in found.workers] == [asleep]


@pytest.mark.parametrize(
    ("routes", "asleep"),
    [
        (json.loads(VLLM.reply.body)["workers"][0]["routes"], True),
        (["control/pause_generation", "control/is_paused", "control/get_weight_version"], False),
    ],
)
def test_a_worker_that_is_out_of_the_routing_sleeps_unless_its_pause_does_that(
    routes: list[str], asleep: bool
) -> None:
    there = [worker(7, routes=routes), worker(BIG, routes=routes)]
    answers = {**whole(*there, counts={"aggregated": 1}), "/health": health(*instances(BIG))}
    found, _ = read(answers, model="tinyv")
    assert {w.facts.instance: w.facts.asleep for w in found.workers} == {
        "7": asleep,
        str(BIG): False,
    }
