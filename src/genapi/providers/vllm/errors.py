"""vLLM's error answers as genapi's errors.

The rule of this file: every pattern is a text that vLLM sends (transcripts 42, 46, 50, 90) or that
its source holds (marked READ). An answer that fits none stays a plain `ProviderError`.
"""

import re
from typing import Any

from genapi.errors import (
    AuthError,
    ConfigError,
    GenAPIError,
    NotReadyError,
    OverloadedError,
    OverlongPromptError,
    ProviderError,
)
from genapi.providers.shapes.errors import (
    BAD_GATEWAY,
    FORBIDDEN,
    NOT_ALLOWED,
    NOT_FINITE,
    NOT_FOUND,
    TOO_MANY,
    UNAUTHORIZED,
    UNAVAILABLE,
    ErrorText,
    error_text,
    provider_error,
)
from genapi.wire.http import HTTPReply

__all__ = ("ADMIN_REMEDY", "ENGINE_DEAD", "PAUSED", "SCALE_OUT_REMEDY", "error_of")

ENGINE_DEAD = "engine_dead"
"""`ProviderError.code` when the engine behind the server has died: only a restart helps."""
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
    return provider_error(
        kind, where + hint, reply, code=code or error.type, partial=partial, now=now
    )


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
