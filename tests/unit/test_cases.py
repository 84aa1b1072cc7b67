"""Every public bug report on the list is held by a test, or says why none holds it yet."""

import ast
import pathlib
import tomllib

from genapi.testing.contract import MANIFEST
from tests.conftest import is_case_id

TESTS = pathlib.Path(__file__).parents[1]
LIST = tomllib.loads((TESTS / "cases.toml").read_text(encoding="utf-8"))
CASES, PENDING = LIST["cases"], LIST["pending"]


def marked(path: pathlib.Path) -> set[str]:
    """The ids in the `case` marks of a file."""
    calls = [n for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Call)]
    return {
        argument.value
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "case"
        for argument in call.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }


def named() -> set[str]:
    in_tests = set().union(*(marked(path) for path in TESTS.rglob("test_*.py")))
    return in_tests | {b.source for b in MANIFEST if is_case_id(b.source)}


def test_every_report_is_named_by_a_test_or_pending_with_a_reason() -> None:
    assert all(is_case_id(name) and text.strip() for name, text in CASES.items())
    assert all(reason.strip() for reason in PENDING.values())
    assert sorted(set(CASES) - named()) == sorted(PENDING)


def test_no_test_names_a_report_that_is_not_on_the_list() -> None:
    assert named() - set(CASES) == set()
