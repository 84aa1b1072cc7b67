"""The page about vLLM's evidence shows the rows that the code concludes from."""

import pathlib

from genapi.providers.vllm.verdicts import PATTERNS, ROWS
from genapi.publication.evidence import markdown

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "reference" / "vllm-evidence.md"


def test_the_tables_of_the_page_are_drawn_from_the_rows_and_patterns() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for table in markdown(ROWS, PATTERNS):
        assert f"\n\n{table}\n\n" in page


def test_every_row_and_every_pattern_is_a_line_of_its_own() -> None:
    evidence, patterns = markdown(ROWS, PATTERNS)
    assert len(evidence.splitlines()) == len(ROWS) + 2
    assert len(patterns.splitlines()) == len(PATTERNS) + 2
