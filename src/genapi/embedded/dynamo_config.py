"""Flags of a Dynamo deployment: its frontend and its workers."""

from dataclasses import dataclass
from typing import Literal

__all__ = ("DynamoFlags",)

Role = Literal["aggregated", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class DynamoFlags:
    """A Dynamo deployment to build; the defaults are those of RL workers behind one frontend."""

    model: str = "tiny"
    namespace: str = "dynamo"
    component: str = "backend"
    role: Role = "aggregated"
    family: Literal["vllm", "sidecar", "collective", "mocker"] = "vllm"
    weight_transfer: bool = True
    extension: bool = False
    """Whether a worker extension adds methods of somebody's own to the engine."""
    tensor_parallel_size: int = 1
    inference_generate: bool = False
    """Whether the frontend serves `/inference/v1/generate`."""
    migration_limit: int = 0
    older: bool = False
    """Whether the list of workers is in the older dialect."""
    prefill: int = 0
    """How many of the workers prefill; the others decode then."""
    tell_versions: bool = False
    """Whether replies tell the label of each token, as no worker of Dynamo's own does."""
