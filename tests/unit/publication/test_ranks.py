"""Who has which rank in a transfer group."""

import pytest

from genapi.publication.ranks import Ranked, RankPlan, check_ranks, plan_groups, plan_ranks
from genapi.types.ids import WorkerId

A, B, C = (WorkerId(provider="vllm", instance=name) for name in "abc")


def test_the_trainer_is_first_and_servers_follow_in_their_order() -> None:
    plan = plan_ranks([Ranked(A, 2), Ranked(B, 1), Ranked(C, 4)])
    assert plan == RankPlan(8, {A: 1, B: 3, C: 4})


def test_servers_of_one_external_group_share_an_offset_and_count_once() -> None:
    plan = plan_ranks([Ranked(A, 4, "moe"), Ranked(B, 1), Ranked(C, 4, "moe")])
    assert plan == RankPlan(6, {A: 1, B: 5, C: 1})


def test_a_server_without_ranks_is_named() -> None:
    with pytest.raises(ValueError, match=r"vllm/a brings 0 ranks; a server brings at least 1"):
        plan_ranks([Ranked(A, 0)])


def test_servers_of_one_group_that_name_two_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="group 'moe' name different sizes: 4 and 2"):
        plan_ranks([Ranked(A, 4, "moe"), Ranked(B, 2, "moe")])


def test_a_plan_under_which_every_rank_is_taken_once_passes() -> None:
    plan = plan_ranks([Ranked(A, 2, "moe"), Ranked(B, 2, "moe"), Ranked(C, 2)])
    check_ranks(plan, {A: (0,), B: (1,), C: (0, 1)})


@pytest.mark.parametrize(
    ("places", "taken"),
    [
        ({A: (0,), B: (0,), C: (0, 1)}, "[1, 1, 3, 4]"),
        ({A: (0,), C: (0, 1)}, "[1, 3, 4]"),
        ({A: (0,), B: (1,), C: (1, 2)}, "[1, 2, 4, 5]"),
        ({A: (-1,), B: (1,), C: (0, 1)}, "[0, 2, 3, 4]"),
    ],
)
def test_a_plan_under_which_a_rank_is_missing_or_taken_twice_is_refused(
    places: dict[WorkerId, tuple[int, ...]], taken: str
) -> None:
    plan = plan_ranks([Ranked(A, 2, "moe"), Ranked(B, 2, "moe"), Ranked(C, 2)])
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared whole
        check_ranks(plan, places)
    assert str(caught.value) == (
        f"workers would take the ranks {taken} of a group of 5, in which the trainer is rank 0: "
        "every rank has to be taken once; list every server of a data-parallel group"
    )


@pytest.mark.parametrize(
    ("at_most", "groups"),
    [
        (None, [{A: 1, B: 3, C: 4}]),
        (3, [{A: 1, B: 3, C: 4}]),
        (2, [{A: 1, B: 3}, {C: 1}]),
        (1, [{A: 1}, {B: 1}, {C: 1}]),
    ],
)
def test_servers_are_divided_in_their_order_and_each_group_has_ranks_of_its_own(
    at_most: int | None, groups: list[dict[WorkerId, int]]
) -> None:
    servers = [Ranked(A, 2), Ranked(B, 1), Ranked(C, 1)]
    places = {A: (0, 1), B: (0,), C: (0,)}
    assert [p.offsets for p in plan_groups(servers, places, at_most=at_most)] == groups


def test_servers_of_one_external_group_stay_together() -> None:
    servers = [Ranked(A, 2, "moe"), Ranked(B, 1), Ranked(C, 2, "moe")]
    places = {A: (0,), B: (0,), C: (1,)}
    plans = plan_groups(servers, places, at_most=2)
    assert plans == [RankPlan(3, {A: 1, C: 1}), RankPlan(2, {B: 1})]
    with pytest.raises(
        ValueError, match=r"max_workers_per_group=1: the 2 servers .*'moe'.*at least 2"
    ):
        plan_groups(servers, places, at_most=1)


def test_every_groups_ranks_are_held_against_the_engines_own_formula() -> None:
    with pytest.raises(ValueError, match="list every server"):
        plan_groups([Ranked(A, 1), Ranked(B, 2)], {A: (0,), B: (0,)}, at_most=1)
