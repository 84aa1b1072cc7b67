"""What happened, as values. Lower layers tell it to one `observe(event)`; readers decide.

No event carries a prompt, a token or a key.
"""

import logging
from collections.abc import Callable

from genapi.types.base import Value
from genapi.types.ids import WorkerId
from genapi.types.policy import PolicyVersion

__all__ = (
    "AdminCalled",
    "ComponentEnded",
    "ComponentReady",
    "ComponentStarted",
    "Event",
    "Observe",
    "OldVersionsKept",
    "PhaseEnded",
    "PhaseStarted",
    "RequestEnded",
    "RequestRetried",
    "SenderProgress",
    "WorkerFenced",
    "WorkerLeftOut",
    "guarded",
    "ignore",
)


_log = logging.getLogger(__name__)


class Event(Value):
    """Base of all events."""


class ComponentStarted(Event):
    """A program of a launch runs; `log` is the file that holds its output."""

    component: str
    pid: int
    log: str


class ComponentReady(Event):
    """A program of a launch serves."""

    component: str
    url: str


class ComponentEnded(Event):
    """Nothing of a program of a launch is left.

    `status` is negative for a signal, and None where it is not known.
    """

    component: str
    status: int | None


class RequestRetried(Event):
    """A generation is going to be sent again."""

    request_id: str
    attempt: int
    error: str
    wait_s: float


class RequestEnded(Event):
    """A generation ended, with or without a reply."""

    request_id: str
    worker: WorkerId | None
    error: str | None
    seconds: float


class AdminCalled(Event):
    """One administration call was answered or given up."""

    worker: str
    operation: str
    seconds: float
    error: str | None = None


class PhaseStarted(Event):
    """A publication entered a phase."""

    version: PolicyVersion
    phase: str


class PhaseEnded(Event):
    """A publication left a phase."""

    version: PolicyVersion
    phase: str
    seconds: float


class SenderProgress(Event):
    """Weights were gathered or sent."""

    version: PolicyVersion
    what: str
    bytes_done: int
    bytes_total: int


class WorkerFenced(Event):
    """A worker gets no more traffic."""

    worker: WorkerId
    reason: str


class WorkerLeftOut(Event):
    """A publication goes on without a worker, which stays fenced (`on_partial="serve"`)."""

    version: PolicyVersion
    worker: WorkerId
    reason: str


class OldVersionsKept(Event):
    """Files stay that could not be removed, or are of a version that failed; `error` says why.

    The next publication of the same publisher tries again. What one tells of that is being closed
    stays until another one commits a later version of the run there, or it is removed by hand.
    """

    version: PolicyVersion
    error: str


Observe = Callable[[Event], None]


def guarded(observe: Observe) -> Observe:
    """`observe`, whose errors are logged: telling what happens must not change what happens."""

    def tell(event: Event) -> None:
        try:
            observe(event)
        except Exception:  # noqa: BLE001 - whatever a user's observer raises
            _log.exception("the observer failed on %s", type(event).__name__)

    return tell


def ignore(_event: Event) -> None:
    """An observer that does nothing."""
