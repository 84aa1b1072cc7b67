"""A fleet as one process knows it: who is there, who may be used, and what is refused at once."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import parse_qsl

import anyio
import pytest

import genapi
from genapi import RetryPolicy
from genapi.embedded import Call, Cluster, Fault
from genapi.transports.memory import MemoryTransport
from genapi.types.config import Topology
from genapi.types.ids import Role
from genapi.types.worker import FenceStrength, Recovery
from genapi.wire.http import HTTPCall, HTTPReply
from tests.contract.embedded import QUICK, request, rig, weights
from tests.support.raw_server import Exchange, serving

pytestmark = pytest.mark.anyio

GENERATE = "/inference/v1/generate"


@asynccontextmanager
async def process(cluster: Cluster, **options: Any) -> AsyncIterator[genapi.Fleet]:
    """A fleet as another process would have it."""
    transport = MemoryTransport(cluster)
    async with genapi.connect("embedded://", transport=transport, run="r", **options) as fleet:
        await fleet.wait_ready(timeout_s=5)
        yield fleet


def publisher(fleet: genapi.Fleet) -> genapi.WeightPublisher:
    return genapi.WeightPublisher(fleet, transport=genapi.weights.Memory(), timeouts=QUICK)


async def publish(fleet: genapi.Fleet, step: int) -> genapi.PublishReport:
    return await publisher(fleet).publish(step, genapi.weights.from_tensors(weights(1)))


class Named(MemoryTransport):
    """Embedded servers at addresses such as `http://a0:1` and `http://b0:1`, both of the first."""

    @staticmethod
    def _server(url: str) -> str:
        return f"memory://{url[len('http://x')]}"

    async def send(
        self, base_url: str, call: HTTPCall, *, headers: Mapping[str, str] = {}
    ) -> HTTPReply:
        return await super().send(self._server(base_url), call, headers=headers)


@pytest.mark.parametrize("provider", ["vllm", "sglang"])
async def test_one_server_at_two_addresses_is_not_two_workers(provider: str) -> None:
    cluster = Cluster.from_query({"protocol": provider, "workers": "2"})
    target = f"{provider}://a0:1,a1:1,b0:1"
    wanted = "http://a0:1 and http://b0:1 are one server"
    async with genapi.connect(target, transport=Named(cluster), run="r") as fleet:
        with pytest.raises(genapi.ConfigError, match=wanted), anyio.fail_after(5):
            await fleet.wait_ready(timeout_s=60)
        with pytest.raises(genapi.ConfigError, match=wanted):
            await publish(fleet, 1)
    assert {worker.engine.label for worker in cluster.workers} == {"default"}
    async with genapi.connect(f"{provider}://a0:1,b1:1", transport=Named(cluster)) as fleet:
        assert len((await fleet.wait_ready(timeout_s=5)).workers) == 2


# the expected topology


@pytest.mark.parametrize(
    ("expect", "message"),
    [
        ({"workers": 3}, "2 of 3 workers seen: memory://0, memory://1"),
        ({"workers": 1}, "2 of 1 workers seen"),
        ({"world_size": 4}, "workers bring 2 ranks, expected 4"),
        ({"roles": {Role.PREFILL: 1, Role.DECODE: 1}}, "roles seen"),
        ({"roles": {Role.UNIFIED: 1}}, "roles seen"),
    ],
)
async def test_a_fleet_of_another_shape_than_expected_is_not_ready_and_says_what_was_seen(
    expect: Mapping[str, Any], message: str
) -> None:
    cluster = Cluster.from_query({"workers": "2"})
    fleet = genapi.connect(
        "embedded://", transport=MemoryTransport(cluster), expect=Topology(**expect)
    )
    async with fleet:
        with anyio.fail_after(5), pytest.raises(genapi.FleetError, match=message):
            await fleet.wait_ready(timeout_s=1.0)


@pytest.mark.parametrize(
    "expect", [{"workers": 2}, {"world_size": 2}, {"roles": {Role.UNIFIED: 2}}, {}]
)
async def test_a_fleet_of_the_expected_shape_is_ready(expect: Mapping[str, Any]) -> None:
    async with process(Cluster.from_query({"workers": "2"}), expect=Topology(**expect)) as fleet:
        assert len((await fleet.snapshot()).workers) == 2


async def test_ranks_count_with_those_of_every_worker() -> None:
    cluster = Cluster.from_query({"workers": "2", "tensor_parallel_size": "2"})
    async with process(cluster, expect=Topology(world_size=4)) as fleet:
        assert [w.ranks for w in (await fleet.snapshot()).workers] == [2, 2]


# who is waited for


async def test_a_worker_that_hangs_is_the_one_that_is_named() -> None:
    cluster = Cluster.from_query({"workers": "2"})
    for nth in range(1, 20):
        cluster.workers[1].faults.add(Fault("/health", "never_answer", nth=nth))
    for admin_timeout_s in (0.05, 60.0):
        fleet = genapi.connect(
            "embedded://", transport=MemoryTransport(cluster), admin_timeout_s=admin_timeout_s
        )
        async with fleet:
            with anyio.fail_after(5), pytest.raises(genapi.FleetError) as caught:
                await fleet.wait_ready(timeout_s=0.3)
        assert "memory://1" in str(caught.value)
        assert "memory://0" not in str(caught.value)


async def test_a_read_of_one_worker_does_not_wait_for_those_of_many_silent_ones() -> None:
    silent, answering = 128, 2
    # Its engine does not say which version a reply is of.
    cluster = Cluster.from_query({"workers": str(silent + answering), "version": "0.31.0"})
    async with process(cluster, refresh_s=600, admin_timeout_s=600) as fleet:
        await publisher(fleet).adopt(4)
        seen: list[int] = []
        for worker in cluster.workers[:silent]:
            worker.faults.add(Fault("/health", "never_answer"))
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                reply = await fleet.generate(request(min_version=4))
                seen.append(len(reply.output.token_ids))
                tasks.cancel_scope.cancel()

            tasks.start_soon(fleet.snapshot)
            await anyio.wait_all_tasks_blocked()
            with anyio.fail_after(20):
                for _ in range(silent + answering):
                    tasks.start_soon(ask)
                await anyio.sleep_forever()
        assert seen


# whose label counts


async def test_a_paused_worker_is_no_witness_of_a_version() -> None:
    cluster = Cluster.from_query({"workers": "2"})
    async with process(cluster) as other:
        async with process(cluster) as fleet:
            await publisher(fleet).adopt(4)
        await cluster.handle(1, Call("POST", "/pause", {"mode": "keep"}))
        snapshot = await other.snapshot()
        assert [w.version is None for w in snapshot.workers] == [False, False]
        assert snapshot.committed is None
        await cluster.handle(1, Call("POST", "/resume"))
        assert (await other.snapshot()).committed == snapshot.workers[0].version


async def test_a_fenced_worker_is_no_witness_of_a_version() -> None:
    cluster = Cluster.from_query({"workers": "2"})
    async with process(cluster) as other:
        async with process(cluster) as fleet:
            version = (await publisher(fleet).adopt(4)).version
        cluster.workers[1].faults.add(Fault("/pause", "never_answer"))
        with pytest.raises(genapi.PublishError):
            await publish(other, 5)
        await cluster.handle(1, Call("POST", "/resume"))
        snapshot = await other.snapshot()
        assert {w.version for w in snapshot.workers} == {version}
        assert [w.fence is None for w in snapshot.workers] == [True, False]
        assert snapshot.committed is None


async def test_workers_of_two_versions_show_none() -> None:
    cluster = Cluster.from_query({"workers": "2"})
    body = b'{"new_version":"genapi:r:3:1"}'
    await cluster.handle(0, Call("POST", "/update_weight_version", body=body))
    async with process(cluster) as fleet:
        assert (await fleet.snapshot()).committed is None


# another process at the same address


async def test_a_process_that_holds_something_else_is_fenced_until_it_is_published_to() -> None:
    async with rig(2) as r:
        version = (await publisher(r.fleet).adopt(0)).version
        r.cluster.workers[1].restart()
        fenced = (await r.fleet.snapshot()).workers[1]
        assert fenced.fence is not None
        assert fenced.fence.strength is FenceStrength.CLIENT
        assert fenced.fence.recovery is Recovery.REPUBLISH
        assert f"holds 'default', not {version}" in fenced.fence.reason
        replies = [await r.fleet.generate(request(session=str(n))) for n in range(8)]
        assert {str(reply.output.policy.newest) for reply in replies} == {str(version)}
        with pytest.raises(genapi.FleetError, match="fenced"):
            await publisher(r.fleet).adopt(0)
        assert (await publish(r.fleet, 1)).committed
        assert [w.fence for w in (await r.fleet.snapshot()).workers] == [None, None]


async def test_a_process_that_holds_the_committed_version_is_not_fenced() -> None:
    async with rig(2) as r:
        version = (await publisher(r.fleet).adopt(0)).version
        r.cluster.workers[1].restart()
        body = f'{{"new_version":"{version.label}"}}'.encode()
        await r.cluster.handle(1, Call("POST", "/update_weight_version", body=body))
        assert [w.fence for w in (await r.fleet.snapshot()).workers] == [None, None]


async def test_before_any_version_is_known_another_process_is_as_good_as_the_last() -> None:
    async with rig(2) as r:
        r.cluster.workers[1].restart()
        assert [w.fence for w in (await r.fleet.snapshot()).workers] == [None, None]


# suspects


async def test_a_suspect_that_hangs_does_not_keep_a_healthy_one_from_answering() -> None:
    async with rig(2, options={"admin_timeout_s": 60.0}) as r:
        for worker in (0, 1):
            r.fail(worker, "/health", "refuse")
        assert [w.healthy for w in (await r.fleet.snapshot()).workers] == [False, False]
        r.fail(0, "/health", "never_answer")
        with anyio.fail_after(5):
            for _ in range(3):
                reply = await r.fleet.generate(request())
                assert reply.worker is not None
                assert reply.worker.component == "memory://1"


async def test_a_worker_that_answers_again_gets_traffic_again() -> None:
    once = RetryPolicy(max_attempts=1)
    async with rig(1, options={"retry": once}) as r:
        r.fail(0, GENERATE, "refuse")
        with pytest.raises(genapi.TransportError):
            await r.fleet.generate(request())
        assert (await r.fleet.generate(request())).output.is_complete


# refusals


@pytest.mark.parametrize("board", ["nope://there", "file:relative", "redis://"])
def test_a_board_that_cannot_be_is_refused_when_the_fleet_is_made(board: str) -> None:
    with pytest.raises(ValueError, match="board"):
        genapi.connect("vllm://w1:8001", board=board)


@pytest.mark.parametrize(
    "target", ["vllm://router:1?workers=dns:name:1", "vllm://router:1?workers=discover"]
)
def test_discovery_that_is_not_there_yet_is_refused_with_what_to_do(target: str) -> None:
    with pytest.raises(genapi.UnsupportedError, match="list the workers"):
        genapi.connect(target)
    with pytest.raises(genapi.UnsupportedError, match="list the workers"):
        genapi.connect("vllm://w1:8001", discovery_url="http://w1:9001")


async def test_a_fleet_that_is_closed_says_so() -> None:
    fleet = genapi.connect("embedded://")
    with pytest.raises(genapi.FleetError, match="not open"):
        await fleet.generate(request())
    async with fleet:
        with pytest.raises(genapi.FleetError, match="open already"):
            await fleet.open()
    with pytest.raises(genapi.FleetError, match="not open"):
        await fleet.snapshot()


@pytest.mark.parametrize("turns", [1, 2, 3])
async def test_a_fleet_whose_close_is_cancelled_is_closed_all_the_same(turns: int) -> None:
    generates, reads = anyio.Event(), anyio.Event()
    engines = MemoryTransport(Cluster.from_query({}))

    async def script(exchange: Exchange) -> None:
        asked = exchange.request
        if asked.target == GENERATE or generates.is_set():
            (generates if asked.target == GENERATE else reads).set()
            await exchange.gone()
            return
        path, _, query = asked.target.partition("?")
        call = HTTPCall(
            method=asked.method, path=path, query=dict(parse_qsl(query)), body=asked.body or None
        )
        reply = await engines.send("memory://0", call)
        await exchange.reply(reply.status, reply.body, "Connection: close")
        await exchange.close()

    with anyio.fail_after(10):
        async with engines, serving(script) as server, asyncio.TaskGroup() as tasks:
            once = RetryPolicy(max_attempts=1)
            url = f"vllm://127.0.0.1:{server.port}"
            fleet = genapi.connect(url, retry=once, refresh_s=0.001)
            await fleet.open()
            await fleet.wait_ready(timeout_s=5)

            async def generate() -> None:
                with pytest.raises(genapi.TransportError, match="closed"):
                    await fleet.generate(request())

            tasks.create_task(generate())
            await generates.wait()
            await asyncio.sleep(0.01)  # beyond refresh_s: the next one looks around
            tasks.create_task(generate())
            await reads.wait()
            closing = tasks.create_task(fleet.aclose())
            for _ in range(turns):
                await asyncio.sleep(0)
            closing.cancel()
            with suppress(asyncio.CancelledError):
                await closing


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
async def test_a_wait_that_is_none_is_named(timeout_s: float) -> None:
    async with genapi.connect("embedded://") as fleet:
        with pytest.raises(genapi.ConfigError, match="timeout_s"):
            await fleet.wait_ready(timeout_s=timeout_s)


# connections


async def test_making_and_opening_a_fleet_contacts_nobody() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.reply(503)

    async with serving(answer) as server:
        address = f"127.0.0.1:{server.port}"
        for target in (f"vllm://{address}", f"vllm://127.0.0.1:9?workers={address}"):
            fleet = genapi.connect(target, model="tiny", run="r", expect=Topology(workers=1))
            genapi.WeightPublisher(fleet, transport=genapi.weights.Memory())
            async with fleet:
                for _ in range(20):
                    await anyio.lowlevel.checkpoint()
                assert server.connections == 0
        async with genapi.connect(f"vllm://{address}") as fleet:
            await fleet.snapshot()
        assert server.connections > 0


async def test_administration_takes_a_new_connection_for_every_call() -> None:
    async def refuse(exchange: Exchange) -> None:
        await exchange.reply(503)

    async with serving(refuse) as server:
        async with genapi.connect(f"vllm://127.0.0.1:{server.port}") as fleet:
            for _ in range(2):
                await fleet.snapshot()
        assert server.connections == len(server.requests) > 2
