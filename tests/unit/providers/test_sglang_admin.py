"""Administration of one SGLang server: what is sent, and what the answers mean."""

import json
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any, get_args

import pytest

from genapi import ConfigError, ReplyError, UnsupportedError
from genapi.providers.base import Capabilities, WorkerFacts
from genapi.providers.sglang.admin import BACKENDS, CACHES, GROUP, Caches, SGLangAdmin
from genapi.providers.sglang.verdicts import PATTERNS, ROWS, VERDICTS, answer_of
from genapi.publication.evidence import Answer, Observed, Op, Reached, Seen
from genapi.publication.plan import InFlightKV, PauseMode, PausePlan, PrefixCache
from genapi.types.ids import Role
from genapi.types.worker import Outcome, Recovery
from genapi.wire.flow import Flow
from genapi.wire.http import HTTPCall, HTTPReply
from tests.support.sglang_wire import URL, load, recorded
from tests.support.transcripts import play

ADMIN = SGLangAdmin()
OK = HTTPReply(200, b'{"success":true,"message":"Success"}')
GONE = HTTPReply(404, b'{"detail":"Not Found"}')
READY, NOT_READY = HTTPReply(200), HTTPReply(503)
FLUSHED = recorded("flush_cache")
BUSY = recorded("flush_cache_busy")


def run(flow: Flow[Answer], *replies: HTTPReply) -> tuple[Answer, list[str]]:
    """The answer, and the calls as text, with their bodies."""
    left = iter(replies)
    answer, made = play(flow, lambda _call: next(left))
    assert not list(left)
    return answer, [f"{call} {call.body.decode()}" if call.body else str(call) for call in made]


def says(**fields: Any) -> HTTPReply:
    return HTTPReply(200, json.dumps(fields).encode())


def paused(mode: str) -> str:
    return f'POST /pause_generation {{"mode":"{mode}"}}'


CONTINUE = 'POST /continue_generation {"torch_empty_cache":true}'
FLUSH = "POST /flush_cache"


# ------------------------------------------------------------------------------------- the pause


@pytest.mark.case("ABORT-03")
@pytest.mark.parametrize(
    ("plan", "calls"),
    [
        (PausePlan(), [paused("retract"), FLUSH]),
        (PausePlan(prefix_cache="flush"), [paused("retract"), FLUSH]),
        (PausePlan(in_flight_kv="stale"), [paused("in_place")]),
        (PausePlan(in_flight_kv="stale", prefix_cache="stale"), [paused("in_place")]),
        (PausePlan(mode="abort"), [paused("abort"), f"{FLUSH}?timeout=10"]),
        (PausePlan(mode="abort", prefix_cache="flush"), [paused("abort"), f"{FLUSH}?timeout=10"]),
        (PausePlan(mode="abort", prefix_cache="stale"), [paused("abort")]),
    ],
)
def test_every_pause_names_its_mode_and_flushes_by_a_call_of_its_own(
    plan: PausePlan, calls: list[str]
) -> None:
    replies = [READY, recorded("weights_03_pause_retract"), FLUSHED]
    answer, made = run(ADMIN.pause(plan), *replies[: len(calls) + 1])
    assert made == ["GET /ready", *calls]
    assert answer.done


@pytest.mark.parametrize(
    ("plan", "remedy"),
    [
        (PausePlan(prefix_cache="stale"), "prefix_cache='flush' or 'salt'"),
        (PausePlan(in_flight_kv="stale", prefix_cache="flush"), "prefix_cache='salt'"),
        (PausePlan(mode="drain"), "mode='keep'.*mode='abort'"),
        (PausePlan(mode="drain", prefix_cache="flush"), "mode='keep'"),
        (PausePlan(mode="drain", prefix_cache="stale"), "mode='keep'"),
    ],
)
def test_a_plan_that_sglang_cannot_carry_out_is_refused_before_any_call(
    plan: PausePlan, remedy: str
) -> None:
    with pytest.raises(UnsupportedError, match=remedy):
        ADMIN.check(plan, facts(), backend="nccl")
    with pytest.raises(UnsupportedError, match=remedy):
        next(ADMIN.pause(plan))


