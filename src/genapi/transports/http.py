"""What the HTTP clients have in common: addresses, headers, framing, and how a loss is told.

The rule of this file: nothing that it writes into a message comes from a header or a body.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final
from urllib.parse import quote, urlencode

from genapi.errors import Phase, TransportError
from genapi.wire.http import HTTPCall
from genapi.wire.origin import origin

__all__ = (
    "IDLE_CONNECTION_S",
    "NO_HEADERS",
    "OTHER_LOOP",
    "TCP_KEEPALIVE",
    "call_headers",
    "call_url",
    "is_framed",
    "lost",
    "refuse_attachment",
)

IDLE_CONNECTION_S: Final = 2.0
"""How long an idle connection is kept: well below the 5 s after which uvicorn closes it."""

TCP_KEEPALIVE: Final = (
    ("SO_KEEPALIVE", 1),
    ("TCP_KEEPIDLE", 60),
    ("TCP_KEEPINTVL", 15),
    ("TCP_KEEPCNT", 4),
)
"""Socket options by name: a peer that vanished is noticed within two minutes of silence."""

OTHER_LOOP: Final = (
    "this transport's connections belong to another event loop; "
    "open a fleet in each loop, or use genapi.sync, which runs one loop for all threads"
)

NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})

_DEFAULTS: Final = {"accept-encoding": "identity", "user-agent": "genapi"}
_NO_BODY: Final = frozenset({204, 304})
_MEANING: Final[Mapping[Phase, str]] = {
    "not_sent": "the request was not sent",
    "may_have_run": "the request may have been acted on",
    "answered": "the answer broke off",
}


def call_url(base_url: str, call: HTTPCall) -> str:
    """The absolute URL of a call: the path goes below the base, whatever prefix the base has."""
    url = base_url + quote(call.path, safe="/%:@!$&'()*+,;=~")
    return f"{url}?{urlencode(call.query, quote_via=quote)}" if call.query else url


def call_headers(call: HTTPCall, headers: Mapping[str, str]) -> dict[str, str]:
    """What is sent, by lower-case name: genapi's own headers, then the call's, then `headers`."""
    sent = dict(_DEFAULTS)
    if call.body is not None:
        sent["content-type"] = "application/json"
    for more in (call.headers, headers):
        for name, value in more.items():
            sent[name.lower()] = value
    return sent


def is_framed(status: int, headers: Mapping[str, str]) -> bool:
    """Whether a complete body can be told from a broken one; `headers` by lower-case name."""
    return (
        "content-length" in headers
        or "chunked" in headers.get("transfer-encoding", "").lower()
        or status in _NO_BODY
    )


def refuse_attachment(call: HTTPCall) -> None:
    """Raise `TypeError` when the call has what only an in-process transport can hand over."""
    if call.attachment is not None:
        raise TypeError(
            f"{call.method} {call.path} has an attachment, which cannot go over HTTP; "
            "only in-process transports hand objects over by reference"
        )


def lost(base_url: str, call: HTTPCall, reason: str, *, phase: Phase) -> TransportError:
    """The error of a call that has no usable answer, for `reason`."""
    message = f"{call.method} {call.path} to {origin(base_url)}: {reason}; {_MEANING[phase]}"
    return TransportError(message, phase=phase, url=base_url + call.path)
