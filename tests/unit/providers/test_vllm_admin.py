"""Administration of one vLLM server: what is sent, and what the answers mean."""

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from genapi import ConfigError, ReplyError, UnsupportedError
from genapi.providers.base import Capabilities, WorkerFacts
from genapi.providers.shapes.caches import CACHES
from genapi.providers.vllm.admin import VLLMAdmin
from genapi.providers.vllm.verdicts import PATTERNS, ROWS, VERDICTS, answer_of
from genapi.publication.evidence import Answer, Observed, Op, Reached, Seen, verdicts_of
from genapi.publication.plan import PausePlan
from genapi.types.worker import Outcome, Recovery
from genapi.wire.flow import Flow
from genapi.wire.http import HTTPCall, HTTPReply
from tests.support.transcripts import exchange, exchanges, play

ADMIN = VLLMAdmin()
OK = HTTPReply(200, b"{}")


def run(flow: Flow[Answer], *replies: HTTPReply) -> tuple[Answer, list[str]]:
    """The answer, and the calls as text."""
    left = iter(replies)
    answer, made = play(flow, lambda _call: next(left))
    return answer, [str(call) for call in made]


def says(**fields: Any) -> HTTPReply:
    return HTTPReply(200, json.dumps(fields).encode())


@pytest.mark.case("ABORT-03")
@pytest.mark.parametrize(
    ("plan", "query"),
    [
        (PausePlan(), "mode=keep&clear_cache=true"),
        (PausePlan(prefix_cache="flush"), "mode=keep&clear_cache=true"),
        (PausePlan(in_flight_kv="stale"), "mode=keep&clear_cache=false"),
        (PausePlan(in_flight_kv="stale", prefix_cache="stale"), "mode=keep&clear_cache=false"),
        (PausePlan(mode="abort"), "mode=abort&clear_cache=true"),
        (PausePlan(mode="drain", prefix_cache="stale"), "mode=wait&clear_cache=false"),
        (PausePlan(mode="drain", prefix_cache="flush"), "mode=wait&clear_cache=true"),
    ],
)
def test_every_pause_names_its_mode_and_cache_policy_in_the_query(
    plan: PausePlan, query: str
) -> None:
    answer, made = run(ADMIN.pause(plan), exchange("vllm", "49c", "pause").reply)
    assert made == [f"POST /pause?{query}"]
    assert answer.done


@pytest.mark.parametrize(
    ("plan", "remedy"),
    [
        (PausePlan(prefix_cache="stale"), "prefix_cache='flush' or 'salt'"),
        (PausePlan(in_flight_kv="stale", prefix_cache="flush"), "prefix_cache='salt'"),
    ],
)
def test_a_plan_that_vllm_cannot_carry_out_is_refused_before_any_call(
    plan: PausePlan, remedy: str
) -> None:
    with pytest.raises(UnsupportedError, match=remedy):
        ADMIN.check(plan, facts(), backend="genapi_gloo")


def test_every_plan_has_a_row_for_its_caches() -> None:
    for mode in ("abort", "drain", "keep"):
        for kv in ("recompute", "stale") if mode == "keep" else ("recompute",):
            for cache in ("flush", "salt", "stale"):
                assert (mode == "keep", kv, cache) in CACHES


RESET = "POST /reset_prefix_cache?reset_running_requests=true&reset_external=true"


def test_a_plan_that_clears_is_carried_out_before_resuming() -> None:
    answer, made = run(ADMIN.resume(PausePlan()), says(success=True), says(status="resumed"))
    assert made == [RESET, "POST /resume"]
    assert answer.done


def test_nobody_resumes_over_caches_that_could_not_be_cleared() -> None:
    answer, made = run(ADMIN.resume(PausePlan()), *[says(success=False)] * 3)
    assert made == [RESET] * 3
    assert answer.observed is Observed.REFUSED


def test_a_plan_that_keeps_caches_only_resumes() -> None:
    _, made = run(ADMIN.resume(PausePlan(in_flight_kv="stale")), says(status="resumed"))
    assert made == ["POST /resume"]


def test_a_pause_is_confirmed_by_several_reads() -> None:
    answer, made = run(ADMIN.confirm(), *[says(is_paused=True)] * 3)
    assert made == ["GET /is_paused"] * 3
    assert (answer.done, answer.facts) == (True, {"paused": True})


