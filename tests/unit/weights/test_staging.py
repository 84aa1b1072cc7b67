"""What is gathered when, what is refused, and that nothing waits for a source without a way out."""

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

from genapi.errors import ConfigError, TransportError
from genapi.weights import TensorMeta, WeightSource, from_tensors
from genapi.weights.staging import Stage
from tests.support.weight_sources import PATIENCE_S, Blocked, Declared, Watched, metas, pairs

AT_ONCE_S = 2.0
FOUR = metas((4,), (4,), (4,), (4,))  # 16 bytes each


def stage_of(source: WeightSource, *, stage_bytes: int = 1 << 20, **options: Any) -> Stage:
    limits = {"bucket_bytes": 16, "bucket_tensors": 8, **options}
    return Stage(source, stage_bytes=stage_bytes, **limits)


async def drain(source: WeightSource, **options: Any) -> list[str]:
    async with stage_of(source, **options) as stage:
        await stage.prepare()
        return [meta.name async for bucket in stage for meta in bucket.metas]


async def until(event: threading.Event) -> None:
    assert await anyio.to_thread.run_sync(event.wait, PATIENCE_S)


async def test_every_gather_has_ended_before_prepare_returns_when_all_fits() -> None:
    source = Watched(FOUR)
    async with stage_of(source, stage_bytes=64) as stage:
        await stage.prepare()
        source.events.append("prepared")
        async for bucket in stage:
            source.events.append(f"sent {bucket.metas[0].name}")
    assert source.events == [
        "manifest",
        "stage 64",
        *(f"gathered {i}" for i in range(4)),
        "closed",
        "prepared",
        *(f"sent t{i}" for i in range(4)),
    ]


async def test_nothing_beyond_the_budget_is_gathered_before_the_first_bucket_is_asked_for() -> None:
    source = Watched(FOUR)
    async with stage_of(source, stage_bytes=40) as stage:
        await stage.prepare()
        assert source.events[2:] == ["gathered 0", "gathered 1"]
        assert (stage.gathered_bytes, stage.total_bytes, stage.gathering) == (32, 64, None)
        assert stage.manifest == FOUR


async def test_the_next_bucket_is_gathered_while_one_is_sent() -> None:
    blocked = Blocked(FOUR, at=3)
    async with stage_of(blocked.source, stage_bytes=16) as stage:
        await stage.prepare()
        sent = [await anext(stage) for _ in range(3)]
        await until(blocked.reached)  # t2 is being sent
        assert stage.gathering == "t3"
        blocked.release.set()
        sent += [bucket async for bucket in stage]
    assert [bucket.metas[0].name for bucket in sent] == ["t0", "t1", "t2", "t3"]


async def test_with_no_budget_nothing_is_gathered_before_the_pause() -> None:
    source = Watched(FOUR)
    async with stage_of(source, stage_bytes=0) as stage:
        await stage.prepare()
        assert source.events == ["manifest", "stage 0"]
        assert [b.nbytes async for b in stage] == [16] * 4


async def test_one_thread_does_everything_and_not_the_event_loops() -> None:
    source = Watched(FOUR)
    await drain(source, stage_bytes=16)
    assert len(source.threads) == 1
    assert threading.get_ident() not in source.threads


async def test_a_tensor_larger_than_a_bucket_goes_alone() -> None:
    source = from_tensors({"a": np.ones(2), "big": np.ones(100), "b": np.ones(2)})
    async with stage_of(source, bucket_bytes=64) as stage:
        await stage.prepare()
        assert [b.nbytes async for b in stage] == [16, 800, 16]


async def test_progress_rises_to_the_total_on_the_event_loop() -> None:
    told: list[tuple[int, int]] = []
    threads: set[int] = set()

    def tell(done: int, total: int) -> None:
        told.append((done, total))
        threads.add(threading.get_ident())

    await drain(from_tensors(pairs(FOUR)), on_progress=tell)
    assert told == sorted(set(told))
    assert told[-1] == (64, 64)
    assert threads == {threading.get_ident()}


async def test_a_source_can_be_published_again() -> None:
    source = Watched(FOUR)
    assert await drain(source) == await drain(source)


async def test_arrays_of_foreign_byte_order_are_turned_round() -> None:
    async with stage_of(from_tensors({"w": np.array([1, 2], dtype=">f4")})) as stage:
        await stage.prepare()
        (array,) = (await anext(stage)).tensors
    assert array.dtype == np.dtype("float32")
    assert array.dtype.isnative
    assert array.tolist() == [1.0, 2.0]


async def test_torch_tensors_are_passed_through_without_their_gradient() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.ones(4, requires_grad=True)
    async with stage_of(from_tensors({"w": weight})) as stage:
        await stage.prepare()
        (tensor,) = (await anext(stage)).tensors
    assert not tensor.requires_grad
    assert tensor.data_ptr() == weight.data_ptr()


def with_pair(position: int, name: str, tensor: object) -> list[tuple[Any, Any]]:
    changed = pairs(FOUR)
    changed[position] = (name, tensor)
    return changed


