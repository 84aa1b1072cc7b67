"""What every test shares: one event loop library, the property profiles, checked case ids."""

import os
import re

import hypothesis
import pytest

hypothesis.settings.register_profile("dev", max_examples=25, deadline=None)
hypothesis.settings.register_profile(
    "ci", max_examples=200, deadline=None, derandomize=True, print_blob=True
)
# A few examples that no run had before; `tests/property/test_fresh_examples.py` runs them.
hypothesis.settings.register_profile(
    "fresh", max_examples=50, deadline=None, database=None, print_blob=True
)
hypothesis.settings.register_profile("nightly", max_examples=5000, deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

CASE_ID = re.compile(r"[A-Z]+-\d\d")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """genapi runs on asyncio only."""
    return "asyncio"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a `case` mark that names no case: it would count as covered and cover nothing."""
    for item in items:
        for mark in item.iter_markers("case"):
            if mark.kwargs or not mark.args or not all(map(is_case_id, mark.args)):
                raise pytest.UsageError(f"{item.nodeid}: no case id in {mark!r}")


def is_case_id(value: object) -> bool:
    return isinstance(value, str) and CASE_ID.fullmatch(value) is not None
