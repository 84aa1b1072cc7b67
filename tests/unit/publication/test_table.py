"""Every row of the publication table: whom it asks, what a failure breaks, and where it leads.

Two workers, each in a group of its own, are brought to the row as a publication would bring them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import pytest

from genapi.publication.evidence import Answer, Observed, Op
from genapi.publication.table import Act, Phase
from genapi.publication.transaction import (
    Abandon,
    ActDone,
    Acted,
    ActFailed,
    Answered,
    Ask,
    Cancelled,
    Command,
    Cut,
    Progress,
    Transaction,
    advance,
    begin,
)
from genapi.publication.verification import Checks
from genapi.types.ids import WorkerId
from genapi.types.policy import PolicyVersion
from genapi.types.worker import Fence, FenceStrength, Recovery

OLD = PolicyVersion(run="r", step=2).label
NEW = PolicyVersion(run="r", step=3)
A, B = (WorkerId(provider="vllm", instance=name) for name in "ab")
DONE, LOST, REFUSED = (Answer(o) for o in (Observed.DONE, Observed.LOST, Observed.REFUSED))


def shown(label: str) -> Answer:
    return Answer(Observed.DONE, facts={"label": label, "paused": False})


def after(*ops: Op, found: str = OLD, **answers: Answer) -> Progress:
    """What a worker did that answered these operations well, or as it is said."""
    good = {Op.INSPECT: shown(found), Op.READ: shown(NEW.label)}
    told = {op: answers.get(op.value, good.get(op, DONE)) for op in (Op.INSPECT, *ops)}
    return Progress(asked=tuple(told), answers=told)


PAUSED = (Op.PAUSE, Op.CONFIRM)
BEGUN = (*PAUSED, Op.MARK, Op.BEGIN)
CLOSED = (*BEGUN, Op.UPDATE, Op.FINISH)
PROVED = (*CLOSED, Op.READ)
DOUBTED = Answer(Observed.DIFFERS, facts={"label": NEW.label})


@dataclass(frozen=True)
class Expected:
    """What is to be seen of one row.

    Attributes:
        found: what either worker did before.
        ask: what both are asked.
        act: what the publisher does.
        good: where it leads when everything was done.
        bad: where it leads when one worker, or the publisher's own part, refused.
        on_cancel: what a cancellation does.
        breaks: whether a refusal breaks the worker's group.
        tolerates: whether a lost answer is no failure.
    """

    found: Progress
    ask: Op | None
    good: Phase
    bad: Phase
    act: Act | None = None
    on_cancel: Literal["cut", "wait", "go_on"] = "go_on"
    breaks: bool = False
    tolerates: bool = False


FRESH = Progress()
ROWS: Mapping[Phase, Expected] = {
    Phase.PREFLIGHT: Expected(FRESH, Op.INSPECT, Phase.STAGE, Phase.RELEASED, on_cancel="cut"),
    Phase.STAGE: Expected(
        after(), None, Phase.GROUP, Phase.RELEASED, act=Act.STAGE, on_cancel="cut"
    ),
    Phase.GROUP: Expected(
        after(),
        Op.JOIN,
        Phase.PAUSE,
        Phase.RELEASED,
        act=Act.JOIN,
        on_cancel="wait",
        breaks=True,
    ),
    Phase.PAUSE: Expected(after(), Op.PAUSE, Phase.CONFIRM, Phase.RELEASE, on_cancel="wait"),
    Phase.CONFIRM: Expected(
        after(Op.PAUSE), Op.CONFIRM, Phase.MARK, Phase.RELEASE, on_cancel="wait"
    ),
    Phase.MARK: Expected(
        after(*PAUSED), Op.MARK, Phase.BEGIN, Phase.UNMARK, act=Act.INTEND, on_cancel="wait"
    ),
    Phase.HEAL: Expected(
        after(*PAUSED, Op.MARK, found=NEW.updating_label),
        Op.HEAL,
        Phase.BEGIN,
        Phase.RELEASED,
        on_cancel="wait",
    ),
    Phase.BEGIN: Expected(
        after(*PAUSED, Op.MARK),
        Op.BEGIN,
        Phase.TRANSFER,
        Phase.TRANSFER,
        on_cancel="wait",
        breaks=True,
    ),
    Phase.TRANSFER: Expected(
        after(*BEGUN),
        Op.UPDATE,
        Phase.FINISH,
        Phase.FINISH,
        act=Act.SEND,
        on_cancel="wait",
        breaks=True,
        tolerates=True,
    ),
    Phase.FINISH: Expected(
        after(*BEGUN, Op.UPDATE), Op.FINISH, Phase.VERIFY, Phase.EXAMINE, tolerates=True
    ),
    Phase.LABEL: Expected(after(*CLOSED), Op.LABEL, Phase.VERIFY, Phase.EXAMINE, tolerates=True),
    Phase.VERIFY: Expected(after(*CLOSED), Op.READ, Phase.COMMIT, Phase.HELD),
    Phase.COMMIT: Expected(after(*PROVED), None, Phase.RESUME, Phase.HELD, act=Act.COMMIT),
    Phase.RESUME: Expected(after(*PROVED), Op.RESUME, Phase.PROBE, Phase.PROBE),
    Phase.PROBE: Expected(after(*PROVED, Op.RESUME), Op.PROBE, Phase.DONE, Phase.DONE),
    Phase.SHUT: Expected(
        after(*PROVED, Op.RESUME, Op.PROBE, probe=DOUBTED), Op.SHUT, Phase.DONE, Phase.DONE
    ),
    Phase.CLOSE: Expected(after(*BEGUN), Op.CLOSE, Phase.EXAMINE, Phase.EXAMINE),
    Phase.EXAMINE: Expected(after(*BEGUN), Op.READ, Phase.HELD, Phase.HELD),
    Phase.UNMARK: Expected(after(*PAUSED, Op.MARK), Op.UNMARK, Phase.RELEASE, Phase.RELEASE),
    Phase.RELEASE: Expected(after(*PAUSED), Op.RESUME, Phase.RELEASED, Phase.RELEASED),
}
ACTS = [phase for phase, row in ROWS.items() if row.act is not None]
ASKS = [phase for phase, row in ROWS.items() if row.ask is not None]


def entered(phase: Phase) -> tuple[Transaction, tuple[Command, ...]]:
    row = ROWS[phase]
    ended = phase in (Phase.CLOSE, Phase.EXAMINE, Phase.UNMARK, Phase.RELEASE)
    return begin(
        Transaction(
            label=NEW.label,
            workers={w: replace(row.found, group=g) for g, w in enumerate((A, B))},
            acknowledged=True,
            finish_sets_label=phase is not Phase.LABEL,
            broken=frozenset({0, 1}) if phase is Phase.CLOSE else frozenset(),
            committed=phase in (Phase.RESUME, Phase.PROBE, Phase.SHUT),
            failed=ended,
            error="it failed before" if ended else None,
            phase=phase,
        )
    )


def answers(phase: Phase, *, of_a: Answer | None = None) -> list[Answered]:
    op = ROWS[phase].ask
    if op is None:
        return []
    good = shown(NEW.label) if op in (Op.READ, Op.PROBE) else DONE
    good = shown(OLD) if op is Op.INSPECT else good
    return [Answered(A, op, of_a or good), Answered(B, op, good)]


@pytest.mark.parametrize("phase", ROWS)
def test_a_row_asks_both_workers_and_leads_on_when_everything_was_done(phase: Phase) -> None:
    tx, commands = entered(phase)
    row = ROWS[phase]
    asked = [] if row.ask is None else [Ask(A, row.ask), Ask(B, row.ask)]
    assert list(commands) == asked + ([] if row.act is None else [Acted(row.act)])
    for event in answers(phase):
        tx, commands = advance(tx, event)
    if row.act is not None:
        assert tx.phase is phase
        tx, commands = advance(tx, ActDone(row.act))
    assert tx.phase is row.good


@pytest.mark.parametrize("phase", ASKS)
def test_a_worker_that_refuses_leads_out_and_breaks_its_group_where_groups_work(
    phase: Phase,
) -> None:
    row = ROWS[phase]
    tx, _ = entered(phase)
    first, second = answers(phase, of_a=REFUSED)
    tx, commands = advance(tx, first)
    assert (Abandon(0) in commands) is row.breaks
    assert Abandon(1) not in commands
    tx, commands = advance(tx, second)
    if row.act is not None:
        tx, commands = advance(tx, ActDone(row.act))
    assert tx.phase is row.bad
    assert tx.failed
    asked_next = {command.worker for command in commands if isinstance(command, Ask)}
    if row.bad in (Phase.TRANSFER, Phase.FINISH):
        assert asked_next == {B}


@pytest.mark.parametrize("phase", ACTS)
def test_a_part_of_the_publishers_that_fails_leads_out(phase: Phase) -> None:
    row = ROWS[phase]
    assert row.act is not None
    tx, _ = entered(phase)
    for event in answers(phase):
        tx, _ = advance(tx, event)
    tx, commands = advance(tx, ActFailed(row.act, "no"))
    assert {c for c in commands if isinstance(c, Abandon)} == (
        {Abandon(0), Abandon(1)} if row.breaks else set()
    )
    assert tx.phase is (Phase.CLOSE if phase is Phase.TRANSFER else row.bad)


def test_when_every_group_broke_nothing_is_sent() -> None:
    tx, _ = entered(Phase.BEGIN)
    commands: tuple[Command, ...] = ()
    for worker in (A, B):
        tx, commands = advance(tx, Answered(worker, Op.BEGIN, REFUSED))
    assert tx.phase is Phase.CLOSE
    assert Acted(Act.SEND) not in commands


@pytest.mark.parametrize("phase", ASKS)
def test_a_lost_answer_is_a_failure_unless_something_later_decides(phase: Phase) -> None:
    tx, _ = entered(phase)
    for event in answers(phase, of_a=LOST):
        tx, _ = advance(tx, event)
    assert (tx.workers[A].failure is None) is ROWS[phase].tolerates


@pytest.mark.parametrize("phase", ROWS)
def test_a_cancellation_cuts_waits_or_changes_nothing(phase: Phase) -> None:
    before, _ = entered(phase)
    how = ROWS[phase].on_cancel
    tx, commands = advance(before, Cancelled())
    assert (Cut() in commands) is (how == "cut")
    assert tx.phase is phase
    if how == "go_on":
        assert tx == before
    else:
        assert tx.error == "cancelled"
        assert (Abandon(0) in commands) is ROWS[phase].breaks


@pytest.mark.parametrize("phase", [phase for phase in ASKS if phase is not Phase.GROUP])
def test_a_group_that_stands_is_asked_everything_but_to_join(phase: Phase) -> None:
    start, before = entered(phase)
    _, commands = begin(replace(start, unanswered=0, acting=None, standing=frozenset({0, 1})))
    assert commands == before
    joined, _ = entered(Phase.GROUP)
    _, commands = begin(replace(joined, unanswered=0, acting=None, standing=frozenset({0})))
    assert commands == (Ask(B, Op.JOIN), Acted(Act.JOIN))


@pytest.mark.parametrize("phase", ASKS[: ASKS.index(Phase.RESUME)])
def test_a_fenced_worker_is_asked_all_that_leads_to_its_proof(phase: Phase) -> None:
    start, before = entered(phase)
    old = Fence(strength=FenceStrength.PAUSED, reason="held", recovery=Recovery.REPUBLISH)
    fenced = {
        w: replace(ROWS[phase].found, group=p.group, fence=old) for w, p in start.workers.items()
    }
    _, commands = begin(replace(start, unanswered=0, acting=None, workers=fenced))
    assert commands == before


def test_of_two_only_the_one_that_was_left_half_updated_is_healed_and_not_unmarked() -> None:
    healthy, left = ROWS[Phase.BEGIN].found, ROWS[Phase.HEAL].found
    start, _ = entered(Phase.HEAL)
    mixed = replace(start, workers={A: healthy, B: replace(left, group=1)})
    tx, commands = begin(replace(mixed, unanswered=0))
    assert commands == (Ask(B, Op.HEAL),)
    tx, commands = advance(tx, Answered(B, Op.HEAL, REFUSED))
    assert (tx.phase, commands) == (Phase.UNMARK, (Ask(A, Op.UNMARK),))
    tx, commands = advance(tx, Answered(A, Op.UNMARK, DONE))
    assert (tx.phase, commands) == (Phase.RELEASE, (Ask(A, Op.RESUME),))


def test_what_could_not_be_marked_is_not_healed() -> None:
    left = ROWS[Phase.HEAL].found
    start, _ = entered(Phase.MARK)
    tx, _ = begin(
        replace(
            start,
            unanswered=0,
            acting=None,
            workers={A: ROWS[Phase.MARK].found, B: replace(left, group=1)},
        )
    )
    tx, _ = advance(tx, Answered(A, Op.MARK, DONE))
    tx, _ = advance(tx, Answered(B, Op.MARK, REFUSED))
    tx, commands = advance(tx, ActDone(Act.INTEND))
    assert (tx.phase, commands) == (Phase.UNMARK, (Ask(A, Op.UNMARK),))


def test_where_no_label_is_written_ahead_none_is_taken_back() -> None:
    start, _ = entered(Phase.MARK)
    tx, commands = begin(
        replace(
            start,
            unanswered=0,
            acting=None,
            marks=False,
            workers={w: replace(ROWS[Phase.MARK].found, group=g) for g, w in enumerate((A, B))},
        )
    )
    assert commands == (Acted(Act.INTEND),)
    tx, commands = advance(tx, ActFailed(Act.INTEND, "no"))
    assert (tx.phase, commands) == (Phase.RELEASE, (Ask(A, Op.RESUME), Ask(B, Op.RESUME)))


def test_only_a_worker_that_is_not_what_its_label_says_is_shut() -> None:
    start, commands = entered(Phase.PROBE)
    checks = Checks(("label", "probe"), trainer=(-1.0,))
    tx = replace(start, checks=checks)
    for worker, score in ((A, -1.0), (B, -9.0)):
        facts = {"label": NEW.label, "scores": (score,)}
        tx, commands = advance(tx, Answered(worker, Op.PROBE, Answer(Observed.DONE, facts=facts)))
    assert (tx.phase, commands) == (Phase.SHUT, (Ask(B, Op.SHUT),))
