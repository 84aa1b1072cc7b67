"""What is published is served exactly, on every worker, and the first weights come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

import genapi
from genapi import Outcome
from genapi.types.worker import Evidence
from tests.engines.conftest import environment
from tests.engines.kit.judge import Judge
from tests.engines.test_vllm import LIMITS, PROMPT, everywhere, target, weights

if TYPE_CHECKING:
    from genapi.weights import WeightSource
    from tests.engines.conftest import Models, Oracle
    from tests.engines.kit.server import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.anyio]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def there_and_back(
    fleet: genapi.Fleet,
    p: genapi.WeightPublisher,
    models: Models,
    judge: Judge,
    *,
    there: WeightSource | None = None,
) -> None:
    """Publish seed 1 as step 1 and seed 0 as step 2: the fleet serves exactly what each brought.

    Args:
        there: seed 1, where it does not come from its folder.
    """
    pauses = []
    for step, source in ((1, there or weights(models.seed1)), (2, weights(models.seed0))):
        report = await p.publish(step, source)
        workers = (await fleet.snapshot()).workers
        assert [r.outcome for r in report.receipts] == [Outcome.COMMITTED] * len(workers)
        assert [r.evidence for r in report.receipts] == [Evidence.OWN_LABEL] * len(workers)
        pauses += [r.paused_s for r in report.receipts]
        assert {w.label for w in workers} == {report.version.label}
        assert {w.version for w in workers} == {report.version}
        for reply in await everywhere(fleet):
            assert reply.output.policy.oldest == report.version
            assert reply.output.policy.is_pure
            judge.check(reply, PROMPT)
    print(f"\npaused_s per worker: {[round(s, 3) for s in pauses]}")


@pytest.mark.parametrize(("name", "packed"), [("vllm", True), ("sglang", True), ("sglang", False)])
async def test_published_weights_are_served_exactly_and_the_first_ones_come_back(
    name: str, packed: bool, models: Models, oracle: Oracle, request: pytest.FixtureRequest
) -> None:
    environment(name)
    pair: Sequence[Server] = request.getfixturevalue(f"{name}_pair")
    transport = genapi.weights.Gloo(timeout_s=20, bucket_tensors=9, packed=packed)
    async with genapi.connect(target(*pair), run=f"exact-{packed}") as fleet:
        await fleet.wait_ready(timeout_s=60)
        judge = Judge(oracle, {1: models.seed1, 2: models.seed0})
        async with genapi.WeightPublisher(fleet, transport=transport, timeouts=LIMITS) as p:
            await p.adopt(0)
            first = await everywhere(fleet)
            await there_and_back(fleet, p, models, judge)
            last = await everywhere(fleet)
            assert {r.output.token_ids for r in last} == {r.output.token_ids for r in first}
        judge.close()
