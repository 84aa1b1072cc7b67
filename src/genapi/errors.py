"""Every exception genapi raises, and nothing else.

An error says whose fault it was and whether the peer may have acted on the call:

    GenAPIError
    ├── ConfigError (ValueError)      what the user or the fleet's set-up asks for cannot be
    ├── UnsupportedError              the provider cannot do it; raised before any I/O
    ├── TransportError                no usable answer came back   .phase .url
    ├── ReplyError                    the peer broke its contract  .url .status .body
    ├── IncompleteError               the reply ended early        .partial
    ├── ProviderError                 the peer answered an error   .status .code .body
    │   ├── OverlongPromptError
    │   ├── OverloadedError           .retry_after_s
    │   ├── AuthError
    │   └── NotReadyError             .retry_after_s
    ├── FleetError                    the set of workers is not what it has to be
    ├── StalePolicyError              no worker met the version that was asked for
    ├── SupersededError               another publisher took over  .holder .epoch
    └── PublishError                  a publication did not commit  .report

An engine's abort is data (`FinishReason.ABORT`), never one of these.
All of them survive pickling with their attributes. No message shows the user info of an address,
whoever wrote it.
"""

from collections.abc import Callable
from typing import Any, Literal

from genapi.shown import beginning, without_user_info

__all__ = (
    "AuthError",
    "ConfigError",
    "FleetError",
    "GenAPIError",
    "GenAPIWarning",
    "IncompleteError",
    "NotReadyError",
    "OverloadedError",
    "OverlongPromptError",
    "Phase",
    "ProviderError",
    "PublishError",
    "ReplyError",
    "StalePolicyError",
    "SupersededError",
    "TransportError",
    "UnsupportedError",
)

Phase = Literal["not_sent", "may_have_run", "answered"]

_BODY_SHOWN = 200


def _rebuild(
    cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]
) -> BaseException:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class GenAPIError(Exception):
    """Root of every error that genapi raises on purpose."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(without_user_info(a) if isinstance(a, str) else a for a in args))

    def __reduce__(self) -> tuple[Callable[..., BaseException], tuple[Any, ...]]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


class GenAPIWarning(UserWarning):
    """A reply is usable but lacks something that was asked for; `strict=True` makes it an error."""


class ConfigError(GenAPIError, ValueError):
    """What was configured cannot work; the message names the value and the remedy."""


class UnsupportedError(GenAPIError):
    """The provider cannot do what the request asks for. Nothing was sent."""


class TransportError(GenAPIError):
    """No usable answer came back, over HTTP or in a transfer group.

    Attributes:
        phase: `not_sent`: the peer cannot have acted; `may_have_run`: it may have;
            `answered`: an answer began (its headers were complete) and broke off.
        url: where the call went.
    """

    def __init__(self, message: str, *, phase: Phase, url: str | None = None) -> None:
        super().__init__(message)
        self.phase: Phase = phase
        self.url = url

    @property
    def refused(self) -> bool:
        """Whether the connection was refused: nothing listens there."""
        cause: BaseException | None = self
        while cause is not None:
            if isinstance(cause, ConnectionRefusedError):
                return True
            cause = cause.__cause__ or cause.__context__
        return False


class ReplyError(GenAPIError):
    """The peer's answer breaks its contract. The raw body is kept in `body`."""

    def __init__(
        self,
        message: str,
        *,
        body: bytes | None = None,
        status: int | None = None,
        url: str | None = None,
    ) -> None:
        shown = f"; body begins {_beginning(body)!r}" if body else ""
        super().__init__(message + shown)
        self.body = body
        self.status = status
        self.url = url


def _beginning(body: bytes) -> bytes:
    return beginning(body.decode("latin-1"), _BODY_SHOWN).encode("latin-1")


class IncompleteError(GenAPIError):
    """The answer ended before every choice was finished.

    Attributes:
        partial: what had arrived (a `GenerateResponse`), or None.
    """

    def __init__(self, message: str, *, partial: Any = None) -> None:
        super().__init__(message)
        self.partial = partial


class ProviderError(GenAPIError):
    """The peer answered with an error of its own.

    Attributes:
        status: HTTP status, or the status an error inside a 200 names.
        code: the peer's own error type or code.
        body: the raw body.
        partial: tokens that had arrived before the error (a `GenerateResponse`), or None.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str | None = None,
        body: bytes | None = None,
        url: str | None = None,
        partial: Any = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.body = body
        self.url = url
        self.partial = partial


class OverlongPromptError(ProviderError):
    """The prompt is longer than the model's context. Sending it again gives the same answer."""


class OverloadedError(ProviderError):
    """The peer is too busy. `retry_after_s` is its own advice in seconds, or None."""

    retry_after_s: float | None = None


class AuthError(ProviderError):
    """The peer refused the key (401 or 403)."""


class NotReadyError(ProviderError):
    """The peer is not serving now: starting, paused, asleep.

    `retry_after_s` is as in OverloadedError.
    """

    retry_after_s: float | None = None


class FleetError(GenAPIError):
    """The workers are not what they have to be: missing, changed, fenced, or not ready in time."""


class StalePolicyError(GenAPIError):
    """No worker held the policy version that the request asks for within its time."""


class SupersededError(GenAPIError):
    """Another publisher took over: this one may neither publish nor write to the board any more.

    Attributes:
        holder: who holds the board now; None = its record is gone.
        epoch: the epoch that the board shows; None = its record is gone.
    """

    def __init__(self, message: str, *, holder: str | None, epoch: int | None) -> None:
        super().__init__(message)
        self.holder = holder
        self.epoch = epoch


class PublishError(GenAPIError):
    """A publication did not commit on every worker it had to.

    Attributes:
        report: the `PublishReport` with one receipt per worker.
    """

    def __init__(self, message: str, *, report: Any) -> None:
        super().__init__(message)
        self.report = report
