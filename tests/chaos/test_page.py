"""The page of failures is from a run of what is killed today; `nox -s chaos` writes it anew."""

from __future__ import annotations

import re
from pathlib import Path

from tests.chaos.page import SECTIONS
from tests.chaos.test_vllm import cases

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "failures.md"


def test_the_page_of_failures_has_a_line_for_everything_that_is_killed() -> None:
    page = PAGE.read_text(encoding="utf-8")
    lines = set()
    for victim, text in SECTIONS.items():
        section = page.partition(text)[2].partition("\n## ")[0]
        moments = re.findall(r"^\| ([a-z/]+) \| (?!receipts)", section, re.MULTILINE)
        lines |= {(moment, victim) for moment in moments}
    assert lines == {tuple(map(str, case.values)) for case in cases()}
