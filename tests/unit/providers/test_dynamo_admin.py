"""What each family of Dynamo's workers is asked, and what its answers mean."""

import itertools
import json
from collections.abc import Mapping
from typing import Any

import pytest

from genapi import ConfigError, ReplyError, UnsupportedError
from genapi.providers.base import Admin, Capabilities, WorkerFacts
from genapi.providers.dynamo import Launch as DynamoLaunch
from genapi.publication.evidence import Answer, Observed
from genapi.publication.plan import InFlightKV, PauseMode, PausePlan, PrefixCache
from genapi.types.ids import Role, WorkerId
from genapi.wire.flow import Flow
from genapi.wire.http import HTTPCall, HTTPReply
from tests.support.dynamo_wire import PROVIDER, recorded
from tests.support.launch_plans import planned, texts
from tests.support.transcripts import play

SERVER = "http://engine:9"
INFO = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 3, "timeout_s": 60.0}
BUCKET = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2]], "packed": True}
LABEL = "genapi:r:1:1"
MODES: tuple[PauseMode, ...] = ("abort", "drain", "keep")
KVS: tuple[InFlightKV, ...] = ("recompute", "stale")
CACHES: tuple[PrefixCache, ...] = ("flush", "salt", "stale")
KEPT = PausePlan("keep", "stale", "salt")
NO_LOADER = "Worker failed with error ''Parameter' object has no attribute 'weight_loader'', please"


def facts(family: str = "vllm", **more: Any) -> WorkerFacts:
    details = {"family": family, "server": SERVER, "destroy_weights_update_group": "x"}
    return WorkerFacts(**{"instance": "1", "details": details, **more})


def admin(family: str = "vllm", **details: str) -> Admin:
    known = facts(family)
    return PROVIDER.administer(WorkerFacts(instance="1", details={**known.details, **details}))


def reply(body: Any, status: int = 200) -> HTTPReply:
    return HTTPReply(status, json.dumps(body).encode(), {}, "http://w:1/engine/x")


OK = reply({"status": "ok", "results": [None], "is_paused": True, "version": LABEL, "alive": True})


def asked(flow: Flow[Answer], answer: HTTPReply = OK) -> list[tuple[str | None, str, Any]]:
    """The base, path and body of every call of a flow that is answered so."""
    _, calls = play(flow, lambda _: answer)
    return [(c.base, c.path, json.loads(c.body or b"null")) for c in calls]


def answered(flow: Flow[Answer], answer: HTTPReply) -> Answer:
    return play(flow, lambda _: answer)[0]


def session(of: Admin) -> list[tuple[str | None, str, Any]]:
    """Every call of one publication."""
    flows = (
        of.join(INFO, rank_offset=1, backend="gloo"),
        of.pause(KEPT),
        of.begin(),
        of.update(BUCKET, attachment=None),
        of.finish(LABEL if of.finish_sets_label else None),
        of.label(LABEL),
        of.resume(KEPT),
    )
    return [call for flow in flows for call in asked(flow)]


def rpc(method: str, *, reset: bool, **more: Any) -> tuple[None, str, dict[str, Any]]:
    body = {"engine_rpc": method, "allow_unpaused": False, "reset_prefix_cache": reset, **more}
    return None, "/engine/update_weights_from_distributed", body


def engine(route: str, body: Mapping[str, Any]) -> tuple[None, str, dict[str, Any]]:
    return None, f"/engine/{route}", dict(body)


def test_the_python_worker_is_told_what_its_engine_is_to_do() -> None:
    info = {**INFO, "rank_offset": 1, "timeout_s": 25.0}
    assert session(admin()) == [
        engine(
            "init_weights_update_group",
            {"engine_rpc": "init_weight_transfer_engine", "init_info": info},
        ),
        engine("pause_generation", {"mode": "keep", "clear_cache": False}),
        rpc("start_weight_update", reset=False),
        rpc("update_weights", reset=False, update_info=BUCKET),
        rpc("finish_weight_update", reset=True, weight_version=LABEL),
        engine("set_weight_version", {"weight_version": LABEL}),
        engine("resume_generation", {}),
    ]


def test_an_engine_gives_up_joining_before_its_worker_ends_itself_however_it_was_started() -> None:
    _, worker = planned(DynamoLaunch(model="some/model")).components
    ends_s = float(texts(worker.environment)["DYN_RL_INIT_WEIGHTS_TIMEOUT_S"])
    join, *_ = session(admin())
    assert join[2]["init_info"]["timeout_s"] < ends_s == 30  # what one started by hand has


