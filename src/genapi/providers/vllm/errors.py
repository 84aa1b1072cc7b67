"""vLLM's error answers as genapi's errors.

The rule of this file: every pattern is a text that vLLM sends (transcripts 42, 46, 50, 90) or that
its source holds (marked READ). An answer that fits none stays a plain `ProviderError`.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from genapi.errors import (
    AuthError,
    ConfigError,
    GenAPIError,
    NotReadyError,
    OverloadedError,
    OverlongPromptError,
    ProviderError,
)
from genapi.wire.http import HTTPReply
from genapi.wire.retry import retry_after_s

__all__ = (
    "ADMIN_REMEDY",
    "ENGINE_DEAD",
    "NOT_FINITE",
    "PAUSED",
    "SCALE_OUT_REMEDY",
    "ErrorText",
    "error_of",
    "error_text",
)

ENGINE_DEAD = "engine_dead"
"""`ProviderError.code` when the engine behind the server has died: only a restart helps."""
NOT_FINITE = "not_finite"
"""`ProviderError.code` when a score is no number, which JSON cannot carry: broken weights."""
PAUSED = "paused"
"""`NotReadyError.code` when the server refuses requests until it resumes (0.33)."""

SCALE_OUT_REMEDY = "start vLLM with --enable-scale-out, which adds the route /inference/v1/generate"
ADMIN_REMEDY = (
    "start vLLM with the environment variable VLLM_SERVER_DEV_MODE=1, which adds the routes "
    "/pause, /weight_info and the weight updates"
)

_DEAD = re.compile(r"EngineCore encountered an issue|EngineDeadError")
_OVERLONG = re.compile(r"maximum context length is \d+|longer than the maximum model length of \d+")
_NOT_FINITE = re.compile(r"Out of range float values are not JSON compliant")  # RUN 0.32
_PAUSED = re.compile(r"[Gg]eneration is paused")  # READ 0.33 v1/engine/core.py
_BUSY = re.compile(r"currently busy|queued tokens")  # READ 0.32 exceptions.py
_SHOWN = 300

UNAUTHORIZED, FORBIDDEN, NOT_FOUND, NOT_ALLOWED = 401, 403, 404, 405
TOO_MANY, BAD_GATEWAY, UNAVAILABLE = 429, 502, 503


class ErrorText(msgspec.Struct, frozen=True):
    """What an error body says, whichever of vLLM's four shapes it has.

    Attributes:
        message: the text.
        type: vLLM's word for the kind of error, or None.
        param: the request field it is about, or None.
        code: the status the body itself names, or None.
    """

    message: str
    type: str | None = None
    param: str | None = None
    code: int | None = None


def error_text(body: bytes) -> ErrorText:
    """The error in a body: `{"error": {...}}`, `{"error": "..."}`, `{"detail": ...}`, or text."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return ErrorText(body[:_SHOWN].decode("utf-8", "replace").strip() or "empty body")
    return error_value(value)


def error_value(value: Any) -> ErrorText:
    """The error in a decoded body, or in the `error` field of one."""
    if isinstance(value, Mapping):
        for name in ("error", "detail"):
            if name in value:
                return error_value(value[name])
        if isinstance(value.get("message"), str):
            kind, param, code = value.get("type"), value.get("param"), value.get("code")
            return ErrorText(
                value["message"],
                kind if isinstance(kind, str) else None,
                param if isinstance(param, str) else None,
                code if isinstance(code, int) else None,
            )
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return ErrorText(text[:_SHOWN])


def error_of(
    reply: HTTPReply, *, now: float, lora: str | None = None, partial: Any = None
) -> GenAPIError:
    """The typed error that an answer other than 2xx is.

    Args:
        reply: the answer; also an error frame of a stream, with the status that it names.
        now: wall-clock seconds since the epoch.
        lora: the adapter that was asked for.
        partial: tokens that had arrived.
    """
    error = error_text(reply.body)
    where = f"{reply.url or 'vLLM'} answered {reply.status}: {error.message}"
    configured = _configuration(reply.status, error, where, lora)
    if configured is not None:
        return configured
    kind, code, hint = _kind(reply.status, error)
    typed = kind(
        where + hint,
        status=reply.status,
        code=code or error.type,
        body=reply.body,
        url=reply.url,
        partial=partial,
    )
    if isinstance(typed, OverloadedError | NotReadyError):
        typed.retry_after_s = retry_after_s(reply.headers, now=now)
    return typed


def _configuration(
    status: int, error: ErrorText, where: str, lora: str | None
) -> ConfigError | None:
    if status == FORBIDDEN and error.type == "PermissionDeniedError":
        return ConfigError(f"{where} ({SCALE_OUT_REMEDY})")
    if status in (NOT_FOUND, NOT_ALLOWED) and error.type is None:
        return ConfigError(
            f"{where} (the route does not exist there: {SCALE_OUT_REMEDY}; before 0.32 that is "
            "how a server without it answers)"
        )
    if status == NOT_FOUND and error.param == "model" and lora is None:
        return ConfigError(f"{where} (pass model= as one of the names that the server gives)")
    return None


def _kind(status: int, error: ErrorText) -> tuple[type[ProviderError], str | None, str]:
    """The error's class, a code of genapi's own, and a hint for the message."""
    text = error.message
    if _DEAD.search(text):
        return ProviderError, ENGINE_DEAD, " (the engine died: the server has to be restarted)"
    if _NOT_FINITE.search(text):
        return ProviderError, NOT_FINITE, " (the model's scores are NaN: its weights are broken)"
    if status in (UNAUTHORIZED, FORBIDDEN):
        return AuthError, None, " (check the API key)"
    if _OVERLONG.search(text):
        return OverlongPromptError, None, ""
    if status == TOO_MANY or (status == UNAVAILABLE and _BUSY.search(text)):
        return OverloadedError, None, ""
    if status == UNAVAILABLE and _PAUSED.search(text):
        return NotReadyError, PAUSED, ""
    if status in (BAD_GATEWAY, UNAVAILABLE):
        return NotReadyError, None, ""
    return ProviderError, None, ""
