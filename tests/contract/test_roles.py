"""Prefill/decode pairs and KV connectors of vLLM: who gets requests, and who is published to."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

import genapi
from genapi import RetryPolicy
from genapi.embedded import Cluster, VirtualClock, Worker, read_config
from genapi.events import AdminCalled, Event
from genapi.transports.memory import MemoryTransport
from genapi.types.ids import Role
from genapi.types.worker import Outcome
from tests.contract.embedded import QUICK, greedy, request, weights

pytestmark = pytest.mark.anyio

PREFILL = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
DECODE = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}
STORE = {"kv_connector": "LMCacheConnectorV1"}
OFFLOAD = {"kv_connector": "OffloadingConnector"}
PLAIN: dict[str, str] = {}
SOON = RetryPolicy(max_attempts=2, backoff_s=0.001)
LATE = RetryPolicy(max_attempts=2, backoff_s=60.0, max_backoff_s=60.0)


@asynccontextmanager
async def fleet_of(
    *servers: dict[str, str], **options: Any
) -> AsyncIterator[tuple[genapi.Fleet, Cluster, list[Event]]]:
    """A ready fleet of servers that were each started in their own way."""
    clock, events = VirtualClock(), list[Event]()
    workers = [
        Worker(*read_config(query), clock=clock, index=index) for index, query in enumerate(servers)
    ]
    cluster = Cluster(workers, clock=clock)
    fleet = genapi.connect(
        "embedded://",
        transport=MemoryTransport(cluster),
        observe=events.append,
        **{"retry": SOON, **options},
    )
    async with fleet:
        await fleet.wait_ready(timeout_s=5)
        yield fleet, cluster, events


def publisher(fleet: genapi.Fleet) -> genapi.WeightPublisher:
    return genapi.WeightPublisher(fleet, transport=genapi.weights.Memory(), timeouts=QUICK)


async def authors(fleet: genapi.Fleet) -> set[str]:
    """The addresses that answer requests, of many sessions and of none."""
    asked = [request(session=str(n)) for n in range(12)] + [request()] * 12
    replies = [await fleet.generate(each) for each in asked]
    return {reply.worker.component for reply in replies if reply.worker is not None}


async def test_prefill_workers_leave_requests_to_the_others() -> None:
    async with fleet_of(PREFILL, DECODE, PLAIN) as (fleet, _, _):
        roles = [worker.role for worker in (await fleet.snapshot()).workers]
        assert roles == [Role.PREFILL, Role.DECODE, Role.UNIFIED]
        assert await authors(fleet) == {"memory://1", "memory://2"}


async def test_a_prefill_worker_does_not_stand_in_for_a_decode_worker_that_is_gone() -> None:
    async with fleet_of(PREFILL, DECODE) as (fleet, cluster, _):
        await fleet.generate(request())
        cluster.workers[1].kill()
        with anyio.fail_after(5), pytest.raises(genapi.FleetError, match="memory://1") as caught:
            await fleet.generate(request())
        assert "memory://0" not in str(caught.value)


async def test_a_version_that_only_a_prefill_worker_holds_is_waited_for() -> None:
    async with fleet_of(PREFILL, DECODE) as (fleet, cluster, _):
        run = (await publisher(fleet).adopt(7)).version.run
        cluster.workers[0].engine.label = genapi.PolicyVersion(run=run, step=8).label
        await fleet.snapshot()
        with anyio.fail_after(5), pytest.raises(genapi.StalePolicyError, match="memory://1"):
            await fleet.generate(request(min_version=8, timeout_s=0.2))


async def test_a_version_that_every_other_worker_is_past_is_refused_at_once() -> None:
    async with fleet_of(PREFILL, DECODE) as (fleet, cluster, _):
        run = (await publisher(fleet).adopt(7)).version.run
        cluster.workers[1].engine.label = genapi.PolicyVersion(run=run, step=9).label
        await fleet.snapshot()
        with anyio.fail_after(5), pytest.raises(genapi.StalePolicyError, match="any more"):
            await fleet.generate(request(exact_version=8, timeout_s=60))


async def test_where_every_other_worker_is_fenced_nobody_waits_for_the_prefill_worker() -> None:
    async with fleet_of(PREFILL, DECODE, retry=LATE) as (fleet, cluster, _):
        await publisher(fleet).adopt(7)
        cluster.workers[1].restart()
        await fleet.snapshot()
        with anyio.fail_after(5), pytest.raises(genapi.FleetError, match="took the place of"):
            await fleet.generate(request())


async def test_the_update_of_a_prefill_worker_is_not_outlasted_for_others_that_are_gone() -> None:
    async with fleet_of(PREFILL, DECODE, admin_timeout_s=60.0) as (fleet, cluster, _):
        await fleet.generate(request())
        cluster.workers[0].engine.label = genapi.PolicyVersion(run="r", step=8).updating_label
        await fleet.snapshot()
        cluster.workers[1].kill()
        with anyio.fail_after(5), pytest.raises(genapi.FleetError, match="memory://1"):
            await fleet.generate(request())


async def test_a_fleet_of_prefill_workers_alone_gets_the_requests_it_was_made_for() -> None:
    async with fleet_of(PREFILL, PREFILL) as (fleet, _, _):
        assert await authors(fleet) == {"memory://0", "memory://1"}


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (PREFILL, "a prefill worker"),
        (DECODE, "a decode worker"),
        (STORE, "'LMCacheConnectorV1'"),
    ],
)
async def test_a_server_whose_old_keys_and_values_nobody_drops_is_refused_before_any_pause(
    other: dict[str, str], why: str
) -> None:
    async with fleet_of(PLAIN, other) as (fleet, _, events):
        p = publisher(fleet)
        await p.adopt(0)
        with anyio.fail_after(10), pytest.raises(genapi.PublishError) as caught:
            await p.publish(1, genapi.weights.from_tensors(weights(1)))
        receipts = caught.value.report.receipts
        assert [r.outcome for r in receipts] == [Outcome.UNTOUCHED] * 2
        assert why in (receipts[1].error or "")
        assert "without --kv-transfer-config" in (receipts[1].error or "")
        assert "pause" not in {e.operation for e in events if isinstance(e, AdminCalled)}


async def test_where_stale_caches_are_allowed_a_connector_leaves_contexts_unknown() -> None:
    async with fleet_of(STORE) as (fleet, _, _):
        p = publisher(fleet)
        await p.adopt(0)
        source = genapi.weights.from_tensors(weights(1))
        report = await p.publish(1, source, in_flight_kv="stale", prefix_cache="stale")
        assert report.committed
        output = (await fleet.generate(request())).output
        assert output.token_ids == greedy(1, [1, 2, 3], 8)
        assert [span.context for span in output.policy.spans] == [None]
        assert not output.policy.is_pure


async def test_what_a_cache_holds_that_outlives_its_server_is_not_promised_when_adopting() -> None:
    async with fleet_of(PLAIN, STORE) as (fleet, _, _):
        await publisher(fleet).adopt(0)
        policy = (await fleet.generate(request())).output.policy
        assert policy.newest is not None
        assert [span.context for span in policy.spans] == [None]


async def test_a_connector_that_vllm_empties_is_published_to_like_none() -> None:
    async with fleet_of(OFFLOAD) as (fleet, _, _):
        p = publisher(fleet)
        await p.adopt(0)
        assert (await p.publish(1, genapi.weights.from_tensors(weights(1)))).committed
        assert (await fleet.generate(request())).output.policy.is_pure
