"""Between a source and a sender: tensors are gathered, checked, and cut into buckets.

The rule of this file: it runs on the event loop and never waits for the source's thread without
a way out. What the source yields is held against its manifest before it can be sent.
"""

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

import anyio

from genapi.weights._gather import Gatherer, Limits, plan_buckets
from genapi.weights._threads import call_from_thread
from genapi.weights.base import Bucket, TensorMeta, WeightSource

__all__ = ("Stage", "plan_buckets")

_GRACE_S = 1.0


class Stage:
    """One pass over a source, as buckets ready to be sent.

        async with Stage(source, bucket_bytes=b, bucket_tensors=n, stage_bytes=s) as stage:
            await stage.prepare()  # the fleet serves
            ...  # the fleet is paused
            async for bucket in stage:
                await sender.send(bucket)  # the next bucket is gathered meanwhile

    `prepare` gathers whole buckets up to `stage_bytes`: everything, if it fits. Then nothing is
    gathered until the first bucket is asked for. A bucket counts as sent when the next is asked
    for; from then on never more than `stage_bytes` and one bucket are held.

    Leaving the block, cancelling a wait and `abandon` give the source up: at once for the event
    loop, and for the source's thread as soon as the source comes back to it.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        bucket_bytes: int,
        bucket_tensors: int,
        stage_bytes: int,
        on_progress: Callable[[int, int], object] | None = None,
    ) -> None:
        """Touch nothing yet.

        Args:
            source: what to publish.
            bucket_bytes: most bytes per bucket; one larger tensor goes alone.
            bucket_tensors: most tensors per bucket.
            stage_bytes: most bytes gathered by `prepare`.
            on_progress: told bytes gathered and bytes in all, on the event loop.
        """
        limits = Limits(bucket_bytes, bucket_tensors, stage_bytes)
        self._gatherer = Gatherer(source, limits, self._notify)
        self._on_progress = on_progress
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()
        self._waking = False
        self._reported = 0
        self._sending = 0
        self._is_awaited = False

    @property
    def manifest(self) -> tuple[TensorMeta, ...]:
        """Every tensor; empty until `prepare` has read it."""
        return self._gatherer.manifest

    @property
    def total_bytes(self) -> int:
        """Size of all tensors; 0 until `prepare` has read the manifest."""
        return self._gatherer.total_bytes

    @property
    def gathered_bytes(self) -> int:
        """Size of the tensors that the source has yielded so far."""
        return self._gatherer.gathered_bytes

    @property
    def gathering(self) -> str | None:
        """Name of the tensor that the source is being asked for now, if any."""
        return self._gatherer.gathering

    @property
    def awaited(self) -> str | None:
        """What the source is, or was last, waited for; None = it has given all it was asked for."""
        if not self._is_awaited:
            return None
        if not self.manifest:
            return "its manifest"
        return f"tensor {self.gathering!r}" if self.gathering else "its next tensors"

    async def prepare(self) -> None:
        """Read the manifest and gather what fits; to be awaited once.

        Raises:
            ConfigError: an empty or ambiguous manifest, or a tensor that does not match it.
            TransportError: the stage was abandoned.
            Exception: whatever the source raised, with a note of the tensor it was asked for.
        """
        if self._loop is not None:
            raise RuntimeError("a stage is prepared once; build another for another pass")
        self._loop = asyncio.get_running_loop()
        threading.Thread(
            target=self._gatherer.run, name="genapi-weight-source", daemon=True
        ).start()
        await self._until(lambda: self._gatherer.prepared)
        self._gatherer.check()

    def __aiter__(self) -> Self:
        """The buckets in the order of the manifest."""
        return self

    async def __anext__(self) -> Bucket:
        """The next bucket; raises as `prepare` does."""
        if self._loop is None:
            raise RuntimeError("await prepare() before the first bucket is asked for")
        self._gatherer.open(self._sending)
        self._sending = 0
        await self._until(lambda: self._gatherer.ready)
        bucket = self._gatherer.take()
        if bucket is None:
            raise StopAsyncIteration
        self._sending = bucket.nbytes
        return bucket

    def abandon(self) -> None:
        """Give the source up; whoever waits for it gets a `TransportError`. Safe to repeat."""
        self._gatherer.abandon()

    async def aclose(self) -> None:
        """Give the source up, and give its thread a second to end. Safe to repeat."""
        self.abandon()
        self._on_progress = None
        if self._loop is not None:
            with anyio.move_on_after(_GRACE_S, shield=True):
                await self._until(lambda: self._gatherer.finished)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _until(self, condition: Callable[[], bool]) -> None:
        self._is_awaited = True
        try:
            while not condition():
                await self._news.wait()
        except BaseException:
            self.abandon()
            raise
        self._is_awaited = False
        self._report()

    def _notify(self) -> None:
        # Whoever finds a wake-up still to come has changed what it will show.
        if self._loop is not None and not self._waking:
            self._waking = True
            call_from_thread(self._loop, self._wake)

    def _wake(self) -> None:
        self._waking = False
        news, self._news = self._news, asyncio.Event()
        news.set()
        self._report()

    def _report(self) -> None:
        gathered = self._gatherer.gathered_bytes
        if self._on_progress is not None and gathered != self._reported:
            self._reported = gathered
            self._on_progress(gathered, self._gatherer.total_bytes)
