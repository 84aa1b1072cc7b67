"""Per-position values that later requests may reuse, in blocks keyed by salt and token prefix.

The keys say nothing about weights: a block keeps the values of the weights it was computed with
until it is evicted or everything is cleared. That is how real engines come to serve a stale prefix.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from .policy import Floats

__all__ = ("PrefixCache", "block_key", "root_key")


def root_key(salt: str | None) -> bytes:
    """Key before the first block; sequences with different salts never share a block."""
    return b"" if salt is None else blake2b(salt.encode(), digest_size=16).digest()


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of the block that holds `tokens` after the prefix behind `parent`."""
    return blake2b(parent + np.asarray(tokens, dtype=np.int64).tobytes(), digest_size=16).digest()


class PrefixCache:
    """Blocks of values, least recently used out first."""

    def __init__(self, *, block_size: int, capacity: int) -> None:
        self.block_size = block_size
        self._capacity = capacity
        self._blocks: OrderedDict[bytes, Floats] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def lookup(self, salt: str | None, tokens: Sequence[int]) -> list[Floats]:
        """Values of the longest cached prefix of `tokens`, one row per position.

        The last token is never served from the cache: its scores have to be computed.
        """
        key, rows = root_key(salt), list[Floats]()
        for end in range(self.block_size, len(tokens), self.block_size):
            key = block_key(key, tokens[end - self.block_size : end])
            block = self._blocks.get(key)
            if block is None:
                break
            self._blocks.move_to_end(key)
            rows.extend(block)
        return rows

    def insert(self, key: bytes, rows: Sequence[Floats]) -> None:
        """Keep a full block. A block that is there already stays, however old its weights."""
        if key not in self._blocks:
            self._blocks[key] = np.stack(rows)
            if len(self._blocks) > self._capacity:
                self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Forget every block."""
        self._blocks.clear()