def test_every_plan_has_a_row_for_its_caches() -> None:
    plans = product(get_args(PauseMode), get_args(InFlightKV), get_args(PrefixCache))
    possible = {plan for plan in plans if plan[0] == "keep" or plan[1] == "recompute"}
    assert CACHES.keys() == possible


def test_whatever_recomputes_finds_an_empty_cache_and_what_goes_on_in_place_keeps_it() -> None:
    for (_, in_flight_kv, prefix_cache), row in CACHES.items():
        if isinstance(row, Caches):
            assert row.flush == (prefix_cache != "stale" and in_flight_kv == "recompute")
            assert (row.mode == "in_place") == (in_flight_kv == "stale")


def test_a_pause_whose_flush_is_refused_is_taken_back_where_it_served_before() -> None:
    answer, made = run(ADMIN.pause(PausePlan()), READY, OK, BUSY, BUSY, BUSY, OK)
    assert made == ["GET /ready", paused("retract"), *[FLUSH] * 3, CONTINUE]
    assert answer.observed is Observed.REFUSED
    assert "mode='abort'" in answer.detail


@pytest.mark.parametrize("before", [NOT_READY, GONE], ids=["paused", "does not say"])
def test_a_pause_that_may_be_somebody_elses_is_not_taken_back(before: HTTPReply) -> None:
    answer, made = run(ADMIN.pause(PausePlan()), before, OK, BUSY, BUSY, BUSY)
    assert CONTINUE not in made
    assert answer.observed is Observed.REFUSED


def test_what_is_paused_in_place_is_retracted_before_it_is_aborted() -> None:
    plan = PausePlan(mode="abort", prefix_cache="stale")
    answer, made = run(ADMIN.pause(plan), NOT_READY, OK, OK)
    assert made == ["GET /ready", paused("retract"), paused("abort")]
    assert answer.done


def test_a_refused_pause_flushes_nothing() -> None:
    answer, made = run(ADMIN.pause(PausePlan()), READY, recorded("error_pause_bad_mode"))
    assert len(made) == 2
    assert answer.observed is Observed.REFUSED


def test_a_pause_is_confirmed_by_several_reads_of_two_flags() -> None:
    answer, made = run(ADMIN.confirm(), *[recorded("ready_while_paused"), HTTPReply(200)] * 3)
    assert made == ["GET /ready", "GET /ping"] * 3
    assert answer == Answer(Observed.DONE, facts={"paused": True})


@pytest.mark.case("ABORT-01")
def test_one_read_that_says_it_serves_spoils_the_confirmation() -> None:
    reads = [NOT_READY, READY, READY, READY, NOT_READY, READY]
    answer, _ = run(ADMIN.confirm(), *reads)
    assert (answer.observed, answer.facts) == (Observed.REFUSED, {"paused": False})
    assert "1 of 3" in answer.detail


def test_a_server_that_was_asked_for_its_health_while_paused_is_paused_all_the_same() -> None:
    answer, _ = run(ADMIN.confirm(), *[NOT_READY, NOT_READY] * 3)
    assert (answer.done, answer.facts) == (True, {"paused": True})
    assert "/health" in answer.detail


def test_a_release_without_the_route_is_taken_at_the_pauses_own_word() -> None:
    answer, _ = run(ADMIN.confirm(), *[GONE, HTTPReply(200)] * 3)
    assert (answer.done, answer.facts) == (True, {"paused": True})
    assert "no /ready" in answer.detail


def test_a_refused_read_confirms_nothing() -> None:
    refused = HTTPReply(401, b'{"error":"Unauthorized"}', {}, f"{URL}/ping")
    answer, _ = run(ADMIN.confirm(), NOT_READY, refused, *[NOT_READY, READY] * 2)
    assert answer.observed is Observed.REFUSED
    assert "check api_key" in answer.detail


def test_resuming_is_one_call_because_the_pause_flushed() -> None:
    answer, made = run(ADMIN.resume(PausePlan()), recorded("weights_07_continue"))
    assert made == [CONTINUE]
    assert answer.done


