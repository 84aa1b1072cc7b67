"""`Lease`: one publisher's hold on a board, and how the record may change under it.

The rule of this file: whoever holds the newest epoch is the only one who writes. An older holder
learns of it at its next check or write, and no clock takes part in that.
"""

import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable

import anyio

from genapi.board.base import Board, Reading, Token
from genapi.errors import ConfigError, SupersededError, TransportError
from genapi.types.board import BoardPhase, BoardState, BoardWorker
from genapi.types.policy import ContextRule, PolicyVersion

__all__ = ("Lease", "new_holder", "take_epoch")

_TRIES = 20
"""Each lost try means that another writer got on; so many in a row are no accident."""

_LOST_REPLIES = 3
"""How many writes of unknown outcome in a row are looked into before giving up."""


def new_holder() -> str:
    """A name for one publisher that no other ever has: host, process id, and a random mark."""
    return f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex[:12]}"


async def take_epoch(
    board: Board, holder: str, run: str | None = None, *, clock: Callable[[], float] = time.time
) -> "Lease":
    """Take the board over: from now on every earlier holder is superseded.

    What the record says of workers, `committed` (within one run) and an open publication stays,
    but `committed` is not final any more; `Lease.found` is the record as it was.

    Args:
        board: the board to take.
        holder: who takes it, unlike any other; see `new_holder`.
        run: the run to publish; None = the one that the board knows.
        clock: wall clock in seconds, for the record's `since`.

    Raises:
        SupersededError: somebody else was faster, every time.
        ConfigError, ReplyError, TransportError: as `Board.read` and `compare_and_set`.
    """
    lost_replies = 0
    found: BoardState | None = None
    for _ in range(_TRIES):
        found, token = await board.read()
        state = _taken(found, holder, run, clock())
        try:
            written = await board.compare_and_set(token, state)
        except TransportError as error:
            # If that write counts after all, its epoch is skipped: one that may be doubted is not
            # held.
            lost_replies += 1
            if error.phase == "not_sent" or lost_replies >= _LOST_REPLIES:
                raise
            continue
        if written is not None:
            return Lease(board, Reading(state, written), found=found, clock=clock)
    raise SupersededError(
        f"{holder!r} lost {_TRIES} tries to take the board to other writers, {_named(found)}: "
        "another publisher is at work, so stop this one",
        holder=found.holder if found else None,
        epoch=found.epoch if found else None,
    )


