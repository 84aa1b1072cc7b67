"""The shapes of vLLM's replies and refusals, byte for byte where they were recorded.

Pure: values in, `Reply` out. What a route does is in the other files of this protocol.
"""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from .calls import Call, Reply

__all__ = (
    "Refusal",
    "bad_request",
    "empty",
    "error_body",
    "flag",
    "internal",
    "invalid",
    "json_object",
    "ok",
    "plain",
    "worker_failed",
)

_JSON = {"content-type": "application/json"}
_VARY = {"vary": "Origin"}


# a reply on its way, not an error of the engine
class Refusal(Exception):  # noqa: N818
    """A reply that ends the handling of a call."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.status)
        self.reply = reply


def ok(body: object) -> Reply:
    """200 with compact JSON."""
    return Reply(200, _JSON | _VARY, msgspec.json.encode(body))


def empty() -> Reply:
    """200 without a body."""
    return Reply(200, _VARY, b"")


def plain(status: int, body: object, *, vary: bool = True, **headers: str) -> Reply:
    """JSON that is not an error object of vLLM's: the framework's own 404, 405 and the 401."""
    return Reply(status, headers | _JSON | (_VARY if vary else {}), msgspec.json.encode(body))


def error_body(status: int, message: str, kind: str, *, param: str | None = None) -> dict[str, Any]:
    """The error object of vLLM."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def bad_request(
    message: str, *, param: str | None = None, kind: str = "BadRequestError", status: int = 400
) -> Refusal:
    """A refusal by a handler: bad values, unknown models."""
    body = error_body(status, message, kind, param=param)
    return Refusal(Reply(status, _JSON | _VARY, msgspec.json.encode(body)))


def invalid(kind: str, loc: str, msg: str, *, got: object, ctx: str = "") -> Refusal:
    """A refusal by validation of the request's schema; `ctx` is the text of the context, if any."""
    quote = '"' if "'" in msg else "'"
    detail = (
        f"{{'type': '{kind}', 'loc': '{loc}', 'msg': {quote}{msg}{quote}, 'input': '{_shown(got)}'"
    )
    detail += f", 'ctx': {ctx}}}" if ctx else "}"
    return bad_request(f"1 validation error:\n  {detail}", param=loc, kind="Bad Request")


def internal(message: str) -> Refusal:
    """A 500 of the API server."""
    body = error_body(500, message, "InternalServerError")
    return Refusal(Reply(500, _JSON | _VARY, msgspec.json.encode(body)))


def worker_failed(message: str) -> Refusal:
    """A 500 because a worker process raised; the server hangs up after it."""
    text = (
        f"Call to collective_rpc method failed: Worker failed with error '{message}', "
        "please check the stack trace above for the root cause"
    )
    body = error_body(500, text, "InternalServerError")
    return Refusal(Reply(500, _JSON, msgspec.json.encode(body), closes=True))


def json_object(call: Call, *, required: bool = True) -> dict[str, Any]:
    """The JSON object in a body; an absent one is empty unless `required`.

    Raises:
        Refusal: The body is no JSON object, or not declared as one.
    """
    if not call.body and not required:
        return {}
    declared = call.headers.get("content-type", "application/json")
    if declared.partition(";")[0].strip() != "application/json":
        raise bad_request(
            "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed",
            kind="Bad Request",
        )
    if not call.body:
        raise invalid("missing", "body", "Field required", got=None)
    try:
        body = json.loads(call.body)
    except json.JSONDecodeError as error:
        loc, ctx = f"body.{error.pos}", f"{{'error': {error.msg!r}}}"
        raise invalid("json_invalid", loc, "JSON decode error", got={}, ctx=ctx) from error
    except UnicodeDecodeError as error:
        raise bad_request("There was an error parsing the body", kind="Bad Request") from error
    if not isinstance(body, dict):
        raise invalid(
            "model_attributes_type", "body", "Input should be a valid dictionary", got=body
        )
    return body


def flag(query: Mapping[str, str], name: str, *, default: bool) -> bool:
    """A boolean query parameter.

    Raises:
        Refusal: Its value is not one.
    """
    text = query.get(name)
    if text is None:
        return default
    if text.lower() in {"true", "1", "yes", "on", "y", "t"}:
        return True
    if text.lower() in {"false", "0", "no", "off", "n", "f"}:
        return False
    raise invalid(
        "bool_parsing",
        f"query.{name}",
        "Input should be a valid boolean, unable to interpret input",
        got=text,
    )


def _shown(value: object) -> str:
    match value:
        case list():
            return f"<list of {len(value)} items>"
        case dict():
            return f"<dict of {len(value)} items>"
        case _:
            return str(value)
