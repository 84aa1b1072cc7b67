"""The receipts of a publication: one for each worker, from what was asked of it and answered.

The rule of this file: nothing is asked here. What a receipt says is concluded by the table and the
provider's rows; the fence that goes with it is set.
"""

from collections.abc import Mapping

from genapi.drive import Times
from genapi.fleet import Fleet
from genapi.membership import Member
from genapi.publication.evidence import Op, Seen, Verdict
from genapi.publication.transaction import Progress, Transaction, conclude, fence
from genapi.publication.verification import found_of
from genapi.types.ids import WorkerId
from genapi.types.policy import parse_label
from genapi.types.worker import Evidence, Fence, FenceStrength, Outcome, Receipt

__all__ = ("receipt_left_out", "receipt_of")


def receipt_of(
    worker: WorkerId,
    member: Member,
    tx: Transaction,
    *,
    times: Times,
    fleet: Fleet,
    verdicts: Mapping[Seen, Verdict],
) -> Receipt:
    """The receipt of a worker that took part; what is proved of it sets or lifts its fence."""
    membership = fleet.membership
    progress = tx.workers[worker]
    verdict = conclude(tx, progress, verdicts)
    before = parse_label(progress.found.get("label"))
    label = _label_after(progress)
    barrier = fence(tx, progress, verdict)
    if member.id == worker:  # what is proved of one process is of no other in its place
        member.note_label(label)
        if barrier is not None or progress.did(Op.PROBE):
            membership.fence(member, barrier)
    failure = progress.failure
    found = found_of(tx.label, progress.answers, tx.checks)
    return Receipt(
        worker=worker,
        url=member.url,
        outcome=verdict.outcome,
        evidence=verdict.evidence,
        version_before=before,
        version_after=parse_label(label),
        paused_s=times.paused_s(worker),
        bytes_sent=times.bytes_sent.get(worker, 0),
        verified=found.levels,
        checksum_blind=found.blind,
        probe_gap=found.gap,
        fence=barrier,
        recovery=verdict.recovery,
        error=None
        if failure is None
        else f"{failure[0]}: {failure[1].observed}: {failure[1].detail}".rstrip(": "),
    )


def receipt_left_out(worker: WorkerId, member: Member, barrier: Fence) -> Receipt:
    """The receipt of a worker that a publication went on without."""
    evidence = Evidence.NO_ANSWER if member.suspect else Evidence.NOT_BEGUN
    return Receipt(
        worker=worker,
        url=member.url,
        outcome=Outcome.UNTOUCHED,
        evidence=Evidence.DEAD if barrier.strength is FenceStrength.DEAD else evidence,
        version_before=None if member.suspect else member.version(None),
        version_after=None if member.suspect else member.version(None),
        fence=barrier,
        recovery=barrier.recovery,
        error=f"left out: {barrier.reason}",
    )


def _label_after(progress: Progress) -> object:
    """The label that the last operation left or read; None = not known."""
    answers = progress.answers
    labels = [
        answers[op].facts.get("label") if op in answers else None
        for op in progress.asked
        if op in (Op.INSPECT, Op.MARK, Op.UNMARK, Op.BEGIN, Op.READ, Op.PROBE, Op.SHUT)
    ]
    return labels[-1] if labels else None
