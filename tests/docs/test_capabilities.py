"""The page of capabilities shows the manifest of the contract suite."""

import pathlib

from genapi.testing.contract import PROFILES, capabilities

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "reference" / "capabilities.md"


def test_the_tables_of_the_page_are_made_from_the_manifest_and_the_profiles() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.endswith("\n\n" + capabilities(PROFILES)), "python -m genapi.testing.contract"
