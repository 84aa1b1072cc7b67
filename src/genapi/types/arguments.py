"""Arguments of public calls that no model validates: what is taken, and the error for the rest.

The rule of this file: an argument is taken for what it is, or refused with its name, its value and
the remedy. Nothing is rounded, and no truth value is a number.
"""

import math
import operator
from collections.abc import Iterable
from numbers import Real
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from genapi.errors import ConfigError

__all__ = ("Index", "Seconds", "flag", "nats", "one_of", "seconds", "whole", "with_methods")


def _index(value: Any) -> Any:
    """An int for whatever is a whole number, numpy's and torch's too; else the value."""
    if isinstance(value, bool):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


Index: Any = BeforeValidator(_index)
"""Beside a strict int: whole numbers of numpy's are taken as well, and nothing is rounded."""

Seconds = Annotated[float, Field(gt=0, strict=True)]
"""A bound in seconds as a field."""


def whole(name: str, value: object, *, least: int, more: str = "") -> int:
    """A whole number.

    Args:
        name: what a message calls it.
        value: what was passed.
        least: the smallest that there may be.
        more: what else may be passed, for the message: `, or None`.

    Raises:
        ConfigError: it is none, or smaller.
    """
    number = _index(value)
    if type(number) is not int or number < least:
        raise ConfigError(f"{name}={value!r}: pass a whole number of at least {least}{more}")
    return number


def seconds(name: str, value: object, *, more: str = "") -> float:
    """A bound in seconds, more than 0; it may be infinite.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0:
        raise ConfigError(f"{name}={value!r}: pass seconds, more than 0{more}")
    return float(value)


def one_of(name: str, value: object, known: Iterable[str]) -> None:
    """Raise `ConfigError` unless the value is one of these words."""
    words = tuple(known)
    if not (isinstance(value, str) and value in words):
        raise ConfigError(f"{name}={value!r}: choose one of {', '.join(words)}")


def flag(name: str, value: object) -> None:
    """Raise `ConfigError` unless the value is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: pass True or False")


def with_methods(name: str, value: object, methods: Iterable[str], *, remedy: str) -> None:
    """Raise `ConfigError` unless the value is an object, and no class, with these methods."""
    missing = [method for method in methods if not callable(getattr(value, method, None))]
    if missing or isinstance(value, type):
        raise ConfigError(f"{name}={value!r}: {remedy}")


def nats(name: str, value: object) -> float:
    """A difference of log-probabilities, 0 or more.

    Raises:
        ConfigError: it is none, or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        raise ConfigError(f"{name}={value!r}: pass nats, 0 or more")
    return float(value)
