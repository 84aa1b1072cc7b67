"""A process that only generates: what it learns of versions, caches, pauses and fences, and when.

It never asks for a snapshot. Everything happens in the time of a simulated loop.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import pytest

import genapi
from genapi import GenerateResponse, PolicyVersion
from genapi.board import Board, MemoryBoard
from genapi.embedded import Cluster, Fault
from genapi.events import AdminCalled, Event
from tests.contract.embedded import QUICK, greedy, request, weights
from tests.support.simulated import LoopClock, simulate
from tests.support.spread import Spread

REFRESH_S = 1.0
LIMIT_S = 20.0
PROMPT = tuple(1 + (3 * k) % 60 for k in range(40))
"""Long enough for two blocks of the prefix cache."""

boards = pytest.mark.parametrize("has_board", [True, False])


@dataclass
class Processes:
    """A trainer's process and another one, on the same workers."""

    cluster: Cluster
    trainer: genapi.Fleet
    publisher: genapi.WeightPublisher
    other: genapi.Fleet
    events: list[Event]
    """What happened in the other one."""
    longest_s: float = 0.0
    """How long the slowest of its requests took."""

    async def publish(self, step: int, **plan: str) -> None:
        source = genapi.weights.from_tensors(weights(step))
        await self.publisher.publish(step, source, **plan)  # type: ignore[arg-type]

    async def ask(self, **more: object) -> GenerateResponse:
        since = anyio.current_time()
        reply = await self.other.generate(request(timeout_s=LIMIT_S, **more))  # type: ignore[arg-type]
        self.longest_s = max(self.longest_s, anyio.current_time() - since)
        return reply

    async def keep_asking(self, seconds: float = 4 * REFRESH_S) -> list[GenerateResponse]:
        """Replies to requests that follow each other for so long."""
        until, replies = anyio.current_time() + seconds, []
        while anyio.current_time() < until:
            replies.append(await self.ask(tokens=1))
            await anyio.sleep(REFRESH_S / 10)
        return replies


@asynccontextmanager
async def processes(
    workers: int = 2, *, has_board: bool, routed: bool = False, refresh_s: float = REFRESH_S
) -> AsyncIterator[Processes]:
    cluster = Cluster.from_query({"workers": str(workers)}, LoopClock())
    board: Board | None = MemoryBoard() if has_board else None
    events: list[Event] = []
    spread = Spread(cluster)
    other = genapi.connect(
        spread.routed if routed else spread.direct,
        transport=spread,
        run="r",
        board=board,
        refresh_s=refresh_s,
        observe=events.append,
    )
    trainer = genapi.connect(spread.direct, transport=spread, run="r", board=board)
    async with trainer, other:
        await trainer.wait_ready(timeout_s=5)
        await other.wait_ready(timeout_s=5)
        publisher = genapi.WeightPublisher(
            trainer, transport=genapi.weights.Memory(bucket_tensors=1), timeouts=QUICK
        )
        await publisher.adopt(0)
        yield Processes(cluster, trainer, publisher, other, events)
    await spread.aclose()


async def streamed(fleet: genapi.Fleet, asked: genapi.GenerateRequest) -> GenerateResponse:
    async with fleet.stream(asked) as events:
        *_, last = [event async for event in events]
    assert isinstance(last, genapi.Finished)
    return last.reply


@boards
def test_it_learns_what_was_committed_while_it_generates(has_board: bool) -> None:
    async def main() -> None:
        async with processes(has_board=has_board) as p:
            for step in (1, 2):
                await p.publish(step)
                replies = await p.keep_asking()
                assert p.other.membership.committed == PolicyVersion(run="r", step=step)
                assert replies[-1].output.policy.newest == PolicyVersion(run="r", step=step)

    simulate(main)


@boards
def test_salts_keep_it_from_entries_of_other_versions_once_it_knows(has_board: bool) -> None:
    async def main() -> None:
        async with processes(1, has_board=has_board) as p:
            stale = {"in_flight_kv": "stale", "prefix_cache": "salt"}
            for step in (1, 2):
                await p.publish(step, **stale)
                await p.keep_asking()
                reply = await p.ask(prompt=PROMPT, tokens=30)
                assert reply.output.token_ids == greedy(step, list(PROMPT), 30)

    simulate(main)


def test_a_board_says_what_the_tokens_of_a_version_rest_on() -> None:
    async def main() -> None:
        async with processes(has_board=True) as p:
            await p.publish(1)
            await p.keep_asking()
            assert (await p.ask()).output.policy.is_pure
            await p.publish(2, in_flight_kv="stale", prefix_cache="stale")
            await p.keep_asking()
            trace = (await p.ask()).output.policy
            assert not trace.is_pure
            assert [span.context for span in trace.spans] == [None]

    simulate(main)