# --------------------------------------------------------------------------------- the transfer

NCCL = {"master_address": "10.0.0.1", "master_port": 29611, "world_size": 2, "packed": True}


def test_joining_destroys_what_an_earlier_trainer_left_and_names_the_backend() -> None:
    for left in (recorded("weights_12_destroy"), recorded("weights_13_destroy_again")):
        answer, made = run(
            ADMIN.join(NCCL, rank_offset=1, backend="gloo"),
            left,
            recorded("weights_01_init_group_gloo"),
        )
        assert answer.done
        init = (
            'POST /init_weights_update_group {"master_address":"10.0.0.1","master_port":29611,'
            f'"rank_offset":1,"world_size":2,"group_name":"{GROUP}","backend":"gloo"}}'
        )
        assert made == [f'POST /destroy_weights_update_group {{"group_name":"{GROUP}"}}', init]


def test_a_join_sends_the_fields_of_the_recorded_one() -> None:
    _, made = play(ADMIN.join(NCCL, rank_offset=1, backend="gloo"), lambda _call: OK)
    sent = load("weights_01_init_group_gloo")["request"]["json"]
    assert json.loads(made[-1].body or b"").keys() == sent.keys()


def test_joining_by_the_embedded_backend_passes_on_what_is_compared() -> None:
    info = {"world_size": 3, "digest": "abc"}
    _, made = play(ADMIN.join(info, rank_offset=2, backend="genapi_memory"), lambda _call: OK)
    sent = json.loads(made[-1].body or b"")
    assert (sent["world_size"], sent["rank_offset"], sent["digest"]) == (3, 2, "abc")
    assert sent["backend"] == "genapi_memory"


def test_a_join_that_may_not_destroy_goes_no_further() -> None:
    refused = HTTPReply(401, b'{"error":"Unauthorized"}', {}, f"{URL}/destroy_weights_update_group")
    answer, made = run(ADMIN.join(NCCL, rank_offset=1, backend="nccl"), refused)
    assert len(made) == 1
    assert answer.observed is Observed.REFUSED
    assert "admin_api_key" in answer.detail


def test_an_update_is_a_session_whose_label_comes_last_and_aborts_nothing() -> None:
    tensor = object()
    info = {
        "names": ["a", "b"],
        "dtype_names": ["torch.bfloat16", "float32"],
        "shapes": [[1], [2, 2]],
    }
    calls: list[HTTPCall] = []
    for flow in (
        ADMIN.begin(),
        ADMIN.update(info, attachment=tensor),
        ADMIN.finish("genapi:r:1:1"),
        ADMIN.label("genapi:r:1:1"),
        ADMIN.leave(),
    ):
        answer, made = play(flow, lambda _call: OK)
        assert answer.done
        calls += made
    assert [(c.path, c.body and json.loads(c.body)) for c in calls] == [
        ("/begin_weight_update", {}),
        (
            "/update_weights_from_distributed",
            {
                "names": ["a", "b"],
                "dtypes": ["bfloat16", "float32"],
                "shapes": [[1], [2, 2]],
                "group_name": GROUP,
                "flush_cache": False,
                "abort_all_requests": False,
                "weight_version": None,
                "load_format": None,
            },
        ),
        ("/end_weight_update", {}),
        (
            "/update_weight_version",
            {"new_version": "genapi:r:1:1", "abort_all_requests": False},
        ),
        ("/destroy_weights_update_group", {"group_name": GROUP}),
    ]
    assert calls[1].attachment is tensor
    assert (ADMIN.finish_sets_label, ADMIN.marks) == (False, True)


def test_what_the_transport_says_of_the_form_of_a_bucket_is_passed_on() -> None:
    info = {
        "names": ["a"],
        "dtype_names": ["float32"],
        "shapes": [[1]],
        "packed": True,
        "data": ["AAAA"],
        "digest": "x:y",
    }
    _, made = play(ADMIN.update(info, attachment=None), lambda _call: OK)
    sent = json.loads(made[0].body or b"")
    assert (sent["load_format"], sent["data"], sent["digest"]) == (
        "flattened_bucket",
        ["AAAA"],
        "x:y",
    )


