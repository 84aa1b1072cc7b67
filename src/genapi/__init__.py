"""genapi: a provider-neutral generation SDK for RL rollouts.

Only the public names live here, and each is resolved on first use: importing genapi loads no
other module of the package and no third-party one. To publish a name, give it a home in `_HOME`,
the same import under TYPE_CHECKING, and a place in `__all__`; a test compares the three.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from genapi import providers, weights
    from genapi.errors import (
        AuthError,
        ConfigError,
        FleetError,
        GenAPIError,
        GenAPIWarning,
        IncompleteError,
        NotReadyError,
        OverloadedError,
        OverlongPromptError,
        ProviderError,
        PublishError,
        ReplyError,
        StalePolicyError,
        SupersededError,
        TransportError,
        UnsupportedError,
    )
    from genapi.fleet import Fleet, connect
    from genapi.launcher import launch
    from genapi.offpolicy import DropReason, OffPolicyWindow
    from genapi.publisher import WeightPublisher
    from genapi.types.config import FleetConfig, PublishTimeouts, RetryPolicy, Topology
    from genapi.types.ids import TokenIds, WorkerId
    from genapi.types.policy import PolicyTrace, PolicyVersion, Span
    from genapi.types.request import GenerateRequest, SamplingParams
    from genapi.types.response import (
        Finished,
        FinishReason,
        GenerateOutput,
        GenerateResponse,
        TokenChunk,
    )
    from genapi.types.worker import Outcome, PublishReport

__all__ = (
    "AuthError",
    "ConfigError",
    "DropReason",
    "FinishReason",
    "Finished",
    "Fleet",
    "FleetConfig",
    "FleetError",
    "GenAPIError",
    "GenAPIWarning",
    "GenerateOutput",
    "GenerateRequest",
    "GenerateResponse",
    "IncompleteError",
    "NotReadyError",
    "OffPolicyWindow",
    "Outcome",
    "OverloadedError",
    "OverlongPromptError",
    "PolicyTrace",
    "PolicyVersion",
    "ProviderError",
    "PublishError",
    "PublishReport",
    "PublishTimeouts",
    "ReplyError",
    "RetryPolicy",
    "SamplingParams",
    "Span",
    "StalePolicyError",
    "SupersededError",
    "TokenChunk",
    "TokenIds",
    "Topology",
    "TransportError",
    "UnsupportedError",
    "WeightPublisher",
    "WorkerId",
    "connect",
    "launch",
    "providers",
    "weights",
)

_HOME = {
    "AuthError": "genapi.errors",
    "ConfigError": "genapi.errors",
    "DropReason": "genapi.offpolicy",
    "FinishReason": "genapi.types.response",
    "Finished": "genapi.types.response",
    "Fleet": "genapi.fleet",
    "FleetConfig": "genapi.types.config",
    "FleetError": "genapi.errors",
    "GenAPIError": "genapi.errors",
    "GenAPIWarning": "genapi.errors",
    "GenerateOutput": "genapi.types.response",
    "GenerateRequest": "genapi.types.request",
    "GenerateResponse": "genapi.types.response",
    "IncompleteError": "genapi.errors",
    "NotReadyError": "genapi.errors",
    "OffPolicyWindow": "genapi.offpolicy",
    "Outcome": "genapi.types.worker",
    "OverloadedError": "genapi.errors",
    "OverlongPromptError": "genapi.errors",
    "PolicyTrace": "genapi.types.policy",
    "PolicyVersion": "genapi.types.policy",
    "ProviderError": "genapi.errors",
    "PublishError": "genapi.errors",
    "PublishReport": "genapi.types.worker",
    "PublishTimeouts": "genapi.types.config",
    "ReplyError": "genapi.errors",
    "RetryPolicy": "genapi.types.config",
    "SamplingParams": "genapi.types.request",
    "Span": "genapi.types.policy",
    "StalePolicyError": "genapi.errors",
    "SupersededError": "genapi.errors",
    "TokenChunk": "genapi.types.response",
    "TokenIds": "genapi.types.ids",
    "Topology": "genapi.types.config",
    "TransportError": "genapi.errors",
    "UnsupportedError": "genapi.errors",
    "WeightPublisher": "genapi.publisher",
    "WorkerId": "genapi.types.ids",
    "connect": "genapi.fleet",
    "launch": "genapi.launcher",
    "providers": "genapi",
    "weights": "genapi",
}


if not TYPE_CHECKING:  # a type checker that saw this function would take any name for public

    def __getattr__(name: str) -> Any:
        home = _HOME.get(name)
        if home is None:
            raise AttributeError(f"module 'genapi' has no attribute {name!r}")
        if home == "genapi":
            return importlib.import_module(f"genapi.{name}")
        value = getattr(importlib.import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
