"""Which versions of weights in files a worker may be reading, and the removal of the others.

The rule of this file: a version goes only when every worker is known to read none of it, and one
that was published in vain goes as soon as that is known. Nothing that could not be removed fails a
publication.
"""

from collections.abc import Awaitable, Callable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import partial

import anyio

from genapi.errors import GenAPIError
from genapi.events import OldVersionsKept
from genapi.fleet import Fleet
from genapi.ledger import Ledger
from genapi.membership import Member
from genapi.publication.evidence import Answer, Observed, Op
from genapi.publication.transaction import Transaction, is_proved
from genapi.types.ids import WorkerId
from genapi.types.policy import PolicyVersion, parse_label, parse_updating_label
from genapi.types.worker import FenceStrength
from genapi.weights.base import WeightStore

__all__ = ("Keeping",)

_NO_ANSWER = Answer(Observed.LOST)


class Keeping:
    """What the workers of a fleet were told to load from a store, and may have use for still."""

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
        self._using: dict[WorkerId, PolicyVersion] = {}
        self._failed: set[PolicyVersion] = set()

    def note(self, tx: Transaction, version: PolicyVersion) -> None:
        """Take in how a publication ended with each worker.

        A worker that was told to load another version before had answered since: what it may be
        reading is the last one only. One whose load was answered, and that does not hold it under
        its label, reads none.
        """
        for worker, progress in tx.workers.items():
            answer = progress.answers.get(Op.UPDATE, _NO_ANSWER)
            if is_proved(tx, progress):
                self._using[worker] = version
            elif progress.dead or answer.done:
                self._using.pop(worker, None)
            elif Op.UPDATE in progress.asked and answer.observed is not Observed.NOT_SENT:
                self._using[worker] = version

    async def tidy(self, committed: PolicyVersion) -> None:
        """Have the store remove what nobody needs; why something stays that should not is told."""
        needed = self._needed()
        if needed is not None:
            self._tell(committed, await self._bounded(partial(self._tidy, committed, needed)))

    async def withdraw(self, version: PolicyVersion) -> None:
        """Have the store remove what was published in vain, as far as nobody has use for it."""
        self._failed.add(version)
        with anyio.CancelScope(shield=True):
            self._tell(version, await self._bounded(self._sweep))

    async def taken(self) -> AbstractSet[PolicyVersion]:
        """Versions whose names are taken in the store; what it does not tell, writing will."""
        found: AbstractSet[PolicyVersion] = frozenset()
        with anyio.move_on_after(self._limit_s), suppress(GenAPIError):
            found = await self._store.taken()
        return found

    async def release(self) -> None:
        """Let other publishers have the store."""
        with anyio.move_on_after(self._limit_s, shield=True), suppress(GenAPIError):
            await self._store.close()

    @property
    def has_failed(self) -> bool:
        """Whether something is there still that was published in vain."""
        return bool(self._failed)

    async def close(self, unknown: str | None = None) -> None:
        """Remove what was published in vain; what has to stay is told, and why.

        Args:
            unknown: why nobody knows whether it may go; None = what is known of workers is new.
        """
        if unknown is None and self._unused():
            with anyio.CancelScope(shield=True):
                error = await self._bounded(self._sweep)
            for version in self._unused()[:1]:
                self._tell(version, error)
        for version in _sorted(self._failed):
            names = [str(worker) for worker, used in self._users().items() if used == version]
            why = unknown or f"it may be read, or is held, by {', '.join(names)}"
            if unknown or names:
                remedy = "remove it by hand once its workers are published to again, or restarted"
                self._fleet.observe(OldVersionsKept(version=version, error=f"{why}: {remedy}"))

    def _unused(self) -> list[PolicyVersion]:
        """Versions that were published in vain, and that nobody has use for any more."""
        return _sorted(self._failed - {*self._users().values()})

    async def _sweep(self) -> None:
        """Remove what nobody has use for; what cannot be removed keeps nothing else from going."""
        failed: GenAPIError | None = None
        for version in self._unused():
            try:
                await self._store.discard(version)
                self._failed.remove(version)
            except GenAPIError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    async def _tidy(self, committed: PolicyVersion, needed: set[PolicyVersion]) -> None:
        failed: GenAPIError | None = None
        try:
            await self._sweep()
        except GenAPIError as error:
            failed = error
        await self._store.tidy(committed, needed)
        if failed is not None:
            raise failed

    async def _bounded(self, remove: Callable[[], Awaitable[None]]) -> str | None:
        """Why a removal could not be done; None = it was."""
        error: str | None = f"not done within cleanup_s={self._limit_s:g}"
        with anyio.move_on_after(self._limit_s):
            try:
                await remove()
                error = None
            except GenAPIError as raised:
                error = str(raised)
        return error

    def _tell(self, version: PolicyVersion, error: str | None) -> None:
        if error is not None:
            self._fleet.observe(OldVersionsKept(version=version, error=error))

    def _users(self) -> dict[WorkerId, PolicyVersion]:
        """Who may be reading a version that this publisher told them to load, or holds it."""
        here = {m.id for m in self._fleet.membership.members.values() if not _is_dead(m)}
        self._using = {w: v for w, v in self._using.items() if w in here}
        return self._using

    def _needed(self) -> set[PolicyVersion] | None:
        """Versions that a worker may be reading; None = one was never asked what it holds."""
        members = self._fleet.membership.members.values()
        if any(member.facts is None and not _is_dead(member) for member in members):
            return None
        labels = [member.facts.label for member in members if member.facts is not None]
        begun = [parse_updating_label(label) for label in labels]
        told = [*begun, *map(parse_label, labels), *self._users().values(), self._ledger.target]
        return {version for version in told if version is not None}


def _is_dead(member: Member) -> bool:
    return member.fence is not None and member.fence.strength is FenceStrength.DEAD


def _sorted(versions: set[PolicyVersion]) -> list[PolicyVersion]:
    return sorted(versions, key=lambda v: (v.run, v.step, v.attempt))
