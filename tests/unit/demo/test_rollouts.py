"""Rollouts go on whether anybody takes them or not."""

import itertools
from collections.abc import AsyncIterator

import anyio
import pytest

import genapi
from genapi import Fleet
from genapi.demo.rollouts import Rollouts, requests

IN_FLIGHT, KEEP = 3, 4


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with genapi.connect("embedded://?protocol=vllm&workers=2") as fleet:
        yield fleet


def pool(fleet: Fleet) -> Rollouts:
    return Rollouts(fleet, requests(seed=0, vocab=64), in_flight=IN_FLIGHT, keep=KEEP)


async def test_more_can_be_taken_than_are_held(fleet: Fleet) -> None:
    rollouts = pool(fleet)
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rollouts.run)
            taken = await rollouts.take(3 * KEEP)
            tasks.cancel_scope.cancel()
    assert len(taken) == 3 * KEEP
    assert {len(rollout.output.token_ids) for rollout in taken} == {16}
    assert rollouts.superseded == 0


async def test_while_nobody_takes_them_the_newest_are_kept(fleet: Fleet) -> None:
    rollouts = pool(fleet)
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rollouts.run)
            await rollouts.take(1)
            while not rollouts.superseded:  # noqa: ASYNC110 - nobody tells
                await anyio.sleep(0.01)
            missed = rollouts.superseded
            taken = await rollouts.take(KEEP)
            tasks.cancel_scope.cancel()
    # They end in about the order they were asked, but for those that were in flight together.
    asked = [r.prompt_token_ids for r in itertools.islice(requests(seed=0, vocab=64), 2000)]
    places = [asked.index(rollout.prompt) for rollout in taken]
    assert missed > 0
    assert min(places) > missed - IN_FLIGHT


async def test_an_error_of_a_generation_ends_the_pool() -> None:
    async with genapi.connect("embedded://?protocol=vllm&vocab=8") as fleet:
        with anyio.fail_after(20), pytest.raises(ExceptionGroup) as caught:
            await pool(fleet).run()
    # Several generations may fail before the group is cancelled.
    assert all(isinstance(error, genapi.ProviderError) for error in caught.value.exceptions)


def test_requests_are_repeatable_and_within_the_vocabulary() -> None:
    first, again, other = (
        list(itertools.islice(requests(seed=seed, vocab=10), 5)) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert all(max(request.prompt_token_ids or ()) < 10 for request in first)
    assert len({len(request.prompt_token_ids or ()) for request in first}) == 1
    assert len({request.sampling.seed for request in first}) == 5
