"""What a publication asks next, and what it concludes, from scripted answers."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from genapi.providers.vllm.verdicts import VERDICTS
from genapi.publication.evidence import Answer, Observed, Op, Reached, Seen, Verdict
from genapi.publication.table import Act, Phase
from genapi.publication.transaction import (
    ActDone,
    Acted,
    ActFailed,
    Answered,
    Ask,
    Broke,
    Cancelled,
    Command,
    Cut,
    Progress,
    Transaction,
    advance,
    begin,
    conclude,
    fence,
)
from genapi.types.ids import WorkerId
from genapi.types.policy import PolicyVersion
from genapi.types.worker import Evidence, Fence, FenceStrength, Outcome, Recovery

OLD = PolicyVersion(run="r", step=2).label
NEW = PolicyVersion(run="r", step=3).label
A, B = (WorkerId(provider="vllm", instance=name) for name in "ab")
STRANGER = WorkerId(provider="vllm", instance="c")
DONE = Answer(Observed.DONE)
LOST = Answer(Observed.LOST)
DEAD = Answer(Observed.DEAD)

Script = Mapping[tuple[Op, WorkerId], Answer]


def shown(label: str, *, paused: bool = False) -> Answer:
    return Answer(Observed.DONE, facts={"label": label, "paused": paused})


GOOD: Mapping[Op, Answer] = {
    Op.INSPECT: shown(OLD),
    Op.READ: shown(NEW),
    Op.PROBE: shown(NEW),
}


def transaction(
    *,
    fences: Mapping[WorkerId, Fence] | None = None,
    acknowledged: bool = False,
    finish_sets_label: bool = True,
    marks: bool = True,
) -> Transaction:
    return Transaction(
        label=NEW,
        workers={worker: Progress(fence=(fences or {}).get(worker)) for worker in (A, B)},
        acknowledged=acknowledged,
        finish_sets_label=finish_sets_label,
        marks=marks,
    )


def three() -> Transaction:
    return replace(transaction(), workers={w: Progress() for w in (A, B, STRANGER)})


class Played:
    """One publication whose workers answer as the script says, and well where it says nothing."""

    def __init__(
        self,
        script: Script,
        *,
        tx: Transaction | None = None,
        fails: Act | None = None,
        cancel_in: Phase | None = None,
    ) -> None:
        self.asked: list[tuple[Op, WorkerId]] = []
        self.phases: list[Phase] = []
        self.tx, commands = begin(tx or transaction())
        todo: list[Command] = list(commands)
        while not self.tx.ended:
            if self.tx.phase not in self.phases:
                self.phases.append(self.tx.phase)
                if self.tx.phase is cancel_in:
                    self.tx, commands = advance(self.tx, Cancelled())
                    todo += commands
            command = todo.pop(0)
            match command:
                case Ask(worker, op):
                    self.asked.append((op, worker))
                    answer = script.get((op, worker), GOOD.get(op, DONE))
                    self.tx, commands = advance(self.tx, Answered(worker, op, answer))
                case Acted(act):
                    event = ActFailed(act, "no") if act is fails else ActDone(act)
                    self.tx, commands = advance(self.tx, event)
                case _:
                    commands = ()
            todo += commands

    def verdict(self, worker: WorkerId) -> Verdict:
        return conclude(self.tx, self.tx.workers[worker], VERDICTS)

    def fence(self, worker: WorkerId) -> Fence | None:
        return fence(self.tx, self.tx.workers[worker], self.verdict(worker))


def test_a_worker_that_died_in_the_session_is_asked_nothing_more() -> None:
    played = Played({(Op.BEGIN, B): DEAD})
    later = played.asked[played.asked.index((Op.BEGIN, B)) + 1 :]
    assert later == [(Op.CLOSE, A), (Op.READ, A)]
    assert played.verdict(B).recovery is Recovery.RESTART_THEN_PUBLISH


def test_an_empty_session_that_was_closed_again_leaves_its_worker_untouched() -> None:
    played = Played({(Op.BEGIN, B): LOST, (Op.READ, A): shown(OLD)})
    assert played.verdict(A) == Verdict(
        Outcome.UNTOUCHED, Evidence.SESSION_CLOSED_EMPTY, Recovery.REPUBLISH
    )
    barrier = played.fence(A)
    assert barrier is not None
    assert barrier.strength is FenceStrength.PAUSED


def test_a_session_that_was_closed_with_a_part_of_the_weights_leaves_its_worker_dirty() -> None:
    played = Played({(Op.READ, A): shown(OLD)}, fails=Act.SEND)
    assert (Op.UPDATE, A) in played.asked
    assert played.verdict(A) == Verdict(Outcome.DIRTY, Evidence.OTHER_LABEL, Recovery.REPUBLISH)


@pytest.mark.parametrize(
    ("read", "evidence"),
    [
        (LOST, Evidence.NO_ANSWER),
        (Answer(Observed.REFUSED), Evidence.NO_ANSWER),
        (shown(OLD), Evidence.OTHER_LABEL),
    ],
)
def test_a_session_that_may_be_open_is_unknown_by_what_was_read_if_anything_was(
    read: Answer, evidence: Evidence
) -> None:
    script = {(Op.CLOSE, A): LOST, (Op.READ, A): read}
    played = Played(script, cancel_in=Phase.TRANSFER)
    assert played.verdict(A) == Verdict(Outcome.UNKNOWN, evidence, Recovery.CLOSE_THEN_REPUBLISH)


def test_a_close_that_fails_is_not_taken_for_one_that_closed() -> None:
    no = Answer(Observed.NO_SESSION)
    played = Played({(Op.CLOSE, A): no, (Op.READ, A): shown(OLD)}, fails=Act.SEND)
    assert played.verdict(A).outcome is Outcome.UNKNOWN


@pytest.mark.parametrize("update", [DONE, LOST, Answer(Observed.PEER_LOST)])
def test_a_session_that_could_not_be_closed_for_a_bad_tensor_needs_a_restart(
    update: Answer,
) -> None:
    bad = Answer(Observed.REJECTED, "weight_loader")
    script = {(Op.UPDATE, A): update, (Op.CLOSE, A): bad, (Op.READ, A): shown(OLD)}
    played = Played(script, fails=Act.SEND)
    assert played.verdict(A) == Verdict(
        Outcome.DIRTY, Evidence.REJECTED, Recovery.RESTART_THEN_PUBLISH
    )


def test_a_worker_that_dies_after_it_was_resumed_is_fenced_as_dead() -> None:
    played = Played({(Op.PROBE, A): DEAD})
    barrier = played.fence(A)
    assert barrier is not None
    assert (barrier.strength, barrier.recovery) == (
        FenceStrength.DEAD,
        Recovery.RESTART_THEN_PUBLISH,
    )
    assert played.fence(B) is None


def test_another_label_after_the_resume_is_told_from_no_answer() -> None:
    other = Played({(Op.PROBE, A): Answer(Observed.OTHER_LABEL)})
    assert other.verdict(A) == Verdict(Outcome.UNKNOWN, Evidence.OTHER_LABEL, Recovery.REPUBLISH)
    silent = Played({(Op.PROBE, A): LOST})
    assert silent.verdict(A) == Verdict(Outcome.UNKNOWN, Evidence.NO_ANSWER, Recovery.REPUBLISH)


class Consulted(dict[Seen, Verdict]):
    """Verdicts that remember which of them were given."""

    def __init__(self, verdicts: Mapping[Seen, Verdict]) -> None:
        super().__init__(verdicts)
        self.given: set[Seen] = set()

    def __getitem__(self, seen: Seen) -> Verdict:
        self.given.add(seen)
        return super().__getitem__(seen)


def test_every_row_is_what_some_publication_comes_to() -> None:
    """One answer to one operation, whatever it is; one more failure, or a cancellation."""
    verdicts = Consulted(VERDICTS)
    unread: Script = {(Op.READ, A): LOST}
    for before in ({}, broken()):
        for script in (
            {**before, **after, (op, A): Answer(observed)}
            for after in ({}, unread)
            for op in Op
            for observed in Observed
        ):
            for cancel_in in (None, Phase.CONFIRM, Phase.BEGIN, Phase.TRANSFER):
                played = Played(script, cancel_in=cancel_in)
                conclude(played.tx, played.tx.workers[A], verdicts)
    assert verdicts.given == set(VERDICTS)


def test_an_old_fence_outlives_a_publication_that_did_not_reach_its_worker() -> None:
    old = Fence(
        strength=FenceStrength.DEAD, reason="it died", recovery=Recovery.RESTART_THEN_PUBLISH
    )
    refused = Answer(Observed.REFUSED, "restart it first")
    played = Played({(Op.INSPECT, B): refused}, tx=transaction(fences={B: old}))
    assert played.tx.phase is Phase.RELEASED
    assert played.verdict(B) == Verdict(
        Outcome.UNTOUCHED, Evidence.NOT_BEGUN, Recovery.RESTART_THEN_PUBLISH
    )
    assert played.fence(B) == old
    assert played.fence(A) is None


def test_a_fenced_worker_is_never_released_by_a_publication_that_failed() -> None:
    old = Fence(strength=FenceStrength.PAUSED, reason="held", recovery=Recovery.REPUBLISH)
    played = Played({(Op.CONFIRM, A): LOST}, tx=transaction(fences={B: old}))
    assert [worker for op, worker in played.asked if op is Op.RESUME] == [A]
    assert played.fence(B) == old


def broken() -> Script:
    return {(Op.INSPECT, worker): shown(NEW + "!updating", paused=True) for worker in (A, B)}


def test_a_worker_that_cannot_be_healed_has_to_be_restarted() -> None:
    played = Played({**broken(), (Op.HEAL, A): Answer(Observed.REJECTED)})
    assert played.verdict(A) == Verdict(
        Outcome.DIRTY, Evidence.REJECTED, Recovery.RESTART_THEN_PUBLISH
    )
    barrier = played.fence(A)
    assert barrier is not None
    assert barrier.recovery is Recovery.RESTART_THEN_PUBLISH
    assert Op.RESUME not in {op for op, _ in played.asked}


def test_a_worker_whose_healing_was_not_answered_is_healed_the_next_time() -> None:
    played = Played({**broken(), (Op.HEAL, A): LOST})
    assert played.verdict(A) == Verdict(
        Outcome.UNKNOWN, Evidence.NO_ANSWER, Recovery.CLOSE_THEN_REPUBLISH
    )
    assert played.verdict(B) == Verdict(
        Outcome.UNTOUCHED, Evidence.NOT_BEGUN, Recovery.CLOSE_THEN_REPUBLISH
    )
    assert played.fence(A) is not None
    assert played.fence(B) is not None


def test_a_lost_reply_to_an_update_goes_on_only_if_the_sender_knows_that_it_was_taken() -> None:
    script = {(Op.UPDATE, A): LOST}
    known = Played(script, tx=transaction(acknowledged=True))
    assert known.tx.committed
    assert Phase.CLOSE not in known.phases
    unknown = Played(script, tx=transaction(acknowledged=False))
    assert not unknown.tx.committed
    assert Phase.FINISH not in unknown.phases


def test_a_lost_reply_to_finish_is_decided_by_the_label_that_it_carries() -> None:
    played = Played({(Op.FINISH, A): LOST})
    assert played.tx.committed
    held = Played({(Op.FINISH, A): LOST, (Op.READ, A): shown(OLD)})
    assert not held.tx.committed
    assert held.verdict(A).outcome is Outcome.UNKNOWN


def test_a_label_of_its_own_is_not_set_where_finish_was_not_answered() -> None:
    apart = transaction(finish_sets_label=False)
    played = Played({(Op.FINISH, A): LOST}, tx=apart)
    assert [worker for op, worker in played.asked if op is Op.LABEL] == [B]
    assert not played.tx.committed


def test_a_label_of_its_own_is_set_after_every_session_was_closed_and_its_reply_may_be_lost() -> (
    None
):
    played = Played({(Op.LABEL, B): LOST}, tx=transaction(finish_sets_label=False))
    assert played.tx.committed
    order = [op for op, _ in played.asked]
    assert order.index(Op.LABEL) > max(i for i, op in enumerate(order) if op is Op.FINISH)


def test_where_finish_carries_the_label_none_is_set_apart() -> None:
    assert Op.LABEL not in {op for op, _ in Played({}).asked}


def test_where_no_label_is_written_ahead_everything_else_is_asked_of_everybody() -> None:
    usual, unmarked = Played({}), Played({}, tx=transaction(marks=False))
    assert (Op.MARK, A) in usual.asked
    assert unmarked.asked == [ask for ask in usual.asked if ask[0] is not Op.MARK]
    failed = Played({(Op.PAUSE, B): LOST}, tx=transaction(marks=False))
    assert (Op.RESUME, A) in failed.asked


@pytest.mark.parametrize(
    ("op", "way_out"),
    [
        (Op.INSPECT, []),
        (Op.JOIN, []),
        (Op.PAUSE, [Phase.RELEASE]),
        (Op.CONFIRM, [Phase.RELEASE]),
        (Op.MARK, [Phase.UNMARK, Phase.RELEASE]),
        (Op.BEGIN, [Phase.CLOSE, Phase.EXAMINE]),
        (Op.UPDATE, [Phase.CLOSE, Phase.EXAMINE]),
        (Op.FINISH, [Phase.EXAMINE]),
        (Op.READ, []),
    ],
)
def test_after_a_failure_only_the_way_out_is_walked(op: Op, way_out: list[Phase]) -> None:
    usual, failed = Played({}).phases, Played({(op, B): Answer(Observed.REFUSED)}).phases
    ways_out = {Phase.RELEASE, Phase.UNMARK, Phase.CLOSE, Phase.EXAMINE}
    there = [phase for phase in failed if phase not in ways_out]
    assert there == usual[: len(there)]
    assert failed[len(there) :] == way_out


@pytest.mark.parametrize(
    ("act", "way_out"),
    [
        (Act.STAGE, []),
        (Act.JOIN, []),
        (Act.INTEND, [Phase.UNMARK, Phase.RELEASE]),
        (Act.SEND, [Phase.CLOSE, Phase.EXAMINE]),
        (Act.COMMIT, []),
    ],
)
def test_after_a_failure_of_its_own_a_publication_only_walks_the_way_out(
    act: Act, way_out: list[Phase]
) -> None:
    played = Played({}, fails=act)
    assert [p for p in played.phases if p not in Played({}).phases] == way_out
    assert Phase.OPEN not in played.phases
    assert not played.tx.committed
    assert played.tx.error == f"{act}: no"


def test_a_resume_that_fails_fences_its_worker_and_lets_the_others_serve() -> None:
    played = Played({(Op.RESUME, A): Answer(Observed.REFUSED, "still paused")})
    assert played.verdict(A) == Verdict(Outcome.COMMITTED, Evidence.OWN_LABEL, Recovery.REPUBLISH)
    barrier = played.fence(A)
    assert barrier is not None
    assert barrier.reason == "resume: refused: still paused"
    assert played.fence(B) is None
    assert (Op.PROBE, A) not in played.asked


@pytest.mark.parametrize(
    ("op", "answer", "strength"),
    [
        (Op.PAUSE, LOST, FenceStrength.CLIENT),
        (Op.READ, LOST, FenceStrength.PAUSED),
        (Op.RESUME, Answer(Observed.REFUSED), FenceStrength.PAUSED),
        (Op.PROBE, LOST, FenceStrength.CLIENT),
        (Op.PROBE, DEAD, FenceStrength.DEAD),
    ],
)
def test_a_fence_says_whether_the_engine_stands_still(
    op: Op, answer: Answer, strength: FenceStrength
) -> None:
    barrier = Played({(op, B): answer}).fence(B)
    assert barrier is not None
    assert barrier.strength is strength


def test_an_event_after_the_end_is_refused() -> None:
    played = Played({})
    with pytest.raises(ValueError, match="has ended"):
        advance(played.tx, Cancelled())


def test_an_answer_that_nobody_waits_for_is_refused() -> None:
    tx, _ = begin(transaction())
    with pytest.raises(ValueError, match="nobody waits for pause"):
        advance(tx, Answered(A, Op.PAUSE, DONE))
    with pytest.raises(ValueError, match="nobody waits for inspect of vllm/c"):
        advance(tx, Answered(STRANGER, Op.INSPECT, DONE))
    with pytest.raises(ValueError, match="nobody waits for send"):
        advance(tx, ActDone(Act.SEND))


def test_that_the_other_end_went_away_is_the_error_only_while_nothing_else_is_known() -> None:
    gone = Answer(Observed.PEER_LOST, "the sender left")
    alone = Played({(Op.UPDATE, A): gone})
    assert (alone.tx.error or "").startswith("update on vllm/a: peer_lost")
    because = Played({(Op.UPDATE, A): gone, (Op.UPDATE, B): DEAD})
    assert (because.tx.error or "").startswith("update on vllm/b: dead")
    stays = Played({(Op.UPDATE, A): DEAD, (Op.UPDATE, B): gone})
    assert (stays.tx.error or "").startswith("update on vllm/a: dead")


def test_a_worker_whose_answer_was_lost_is_named_when_its_group_breaks_after_that() -> None:
    tx, _ = begin(replace(transaction(acknowledged=True), phase=Phase.TRANSFER))
    tx, _ = advance(tx, Answered(B, Op.UPDATE, Answer(Observed.LOST, "connection reset")))
    assert tx.error is None
    tx, _ = advance(tx, Broke(Act.SEND, 0, "the line is down"))
    assert tx.error == "send: the line is down; update on vllm/b: lost: connection reset"


def test_only_answers_to_the_bucket_that_is_on_its_way_say_whose_was_lost() -> None:
    tx, _ = begin(replace(transaction(acknowledged=True), phase=Phase.TRANSFER))
    tx, _ = advance(tx, Answered(A, Op.UPDATE, DONE))
    tx, _ = advance(tx, Answered(B, Op.UPDATE, Answer(Observed.LOST, "of the first")))
    tx, _ = advance(tx, ActDone(Act.SEND, more=True))
    assert tx.phase is Phase.TRANSFER
    tx, _ = advance(tx, Broke(Act.SEND, 0, "the line is down"))
    assert tx.error == "send: the line is down"


def test_a_worker_that_stays_silent_after_its_group_broke_is_named_as_well() -> None:
    tx, _ = begin(replace(transaction(), phase=Phase.TRANSFER))
    tx, _ = advance(tx, Answered(A, Op.UPDATE, Answer(Observed.REFUSED, "no room")))
    tx, _ = advance(tx, Answered(B, Op.UPDATE, Answer(Observed.LOST, "silence")))
    assert tx.error == ("update on vllm/a: refused: no room; update on vllm/b: lost: silence")
    tx, _ = begin(replace(transaction(), phase=Phase.TRANSFER))
    tx, _ = advance(tx, Answered(A, Op.UPDATE, Answer(Observed.PEER_LOST, "it left")))
    tx, _ = advance(tx, Answered(B, Op.UPDATE, Answer(Observed.LOST, "silence")))
    assert tx.error == "update on vllm/b: lost: silence"


@pytest.mark.parametrize("first", [Observed.REFUSED, Observed.PEER_LOST])
def test_what_comes_after_a_worker_that_stayed_silent_changes_nothing(first: Observed) -> None:
    tx, _ = begin(replace(three(), phase=Phase.TRANSFER))
    tx, _ = advance(tx, Answered(A, Op.UPDATE, Answer(first, "it left")))
    tx, _ = advance(tx, Answered(B, Op.UPDATE, Answer(Observed.LOST, "silence")))
    named = tx.error
    tx, _ = advance(tx, Answered(STRANGER, Op.UPDATE, Answer(Observed.DEAD, "gone")))
    assert (tx.error or "").endswith("update on vllm/b: lost: silence")
    assert tx.error == named


def test_that_an_end_broke_because_its_group_had_is_not_the_error() -> None:
    left = Answered(A, Op.UPDATE, Answer(Observed.PEER_LOST, "it left"))
    gone = Answered(B, Op.UPDATE, Answer(Observed.DEAD, "gone"))
    broke = Broke(Act.SEND, 0, "the line is down")
    after, _ = begin(replace(transaction(), phase=Phase.TRANSFER))
    for event in (left, broke):
        after, _ = advance(after, event)
    assert after.error == "update on vllm/a: peer_lost: it left"
    first, _ = begin(replace(transaction(), phase=Phase.TRANSFER))
    for event in (broke, gone):
        first, _ = advance(first, event)
    assert first.error == "send: the line is down"


@pytest.mark.parametrize(
    ("phase", "cuts", "fails"),
    [
        (Phase.PREFLIGHT, True, True),
        (Phase.STAGE, True, True),
        (Phase.PAUSE, False, True),
        (Phase.TRANSFER, False, True),
        (Phase.FINISH, False, False),
        (Phase.RESUME, False, False),
    ],
)
def test_a_cancellation_cuts_what_harms_nobody_and_does_not_stop_what_is_nearly_done(
    phase: Phase, cuts: bool, fails: bool
) -> None:
    proved = Progress(answers={Op.READ: shown(NEW)})
    tx, _ = begin(replace(transaction(), workers={A: proved, B: proved}, phase=phase))
    tx, commands = advance(tx, Cancelled())
    assert (Cut() in commands) is cuts
    assert tx.failed is fails
    assert tx.error == ("cancelled" if fails else None)


def test_a_group_that_stands_is_not_joined_again() -> None:
    played = Played({}, tx=replace(transaction(), standing=frozenset({0})), fails=Act.JOIN)
    assert played.tx.committed
    assert Op.JOIN not in {op for op, _ in played.asked}


def test_the_first_failure_is_the_error_and_the_later_ones_are_those_of_their_workers() -> None:
    full, gone = Answer(Observed.REFUSED, "full"), Answer(Observed.DEAD, "gone")
    played = Played({(Op.BEGIN, A): full, (Op.BEGIN, B): gone})
    assert played.tx.error == "begin on vllm/a: refused: full"
    assert [(f.reason if (f := played.fence(w)) else None) for w in (A, B)] == [
        "begin: refused: full",
        "begin: dead: gone",
    ]
    tx, _ = begin(replace(transaction(), phase=Phase.TRANSFER))
    tx, _ = advance(tx, ActFailed(Act.SEND, "no"))
    tx, _ = advance(tx, Answered(B, Op.UPDATE, gone))
    assert tx.error == "send: no"


def test_a_worker_that_did_nothing_wrong_is_fenced_for_what_the_publication_failed_of() -> None:
    played = Played({(Op.UPDATE, A): Answer(Observed.REFUSED, "no index X")})
    innocent, guilty = played.fence(B), played.fence(A)
    assert innocent is not None
    assert guilty is not None
    assert innocent.reason == "update on vllm/a: refused: no index X"
    assert guilty.reason == "update: refused: no index X"


def test_a_fence_for_an_answer_without_words_ends_with_what_was_observed() -> None:
    played = Played({(Op.PAUSE, A): LOST})
    barrier = played.fence(A)
    assert barrier is not None
    assert barrier.reason == "pause: lost"
    assert played.tx.error == "pause on vllm/a: lost: "


def test_a_label_that_is_another_than_the_attempts_is_told_with_both() -> None:
    played = Played({(Op.READ, A): shown(OLD)})
    wrong = f"other_label: label read back is {OLD!r}, expected {NEW!r}"
    assert played.tx.error == f"read on vllm/a: {wrong}"
    barrier = played.fence(A)
    assert barrier is not None
    assert barrier.reason == f"read: {wrong}"


def summed(digest: str) -> Answer:
    return Answer(Observed.DONE, facts={"label": NEW, "checksums": {"w": digest}})


def test_a_worker_that_holds_other_bytes_than_the_others_is_named_and_fenced() -> None:
    script = {
        (Op.READ, A): summed("1"),
        (Op.READ, B): summed("2"),
        (Op.READ, STRANGER): summed("1"),
    }
    played = Played(script, tx=three())
    assert not played.tx.committed
    assert played.tx.error == (
        "read on vllm/b: differs: it holds other bytes than most workers in w"
    )
    barrier = played.fence(B)
    assert barrier is not None
    assert barrier.reason == "read: differs: it holds other bytes than most workers in w"
    assert played.verdict(B).outcome is Outcome.DIRTY
    assert played.verdict(A).outcome is Outcome.COMMITTED


def test_what_a_worker_failed_of_is_not_mended_by_holding_what_the_others_hold() -> None:
    script = {(Op.READ, w): summed("1") for w in (A, B, STRANGER)}
    refused = Answer(Observed.REFUSED, "still open")
    played = Played({**script, (Op.FINISH, A): refused}, tx=three())
    assert played.tx.workers[A].failure == (Op.FINISH, refused)


def test_with_enough_proved_workers_these_serve_and_the_others_do_not() -> None:
    least = replace(transaction(), min_workers=1)
    played = Played({(Op.READ, A): shown(OLD)}, tx=least)
    assert played.tx.committed
    assert played.tx.phase is Phase.DONE
    assert [worker for op, worker in played.asked if op is Op.RESUME] == [B]
    assert played.fence(A) is not None
    assert played.fence(B) is None
    both = Played({(Op.READ, A): shown(OLD)}, tx=replace(transaction(), min_workers=2))
    assert both.tx.phase is Phase.HELD
    assert not both.tx.committed


@pytest.mark.parametrize("op", [Op.RESUME, Op.PROBE])
def test_what_fails_after_the_commit_does_not_lead_back_before_it(op: Op) -> None:
    played = Played({(op, A): LOST}, tx=replace(transaction(), min_workers=1))
    assert played.tx.phase is Phase.DONE
    assert len([o for o, _ in played.asked if o is op]) == 2


def test_a_group_goes_on_when_another_one_broke() -> None:
    apart = {A: Progress(group=0), B: Progress(group=1)}
    played = Played({(Op.BEGIN, A): DEAD}, tx=replace(transaction(), workers=apart, min_workers=1))
    assert played.tx.committed
    assert [op for op, worker in played.asked if worker is A and op is Op.UPDATE] == []
    assert (Op.FINISH, B) in played.asked
    assert played.verdict(B).outcome is Outcome.COMMITTED


def test_a_worker_that_was_found_paused_is_not_resumed_on_the_way_out() -> None:
    found = {(Op.INSPECT, A): shown(OLD, paused=True), (Op.CONFIRM, B): LOST}
    played = Played(found)
    assert [worker for op, worker in played.asked if op is Op.RESUME] == [B]


def test_what_held_a_worker_before_does_not_explain_what_happened_to_it_since() -> None:
    old = Fence(strength=FenceStrength.PAUSED, reason="held", recovery=Recovery.REPUBLISH)
    script = {(Op.READ, A): shown(OLD)}
    played = Played(script, tx=transaction(fences={A: old}), fails=Act.SEND)
    barrier = played.fence(A)
    assert barrier is not None
    assert barrier.recovery is Recovery.REPUBLISH
    assert barrier.reason == "send: no"


@pytest.mark.parametrize("op", [Op.PAUSE, Op.CONFIRM])
def test_a_row_for_one_answer_goes_before_the_row_for_any(op: Op) -> None:
    own = Verdict(Outcome.UNKNOWN, Evidence.REJECTED, Recovery.RESTART_THEN_PUBLISH)
    verdicts = {**VERDICTS, Seen(op, Observed.REFUSED, Reached.NOT_BEGUN): own}
    for observed, expected in ((Observed.REFUSED, True), (Observed.LOST, False)):
        played = Played({(op, A): Answer(observed), (Op.RESUME, A): LOST})
        found = conclude(played.tx, played.tx.workers[A], verdicts)
        assert (found == own) is expected


def test_a_worker_that_holds_other_bytes_is_dirty_whatever_it_failed_of_before() -> None:
    script = {
        (Op.FINISH, A): Answer(Observed.REFUSED),
        (Op.READ, A): summed("2"),
        (Op.READ, B): summed("1"),
        (Op.READ, STRANGER): summed("1"),
    }
    played = Played(script, tx=three())
    assert played.verdict(A) == VERDICTS[Seen(Op.READ, Observed.DIFFERS, Reached.SENT)]


@pytest.mark.parametrize("op", [Op.CONFIRM, Op.MARK])
def test_whoever_was_resumed_on_the_way_out_is_not_fenced_for_what_another_one_did(op: Op) -> None:
    played = Played({(op, B): Answer(Observed.REFUSED)})
    assert (Op.RESUME, A) in played.asked
    assert played.verdict(A) == Verdict(Outcome.UNTOUCHED, Evidence.NOT_BEGUN, None)
    assert played.fence(A) is None
