"""How messages show many things: the first few, each shortened, and how many there are besides."""

from collections.abc import Collection
from itertools import islice

__all__ = ("few",)

_FEW = 5
_LONGEST = 400


def few(texts: Collection[str], *, separator: str = "; ") -> str:
    """The first few of them, and a count of the others."""
    shown = [_shortened(text) for text in islice(texts, _FEW)]
    others = len(texts) - len(shown)
    return separator.join([*shown, f"and {others} more"] if others else shown)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
