"""An exhaustive search of the publication table: every order, every answer, every crash.

States are visited in the order of how many things went wrong, then of how many events there were,
so that the trace of a failure is a smallest one. Workers are interchangeable: a state is what is
true and known of each, in any order. What a state leaves out of a transaction is what nothing reads
again; `Setting.exact` keeps it all, and a test compares the two.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from genapi.errors import ConfigError
from genapi.publication.evidence import Op
from genapi.publication.numbering import version_to_publish
from genapi.publication.table import Act, Phase
from genapi.publication.transaction import (
    ActDone,
    ActFailed,
    Answered,
    Broke,
    Cancelled,
    Event,
    Progress,
    Transaction,
    advance,
    begin,
)
from genapi.types.ids import WorkerId
from genapi.types.policy import PolicyVersion, parse_label, parse_updating_label
from genapi.types.worker import Fence, FenceStrength, Recovery
from tests.support.publication_invariants import (
    check_commands,
    check_end,
    check_moment,
    way_back,
)
from tests.support.workers_model import (
    BUCKETS,
    DEAD,
    FRESH,
    GARBAGE,
    LEFT,
    NEW,
    PAUSED,
    RESTARTED,
    SPOILT,
    Call,
    Fate,
    Truth,
    broken_off,
    fates,
    react,
    unsent,
)

_UP_TO_VERIFY = list(Phase)[: list(Phase).index(Phase.COMMIT)]
_ORDER = [*_UP_TO_VERIFY, Phase.CLOSE, Phase.EXAMINE]  # those that are proved may commit after it
_ORDER += [phase for phase in Phase if phase not in _ORDER]
RANK = {phase: rank for rank, phase in enumerate(_ORDER)}
WAYS = 3
"""Most publications until every worker is back: what needs a restart may show in the second."""
READ_LATER = (
    Op.INSPECT,
    Op.PAUSE,
    Op.CONFIRM,
    Op.UNMARK,
    Op.FINISH,
    Op.READ,
    Op.RESUME,
    Op.CLOSE,
    Op.PROBE,
    Op.SHUT,
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is explored.

    Attributes:
        workers: how many.
        groups: in how many transfer groups they are.
        faults: most things that go wrong in the first attempt; each answer but the good one, each
            failure of the publisher's own part and a cancellation count as one.
        second_faults: the same for the second attempt.
        acknowledged: whether the sender knows that a bucket was taken.
        finish_sets_label: whether FINISH carries the label.
        marks: whether labels are written ahead.
        join: whether the group has to be built.
        min_workers: how many proved workers may serve without the others; None = all have to be.
        exact: whether states keep what nothing reads again.
    """

    workers: int = 2
    groups: int = 1
    faults: int = 2
    second_faults: int = 1
    acknowledged: bool = True
    finish_sets_label: bool = True
    marks: bool = True
    join: bool = True
    min_workers: int | None = None
    exact: bool = False


KINDS = (FRESH, PAUSED, LEFT, SPOILT)
"""How a first publication may find a worker."""


class Place(WorkerId):
    """A worker's id that is compared at once."""

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


class Node(NamedTuple):
    """One state: the transaction, and what is true of the workers now and at its start."""

    tx: Transaction
    truths: Mapping[WorkerId, Truth]
    firsts: Mapping[WorkerId, Truth]


class Start(NamedTuple):
    """Where an attempt begins: what is true of the workers, what is known of them.

    Attributes:
        workers: truth and remembered recovery of each.
        tried: the last attempt of the step that the board or this process knows of.
    """

    workers: tuple[tuple[Truth, Recovery | None], ...]
    tried: int = 0


T = TypeVar("T")
Key = tuple[Any, ...]


class _Found(NamedTuple):
    """A state that is to be visited, and how it was come by."""

    node: Node
    parent: Key | None
    how: str
    depth: int


@dataclass
class Found:
    """What a search found.

    Attributes:
        states: different states.
        events: transitions that were followed.
        depth: events of the longest shortest way to a state.
        starts: different states in which a second attempt began.
        ends: different ends, by what is concluded and true of each worker.
    """

    states: int = 0
    events: int = 0
    depth: int = 0
    starts: int = 0
    seconds: float = 0.0
    ends: set[Key] = field(default_factory=set)

    def __str__(self) -> str:
        return (
            f"{self.states:,} states, {self.events:,} events, depth {self.depth}, "
            f"{self.starts} starts of a second attempt, {self.seconds:.1f} s"
        )


