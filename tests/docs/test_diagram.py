"""The diagram of a publication in the docs is the one that its table draws."""

import pathlib
import re

from genapi.providers.sglang.verdicts import ROWS as SGLANG
from genapi.providers.vllm.verdicts import ROWS as VLLM
from genapi.publication.table import TABLE, Phase, mermaid
from genapi.types.worker import Outcome

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "guide" / "publishing.md"


def test_the_diagram_of_the_docs_is_drawn_from_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert f"```mermaid\n{mermaid()}\n```" in page


def cells(heading: str) -> list[list[str]]:
    """The rows of the page's table whose first column has that heading."""
    page = PAGE.read_text(encoding="utf-8")
    lines = page.partition(f"| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_of_phases_has_every_phase_of_the_way_forward_in_order() -> None:
    forward, phase = [], Phase.PREFLIGHT
    while phase is not Phase.DONE:
        forward.append(phase.value)
        phase = TABLE[phase].then
    assert [name for row in cells("phase") for name in row[0].split(", ")] == [
        *forward[: forward.index(Phase.OPEN)],
        Phase.SHUT,
        Phase.OPEN,
    ]


def test_the_table_of_outcomes_names_every_way_back_that_an_engines_rows_have() -> None:
    named: dict[str, set[str]] = {}
    above = ""
    for outcome, _, ways in cells("`outcome`"):
        above = above if ways == "the same" else ways
        found = re.findall(r"`(\w+)`", above)
        named[outcome.strip("`")] = {*found} | ({"none"} if "none" in above else set())
    for outcome in Outcome:
        rows = [row.verdict for row in (*VLLM, *SGLANG) if row.verdict.outcome is outcome]
        assert named[outcome] == {str(verdict.recovery or "none") for verdict in rows}, outcome
