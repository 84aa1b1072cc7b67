"""The page on the first user has a row for every finding, and names only tests that exist."""

import ast
import pathlib
import re

import pytest

from genapi.testing.contract import MANIFEST

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "decisions" / "first-user.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([FP]\d+) \| (.+) \| (.+) \|$", PAGE, re.MULTILINE)
NUMBERS = [f"F{number}" for number in range(1, 29)] + [f"P{number}" for number in range(1, 43)]


def existing() -> set[str]:
    paths = (ROOT / "tests").rglob("test_*.py")
    nodes = [n for p in paths for n in ast.walk(ast.parse(p.read_text(encoding="utf-8")))]
    return {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_finding_has_its_row_in_order() -> None:
    assert [number for number, _, _ in ROWS] == NUMBERS


def test_every_test_that_the_page_names_exists() -> None:
    assert set(re.findall(r"\btest_\w+", PAGE)) - existing() == set()
    named = set(re.findall(r"`(\w+:[\w-]+)`", PAGE))
    assert named - {behaviour.id for behaviour in MANIFEST} == set()


@pytest.mark.parametrize(("number", "answer"), [(number, answer) for number, _, answer in ROWS])
def test_a_row_names_a_test_or_says_why_there_is_none(number: str, answer: str) -> None:
    assert re.search(r"`test_\w+`|`\w+:[\w-]+`|\bLater: \w+|\bNot here: \w+", answer), number
