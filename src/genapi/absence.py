"""Who cannot take part in a publication: found out, had restarted, or left out.

The rule of this file: one failed read shows nothing, and a worker that is left out stays fenced.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial

import anyio

from genapi.control import fan_out
from genapi.errors import (
    AuthError,
    ConfigError,
    FleetError,
    GenAPIError,
    NotReadyError,
    TransportError,
)
from genapi.events import WorkerLeftOut
from genapi.fleet import Fleet
from genapi.membership import Member
from genapi.providers.base import Listed, WorkerFacts
from genapi.receipts import receipt_left_out
from genapi.shown import few
from genapi.types.config import PublishTimeouts
from genapi.types.ids import WorkerId
from genapi.types.policy import PolicyVersion
from genapi.types.worker import Fence, FenceStrength, Receipt, Recovery

__all__ = ("Absences", "Restarter", "check_reached", "nameless")

Restarter = Callable[[WorkerId, str], Awaitable[None]]
"""Restarts the server with that identity at that address; returns when that was asked for."""

_READ_AGAIN_S = 0.5


class Absences:
    """Who is missing from one fleet, for one publisher."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        timeouts: PublishTimeouts,
        min_workers: int | None,
        restarter: Restarter | None,
    ) -> None:
        """Touch nothing yet; the arguments are those of the publisher."""
        self._fleet = fleet
        self._timeouts = timeouts
        self._min_workers = min_workers
        self._restarter = restarter
        self._came: set[str] = set()

    async def restart_broken(self) -> set[str]:
        """Have servers restarted that do not answer or cannot be healed, and wait for them.

        Returns where a server could not be restarted or was not back in time, if a publication may
        go on without it.

        Raises:
            FleetError: that happened, and everybody is needed.
            AuthError, ConfigError: what answers does not let itself be administered.
        """
        missing: set[str] = set()
        if self._restarter is None:
            return missing
        self._came.clear()
        await self._fleet.snapshot()
        results = await fan_out(
            {
                member.url: partial(self._restart_if_broken, self._restarter, member)
                for member in self._fleet.membership.members.values()
            }
        )
        for url, result in results.items():
            if isinstance(result, FleetError) and self._min_workers is not None:
                missing.add(url)
            elif isinstance(result, GenAPIError):
                raise result
        return missing

    async def leave_out(
        self, everyone: Mapping[WorkerId, Member], version: PolicyVersion
    ) -> dict[WorkerId, Receipt]:
        """With `serve`, fence who cannot take part, where the others are enough; their receipts."""
        if self._min_workers is None:
            return {}
        found = await fan_out(
            {worker: partial(self._standing, member) for worker, member in everyone.items()}
        )
        fences = {worker: f for worker, f in found.items() if isinstance(f, Fence)}
        if len(everyone) - len(fences) < self._min_workers:
            return {}
        receipts = {}
        for worker, barrier in fences.items():
            member = everyone[worker]
            member.id = worker  # so that whoever comes in its place is known for a successor
            if member.fence != barrier:
                self._fleet.membership.fence(member, barrier)
            event = WorkerLeftOut(version=version, worker=worker, reason=barrier.reason)
            self._fleet.observe(event)
            receipts[worker] = receipt_left_out(worker, member, barrier)
        return receipts

    async def _restart_if_broken(self, restarter: Restarter, member: Member) -> None:
        if _needs_restart(member) or (member.suspect and await self._absence(member) is not None):
            await self._restart(restarter, member)

    async def _restart(self, restarter: Restarter, member: Member) -> None:
        fleet, limit_s = self._fleet, self._timeouts.restart_s
        # One that this process never reached has no name yet but its address.
        old = member.id or nameless(fleet.membership.provider, member)
        before = await self._listed_before()
        lacks: str | None = "its restarter did not return"
        with anyio.move_on_after(limit_s):
            try:
                await restarter(old, member.url)
            except Exception as error:
                raise FleetError(f"the restarter failed on {old}: {error!r}") from error
            lacks = f"nobody answers at {member.url}"
            while lacks is not None:
                try:
                    lacks = await self._lacks(old, member, before)
                except GenAPIError as error:
                    lacks = str(error)
                if lacks is not None:
                    await anyio.sleep(_READ_AGAIN_S)
        if lacks is not None:
            raise FleetError(
                f"{old} was not back as another process within restart_s={limit_s:g}: {lacks}"
            )

    async def _listed_before(self) -> Sequence[Listed] | None:
        """Who is listed before a restart, which may be what a list that cannot be read waits for.

        Raises:
            AuthError, ConfigError: whoever lists does not let itself be asked.
            FleetError: the fleet was closed.
        """
        try:
            return await self._fleet.listed()
        except (AuthError, ConfigError):
            raise
        except GenAPIError:
            if not self._fleet.is_open:
                raise
            return self._fleet.last_listed

    async def _lacks(
        self, old: WorkerId, member: Member, before: Sequence[Listed] | None
    ) -> str | None:
        """What is missing until another process is there in the place of `old`; None = nothing.

        Args:
            old: who was restarted.
            member: the same, as it was known.
            before: who was listed before that; None = workers do not come and go.

        Raises:
            GenAPIError: who is there cannot be read.
        """
        now = await self._fleet.listed()
        if before is None or now is None:
            lacks = await self._lacks_at_its_address(old, member)
            return lacks and f"{lacks}; one that comes elsewhere has to be discovered"
        if any(w.url == member.url and w.error is None for w in now):
            lacks = await self._lacks_at_its_address(old, member)
            return lacks and f"it is listed there still, and {lacks}"
        member.suspect = True
        if any(w.facts.id == old for w in now):
            return "it is listed still"
        known = {_life(worker) for worker in before}
        new = [w for w in now if w.error is None and _life(w) not in known]
        for worker in new:
            facts = await self._fleet.inspect(worker.url)
            if worker.url not in self._came and _takes_place(facts, of=member):
                self._came.add(worker.url)  # of several that are restarted each has one of its own
                return None
        others = "".join(f", and {w.url} is none" for w in new)
        return f"nobody is listed at {member.url} or came in its place since{others}"

    async def _lacks_at_its_address(self, old: WorkerId, member: Member) -> str | None:
        membership = self._fleet.membership
        try:
            facts = await self._fleet.inspect(member.url)
        except GenAPIError as error:
            if _is_gone(error):
                member.suspect = True  # an engine that names no instance has a new life now
            return str(error)
        if membership.identify(member.url, facts) == old:
            return f"the old process still answers at {member.url}"
        membership.learn(member.url, facts)
        return None

    async def _standing(self, member: Member) -> Fence | None:
        """The fence that keeps a worker from taking part, as it was just read; None = it may."""
        absence = await self._absence(member) if member.suspect else None
        if _needs_restart(member):
            return member.fence
        if absence is not None and absence.recovery is not Recovery.RESTART_THEN_PUBLISH:
            return member.fence or absence  # what heals it once it answers is known already
        return absence

    async def _absence(self, member: Member) -> Fence | None:
        """The fence of a worker that could not be read, once more; None = somebody answers there.

        One failed read shows nothing: a restart costs all that the server has in flight.

        Raises:
            AuthError, ConfigError: what answers does not let itself be administered.
        """
        fleet, limit_s = self._fleet, self._timeouts.preflight_s
        with anyio.move_on_after(limit_s):
            while True:
                try:
                    facts = await fleet.inspect(member.url, timeout_s=limit_s)
                except (AuthError, ConfigError):
                    raise
                except GenAPIError as error:
                    if _is_gone(error):
                        return _gone(str(error))
                    if not isinstance(error, TransportError):
                        return None
                    await anyio.sleep(_READ_AGAIN_S)
                else:
                    fleet.membership.learn(member.url, facts)
                    return None
        return Fence(
            strength=FenceStrength.CLIENT,
            reason=f"{member.url} gave no answer within preflight_s={limit_s:g}",
            recovery=Recovery.REPUBLISH,
        )