def test_the_sidecar_has_a_route_for_each_phase() -> None:
    assert session(admin("sidecar")) == [
        engine("update/init_weight_transfer_engine", {"init_info": {**INFO, "rank_offset": 1}}),
        engine("control/pause_generation", {"mode": "keep", "clear_cache": False}),
        engine("update/start_weight_update", {}),
        engine("update/update_weights", {"update_info": BUCKET}),
        engine("update/finish_weight_update", {"weight_version": LABEL}),
        engine("update/update_weight_version", {"new_version": LABEL}),
        engine("control/resume_generation", {}),
    ]


def test_the_collective_rpc_goes_to_the_engines_own_server() -> None:
    def own(method: str, **arguments: Any) -> tuple[str, str, dict[str, Any]]:
        return SERVER, "/collective_rpc", {"method": method, "args": [], "kwargs": arguments}

    assert session(admin("collective")) == [
        own("init_weight_transfer_engine", init_info={**INFO, "rank_offset": 1}),
        engine("control/pause_generation", {"mode": "keep", "clear_cache": False}),
        own("start_weight_update"),
        own("update_weights", update_info=BUCKET),
        own("finish_weight_update"),
        engine("update/update_weight_version", {"new_version": LABEL}),
        engine("control/resume_generation", {}),
    ]


def test_sglang_is_asked_by_its_own_names() -> None:
    assert session(admin("sglang")) == [
        engine(
            "init_weights_update_group",
            {
                "master_address": "127.0.0.1",
                "master_port": 1,
                "rank_offset": 1,
                "world_size": 3,
                "group_name": "genapi",
                "backend": "gloo",
            },
        ),
        engine("pause_generation", {"mode": "in_place"}),
        engine(
            "control/update_weights_from_distributed",
            {
                "names": ["w"],
                "dtypes": ["float32"],
                "shapes": [[2]],
                "group_name": "genapi",
                "flush_cache": False,
                "abort_all_requests": False,
                "weight_version": None,
                "load_format": "flattened_bucket",
            },
        ),
        engine(
            "control/update_weight_version", {"new_version": LABEL, "abort_all_requests": False}
        ),
        engine("continue_generation", {}),
    ]
    assert admin("sglang").receivers is not None


@pytest.mark.parametrize("family", ["vllm", "sidecar", "collective", "sglang"])
@pytest.mark.parametrize(
    ("answer", "observed"),
    [
        (reply({"status": "error", "message": "x"}), Observed.REJECTED),
        (reply({"success": False, "message": "x"}), Observed.REJECTED),
        (
            reply({"error": "Route not found", "message": "Route x not found"}, 404),
            Observed.REFUSED,
        ),
        (reply({"error": "Handler error", "message": "boom"}, 500), Observed.REJECTED),
        (HTTPReply(200, b"<html>", {}, "x"), Observed.LOST),
        (HTTPReply(502, b"", {}, "x"), Observed.LOST),
    ],
)
def test_success_is_a_2xx_whose_body_says_so(
    family: str, answer: HTTPReply, observed: Observed
) -> None:
    of = admin(family)
    flows = (of.pause(KEPT), of.label(LABEL), of.resume(KEPT), of.update(BUCKET, attachment=None))
    for flow in flows:
        assert answered(flow, answer).observed is observed


@pytest.mark.parametrize("results", [None, [], "x", [None, {"error": "x"}]])
def test_a_collective_call_counts_when_every_rank_says_nothing(results: Any) -> None:
    seen = answered(admin("collective").begin(), reply({"results": results}))
    assert seen.observed is Observed.REJECTED
    assert answered(admin("collective").begin(), reply({"results": [None] * 2})).done


RECORDED = recorded("vllm_admin_errors")
TEXTS = [json.loads(c.reply.body).get("message", "") for c in RECORDED if c.reply.body]


@pytest.mark.parametrize(
    ("text", "observed"),
    [
        (next(t for t in TEXTS if "must be paused" in t), Observed.REFUSED),
        (next(t for t in TEXTS if "no_such_rpc" in t), Observed.REFUSED),
        (next(t for t in TEXTS if "not configured" in t), Observed.REFUSED),
        (
            NO_LOADER,
            Observed.REJECTED,
        ),
        (
            "Worker failed with error 'the update group broke: the sender left', please check",
            Observed.PEER_LOST,
        ),
        (
            "start_weight_update called while a weight update is already active.",
            Observed.SESSION_OPEN,
        ),
        ("start_weight_update must be called before update_weights.", Observed.NO_SESSION),
        (
            "EngineCore encountered an issue. See stack trace (above) for the root cause.",
            Observed.DEAD,
        ),
    ],
)
def test_the_texts_of_a_worker_are_told_apart(text: str, observed: Observed) -> None:
    seen = answered(
        admin().update(BUCKET, attachment=None), reply({"status": "error", "message": text})
    )
    assert seen.observed is observed


