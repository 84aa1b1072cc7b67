"""For any tensors and any limits: buckets are the tensors in order, and what is held is bounded."""

from collections.abc import Sequence
from itertools import chain

import anyio
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from genapi.weights.staging import Stage, plan_buckets
from tests.support.weight_sources import PATIENCE_S, Watched, metas

SIZES = st.lists(st.integers(0, 40), max_size=25)


@given(SIZES, st.integers(1, 60), st.integers(1, 6))
def test_buckets_are_a_partition_in_order_within_both_limits(
    sizes: list[int], most_bytes: int, most_tensors: int
) -> None:
    buckets = plan_buckets(sizes, bucket_bytes=most_bytes, bucket_tensors=most_tensors)
    assert list(chain.from_iterable(buckets)) == list(range(len(sizes)))
    for bucket in buckets:
        assert 1 <= len(bucket) <= most_tensors
        assert sum(sizes[i] for i in bucket) <= most_bytes or len(bucket) == 1


@given(SIZES, st.integers(1, 60), st.integers(1, 6))
def test_no_bucket_could_have_taken_the_next_tensor(
    sizes: list[int], most_bytes: int, most_tensors: int
) -> None:
    buckets = plan_buckets(sizes, bucket_bytes=most_bytes, bucket_tensors=most_tensors)
    for bucket in buckets[:-1]:
        with_next = sum(sizes[i] for i in bucket) + sizes[bucket.stop]
        assert len(bucket) == most_tensors or with_next > most_bytes


@given(SIZES.filter(bool), st.integers(1, 60), st.integers(1, 6), st.integers(0, 300))
async def test_a_source_is_sent_whole_and_what_is_held_stays_within_the_budget_and_one_bucket(
    sizes: list[int], most_bytes: int, most_tensors: int, budget: int
) -> None:
    manifest = metas(*([size] for size in sizes), dtype="uint8")
    largest = max(
        sum(sizes[i] for i in bucket)
        for bucket in plan_buckets(sizes, bucket_bytes=most_bytes, bucket_tensors=most_tensors)
    )
    sent = 0
    held: list[int] = []
    source = Watched(manifest, lambda i: held.append(sum(sizes[: i + 1]) - sent))

    async def once() -> Sequence[tuple[str, list[int]]]:
        nonlocal sent
        sent = 0
        got: list[tuple[str, list[int]]] = []
        async with Stage(
            source, bucket_bytes=most_bytes, bucket_tensors=most_tensors, stage_bytes=budget
        ) as stage:
            await stage.prepare()
            prepared = stage.gathered_bytes
            assert prepared <= budget
            assert (prepared == sum(sizes)) == (sum(sizes) <= budget)
            while True:
                sent = sum(len(values) for _, values in got)
                bucket = await anext(stage, None)
                if bucket is None:
                    return got
                got += [
                    (meta.name, np.asarray(tensor).tolist())
                    for meta, tensor in zip(bucket.metas, bucket.tensors, strict=True)
                ]

    with anyio.fail_after(PATIENCE_S):
        first = await once()
        assert await once() == first
    assert first == [(m.name, [i] * m.shape[0]) for i, m in enumerate(manifest)]
    assert max(held) <= budget + largest