@pytest.mark.case("ABORT-01")
def test_one_frontend_that_still_runs_spoils_the_confirmation() -> None:
    reads = [says(is_paused=True), says(is_paused=False), says(is_paused=True)]
    answer, _ = run(ADMIN.confirm(), *reads)
    assert (answer.observed, answer.facts) == (Observed.REFUSED, {"paused": False})
    assert "1 of 3" in answer.detail


def test_the_four_phases_of_an_update_are_vllms_own_calls() -> None:
    tensor = object()
    calls: list[HTTPCall] = []
    for flow in (
        ADMIN.begin(),
        ADMIN.update(
            {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}, attachment=tensor
        ),
        ADMIN.finish("genapi:r:1:1"),
        ADMIN.finish(None),
        ADMIN.label("genapi:r:1:1"),
        ADMIN.leave(),
    ):
        answer, made = play(flow, lambda _call: OK)
        assert answer.done
        calls += made
    assert [(c.path, c.body) for c in calls] == [
        ("/start_weight_update", None),
        (
            "/update_weights",
            b'{"update_info":{"names":["a"],"dtype_names":["float32"],"shapes":[[1]]}}',
        ),
        ("/finish_weight_update", b'{"weight_version":"genapi:r:1:1"}'),
        ("/finish_weight_update", None),
        ("/update_weight_version", b'{"new_version":"genapi:r:1:1"}'),
        ("/shutdown_weight_transfer_engine", None),
    ]
    assert calls[1].attachment is tensor


def test_reading_tells_label_pause_and_health() -> None:
    answer, _ = run(ADMIN.read(), HTTPReply(200), says(weight_version="x"), says(is_paused=True))
    assert answer == Answer(Observed.DONE, facts={"label": "x", "paused": True, "healthy": True})


def test_a_worker_whose_health_is_bad_is_dead() -> None:
    answer, _ = run(ADMIN.read(), HTTPReply(503), says(weight_version="x"), says(is_paused=True))
    assert answer.observed is Observed.DEAD


ALREADY = exchange("vllm", "42", "start twice").reply
NO_SESSION = exchange("vllm", "42", "finish without start").reply


@pytest.mark.case("WUP-05")
def test_healing_closes_the_session_that_was_left_open() -> None:
    answer, made = run(ADMIN.heal(), ALREADY, OK)
    assert made == ["POST /start_weight_update", "POST /finish_weight_update"]
    assert answer.done


def test_healing_a_dropped_session_opens_and_closes_an_empty_one() -> None:
    answer, made = run(ADMIN.heal(), OK, OK)
    assert len(made) == 2
    assert answer.done


def test_healing_a_dead_engine_stops_at_once() -> None:
    dead = HTTPReply(500, b'{"error":{"message":"EngineCore encountered an issue."}}')
    answer, made = run(ADMIN.heal(), dead)
    assert (answer.observed, len(made)) == (Observed.DEAD, 1)


@pytest.mark.case("WUP-05")
def test_closing_sends_no_label_and_is_sent_once() -> None:
    answer, made = run(ADMIN.close(), NO_SESSION)
    assert made == ["POST /finish_weight_update"]
    assert answer.observed is Observed.NO_SESSION


@pytest.mark.parametrize(
    ("number", "name", "op", "observed"),
    [
        ("42", "start twice", Op.BEGIN, Observed.SESSION_OPEN),
        ("42", "shutdown during a session", Op.JOIN, Observed.SESSION_OPEN),
        ("42", "update without start", Op.UPDATE, Observed.NO_SESSION),
        ("42", "finish without start but with a version", Op.FINISH, Observed.NO_SESSION),
        ("42", "update with mismatched lists -> session is dropped", Op.UPDATE, Observed.REFUSED),
        ("42", "init missing init_info", Op.JOIN, Observed.REFUSED),
        ("42", "init unknown field", Op.JOIN, Observed.REFUSED),
        ("42", "init no master listening (timeout_s=2)", Op.JOIN, Observed.PEER_LOST),
        ("42", "finish version non-string", Op.FINISH, Observed.REFUSED),
        ("48", "update without init", Op.UPDATE, Observed.REFUSED),
        ("48", "uid on a CPU worker", Op.JOIN, Observed.REJECTED),
        ("49", "update with an unknown parameter name", Op.UPDATE, Observed.REJECTED),
        ("49", "update with a wrong shape", Op.UPDATE, Observed.REJECTED),
        ("50", "no key: POST /start_weight_update", Op.BEGIN, Observed.REFUSED),
        ("46", "404 route", Op.PAUSE, Observed.REFUSED),
        ("31", "pause bad mode", Op.PAUSE, Observed.REFUSED),
    ],
)
def test_a_recorded_answer_shows_what_happened(
    number: str, name: str, op: Op, observed: Observed
) -> None:
    answer = answer_of(op, exchange("vllm", number, name).reply)
    assert answer.observed is observed
    assert answer.detail


