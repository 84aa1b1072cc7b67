"""The publication table against a model of workers that may fail at every call.

The model keeps what is true of each worker (label, weights, session, pause); hypothesis chooses
what happens to each call and in which order answers arrive. What the transaction concludes has
to agree with what is true.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genapi.providers.vllm.verdicts import VERDICTS
from genapi.publication.evidence import Answer, Observed, Op
from genapi.publication.table import TABLE, Act, Phase, mermaid
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
    conclude,
    fence,
)
from genapi.types.ids import WorkerId
from genapi.types.worker import Fence, FenceStrength, Outcome, Recovery

LABEL = "genapi:r:3:1"
OLD = "genapi:r:2:1"
BUCKETS = 2

Fate = str
FATES = ("done", "lost_before", "lost_after", "refused", "dead")


@dataclass
class Truth:
    """What is true of one worker, whatever anybody was told."""

    label: str = OLD
    weights: tuple[int, ...] = ()  # buckets of the new weights that were loaded
    in_session: bool = False
    paused: bool = False
    dead: bool = False

    @property
    def is_new(self) -> bool:
        return self.weights == tuple(range(1, BUCKETS + 1))

    def apply(self, op: Op, tx: Transaction, me: WorkerId) -> Answer:  # noqa: C901, PLR0912 - one case each
        """Do what was asked, as vLLM does it."""
        if op is Op.BEGIN and self.in_session:
            return Answer(Observed.SESSION_OPEN, "already active")
        if op in (Op.UPDATE, Op.FINISH, Op.CLOSE) and not self.in_session:
            return Answer(Observed.NO_SESSION, "no session")
        match op:
            case Op.BEGIN:
                self.in_session = True
            case Op.HEAL:
                self.in_session, self.weights = False, ()
            case Op.UPDATE:
                self.weights = (*self.weights, tx.updates)
            case Op.FINISH:
                self.in_session, self.label = False, tx.label
            case Op.CLOSE:
                self.in_session = False
            case Op.MARK:
                self.label = tx.label + "!updating"
            case Op.UNMARK:
                self.label = str(tx.workers[me].found["label"])
            case Op.PAUSE:
                self.paused = True
            case Op.RESUME:
                self.paused = False
        reads = (Op.READ, Op.INSPECT, Op.PROBE)
        facts = {"label": self.label, "paused": self.paused} if op in reads else {}
        return Answer(Observed.DONE, facts=facts)


class World:
    """Workers, the sender, and the calls that are open."""

    def __init__(self, names: int, draw: st.DataObject, *, acknowledged: bool) -> None:
        self.draw = draw
        self.ids = [WorkerId(provider="vllm", instance=str(i)) for i in range(names)]
        self.truth = {worker: self.drawn_truth() for worker in self.ids}
        self.first = {worker: replace(truth) for worker, truth in self.truth.items()}
        self.open: list[Command] = []
        self.abandoned = False
        self.tx = Transaction(
            label=LABEL,
            workers={worker: Progress() for worker in self.ids},
            acknowledged=acknowledged,
        )
        self.asked: list[tuple[Op, Phase, WorkerId]] = []

    def drawn_truth(self) -> Truth:
        """A worker as a publication may find it: serving, paused, or left half-updated."""
        left = Truth(label=OLD + "!updating", weights=(99,), in_session=True, paused=True)
        kinds = [Truth(), Truth(paused=True), left]
        return replace(self.draw.draw(st.sampled_from(kinds), label="found"))

    def take(self, tx: Transaction, commands: tuple[Command, ...]) -> None:
        self.tx = tx
        for command in commands:
            match command:
                case Abandon():
                    self.abandoned = True
                case Cut():
                    self.cut()
                case Ask(worker, op):
                    self.asked.append((op, tx.phase, worker))
                    self.open.append(command)
                case Acted():
                    self.open.append(command)

    def cut(self) -> None:
        """Everything open is given up; the worker may still have done it."""
        self.cutting = list(self.open)

    def answer(self, worker: WorkerId, op: Op) -> Answer:
        truth = self.truth[worker]
        if truth.dead:
            return Answer(Observed.DEAD, "connection refused")
        if op is Op.UPDATE and self.abandoned:
            truth.in_session = False
            return Answer(Observed.PEER_LOST, "peer lost")
        fate = self.draw.draw(st.sampled_from(FATES), label=f"{op} on {worker}")
        if fate == "dead":
            truth.dead = True
            return Answer(Observed.DEAD, "died")
        if fate == "refused":
            if op is Op.UPDATE:
                truth.in_session = False
                truth.weights = (*truth.weights, -1)
                return Answer(Observed.REJECTED, "bad shape")
            return Answer(Observed.REFUSED, "no")
        if fate == "lost_before":
            return Answer(Observed.LOST, "no answer")
        answer = truth.apply(op, self.tx, worker)
        return Answer(Observed.LOST, "no answer") if fate == "lost_after" else answer

    def act(self, act: Act) -> ActDone | ActFailed:
        if self.abandoned and act in (Act.JOIN, Act.SEND):
            return ActFailed(act, "abandoned")
        if act is Act.COMMIT:
            return ActDone(act)
        if act is Act.SEND and self.tx.acknowledged:
            # The sender knows: it fails unless every worker took this bucket.
            number = self.tx.updates
            if not all(number in t.weights for t in self.truth.values()):
                return ActFailed(act, "a receiver is missing")
        elif not self.draw.draw(st.booleans(), label=f"{act} succeeds"):
            return ActFailed(act, "no")
        return ActDone(act, more=act is Act.SEND and self.tx.updates < BUCKETS)

    def step(self) -> None:
        choices = [c for c in self.open if not self._waits(c)]
        command = self.draw.draw(st.sampled_from(choices), label="next")
        self.open.remove(command)
        match command:
            case Ask(worker, op):
                event: Answered | ActDone | ActFailed = Answered(
                    worker, op, self.answer(worker, op)
                )
            case Acted(act):
                event = self.act(act)
            case _:
                raise AssertionError(command)
        self.take(*advance(self.tx, event))

    def _waits(self, command: Command) -> bool:
        """An acknowledging sender ends after the workers of its bucket."""
        return (
            isinstance(command, Acted)
            and command.act is Act.SEND
            and self.tx.acknowledged
            and any(isinstance(c, Ask) for c in self.open)
        )


def run(draw: st.DataObject, names: int, *, acknowledged: bool, cancel_at: int | None) -> World:
    world = World(names, draw, acknowledged=acknowledged)
    world.take(*begin(world.tx))
    for number in range(500):
        if number == cancel_at and not world.tx.ended:
            world.take(*advance(world.tx, Cancelled()))
        if world.tx.ended:
            return world
        world.step()
    raise AssertionError("the publication does not end")


@pytest.mark.parametrize("acknowledged", [True, False])
@given(draw=st.data(), names=st.integers(1, 3), cancel_at=st.none() | st.integers(0, 40))
def test_what_a_publication_concludes_is_true_of_every_worker(
    acknowledged: bool, draw: st.DataObject, names: int, cancel_at: int | None
) -> None:
    world = run(draw, names, acknowledged=acknowledged, cancel_at=cancel_at)
    tx = world.tx
    assert not tx.waiting
    assert not world.open
    for worker in world.ids:
        truth, progress = world.truth[worker], tx.workers[worker]
        first = world.first[worker]
        verdict = conclude(tx, progress, VERDICTS)
        barrier = fence(tx, progress, verdict)
        if verdict.outcome is Outcome.COMMITTED:
            assert truth.label == LABEL
            assert truth.is_new
        if verdict.outcome is Outcome.UNTOUCHED:
            assert truth.weights in (first.weights, ())
            assert truth.label == first.label or barrier is not None
            assert truth.dead or not truth.in_session or first.in_session
        if barrier is None:
            assert verdict.outcome in (Outcome.COMMITTED, Outcome.UNTOUCHED)
            assert not truth.in_session or first.in_session
            assert not truth.paused or first.paused
        if not tx.committed:
            assert tx.error is not None
        if first.in_session and not (truth.label == LABEL and truth.is_new):
            # What was left half-updated stays paused whatever happens, unless it committed.
            assert truth.paused or truth.dead
    if tx.committed:
        assert all(t.is_new and t.label == LABEL for t in world.truth.values())


@given(draw=st.data(), names=st.integers(1, 3), cancel_at=st.none() | st.integers(0, 40))
def test_nobody_with_unproved_weights_is_ever_asked_to_resume(
    draw: st.DataObject, names: int, cancel_at: int | None
) -> None:
    world = run(draw, names, acknowledged=True, cancel_at=cancel_at)
    begun: set[WorkerId] = set()
    for op, phase, worker in world.asked:
        if op is Op.BEGIN:
            begun.add(worker)
        if op is Op.RESUME:
            assert phase is Phase.RESUME or (phase is Phase.RELEASE and worker not in begun)
    if Op.RESUME in {op for op, phase, _ in world.asked if phase is Phase.RESUME}:
        assert world.tx.committed


@given(draw=st.data(), names=st.integers(1, 3))
def test_collectives_are_asked_once_and_never_again(draw: st.DataObject, names: int) -> None:
    world = run(draw, names, acknowledged=True, cancel_at=None)
    for worker in world.ids:
        once = [op for op, _, w in world.asked if w == worker]
        for op in (Op.JOIN, Op.BEGIN, Op.FINISH, Op.CLOSE):
            assert once.count(op) <= 1
        assert once.count(Op.UPDATE) <= BUCKETS


def test_without_a_failure_every_row_of_the_good_path_runs_in_order() -> None:
    tx, commands = begin(_fresh())
    following: tuple[Command, ...] = ()
    order: list[Phase] = []
    while not tx.ended:
        order.append(tx.phase)
        for command in commands:
            match command:
                case Ask(worker, op):
                    facts = {"label": LABEL}
                    event: Answered | ActDone = Answered(
                        worker, op, Answer(Observed.DONE, facts=facts)
                    )
                case Acted(act):
                    event = ActDone(act, more=act is Act.SEND and tx.updates < BUCKETS)
                case _:
                    raise AssertionError(command)
            tx, following = advance(tx, event)
        commands = following
    assert tx.phase is Phase.DONE
    assert tx.committed
    assert order == [
        Phase.PREFLIGHT,
        Phase.STAGE,
        Phase.GROUP,
        Phase.PAUSE,
        Phase.CONFIRM,
        Phase.MARK,
        Phase.BEGIN,
        Phase.TRANSFER,
        Phase.TRANSFER,
        Phase.FINISH,
        Phase.VERIFY,
        Phase.COMMIT,
        Phase.RESUME,
        Phase.PROBE,
    ]


def test_a_worker_that_was_left_broken_is_healed_before_it_begins() -> None:
    broken = Fence(
        strength=FenceStrength.PAUSED,
        reason="peer lost",
        recovery=Recovery.CLOSE_THEN_REPUBLISH,
    )
    tx, commands = begin(_fresh(fence=broken))
    following: tuple[Command, ...] = ()
    asked: list[Op] = []
    while not tx.ended:
        for command in commands:
            if isinstance(command, Ask):
                asked.append(command.op)
                answer = Answer(Observed.DONE, facts={"label": LABEL})
                tx, following = advance(tx, Answered(command.worker, command.op, answer))
            elif isinstance(command, Acted):
                tx, following = advance(tx, ActDone(command.act))
        commands = following
    assert tx.committed
    assert asked.index(Op.HEAL) + 1 == asked.index(Op.BEGIN)


def test_every_phase_of_the_table_leads_to_an_end() -> None:
    ends = {Phase.DONE, Phase.RELEASED, Phase.HELD}
    reaches: Mapping[Phase, set[Phase]] = {p: {r.then, r.otherwise} for p, r in TABLE.items()}
    for start in TABLE:
        seen, todo = set(), [start]
        while todo:
            phase = todo.pop()
            if phase not in seen and phase not in ends:
                seen.add(phase)
                todo.extend(reaches[phase])
            elif phase in ends:
                break
        else:
            raise AssertionError(f"{start} reaches no end")


def test_the_diagram_names_every_phase() -> None:
    drawn = mermaid()
    assert all(f"{phase}" in drawn for phase in Phase)


def test_an_event_that_nobody_waits_for_is_refused() -> None:
    tx, _ = begin(_fresh())
    with pytest.raises(ValueError, match="nobody waits"):
        advance(tx, ActDone(Act.SEND))


def _fresh(fence: Fence | None = None) -> Transaction:
    worker = WorkerId(provider="vllm", instance="0")
    return Transaction(label=LABEL, workers={worker: Progress(fence=fence)}, acknowledged=True)
