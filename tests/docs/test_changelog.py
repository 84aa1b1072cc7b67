"""Changelog fragments have names that towncrier knows; it drops the others without a word."""

import pathlib
import re
import tomllib

ROOT = pathlib.Path(__file__).parents[2]


def test_every_fragment_is_of_a_declared_type() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    kinds = "|".join(kind["directory"] for kind in settings["towncrier"]["type"])
    known = re.compile(rf"\+[a-z0-9-]+\.({kinds})\.md")
    fragments = {path.name for path in (ROOT / "docs" / "changelog.d").iterdir()}
    assert {name for name in fragments - {"README.md"} if not known.fullmatch(name)} == set()


def test_every_fragment_says_something() -> None:
    for path in (ROOT / "docs" / "changelog.d").glob("*.md"):
        assert path.read_text(encoding="utf-8").strip(), path.name


def test_the_changelogs_version_is_the_packages() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["tool"]["towncrier"]["version"] == settings["project"]["version"]
