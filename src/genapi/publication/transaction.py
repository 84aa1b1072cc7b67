"""One publication as a value: events in, commands out.

The rule of this file: no I/O, no clock, no waiting, and nothing is proved here. `advance` walks
`TABLE`; `conclude` picks what a worker showed that says most, and the provider's rows say what
that proves; `fence` says what keeps traffic from the worker meanwhile.
"""

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from genapi.publication.evidence import Answer, Observed, Op, Reached, Seen, Verdict
from genapi.publication.table import TABLE, Act, Phase, Row, Who
from genapi.publication.verification import Checks, compare
from genapi.types.ids import WorkerId
from genapi.types.policy import is_updating_label
from genapi.types.worker import Fence, FenceStrength, Recovery

__all__ = (
    "Abandon",
    "ActDone",
    "ActFailed",
    "Acted",
    "Answered",
    "Ask",
    "Broke",
    "Cancelled",
    "Command",
    "Cut",
    "Event",
    "Progress",
    "Transaction",
    "advance",
    "begin",
    "conclude",
    "fence",
    "is_proved",
)


@dataclass(frozen=True, slots=True)
class Answered:
    """A worker answered, or its answer was given up."""

    worker: WorkerId
    op: Op
    answer: Answer


@dataclass(frozen=True, slots=True)
class ActDone:
    """The publisher did its part; `more` = another bucket follows."""

    act: Act
    more: bool = False


@dataclass(frozen=True, slots=True)
class ActFailed:
    """The publisher's part failed."""

    act: Act
    error: str


@dataclass(frozen=True, slots=True)
class Broke:
    """The publisher's part failed for one group; it goes on with the others."""

    act: Act
    group: int
    error: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The caller does not want the publication any more."""


Event = Answered | ActDone | ActFailed | Broke | Cancelled


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask one worker; answered by `Answered`."""

    worker: WorkerId
    op: Op


@dataclass(frozen=True, slots=True)
class Acted:
    """Do the publisher's own part; answered by `ActDone` or `ActFailed`."""

    act: Act