class HoleError(AssertionError):
    """An invariant does not hold; the message has the events that lead there."""


class Search:
    """One search. `run` it once."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.found = Found()
        self.ids: list[WorkerId] = [
            Place(provider="vllm", instance=str(number)) for number in range(setting.workers)
        ]
        self._numbers: dict[Key, int] = {}
        self._came: dict[Key, tuple[Key | None, str]] = {}
        self._starts: dict[Start, tuple[Key, str]] = {}
        self._healed: set[Start] = set()

    def run(self) -> Found:
        """Explore both attempts.

        Raises:
            HoleError: an invariant does not hold.
        """
        began = time.monotonic()
        kinds = itertools.combinations_with_replacement(KINDS, self.setting.workers)
        firsts = {
            Start(tuple((truth, None) for truth in truths)): (None, f"found {_names(truths)}")
            for truths in kinds
        }
        self._explore(firsts, self.setting.faults, first=True)
        seconds = {
            start: (key, how) for start, (key, how) in self._starts.items() if start not in firsts
        }
        self.found.starts = len(seconds)
        self._explore(seconds, self.setting.second_faults, first=False)
        self.found.seconds = time.monotonic() - began
        return self.found

    def _explore(
        self, starts: Mapping[Start, tuple[Key | None, str]], faults: int, *, first: bool
    ) -> None:
        layers: list[list[_Found]] = [[] for _ in range(faults + 2)]
        for start, (key, how) in starts.items():
            node = self._guarded(key, how, partial(self._begin, start))
            if node is not None:
                layers[0].append(_Found(node, key, how, 0))
        for layer, worse in itertools.pairwise(layers):
            for found in layer:  # it grows while it is gone through
                key = self._visited(found, first=first)
                if key is None:
                    continue
                for event, truths, cost, text in self._moves(found.node):
                    self.found.events += 1
                    step = partial(self._step, found.node, event, truths)
                    following = self._guarded(key, text, step)
                    (worse if cost else layer).append(_Found(following, key, text, found.depth + 1))
            layer.clear()

    def _visited(self, found: "_Found", *, first: bool) -> Key | None:
        """The key of a state that was not met before; what its end shows is checked."""
        key = self._key(found.node)
        if key in self._came:
            return None
        self._came[key] = (found.parent, found.how)
        self.found.states += 1
        self.found.depth = max(self.found.depth, found.depth)
        if found.node.tx.ended:
            self._guarded(key, "", partial(self._end, found.node))
        if first:
            self._note_starts(found.node, key)
        return key

    def _guarded(self, key: Key | None, text: str, what: Callable[[], T]) -> T:
        try:
            return what()
        except (AssertionError, ValueError) as error:
            lines = [text] if text else []
            while key is not None:
                key, how = self._came[key]
                lines.append(how)
            trace = "\n  ".join(reversed(lines))
            raise HoleError(f"{error}, after\n  {trace}") from error

    # one attempt

    def _begin(self, start: Start) -> Node | None:
        truths = dict(zip(self.ids, (truth for truth, _ in start.workers), strict=True))
        version = _next_version(start)
        if version is None:
            return None
        fences = [
            None
            if recovery is None
            else Fence(strength=FenceStrength.PAUSED, reason="", recovery=recovery)
            for _, recovery in start.workers
        ]
        tx = Transaction(
            label=version.label,
            workers={
                w: Progress(fence=f, group=number * self.setting.groups // len(self.ids))
                for number, (w, f) in enumerate(zip(self.ids, fences, strict=True))
            },
            acknowledged=self.setting.acknowledged,
            finish_sets_label=self.setting.finish_sets_label,
            marks=self.setting.marks,
            standing=frozenset(() if self.setting.join else range(self.setting.groups)),
            min_workers=self.setting.min_workers,
        )
        held = [truth.label for truth in truths.values()]
        assert tx.label not in held, "a label is used twice"
        tx, commands = begin(tx)
        check_commands(tx, commands, truths)
        return Node(tx, truths, truths)

    def _step(self, node: Node, event: Event, truths: Mapping[WorkerId, Truth]) -> Node:
        before = node.tx
        tx, commands = advance(before, event)
        check_commands(tx, commands, truths)
        check_moment(tx, truths, node.firsts)
        if not isinstance(event, Cancelled):
            assert _progress(tx) > _progress(before), "it does not come nearer to an end"
        return Node(tx, truths, node.firsts)

    def _moves(self, node: Node) -> Iterator[tuple[Event, Mapping[WorkerId, Truth], bool, str]]:
        tx, truths = node.tx, node.truths
        if tx.ended:
            return
        seen: set[int] = set()
        for worker, op in tx.waiting:
            local = self._local(node, worker)
            if local in seen:
                continue  # the same happens to a worker of whom the same is true
            seen.add(local)
            call = Call.of(tx, worker, op)
            told: set[Key] = set()
            for fate in fates(call, truths[worker]):
                truth, answer = react(truths[worker], call, fate)
                same = (truth, answer.observed)
                if same in told:
                    continue
                told.add(same)
                broken = tx.workers[worker].group in tx.broken
                expected = fate is Fate.DONE or (fate is Fate.PEER_LOST and broken)
                text = f"{op} on {worker.instance}: {fate}"
                event = Answered(worker, op, answer)
                yield event, {**truths, worker: truth}, not expected, text
        for acted, cost in _acts(tx, truths):
            yield acted, truths, cost, str(acted)
        if not tx.failed and tx.row.on_cancel != "go_on":
            yield Cancelled(), truths, True, "cancelled"

    # what comes after an attempt

    def _end(self, node: Node) -> None:
        check_end(node.tx, node.truths, node.firsts)
        locals_ = [(_wordless(node.tx, w), node.truths[w], node.firsts[w]) for w in self.ids]
        self.found.ends.add((node.tx.phase, *sorted(map(repr, locals_))))
        self._follow_the_way_back(node)

    def _follow_the_way_back(self, node: Node) -> None:
        """Do what the receipts say, and publish once more, as often as they say something new."""
        for _ in range(WAYS):
            workers = [self._brought_back(node, worker) for worker in self.ids]
            start = Start(_sorted(workers), tried=_attempt(node.tx))
            if start in self._healed:
                return
            self._healed.add(start)
            again = self._begin(start)
            while again is not None and not again.tx.ended:
                event, truths, _, _ = next(self._moves(again))
                again = self._step(again, event, truths)
            assert again is not None
            if again.tx.committed:
                return
            node = again
        raise AssertionError(f"the way back does not lead back: {node.tx.error}")

    def _brought_back(self, node: Node, worker: WorkerId) -> tuple[Truth, Recovery | None]:
        barrier, recovery = way_back(node.tx, worker)
        truth = _settled(node.truths[worker])
        if truth.dead or recovery is Recovery.RESTART_THEN_PUBLISH:
            return RESTARTED, Recovery.REPUBLISH
        return truth, barrier.recovery if barrier is not None else None

    def _note_starts(self, node: Node, key: Key) -> None:
        """Where another attempt would begin: after a crash in this state, or after its end."""
        tx = node.tx
        if tx.ended:
            fenced = [(w, way_back(tx, w)[0]) for w in self.ids]
            remembered = [(node.truths[w], f.recovery if f else None) for w, f in fenced]
            self._note(remembered, key, "it is published again", tried=_attempt(tx))
            self._note([(t, None) for t, _ in remembered], key, "another process publishes")
            return
        calls = {worker: Call.of(tx, worker, op) for worker, op in tx.waiting}
        after = [
            {node.truths[w], *(_crashed(node.truths[w], calls[w]) if w in calls else ())}
            for w in self.ids
        ]
        for truths in itertools.product(*after):
            workers = [(truth, None) for truth in truths]
            self._note(workers, key, f"the publisher is killed, leaves {_names(truths)}")

    def _note(
        self,
        workers: Sequence[tuple[Truth, Recovery | None]],
        key: Key,
        how: str,
        *,
        tried: int = 0,
    ) -> None:
        start = Start(_sorted([(_settled(truth), known) for truth, known in workers]), tried)
        self._starts.setdefault(start, (key, how))

    # keys

    def _key(self, node: Node) -> Key:
        tx = node.tx
        return (
            tx.label,
            tx.phase,
            tx.acting,
            tx.more,
            tx.updates,
            tx.failed,
            tx.broken,
            tx.committed,
            *sorted(self._local(node, worker) for worker in self.ids),
        )

    def _local(self, node: Node, worker: WorkerId) -> int:
        progress = node.tx.workers[worker]
        answers, failure = progress.answers, progress.failure
        exact = self.setting.exact
        key = (
            node.truths[worker],
            node.firsts[worker],
            progress.asked if exact else frozenset(progress.asked),
            tuple(
                (op, a.observed, a.facts.get("label"), a.facts.get("paused"))
                for op, a in answers.items()
                if exact or op in READ_LATER
            ),
            progress.dead,
            progress.group,
            None if failure is None else (failure[0], failure[1].observed),
            None if progress.fence is None else progress.fence.recovery,
            next((op for w, op in node.tx.waiting if w == worker), None),
        )
        return self._numbers.setdefault(key, len(self._numbers))


def _acts(tx: Transaction, truths: Mapping[WorkerId, Truth]) -> Iterator[tuple[Event, bool]]:
    """What may become of the publisher's own part, and whether something goes wrong then."""
    act = tx.acting
    if act is None:
        return
    if tx.waiting and act is Act.SEND and tx.acknowledged:
        return
    late = unsent(tx, truths) & tx.whole if act is Act.SEND else frozenset()
    if not late:
        yield ActDone(act, more=act is Act.SEND and tx.updates < BUCKETS), False
    if act in (Act.JOIN, Act.SEND):
        for group in tx.whole - tx.standing if act is Act.JOIN else tx.whole:
            yield Broke(act, group, "no"), True
    if act not in (Act.JOIN, Act.SEND) or len(tx.whole) > 1:
        yield ActFailed(act, "no"), True


