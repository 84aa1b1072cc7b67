"""A publisher, a worker or its engine is killed at every phase, with two real vLLM servers.

`nox -s chaos` runs all of it and writes the table of failures; `nox -s engines` runs two phases.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.chaos.harness import PHASES, Actors, Chaos, Victim, table
from tests.chaos.page import write_page
from tests.chaos.vllm_world import VllmWorld

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.engines.conftest import Models, Oracle

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

ALSO_IN_ENGINES = {("transfer/half", "publisher"), ("finish", "worker")}
HALVES = ("begin/half", "transfer/half", "finish/half", "resume/half")


def cases() -> Iterator[Any]:
    moments: list[tuple[str, Victim]] = [(phase, "publisher") for phase in PHASES]
    moments += [(moment, "publisher") for moment in HALVES]
    moments += [(phase, "worker") for phase in PHASES]
    moments += [(phase, "engine") for phase in PHASES]
    for case in moments:
        marks = [pytest.mark.engine] if case in ALSO_IN_ENGINES else []
        yield pytest.param(*case, marks=marks, id="-".join(case))


@pytest.fixture(scope="module")
def chaos(
    vllm_environment: Path,
    models: Models,
    oracle: Oracle,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Chaos]:
    folder = tmp_path_factory.mktemp("chaos")
    with (
        VllmWorld(vllm_environment, models, oracle, folder) as world,
        Actors(folder, "--torch") as actors,
    ):
        chaos = Chaos(world, actors, folder)
        chaos.begin()
        yield chaos
        page = os.environ.get("GENAPI_FAILURES")
        if page is not None and len(chaos.rows) == len(list(cases())):
            write_page(Path(page), chaos.rows, limits=world.limits, environment=vllm_environment)
        sys.stdout.write(f"\n{table(chaos.rows)}\n")


@pytest.mark.parametrize(("moment", "victim"), list(cases()))
def test_whatever_is_killed_the_next_publisher_brings_both_to_one_version(
    moment: str, victim: Victim, chaos: Chaos
) -> None:
    chaos.play(moment, victim)