@dataclass(frozen=True, slots=True)
class Abandon:
    """Destroy the trainer's end of one group now, so that its receivers fail at once."""

    group: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Give up what is being waited for; every open call is then `Answered` as LOST."""


Command = Ask | Acted | Abandon | Cut


@dataclass(frozen=True, slots=True)
class Progress:
    """What one worker was asked and what came back.

    Attributes:
        asked: operations it was asked, in order.
        answers: the last answer to each operation.
        failure: the first answer that was not what the row needed.
        fence: the fence it had at the start.
        open: the operation that it has not answered yet.
        group: the transfer group it is in.
    """

    asked: tuple[Op, ...] = ()
    answers: Mapping[Op, Answer] = field(default_factory=dict)
    failure: tuple[Op, Answer] | None = None
    fence: Fence | None = None
    open: Op | None = None
    group: int = 0

    def did(self, op: Op) -> bool:
        """Whether it answered that it did `op`."""
        answer = self.answers.get(op)
        return answer is not None and answer.done

    @property
    def found(self) -> Mapping[str, object]:
        """What PREFLIGHT read: `label`, `paused`."""
        inspected = self.answers.get(Op.INSPECT)
        return inspected.facts if inspected is not None else {}

    @property
    def broken(self) -> bool:
        """Whether a failure left it in the middle of an update."""
        fenced = self.fence is not None and self.fence.recovery is Recovery.CLOSE_THEN_REPUBLISH
        return fenced or is_updating_label(self.found.get("label"))

    @property
    def dead(self) -> bool:
        """Whether any answer shows that the engine is gone."""
        return any(a.observed is Observed.DEAD for a in self.answers.values())


@dataclass(frozen=True, slots=True)
class Transaction:
    """A publication at one moment.

    Attributes:
        label: the label that proves this attempt.
        workers: what happened to each, in rank order.
        standing: groups that need not be built, because they stand since an earlier publication.
        sends: whether the publisher sends buckets while workers take them; otherwise they load
            what lies there.
        finish_sets_label: whether FINISH carries the label.
        marks: whether a write-ahead label is set before BEGIN.
        acknowledged: whether a finished SEND proves that every worker took the bucket.
        checks: how workers are verified.
        min_workers: how many proved workers may serve without the others; None = all have to be.
        phase: where it stands.
        unanswered: how many workers have not answered yet.
        acting: the publisher's own part that is not done yet.
        more: whether another bucket follows the one being sent.
        updates: how many buckets were begun.
        failed: whether it can no longer commit.
        broken: groups whose trainer's end is destroyed, and whose workers go no further.
        committed: whether every worker was proved to hold the version.
        error: the first failure, in words; what only follows from another one gives way to it.
        echo: whether `error` may follow from a failure that nobody has told of yet.
    """

    label: str
    workers: Mapping[WorkerId, Progress]
    standing: frozenset[int] = frozenset()
    sends: bool = True
    finish_sets_label: bool = True
    marks: bool = True
    acknowledged: bool = False
    checks: Checks = field(default_factory=Checks)
    min_workers: int | None = None
    phase: Phase = Phase.PREFLIGHT
    unanswered: int = 0
    acting: Act | None = None
    more: bool = False
    updates: int = 0
    failed: bool = False
    broken: frozenset[int] = frozenset()
    committed: bool = False
    error: str | None = None
    echo: bool = False

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self.phase in (Phase.DONE, Phase.RELEASED, Phase.HELD)

    @property
    def whole(self) -> frozenset[int]:
        """Groups that are not broken."""
        return frozenset(p.group for p in self.workers.values()) - self.broken

    @property
    def row(self) -> Row:
        """The row of the present phase."""
        return TABLE[self.phase]

    @property
    def waiting(self) -> frozenset[tuple[WorkerId, Op]]:
        """Who has not answered yet, and what was asked."""
        return frozenset((w, p.open) for w, p in self.workers.items() if p.open is not None)


Step = tuple[Transaction, tuple[Command, ...]]


def begin(tx: Transaction) -> Step:
    """Enter the first phase."""
    return _enter(tx, tx.phase, ())


def advance(tx: Transaction, event: Event) -> Step:
    """The transaction after one event, and what has to be done next.

    Raises:
        ValueError: nobody waits for this event; the driver is wrong.
    """
    if tx.ended:
        message = f"the publication has ended ({tx.phase}); got {event}"
        raise ValueError(message)
    commands: tuple[Command, ...] = ()
    match event:
        case Answered(worker, op, answer):
            tx, commands = _answered(tx, worker, op, answer)
        case ActDone(act, more):
            tx = replace(_acted(tx, act), more=more)
        case ActFailed(act, error):
            tx, commands = _fail(_acted(tx, act), f"{act}: {error}", tx.whole)
        case Broke(act, group, error):
            _acted(tx, act)
            error = "; ".join((f"{act}: {error}", *_lost(tx, group)))
            tx, commands = _fail(tx, error, {group}, echo=group in tx.broken)
        case Cancelled():
            if tx.row.on_cancel != "go_on":
                tx, commands = _fail(tx, "cancelled", tx.whole)
            if tx.row.on_cancel == "cut":
                commands = (*commands, Cut())
    if tx.unanswered or tx.acting is not None:
        return tx, commands
    return _leave(tx, commands)


def _acted(tx: Transaction, act: Act) -> Transaction:
    if tx.acting is not act:
        message = f"nobody waits for {act}"
        raise ValueError(message)
    return replace(tx, acting=None)


def _answered(tx: Transaction, worker: WorkerId, op: Op, answer: Answer) -> Step:
    before = tx.workers.get(worker)
    if before is None or before.open is not op:
        message = f"nobody waits for {op} of {worker}"
        raise ValueError(message)
    if op is Op.READ and tx.phase is Phase.VERIFY and answer.done:
        answer = _checked_label(tx, answer)
    fails = not answer.done and not _tolerated(tx, before, answer)
    progress = replace(
        before,
        answers={**before.answers, op: answer},
        failure=before.failure or ((op, answer) if fails else None),
        open=None,
    )
    tx = replace(tx, workers={**tx.workers, worker: progress}, unanswered=tx.unanswered - 1)
    if not fails:
        return tx, ()
    error = f"{op} on {worker}: {answer.observed}: {answer.detail}"
    late = tx.row.breaks and before.group in tx.broken and answer.observed is Observed.LOST
    if late and not tx.echo:
        # The others answer when their group breaks: it may be this one that held them up.
        tx = replace(tx, error=f"{tx.error}; {error}")
    return _fail(tx, error, {before.group}, echo=answer.observed is Observed.PEER_LOST)


def _lost(tx: Transaction, group: int) -> Iterator[str]:
    """Whose answer was given up as lost in this row: one of them may be why its group broke."""
    for worker, progress in tx.workers.items():
        op = tx.row.ask
        answer = progress.answers.get(op) if op is not None and progress.open is None else None
        if progress.group == group and answer is not None and answer.observed is Observed.LOST:
            yield f"{op} on {worker}: {answer.observed}: {answer.detail}"


def _checked_label(tx: Transaction, answer: Answer) -> Answer:
    if answer.facts.get("label") == tx.label:
        return answer
    detail = f"label read back is {answer.facts.get('label')!r}, expected {tx.label!r}"
    return replace(answer, observed=Observed.OTHER_LABEL, detail=detail)


def _tolerated(tx: Transaction, progress: Progress, answer: Answer) -> bool:
    if answer.observed not in tx.row.tolerates:
        return False
    if tx.phase is Phase.FINISH:
        # A label that is set by a call of its own would not show that the session is closed.
        return tx.finish_sets_label
    if tx.phase is not Phase.TRANSFER:
        return True
    return tx.acknowledged and progress.group not in tx.broken


def _fail(tx: Transaction, error: str, groups: AbstractSet[int], *, echo: bool = False) -> Step:
    tx = replace(tx, failed=True)
    if tx.error is None or (tx.echo and not echo):
        tx = replace(tx, error=error, echo=echo)
    broken = frozenset(groups) - tx.broken if tx.row.breaks else frozenset()
    return replace(tx, broken=tx.broken | broken), tuple(map(Abandon, sorted(broken)))


def _compared(tx: Transaction) -> Transaction:
    """All have answered: whoever holds something else than the others has failed after all."""
    op = tx.row.ask
    if op is None:
        return tx
    answers = {w: p.answers[op] for w, p in tx.workers.items() if p.did(op)}
    workers = dict(tx.workers)
    faults: list[str] = []
    for worker, answer in compare(op, answers, tx.checks).items():
        before = workers[worker]
        failure = before.failure
        if not answer.done:
            failure = failure or (op, answer)
            faults.append(f"{op} on {worker}: {answer.observed}: {answer.detail}")
        workers[worker] = replace(before, answers={**before.answers, op: answer}, failure=failure)
    tx = replace(tx, workers=workers)
    return _fail(tx, faults[0], set())[0] if faults else tx


def _leave(tx: Transaction, commands: tuple[Command, ...]) -> Step:
    tx = _compared(tx)
    if tx.phase is Phase.COMMIT and not tx.failed:
        tx = replace(tx, committed=True)
    if tx.phase in (Phase.VERIFY, Phase.EXAMINE) and tx.failed and _is_enough(tx):
        return _enter(replace(tx, failed=False), Phase.COMMIT, commands)
    goes_on = not tx.failed or (tx.row.alone and bool(tx.whole))
    if tx.phase is Phase.TRANSFER and tx.more and goes_on:
        return _enter(tx, Phase.TRANSFER, commands)
    return _enter(tx, tx.row.then if goes_on else tx.row.otherwise, commands)


def _is_enough(tx: Transaction) -> bool:
    """Whether the workers that are proved may serve without the others."""
    proved = sum(is_proved(tx, progress) for progress in tx.workers.values())
    return tx.min_workers is not None and proved >= tx.min_workers


def _enter(tx: Transaction, phase: Phase, commands: tuple[Command, ...]) -> Step:
    tx = replace(tx, phase=phase)
    if tx.ended:
        return tx, commands
    row = tx.row
    asked = [w for w, p in tx.workers.items() if row.ask and _IS_ASKED[row.who](tx, p)]
    act = row.act if _is_acted(tx, row.act) else None
    op = row.ask
    if op is not None and asked:
        workers = dict(tx.workers)
        for worker in asked:
            progress = workers[worker]
            workers[worker] = replace(progress, asked=(*progress.asked, op), open=op)
        tx = replace(tx, workers=workers, unanswered=len(asked))
        commands = (*commands, *(Ask(w, op) for w in asked))
    if phase is Phase.TRANSFER:
        tx = replace(tx, updates=tx.updates + 1, more=False)
    if act is not None:
        tx = replace(tx, acting=act)
        commands = (*commands, Acted(act))
    if not asked and act is None:
        return _leave(tx, commands)
    return tx, commands


def _is_acted(tx: Transaction, act: Act | None) -> bool:
    """Whether there is anything for the publisher to do."""
    if act is Act.JOIN:
        return bool(tx.whole - tx.standing)
    return act is not Act.SEND or tx.sends


def is_proved(tx: Transaction, progress: Progress) -> bool:
    """Whether the worker was read to hold this attempt's label, and nothing else shows since."""
    read = progress.answers.get(Op.READ)
    if read is None or read.observed is Observed.DIFFERS or progress.dead:
        return False
    return read.facts.get("label") == tx.label


