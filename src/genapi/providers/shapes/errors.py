"""Error bodies of OpenAI-like servers: an object, a text, or either of them in a field.

The rule of this file: it reads what a body says and makes an exception of a class that it is told.
Which class a text or a status means is the provider's.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from genapi.errors import NotReadyError, OverloadedError, ProviderError
from genapi.shown import beginning
from genapi.wire.http import HTTPReply
from genapi.wire.retry import retry_after_s

__all__ = (
    "BAD_GATEWAY",
    "BAD_REQUEST",
    "FORBIDDEN",
    "GATEWAY_TIMEOUT",
    "NOT_ALLOWED",
    "NOT_FINITE",
    "NOT_FOUND",
    "TOO_MANY",
    "UNAUTHORIZED",
    "UNAVAILABLE",
    "ErrorText",
    "Tidy",
    "error_text",
    "error_value",
    "provider_error",
)

NOT_FINITE = "not_finite"
"""`ProviderError.code` when a score is no number, which JSON cannot carry: broken weights."""

BAD_REQUEST, UNAUTHORIZED, FORBIDDEN, NOT_FOUND, NOT_ALLOWED = 400, 401, 403, 404, 405
TOO_MANY, BAD_GATEWAY, UNAVAILABLE, GATEWAY_TIMEOUT = 429, 502, 503, 504

_SHOWN = 300
_MESSAGE_SHOWN = 2000
"""Of what an engine says in a field of its own: what went wrong may stand at its end."""

Tidy = Callable[[str], str]
"""What a provider leaves of a text of its engine."""


class ErrorText(msgspec.Struct, frozen=True):
    """What an error body says, whichever shape it has.

    Attributes:
        message: the text.
        type: the engine's word for the kind of error, or None.
        param: the request field it is about, or None.
        code: the status the body itself names, or None.
    """

    message: str
    type: str | None = None
    param: str | None = None
    code: int | None = None


def error_text(body: bytes, *, tidy: Tidy = str) -> ErrorText:
    """The error in a body.

    `{"error": {"message": ...}}`, `{"error": "..."}`, `{"message": ...}`, `{"detail": ...}`, or
    text.
    """
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return ErrorText(_shown(body.decode("utf-8", "replace"), tidy).strip() or "empty body")
    return error_value(value, tidy=tidy)


def error_value(value: Any, *, tidy: Tidy = str) -> ErrorText:
    """The error in a decoded body, or in the `error` field of one."""
    if isinstance(value, Mapping):
        for name in ("error", "detail"):
            if name in value:
                return error_value(value[name], tidy=tidy)
        if isinstance(value.get("message"), str):
            kind, param, code = value.get("type"), value.get("param"), value.get("code")
            return ErrorText(
                _shown(value["message"], tidy, _MESSAGE_SHOWN),
                kind if isinstance(kind, str) else None,
                param if isinstance(param, str) else None,
                code if type(code) is int else None,
            )
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return ErrorText(_shown(text, tidy))


def _shown(text: str, tidy: Tidy, longest: int = _SHOWN) -> str:
    return beginning(tidy(text), longest)


def provider_error(
    kind: type[ProviderError],
    message: str,
    reply: HTTPReply,
    *,
    code: str | None,
    partial: Any,
    now: float,
) -> ProviderError:
    """The exception of that class for an answer; whoever may ask again is told when.

    Args:
        kind: the class.
        message: what happened.
        reply: the answer.
        code: the engine's word for it, or one of genapi's own.
        partial: tokens that had arrived.
        now: wall-clock seconds since the epoch.
    """
    error = kind(
        message, status=reply.status, code=code, body=reply.body, url=reply.url, partial=partial
    )
    if isinstance(error, OverloadedError | NotReadyError):
        error.retry_after_s = retry_after_s(reply.headers, now=now)
    return error