@boards
@pytest.mark.parametrize("routed", [False, True])
def test_a_publication_that_was_held_is_an_error_soon_and_no_wait(
    routed: bool, has_board: bool
) -> None:
    async def main() -> None:
        async with processes(has_board=has_board, routed=routed) as p:
            await p.publish(1)
            await p.keep_asking()
            p.cluster.workers[1].faults.add(Fault("/update_weights", "peer_lost", nth=2))
            with pytest.raises(genapi.PublishError):
                await p.publish(2)
            await anyio.sleep(3 * REFRESH_S)
            since = anyio.current_time()
            # Without a board nobody can say whether the update still goes on.
            expected = genapi.FleetError if has_board else genapi.TransportError
            with pytest.raises(expected, match=r"no worker may get|middle of an update"):
                await p.ask()
            if has_board:
                assert anyio.current_time() - since < REFRESH_S
            await p.publish(3)
            await anyio.sleep(3 * REFRESH_S)
            assert (await p.ask()).output.token_ids == greedy(3, [1, 2, 3], 8)

    simulate(main)


@boards
@pytest.mark.parametrize("streams", [False, True])
def test_nothing_of_a_worker_that_was_restarted_is_returned(streams: bool, has_board: bool) -> None:
    async def main() -> None:
        async with processes(has_board=has_board, refresh_s=1000.0) as p:
            await p.publish(1)
            await p.other.snapshot()
            p.cluster.workers[1].restart()
            failures: list[str] = []
            for number in range(12):
                asked = request(session=str(number), timeout_s=LIMIT_S)
                try:
                    reply = await (streamed if streams else genapi.Fleet.generate)(p.other, asked)
                except genapi.StalePolicyError as error:
                    failures.append(str(error))
                    assert streams
                else:
                    assert reply.output.token_ids == greedy(1, [1, 2, 3], 8)
                    failures += [a.error for a in reply.attempts if a.error is not None]
            assert len(failures) == 1
            assert "restarted" in failures[0]

    simulate(main)


@boards
def test_where_every_worker_was_restarted_nobody_answers_until_one_publishes(
    has_board: bool,
) -> None:
    async def main() -> None:
        async with processes(has_board=has_board) as p:
            await p.publish(1)
            await p.keep_asking()
            for worker in p.cluster.workers:
                worker.restart()
            with pytest.raises(genapi.FleetError, match="took the place of"):
                await p.ask()
            with pytest.raises(genapi.GenAPIError):
                await p.publish(2)
            await p.publish(2)
            await anyio.sleep(REFRESH_S)
            replies = await p.keep_asking()
            assert replies[-1].output.token_ids == greedy(2, [1, 2, 3], 1)

    simulate(main)


def test_a_board_tells_it_that_no_newer_version_comes_until_another_publisher_starts() -> None:
    async def main() -> None:
        async with processes(has_board=True, refresh_s=LIMIT_S) as p:
            await p.publish(1)
            assert (await p.other.snapshot()).final is None

            async def wait() -> None:
                with pytest.raises(
                    genapi.StalePolicyError, match=r"min_version=2 .* ended with genapi:r:1:1"
                ):
                    await p.other.generate(request(min_version=2))

            async with anyio.create_task_group() as group:
                group.start_soon(wait)
                await anyio.sleep(REFRESH_S)
                await p.publisher.aclose()
            assert (await p.other.snapshot()).final == PolicyVersion(run="r", step=1)
            next_one = genapi.WeightPublisher(
                p.trainer, transport=genapi.weights.Memory(), timeouts=QUICK
            )
            await next_one.adopt(1)
            async with anyio.create_task_group() as group:
                group.start_soon(p.other.generate, request(min_version=2))
                await anyio.sleep(REFRESH_S)
                await next_one.publish(2, genapi.weights.from_tensors(weights(2)))

    simulate(main)


@boards
def test_looking_around_costs_one_worker_per_refresh_and_nobody_waits(has_board: bool) -> None:
    async def main() -> None:
        async with processes(5, has_board=has_board) as p:
            await p.publish(1)
            await p.keep_asking(10 * REFRESH_S)
            p.events.clear()
            for worker in p.cluster.workers:
                worker.faults.add(Fault("/server_info", "answer_late", delay_s=5 * REFRESH_S))
            p.longest_s = 0.0
            assert len(await p.keep_asking(10 * REFRESH_S)) > 30
            assert p.longest_s < REFRESH_S / 2
            looks = [e for e in p.events if isinstance(e, AdminCalled) and e.operation == "inspect"]
            assert 1 <= len(looks) <= 12

    simulate(main)


def test_after_a_long_silence_the_first_request_waits_for_a_look() -> None:
    async def main() -> None:
        async with processes(has_board=True) as p:
            await p.ask()
            await p.publish(1)
            await p.publish(2)
            await anyio.sleep(100 * REFRESH_S)
            assert (await p.ask()).output.policy.is_pure
            assert p.other.membership.committed == PolicyVersion(run="r", step=2)

    simulate(main)
