"""A mapping that is cheap to copy with one change.

The rule of this file: a copy is a value of its own. What it shares with others never changes.
"""

from collections.abc import Hashable, Iterator, Mapping
from math import isqrt
from typing import Self, TypeVar

__all__ = ("Shared",)

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Shared(Mapping[K, V]):
    """A mapping with fixed keys, in parts of about the root of its size.

    A copy with one change has its own list of parts and one part of its own: a thousand workers
    that answer one after the other would otherwise be a million entries to copy.
    """

    __slots__ = ("_parts", "_places", "_size")

    def __init__(self, places: Mapping[K, int], parts: tuple[tuple[V, ...], ...]) -> None:
        """Use `of`.

        Args:
            places: where the value of each key is, counted through all parts.
            parts: the values; all but the last part are of one size.
        """
        self._places = places
        self._parts = parts
        self._size = len(parts[0]) if parts else 1

    @classmethod
    def of(cls, content: Mapping[K, V]) -> Self:
        """The same keys and values, in the same order; `content` itself where it is one."""
        if isinstance(content, cls):
            return content
        values = tuple(content.values())
        size = isqrt(len(values)) or 1
        parts = tuple(values[at : at + size] for at in range(0, len(values), size))
        return cls({key: place for place, key in enumerate(content)}, parts)

    def having(self, key: K, value: V) -> Self:
        """A copy with another value of a key that is there.

        Raises:
            KeyError: it is not there.
        """
        number, at = divmod(self._places[key], self._size)
        part = self._parts[number]
        changed = (*part[:at], value, *part[at + 1 :])
        parts = (*self._parts[:number], changed, *self._parts[number + 1 :])
        return type(self)(self._places, parts)

    def __getitem__(self, key: K) -> V:
        number, at = divmod(self._places[key], self._size)
        return self._parts[number][at]

    def __iter__(self) -> Iterator[K]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
