"""One request of the user's on its way: what was asked, sent, answered. State only, no I/O."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import anyio

from genapi.membership import Member
from genapi.providers.base import Capabilities, Pin
from genapi.publication.bounds import Bound
from genapi.publication.intervals import Sights
from genapi.types.ids import WorkerId
from genapi.types.policy import PolicyVersion
from genapi.types.request import GenerateRequest
from genapi.types.response import Attempt

__all__ = ("AbortedError", "Run", "Sending")


class AbortedError(Exception):
    """The user aborted a request that no worker had then: nothing was generated."""


@dataclass(slots=True)
class Sending:
    """One sending of one request.

    Attributes:
        wire_id: its id on the wire.
        url: where it went.
        member: which worker got it, or a router was told to give it to; None = whom a router chose.
        worker: which life of it, as known then.
        salted: the version in its cache salt.
        model: the served model's name; None = not known.
        outputs: how many outputs are asked for.
        before: what was known of all who may serve it when it was dispatched.
        pin: what a router is told of who has to serve it.
        aborts: pauses that end what runs, when it was dispatched: begun so far, and under way.
        scope: what its present wait for the engine ends with, where no call aborts it.
        is_cut: whether it was aborted so.
        remarks: what its reply lacks.
    """

    wire_id: str
    url: str
    member: Member | None
    worker: WorkerId | None
    salted: PolicyVersion | None
    model: str | None
    outputs: int
    before: Sights
    pin: Pin | None = None
    aborts: tuple[int, int] = (0, 0)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    is_cut: bool = False
    remarks: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Run:
    """One request of the user's, over all its sendings.

    Attributes:
        request: what was asked.
        request_id: the user's label, or one of genapi's.
        deadline: when `timeout_s` is over, on the loop's clock.
        waits_for: what it waits for while no worker has it, in words.
        bounds: the versions that the reply has to be of.
        attempts: the sendings that did not become the reply.
        is_bound: whether its versions are bound.
        stale: how many of them were answered by a version that was not asked for.
        lacking: what was seen instead of the version that was asked for; None = nothing lacks.
        checked: the capabilities that the request was held against; None = no worker was read.
        current: the sending that is under way, or was last; None = no worker had it yet.
        is_aborted: whether the user aborted it.
        scope: what `timeout_s` bounds.
    """

    request: GenerateRequest
    request_id: str
    deadline: float = math.inf
    waits_for: str = "the workers to be read"
    bounds: tuple[Bound, ...] = ()
    attempts: list[Attempt] = field(default_factory=list)
    is_bound: bool = False
    stale: int = 0
    lacking: str | None = None
    checked: Capabilities | None = None
    current: Sending | None = None
    is_aborted: bool = False
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    _wait: anyio.CancelScope | None = None

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """A wait without a worker, which `abort` ends.

        Raises:
            AbortedError: it was aborted, before the wait or during it.
        """
        self.waits_for = what
        if not self.is_aborted:
            with anyio.CancelScope() as self._wait:
                yield
            self._wait = None
        if self.is_aborted:
            raise AbortedError

    def abort(self) -> None:
        """End it: its wait now, and whatever would be sent later."""
        self.is_aborted = True
        if self._wait is not None:
            self._wait.cancel()
