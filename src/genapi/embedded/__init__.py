"""The embedded engine: a small policy served over the real engines' protocols, failures included.

In memory (`Cluster`, `Worker`) or behind a socket (`python -m genapi.embedded`). It shares no code
with the rest of genapi, so that neither can hide the other's mistake.
"""

from .calls import ByteStream, Call, Reply
from .clock import Clock, RealClock, VirtualClock
from .dynamo import DynamoConfig
from .engine import Engine, EngineConfig
from .faults import Action, Fault, FaultPlan, parse_faults
from .sglang import SglangConfig
from .vllm import VllmConfig
from .worker import Cluster, Worker, read_config

__all__ = (
    "Action",
    "ByteStream",
    "Call",
    "Clock",
    "Cluster",
    "DynamoConfig",
    "Engine",
    "EngineConfig",
    "Fault",
    "FaultPlan",
    "RealClock",
    "Reply",
    "SglangConfig",
    "VirtualClock",
    "VllmConfig",
    "Worker",
    "parse_faults",
    "read_config",
)
