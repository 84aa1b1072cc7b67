"""The pages about an engine's evidence show the rows that the code concludes from."""

import pathlib
from collections.abc import Sequence

import pytest

from genapi.providers.dynamo import files as dynamo_files
from genapi.providers.dynamo import verdicts as dynamo
from genapi.providers.sglang import files as sglang_files
from genapi.providers.sglang import verdicts as sglang
from genapi.providers.vllm import files as vllm_files
from genapi.providers.vllm import verdicts as vllm
from genapi.publication.evidence import Pattern, Row, markdown

PAGES = pathlib.Path(__file__).parents[2] / "docs" / "reference"

engines = pytest.mark.parametrize(
    ("name", "rows", "patterns"),
    [
        ("vllm", vllm.ROWS, vllm.PATTERNS),
        ("vllm", vllm_files.ROWS, vllm.PATTERNS),
        ("sglang", sglang.ROWS, sglang.PATTERNS),
        ("sglang", sglang_files.ROWS, sglang.PATTERNS),
        ("dynamo", dynamo.ROWS, dynamo.PATTERNS),
        ("dynamo", dynamo_files.ROWS, dynamo.PATTERNS),
    ],
)


@engines
def test_the_tables_of_the_page_are_drawn_from_the_rows_and_patterns(
    name: str, rows: Sequence[Row], patterns: Sequence[Pattern]
) -> None:
    page = (PAGES / f"{name}-evidence.md").read_text(encoding="utf-8")
    for table in markdown(rows, patterns):
        assert f"\n\n{table}\n\n" in page


@engines
def test_every_row_and_every_pattern_is_a_line_of_its_own(
    name: str, rows: Sequence[Row], patterns: Sequence[Pattern]
) -> None:
    evidence, lines = markdown(rows, patterns)
    assert len(evidence.splitlines()) == len(rows) + 2, name
    assert len(lines.splitlines()) == len(patterns) + 2, name
