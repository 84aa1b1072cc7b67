"""Engines' protocols: codecs, flows and capabilities. No I/O, no clock, no randomness.

A provider's package is imported on first use: `genapi.providers.vllm.Options`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from genapi.providers import dynamo, sglang, vllm

__all__ = ("dynamo", "sglang", "vllm")


def __getattr__(name: str) -> Any:
    from genapi.providers.registry import package  # noqa: PLC0415 - on first use

    found = None if name.startswith("_") else package(name)
    if found is None:
        raise AttributeError(f"module 'genapi.providers' has no attribute {name!r}")
    return found