def _begun(progress: Progress) -> bool:
    return Op.BEGIN in progress.asked


def _is_whole(tx: Transaction, progress: Progress) -> bool:
    return progress.group not in tx.broken


def _is_doubted(tx: Transaction, progress: Progress) -> bool:
    probe = progress.answers.get(Op.PROBE)
    if probe is None or probe.done or progress.dead:
        return False
    return probe.facts.get("label") == tx.label


def _is_paused_clean(_: Transaction, progress: Progress) -> bool:
    ours = progress.did(Op.PAUSE) and progress.found.get("paused") is not True
    label_kept = Op.MARK not in progress.asked or progress.did(Op.UNMARK)
    clean = progress.fence is None and not progress.broken
    return ours and label_kept and clean and not _begun(progress)


_IS_ASKED: Mapping[Who, Callable[[Transaction, Progress], bool]] = MappingProxyType(
    {
        Who.ALL: lambda _tx, _p: True,
        Who.UNJOINED: lambda tx, p: p.group not in tx.standing,
        Who.MARKABLE: lambda tx, _p: tx.marks,
        Who.WHOLE: _is_whole,
        Who.UNLABELLED: lambda tx, p: not tx.finish_sets_label and p.did(Op.FINISH),
        Who.BROKEN: lambda _tx, p: p.broken,
        Who.PROVED: is_proved,
        Who.RESUMED: lambda _tx, p: p.did(Op.RESUME),
        Who.DOUBTED: _is_doubted,
        Who.BEGUN: lambda _tx, p: _begun(p) and not p.dead,
        Who.CUT_OFF: lambda tx, p: _begun(p) and not p.dead and not _is_whole(tx, p),
        Who.MARKED_CLEAN: lambda _tx, p: Op.MARK in p.asked and not _begun(p) and not p.broken,
        Who.PAUSED_CLEAN: _is_paused_clean,
    }
)


