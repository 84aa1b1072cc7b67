"""Weight sources that misbehave on purpose, and one that tells what is done with it."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from genapi.weights import TensorMeta

PATIENCE_S = 20.0


def metas(*shapes: Sequence[int], dtype: str = "float32") -> tuple[TensorMeta, ...]:
    return tuple(
        TensorMeta(name=f"t{i}", dtype=dtype, shape=tuple(shape)) for i, shape in enumerate(shapes)
    )


def pairs(manifest: Sequence[TensorMeta]) -> list[tuple[str, Any]]:
    """A tensor for each, filled with its position."""
    return [(m.name, np.full(m.shape, i, dtype=m.dtype)) for i, m in enumerate(manifest)]


class Declared:
    """Yields what it is given, whatever its manifest says."""

    def __init__(self, manifest: Sequence[TensorMeta], yields: Sequence[tuple[Any, Any]]) -> None:
        self._manifest = manifest
        self._yields = yields

    def manifest(self) -> Sequence[TensorMeta]:
        return self._manifest

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return iter(self._yields)


class Watched:
    """Notes each step with the thread it happens in; `before(i)` runs before tensor i is made."""

    def __init__(
        self, manifest: Sequence[TensorMeta], before: Callable[[int], object] = lambda _: None
    ) -> None:
        self.events: list[str] = []
        self.threads: set[int] = set()
        self.closed = threading.Event()
        self._manifest = manifest
        self._before = before

    def manifest(self) -> Sequence[TensorMeta]:
        self._note("manifest")
        return self._manifest

    def stage(self, budget_bytes: int) -> None:
        self._note(f"stage {budget_bytes}")

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        try:
            for i, pair in enumerate(pairs(self._manifest)):
                self._before(i)
                self._note(f"gathered {i}")
                yield pair
        finally:
            self._note("closed")
            self.closed.set()

    def _note(self, what: str) -> None:
        self.events.append(what)
        self.threads.add(threading.get_ident())


class Blocked:
    """Blocks before tensor `at` until `release` is set; then ends as it was told to."""

    def __init__(self, manifest: Sequence[TensorMeta], at: int) -> None:
        self.reached = threading.Event()
        self.release = threading.Event()
        self.source = Watched(manifest, self._before)
        self._at = at

    def _before(self, index: int) -> None:
        if index == self._at:
            self.reached.set()
            assert self.release.wait(PATIENCE_S)
