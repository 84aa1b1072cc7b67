"""The shapes of Dynamo's replies and refusals, as they were recorded.

Pure: values in, `Reply` out. A worker's own server calls everything plain text; the frontend has
one flat shape for errors, and a nested one on the routes that are no OpenAI's.
"""

from typing import Any

import msgspec

from .calls import Call, Reply

__all__ = (
    "NOTHING",
    "Refusal",
    "bad_request",
    "event",
    "json_reply",
    "nested",
    "not_json",
    "overlong",
    "read_json",
    "refused",
    "unavailable",
    "worker_reply",
)

_KINDS = {400: "Bad Request", 404: "Not Found", 503: "Service Unavailable"}
NOTHING = Reply(404, {}, b"")
"""What routes of models are while nobody serves one."""


class Refusal(Exception):  # noqa: N818 - not an error, an answer
    """A request that is answered with this reply."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.status)
        self.reply = reply


def json_reply(status: int, body: object) -> Reply:
    """An answer of the frontend."""
    return Reply(status, {"content-type": "application/json"}, msgspec.json.encode(body))


def worker_reply(status: int, body: object) -> Reply:
    """An answer of a worker's own server."""
    headers = {"content-type": "text/plain; charset=utf-8"}
    return Reply(status, headers, msgspec.json.encode(body))


def refused(status: int, message: str) -> Refusal:
    """A refusal of the frontend's OpenAI routes."""
    body = {"message": message, "type": _KINDS[status], "code": status}
    return Refusal(json_reply(status, body))


def bad_request(message: str) -> Refusal:
    """One that the caller can do something about."""
    return refused(400, message)


def overlong(*, limit: int, actual: int) -> Refusal:
    """The refusal of a prompt that leaves too little room: its words are those of any bad one."""
    body = {"message": "Invalid request", "type": _KINDS[400], "code": 400}
    details = {"type": "context_length", "limit": limit, "actual": actual}
    return Refusal(json_reply(400, body | {"details": details}))


def unavailable() -> dict[str, Any]:
    """What a reply of a worker that went away becomes."""
    return {
        "message": "Service temporarily unavailable",
        "type": "service_unavailable",
        "code": 503,
    }


def nested(status: int, message: str, kind: str | None = None) -> Refusal:
    """A refusal of a route that is no OpenAI's."""
    error: dict[str, Any] = {"message": message}
    if kind is not None:
        error |= {"type": kind, "code": status}
    return Refusal(json_reply(status, {"error": error}))


def not_json(call: Call) -> Reply:
    """What a worker's own server says to a body that is none."""
    del call
    message = "expected ident at line 1 column 2"
    return worker_reply(400, {"error": "Invalid JSON", "message": message})


def read_json(call: Call) -> dict[str, Any]:
    """The object that the frontend was sent.

    Raises:
        Refusal: It is none.
    """
    try:
        body = msgspec.json.decode(call.body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise bad_request(f"Failed to parse the request body as JSON: {error}") from error
    if not isinstance(body, dict):
        raise bad_request("Failed to deserialize the JSON body into the target type: expected map")
    return body


def event(chunk: object) -> bytes:
    """One event of a stream."""
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