def test_what_the_python_worker_refuses_unless_paused_confirms_a_pause() -> None:
    unpaused = next(c.reply for c in RECORDED if b"must be paused" in c.reply.body)
    no_method = next(c.reply for c in RECORDED if b"no_such_rpc" in c.reply.body)
    assert asked(admin().confirm()) == [rpc("check_health", reset=False)]
    assert answered(admin().confirm(), OK).facts == {"paused": True}
    # It asks whether it is paused before it looks for the method.
    assert answered(admin().confirm(), no_method).done
    assert answered(admin().confirm(), unpaused).observed is Observed.REFUSED


@pytest.mark.parametrize("family", ["sidecar", "collective"])
def test_the_sidecar_is_asked_several_times_whether_it_is_paused(family: str) -> None:
    assert len(asked(admin(family).confirm())) == 3
    seen = answered(admin(family).confirm(), reply({"is_paused": False}))
    assert (seen.observed, seen.facts) == (Observed.REFUSED, {"paused": False})


@pytest.mark.parametrize("family", ["vllm", "sidecar", "collective"])
def test_a_session_that_was_left_open_is_closed_empty_and_without_a_label(family: str) -> None:
    calls = asked(admin(family).heal())
    assert len(calls) == 2
    assert "finish_weight_update" in str(calls[1])
    assert LABEL not in str(calls)
    stopped = answered(admin(family).heal(), reply({"status": "error", "message": "x"}))
    assert stopped.observed is Observed.REJECTED


def test_a_read_gives_label_and_life() -> None:
    assert answered(admin().read(), OK).facts == {"label": LABEL, "paused": None, "healthy": True}
    seen = answered(admin("sidecar").read(), OK)
    assert seen.facts == {"label": LABEL, "paused": True, "healthy": True}
    dead = reply({"status": "ok", "alive": False, "message": "EngineDeadError", "version": None})
    assert answered(admin().read(), dead).observed is Observed.DEAD
    with pytest.raises(ReplyError, match="expected a version"):
        answered(admin("sglang").read(), reply({"status": "ok"}))


def test_an_engine_that_cannot_leave_its_group_is_left_in_it() -> None:
    no_method = next(c.reply for c in RECORDED if b"no_such_rpc" in c.reply.body)
    assert answered(admin().leave(), no_method).done
    bare = PROVIDER.administer(WorkerFacts(instance="1", details={"family": "vllm"}))
    assert asked(bare.leave()) == []
    for family in ("sidecar", "collective", "sglang"):
        assert asked(admin(family).leave()) == []


def test_nobody_digests_its_weights() -> None:
    seen = answered(admin().has_checksum(), OK)
    assert seen.observed is Observed.REFUSED
    assert "verify=('probe',)" in seen.detail


@pytest.mark.parametrize("family", ["vllm", "sidecar", "collective", "sglang"])
def test_every_plan_can_be_carried_out_or_is_refused_with_what_can(family: str) -> None:
    for mode, kv, cache in itertools.product(MODES, KVS, CACHES):
        if kv == "stale" and mode != "keep":
            continue
        plan = PausePlan(mode, kv, cache)
        try:
            admin(family).check(plan, facts(family), backend="gloo")
        except UnsupportedError as error:
            assert "use " in str(error)  # noqa: PT017 - either way is right
        else:
            assert asked(admin(family).pause(plan))


@pytest.mark.parametrize(
    ("change", "kind", "match"),
    [
        ({"capabilities": Capabilities(missing={"admin": "start it so"})}, UnsupportedError, "so"),
        ({"capabilities": Capabilities(missing={"weights": "no way"})}, UnsupportedError, "no way"),
        ({"capabilities": Capabilities(weight_backend="nccl")}, ConfigError, "by 'nccl'"),
        ({"role": Role.PREFILL}, UnsupportedError, "prefill worker"),
        ({"role": Role.DECODE}, UnsupportedError, "decode worker"),
    ],
)
def test_a_worker_that_cannot_be_published_to_says_why(
    change: dict[str, Any], kind: type[Exception], match: str
) -> None:
    with pytest.raises(kind, match=match):
        admin().check(PausePlan(), facts(**change), backend="gloo")


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("plan", [PausePlan("drain"), PausePlan("abort"), KEPT])
def test_split_workers_are_published_to_where_nothing_has_to_recompute(
    role: Role, plan: PausePlan
) -> None:
    admin().check(plan, facts(role=role), backend="gloo")


