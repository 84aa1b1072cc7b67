"""The diagram of a publication in the docs is the one that its table draws."""

import pathlib

from genapi.publication.table import mermaid

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "guide" / "publishing.md"


def test_the_diagram_of_the_docs_is_drawn_from_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert f"```mermaid\n{mermaid()}\n```" in page
