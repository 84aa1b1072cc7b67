"""How messages show what may be long, many or secret.

The rules of this file: what is in an address before `@` may be a password, and is never shown.
Peers write much of what is shown: no reading of a text takes longer than in proportion to its
length.
"""

import re
from collections.abc import Collection, Iterator
from itertools import islice

__all__ = ("after_user_info", "beginning", "few", "has_user_info", "shortened", "without_user_info")

_FEW = 5
_LONGEST = 400
_WITH_AT = re.compile(r"""(?<![^\s/"<>])[^\s/"<>@]*@[^\s/"<>]*""")
"""What is between two of the characters that end the host of an address, if it has an `@`.

It is looked for from where such a part begins and from nowhere else.
"""
_ADDRESS = re.compile(r"(?:[\w.-]+|\[[\da-fA-F:.]+\]):\d{1,5}")
_RANK = re.compile(r"\d{1,4}(?!\w|[.:-]\w)")
"""`http://host:port@1` is how a gateway calls rank 1 of a worker; no host is called `1`."""


def has_user_info(text: str) -> bool:
    """Whether there is a URL with user info in it."""
    return any(
        _is_of_url(found) and _shown_of_url(found[0]) != found[0]
        for found in _WITH_AT.finditer(text)
    )


def without_user_info(text: str) -> str:
    """The text with `...` for the user info of every address in it."""
    return _WITH_AT.sub(_shown, text) if "@" in text else text


def beginning(text: str, longest: int) -> str:
    """So much of a text as a message shows of it, without user info."""
    # It is cut last, since half an address is not known as one.
    return without_user_info(text)[:longest]


def after_user_info(address: str) -> str:
    """What an address that cannot be read has after any user info; the whole text is one."""
    return address.rpartition("@")[2]


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
    return _shown_of_url(found[0]) if _is_of_url(found) else "@".join(_shown_pairs(found[0]))


def _shown_of_url(host: str) -> str:
    """What is before the last `@` is user info, but for a worker's own address before its rank."""
    before, _, last = host.rpartition("@")
    if not _RANK.match(last):
        return f"...@{last}"
    _, at, address = before.rpartition("@")
    if not _ADDRESS.fullmatch(address):
        return f"...@{last}"
    return f"...@{address}@{last}" if at else f"{address}@{last}"


def _shown_pairs(text: str) -> Iterator[str]:
    """Where no scheme is, `user:password@` is user info, and `user@` is none."""
    *parts, last = text.split("@")
    for part, following in zip(parts, [*parts[1:], last], strict=True):
        name, colon, _ = part.partition(":")
        start = 1 + max(map(name.rfind, "'=,&?"))
        is_place = _ADDRESS.fullmatch(part, start) and _RANK.match(following)
        yield part if not colon or is_place else part[:start] + "..."
    yield last
