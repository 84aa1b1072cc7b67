"""What a publisher writes down outside itself: its lease, its intent, its result.

The rule of this file: without a board every step is a no-op; with one, a publisher that was
superseded learns it before it asks for anything dangerous.
"""

import asyncio
from collections.abc import Iterable

from genapi.board import Board, Lease, new_holder, take_epoch
from genapi.errors import GenAPIError
from genapi.types.board import BoardState, BoardWorker
from genapi.types.ids import WorkerId
from genapi.types.policy import ContextRule, PolicyVersion
from genapi.types.worker import Fence

__all__ = ("Ledger",)

_FRESH_S = 0.05
"""How long a check counts for the other calls of one fan-out, and only for them."""


class Ledger:
    """One publisher's hold on a board, or on none."""

    def __init__(self, board: Board | None) -> None:
        self._board = board
        self._holder = new_holder()
        self._lease: Lease | None = None
        self._checked: tuple[object, float, GenAPIError | None] = (None, -1.0, None)
        self._checking = asyncio.Lock()

    @property
    def holder(self) -> str:
        """The name under which this publisher holds the board."""
        return self._holder

    async def take(self, run: str | None) -> BoardState | None:
        """Take the lease, if it is not held yet; returns the record that was found.

        Raises:
            SupersededError: another publisher has taken it since.
        """
        if self._board is None:
            return None
        if self._lease is None:
            self._lease = await take_epoch(self._board, self._holder, run)
            return self._lease.found
        return await self._lease.check()

    @property
    def is_held(self) -> bool:
        """Whether there is a board, which says that no other publisher counts."""
        return self._lease is not None

    @property
    def target(self) -> PolicyVersion | None:
        """The version that a publication which did not commit was moving workers to."""
        return self._lease.state.target if self._lease is not None else None

    def check_commit(self, version: PolicyVersion) -> None:
        """Raise `ConfigError` where the board would not take `version` as committed."""
        if self._lease is not None:
            self._lease.check_commit(version)

    async def check(self, fan_out: object) -> None:
        """Raise `SupersededError` unless this publisher holds the lease.

        Args:
            fan_out: which calls it is for: those of one fan-out share a look at the board, also
                one that failed.
        """
        if self._lease is None:
            return
        clock = asyncio.get_running_loop().time
        async with self._checking:
            of, at, failure = self._checked
            if of != fan_out or clock() - at > _FRESH_S:
                failure = None
                try:
                    await self._lease.check()
                except GenAPIError as error:
                    failure = error
                self._checked = (fan_out, clock(), failure)
        if failure is not None:
            raise failure

    async def intend(
        self, target: PolicyVersion, workers: Iterable[tuple[WorkerId, Fence | None]]
    ) -> None:
        """Write the target ahead. Raises `SupersededError`."""
        if self._lease is not None:
            await self._lease.write(phase="publishing", target=target, workers=_rows(workers))

    async def commit(
        self,
        version: PolicyVersion,
        workers: Iterable[tuple[WorkerId, Fence | None]],
        rule: ContextRule,
    ) -> None:
        """Write that every worker without a fence was proved to hold the version.

        Raises `SupersededError`.
        """
        if self._lease is not None:
            await self._lease.write(
                phase="idle", committed=version, context=rule, workers=_rows(workers)
            )

    async def end(
        self, workers: Iterable[tuple[WorkerId, Fence | None]], *, target: PolicyVersion | None
    ) -> None:
        """Write how a publication ended: held at `target`, or idle. Raises `SupersededError`."""
        if self._lease is None:
            return
        rows = _rows(workers)
        if target is None:
            await self._lease.write(phase="idle", workers=rows)
        else:
            # One of an earlier run can stay on the board, but not be written anew.
            stays = target.run != self._lease.state.run
            await self._lease.write(phase="held", target=None if stays else target, workers=rows)

    async def finish(self) -> None:
        """Write that the committed version is the last one. Raises `SupersededError`."""
        if self._lease is not None:
            await self._lease.write(final=True)


def _rows(workers: Iterable[tuple[WorkerId, Fence | None]]) -> tuple[BoardWorker, ...]:
    return tuple(BoardWorker(id=str(worker), fence=fence) for worker, fence in workers)
