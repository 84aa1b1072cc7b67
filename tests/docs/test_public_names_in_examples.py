"""Every public name is used in an example of the docs: the public face is a budget."""

import re

import genapi
from tests.docs.test_examples import PAGES, examples_of

MOST = 45


def test_every_public_name_is_used_in_an_example() -> None:
    parts = [example.parsed for page in PAGES for example in examples_of(page)]
    code = "\n".join(part for part in parts if isinstance(part, str))  # others skip an example
    unused = [name for name in genapi.__all__ if not re.search(rf"\b{name}\b", code)]
    assert unused == []


def test_the_public_face_stays_small() -> None:
    assert len(genapi.__all__) <= MOST
