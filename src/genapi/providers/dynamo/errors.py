"""Dynamo's error answers as genapi's errors.

The rule of this file: every pattern is a text that Dynamo 1.6.1 sends (transcripts). The frontend
writes `{"message", "type", "code"}`, some of its routes `{"error": {...}}`, a worker's own server
`{"error", "message"}`; an answer that fits none stays a plain `ProviderError`.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from genapi.errors import (
    AuthError,
    ConfigError,
    GenAPIError,
    NotReadyError,
    OverloadedError,
    OverlongPromptError,
    ProviderError,
)
from genapi.providers.shapes import errors as shape
from genapi.providers.shapes.errors import (
    BAD_GATEWAY,
    BAD_REQUEST,
    FORBIDDEN,
    NOT_FOUND,
    TOO_MANY,
    UNAUTHORIZED,
    UNAVAILABLE,
    ErrorText,
    provider_error,
)
from genapi.types.ids import WorkerId
from genapi.wire.http import HTTPReply

__all__ = ("CANCELLED", "ENGINE_DEAD", "NO_WORKER", "error_of", "error_text")

ENGINE_DEAD = "engine_dead"
"""`ProviderError.code` when the engine of the worker that was asked has died."""
NO_WORKER = "no_worker"
"""`NotReadyError.code` when the worker that a request was pinned to is not there (any more)."""
CANCELLED = 499

_OVERLOADED = 529  # --http-overload-status-codes
_OPAQUE = "Invalid request"
"""All that is said of an id beyond the vocabulary, and of a pinned worker that is not there; of a
prompt that leaves no room too, but with details."""
_OVERLONG = re.compile(r"maximum context length|longer than the maximum model length")
_DEAD = re.compile(r"EngineDeadError|EngineCore encountered an issue")


class _Details(Struct, gc=False):
    type: str | None = None
    limit: int | None = None
    actual: int | None = None


class _Detailed(Struct, gc=False):
    details: _Details | None = None


_detailed = msgspec.json.Decoder(_Detailed)


def _details(body: bytes) -> _Details:
    """What an answer says besides its words."""
    try:
        return _detailed.decode(body).details or _Details()
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return _Details()


def error_text(body: bytes) -> ErrorText:
    """The error in a body; a worker's own server says what in `error` and why in `message`."""
    found = shape.error_text(body)
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return found
    if isinstance(value, dict) and isinstance(value.get("error"), str):
        why = value.get("message")
        if isinstance(why, str):
            return ErrorText(f"{value['error']}: {why}")
    return found


def error_of(
    reply: HTTPReply, *, now: float, partial: Any = None, pinned: WorkerId | None = None
) -> GenAPIError:
    """The typed error that an answer other than 2xx is.

    Args:
        reply: the answer; also an error chunk of a stream, with the status that it names.
        now: wall-clock seconds since the epoch.
        partial: tokens that had arrived.
        pinned: the worker that had to serve it; None = whoever the frontend chose.
    """
    error = error_text(reply.body)
    where = f"{reply.url or 'Dynamo'} answered {reply.status}: {error.message}"
    if reply.status == NOT_FOUND and reply.body:
        return ConfigError(
            f"{where} (pass model= as the frontend's /v1/models names it, and check that the "
            "target is a Dynamo frontend)"
        )
    kind, code, hint = _kind(reply, error, pinned)
    return provider_error(
        kind, where + hint, reply, code=code or error.type, partial=partial, now=now
    )


def _kind(
    reply: HTTPReply, error: ErrorText, pinned: WorkerId | None
) -> tuple[type[ProviderError], str | None, str]:
    """The error's class, a code of genapi's own, and a hint for the message."""
    status, text, details = reply.status, error.message, _details(reply.body)
    if details.type == "context_length":
        hint = f" (prompt and max_tokens take {details.actual} of {details.limit} tokens)"
        return OverlongPromptError, None, hint
    if status == BAD_REQUEST and text == _OPAQUE:
        if pinned is None:
            return ProviderError, None, " (an id beyond the vocabulary is answered so)"
        hint = f" ({pinned} may be gone, or an id lies beyond its vocabulary)"
        return NotReadyError, NO_WORKER, hint
    if _DEAD.search(text):
        return ProviderError, ENGINE_DEAD, " (a worker's engine died: it has to be restarted)"
    if _OVERLONG.search(text):
        return OverlongPromptError, None, ""
    return _BY_STATUS.get(status, (ProviderError, None, ""))


_BY_STATUS: Mapping[int, tuple[type[ProviderError], str | None, str]] = {
    UNAUTHORIZED: (AuthError, None, " (Dynamo has no keys: something in front of it has)"),
    FORBIDDEN: (AuthError, None, " (Dynamo has no keys: something in front of it has)"),
    # Routes of models come with the first worker and go with the last; meanwhile the frontend
    # answers without a word.
    NOT_FOUND: (NotReadyError, None, " (no worker serves a model there now)"),
    TOO_MANY: (OverloadedError, None, ""),
    _OVERLOADED: (OverloadedError, None, ""),
    BAD_GATEWAY: (NotReadyError, None, ""),
    UNAVAILABLE: (NotReadyError, None, ""),
}