def test_a_dead_engine_is_seen_in_every_recorded_answer_of_one() -> None:
    seen = [
        answer_of(Op.BEGIN, e.reply).observed
        for number in ("47", "49", "90")
        for e in exchanges("vllm", number)
        if b"EngineCore encountered" in e.body
    ]
    assert len(seen) > 3
    assert set(seen) == {Observed.DEAD}


def test_a_full_session_after_a_rejected_tensor_is_rejected_again() -> None:
    last = [e for e in exchanges("vllm", "49b") if e.path == "/update_weights"][-1]
    answer = answer_of(Op.UPDATE, last.reply)
    assert answer.observed is Observed.REJECTED
    assert answer.detail == "500: 'Parameter' object has no attribute 'weight_loader'"


@pytest.mark.parametrize(
    "text",
    [
        "the update group broke while 'lm_head.weight' and what goes with it was awaited",
        "there is no update group: it was never joined, or it broke earlier",
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer",
        "NCCL error: unhandled system error",
        "Timed out waiting 60000ms for recv operation to complete",
    ],
)
def test_a_transfer_whose_other_end_went_away_is_a_lost_peer(text: str) -> None:
    body = json.dumps({"error": {"message": f"Worker failed with error '{text}', please check"}})
    assert answer_of(Op.UPDATE, HTTPReply(500, body.encode())).observed is Observed.PEER_LOST
    assert answer_of(Op.FINISH, HTTPReply(500, body.encode())).observed is Observed.REJECTED


@pytest.mark.case("WUP-01")
@pytest.mark.parametrize("status", ["error", "failed"])
@pytest.mark.parametrize(
    "flow",
    [
        lambda: ADMIN.pause(PausePlan()),
        lambda: ADMIN.resume(PausePlan(in_flight_kv="stale")),
        lambda: ADMIN.join({"world_size": 2}, rank_offset=1, backend="genapi_gloo"),
        lambda: ADMIN.update({"names": []}, attachment=None),
    ],
    ids=["pause", "resume", "init", "update"],
)
def test_an_error_inside_a_200_is_an_error(flow: Callable[[], Flow[Answer]], status: str) -> None:
    answer, _ = run(flow(), says(status=status, message="Worker must be paused"))
    assert (answer.observed, answer.detail) == (Observed.REJECTED, "200: Worker must be paused")


@pytest.mark.parametrize("status", ["paused", "resumed", "ok", "success"])
def test_a_status_that_names_no_failure_is_none(status: str) -> None:
    assert answer_of(Op.PAUSE, says(status=status)).done


@pytest.mark.parametrize("status", [502, 504])
def test_an_answer_of_something_in_between_is_no_answer(status: int) -> None:
    assert answer_of(Op.FINISH, HTTPReply(status, b"<html>")).observed is Observed.LOST


def test_only_restarting_helps_after_a_rejected_tensor() -> None:
    verdict = VERDICTS[Seen(Op.UPDATE, Observed.REJECTED, Reached.SENT)]
    assert (verdict.outcome, verdict.recovery) == (Outcome.DIRTY, Recovery.RESTART_THEN_PUBLISH)


def test_closing_helps_after_a_lost_peer() -> None:
    verdict = VERDICTS[Seen(Op.UPDATE, Observed.PEER_LOST, Reached.SENT)]
    assert verdict.recovery is Recovery.CLOSE_THEN_REPUBLISH


def test_a_worker_that_was_asked_to_begin_is_untouched_only_if_that_was_not_sent_or_undone() -> (
    None
):
    untouched = {
        (row.op, row.observed)
        for row in ROWS
        if row.verdict.outcome is Outcome.UNTOUCHED and Reached.NOT_BEGUN not in row.reached
    }
    assert untouched == {(Op.BEGIN, Observed.NOT_SENT), (Op.CLOSE, Observed.DONE)}


