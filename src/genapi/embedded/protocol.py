"""What a protocol is to a worker: a configuration that builds a server over an engine.

A further protocol is one module with such a configuration and one line in `worker.PROTOCOLS`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from .calls import Call, Reply
from .clock import Clock
from .engine import Engine, EngineConfig
from .faults import Fault

__all__ = ("Front", "Identity", "Process", "Server", "ServerConfig")


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


class Process(Protocol):
    """The life of one server, as what stands before it sees it."""

    ended: list[tuple[Server, float]]

    @property
    def alive(self) -> bool:
        """Whether it takes connections."""
        ...

    @property
    def server(self) -> Server:
        """What answers in the present life, or did in the last one."""
        ...


class Front(Protocol):
    """What stands before the servers of a deployment and has addresses of its own."""

    addresses: int
    """How many: they come before those of the servers."""

    def attach(self, processes: Sequence[Process], urls: Sequence[str]) -> None:
        """Name the servers behind it, and where each is administered."""
        ...

    async def handle(self, address: int, call: Call) -> Reply:
        """Answer one call to one of its addresses."""
        ...


class ServerConfig(Protocol):
    """Flags and environment of a server."""

    def tune(self, engine: EngineConfig) -> EngineConfig:
        """The engine's configuration with what this protocol's engine does its own way.

        Raises:
            ValueError: This protocol's engine has nothing like it.
        """
        ...

    def spread(self, count: int) -> Sequence[Self]:
        """What each of so many servers of one deployment is built from."""
        ...

    def front(self, clock: Clock, *, epoch_s: float) -> Front | None:
        """What stands before the servers; None = they are asked themselves."""
        ...

    def build(self, engine: Engine, identity: Identity) -> Server:
        """A fresh server over a fresh engine."""
        ...
