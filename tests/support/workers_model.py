"""Workers as a publication meets them: what is true of each, and what a call may do to it.

The model knows vLLM's rules (`contracts/recovery.md`): an update that breaks off drops the session
and leaves the worker torn, an empty session mends that; a rejected tensor poisons it for good; a
token generated in a session kills the engine. Where files are loaded one call does everything,
and on a worker that is torn it answers that all is well. Whoever drives it decides what happens to
a call.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from genapi.publication.evidence import Answer, Observed, Op
from genapi.publication.transaction import Progress, Transaction
from genapi.types.ids import WorkerId
from genapi.types.policy import PolicyVersion, parse_label
from genapi.types.worker import Recovery

BUCKETS = 2
OLD = PolicyVersion(run="r", step=2).label
NEW = PolicyVersion(run="r", step=3).label
GARBAGE = "?"


class Fate(StrEnum):
    """What happens to one call."""

    DONE = "done"
    REFUSED = "refused"
    """Answered an error; nothing was changed, but an update's session is dropped."""
    REJECTED = "rejected"
    """Answered an error in the middle of changing weights."""
    NOT_SENT = "not_sent"
    LOST_BEFORE = "lost_before_effect"
    LOST_AFTER = "lost_after_effect"
    PEER_LOST = "peer_lost"
    UNREADABLE = "unreadable"
    """Answered, in the middle of loading files, that it cannot read them."""
    DEAD = "dead"
    REPLACED = "replaced"
    """Another process took the worker's place, and answers."""


@dataclass(frozen=True, slots=True)
class Truth:
    """What is true of one worker, whatever anybody was told.

    Attributes:
        label: its weight label.
        content: for each bucket, the label under which what it holds was sent.
        in_session: whether an update session is open.
        paused: whether it generates nothing.
        torn: an update broke off in the middle, and no session was closed since.
        poisoned: it replays a rejected tensor until it is restarted.
        dead: nothing listens any more.
        replaced: it is another process than the one that the publication knows.
    """

    label: str = OLD
    content: tuple[str, ...] = (OLD,) * BUCKETS
    in_session: bool = False
    paused: bool = False
    torn: bool = False
    poisoned: bool = False
    dead: bool = False
    replaced: bool = False

    def holds(self, label: str) -> bool:
        """Whether it holds exactly what was sent under that label."""
        return self.content == (label,) * BUCKETS and not self.in_session

    @property
    def is_honest(self) -> bool:
        """Whether its label, where it names a version, names what it holds."""
        return not _names_a_version(self.label) or self.holds(self.label)


@functools.cache
def _names_a_version(label: str) -> bool:
    return parse_label(label) is not None


FRESH = Truth()
PAUSED = Truth(paused=True)
LEFT = Truth(label=OLD + "!updating", content=(GARBAGE,) * BUCKETS, in_session=True, paused=True)
SPOILT = replace(LEFT, in_session=False, poisoned=True)
DEAD = Truth(dead=True, paused=True)
RESTARTED = Truth(label="default", content=("default",) * BUCKETS)


@dataclass(frozen=True, slots=True)
class Call:
    """One call to one worker, with what the publisher knows of that worker."""

    op: Op
    label: str
    bucket: int
    finish_sets_label: bool
    progress: Progress
    loads: bool = False
    """Whether it is told to load files: nothing is begun or closed, and nobody asks it to."""

    @classmethod
    def of(cls, tx: Transaction, worker: WorkerId, op: Op) -> "Call":
        progress, loads = tx.workers[worker], not tx.sends
        return cls(op, tx.label, tx.updates, tx.finish_sets_label, progress, loads)


_CHANGES_WEIGHTS = (Op.BEGIN, Op.UPDATE, Op.FINISH, Op.CLOSE)
_IDENTIFIES = (Op.INSPECT, Op.UNMARK, Op.LABEL, Op.PROBE)
"""Before these the publisher reads who answers: they would be believed of another process."""


def fates(call: Call, truth: Truth) -> tuple[Fate, ...]:
    """Whatever can happen to the call. The first is what happens when nothing goes wrong."""
    if call.loads and call.op in _UNASKED:
        return (Fate.DONE, Fate.NOT_SENT)
    if truth.dead:
        return (Fate.DONE,)
    found = [Fate.DONE, Fate.REFUSED, Fate.LOST_BEFORE, Fate.LOST_AFTER, Fate.DEAD]
    if call.op in _CHANGES_WEIGHTS:
        found += [Fate.REJECTED, Fate.NOT_SENT]
    if call.op in (Op.JOIN, Op.UPDATE):
        found.append(Fate.UNREADABLE if call.loads else Fate.PEER_LOST)
    if not truth.replaced:
        found.append(Fate.REPLACED)
    return tuple(found)


def react(truth: Truth, call: Call, fate: Fate) -> tuple[Truth, Answer]:
    """The worker after the call, and what the publisher is told."""
    if truth.dead and not (call.loads and call.op in _UNASKED):
        refused = Observed.NOT_SENT if call.op is Op.INSPECT else Observed.DEAD
        return truth, Answer(refused)
    match fate:
        case Fate.DONE:
            return _apply(truth, call)
        case Fate.LOST_AFTER:
            return _apply(truth, call)[0], Answer(Observed.LOST)
        case Fate.REPLACED:
            return _apply(replace(RESTARTED, replaced=True), call)
        case Fate.LOST_BEFORE | Fate.NOT_SENT:
            lost = Observed.LOST if fate is Fate.LOST_BEFORE else Observed.NOT_SENT
            return truth, Answer(lost)
        case _:
            return _fail(truth, call, fate)