def test_nothing_has_to_be_done_only_for_who_did_not_begin_or_was_probed() -> None:
    ready = {(row.op, row.observed, row.reached) for row in ROWS if row.verdict.recovery is None}
    assert ready == {
        (None, None, (Reached.NOT_BEGUN,)),
        (Op.PROBE, Observed.DONE, (Reached.HELD,)),
    }


def test_only_a_label_that_was_read_back_commits() -> None:
    for row in ROWS:
        committed = row.verdict.outcome is Outcome.COMMITTED
        assert not committed or (row.op in (Op.READ, Op.PROBE) and row.reached == (Reached.HELD,))


def test_every_claim_names_its_source() -> None:
    claims: Iterable[str] = [row.source for row in ROWS] + [pattern.source for pattern in PATTERNS]
    assert all(claim.startswith(("RUN", "READ", "RULE")) for claim in claims)


def test_rows_that_contradict_each_other_or_leave_something_open_are_refused() -> None:
    with pytest.raises(ValueError, match="two rows are about"):
        verdicts_of([*ROWS, ROWS[3]])
    with pytest.raises(ValueError, match="no row for whatever else is seen when held"):
        verdicts_of(row for row in ROWS if (row.op, row.reached) != (None, (Reached.HELD,)))


def facts(
    *, asleep: bool = False, backend: str | None = "genapi_gloo", **missing: str
) -> WorkerFacts:
    return WorkerFacts(
        instance="1",
        asleep=asleep,
        capabilities=Capabilities(weight_backend=backend, missing=missing),
    )


def test_a_worker_that_is_ready_passes() -> None:
    ADMIN.check(PausePlan(), facts(), backend="genapi_gloo")


@pytest.mark.case("WUP-16")
def test_a_sleeping_worker_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(ConfigError, match="/wake_up"):
        ADMIN.check(PausePlan(), facts(asleep=True), backend="genapi_gloo")


@pytest.mark.parametrize("backend", [None, "nccl"])
def test_a_worker_with_another_backend_is_told_the_flag(backend: str | None) -> None:
    with pytest.raises(ConfigError, match=r"--weight-transfer-config.*genapi_gloo"):
        ADMIN.check(PausePlan(), facts(backend=backend), backend="genapi_gloo")


def test_a_worker_without_admin_routes_is_told_the_variable() -> None:
    with pytest.raises(UnsupportedError, match="VLLM_SERVER_DEV_MODE"):
        ADMIN.check(PausePlan(), facts(admin="set VLLM_SERVER_DEV_MODE=1"), backend="genapi_gloo")


def test_a_checksum_tells_each_parameter_on_each_rank_and_how_many_show_nothing() -> None:
    answer, made = run(ADMIN.checksum(), exchange("vllm", "20", "checksum before").reply)
    assert made == ["POST /weight_checker"]
    assert answer.done
    assert answer.facts["topology"] == "dp0:pp0:pcp0:tp0"
    sums = answer.facts["checksums"]
    assert isinstance(sums, dict)
    assert len(sums) == 17
    assert answer.facts["blind"] == 8


def test_whether_there_is_a_checksum_is_asked_without_the_work_of_one() -> None:
    there, made = run(ADMIN.has_checksum(), HTTPReply(405, b'{"detail":"Method Not Allowed"}'))
    assert made == ["GET /weight_checker"]
    assert there.done
    missing, _ = run(ADMIN.has_checksum(), HTTPReply(404, b'{"detail":"Not Found"}'))
    assert missing.observed is Observed.REFUSED
    assert "vLLM 0.32" in missing.detail


@pytest.mark.parametrize("sums", ["text", ["x"], None])
def test_checksums_that_cannot_be_read_are_refused(sums: object) -> None:
    with pytest.raises(ReplyError, match="checksums"):
        run(ADMIN.checksum(), says(checksums=sums))


def test_an_engine_that_died_at_its_checksum_is_dead() -> None:
    answer, _ = run(ADMIN.checksum(), HTTPReply(500, b'{"error":"EngineDeadError"}'))
    assert answer.observed is Observed.DEAD
