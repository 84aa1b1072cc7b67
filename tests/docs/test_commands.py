"""The commands that the README promises are the ones that are run and that exist."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SET_UP = "python3 -m venv .venv && .venv/bin/pip install nox && "
COMMANDS = (SET_UP + ".venv/bin/nox -s demo", SET_UP + ".venv/bin/nox")
PAGES = sorted(page for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")))


def session_names() -> set[str]:
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {
        node.name
        for node in functions
        if any("nox.session" in ast.unparse(entry) for entry in node.decorator_list)
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_the_readme_has_the_two_command_lines_word_for_word(command: str) -> None:
    assert command in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()


def test_continuous_integration_runs_the_readmes_test_command() -> None:
    assert f"'{COMMANDS[1]}'\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_session_that_a_page_names_exists(page: pathlib.Path) -> None:
    named = re.findall(r"nox -s ([a-z_]+)", page.read_text(encoding="utf-8"))
    assert set(named) <= session_names()
