"""Options that only one engine has: taken from a request, and added to what genapi sends.

The rule of this file: options of another engine, and fields that genapi sets itself, are refused.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from genapi.errors import UnsupportedError
from genapi.types.request import GenerateRequest, ProviderOptions

__all__ = ("add_fields", "options_of")

T = TypeVar("T", bound=ProviderOptions)


def options_of(request: GenerateRequest, default: T, *, engine: str) -> T:
    """The options of a request; `default` where it has none.

    Raises:
        UnsupportedError: they are another engine's.
    """
    if request.options is None:
        return default
    kind, found = type(default), type(request.options)
    if not isinstance(request.options, kind):
        raise UnsupportedError(
            f"options are {found.__module__}.{found.__name__}; this fleet speaks {engine}: pass "
            f"{kind.__module__.removesuffix('.options')}.{kind.__name__}(...)"
        )
    return request.options


def add_fields(body: dict[str, Any], more: Mapping[str, Any], *, of: str) -> None:
    """Add what the option `of` names.

    Raises:
        UnsupportedError: genapi sets one of them.
    """
    for name, value in more.items():
        if name in body:
            raise UnsupportedError(f"Options({of}=...) may not set {name!r}: genapi sets it")
        body[name] = value
