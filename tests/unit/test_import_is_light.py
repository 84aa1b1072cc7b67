"""Importing genapi costs nothing: names are resolved on first use."""

import json
import subprocess
import sys

import genapi

WATCH = """\
import json, sys
before = set(sys.modules)
{statement}
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def modules_loaded_by(statement: str) -> list[str]:
    """The modules that a statement loads in a fresh interpreter."""
    command = [sys.executable, "-c", WATCH.format(statement=statement)]
    done = subprocess.run(command, check=True, capture_output=True, encoding="utf-8")
    loaded: list[str] = json.loads(done.stdout)
    return loaded


def test_import_loads_no_other_module_of_genapi_and_no_third_party_one() -> None:
    loaded = modules_loaded_by("import genapi")
    foreign = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names
    assert foreign == {"genapi"}
    assert [name for name in loaded if name.startswith("genapi")] == ["genapi"]


def test_an_error_is_importable_without_third_party_modules() -> None:
    loaded = modules_loaded_by("from genapi import GenAPIError")
    assert {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names == {"genapi"}


def test_every_public_name_is_importable_from_the_root_in_a_fresh_interpreter() -> None:
    statement = f"from genapi import {', '.join(genapi.__all__)}"
    assert "genapi.errors" in modules_loaded_by(statement)


def test_no_public_name_needs_torch() -> None:
    statement = f"from genapi import {', '.join(genapi.__all__)}"
    assert "torch" not in modules_loaded_by(statement)


def test_submodules_are_reachable_after_a_plain_import() -> None:
    assert "genapi.weights" in modules_loaded_by("import genapi; genapi.weights")
