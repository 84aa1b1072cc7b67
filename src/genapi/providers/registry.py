"""Names of providers and of the embedded engine; the only place that imports by string."""

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, cast

from genapi.errors import ConfigError
from genapi.providers.base import Provider

__all__ = ("embedded_cluster_type", "package", "provider", "provider_names")

_BUILT_IN = {
    "dynamo": "genapi.providers.dynamo.provider:Dynamo",
    "sglang": "genapi.providers.sglang.provider:SGLang",
    "vllm": "genapi.providers.vllm.provider:VLLM",
}
_GROUP = "genapi.providers"
_EMBEDDED = "genapi.embedded:Cluster"


def _load(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


def provider_names() -> tuple[str, ...]:
    """Every provider that can be named in a target."""
    return tuple(sorted({*_BUILT_IN, *(point.name for point in entry_points(group=_GROUP))}))


def package(name: str) -> ModuleType | None:
    """The package of a built-in provider, where its request options live; None = there is none."""
    return import_module(f"genapi.providers.{name}") if name in _BUILT_IN else None


@cache
def provider(name: str) -> Provider:
    """The provider of that name.

    Raises:
        ConfigError: there is none.
    """
    if name in _BUILT_IN:
        return cast("Provider", _load(_BUILT_IN[name])())
    for point in entry_points(group=_GROUP, name=name):
        return cast("Provider", point.load()())
    known = ", ".join(provider_names())
    message = f"unknown provider {name!r}; known are {known}, and embedded for servers in memory"
    raise ConfigError(message)


def embedded_cluster_type() -> Any:
    """The embedded engine's cluster class, which an in-process target needs."""
    return _load(_EMBEDDED)
