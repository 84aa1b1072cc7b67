"""The reference has a place for every public name."""

import pathlib
import re

import genapi

REFERENCE = pathlib.Path(__file__).parents[2] / "docs" / "reference"
SUBPACKAGES_WITH_PAGES_OF_THEIR_OWN = {"providers"}


def test_every_public_name_is_documented_once() -> None:
    pages = [page.read_text(encoding="utf-8") for page in sorted(REFERENCE.glob("*.md"))]
    named = [
        name for page in pages for name in re.findall(r"^::: genapi\.(\w+)$", page, re.MULTILINE)
    ]
    assert sorted(named) == sorted(set(genapi.__all__) - SUBPACKAGES_WITH_PAGES_OF_THEIR_OWN)