def conclude(tx: Transaction, progress: Progress, verdicts: Mapping[Seen, Verdict]) -> Verdict:
    """What is proved of one worker at the end, from its answers alone."""
    reached = _reached(tx, progress)
    for op, observed in _telling(tx, progress):
        for seen in (Seen(op, observed, reached), Seen(op, None, reached)):
            if seen in verdicts:
                return verdicts[seen]
    verdict = verdicts[Seen(None, None, reached)]
    if progress.fence is not None and reached is Reached.NOT_BEGUN:
        # Nothing was done to it: what an earlier publication concluded still holds.
        return replace(verdict, recovery=progress.fence.recovery)
    return verdict


def _reached(tx: Transaction, progress: Progress) -> Reached:
    if not _begun(progress):
        return Reached.NOT_BEGUN
    if is_proved(tx, progress):
        return Reached.HELD
    return Reached.SENT if Op.UPDATE in progress.asked else Reached.EMPTY


def _telling(tx: Transaction, progress: Progress) -> Iterator[tuple[Op | None, Observed]]:
    """What the worker showed, the most telling first."""
    if progress.dead:
        yield None, Observed.DEAD
    if _begun(progress):
        yield from _shown_after_begin(tx, progress)
    else:
        yield from _shown_before_begin(progress)


