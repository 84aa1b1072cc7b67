"""The thread that reads a source: manifest, staging, tensors, in that order.

The rule of this file: `run` belongs to the thread, everything else to the event loop and never
waits for more than a lock that is held for moments.
"""

import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from genapi.errors import ConfigError, TransportError
from genapi.weights._tensors import describe, plain
from genapi.weights.base import Bucket, TensorMeta, WeightSource

__all__ = ("Gatherer", "Limits", "plan_buckets")

_NAMES_SHOWN = 3
_END = object()


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of buckets, and of what is gathered before the first one is sent."""

    bucket_bytes: int
    bucket_tensors: int
    stage_bytes: int


def plan_buckets(sizes: Sequence[int], *, bucket_bytes: int, bucket_tensors: int) -> list[range]:
    """Cut tensors of these sizes in bytes into buckets, as consecutive ranges of indexes.

    No bucket exceeds either limit, but for one tensor larger than `bucket_bytes`, which is alone.
    """
    buckets: list[range] = []
    first, total = 0, 0
    for index, size in enumerate(sizes):
        if index > first and (total + size > bucket_bytes or index - first >= bucket_tensors):
            buckets.append(range(first, index))
            first, total = index, 0
        total += size
    if first < len(sizes):
        buckets.append(range(first, len(sizes)))
    return buckets


class Gatherer:
    """One pass over a source, bucket by bucket.

    Attributes:
        manifest: empty until it was read and checked.
        total_bytes: size of all its tensors.
        gathered_bytes: size of those that the source has yielded.
        gathering: name of the tensor that is awaited from the source.
        settled: whether all that may be held before the first send is held.
        finished: whether the thread is done with the source.
    """

    def __init__(self, source: WeightSource, limits: Limits, notify: Callable[[], None]) -> None:
        self.manifest: tuple[TensorMeta, ...] = ()
        self.total_bytes = 0
        self.gathered_bytes = 0
        self.gathering: str | None = None
        self.settled = False
        self.finished = False
        self._source = source
        self._limits = limits
        self._notify = notify
        self._lock = threading.Condition()
        self._buckets: deque[Bucket] = deque()
        self._held = 0  # bytes gathered and not yet sent, those being gathered included
        self._opened = False
        self._abandoned = False
        self._error: Exception | None = None

    @property
    def ready(self) -> bool:
        """Whether `take` has an answer."""
        with self._lock:
            return bool(self._buckets) or self._stopped

    @property
    def prepared(self) -> bool:
        """Whether there is nothing more to gather before the first send."""
        with self._lock:
            return self.settled or self._stopped

    @property
    def _stopped(self) -> bool:
        return self.finished or self._abandoned or self._error is not None

    def check(self) -> None:
        """Raise what went wrong, if anything has."""
        if self._error is not None:
            raise self._error
        if self._abandoned:
            raise TransportError("the weight source was given up", phase="not_sent")

    def open(self, sent_bytes: int) -> None:
        """Sending goes on: `sent_bytes` are no longer held."""
        with self._lock:
            self._opened = True
            self._held -= sent_bytes
            self._lock.notify_all()

    def take(self) -> Bucket | None:
        """The next bucket, which stays held; None after the last."""
        with self._lock:
            self.check()
            return self._buckets.popleft() if self._buckets else None

    def abandon(self) -> None:
        """Have the thread stop where it is, and forget what it gathered."""
        with self._lock:
            self._abandoned = True
            self._buckets.clear()
            self._lock.notify_all()
        self._notify()

    def run(self) -> None:
        """Read the source. In a thread of its own."""
        error: Exception | None = None
        try:
            self._read()
        except BaseException as raised:  # noqa: BLE001 - whoever waits raises it
            error = _for_a_task(raised)
            if self.gathering is not None:
                error.add_note(f"while the weight source was asked for tensor {self.gathering!r}")
        with self._lock:
            self._error = error
            if error is not None:
                self._buckets.clear()
            self.finished = True
        self._notify()

    def _read(self) -> None:
        manifest = _checked(tuple(self._source.manifest()))
        sizes = [meta.nbytes for meta in manifest]
        with self._lock:
            self.manifest, self.total_bytes = manifest, sum(sizes)
            if self._abandoned:
                return
        stage = getattr(self._source, "stage", None)
        if stage is not None:
            stage(self._limits.stage_bytes)
        tensors = iter(self._source)
        try:
            self._gather(tensors, sizes)
        finally:
            close = getattr(tensors, "close", None)
            if close is not None:
                close()

    def _gather(self, tensors: Iterator[tuple[str, Any]], sizes: Sequence[int]) -> None:
        buckets = plan_buckets(
            sizes,
            bucket_bytes=self._limits.bucket_bytes,
            bucket_tensors=self._limits.bucket_tensors,
        )
        for bucket in buckets:
            if not self._admit(sum(sizes[bucket.start : bucket.stop])):
                return
            gathered = []
            for position in bucket:
                gathered.append(self._next(tensors, position))
                with self._lock:
                    self.gathered_bytes += sizes[position]
                    if self._abandoned:
                        return
                self._notify()
            if bucket is buckets[-1]:  # not handed out before the source has proved to be whole
                self._check_end(tensors)
            with self._lock:
                metas = self.manifest[bucket.start : bucket.stop]
                self._buckets.append(Bucket(metas, tuple(gathered)))
            self._notify()

    def _admit(self, size: int) -> bool:
        """Wait until `size` more bytes may be held; False when that will never be."""
        budget = self._limits.stage_bytes
        with self._lock:
            if not self._opened and self._held + size > budget:
                self.settled = True
                self._notify()
                self._lock.wait_for(lambda: self._opened or self._abandoned)
            if self._opened:
                self._lock.wait_for(lambda: self._held <= budget or self._abandoned)
            self._held += size
            return not self._abandoned

    def _next(self, tensors: Iterator[tuple[str, Any]], position: int) -> Any:
        expected = self.manifest[position]
        self.gathering = expected.name
        item: Any = next(tensors, _END)
        self.gathering = None
        if item is _END:
            missing = [meta.name for meta in self.manifest[position:]]
            shown = ", ".join(map(repr, missing[:_NAMES_SHOWN]))
            more = f" and {len(missing) - _NAMES_SHOWN} more" if missing[_NAMES_SHOWN:] else ""
            raise ConfigError(
                f"the weight source ended after {position} of the {len(self.manifest)} tensors of "
                f"its manifest; missing: {shown}{more}"
            )
        name, tensor = item
        dtype, shape = describe(name, tensor)
        if (name, dtype, shape) != (expected.name, expected.dtype, expected.shape):
            raise ConfigError(
                f"tensor {position + 1} of {len(self.manifest)} does not match the manifest: "
                f"expected {expected}, got {name!r} {dtype} {list(shape)}"
            )
        return plain(tensor)

    def _check_end(self, tensors: Iterator[tuple[str, Any]]) -> None:
        extra = [name for name, _ in itertools.islice(tensors, _NAMES_SHOWN)]
        if extra:
            raise ConfigError(
                f"the weight source yields more than the {len(self.manifest)} tensors of its "
                f"manifest: {', '.join(map(repr, extra))}"
            )


def _for_a_task(error: BaseException) -> Exception:
    """The error itself, unless raised in a task it would mean something else."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    other = RuntimeError(f"the weight source raised {error!r}")
    other.__cause__ = error
    return other


def _checked(manifest: tuple[TensorMeta, ...]) -> tuple[TensorMeta, ...]:
    if not manifest:
        raise ConfigError(
            "the weight source's manifest is empty: a publication moves every weight "
            "(to label workers that hold them already, use adopt)"
        )
    name, count = Counter(meta.name for meta in manifest).most_common(1)[0]
    if count > 1:
        raise ConfigError(f"the weight source's manifest names tensor {name!r} {count} times")
    return manifest
