"""JSON bodies as typed structs, with what no struct names kept beside them.

The rule of this file: one pass where everything is known. Only a body that holds a field which is
not known is read once more, to keep that field.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Raw, Struct

from genapi.errors import ReplyError

__all__ = ("fields_of", "kept", "parse_body", "unknown_of")

T_co = TypeVar("T_co", covariant=True)
_NOT_JSON = (msgspec.DecodeError, RecursionError, ValueError)


class _Decoder(Protocol[T_co]):
    def decode(self, buf: bytes, /) -> T_co: ...


_fields = msgspec.json.Decoder(dict[str, Raw])


def parse_body(body: bytes, *, closed: _Decoder[T_co], opened: _Decoder[T_co]) -> tuple[T_co, bool]:
    """The typed body, and whether that is all of it.

    Args:
        body: one JSON document.
        closed: refuses fields that it does not know.
        opened: leaves them out.

    Raises:
        ReplyError: it is not JSON, or a known field has another type.
    """
    try:
        return closed.decode(body), True
    except msgspec.ValidationError:
        pass  # an unknown field, or a broken one: the open decoder tells
    except _NOT_JSON as error:
        raise ReplyError(f"the reply is not JSON: {error}") from None
    try:
        return opened.decode(body), False
    except msgspec.ValidationError as error:
        raise ReplyError(f"the reply breaks its contract: {error}") from None
    except _NOT_JSON as error:
        # What the closed decoder stumbled over came before what is no JSON.
        raise ReplyError(f"the reply is not JSON: {error}") from None


@contextmanager
def kept() -> Iterator[None]:
    """Around the second reading, which looks into fields that the first one passed over.

    Raises:
        ReplyError: one of them is no JSON.
    """
    try:
        yield
    except _NOT_JSON as error:
        raise ReplyError(f"the reply has a field that is not JSON: {error}") from None


def fields_of(body: bytes | Raw) -> dict[str, Raw]:
    """The fields of an object, unread."""
    return _fields.decode(body)


def unknown_of(fields: Mapping[str, Raw], shape: type[Struct]) -> dict[str, Any]:
    """Those that the struct does not name, read."""
    known = shape.__struct_fields__
    return {name: msgspec.json.decode(raw) for name, raw in fields.items() if name not in known}
