"""The shapes of SGLang's replies and refusals, as they were recorded.

Refusals have five bodies, and which one it is depends on the layer that refuses. Pure: values in,
`Reply` out. What a route does is in the other files of this protocol.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from .calls import Call, Reply

__all__ = (
    "BadValue",
    "Fields",
    "Refusal",
    "Route",
    "broken_contract",
    "empty",
    "generation_fields",
    "internal",
    "invalid",
    "missing",
    "ok",
    "outcome",
    "plain",
    "read_body",
    "read_struct",
    "text",
)

_JSON = {"content-type": "application/json"}
_VARY = {"vary": "Origin"}
_FILE = "<site-packages>/sglang/srt/entrypoints/http_server.py"
_MISSING = object()


# a reply on its way, not an error of the engine
class Refusal(Exception):  # noqa: N818
    """A reply that ends the handling of a call."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.status)
        self.reply = reply


class BadValue(Refusal):
    """A value that the front end refuses; in a stream it is told in a frame."""

    def __init__(self, message: str) -> None:
        super().__init__(plain(400, {"error": {"message": message}}))
        self.message = message


@dataclass(frozen=True, slots=True)
class Route:
    """Where a handler stands in the real server's source, which its refusals tell."""

    path: str
    function: str
    line: int


@dataclass(frozen=True, slots=True)
class Fields:
    """A struct that a body is read as: kinds and defaults by field name."""

    struct: str
    kinds: Mapping[str, str]
    defaults: Mapping[str, Any] = field(default_factory=dict)


def ok(body: object) -> Reply:
    """200 with JSON."""
    return plain(200, body)


def empty(status: int = 200) -> Reply:
    """A status without a body."""
    return Reply(status, _VARY, b"")


def text(status: int, body: str) -> Reply:
    """Text without a declared type."""
    return Reply(status, _VARY, body.encode())


def plain(status: int, body: object, **headers: str) -> Reply:
    """Any JSON: also the framework's own 404 and 405, and the 401."""
    return Reply(status, headers | _JSON | _VARY, msgspec.json.encode(body))


def outcome(success: bool, message: str, **more: object) -> Reply:  # noqa: FBT001 - the body's own
    """What the weight routes say: 200 or 400."""
    body = {"success": success, "message": message, **more}
    return plain(200 if success else 400, body)


def internal() -> Refusal:
    """A failed assertion of a handler."""
    headers = {"content-type": "text/plain; charset=utf-8"}
    return Refusal(Reply(500, headers, b"Internal Server Error"))


def broken_contract(message: str) -> Refusal:
    """A body of `/generate` that the schema gate refuses; the error is a bare text."""
    return Refusal(plain(400, {"error": message}))


def invalid(route: Route, *errors: Mapping[str, object]) -> Refusal:
    """A body that validation refuses; the message tells files of the server."""
    one = len(errors) == 1
    listed = "".join(f"\n  {error!r}" for error in errors)
    message = (
        f"{len(errors)} validation error{'' if one else 's'}:{listed}\n\n"
        f'  File "{_FILE}", line {route.line}, in {route.function}\n'
        f"    POST {route.path} {list(errors)!r}"
    )
    body = {
        "object": "error",
        "message": message,
        "type": "Bad Request",
        "param": None,
        "code": 400,
    }
    return Refusal(plain(400, body))


def missing(name: str, body: Mapping[str, Any]) -> Mapping[str, object]:
    """What validation says of a field that is not there."""
    return _error("missing", ("body", name), "Field required", body)


def read_body(call: Call, route: Route) -> Any:
    """The JSON in a body; the bytes themselves if they are declared to be something else.

    Raises:
        Refusal: There is none, or it is no JSON.
    """
    if not call.body:
        raise invalid(route, _error("missing", ("body",), "Field required", None))
    declared = call.headers.get("content-type", "application/json").partition(";")[0].strip()
    if declared != "application/json" and not declared.endswith("+json"):
        return call.body
    try:
        return json.loads(call.body)
    except json.JSONDecodeError as error:
        reason = error.msg
        if reason.startswith("Expecting property name"):
            reason = "unexpected character, expected a string key"
        raise invalid(
            route,
            _error("json_invalid", ("body", error.pos), "JSON decode error", {}, error=reason),
        ) from error
    except UnicodeDecodeError as error:
        raise BadValue("There was an error parsing the body") from error


def read_struct(call: Call, route: Route, shape: Fields) -> dict[str, Any]:
    """The struct in a body; fields that it does not have are kept, and mean nothing.

    Raises:
        Refusal: The body is missing, no JSON object, or has fields of the wrong kind.
    """
    body = read_body(call, route)
    kind = shape.struct
    errors = []
    if not isinstance(body, dict):
        errors.append(
            _error("dict_type", ("body", _built(kind)), "Input should be a valid dictionary", body)
        )
    else:
        for name, wanted in shape.kinds.items():
            loc = ("body", _built(kind), name)
            value = body.get(name, shape.defaults.get(name, _MISSING))
            if value is _MISSING:
                errors.append(_error("missing", loc, "Field required", body))
            elif name in body and (wrong := _KINDS[wanted](loc, value)) is not None:
                errors.append(wrong)
    if errors:
        instance = _error(
            "is_instance_of",
            ("body", f"is-instance[{kind}]"),
            f"Input should be an instance of {kind}",
            body,
        )
        raise invalid(route, instance | {"ctx": {"class": kind}}, *errors)
    return {**shape.defaults, **body}