def _shown_before_begin(progress: Progress) -> Iterator[tuple[Op, Observed]]:
    if progress.failure is not None and progress.failure[0] is Op.HEAL:
        # Healing opens a session and closes it: what it answers counts as after a BEGIN.
        yield Op.HEAL, progress.failure[1].observed
    if progress.fence is not None:
        return
    if progress.broken:
        yield Op.INSPECT, Observed.UPDATING
    if _seen(progress, Op.INSPECT) is Observed.NOT_SENT:
        yield Op.INSPECT, Observed.NOT_SENT
    if Op.CONFIRM in progress.asked and not progress.did(Op.CONFIRM):
        yield Op.CONFIRM, _seen(progress, Op.CONFIRM)
    if Op.PAUSE in progress.asked and not progress.did(Op.RESUME):
        yield Op.PAUSE, _seen(progress, Op.PAUSE)


def _shown_after_begin(tx: Transaction, progress: Progress) -> Iterator[tuple[Op, Observed]]:
    for op in (Op.READ, Op.PROBE):
        if _seen(progress, op) is Observed.DIFFERS:
            yield op, Observed.DIFFERS
    if is_proved(tx, progress):
        last = Op.PROBE if Op.PROBE in progress.asked else Op.READ
        yield last, _seen(progress, last)
        return
    if _seen(progress, Op.CLOSE) is Observed.REJECTED:
        # Whatever had failed before, closing made it worse.
        yield Op.CLOSE, Observed.REJECTED
    if progress.failure is not None:
        yield progress.failure[0], progress.failure[1].observed
    if Op.CLOSE in progress.answers:
        yield Op.CLOSE, _seen(progress, Op.CLOSE)
    if progress.did(Op.READ):
        yield Op.READ, Observed.OTHER_LABEL


def _seen(progress: Progress, op: Op) -> Observed:
    answer = progress.answers.get(op)
    return Observed.LOST if answer is None else answer.observed


def fence(tx: Transaction, progress: Progress, verdict: Verdict) -> Fence | None:
    """The fence one worker has at the end; None = it may get traffic."""
    if verdict.recovery is None:
        return None
    reason = tx.error or "the publication did not commit"
    if progress.failure is not None:
        op, answer = progress.failure
        reason = f"{op}: {answer.observed}: {answer.detail}".rstrip(": ")
    old = progress.fence
    untouched = not _begun(progress) and not progress.dead
    if old is not None and untouched and old.recovery is verdict.recovery:
        return old
    return Fence(strength=_strength(tx, progress), reason=reason, recovery=verdict.recovery)


def _strength(tx: Transaction, progress: Progress) -> FenceStrength:
    if progress.dead:
        return FenceStrength.DEAD
    resumed = tx.committed and progress.did(Op.RESUME) and not progress.did(Op.SHUT)
    return FenceStrength.PAUSED if _begun(progress) and not resumed else FenceStrength.CLIENT
