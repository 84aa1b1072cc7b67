"""Which worker, or which router, gets a request.

The rule of this file: nobody is chosen who is fenced, suspect, or past the version asked for.
"""

import random
from collections.abc import Awaitable, Callable, Iterable
from hashlib import blake2b

import anyio

from genapi.errors import FleetError, TransportError
from genapi.membership import Member, Membership
from genapi.providers.base import Pin
from genapi.runs import Run, Sending
from genapi.shown import few
from genapi.types.config import FleetConfig
from genapi.versions import Versions, may_meet

__all__ = ("Routing", "VersionGoneError")

_UPDATE_POLL_S = 0.2


class VersionGoneError(Exception):
    """The version that was waited for is not there any more: wait again."""


class Routing:
    """Chooses, and counts what everybody has in flight."""

    def __init__(  # noqa: PLR0913 - what choosing is made of
        self,
        config: FleetConfig,
        membership: Membership,
        versions: Versions,
        *,
        urls: tuple[str, ...],
        routed: bool,
        pins: bool,
        follow: Callable[[], Awaitable[None]],
        revive: Callable[[], Awaitable[None]],
        look: Callable[[], Awaitable[object]],
    ) -> None:
        self._config = config
        self._membership = membership
        self._versions = versions
        self._routers = dict.fromkeys(urls, 0) if routed else None
        self._pins = pins
        self._follow = follow
        self._revive = revive
        self._look = look

    def abort_urls(self, sending: Sending) -> list[str]:
        """Where the call goes that ends a sending: behind a router anybody may have it."""
        if self._routers is None:
            return [sending.url]
        return [*dict.fromkeys([sending.url, *self._membership.members])]

    def count(self, sending: Sending, change: int) -> None:
        """One more, or one less, in flight."""
        if sending.member is not None:
            sending.member.in_flight += change
        if self._routers is not None:
            self._routers[sending.url] += change

    @property
    def is_routed(self) -> bool:
        """Whether requests go to routers, which may choose the worker."""
        return self._routers is not None

    def pin(self, run: Run, member: Member | None) -> Pin | None:
        """What a router has to be told, so that `member` serves a request."""
        if self._routers is None or member is None or member.id is None:
            return None
        usable = [m for m in self._prefills() if self._membership.may_serve(m)]
        fitting = [m for m in usable if may_meet(m, run.bounds)] if run.bounds else usable
        if not fitting:
            return Pin(worker=member.id)
        return Pin(worker=member.id, prefill=random.choice(fitting).id)  # noqa: S311 - as below

    def _prefills(self) -> list[Member]:
        return [m for m in self._membership.members.values() if m.is_prefill]

    def may_go(self, sending: Sending) -> bool:
        """Whether what was picked may still get the sending."""
        member = sending.member
        picked = member is None or self._membership.may_serve(member)
        return picked and not self._membership.closed

    async def pick(self, run: Run) -> tuple[Member | None, str]:
        """Who gets the next sending, and its base URL; nobody while this process verifies.

        Raises:
            FleetError: nobody may get traffic, and waiting does not mend it.
            TransportError: nobody answers (`not_sent`).
            VersionGoneError: nobody has the version any more.
        """
        while True:
            while self._membership.closed:
                with anyio.move_on_after(self._config.refresh_s):
                    await self._versions.news()
            picked = await self._pick(run)
            if not self._membership.closed:
                return picked

    async def _pick(self, run: Run) -> tuple[Member | None, str]:
        members = self._membership.members.values()
        await self._follow()
        if self._routers is not None:
            await self._outlast_update(run)
            if self._membership.is_barred():
                await self._revive()
                if self._membership.is_barred():
                    raise self._nobody()
            if run.request.lora is None and any(
                self._versions.is_opaque(m, run.request) for m in members
            ):
                await self._versions.refresh(None)
            return await self._choice(run), min(self._routers, key=self._routers.__getitem__)
        if not self._membership.usable() or any(m.suspect or m.told for m in members):
            await self._revive()
        await self._outlast_update(run)
        member = self._choose(run)
        if self._versions.is_opaque(member, run.request) and run.request.lora is None:
            await self._versions.refresh(member.url)
            member = self._choose(run)
        return member, member.url

    async def _choice(self, run: Run) -> Member | None:
        """Whom a router has to be told to ask; None = it may choose among all.

        It has to be told while somebody behind it may get no traffic, or has another version than
        the one that is asked for.
        """
        if not self._pins:
            return None
        members = list(self._membership.members.values())
        free = all(self._membership.may_serve(m) for m in members)
        if free and all(may_meet(m, run.bounds) for m in members if run.bounds):
            return None
        if any(m.suspect or m.told for m in members):
            await self._revive()
        prefills = self._prefills()
        if prefills and not any(self._membership.may_serve(m) for m in prefills):
            message = "no prefill worker may get traffic; " + self._reasons(prefills)
            raise TransportError(message, phase="not_sent")
        return self._choose(run)

    async def _outlast_update(self, run: Run) -> None:
        """Wait while everybody is in the middle of somebody's update, as a paused engine would."""
        with anyio.move_on_after(self._config.admin_timeout_s):
            while not self._membership.usable() and any(
                m.is_updating and m.fence is None for m in self._membership.generating()
            ):
                run.waits_for = "a worker that may get it; " + self._reasons()
                await self._look()
                if not self._membership.usable():
                    await anyio.sleep(_UPDATE_POLL_S)

    def _choose(self, run: Run) -> Member:
        usable = self._membership.usable()
        if not usable:
            raise self._nobody()
        if run.bounds:
            usable = [m for m in usable if may_meet(m, run.bounds)]
            if not usable:
                raise VersionGoneError
        session = run.request.session
        if session is not None:
            return max(usable, key=lambda m: _affinity(session, m.url))
        least = min(m.in_flight for m in usable)
        return random.choice([m for m in usable if m.in_flight == least])  # noqa: S311 - spreading load

    def _nobody(self) -> FleetError | TransportError:
        message = "no worker may get traffic; " + self._reasons()
        if all(m.fence or m.left for m in self._membership.generating()):
            return FleetError(message)
        return TransportError(message, phase="not_sent")

    def _reasons(self, members: Iterable[Member] | None = None) -> str:
        shown = self._membership.generating() if members is None else members
        barriers = {m.name: m.fence or m.left for m in shown}
        return few(
            [
                f"{name}: {fence.reason} (way back: {fence.recovery})"
                if fence is not None
                else f"{name}: does not answer"
                for name, fence in barriers.items()
            ]
        )


def _affinity(session: str, url: str) -> bytes:
    """Rendezvous hashing: a session keeps its worker while that one is usable."""
    return blake2b(f"{session}\0{url}".encode(errors="surrogatepass"), digest_size=8).digest()
