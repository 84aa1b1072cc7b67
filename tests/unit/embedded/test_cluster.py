"""Workers together: construction from text, switches of the server, and their price."""

from typing import Any

import anyio
import anyio.lowlevel
import pytest

from genapi.embedded import Call, Cluster, RealClock, VirtualClock, policy
from tests.unit.embedded.harness import LIMIT_S, Client, request, serving, until


async def test_a_cluster_is_described_by_text() -> None:
    query = {
        "protocol": "vllm",
        "workers": "2",
        "seed": "3",
        "vocab": "32",
        "model": "m",
        "width": "8",
    }
    async with Cluster.from_query(query) as cluster:
        assert cluster.names == ("memory://0", "memory://1")
        assert len({worker.instance_id for worker in cluster.workers}) == 2
        weights = policy.init(3, vocab=32, width=8)
        for worker in cluster.workers:
            choice = await Client(worker).choice([5], 6)
            assert choice["token_ids"] == policy.greedy(weights, [5], 6)
        reply = await cluster.handle(1, Call("GET", "/v1/models"))
        assert b'"id":"m"' in reply.body  # type: ignore[operator]


@pytest.mark.parametrize(
    "query",
    [
        {"protocol": "none"},
        {"bogus": "1"},
        {"workers": "two"},
        {"dev_mode": "maybe"},
        {"version": "0.1"},
        {"step_s": "fast"},
    ],
)
def test_text_that_describes_nothing(query: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=next(iter(query.values())) + "|bogus"):
        Cluster.from_query(query)


def test_a_cluster_is_built_outside_any_event_loop() -> None:
    cluster = Cluster.from_query({})

    async def once() -> None:
        async with cluster:
            await Client(cluster.workers[0]).choice([1], 3)

    anyio.run(once)


async def test_closing_resets_what_is_in_flight_and_refuses_the_rest() -> None:
    cluster = Cluster.from_query({})
    await cluster.open()
    client = Client(cluster.workers[0])
    failures: list[BaseException] = []

    async def run() -> None:
        try:
            await client.generate([1], 500)
        except ConnectionResetError as error:
            failures.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await until(lambda: client.worker.engine.num_running)
        await cluster.aclose()
    assert len(failures) == 1
    with pytest.raises(ConnectionRefusedError):
        await client.get("/health")
    async with cluster:
        assert (await client.choice([1], 3))["finish_reason"] == "length"


async def test_a_thousand_idle_workers_cost_no_time() -> None:
    """Virtual time stands still while nobody works, however many could."""
    async with Cluster.from_query({"workers": "1000"}) as cluster:
        await Client(cluster.workers[7]).choice([1], 4)
        now = cluster.clock.now()
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        assert cluster.clock.now() == now
        assert now == pytest.approx(4 * 0.001)


async def test_a_real_clock_takes_its_time() -> None:
    clock = RealClock()
    async with Cluster.from_query({"step_s": "0.002"}, clock) as cluster:
        start = clock.now()
        await Client(cluster.workers[0]).choice([1], 5)
        assert clock.now() - start >= 0.01


async def test_equal_runs_interleave_equally() -> None:
    async def once() -> list[object]:
        async with Cluster.from_query({"workers": "3"}) as cluster:
            log: list[object] = []

            async def run(index: int) -> None:
                fields = {"sampling": {"temperature": 1.0}}
                choice = await Client(cluster.workers[index % 3]).choice(
                    [index], 5 + index, **fields
                )
                log.append((index, cluster.clock.now(), choice["token_ids"]))

            async with anyio.create_task_group() as group:
                for index in range(9):
                    group.start_soon(run, index)
            return log

    with anyio.fail_after(LIMIT_S):
        assert await once() == await once()


async def test_virtual_sleepers_wake_in_order_and_cancelled_ones_move_no_time() -> None:
    clock, woken = VirtualClock(), list[tuple[str, float]]()

    async def sleep(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append((name, clock.now()))

    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as group:
            for name, seconds in (("b", 2.0), ("a", 1.0), ("c", 2.0)):
                group.start_soon(sleep, name, seconds)
            with anyio.move_on_after(0):
                await clock.sleep(0.1)
    assert woken == [("a", 1.0), ("b", 2.0), ("c", 2.0)]
    assert clock.now() == 2.0


@pytest.mark.parametrize(
    ("flags", "path", "status"),
    [
        ({"dev_mode": False}, "/pause", 404),
        ({"dev_mode": False}, "/update_weights", 404),
        ({"scale_out": False}, "/inference/v1/generate", 403),
        ({"scale_out": False, "version": "0.31.0"}, "/inference/v1/generate", 404),
        ({"scale_out": False}, "/inference/v1/abort_requests", 404),
        ({"version": "0.31.0"}, "/weight_checker", 404),
        ({"version": "0.31.0"}, "/shutdown_weight_transfer_engine", 404),
    ],
)
async def test_switches_of_the_server(flags: dict[str, Any], path: str, status: int) -> None:
    async with serving(**flags) as client:
        found, reply = await client.post(path, request([1], 1))
        assert found == status
        assert await client.get("/health") == (200, "")
        if status == 403:
            assert reply["error"]["type"] == "PermissionDeniedError"


async def test_the_server_tells_how_it_runs() -> None:
    async with serving(tensor_parallel_size=2, data_parallel_size=3) as client:
        assert await client.get("/get_world_size") == (200, {"world_size": 6})
        size = await client.get("/get_world_size", query={"include_dp": "false"})
        assert size == (200, {"world_size": 2})
        _, info = await client.get("/server_info", query={"config_format": "json"})
        config = info["vllm_config"]
        assert config["instance_id"] == client.worker.instance_id
        assert config["weight_transfer_config"] == {"backend": "genapi_memory"}
        assert config["parallel_config"]["tensor_parallel_size"] == 2
        assert config["model_config"]["logprobs_mode"] == "raw_logprobs"


async def test_the_header_names_the_request() -> None:
    async with serving() as client:
        headers = {"X-Request-Id": "head"}
        reply = await client.post(
            "/inference/v1/generate", request([1], 1, request_id="body"), headers=headers
        )
        assert reply[1]["request_id"] == "generate-tokens-head"