def _wordless(tx: Transaction, worker: WorkerId) -> tuple[object, ...]:
    """The way back without its reason: words name answers that decide nothing."""
    barrier, recovery = way_back(tx, worker)
    strength = None if barrier is None else (barrier.strength, barrier.recovery)
    return strength, recovery


def _next_version(start: Start) -> PolicyVersion | None:
    """The version that a publisher gives its attempt who reads these workers."""
    labels = [truth.label for truth, _ in start.workers if not truth.dead]
    held = [version for label in labels if (version := parse_label(label)) is not None]
    begun = [version for label in labels if (version := parse_updating_label(label)) is not None]
    wanted = parse_label(NEW)
    assert wanted is not None
    tried = max([start.tried, *(v.attempt for v in begun if v.step == wanted.step)])
    for step in (wanted.step, wanted.step + 1):
        try:
            return version_to_publish(
                step, held, run="r", committed=None, tried=tried, unfinished=True
            )
        except ConfigError:
            tried = 0
    return None


def _attempt(tx: Transaction) -> int:
    version = parse_label(tx.label)
    return version.attempt if version is not None and version.step == 3 else 0


def _progress(tx: Transaction) -> tuple[int, int, int, int]:
    open_calls = len(tx.waiting) + (tx.acting is not None)
    return RANK[tx.phase], tx.updates, -open_calls, len(tx.broken)


def _crashed(truth: Truth, call: Call) -> tuple[Truth, ...]:
    """What a call may do to a worker whose publisher is gone."""
    if truth.dead:
        return ()
    done, _ = react(truth, call, Fate.DONE)
    return done, broken_off(truth, call)


def _settled(truth: Truth) -> Truth:
    """What the next attempt meets: the process that is there now, and whether it is whole."""
    if truth.dead:
        return DEAD
    whole = len(set(truth.content)) == 1
    content = truth.content if whole else (GARBAGE,) * BUCKETS
    return replace(truth, replaced=False, content=content)


def _sorted(
    workers: Sequence[tuple[Truth, Recovery | None]],
) -> tuple[tuple[Truth, Recovery | None], ...]:
    return tuple(sorted(workers, key=repr))


def _names(truths: tuple[Truth, ...]) -> str:
    return ", ".join(_name(truth) for truth in truths)


def _name(truth: Truth) -> str:
    if truth.dead:
        return "a dead one"
    flags = [n for n in ("in_session", "paused", "torn", "poisoned") if getattr(truth, n)]
    return f"{truth.label} [{' '.join(truth.content)}] {' '.join(flags)}".rstrip()
