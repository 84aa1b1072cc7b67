"""Rank plans against SGLang's own formula."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genapi.providers.sglang.admin import SGLangAdmin
from genapi.providers.sglang.ranks import receiver_rank, server_ranks
from genapi.publication.ranks import Ranked, check_ranks, plan_ranks
from genapi.types.ids import WorkerId
from genapi.wire.http import HTTPReply
from tests.support.transcripts import play


def worker(index: int) -> WorkerId:
    return WorkerId(provider="sglang", component=f"w{index}:30000", instance="1")


@pytest.mark.case("RANK-01", "RANK-03")
@given(st.lists(st.integers(1, 8), min_size=1, max_size=6))
def test_every_rank_is_taken_once(sizes: list[int]) -> None:
    plan = plan_ranks(Ranked(worker(i), size) for i, size in enumerate(sizes))
    assert plan.world_size == 1 + sum(sizes)
    check_ranks(plan, {worker(i): server_ranks(0, tp_size=n) for i, n in enumerate(sizes)})
    taken = [
        rank
        for i, size in enumerate(sizes)
        for rank in server_ranks(plan.offsets[worker(i)], tp_size=size)
    ]
    assert taken == list(range(1, plan.world_size))


def test_the_recorded_server_of_two_ranks_takes_the_two_after_the_trainer() -> None:
    assert server_ranks(1, tp_size=2) == [1, 2]
    assert receiver_rank(1, tp_rank=1) == 2


def test_stages_of_a_pipeline_take_one_rank_twice() -> None:
    assert server_ranks(1, tp_size=2, pp_size=2) == [1, 2, 1, 2]
    plan = plan_ranks([Ranked(worker(0), 4)])
    with pytest.raises(ValueError, match="every rank has to be taken once"):
        check_ranks(plan, {worker(0): server_ranks(0, tp_size=2, pp_size=2)})


@pytest.mark.case("RANK-03")
def test_a_server_is_told_the_offset_of_the_plan() -> None:
    plan = plan_ranks([Ranked(worker(0), 2), Ranked(worker(1), 1)])
    flow = SGLangAdmin().join(
        {"master_address": "10.0.0.1", "master_port": 7, "world_size": plan.world_size},
        rank_offset=plan.offsets[worker(1)],
        backend="nccl",
    )
    _, made = play(flow, lambda _call: HTTPReply(200, b'{"success":true}'))
    sent = json.loads(made[-1].body or b"")
    assert (sent["rank_offset"], sent["world_size"]) == (3, 4)