@pytest.mark.parametrize("name", ["begin", "finish", "close", "heal"])
def test_a_release_without_sessions_has_nothing_to_open_or_close(name: str) -> None:
    answer, made = run(FLOWS[name](), GONE)
    assert len(made) == 1
    assert answer.done


NO_SESSION = recorded("weights_10_end_without_session")


@pytest.mark.case("WUP-05")
def test_healing_closes_a_session_and_needs_none() -> None:
    for reply in (recorded("weights_06_end"), NO_SESSION):
        answer, made = run(ADMIN.heal(), reply)
        assert made == ["POST /end_weight_update {}"]
        assert answer.done


@pytest.mark.case("WUP-05")
def test_closing_sends_no_label_and_is_sent_once() -> None:
    answer, made = run(ADMIN.close(), NO_SESSION)
    assert made == ["POST /end_weight_update {}"]
    assert answer.observed is Observed.NO_SESSION


def test_a_group_that_is_gone_was_left() -> None:
    answer, _ = run(ADMIN.leave(), recorded("weights_13_destroy_again"))
    assert answer.done


# ------------------------------------------------------------------------------------ the reads


def test_reading_tells_label_pause_and_health() -> None:
    model = recorded("model_info")
    answer, made = run(ADMIN.read(), HTTPReply(200), NOT_READY, model)
    assert made == ["GET /ping", "GET /ready", "GET /model_info"]
    assert answer == Answer(
        Observed.DONE, facts={"label": "default", "paused": True, "healthy": True}
    )


def test_a_server_that_calls_itself_unhealthy_is_not_dead() -> None:
    answer, _ = run(ADMIN.read(), NOT_READY, NOT_READY, says(weight_version="x"))
    assert answer == Answer(Observed.DONE, facts={"label": "x", "paused": None, "healthy": False})


@pytest.mark.parametrize("model", [HTTPReply(500, b"Internal Server Error"), HTTPReply(503)])
def test_a_label_that_cannot_be_read_is_no_label(model: HTTPReply) -> None:
    answer, _ = run(ADMIN.read(), HTTPReply(200), READY, model)
    assert not answer.done
    assert not answer.facts


def test_a_model_without_a_label_breaks_the_contract() -> None:
    with pytest.raises(ReplyError, match="weight_version"):
        run(ADMIN.read(), HTTPReply(200), READY, says(model_path="x"))


def test_a_checksum_tells_each_parameter_on_each_rank() -> None:
    answer, made = run(ADMIN.checksum(), recorded("weights_checker"))
    assert made == ['POST /weights_checker {"action":"checksum"}']
    assert answer.facts["topology"] == "tp0/1:pp0/1:dp0/1"
    assert answer.facts["checksums"] == {
        "tp0/1:pp0/1:dp0/1:model.embed_tokens.weight": "d29644bd77baa31d",
        "tp0/1:pp0/1:dp0/1:model.layers.0.self_attn.qkv_proj.weight": "4d960b1de63965b6",
    }
    assert answer.facts["blind"] == 0


def test_ranks_without_a_place_are_numbered() -> None:
    ranks = [{"checksums": {"a": "1"}}, {"checksums": {"a": "2"}, "parallelism_info": []}]
    answer, _ = run(ADMIN.checksum(), says(success=True, ranks=ranks))
    assert answer.facts["checksums"] == {"rank0:a": "1", "rank1:a": "2"}


@pytest.mark.parametrize("ranks", ["text", [], [1], [{"checksums": None}], None])
def test_checksums_that_cannot_be_read_are_refused(ranks: object) -> None:
    with pytest.raises(ReplyError, match="checksums"):
        run(ADMIN.checksum(), says(ranks=ranks))


def test_a_checksum_that_failed_is_no_checksum() -> None:
    answer, _ = run(ADMIN.checksum(), says(success=False, message="x"))
    assert not answer.done


