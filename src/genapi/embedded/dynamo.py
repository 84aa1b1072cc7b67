"""A Dynamo deployment over embedded engines: a frontend, the list of its workers, and these."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from .clock import Clock
from .dynamo_config import DynamoFlags
from .dynamo_frontend import Frontend
from .dynamo_worker import DynamoWorker
from .engine import Engine, EngineConfig
from .protocol import Identity

__all__ = ("DynamoConfig",)


@dataclass(frozen=True, slots=True)
class DynamoConfig(DynamoFlags):
    """A Dynamo deployment to build."""

    def tune(self, engine: EngineConfig) -> EngineConfig:
        """The engine's configuration: for RL, the worker asks for processed scores."""
        return replace(engine, logprobs_mode="processed_logprobs")

    def spread(self, count: int) -> Sequence[Self]:
        """The workers, of whom the last ones prefill for the others.

        Raises:
            ValueError: Nobody would be left to decode.
        """
        if not self.prefill:
            return [self] * count
        if self.prefill >= count:
            raise ValueError(f"prefill={self.prefill} of workers={count} leaves nobody to decode")
        decodes = [replace(self, role="decode")] * (count - self.prefill)
        return [*decodes, *[replace(self, role="prefill")] * self.prefill]

    def front(self, clock: Clock, *, epoch_s: float) -> Frontend:
        """The frontend, and the listener of discovery beside it."""
        return Frontend(self, clock, epoch_s=epoch_s)

    def build(self, engine: Engine, identity: Identity) -> DynamoWorker:
        """A worker that just came up."""
        return DynamoWorker(self, engine, identity)
