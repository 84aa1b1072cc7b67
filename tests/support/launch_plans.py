"""Deployments of the built-in launches, at places that a test can count on."""

from collections.abc import Mapping
from typing import Any

from genapi.providers import sglang, vllm
from genapi.providers.dynamo import Launch as DynamoLaunch
from genapi.types.config import Key
from genapi.types.launch import Deployment, Launchable, Place

__all__ = ("KINDS", "planned", "texts")

KINDS: Mapping[str, type[Any]] = {
    "vllm": vllm.Launch,
    "sglang": sglang.Launch,
    "dynamo": DynamoLaunch,
}


def planned(config: Launchable, *, first_port: int = 20001) -> Deployment:
    """The deployment with ports that count upwards, in the order of what is needed."""
    port, places = first_port, {}
    for need in config.needs:
        numbers: dict[str, int] = {}
        for name, wish in need.ports.items():
            numbers[name] = wish.number or port
            port += 1
        places[need.component] = Place(
            folder=f"/run/{need.component}-1", ports=numbers, shared="/run/shared"
        )
    return config.plan(places)


def texts(values: Mapping[str, str | Key]) -> dict[str, str]:
    return {
        name: value.reveal() if isinstance(value, Key) else value for name, value in values.items()
    }