def nameless(provider: str, member: Member) -> WorkerId:
    """What a worker is called whose life was never read."""
    return WorkerId(provider=provider, component=member.url, instance="")


def check_reached(members: Iterable[Member]) -> None:
    """Raise `FleetError` where one was never reached: nothing is known of it."""
    strangers = [m.name for m in members if m.facts is None]
    if strangers:
        message = (
            f"workers {few(strangers, separator=', ')} were never reached, so nothing can be "
            "published: start them again (a restarter does), or publish without them "
            "(on_partial='serve', min_workers=...); fleet.wait_ready() says how each one fails"
        )
        raise FleetError(message)


def _life(worker: Listed) -> object:
    """What tells a life in a list: its name, or its address where lives have none there."""
    return worker.facts.id or worker.url


def _takes_place(facts: WorkerFacts, *, of: Member) -> bool:
    """Whether a worker does what another one did: its role, in its component."""
    if of.facts is not None and facts.role is not of.facts.role:
        return False
    if facts.id is None or of.id is None:
        return True
    return (facts.id.namespace, facts.id.component) == (of.id.namespace, of.id.component)


def _needs_restart(member: Member) -> bool:
    fence = member.fence
    return fence is not None and fence.recovery is Recovery.RESTART_THEN_PUBLISH


def _is_gone(error: GenAPIError) -> bool:
    """Whether a read failed because no server serves there."""
    return isinstance(error, NotReadyError) or (isinstance(error, TransportError) and error.refused)


def _gone(reason: str) -> Fence:
    return Fence(strength=FenceStrength.DEAD, reason=reason, recovery=Recovery.RESTART_THEN_PUBLISH)