@pytest.mark.parametrize(
    ("yields", "complaint"),
    [
        pytest.param(
            with_pair(1, "other", np.ones(4, np.float32)),
            r"tensor 2 of 4 .* expected 't1' float32 \[4\], got 'other' float32 \[4\]",
            id="name",
        ),
        pytest.param(
            with_pair(2, "t2", np.ones(4, np.float16)),
            r"tensor 3 of 4 .* expected 't2' float32 \[4\], got 't2' float16 \[4\]",
            id="dtype",
        ),
        pytest.param(
            with_pair(0, "t0", np.ones((2, 2), np.float32)),
            r"tensor 1 of 4 .* expected 't0' float32 \[4\], got 't0' float32 \[2, 2\]",
            id="shape",
        ),
        pytest.param(pairs(FOUR)[::-1], r"tensor 1 of 4 .* expected 't0'.*, got 't3'", id="order"),
        pytest.param(
            pairs(FOUR)[:2],
            r"ended after 2 of the 4 tensors .* missing: 't2', 't3'$",
            id="too few",
        ),
        pytest.param([], r"missing: 't0', 't1', 't2' and 1 more", id="none"),
        pytest.param(
            [*pairs(FOUR), ("extra", np.ones(1))], r"more than the 4 tensors .*'extra'", id="extra"
        ),
        pytest.param(with_pair(3, "t3", [1.0]), r"'t3' is a list", id="no tensor"),
    ],
)
@pytest.mark.parametrize("stage_bytes", [0, 16, 1 << 20])
async def test_what_the_manifest_does_not_promise_is_refused(
    yields: Sequence[tuple[Any, Any]], complaint: str, stage_bytes: int
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        await drain(Declared(FOUR, yields), stage_bytes=stage_bytes)


@pytest.mark.parametrize(
    ("manifest", "complaint"),
    [
        pytest.param((), r"manifest is empty.*use adopt", id="empty"),
        pytest.param((*FOUR, FOUR[1]), r"names tensor 't1' 2 times", id="twice"),
        pytest.param(
            (TensorMeta(name="w", dtype="float128", shape=(1,)),),
            r"'w' has the dtype 'float128'.*cast it to one of",
            id="dtype",
        ),
    ],
)
async def test_a_manifest_that_cannot_be_published_is_refused_before_anything_is_gathered(
    manifest: tuple[TensorMeta, ...], complaint: str
) -> None:
    source = Watched(manifest)
    with pytest.raises(ConfigError, match=complaint):
        await drain(source)
    assert source.events == ["manifest"]


@pytest.mark.parametrize("stage_bytes", [0, 1 << 20])
async def test_a_source_that_fails_in_the_middle_raises_its_own_error_with_the_tensors_name(
    stage_bytes: int,
) -> None:
    def fail(index: int) -> None:
        if index == 2:
            raise LookupError("shard 2 is gone")

    with pytest.raises(LookupError, match="shard 2 is gone") as caught:
        await drain(Watched(FOUR, fail), stage_bytes=stage_bytes)
    assert caught.value.__notes__ == ["while the weight source was asked for tensor 't2'"]


@pytest.mark.parametrize("error", [SystemExit(3), StopAsyncIteration()], ids=repr)
async def test_an_error_that_would_end_the_publication_silently_arrives_as_another(
    error: BaseException,
) -> None:
    class Ending(Declared):
        def __iter__(self) -> Iterator[tuple[Any, Any]]:
            raise error

    with pytest.raises(RuntimeError, match="the weight source raised"):
        await drain(Ending(FOUR, []), stage_bytes=0)


async def test_cancelling_prepare_ends_at_once_though_the_source_blocks() -> None:
    blocked = Blocked(FOUR, at=1)
    # Leaving gives the thread a second to end.
    with anyio.fail_after(AT_ONCE_S + 1):
        async with stage_of(blocked.source) as stage, anyio.create_task_group() as tasks:
            tasks.start_soon(stage.prepare)
            await until(blocked.reached)
            tasks.cancel_scope.cancel()
    assert not blocked.source.closed.is_set()
    blocked.release.set()
    await until(blocked.source.closed)
    assert blocked.source.events[2:] == ["gathered 0", "gathered 1", "closed"]


async def test_abandoning_wakes_whoever_waits_for_a_bucket() -> None:
    blocked = Blocked(FOUR, at=1)
    async with stage_of(blocked.source, stage_bytes=16) as stage:
        await stage.prepare()
        assert (await anext(stage)).metas == FOUR[:1]

        async def abandon() -> None:
            await until(blocked.reached)
            stage.abandon()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(abandon)
            with anyio.fail_after(AT_ONCE_S), pytest.raises(TransportError, match="given up"):
                await anext(stage)
        blocked.release.set()


async def test_leaving_early_closes_the_source_in_its_own_thread() -> None:
    source = Watched(FOUR)
    async with stage_of(source, stage_bytes=16) as stage:
        await stage.prepare()
        await anext(stage)
    assert source.closed.is_set()
    assert len(source.threads) == 1


async def test_a_stage_is_used_once_and_in_order() -> None:
    async with stage_of(from_tensors(pairs(FOUR))) as stage:
        with pytest.raises(RuntimeError, match=r"await prepare\(\)"):
            await anext(stage)
        await stage.prepare()
        with pytest.raises(RuntimeError, match="prepared once"):
            await stage.prepare()


BLOCKS_FOR_EVER = """
import anyio, threading
from tests.support.weight_sources import Watched, metas
from genapi.weights.staging import Stage

source = Watched(metas((4,)), lambda _: threading.Event().wait())

async def main():
    async with Stage(source, bucket_bytes=8, bucket_tensors=8, stage_bytes=64) as stage:
        with anyio.move_on_after(0.1):
            await stage.prepare()

anyio.run(main)
print("done")
"""


@pytest.mark.case("WUP-09")
async def test_a_source_that_blocks_for_ever_does_not_keep_the_process_alive() -> None:
    done = await anyio.to_thread.run_sync(
        lambda: subprocess.run(
            [sys.executable, "-c", BLOCKS_FOR_EVER],
            check=True,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
    )
    assert done.stdout == "done\n"
    assert done.stderr == ""
