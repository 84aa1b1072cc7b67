"""Which worker, or which router, gets a request.

The rule of this file: nobody is chosen who is fenced, suspect, or past the version asked for.
"""

import random
from collections.abc import Awaitable, Callable
from hashlib import blake2b

import anyio

from genapi.errors import FleetError, TransportError
from genapi.membership import Member, Membership
from genapi.runs import Run, Sending
from genapi.types.config import FleetConfig
from genapi.versions import Versions, may_meet

__all__ = ("Routing", "VersionGoneError")

_UPDATE_POLL_S = 0.2


class VersionGoneError(Exception):
    """The version that was waited for is not there any more: wait again."""


class Routing:
    """Chooses, and counts what everybody has in flight."""

    def __init__(
        self,
        config: FleetConfig,
        membership: Membership,
        versions: Versions,
        *,
        urls: tuple[str, ...],
        routed: bool,
        follow: Callable[[], Awaitable[None]],
        revive: Callable[[], Awaitable[None]],
        look: Callable[[], Awaitable[object]],
    ) -> None:
        self._config = config
        self._membership = membership
        self._versions = versions
        self._routers = dict.fromkeys(urls, 0) if routed else None
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
        elif self._routers is not None:
            self._routers[sending.url] += change

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
            return None, min(self._routers, key=self._routers.__getitem__)
        if not self._membership.usable() or any(m.suspect or m.told for m in members):
            await self._revive()
        await self._outlast_update(run)
        member = self._choose(run)
        if self._versions.is_opaque(member, run.request) and run.request.lora is None:
            await self._versions.refresh(member.url)
            member = self._choose(run)
        return member, member.url

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

    def _reasons(self) -> str:
        barriers = {m.name: m.fence or m.left for m in self._membership.generating()}
        return "; ".join(
            f"{name}: {fence.reason} (way back: {fence.recovery})"
            if fence is not None
            else f"{name}: does not answer"
            for name, fence in barriers.items()
        )


def _affinity(session: str, url: str) -> bytes:
    """Rendezvous hashing: a session keeps its worker while that one is usable."""
    return blake2b(f"{session}\0{url}".encode(errors="surrogatepass"), digest_size=8).digest()
