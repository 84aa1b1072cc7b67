"""One HTTP call and its answer as plain values, without any client's types."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from genapi.errors import ConfigError, ReplyError

__all__ = ("LARGEST_BODY", "Grant", "HTTPCall", "HTTPReply", "json_body")

Grant = Literal["data", "admin"]
"""Which of a fleet's two keys: that of requests or that of administration."""

LARGEST_BODY: Final = 256 << 20
"""Bytes that one answer, or one frame of a stream, may have; no real one comes near."""

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder()


def json_body(value: Any) -> bytes:
    """`value` as JSON; NaN and infinities become null, as msgspec writes them.

    Raises:
        ConfigError: something in it has no JSON form.
    """
    try:
        return _encoder.encode(value)
    except (TypeError, UnicodeEncodeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"what is asked cannot be written as JSON: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class HTTPCall:
    """One call, relative to a base URL.

    Attributes:
        method: `GET` or `POST`.
        path: absolute path below the base URL, such as `/inference/v1/generate`.
        query: query parameters.
        headers: headers besides content type and authorization.
        body: a JSON document, or None.
        attachment: what an in-process transport may hand over by reference; any other
            transport refuses a call that has one.
        grant: the key that the route takes, where an engine tells the two apart; None = the key
            of the plane that sends the call.
        base: another base URL than that of the flow the call is part of; None = that one.
    """

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    attachment: object | None = None
    grant: Grant | None = None
    base: str | None = None

    def __str__(self) -> str:
        query = "&".join(f"{k}={v}" for k, v in self.query.items())
        return f"{self.method} {self.path}{'?' if query else ''}{query}"


@dataclass(frozen=True, slots=True)
class HTTPReply:
    """A complete answer.

    Attributes:
        status: HTTP status.
        body: the whole body.
        headers: by lower-case name.
        url: where it came from, for messages.
    """

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    url: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status < 300  # noqa: PLR2004 - the range is the definition

    def json(self) -> Any:
        """The body as JSON.

        Raises:
            ReplyError: the body is not JSON.
        """
        try:
            return _decoder.decode(self.body)
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            message = f"expected JSON from {self.url} (status {self.status}): {error}"
            raise ReplyError(message, body=self.body, status=self.status, url=self.url) from None

    def json_object(self) -> dict[str, Any]:
        """The body as a JSON object.

        Raises:
            ReplyError: the body is something else.
        """
        value = self.json()
        if not isinstance(value, dict):
            message = f"expected a JSON object from {self.url} (status {self.status})"
            raise ReplyError(message, body=self.body, status=self.status, url=self.url)
        return value

    def json_field(self, name: str) -> Any:
        """A field of the body, which is a JSON object.

        Raises:
            ReplyError: the body is something else, or has no such field.
        """
        value = self.json_object()
        if name not in value:
            message = f"expected {name!r} from {self.url}"
            raise ReplyError(message, body=self.body, status=self.status, url=self.url)
        return value[name]
