"""Which versions of weights in files a worker may be reading, and the removal of the others.

The rule of this file: a version goes only when every worker is known to read none of it. Nothing
that could not be removed fails a publication.
"""

from collections.abc import Awaitable, Callable
from functools import partial

import anyio

from genapi.errors import GenAPIError
from genapi.events import OldVersionsKept
from genapi.fleet import Fleet
from genapi.ledger import Ledger
from genapi.membership import Member
from genapi.publication.evidence import Op
from genapi.publication.transaction import Transaction, is_proved
from genapi.types.ids import WorkerId
from genapi.types.policy import PolicyVersion, parse_label, parse_updating_label
from genapi.types.worker import FenceStrength
from genapi.weights.base import WeightStore

__all__ = ("Keeping",)


class Keeping:
    """What the workers of a fleet were told to load from a store, and did not prove since."""

    def __init__(self, fleet: Fleet, store: WeightStore, *, ledger: Ledger, limit_s: float) -> None:
        """Know of nothing yet.

        Args:
            fleet: whose workers.
            store: where they load from.
            ledger: which knows of a publication that was left open.
            limit_s: bound on one removal.
        """
        self._fleet = fleet
        self._store = store
        self._ledger = ledger
        self._limit_s = limit_s
        self._loading: dict[WorkerId, PolicyVersion] = {}
        self._failed: set[PolicyVersion] = set()

    def note(self, tx: Transaction, version: PolicyVersion) -> None:
        """Take in how a publication ended with each worker.

        A worker that was told to load another version before had answered since: what it may be
        reading is the last one only.
        """
        for worker, progress in tx.workers.items():
            if progress.dead or is_proved(tx, progress):
                self._loading.pop(worker, None)
            elif Op.UPDATE in progress.asked:
                self._loading[worker] = version

    async def tidy(self, committed: PolicyVersion) -> None:
        """Have the store remove what nobody needs; why something stays that should not is told."""
        needed = self._needed()
        if needed is not None:
            await self._remove(committed, partial(self._tidy, committed, needed))

    async def withdraw(self, version: PolicyVersion, tx: Transaction) -> None:
        """Have the store remove what a publication wrote that failed.

        What a worker was told to load goes after a later commit.
        """
        if any(Op.UPDATE in progress.asked for progress in tx.workers.values()):
            self._failed.add(version)
        else:
            with anyio.CancelScope(shield=True):
                await self._remove(version, partial(self._store.discard, version))

    async def _tidy(self, committed: PolicyVersion, needed: set[PolicyVersion]) -> None:
        for version in self._failed - needed:
            await self._store.discard(version)
            self._failed.remove(version)
        await self._store.tidy(committed, needed)

    async def _remove(self, told: PolicyVersion, remove: Callable[[], Awaitable[None]]) -> None:
        error: str | None = f"not done within cleanup_s={self._limit_s:g}"
        with anyio.move_on_after(self._limit_s):
            try:
                await remove()
                error = None
            except GenAPIError as raised:
                error = str(raised)
        if error is not None:
            self._fleet.observe(OldVersionsKept(version=told, error=error))

    def _needed(self) -> set[PolicyVersion] | None:
        """Versions that a worker may be reading; None = one was never asked what it holds."""
        members = self._fleet.membership.members.values()
        here = {member.id for member in members}
        self._loading = {w: v for w, v in self._loading.items() if w in here}
        if any(member.facts is None and not _is_dead(member) for member in members):
            return None
        labels = [member.facts.label for member in members if member.facts is not None]
        begun = [parse_updating_label(label) for label in labels]
        told = [*begun, *map(parse_label, labels), *self._loading.values(), self._ledger.target]
        return {version for version in told if version is not None}


def _is_dead(member: Member) -> bool:
    return member.fence is not None and member.fence.strength is FenceStrength.DEAD
