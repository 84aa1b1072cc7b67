"""Packages of the examples as if they were installed: metadata made from their pyproject.toml.

Their modules are found by `pythonpath`; what only an installation brings is the entry point.
"""

import pathlib
import tomllib
from collections.abc import Iterator

import pytest

HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="session", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The entry points of every example, on the path that importlib.metadata searches."""
    place = tmp_path_factory.mktemp("installed")
    for path in HERE.glob("*/pyproject.toml"):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        folder = place / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        folder.mkdir()
        facts = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        (folder / "METADATA").write_text(facts, encoding="utf-8")
        lines = [
            f"[{group}]\n" + "\n".join(f"{name} = {value}" for name, value in points.items())
            for group, points in project["entry-points"].items()
        ]
        (folder / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(place)
        yield