def of_files(family: str = "vllm", **more: Any) -> Admin:
    return PROVIDER.administer(facts(family, **more), files=True)


LOAD = {"model_path": "/w/r-1-1", "engine_rpc": "reload_weights"}
KWARGS = {"weights_path": "/w/r-1-1", "is_checkpoint_format": True}
COLLECTIVE = {"method": "reload_weights", "args": [], "kwargs": KWARGS}


@pytest.mark.parametrize(
    ("family", "load"),
    [
        ("vllm", engine("update_weights_from_disk", LOAD)),
        ("collective", (SERVER, "/collective_rpc", COLLECTIVE)),
        ("sidecar", (SERVER, "/collective_rpc", COLLECTIVE)),
    ],
)
def test_a_load_is_one_call_and_its_label_is_another(family: str, load: Any) -> None:
    of = of_files(family)
    assert not of.finish_sets_label
    for nothing in (of.begin(), of.finish(None), of.close(), of.leave()):
        assert asked(nothing) == []
    assert asked(of.update({"weights_path": "/w/r-1-1"}, attachment=None)) == [load]
    ((_, _, label),) = asked(of.label(LABEL))
    assert list(label.values()) == [LABEL]
    healed = asked(of.heal())
    assert "start_weight_update" in str(healed[0])
    assert "finish_weight_update" in str(healed[1])
    # All of it at one place, so that the session that is closed is the engine's that loads.
    assert {base for base, _, _ in healed} == {load[0]}


@pytest.mark.parametrize("name", ["vllm_admin_disk_failures", "vllm_admin_disk_without_sessions"])
def test_what_a_load_came_to_is_told_from_the_recorded_words(name: str) -> None:
    shown = {
        "seed1": {Observed.DONE, Observed.REFUSED, Observed.REJECTED},
        "gone": {Observed.UNREADABLE},
        "empty": {Observed.UNREADABLE},
        "first": {Observed.UNREADABLE},
        "last": {Observed.UNREADABLE},
    }
    loads = [c for c in recorded(name) if c.json.get("model_path")]
    assert loads
    for load in loads:
        info = {"weights_path": load.json["model_path"]}
        answer = answered(of_files().update(info, attachment=None), load.reply)
        assert answer.observed in shown[load.json["model_path"].removeprefix("/ckpt/")]
        named = answer.observed is Observed.UNREADABLE
        assert ("worker_dir=" in answer.detail) == named


def test_an_engine_without_sessions_cannot_be_healed_and_says_how_it_could() -> None:
    calls = recorded("vllm_admin_disk_without_sessions")
    start = next(c.reply for c in calls if "start_weight_update" in str(c.json))
    for of in (of_files(), of_files("collective"), admin()):
        answer = answered(of.heal(), start)
        assert answer.observed is Observed.REFUSED
        assert "--weight-transfer-config" in answer.detail
    unpaused = next(c.reply for c in RECORDED if b"must be paused" in c.reply.body)
    assert "--weight-transfer-config" not in answered(of_files().heal(), unpaused).detail


@pytest.mark.parametrize(
    ("family", "match"),
    [("sidecar", "HTTP server of its engine"), ("sglang", "use genapi.weights.Gloo")],
)
def test_a_family_that_cannot_be_told_to_load_is_refused_by_name(family: str, match: str) -> None:
    who = WorkerId(provider="dynamo", namespace="d", component="backend", instance="7")
    with pytest.raises(UnsupportedError, match=rf"backend/7 .*load files: .*{match}"):
        of_files(family, id=who, details={"family": family})


def test_a_worker_that_loads_files_needs_no_backend_but_the_route_for_it() -> None:
    able = Capabilities(weight_backend="nccl", missing={"weights": "no way"})
    of_files().check(PausePlan(), facts(capabilities=able), backend="files")
    for name in ("admin", "files"):
        unable = facts(capabilities=Capabilities(missing={name: "no way"}))
        with pytest.raises(UnsupportedError, match="no way"):
            of_files().check(PausePlan(), unable, backend="files")
    with pytest.raises(UnsupportedError, match="decode worker"):
        of_files().check(PausePlan(), facts(role=Role.DECODE), backend="files")


def test_an_attachment_goes_along_in_the_process() -> None:
    held = object()
    for family in ("vllm", "sidecar", "collective", "sglang"):
        _, calls = play(admin(family).update(BUCKET, attachment=held), lambda _: OK)
        sent: list[HTTPCall] = calls
        assert [call.attachment for call in sent] == [held]
