"""The publication table, explored to the end: in the default run with two workers, bounded.

`nox -s explore` goes further: more workers, more that goes wrong, and every kind of provider.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from genapi.publication.evidence import Op
from genapi.publication.table import READS
from tests.explore.rivals import Rivals
from tests.explore.search import Found, HoleError, Search, Setting

pytestmark = pytest.mark.timeout(300)

Tell = Callable[[str], None]

ALL = 99
"""More than can go wrong in one attempt."""


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> Tell:
    """Prints a line that is seen also when the test passes."""

    def tell(line: str) -> None:
        with capsys.disabled():
            print(f"\n{request.node.name}: {line}")  # noqa: T201 - the numbers are asked for

    return tell


def test_two_workers_one_failure_anywhere_and_whatever_comes_after(tell: Tell) -> None:
    found = Search(Setting(workers=2, faults=1, second_faults=0)).run()
    tell(str(found))
    assert found.states > 10_000


@pytest.mark.parametrize(("min_workers", "finish_sets_label"), [(None, True), (1, False)])
def test_two_groups_of_one_worker_and_one_failure_anywhere(
    tell: Tell, min_workers: int | None, finish_sets_label: bool
) -> None:
    setting = Setting(workers=2, groups=2, faults=1, second_faults=0, min_workers=min_workers)
    found = Search(replace(setting, finish_sets_label=finish_sets_label)).run()
    tell(str(found))
    assert found.states > 10_000


def test_one_worker_and_every_failure_at_every_place(tell: Tell) -> None:
    found = Search(Setting(workers=1, faults=ALL, second_faults=0)).run()
    tell(str(found))
    assert found.states > 2_000


def test_two_publishers_at_once_leave_no_worker_with_a_label_of_other_weights(tell: Tell) -> None:
    found = Rivals(2).run()
    tell(str(found))
    assert found.states > 5_000


@pytest.mark.parametrize("op", [Op.UNMARK, Op.UPDATE, Op.MARK, Op.PAUSE, Op.FINISH])
def test_without_a_look_at_the_board_before_it_a_superseded_call_does_harm(op: Op) -> None:
    with pytest.raises(HoleError):
        Rivals(1, unchecked=READS | {op}).run()


def test_what_a_state_leaves_out_decides_nothing() -> None:
    setting = Setting(workers=1, faults=3, second_faults=0)
    assert _ends(setting) == _ends(replace(setting, exact=True))


def _ends(setting: Setting) -> object:
    found: Found = Search(setting).run()
    return found.ends
