"""What is public is said once and seen alike by the interpreter and by static tools."""

import ast
import importlib
import pathlib
import pkgutil
import types

import pytest

import genapi

PACKAGE = pathlib.Path(genapi.__file__).parent
NOT_IMPORTABLE_HERE = ("genapi.engine_side.",)  # imports an engine
PROGRAMS = ("__main__",)
SUBPACKAGES = {"providers", "weights"}


def module_names() -> list[str]:
    names = [module.name for module in pkgutil.walk_packages([str(PACKAGE)], prefix="genapi.")]
    return [
        name
        for name in names
        if not name.startswith(NOT_IMPORTABLE_HERE) and not name.endswith(PROGRAMS)
    ]


def names_for_static_tools() -> set[str]:
    """The names imported under TYPE_CHECKING in the root module."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    blocks = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def test_static_tools_see_the_same_names_as_the_interpreter() -> None:
    assert names_for_static_tools() == set(genapi.__all__)


def test_dir_lists_every_public_name() -> None:
    assert set(genapi.__all__) <= set(dir(genapi))


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="'no_such_name'"):
        getattr(genapi, "no_such_name")  # noqa: B009 - mypy knows that the name does not exist


@pytest.mark.parametrize("name", sorted(set(genapi.__all__) - SUBPACKAGES))
def test_a_public_name_is_public_in_its_home(name: str) -> None:
    home = importlib.import_module(getattr(genapi, name).__module__)
    assert name in home.__all__


@pytest.mark.parametrize("name", module_names())
def test_a_module_says_what_is_public_sorted_and_all_of_it_exists(name: str) -> None:
    module = importlib.import_module(name)
    public = getattr(module, "__all__", () if defines_nothing(module) else None)
    assert isinstance(public, tuple)
    assert list(public) == sorted(public, key=sort_key)
    assert [entry for entry in public if not hasattr(module, entry)] == []


@pytest.mark.parametrize("name", module_names())
def test_a_module_begins_with_a_docstring(name: str) -> None:
    assert (importlib.import_module(name).__doc__ or "").strip()


def defines_nothing(module: types.ModuleType) -> bool:
    """Whether a module is a docstring only, as a package's often is."""
    tree = ast.parse(pathlib.Path(str(module.__file__)).read_text(encoding="utf-8"))
    return len(tree.body) == 1


def sort_key(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest, as ruff sorts `__all__`."""
    rank = 0 if name.isupper() else 1 if name[:1].isupper() else 2
    return rank, name
