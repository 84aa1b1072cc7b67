"""Which version a publication or an adoption is."""

from collections.abc import Sequence

import pytest

from genapi import PolicyVersion
from genapi.errors import ConfigError, FleetError
from genapi.publication.numbering import run_of, step_number, version_to_adopt, version_to_publish


def v(step: int, attempt: int = 1, run: str = "r") -> PolicyVersion:
    return PolicyVersion(run=run, step=step, attempt=attempt)


def publish(
    step: int | PolicyVersion,
    held: Sequence[PolicyVersion] = (),
    *,
    committed: PolicyVersion | None = None,
    tried: int = 0,
    unfinished: bool = False,
) -> PolicyVersion:
    return version_to_publish(
        step, held, run="r", committed=committed, tried=tried, unfinished=unfinished
    )


@pytest.mark.parametrize(("step", "number"), [(0, 0), (7, 7), (v(7, 3), 7)])
def test_a_step_is_a_whole_number_or_that_of_a_version(
    step: int | PolicyVersion, number: int
) -> None:
    assert step_number(step) == number


@pytest.mark.parametrize("step", [-1, True, 1.0, "1", None])
def test_what_is_no_step_is_named(step: object) -> None:
    with pytest.raises(
        ConfigError, match=r"step=.*: pass a whole number of at least 0, or a PolicyVersion"
    ):
        step_number(step)  # type: ignore[arg-type]


# runs


def mint() -> str:
    return "minted"


def test_the_run_is_the_fleets_before_it_is_the_workers() -> None:
    assert run_of(1, [v(0, run="theirs")], run="ours", mint=mint) == "ours"
    assert run_of(1, [v(0, run="theirs")], run=None, mint=mint) == "theirs"
    assert run_of(1, [], run=None, mint=mint) == "minted"


def test_a_version_brings_its_run_where_the_fleet_has_none() -> None:
    assert run_of(v(1, run="new"), [v(0, run="theirs")], run=None, mint=mint) == "new"
    assert run_of(v(1), [], run="r", mint=mint) == "r"


def test_a_version_of_another_run_is_refused_by_both_names() -> None:
    message = "genapi:new:1:1 is of run 'new', but the fleet's run is 'ours'"
    with pytest.raises(ConfigError, match=message):
        run_of(v(1, run="new"), [], run="ours", mint=mint)


def test_workers_of_several_runs_are_named_and_none_is_chosen() -> None:
    held = [v(0, run="b"), v(0, run="a")]
    message = r"several runs \(a, b\); pass run= to connect\(\)"
    with pytest.raises(ConfigError, match=message):
        run_of(1, held, run=None, mint=mint)


# adopting


def test_workers_without_a_version_are_adopted_under_the_first_attempt_or_the_one_given() -> None:
    assert version_to_adopt(4, [], run="r") == v(4)
    assert version_to_adopt(v(4, 3), [], run="r") == v(4, 3)
    assert version_to_adopt(4, [v(9, run="other")], run="r") == v(4)


def test_workers_that_carry_the_step_are_adopted_under_the_attempt_that_they_carry() -> None:
    assert version_to_adopt(4, [v(4, 2), v(4, 2)], run="r") == v(4, 2)


@pytest.mark.parametrize("held", [[v(5)], [v(4, 1), v(4, 2)], [v(4), v(5)]])
def test_another_step_or_two_attempts_are_not_adopted(held: list[PolicyVersion]) -> None:
    with pytest.raises(
        FleetError, match=r"cannot adopt step 4: a worker already carries genapi:r:.*or publish"
    ):
        version_to_adopt(4, held, run="r")


# publishing


def test_a_new_step_is_its_first_attempt() -> None:
    assert publish(3) == v(3)
    assert publish(0) == v(0)
    assert publish(3, [v(2)], committed=v(2)) == v(3)
    assert publish(3, [v(9, run="other")]) == v(3)


@pytest.mark.parametrize(("held", "committed"), [([v(4)], None), ([v(3), v(4)], v(3)), ([], v(4))])
def test_a_step_below_one_that_is_held_or_committed_is_refused(
    held: list[PolicyVersion], committed: PolicyVersion | None
) -> None:
    message = "step 3 is not newer than 4, which the fleet holds already"
    with pytest.raises(ConfigError, match=message):
        publish(3, held, committed=committed)


@pytest.mark.parametrize(("held", "committed"), [([v(3)], v(3)), ([v(3)], v(2)), ([v(3)], None)])
def test_a_step_that_is_held_is_published_again_only_if_somebody_may_lack_it(
    held: list[PolicyVersion], committed: PolicyVersion | None
) -> None:
    with pytest.raises(ConfigError, match="step 3 is not newer than 3"):
        publish(3, held, committed=committed)
    assert publish(3, held, committed=committed, unfinished=True) == v(3, 2)
    assert publish(4, [v(3)], committed=v(3), unfinished=True) == v(4)


def test_an_attempt_follows_every_other_that_is_known_of_its_step() -> None:
    assert publish(3, [v(3, 4), v(3, 2)], unfinished=True) == v(3, 5)
    assert publish(3, [v(3, 2)], tried=6, unfinished=True) == v(3, 7)
    assert publish(3, [v(2)], tried=6) == v(3, 7)
    assert publish(3, [], committed=v(3, 5), unfinished=True) == v(3, 6)
    assert publish(3, [v(2, 8)], committed=v(2, 8)) == v(3)


def test_a_version_may_ask_for_a_later_attempt_and_never_for_an_earlier_one() -> None:
    assert publish(v(3, 5), [v(3, 2)], unfinished=True) == v(3, 5)
    assert publish(v(3, 1), [v(3, 2)], unfinished=True) == v(3, 3)
