"""How messages show what may be long, many or secret.

The rules of this file: what is in an address before `@` may be a password, and is never shown.
Peers write much of what is shown: no reading of a text takes longer than in proportion to its
length.
"""

import re
from collections.abc import Collection
from itertools import islice

__all__ = ("beginning", "few", "has_user_info", "shortened", "without_user_info")

_FEW = 5
_LONGEST = 400
_WITH_AT = re.compile(r"""(?<![^\s/"<>])[^\s/"<>@]*@[^\s/"<>]*""")
"""What is between two of the characters that end the host of an address, if it has an `@`.

It is looked for from where such a part begins and from nowhere else.
"""


def has_user_info(text: str) -> bool:
    """Whether there is a URL with user info in it."""
    return any(map(_is_of_url, _WITH_AT.finditer(text)))


def without_user_info(text: str) -> str:
    """The text with `...` for the user info of every address in it."""
    return _WITH_AT.sub(_shown, text) if "@" in text else text


def beginning(text: str, longest: int) -> str:
    """So much of a text as a message shows of it, without user info."""
    # It is cut last, since half an address is not known as one.
    return without_user_info(text)[:longest]


def few(texts: Collection[str], *, separator: str = "; ") -> str:
    """The first few of them, and a count of the others."""
    shown = [shortened(text) for text in islice(texts, _FEW)]
    others = len(texts) - len(shown)
    return separator.join([*shown, f"and {others} more"] if others else shown)


def shortened(text: str, longest: int = _LONGEST) -> str:
    """The text, or its beginning and `...` where it is longer than that."""
    return text if len(text) <= longest else text[:longest] + "..."


def _is_of_url(found: re.Match[str]) -> bool:
    return found.string.endswith("://", 0, found.start())


def _shown(found: re.Match[str]) -> str:
    if _is_of_url(found):
        return "...@" + found[0].rpartition("@")[2]
    *parts, last = found[0].split("@")
    return "@".join([*map(_without_pair, parts), last])


def _without_pair(part: str) -> str:
    """Where no scheme is, `user:password@` is user info, and `user@` is none."""
    name, colon, _ = part.partition(":")
    return part[: 1 + max(map(name.rfind, "'=,&?"))] + "..." if colon else part