def _fail(truth: Truth, call: Call, fate: Fate) -> tuple[Truth, Answer]:
    match fate:
        case Fate.REJECTED:
            spoilt = replace(truth, content=(GARBAGE,) * BUCKETS, poisoned=True)
            return _drop(spoilt, call), Answer(Observed.REJECTED)
        case Fate.PEER_LOST:
            return broken_off(truth, call), Answer(Observed.PEER_LOST)
        case Fate.UNREADABLE:
            torn = replace(truth, content=(GARBAGE,) * BUCKETS, torn=True)
            return torn, Answer(Observed.UNREADABLE)
        case Fate.DEAD:
            return DEAD, Answer(Observed.DEAD)
        case _:
            # A probe that fails has read who answers, and under which label.
            seen = _apply(truth, call)[1].facts if call.op is Op.PROBE else {}
            return _drop(truth, call), Answer(Observed.REFUSED, facts=seen)


def broken_off(truth: Truth, call: Call) -> Truth:
    """The worker after the other end went away in the middle of the call."""
    if call.op is not Op.UPDATE or not truth.in_session:
        return truth
    return replace(_drop(truth, call), content=(GARBAGE,) * BUCKETS, torn=True)


def _drop(truth: Truth, call: Call) -> Truth:
    """An update that fails drops its session, and what arrived before stays half-loaded."""
    if call.op is not Op.UPDATE or not truth.in_session:
        return truth
    return replace(truth, in_session=False, torn=truth.torn or call.bucket > 1)


def _apply(truth: Truth, call: Call) -> tuple[Truth, Answer]:
    """Do what was asked, as vLLM does it."""
    if truth.replaced and call.op in _IDENTIFIES:
        other = Observed.OTHER_LABEL if call.op is Op.PROBE else Observed.REFUSED
        return truth, Answer(other)
    if call.op in _READS:
        return truth, _read(truth, call)
    if call.op in _SESSION:
        return (_load if call.loads and call.op is not Op.HEAL else _in_session)(truth, call)
    if call.op in _LABELS:
        label = _LABELS[call.op](call)
        paused = truth.paused or call.op is Op.SHUT
        after = replace(truth, label=label, paused=paused)
        return after, Answer(Observed.DONE, facts={"label": label})
    done = Answer(Observed.DONE)
    if call.op is Op.PAUSE:
        return replace(truth, paused=True), done
    if call.op is Op.RESUME:
        # With a session open it generates, and its engine dies.
        return (DEAD if truth.in_session else replace(truth, paused=False)), done
    return truth, done


_READS = (Op.INSPECT, Op.READ, Op.PROBE, Op.CONFIRM)
_LABELS: Mapping[Op, Callable[[Call], str]] = {
    Op.MARK: lambda call: call.label + "!updating",
    Op.SHUT: lambda call: call.label + "!updating",
    Op.UNMARK: lambda call: str(call.progress.found["label"]),
    Op.LABEL: lambda call: call.label,
}


def _read(truth: Truth, call: Call) -> Answer:
    facts: Mapping[str, object] = {"label": truth.label, "paused": truth.paused}
    if call.op is Op.INSPECT:
        fence = call.progress.fence
        if fence is not None and fence.recovery is Recovery.RESTART_THEN_PUBLISH:
            return Answer(Observed.REFUSED)
    if call.op is Op.CONFIRM:
        return Answer(Observed.DONE if truth.paused else Observed.REFUSED)
    if call.op is Op.PROBE and truth.label != call.label:
        return Answer(Observed.OTHER_LABEL)
    return Answer(Observed.DONE, facts=facts)


_UNASKED = (Op.BEGIN, Op.FINISH, Op.CLOSE)
"""What a worker that loads files is not asked, so that nothing can happen to it."""


def _load(truth: Truth, call: Call) -> tuple[Truth, Answer]:
    if call.op is not Op.UPDATE:
        return truth, Answer(Observed.DONE)
    if truth.poisoned:
        return replace(truth, content=(GARBAGE,) * BUCKETS), Answer(Observed.REJECTED)
    if truth.torn or truth.in_session:
        return replace(truth, content=(GARBAGE,) * BUCKETS), Answer(Observed.DONE)
    return replace(truth, content=(call.label,) * BUCKETS), Answer(Observed.DONE)


_SESSION = (Op.HEAL, Op.BEGIN, Op.UPDATE, Op.FINISH, Op.CLOSE)


def _in_session(truth: Truth, call: Call) -> tuple[Truth, Answer]:
    done = Answer(Observed.DONE)
    if call.op is Op.BEGIN:
        if truth.in_session:
            return truth, Answer(Observed.SESSION_OPEN)
        return replace(truth, in_session=True), done
    if call.op is not Op.HEAL and not truth.in_session:
        return truth, Answer(Observed.NO_SESSION)
    if call.op is Op.UPDATE:
        content = list(truth.content)
        content[call.bucket - 1] = call.label
        if truth.torn or truth.poisoned:
            spoilt = replace(truth, content=(GARBAGE,) * BUCKETS, poisoned=True, in_session=False)
            return spoilt, Answer(Observed.REJECTED)
        return replace(truth, content=tuple(content)), done
    if truth.poisoned:
        return replace(truth, in_session=True), Answer(Observed.REJECTED)
    closed = replace(truth, in_session=False, torn=False)
    if call.op is Op.FINISH and call.finish_sets_label:
        closed = replace(closed, label=call.label)
    return closed, done


def unsent(tx: Transaction, truths: Mapping[WorkerId, Truth]) -> frozenset[int]:
    """The groups whose sender, which acknowledges, cannot say that all took the present bucket."""
    return frozenset(
        tx.workers[worker].group
        for worker, truth in truths.items()
        if tx.acknowledged and not truth.dead and truth.content[tx.updates - 1] != tx.label
    )
