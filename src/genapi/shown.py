"""How messages show what may be long, many or secret.

The rule of this file: what is in an address before `@` may be a password, and is never shown.
"""

import re
from collections.abc import Collection
from itertools import islice

__all__ = ("few", "has_user_info", "without_user_info")

_FEW = 5
_LONGEST = 400
_OF_URL = r"""(?<=://)[^\s/"<>]*@"""
_USER_INFO = re.compile(rf"""{_OF_URL}|[^\s/"'<>=,&?@:]*:[^\s/"<>@]*@""")
"""Of a URL up to the last @ of its host's part, and `user:password@` where no scheme is."""


def has_user_info(text: str) -> bool:
    """Whether there is a URL with user info in it."""
    return re.search(_OF_URL, text) is not None


def without_user_info(text: str) -> str:
    """The text with `...` for the user info of every address in it."""
    return _USER_INFO.sub("...@", text) if "@" in text else text


def few(texts: Collection[str], *, separator: str = "; ") -> str:
    """The first few of them, and a count of the others."""
    shown = [_shortened(text) for text in islice(texts, _FEW)]
    others = len(texts) - len(shown)
    return separator.join([*shown, f"and {others} more"] if others else shown)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
