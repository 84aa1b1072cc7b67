"""Adopting: workers that hold the right weights get the label that says so; nothing moves.

The rule of this file: a worker of which anything speaks against that is refused, not labelled.
"""

from collections.abc import Mapping
from functools import partial

from genapi.control import fan_out
from genapi.errors import FleetError, GenAPIError
from genapi.fleet import Fleet
from genapi.membership import Member
from genapi.publication.evidence import Op
from genapi.types.config import PublishTimeouts
from genapi.types.ids import WorkerId
from genapi.types.policy import PolicyVersion, is_updating_label
from genapi.types.worker import Evidence, Outcome, Receipt

__all__ = ("check_adoptable", "label_all")


async def label_all(
    fleet: Fleet,
    members: Mapping[WorkerId, Member],
    version: PolicyVersion,
    *,
    timeouts: PublishTimeouts,
) -> tuple[Receipt, ...]:
    """Label every worker that does not carry the version yet, and read all labels back."""
    results = await fan_out(
        {
            worker: partial(_label, fleet, member, version, timeouts=timeouts)
            for worker, member in members.items()
        }
    )
    return tuple(
        _receipt(worker, members[worker], version, result) for worker, result in results.items()
    )


def check_adoptable(member: Member) -> None:
    """Raise unless nothing speaks against the worker holding what its user says."""
    label = member.facts.label if member.facts else None
    if is_updating_label(label):
        why = f"was left in the middle of an update ({label!r})"
    elif member.fence is not None:
        why = f"is fenced ({member.fence.reason})"
    elif member.facts is not None and member.facts.paused:
        why = "is paused, so somebody is updating it or left it so"
    else:
        return
    raise FleetError(f"{member.name} cannot be adopted: it {why}; publish to it instead")


async def _label(
    fleet: Fleet, member: Member, version: PolicyVersion, *, timeouts: PublishTimeouts
) -> str | None:
    control, url = fleet.control, member.url
    admin = fleet.provider.administer(member.facts)
    if member.facts is not None:
        member.facts.capabilities.require("admin", where=url)
    if member.facts is None or member.facts.label != version.label:
        answer = await control.run(
            url,
            admin.label(version.label),
            operation=Op.LABEL,
            timeout_s=timeouts.label_s,
        )
        if not answer.done:
            raise FleetError(f"label on {url}: {answer.observed}: {answer.detail}")
    answer = await control.run(url, admin.read(), operation=Op.READ, timeout_s=timeouts.verify_s)
    label = answer.facts.get("label")
    return label if isinstance(label, str) else None


def _receipt(
    worker: WorkerId,
    member: Member,
    version: PolicyVersion,
    result: str | GenAPIError | None,
) -> Receipt:
    before = member.version(None)
    proved = result == version.label
    if proved and member.id == worker:  # not another process that took its place since
        member.note_label(version.label)
    if isinstance(result, GenAPIError):
        error: str | None = str(result)
    else:
        error = None if proved else f"label read back is {result!r}"
    return Receipt(
        worker=worker,
        url=member.url,
        outcome=Outcome.COMMITTED if proved else Outcome.UNTOUCHED,
        evidence=Evidence.OWN_LABEL if proved else Evidence.NOT_BEGUN,
        version_before=before,
        version_after=version if proved else None,
        verified=("label",) if proved else (),
        error=error,
    )
