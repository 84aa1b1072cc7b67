"""SGLang's error answers as genapi's errors.

The rule of this file: every pattern is a text that SGLang 0.5.23 sends (transcripts) or that its
source holds (marked READ). An answer that fits none stays a plain `ProviderError`. What a
validation error repeats of the request, and the server's file names in it, are dropped.
"""

import re
from functools import partial as bind
from typing import Any
from urllib.parse import urlsplit

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
    FORBIDDEN,
    NOT_ALLOWED,
    NOT_FOUND,
    TOO_MANY,
    UNAUTHORIZED,
    UNAVAILABLE,
    provider_error,
)
from genapi.wire.http import HTTPReply

__all__ = ("error_of", "error_text", "error_value", "key_hint")

NORMAL_PATHS = (
    "/generate",
    "/model_info",
    "/ping",
    "/server_info",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/v1/tokenize",
)
"""Routes that take `--api-key`; every other one that genapi asks takes `--admin-api-key`."""

_OVERLONG = re.compile(
    r"longer than the model's context length|exceeds the model's maximum context length"
)
_TOGETHER = re.compile(r"tokens for the completion")
_BUSY = re.compile(r"queue is full|[Tt]oo many|timed? ?out")  # READ 0.5.23 scheduler.py
_QUOTED = r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)\""""
_LONGEST_PLACE = 400
_VALIDATION = re.compile(rf"'loc': \((.{{0,{_LONGEST_PLACE}}}?)\), 'msg': (?:{_QUOTED})")


def _plain(text: str) -> str:
    if "validation error" in text:
        head, _, rest = text.partition("\n\n  File")[0].partition(":")
        found = [f"{_field(loc)}: {one or other}" for loc, one, other in _VALIDATION.findall(rest)]
        # What it could not be read of is dropped all the same: it repeats the request.
        text = f"{head}: {'; '.join(found)}" if found else head
    return text


def _field(location: str) -> str:
    parts = [part.strip(" ',") for part in location.split(", ")]
    return ".".join(part for part in parts if part and not {"[", "]"} & {*part})


error_text = bind(shape.error_text, tidy=_plain)
error_value = bind(shape.error_value, tidy=_plain)


def key_hint(url: str | None) -> str:
    """Which key a route takes, for a message; the two keys of a server open disjoint routes."""
    if urlsplit(url or "").path.endswith(NORMAL_PATHS):
        return "this route takes the server's --api-key: check api_key"
    return (
        "this route takes the server's --admin-api-key, or its --api-key where it has no other: "
        "check admin_api_key"
    )


def error_of(reply: HTTPReply, *, now: float, partial: Any = None) -> GenAPIError:
    """The typed error that an answer other than 2xx is.

    Args:
        reply: the answer; also an error frame of a stream, with the status that it names.
        now: wall-clock seconds since the epoch.
        partial: tokens that had arrived.
    """
    error = error_text(reply.body)
    where = f"{reply.url or 'SGLang'} answered {reply.status}: {error.message}"
    if reply.status in (NOT_FOUND, NOT_ALLOWED):
        return ConfigError(f"{where} (the route does not exist there: is it an SGLang server?)")
    kind, code, hint = _kind(reply, error)
    return provider_error(
        kind, where + hint, reply, code=code or error.type, partial=partial, now=now
    )


def _kind(reply: HTTPReply, error: shape.ErrorText) -> tuple[type[ProviderError], str | None, str]:
    """The error's class, a code of genapi's own, and a hint for the message."""
    status, text = reply.status, error.message
    if status in (UNAUTHORIZED, FORBIDDEN):
        return AuthError, None, f" ({key_hint(reply.url)})"
    if _OVERLONG.search(text):
        both = " (SGLang does not shorten max_tokens)" if _TOGETHER.search(text) else ""
        return OverlongPromptError, None, both
    if status == TOO_MANY or (status == UNAVAILABLE and _BUSY.search(text)):
        return OverloadedError, None, ""
    if status in (BAD_GATEWAY, UNAVAILABLE):
        return NotReadyError, None, ""
    return ProviderError, None, ""
