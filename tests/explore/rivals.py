"""Two publishers at once, on workers that obey both: the second takes the lease at any moment.

Nothing goes wrong here but the rivalry. A call that needs the lease is not sent once the lease is
gone; between the look at the board and the effect of the call nothing else happens in this model.
"""

import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from genapi.publication.evidence import Answer, Observed, Op
from genapi.publication.table import READS, Act
from genapi.publication.transaction import (
    ActDone,
    ActFailed,
    Answered,
    Event,
    Progress,
    Transaction,
    advance,
    begin,
)
from genapi.types.ids import WorkerId
from genapi.types.policy import PolicyVersion, is_updating_label
from tests.explore.search import Found, HoleError, Place
from tests.support.workers_model import BUCKETS, FRESH, Call, Fate, Truth, react

FIRST = PolicyVersion(run="r", step=3).label
SECOND = PolicyVersion(run="r", step=4).label


class Both(NamedTuple):
    """One state: the two transactions and the workers."""

    first: Transaction
    second: Transaction | None
    truths: Mapping[WorkerId, Truth]


class Rivals:
    """One search. `run` it once.

    Args:
        workers: how many.
        unchecked: what is asked without a look at the board.
    """

    def __init__(self, workers: int, *, unchecked: frozenset[Op] = READS) -> None:
        self._ids: list[WorkerId] = [
            Place(provider="vllm", instance=str(number)) for number in range(workers)
        ]
        self._unchecked = unchecked
        self._came: dict[object, tuple[object, str]] = {}

    def run(self) -> Found:
        """Explore.

        Raises:
            HoleError: a worker is left with a label that names something else, or a publication
                that committed is not what is served.
        """
        began, found = time.monotonic(), Found()
        truths: Mapping[WorkerId, Truth] = dict.fromkeys(self._ids, FRESH)
        layer: list[tuple[Both, object, str]] = [(self._started(FIRST, truths), None, "1 begins")]
        while layer:
            later: list[tuple[Both, object, str]] = []
            for both, parent, how in layer:
                key = self._key(both)
                if key in self._came:
                    continue
                self._came[key] = (parent, how)
                found.states += 1
                self._check(both, key)
                for following, text in self._moves(both):
                    found.events += 1
                    later.append((following, key, text))
            found.depth += bool(later)
            layer = later
        found.seconds = time.monotonic() - began
        return found

    def _started(self, label: str, truths: Mapping[WorkerId, Truth]) -> Both:
        workers = {worker: Progress() for worker in self._ids}
        return Both(begin(Transaction(label=label, workers=workers))[0], None, truths)

    def _moves(self, both: Both) -> Iterator[tuple[Both, str]]:
        first, second, truths = both
        if second is None:
            yield both._replace(second=self._started(SECOND, truths).first), "2 takes the lease"
        lost_lease = second is not None
        for event, after, text in self._events(first, truths, superseded=lost_lease):
            yield Both(advance(first, event)[0], second, after), f"1: {text}"
        if second is not None:
            for event, after, text in self._events(second, truths, superseded=False):
                yield Both(first, advance(second, event)[0], after), f"2: {text}"

    def _events(
        self, tx: Transaction, truths: Mapping[WorkerId, Truth], *, superseded: bool
    ) -> Iterator[tuple[Event, Mapping[WorkerId, Truth], str]]:
        if tx.ended:
            return
        for worker, op in tx.waiting:
            truth, answer = truths[worker], Answer(Observed.NOT_SENT)
            if not superseded or op in self._unchecked:
                truth, answer = react(truth, Call.of(tx, worker, op), Fate.DONE)
            text = f"{op} on {worker.instance}: {answer.observed}"
            yield Answered(worker, op, answer), {**truths, worker: truth}, text
        if tx.acting is Act.SEND and tx.waiting:
            return
        if tx.acting is not None and superseded and tx.acting in (Act.INTEND, Act.COMMIT):
            yield ActFailed(tx.acting, "superseded"), truths, f"{tx.acting} is superseded"
        elif tx.acting is not None:
            more = tx.acting is Act.SEND and tx.updates < BUCKETS
            yield ActDone(tx.acting, more), truths, f"{tx.acting} is done"

    def _check(self, both: Both, key: object) -> None:
        try:
            _check_workers(both)
        except AssertionError as error:
            lines: list[str] = []
            while key is not None:
                key, how = self._came[key]
                lines.append(how)
            raise HoleError("\n  ".join([f"{error}, after", *reversed(lines)])) from error

    def _key(self, both: Both) -> object:
        return (
            *(_shape(tx) for tx in (both.first, both.second)),
            tuple(sorted(self._local(both, worker) for worker in self._ids)),
        )

    def _local(self, both: Both, worker: WorkerId) -> str:
        parts: list[object] = [both.truths[worker]]
        for tx in (both.first, both.second):
            if tx is not None:
                progress = tx.workers[worker]
                answers = [(op, a.observed, a.facts) for op, a in progress.answers.items()]
                waits = [op for w, op in tx.waiting if w == worker]
                parts += [progress.asked, answers, progress.failure, waits]
        return repr(parts)


def _shape(tx: Transaction | None) -> object:
    if tx is None:
        return None
    return (tx.phase, tx.acting, tx.more, tx.updates, tx.failed, tx.broken, tx.committed)


def _check_workers(both: Both) -> None:
    first, second, truths = both
    for truth in truths.values():
        assert not truth.dead, "an engine died"
        assert truth.is_honest, f"{truth.label} labels something else: {truth.content}"
        if second is None or not (first.ended and second.ended):
            continue
        assert first.committed or second.committed, "nobody won"
        if second.committed:
            assert truth.label == SECOND, "it serves what was superseded"
            assert not truth.paused, "a superseded publisher left it paused"
        assert truth.paused or not is_updating_label(truth.label), "a half-updated worker runs"
