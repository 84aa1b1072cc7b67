"""What a protocol is to a worker: a configuration that builds a server over an engine.

A further protocol is one module with such a configuration and one line in `worker.PROTOCOLS`.
"""

from dataclasses import dataclass
from typing import Protocol

from .calls import Call, Reply
from .engine import Engine, EngineConfig
from .faults import Fault

__all__ = ("Identity", "Server", "ServerConfig")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a server process is. A restart makes a new one."""

    instance_id: str
    epoch_s: float
    """Seconds since 1970 at time 0 of the engine's clock."""


class Server(Protocol):
    """The API server of one process."""

    @property
    def holds(self) -> bool:
        """Whether requests that come now wait, for a resume."""
        ...

    async def handle(self, call: Call, fault: Fault | None) -> Reply:
        """Answer one call; `fault` is one that only the protocol can act out.

        Raises:
            ConnectionResetError: The process was killed meanwhile.
        """
        ...


class ServerConfig(Protocol):
    """Flags and environment of a server."""

    def tune(self, engine: EngineConfig) -> EngineConfig:
        """The engine's configuration with what this protocol's engine does its own way.

        Raises:
            ValueError: This protocol's engine has nothing like it.
        """
        ...

    def build(self, engine: Engine, identity: Identity) -> Server:
        """A fresh server over a fresh engine."""
        ...
