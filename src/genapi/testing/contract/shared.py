"""Servers that several bodies share, one after the other: behind sockets, or real engines."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, NoReturn
from urllib.parse import urlsplit

import anyio

import genapi
from genapi.transports.base import Plane
from genapi.transports.http_aiohttp import AiohttpTransport

from .stand import Carrier, Profile, publisher

__all__ = ("Shared",)

_NUMBERS = count()


class Shared:
    """Servers at these addresses, which are left as they were found: resumed, with seed 0.

    Behind something that lists them, whose target `front` is, they are put into its order.
    """

    def __init__(self, addresses: tuple[str, ...], front: str | None = None) -> None:
        self.addresses = addresses
        self.front = front
        self.transport = AiohttpTransport(Plane(keep_alive=False))

    @asynccontextmanager
    async def put_back(self, profile: Profile, carrier: Carrier) -> AsyncIterator["Shared"]:
        """Publish seed 0 at the end, where a label or a pause shows that something was done.

        Also when the body failed or was cancelled: those that come after it are not to blame.
        """
        target = f"{profile.provider}://{self.front or ','.join(self.addresses)}"
        run = f"back-{next(_NUMBERS)}"
        try:
            async with genapi.connect(target, run=run, transport=self.transport) as fleet:
                await fleet.wait_ready(timeout_s=carrier.patience_s)
                before = (await fleet.snapshot()).workers
                found = [worker.label for worker in before]
                if self.front is not None:
                    places = [urlsplit(worker.url).netloc for worker in before]
                    self.addresses = tuple(sorted(self.addresses, key=places.index))
                try:
                    yield self
                finally:
                    with anyio.CancelScope(shield=True):
                        left = (await fleet.snapshot()).workers
                        labels = [worker.label for worker in left]
                        if labels != found or any(worker.paused for worker in left):
                            async with publisher(fleet, carrier) as p:
                                await p.publish(0, carrier.weights(0))
        finally:
            await self.transport.aclose()

    def kill(self, index: int) -> None:
        """Nobody kills what others need."""
        _refuse(index)

    def restart(self, index: int) -> None:
        """Nor restarts it."""
        _refuse(index)

    def running(self, index: int) -> int:
        """Nor can look into it."""
        _refuse(index)

    def lose_peer(self, index: int) -> None:
        """Nor break it."""
        _refuse(index)

    def overwrite(self, index: int, tensors: dict[str, Any]) -> None:
        """Nor write into it."""
        del tensors
        _refuse(index)

    async def sleep(self, index: int) -> None:
        """Nor put it to sleep."""
        _refuse(index)


def _refuse(index: int) -> NoReturn:
    raise AssertionError(f"server {index} is shared: say memory_only in the manifest")