def _built(kind: str) -> str:
    return f"function-after[build_struct(), {kind}]"


def _error(
    kind: str, loc: tuple[str | int, ...], message: str, got: object, **context: object
) -> dict[str, object]:
    found: dict[str, object] = {"type": kind, "loc": loc, "msg": message, "input": got}
    return found | {"ctx": context} if context else found


def generation_fields(route: Route, body: object) -> dict[str, Any]:
    """The body of `/generate`, with the kinds of those fields checked that come before the gate.

    Raises:
        Refusal: It is no JSON object, or a field is of the wrong kind.
    """
    if not isinstance(body, dict):
        said = "Input should be a dictionary or an instance of GenerateReqInput"
        kind = "GenerateReqInput"
        raise invalid(route, _error("dataclass_type", ("body",), said, body, class_name=kind))
    errors = []
    if reason := _not_ids(body.get("input_ids")):
        said = f"Value error, {reason}"
        loc = ("body", "input_ids")
        errors.append(_error("value_error", loc, said, body["input_ids"], error=ValueError(reason)))
    for name in ("rid", "text"):
        value = body.get(name)
        if value is not None and not isinstance(value, str):
            listed = _list_of(_str)(("body", name, "list[str]"), value)
            if listed is not None:
                errors += [
                    _error(
                        "string_type",
                        ("body", name, "str"),
                        "Input should be a valid string",
                        value,
                    ),
                    listed,
                ]
    for name in ("stream", "return_text_in_logprobs", "return_prompt_token_ids"):
        if name in body and (wrong := _boolean(("body", name), body[name])) is not None:
            errors.append(wrong)
    if errors:
        raise invalid(route, *errors)
    return body


def _not_ids(value: object) -> str | None:
    """What is wrong with a list of ids, or of lists of them."""
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        return f"must be list or null; got {type(value).__name__}"
    if isinstance(value[0], list):
        for index, row in enumerate(value):
            if not isinstance(row, list):
                return f"row {index}: must be list; got {type(row).__name__}"
            if row and (reason := _not_ids(row)):
                return f"row {index}: {reason}"
        return None
    if not isinstance(value[0], int):
        return f"elements must be int or list; got {type(value[0]).__name__}"
    for one in value:
        if not isinstance(one, int):
            return f"contains non-int64 element: an integer is required (got type {_kind(one)})"
    return None


def _kind(value: object) -> str:
    return type(value).__name__


_Check = Callable[[tuple[str | int, ...], Any], dict[str, object] | None]


def _typed(kind: type, name: str, said: str, *, optional: bool = False) -> _Check:
    def check(loc: tuple[str | int, ...], value: Any) -> dict[str, object] | None:
        right = type(value) is kind or (optional and value is None)
        return None if right else _error(name, loc, f"Input should be a valid {said}", value)

    return check


def _boolean(loc: tuple[str | int, ...], value: Any) -> dict[str, object] | None:
    if isinstance(value, bool):
        return None
    said = "Input should be a valid boolean"
    if isinstance(value, str):
        return _error("bool_parsing", loc, f"{said}, unable to interpret input", value)
    return _error("bool_type", loc, said, value)


def _list_of(inner: _Check) -> _Check:
    def check(loc: tuple[str | int, ...], value: Any) -> dict[str, object] | None:
        if not isinstance(value, list):
            return _error("list_type", loc, "Input should be a valid list", value)
        wrong = (inner((*loc, index), one) for index, one in enumerate(value))
        return next((error for error in wrong if error is not None), None)

    return check


def _one_of(*names: str) -> _Check:
    quoted = [repr(name) for name in names]
    expected = f"{', '.join(quoted[:-1])} or {quoted[-1]}"

    def check(loc: tuple[str | int, ...], value: Any) -> dict[str, object] | None:
        if value in names:
            return None
        said = f"Input should be {expected}"
        return _error("literal_error", loc, said, value, expected=expected)

    return check


_str, _int = _typed(str, "string_type", "string"), _typed(int, "int_type", "integer")
_KINDS: Mapping[str, _Check] = {
    "str": _str,
    "str?": _typed(str, "string_type", "string", optional=True),
    "int": _int,
    "bool": _boolean,
    "strs": _list_of(_str),
    "strs?": lambda loc, value: None if value is None else _list_of(_str)(loc, value),
    "shapes": _list_of(_list_of(_int)),
    "selector": _one_of("target", "draft", "all"),
    "pause": _one_of("abort", "retract", "in_place"),
}
