"""The contract suite on real servers: the bodies that everything embedded runs, unchanged.

Greedy tokens are held against `transformers` on the weights that a body expects. On Dynamo it runs
in `test_dynamo.py`, with the deployment that is there.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file

import genapi
from genapi.testing.contract import PROFILES, Profile, Shared, suite
from tests.engines.test_vllm import LIMITS, PROMPT
from tests.support.cases import marked

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from genapi.testing.contract import CarrierName, Case, Servers
    from tests.engines.conftest import Models, Reference
    from tests.engines.kit.server import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.anyio]

PAIRS = {"vllm": "vllm_pair", "sglang": "sglang_pair"}
"""The fixture that brings two servers of a provider."""


class Real:
    """Two servers for each provider, which several tests share.

    Attributes:
        pair: the servers of the test that runs.
        front: what stands before them.
        models: the weights of seed 0 and seed 1.
        reference: what they have to answer.
    """

    name: CarrierName = "real"
    prompt = PROMPT
    long = 3500
    timeouts = LIMITS
    patience_s = 60.0
    pair: tuple[Server, ...]
    front: str | None = None
    models: Models
    reference: Reference

    @asynccontextmanager
    async def servers(
        self, profile: Profile, count: int, flags: Mapping[str, str]
    ) -> AsyncIterator[Servers]:
        assert not flags
        # What lists its servers lists all of them.
        pair = self.pair if self.front else self.pair[:count]
        shared = Shared(tuple(server.address for server in pair), self.front)
        async with shared.put_back(profile, self):
            yield shared

    def sender(self) -> genapi.weights.Gloo:
        return genapi.weights.Gloo(timeout_s=20)

    def weights(self, seed: int) -> genapi.weights.WeightSource:
        return genapi.weights.from_safetensors(self._folder(seed))

    def tensors(self, seed: int) -> dict[str, Any]:
        return dict(load_file(self._folder(seed) / "model.safetensors"))

    def check(self, seed: int, prompt: Sequence[int], token_ids: Sequence[int]) -> None:
        expected = self.reference(self._folder(seed), prompt, len(token_ids))
        expected.assert_said_by(token_ids)

    def _folder(self, seed: int) -> Any:
        return self.models.seed1 if seed else self.models.seed0


REAL = Real()
CASES = suite([profile for profile in PROFILES if profile.provider in PAIRS], [REAL])


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def carried(
    case: Case, models: Models, reference: Reference, request: pytest.FixtureRequest
) -> Case:
    """The case, with the servers that it needs."""
    REAL.pair = request.getfixturevalue(PAIRS[case.profile.provider])
    REAL.models, REAL.reference = models, reference
    return case


@pytest.mark.parametrize("case", marked(CASES))
async def test_on_real_servers(carried: Case) -> None:
    await carried.run()
