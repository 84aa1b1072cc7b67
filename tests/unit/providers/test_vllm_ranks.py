"""Every plan's ranks by vLLM's own formula."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genapi import WorkerId
from genapi.providers.vllm.admin import VLLMAdmin
from genapi.providers.vllm.ranks import receiver_rank, server_ranks
from genapi.publication.ranks import Ranked, plan_ranks


def worker(index: int) -> WorkerId:
    return WorkerId(provider="vllm", component=f"w{index}", instance="1")


def ranks_of(sizes: list[int]) -> list[list[int]]:
    plan = plan_ranks(Ranked(worker(i), size) for i, size in enumerate(sizes))
    assert plan.world_size == 1 + sum(sizes)
    return [
        server_ranks(plan.offsets[worker(i)], replica_size=size) for i, size in enumerate(sizes)
    ]


@pytest.mark.case("RANK-01")
def test_servers_of_different_size_take_neighbouring_ranks() -> None:
    assert ranks_of([2, 4, 1]) == [[1, 2], [3, 4, 5, 6], [7]]


@pytest.mark.case("RANK-01")
@given(st.lists(st.integers(1, 16), min_size=1, max_size=12))
def test_ranks_are_a_permutation_of_all_but_the_trainers(sizes: list[int]) -> None:
    taken = [rank for ranks in ranks_of(sizes) for rank in ranks]
    assert taken == list(range(1, 1 + sum(sizes)))


@pytest.mark.case("RANK-03")
def test_the_native_receiver_expects_offsets_that_skip_the_trainer() -> None:
    plan = plan_ranks([Ranked(worker(0), 1), Ranked(worker(1), 1)])
    assert plan.world_size == 3
    bodies = [
        next(
            VLLMAdmin().join(
                {"world_size": 3}, rank_offset=plan.offsets[worker(i)], backend="genapi_gloo"
            )
        )
        for i in (0, 1)
    ]
    assert [body.body for body in bodies] == [  # type: ignore[union-attr]
        b'{"init_info":{"world_size":3,"rank_offset":1}}',
        b'{"init_info":{"world_size":3,"rank_offset":2}}',
    ]
    assert {receiver_rank(plan.offsets[worker(i)]) for i in (0, 1)} == {1, 2}


@given(tp=st.integers(1, 4), dp=st.integers(1, 4), before=st.integers(1, 5))
def test_external_data_parallel_servers_share_an_offset_and_count_once(
    tp: int, dp: int, before: int
) -> None:
    group = [Ranked(worker(i), tp * dp, dp_group="g") for i in range(dp)]
    plan = plan_ranks([Ranked(worker(90), before), *group, Ranked(worker(91), 1)])
    assert plan.world_size == 1 + before + tp * dp + 1
    taken = [
        rank
        for i in range(dp)
        for rank in server_ranks(
            plan.offsets[worker(i)], data_parallel_indexes=[i], replica_size=tp
        )
    ]
    assert taken == list(range(1 + before, 1 + before + tp * dp))


@given(tp=st.integers(1, 4), dp=st.integers(1, 4))
def test_internal_data_parallel_is_one_server_with_all_its_replicas(tp: int, dp: int) -> None:
    plan = plan_ranks([Ranked(worker(0), tp * dp)])
    taken = server_ranks(plan.offsets[worker(0)], data_parallel_indexes=range(dp), replica_size=tp)
    assert taken == list(range(1, 1 + tp * dp))