def test_whether_there_is_a_checksum_is_asked_without_the_work_of_one() -> None:
    there, made = run(ADMIN.has_checksum(), HTTPReply(405, b'{"detail":"Method Not Allowed"}'))
    assert made == ["PUT /weights_checker"]
    assert there.done
    missing, _ = run(ADMIN.has_checksum(), GONE)
    assert missing.observed is Observed.REFUSED
    assert "verify=('probe',)" in missing.detail
    refused, _ = run(ADMIN.has_checksum(), HTTPReply(401, b'{"error":"Unauthorized"}'))
    assert refused.observed is Observed.REFUSED


# ------------------------------------------------------------------------------------- the keys

USER_ROUTES = {"/ready", "/ping", "/model_info"}


FLOWS: dict[str, Callable[[], Flow[Answer]]] = {
    "join": lambda: ADMIN.join(NCCL, rank_offset=1, backend="nccl"),
    "pause": lambda: ADMIN.pause(PausePlan()),
    "confirm": ADMIN.confirm,
    "heal": ADMIN.heal,
    "begin": ADMIN.begin,
    "update": lambda: ADMIN.update({"names": [], "dtype_names": [], "shapes": []}, attachment=None),
    "finish": lambda: ADMIN.finish(None),
    "label": lambda: ADMIN.label("x"),
    "read": ADMIN.read,
    "resume": lambda: ADMIN.resume(PausePlan()),
    "close": ADMIN.close,
    "leave": ADMIN.leave,
}


@pytest.mark.case("AUTH-01")
@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS.keys())
def test_every_call_asks_for_the_key_that_its_route_takes(
    flow: Callable[[], Flow[Answer]],
) -> None:
    def answer(call: HTTPCall) -> HTTPReply:
        return says(weight_version="x") if call.path == "/model_info" else OK

    _, made = play(flow(), answer)
    assert {c.path: c.grant for c in made} == {
        c.path: "data" if c.path in USER_ROUTES else "admin" for c in made
    }


# --------------------------------------------------------------------------------- the evidence


@pytest.mark.parametrize(
    ("name", "op", "observed"),
    [
        ("weights_02_update_without_session", Op.UPDATE, Observed.NO_SESSION),
        ("weights_04b_begin_twice", Op.BEGIN, Observed.SESSION_OPEN),
        ("weights_10_end_without_session", Op.FINISH, Observed.NO_SESSION),
        ("weights_11_update_unknown_group", Op.UPDATE, Observed.REFUSED),
        ("weights_14_init_same_name_again", Op.JOIN, Observed.REFUSED),
        ("weights_16_wrong_shape", Op.UPDATE, Observed.REJECTED),
        ("weights_17_in_place_flush_true_fails", Op.UPDATE, Observed.REJECTED),
        ("weights_19_trainer_dies_before_broadcast", Op.UPDATE, Observed.PEER_LOST),
        ("error_init_missing_fields", Op.JOIN, Observed.REFUSED),
        ("error_init_weights_update_group_dp2", Op.JOIN, Observed.REJECTED),
        ("error_pause_bad_mode", Op.PAUSE, Observed.REFUSED),
        ("auth_admin_route_user_key", Op.LABEL, Observed.REFUSED),
        ("error_404", Op.PAUSE, Observed.REFUSED),
    ],
)
def test_a_recorded_answer_shows_what_happened(name: str, op: Op, observed: Observed) -> None:
    answer = answer_of(op, recorded(name))
    assert answer.observed is observed
    assert answer.detail


@pytest.mark.parametrize(
    "name",
    [
        "weights_01_init_group_gloo",
        "weights_03_pause_retract",
        "weights_04_begin",
        "weights_05_update_distributed",
        "weights_06_end",
        "weights_07_continue",
        "weights_09_update_flattened_bucket",
        "weights_15_unknown_param_name",
        "update_weight_version",
        "tp2_update",
    ],
)
def test_a_recorded_success_is_one_an_unknown_name_among_them(name: str) -> None:
    assert answer_of(Op.UPDATE, recorded(name)).done


