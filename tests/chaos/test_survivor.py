"""One of two real workers is killed while tensors are on their way to both."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import pytest

import genapi
from genapi import Outcome
from genapi.events import AdminCalled, Event
from genapi.types.worker import Evidence, FenceStrength, Recovery
from tests.engines.kit.judge import Judge
from tests.engines.test_vllm import LIMITS, PROMPT, request, target, weights

if TYPE_CHECKING:
    import pathlib

    from tests.engines.conftest import Models, Oracle, Serve
    from tests.engines.kit.server import Server

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.anyio,
]

ANSWERS_WITHIN_S = 5.0
GROUP_S = 60.0
"""How long a receiver would wait for the dead if nobody told it."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def publisher(fleet: genapi.Fleet) -> genapi.WeightPublisher:
    # Several buckets, of which the first arrives.
    transport = genapi.weights.Gloo(timeout_s=GROUP_S, bucket_tensors=8, stage_bytes=0)
    return genapi.WeightPublisher(fleet, transport=transport, timeouts=LIMITS)


def engine_answers(server: Server) -> float:
    """When the engine itself has answered; it does not while it waits for tensors."""
    status, body = server.request("GET", "/is_sleeping", timeout_s=GROUP_S)
    assert status == 200, body
    return time.monotonic()


class Killer:
    """Kills a worker when the first bucket has been taken, and asks another one how it is."""

    def __init__(self, victim: Server, other: Server) -> None:
        self.victim = victim
        self.other = other
        self.armed = False
        self.first: AdminCalled | None = None
        self.killed_at = 0.0
        self.answered_at = 0.0
        self._hit = anyio.Event()

    def observe(self, event: Event) -> None:
        if self.armed and isinstance(event, AdminCalled) and event.operation == "update":
            self.armed = False
            self.first = event
            self.killed_at = time.monotonic()
            self.victim.kill()
            self._hit.set()

    async def ask(self) -> None:
        await self._hit.wait()
        self.answered_at = await anyio.to_thread.run_sync(engine_answers, self.other)


async def test_who_survives_a_death_in_mid_transfer_answers_in_5_s_and_takes_the_next_weights(
    serve: Serve, models: Models, oracle: Oracle, tmp_path: pathlib.Path
) -> None:
    board = f"file:{tmp_path / 'board'}"
    with serve(2) as servers:
        killer = Killer(servers[1], servers[0])
        async with genapi.connect(
            target(*servers), run="survivor", board=board, observe=killer.observe
        ) as fleet:
            await fleet.wait_ready(timeout_s=60)
            async with publisher(fleet) as p:
                await p.publish(0, weights(models.seed0))
                killer.armed = True
                with anyio.fail_after(120):
                    async with anyio.create_task_group() as group:
                        group.start_soon(killer.ask)
                        with pytest.raises(genapi.PublishError) as caught:
                            await p.publish(1, weights(models.seed1))
        assert killer.first is not None
        assert killer.first.error is None, "no tensor had arrived"
        took_s = killer.answered_at - killer.killed_at
        print(f"\nthe survivor's engine answered {took_s:.2f} s after the kill")  # noqa: T201
        assert took_s < ANSWERS_WITHIN_S
        left, dead = caught.value.report.receipts
        assert (left.outcome, left.evidence) == (Outcome.DIRTY, Evidence.PEER_LOST)
        assert left.recovery is Recovery.CLOSE_THEN_REPUBLISH
        assert dead.recovery is Recovery.RESTART_THEN_PUBLISH
        assert dead.fence.strength is FenceStrength.DEAD

        calls: list[str] = []

        def note(event: Event) -> None:
            if isinstance(event, AdminCalled):
                calls.append(event.operation)

        async with genapi.connect(target(servers[0]), board=board, observe=note) as alone:
            judge = Judge(oracle, {2: models.seed1})
            async with publisher(alone) as p:
                again = await p.publish(2, weights(models.seed1))
                assert again.committed
                assert "heal" in calls
                judge.check(await alone.generate(request(tokens=64)), PROMPT)
            judge.close()
