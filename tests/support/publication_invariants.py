"""What has to hold of every publication, at every moment and at its end, whatever happens.

Stated once, for the exhaustive search and for the random one. A worker that died or whose place
another process took is out of the publisher's hands: of it only what is concluded counts.
"""

import functools
from collections.abc import Mapping

from genapi.providers.vllm.files import VLLMFiles
from genapi.providers.vllm.verdicts import VERDICTS
from genapi.publication.evidence import Observed, Op, Verdict
from genapi.publication.table import Phase
from genapi.publication.transaction import (
    Ask,
    Command,
    Progress,
    Transaction,
    conclude,
    fence,
    is_proved,
)
from genapi.types.ids import WorkerId
from genapi.types.policy import is_updating_label, parse_label
from genapi.types.worker import Evidence, Fence, Outcome, Recovery
from tests.support.workers_model import BUCKETS, GARBAGE, Truth

Truths = Mapping[WorkerId, Truth]
ONCE = (Op.JOIN, Op.BEGIN, Op.FINISH, Op.CLOSE, Op.HEAL)


def check_commands(tx: Transaction, commands: tuple[Command, ...], truths: Truths) -> None:
    """What is asked now may be asked."""
    for command in commands:
        if not isinstance(command, Ask):
            continue
        worker, op = command.worker, command.op
        progress, truth = tx.workers[worker], truths[worker]
        if op in ONCE:
            assert progress.asked.count(op) <= 1, f"{op} is asked twice"
        most = BUCKETS if tx.sends else 1
        assert progress.asked.count(Op.UPDATE) <= most, "a bucket is sent twice"
        if op is not Op.RESUME:
            continue
        if Op.BEGIN in progress.asked:
            assert tx.committed, "resumed after BEGIN without a commit"
            read = progress.answers[Op.READ].facts.get("label")
            assert read == tx.label, "resumed after BEGIN without proof"
        else:
            assert tx.phase is Phase.RELEASE, "resumed before BEGIN and not as a way out"
            assert progress.did(Op.PAUSE), "resumed somebody else's pause"
        if not truth.dead and not truth.replaced:
            assert truth.is_honest, "a worker with unproved weights is resumed"
            assert not is_updating_label(truth.label), "a half-updated worker is resumed"


def check_moment(tx: Transaction, truths: Truths, firsts: Truths) -> None:
    """What is true of the workers may be true."""
    for worker, truth in truths.items():
        if truth.dead:
            continue
        assert truth.is_honest, f"{truth.label} labels something else: {truth.content}"
        if truth.replaced:
            continue
        if not truth.paused and Op.BEGIN in tx.workers[worker].asked:
            assert truth.label == tx.label, "it serves what was not published"
        assert not _is_older(truth.label, firsts[worker].label), "a version went back"
    if tx.committed and tx.phase not in (Phase.RELEASED, Phase.HELD):
        for worker, truth in truths.items():
            gone = truth.dead or truth.replaced
            left_out = tx.min_workers is not None and not is_proved(tx, tx.workers[worker])
            assert gone or left_out or truth.holds(tx.label), "the version is ahead of a worker"
        least = len(truths) if tx.min_workers is None else tx.min_workers
        read = [p.answers.get(Op.READ) for p in tx.workers.values()]
        proved = [a for a in read if a is not None and a.facts.get("label") == tx.label]
        assert len(proved) >= least, "it is committed with too few"


@functools.cache
def _is_older(label: str, than: str) -> bool:
    now, before = parse_label(label), parse_label(than)
    if now is None or before is None:
        return False
    return (now.step, now.attempt) < (before.step, before.attempt)


def check_end(tx: Transaction, truths: Truths, firsts: Truths) -> None:
    """What is concluded of every worker is true, and is enough to bring it back."""
    assert not tx.waiting, "it ended and still waits"
    assert tx.acting is None, "it ended while the publisher acts"
    assert tx.workers.keys() == truths.keys(), "not one conclusion per worker"
    assert tx.committed or tx.error is not None, "it failed for no reason"
    for worker, progress in tx.workers.items():
        _check_conclusion(tx, progress, truths[worker], firsts[worker])


def _concluded(tx: Transaction, progress: Progress) -> Verdict:
    return conclude(tx, progress, VERDICTS if tx.sends else VLLMFiles.verdicts)


def _check_conclusion(tx: Transaction, progress: Progress, truth: Truth, first: Truth) -> None:
    verdict = _concluded(tx, progress)
    barrier = fence(tx, progress, verdict)
    known = not truth.dead and not truth.replaced
    if verdict.outcome is Outcome.COMMITTED and known:
        assert truth.label == tx.label, "COMMITTED under another label"
        assert truth.holds(tx.label), "COMMITTED and holds something else"
    if verdict.outcome is Outcome.UNTOUCHED and known:
        assert truth.content == first.content, "UNTOUCHED and changed"
        assert not truth.in_session or first.in_session, "UNTOUCHED and in a session"
        assert truth.label == first.label or barrier is not None, "UNTOUCHED and relabelled"
    close = progress.answers.get(Op.CLOSE)
    if close is not None and close.observed is Observed.REJECTED and known:
        assert verdict.recovery is Recovery.RESTART_THEN_PUBLISH, "closing failed half-way"
    if verdict.evidence is Evidence.SESSION_CLOSED_EMPTY and known:
        assert not truth.in_session, "its session is open"
    if Op.CONFIRM in progress.asked and not progress.did(Op.CONFIRM):
        assert barrier is not None, "its pause was never confirmed, and it gets traffic"
    if barrier is None:
        assert verdict.outcome in (Outcome.COMMITTED, Outcome.UNTOUCHED), "unfenced and unproved"
        if verdict.outcome is Outcome.COMMITTED:
            assert tx.committed, "it serves what was not committed"
            assert not truth.replaced, "another process gets the traffic of a committed worker"
        if known:
            assert not truth.in_session or first.in_session, "it gets traffic in a session"
            assert not truth.paused or first.paused, "it gets traffic and is paused"
    else:
        assert verdict.recovery is not None, "fenced, and no way back is named"
    if known and first.paused and GARBAGE in truth.content:
        assert truth.paused, "a half-updated worker was resumed"


def way_back(tx: Transaction, worker: WorkerId) -> tuple[Fence | None, Recovery | None]:
    """The fence and the recovery that the receipt of a worker names."""
    progress = tx.workers[worker]
    verdict = _concluded(tx, progress)
    return fence(tx, progress, verdict), verdict.recovery
