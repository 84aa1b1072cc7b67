"""Stands in for what engines import at their start and has no build for a CPU.

Python imports a module of this name by itself; the kit puts its folder on the path of the servers
alone, and `STAND_INS` names the packages. SGLang 0.5.23 imports `sgl_kernel`, `triton` and
`torchvision` whatever model is served, Dynamo 1.6.1's vLLM worker `torchvision`; nothing in them is
called for a plain Llama. The rule of this file: what is installed is left alone; a stand-in can be
imported, looked into, inherited from and, for triton's decorators, called; any other call raises.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ("PACKAGES",)

PACKAGES = tuple(os.environ["STAND_INS"].split(","))


def _is_special(name: str) -> bool:
    return name.startswith("__")


class _Kind(type):
    """A class whose every attribute is there, for enumerations."""

    def __getattr__(cls, name: str) -> str:
        if _is_special(name):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Anything(Exception, metaclass=_Kind):  # noqa: N818 - some are caught as errors
    """A base, an annotation, an error: whatever a capitalised name is used for."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def __class_getitem__(cls, _: object) -> type:
        return cls


class _StandIn(types.ModuleType):
    """A module in which everything is found."""

    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if _is_special(name):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        found: Any
        if name[0].isupper() or full == "triton.language.constexpr":
            found = _Kind(name, (_Anything,), {"__module__": self.__name__})
        else:
            __import__(full)
            found = sys.modules[full]
        setattr(self, name, found)
        return found

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if not self.__name__.startswith("triton."):
            raise NotImplementedError(f"{self.__name__} is a stand-in: there is no build for a CPU")
        if len(arguments) == 1 and callable(arguments[0]) and not options:
            return arguments[0]
        return _as_it_is

    def __bool__(self) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __contains__(self, _: object) -> bool:
        return False


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last to be asked, so only for what nobody else has found."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        parent = sys.modules.get(fullname.rpartition(".")[0])
        if fullname in PACKAGES or isinstance(parent, _StandIn):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "triton":  # the two that are called outside kernels
            vars(module)["cdiv"] = lambda a, b: -(a // -b)
            vars(module)["next_power_of_2"] = lambda n: 1 << max(n - 1, 0).bit_length()


sys.meta_path.append(_Finder())