class Lease:
    """The right to publish, for as long as nobody takes a newer epoch. `take_epoch` makes one.

    There is nothing to renew and nothing to give back: a lease ends when another is taken.

    Attributes:
        holder: who holds it.
        epoch: the epoch that it is.
        found: the record that it took over; None = there was none.
        state: the record as this lease last wrote it.
    """

    def __init__(
        self,
        board: Board,
        taken: Reading,
        *,
        found: BoardState | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Hold what was `taken`: the state that was written, and its token."""
        if taken.state is None:
            message = "a lease holds a state that was written; use take_epoch"
            raise ConfigError(message)
        self._board = board
        self._token: Token = taken.token
        self._clock = clock
        self._one = anyio.Lock()
        self.holder: str = taken.state.holder
        self.epoch: int = taken.state.epoch
        self.found = found
        self.state: BoardState = taken.state

    def __repr__(self) -> str:
        return f"<Lease epoch {self.epoch} of {self.holder!r}>"

    async def check(self) -> BoardState:
        """Read the board again; returns the record.

        A read can be older than the call where the board is cached (a file over NFS); a `write`
        cannot.

        Raises:
            SupersededError: somebody else took over, or the record is gone.
            ConfigError, ReplyError, TransportError: as `Board.read`.
        """
        async with self._one:
            return await self._reread()

    def check_commit(self, version: PolicyVersion) -> None:
        """Raise `ConfigError` where `version` could not be written as committed, by what is known.

        A publication of another process may still come in between.
        """
        _changed(
            self.state, "idle", None, version, context="unknown", workers=(), final=False, now=0.0
        )

    async def write(
        self,
        *,
        phase: BoardPhase | None = None,
        target: PolicyVersion | None = None,
        committed: PolicyVersion | None = None,
        context: ContextRule = "unknown",
        workers: Iterable[BoardWorker] | None = None,
        final: bool = False,
    ) -> BoardState:
        """Write to the board; what is None stays. Returns the record as written.

        Args:
            phase: `"idle"` also takes `target` off the board.
            target: the version that workers are being moved to.
            committed: the version that was proved on every worker.
            context: what is guaranteed about the context of its tokens.
            workers: the workers that the publication concerns.
            final: whether the committed version is the last one.

        Raises:
            SupersededError: somebody else took over, at the earliest just after this write; or the
                record is gone.
            ConfigError: `committed` would go back, or a version is of another run.
            pydantic.ValidationError: phase and target do not go together, or `final` does not go
                with them.
            TransportError: as `Board.compare_and_set`. Check before going on.
        """
        workers = None if workers is None else tuple(workers)
        async with self._one:
            lost_replies = 0
            for _ in range(_TRIES):
                new = _changed(
                    self.state,
                    phase,
                    target,
                    committed,
                    context=context,
                    workers=workers,
                    final=final,
                    now=self._clock(),
                )
                try:
                    written = await self._board.compare_and_set(self._token, new)
                except TransportError as error:
                    lost_replies += 1
                    if error.phase == "not_sent" or lost_replies >= _LOST_REPLIES:
                        raise
                    if await self._reread() == new:
                        return new
                    continue
                if written is not None:
                    self._token, self.state = written, new
                    return new
                await self._reread()
            message = f"epoch {self.epoch} of {self.holder!r}: {_TRIES} writes lost to other writes"
            raise TransportError(message, phase="not_sent")

    async def _reread(self) -> BoardState:
        state, token = await self._board.read()
        if state is None or (state.epoch, state.holder) != (self.epoch, self.holder):
            raise SupersededError(
                f"epoch {self.epoch} of {self.holder!r} is over: the board shows {_named(state)}; "
                f"{self._why_over(state)}, so stop this publisher",
                holder=state.holder if state else None,
                epoch=state.epoch if state else None,
            )
        if token.generation >= self._token.generation:
            self.state = state
        # else the board lost writes of this lease: the next one makes them anew
        self._token = token
        return state

    def _why_over(self, state: BoardState | None) -> str:
        if state is None or state.epoch < self.epoch:
            return "it lost what this one wrote"
        return "another publisher took over"


def _named(state: BoardState | None) -> str:
    return f"epoch {state.epoch} of {state.holder!r}" if state else "no record"


def _taken(found: BoardState | None, holder: str, run: str | None, now: float) -> BoardState:
    if found is None:
        return BoardState(run=run, epoch=1, holder=holder, since=now)
    same_run = run is None or run == found.run
    return BoardState(
        run=found.run if same_run else run,
        epoch=found.epoch + 1,
        phase=found.phase,
        committed=found.committed if same_run else None,
        context=found.context if same_run else "unknown",
        target=found.target,
        workers=found.workers,
        holder=holder,
        since=now,
    )


def _changed(
    state: BoardState,
    phase: BoardPhase | None,
    target: PolicyVersion | None,
    committed: PolicyVersion | None,
    *,
    context: ContextRule,
    workers: tuple[BoardWorker, ...] | None,
    final: bool,
    now: float,
) -> BoardState:
    run = state.run
    for version in (target, committed):
        if version is not None:
            run = run or version.run
            if version.run != run:
                raise ConfigError(f"{version} is not of run {run!r}, which the board is at")
    _check_order(state.committed, committed)
    phase = phase or state.phase
    return BoardState(
        run=run,
        epoch=state.epoch,
        phase=phase,
        committed=committed or state.committed,
        context=state.context if committed is None else context,
        final=final,
        target=target or (None if phase == "idle" else state.target),
        workers=state.workers if workers is None else workers,
        holder=state.holder,
        since=state.since if phase == state.phase else now,
    )


def _check_order(old: PolicyVersion | None, new: PolicyVersion | None) -> None:
    if old is None or new is None:
        return
    if (new.step, new.attempt) < (old.step, old.attempt):
        raise ConfigError(f"{new} cannot follow {old}: what was committed does not go back")
