"""The probe of a publication: every worker scores the same few ids.

The rule of this file: what is compared comes from the worker itself, past routing and fences, and
from no cache.
"""

import math
import uuid
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from genapi.errors import ConfigError, ProviderError, ReplyError
from genapi.fleet import Fleet
from genapi.providers.base import WorkerFacts
from genapi.types.arguments import nats
from genapi.types.ids import TokenIds, WorkerId
from genapi.types.request import GenerateRequest, SamplingParams

__all__ = ("PROBE_IDS", "Probe")

PROBE_IDS = TokenIds((11, 42, 23, 58, 35, 17, 60, 29, 48, 13, 54, 37))
"""Valid where a vocabulary has 64 ids or more; above those that are special by custom."""


@dataclass(slots=True)
class Probe:
    """What every worker is asked to score.

    Attributes:
        ids: the token ids; the first has no score.
        tolerance: most nats between two workers.
        max_gap: most nats between a worker and the trainer.
        tried: workers that have scored them.

    Raises:
        ConfigError: fewer than two ids, or a bound that is none.
    """

    ids: TokenIds = PROBE_IDS
    tolerance: float = 1e-3
    max_gap: float = 0.1
    tried: set[WorkerId] = field(default_factory=set)

    def __post_init__(self) -> None:
        if len(self.ids) < 2:  # noqa: PLR2004 - one to start from and one to score
            raise ConfigError("probe_ids: pass at least two token ids")
        for name in ("tolerance", "max_gap"):
            setattr(self, name, nats(f"probe_{name}", getattr(self, name)))

    def trainer_scores(self, logprobs: Any) -> tuple[float, ...]:
        """The trainer's own numbers as the workers' are: without the first, which has none.

        Raises:
            ConfigError: not one for each id, or one that is no number.
        """
        try:
            values = np.asarray(logprobs, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"probe_logprobs are no numbers: {error}") from None
        if values.shape != (len(self.ids),) or not np.isfinite(values[1:]).all():
            raise ConfigError(
                f"probe_logprobs of shape {values.shape}: pass the trainer's log-probability of "
                f"each of the {len(self.ids)} probe ids given those before it; the first is not "
                "looked at"
            )
        return tuple(values[1:].tolist())

    async def check(
        self, fleet: Fleet, worker: WorkerId, url: str, facts: WorkerFacts, *, timeout_s: float
    ) -> None:
        """Raise while nothing is touched yet when a worker cannot be asked to score the ids.

        Each worker that serves is tried once, without scores: those of broken weights may be no
        numbers, and what is published next mends them.

        Raises:
            UnsupportedError: the server gives no scores.
            ConfigError: an id beyond its vocabulary.
            GenAPIError: it refuses the ids, or does not answer.
        """
        facts.capabilities.require("probe", where=url)
        fleet.provider.check(self._request(scored=True), facts.capabilities)
        if facts.paused is False and worker not in self.tried:
            request = self._request(scored=False)
            await fleet.ask(url, request, operation="score", timeout_s=timeout_s)
            self.tried.add(worker)

    async def score(self, fleet: Fleet, url: str, *, timeout_s: float) -> tuple[float, ...]:
        """The log-probability of each id but the first, by the worker at `url`.

        Raises:
            GenAPIError: it does not say.
        """
        request, count = self._request(scored=True), len(self.ids) - 1
        try:
            reply = await fleet.ask(url, request, operation="score", timeout_s=timeout_s)
        except ProviderError as error:
            if error.code != "not_finite":
                raise
            return (math.nan,) * count
        if reply.prompt_logprobs is None or len(reply.prompt_logprobs) != count + 1:
            raise ReplyError(f"{url} gave no scores of the {count + 1} probe ids", url=url)
        return tuple(reply.prompt_logprobs[1:].tolist())

    def _request(self, *, scored: bool) -> GenerateRequest:
        top = 0 if scored else None
        return GenerateRequest(
            prompt_token_ids=self.ids,
            sampling=SamplingParams(
                max_tokens=1, temperature=0.0, logprobs=None, prompt_logprobs=top
            ),
            cache_salt=f"genapi-probe-{uuid.uuid4().hex}",
        )
