"""The publication table against a model of workers that may fail at every call.

The model keeps what is true of each worker; hypothesis chooses what happens to each call and in
which order answers arrive. `tests/explore` tries everything there is for few workers; here are
more, with more that goes wrong.
"""

import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genapi.publication.evidence import Answer, Observed, Op
from genapi.publication.table import TABLE, Act, Phase, mermaid
from genapi.publication.transaction import (
    Abandon,
    ActDone,
    Acted,
    ActFailed,
    Answered,
    Ask,
    Broke,
    Cancelled,
    Command,
    Cut,
    Event,
    Progress,
    Transaction,
    advance,
    begin,
)
from genapi.types.ids import WorkerId
from genapi.types.worker import Fence, FenceStrength, Recovery
from tests.support.publication_invariants import check_commands, check_end, check_moment
from tests.support.workers_model import (
    BUCKETS,
    FRESH,
    LEFT,
    NEW,
    PAUSED,
    SPOILT,
    Call,
    Fate,
    Truth,
    fates,
    react,
    unsent,
)

KINDS = [*itertools.product([True], [False, True], [False, True]), (False, False, False)]
"""Whether buckets are sent, whether the sender knows that they were taken, and whether FINISH sets
the label. Files are not sent."""


class World:
    """Workers, the sender, and the calls that are open."""

    def __init__(
        self,
        draw: st.DataObject,
        *,
        names: int,
        kind: tuple[bool, bool, bool],
    ) -> None:
        sends, acknowledged, finish_sets_label = kind
        self.draw = draw
        self.ids = [WorkerId(provider="vllm", instance=str(i)) for i in range(names)]
        found = st.sampled_from([FRESH, PAUSED, LEFT, SPOILT])
        self.truth: Mapping[WorkerId, Truth] = {
            worker: draw.draw(found, label="found") for worker in self.ids
        }
        self.first = self.truth
        # How many good answers there are to each bad one: with few of them no run gets far.
        self.calm = draw.draw(st.sampled_from([1, 10, 100]), label="calm")
        self.open: list[Ask | Acted] = []
        groups = draw.draw(st.integers(1, 3), label="groups") if sends else names
        standing = st.sets(st.integers(0, groups)) if sends else st.just(range(groups))
        least = st.none() | st.integers(1, names)
        self.tx = Transaction(
            label=NEW,
            workers={worker: Progress(group=i % groups) for i, worker in enumerate(self.ids)},
            standing=frozenset(draw.draw(standing, label="standing")),
            sends=sends,
            min_workers=draw.draw(least, label="min_workers"),
            acknowledged=acknowledged,
            finish_sets_label=finish_sets_label,
        )

    def take(self, tx: Transaction, commands: tuple[Command, ...]) -> None:
        self.tx = tx
        check_commands(tx, commands, self.truth)
        check_moment(tx, self.truth, self.first)
        for command in commands:
            match command:
                case Ask() | Acted():
                    self.open.append(command)
                case Abandon() | Cut():
                    pass  # whatever may happen to a call may happen to one that is given up

    def answered(self, worker: WorkerId, op: Op) -> Answered:
        call, truth = Call.of(self.tx, worker, op), self.truth[worker]
        likely = (Fate.DONE,) * (self.calm - 1) * len(fates(call, truth))
        drawn = st.sampled_from(likely + fates(call, truth))
        fate = self.draw.draw(drawn, label=f"{op} on {worker}")
        after, answer = react(truth, call, fate)
        self.truth = {**self.truth, worker: after}
        return Answered(worker, op, answer)

    def acted(self, act: Act) -> ActDone | ActFailed | Broke:
        late = unsent(self.tx, self.truth) & self.tx.whole if act is Act.SEND else frozenset()
        for group in late:
            return Broke(act, group, "not all have taken it")
        succeeds = st.sampled_from([True] * self.calm + [False])
        if not self.draw.draw(succeeds, label=f"{act} succeeds"):
            return ActFailed(act, "no")
        return ActDone(act, more=act is Act.SEND and self.tx.updates < BUCKETS)

    def step(self) -> None:
        choices: list[Ask | Acted | Broke] = [c for c in self.open if not self._waits(c)]
        broken: list[Ask | Acted | Broke] = [
            Broke(c.act, group, "no")
            for c in self.open
            if isinstance(c, Acted) and c.act in (Act.JOIN, Act.SEND)
            for group in self.tx.whole
        ]
        drawn = st.sampled_from([*choices * self.calm, *broken])
        command = self.draw.draw(drawn, label="next")
        event: Event
        match command:
            case Ask(worker, op):
                event = self.answered(worker, op)
            case Acted(act):
                event = self.acted(act)
            case Broke():
                event = command
        if isinstance(command, Ask | Acted) and not isinstance(event, Broke):
            self.open.remove(command)  # after a Broke the act goes on with the other groups
        self.take(*advance(self.tx, event))

    def _waits(self, command: Ask | Acted) -> bool:
        """An acknowledging sender ends after the workers of its bucket."""
        return (
            isinstance(command, Acted)
            and command.act is Act.SEND
            and self.tx.acknowledged
            and any(isinstance(c, Ask) for c in self.open)
        )


@given(
    draw=st.data(),
    names=st.integers(1, 4),
    cancel_at=st.none() | st.integers(0, 60),
    kind=st.sampled_from(KINDS),
)
def test_what_a_publication_does_and_concludes_is_true_of_every_worker(
    draw: st.DataObject,
    names: int,
    cancel_at: int | None,
    kind: tuple[bool, bool, bool],
) -> None:
    world = World(draw, names=names, kind=kind)
    world.take(*begin(world.tx))
    for number in range(500):
        if number == cancel_at and not world.tx.ended:
            world.take(*advance(world.tx, Cancelled()))
        if world.tx.ended:
            break
        world.step()
    assert world.tx.ended
    assert not world.open
    check_end(world.tx, world.truth, world.first)


def test_without_a_failure_every_row_of_the_good_path_runs_in_order() -> None:
    tx, commands = begin(_fresh())
    following: tuple[Command, ...] = ()
    order: list[Phase] = []
    while not tx.ended:
        order.append(tx.phase)
        for command in commands:
            match command:
                case Ask(worker, op):
                    facts = {"label": NEW}
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
                answer = Answer(Observed.DONE, facts={"label": NEW})
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
    return Transaction(label=NEW, workers={worker: Progress(fence=fence)}, acknowledged=True)


def test_the_diagram_has_one_arrow_for_success_and_one_for_failure_where_they_differ() -> None:
    lines = mermaid().splitlines()
    assert lines[:2] == ["stateDiagram-v2", "    [*] --> preflight"]
    assert "    begin --> transfer" in lines
    assert "    begin --> close: fails" in lines
    assert "    release --> released" in lines
    assert not [line for line in lines if line.startswith("    release --> released:")]
    assert lines[-3:] == ["    done --> [*]", "    released --> [*]", "    held --> [*]"]
