"""A publisher or a worker is killed at every moment of a publication; workers are processes.

The same scenarios run against real vLLM servers in tests/chaos.
"""

from collections.abc import Iterator

import pytest

from tests.chaos.embedded_world import EmbeddedWorld
from tests.chaos.harness import HALVES, PHASES, Actors, Chaos, table

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def chaos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chaos]:
    folder = tmp_path_factory.mktemp("chaos")
    with EmbeddedWorld() as world, Actors(folder) as actors:
        chaos = Chaos(world, actors, folder)
        chaos.begin()
        yield chaos
        print(table(chaos.rows))  # noqa: T201


@pytest.mark.parametrize("phase", PHASES)
def test_a_publisher_that_is_killed_when_a_phase_starts_is_followed_by_one_that_commits(
    phase: str, chaos: Chaos
) -> None:
    chaos.play(phase, "publisher")


@pytest.mark.chaos
@pytest.mark.parametrize("phase", HALVES)
def test_a_publisher_that_is_killed_between_two_answers_is_followed_by_one_that_commits(
    phase: str, chaos: Chaos
) -> None:
    chaos.play(f"{phase}/half", "publisher")


@pytest.mark.parametrize("phase", PHASES)
def test_a_worker_that_is_killed_in_a_phase_is_named_and_comes_back_by_a_restart(
    phase: str, chaos: Chaos
) -> None:
    chaos.play(phase, "worker")
