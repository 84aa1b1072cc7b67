"""How a worker is administered, told from the routes that it advertises.

The rule of this file: two deployments of one engine advertise routes that do not fit each other, so
nothing is told from an engine's name, and no route is asked that is not advertised.
"""

from collections.abc import Collection
from enum import StrEnum
from typing import assert_never

__all__ = ("LOAD", "WEIGHTS", "Family", "family_of", "lacking", "no_files")


class Family(StrEnum):
    """Whose routes a worker has."""

    VLLM = "vllm"
    """Dynamo's Python worker of vLLM: `engine_rpc` names what the engine is to do."""
    SIDECAR = "sidecar"
    """The native sidecar: `control/*` and `update/*`, the open contract of engines."""
    COLLECTIVE = "collective"
    """The native sidecar whose engine takes weights by the collective RPC of its own server."""
    SGLANG = "sglang"
    """SGLang's own routes, behind the worker's server."""


_CONTROL = frozenset(
    {
        "control/get_weight_version",
        "control/is_paused",
        "control/pause_generation",
        "control/resume_generation",
        "update/update_weight_version",
    }
)
_CONTROLS = {
    Family.VLLM: frozenset(
        {"get_weight_version", "pause_generation", "resume_generation", "set_weight_version"}
    ),
    Family.SIDECAR: _CONTROL,
    Family.COLLECTIVE: _CONTROL,
    Family.SGLANG: frozenset(
        {
            "continue_generation",
            "control/update_weight_version",
            "get_weight_version",
            "pause_generation",
        }
    ),
}
"""What it takes to pause a worker and to read and set its label."""

WEIGHTS = {
    Family.VLLM: frozenset({"init_weights_update_group", "update_weights_from_distributed"}),
    Family.SIDECAR: frozenset(
        {
            "update/finish_weight_update",
            "update/init_weight_transfer_engine",
            "update/start_weight_update",
            "update/update_weights",
        }
    ),
    Family.COLLECTIVE: frozenset[str](),
    Family.SGLANG: frozenset(
        {"control/update_weights_from_distributed", "init_weights_update_group"}
    ),
}
"""What it takes to move weights into it, besides."""


def family_of(routes: Collection[str], *, has_server: bool) -> Family | None:
    """The family that these routes are of; None = it cannot be administered.

    Args:
        routes: what a worker advertises.
        has_server: whether its engine has an HTTP server of its own (`admin_base_url`).
    """
    here = frozenset(routes)
    if here >= _CONTROLS[Family.SGLANG]:
        return Family.SGLANG
    if here >= _CONTROLS[Family.VLLM]:
        return Family.VLLM
    if here >= _CONTROL:
        by_server = has_server and not here >= WEIGHTS[Family.SIDECAR]
        return Family.COLLECTIVE if by_server else Family.SIDECAR
    return None


def lacking(family: Family, routes: Collection[str]) -> tuple[str, ...]:
    """The routes that a worker lacks to be sent weights."""
    return tuple(sorted(WEIGHTS[family] - frozenset(routes)))


LOAD = "update_weights_from_disk"
"""The route of the Python worker that loads a directory."""


def no_files(family: Family, routes: Collection[str], *, has_server: bool) -> str | None:
    """Why workers of this family cannot be told to load files, with the remedy; None = they can.

    Args:
        family: whose routes they have.
        routes: what a worker advertises.
        has_server: whether its engine has an HTTP server of its own (`admin_base_url`).
    """
    match family:
        case Family.VLLM:
            return None if LOAD in routes else f"it does not advertise {LOAD}"
        case Family.SIDECAR | Family.COLLECTIVE:
            if has_server:
                return None
            return (
                "the sidecar has no route for it: name it the HTTP server of its engine, which has "
                "one, or use genapi.weights.Gloo()"
            )
        case Family.SGLANG:
            return (
                "what a load whose answer was lost does to SGLang behind Dynamo was never seen: "
                "use genapi.weights.Gloo()"
            )
        case _:
            assert_never(family)