@pytest.mark.case("WUP-01")
@pytest.mark.parametrize(
    "fields",
    [{"success": False, "message": "x"}, {"error": "x"}, {"status": "error"}, {"status": "failed"}],
)
def test_an_error_inside_a_200_is_an_error(fields: dict[str, Any]) -> None:
    assert not answer_of(Op.UPDATE, says(**fields)).done


@pytest.mark.parametrize("op", [Op.BEGIN, Op.UPDATE, Op.FINISH, Op.CLOSE, Op.HEAL])
def test_a_refusal_that_nobody_knows_may_have_touched_the_weights(op: Op) -> None:
    unknown = HTTPReply(400, b'{"success":false,"message":"something new"}')
    assert answer_of(op, unknown).observed is Observed.REJECTED
    assert answer_of(Op.LABEL, unknown).observed is Observed.REFUSED


@pytest.mark.parametrize("status", [502, 504])
def test_an_answer_of_something_in_between_is_no_answer(status: int) -> None:
    assert answer_of(Op.FINISH, HTTPReply(status, b"<html>")).observed is Observed.LOST
    assert answer_of(Op.FINISH, HTTPReply(200, b"<html>")).observed is Observed.LOST


@pytest.mark.parametrize("observed", [Observed.REFUSED, Observed.REJECTED, Observed.PEER_LOST])
def test_a_failed_update_leaves_dirty_weights_that_a_new_session_heals(observed: Observed) -> None:
    verdict = VERDICTS[Seen(Op.UPDATE, observed, Reached.SENT)]
    assert (verdict.outcome, verdict.recovery) == (Outcome.DIRTY, Recovery.CLOSE_THEN_REPUBLISH)


def test_a_label_that_was_not_set_leaves_a_closed_session() -> None:
    verdict = VERDICTS[Seen(Op.LABEL, None, Reached.SENT)]
    assert (verdict.outcome, verdict.recovery) == (Outcome.UNKNOWN, Recovery.REPUBLISH)


def test_nothing_but_an_unsent_begin_leaves_a_worker_untouched_that_was_asked_to_begin() -> None:
    untouched = [
        (row.op, row.observed)
        for row in ROWS
        if row.verdict.outcome is Outcome.UNTOUCHED and Reached.NOT_BEGUN not in row.reached
    ]
    assert untouched == [(Op.BEGIN, Observed.NOT_SENT)]


def test_every_claim_names_its_source() -> None:
    claims: Iterable[str] = [row.source for row in ROWS] + [pattern.source for pattern in PATTERNS]
    assert all(claim.startswith(("RUN", "READ", "RULE")) for claim in claims)


# -------------------------------------------------------------------------------- the preflight


def facts(role: Role = Role.UNIFIED, **missing: str) -> WorkerFacts:
    return WorkerFacts(instance="1", role=role, capabilities=Capabilities(missing=missing))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_worker_that_is_ready_passes(backend: str) -> None:
    ADMIN.check(PausePlan(), facts(), backend=backend)


def test_a_topology_that_cannot_work_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedError, match="cannot receive weights: its --dp-size is 2"):
        ADMIN.check(PausePlan(), facts(weights="its --dp-size is 2"), backend="nccl")


def test_a_prefill_worker_cannot_recompute_what_it_is_in_the_middle_of() -> None:
    prefill = facts(Role.PREFILL)
    with pytest.raises(UnsupportedError, match="mode='abort' or in_flight_kv='stale'"):
        ADMIN.check(PausePlan(), prefill, backend="nccl")
    ADMIN.check(PausePlan(mode="abort"), prefill, backend="nccl")
    ADMIN.check(PausePlan(in_flight_kv="stale"), prefill, backend="nccl")
    ADMIN.check(PausePlan(), facts(Role.DECODE), backend="nccl")


def test_a_backend_that_sglang_lacks_is_refused_with_those_it_has() -> None:
    with pytest.raises(ConfigError, match="nccl, gloo"):
        ADMIN.check(PausePlan(), facts(), backend="genapi_gloo")
