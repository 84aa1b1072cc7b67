"""The request plane over embedded vLLM servers: routing, retries, streams, aborts, bad input."""

import pickle
from collections.abc import Mapping

import anyio
import pydantic
import pytest

import genapi
from genapi import GenerateRequest, Outcome, RetryPolicy, SamplingParams
from genapi.embedded import Cluster, Fault, RealClock, VirtualClock, Worker, read_config
from genapi.providers.vllm import Options
from genapi.transports.memory import MemoryTransport
from tests.contract.embedded import QUICK, greedy, request, rig, weights
from tests.support.spread import Spread

pytestmark = pytest.mark.anyio

GENERATE = "/inference/v1/generate"
SOON = RetryPolicy(backoff_s=0.001, max_backoff_s=0.002)


def mixed(**differs: tuple[str, str]) -> Spread:
    """Two vLLM servers that differ in what they were started with, and a router before them."""
    clock = VirtualClock()
    workers = []
    for index in range(2):
        query = {"protocol": "vllm", **{name: both[index] for name, both in differs.items()}}
        config, engine = read_config(query)
        workers.append(Worker(config, engine, clock=clock, index=index))
    return Spread(Cluster(workers, clock=clock))


async def test_scores_are_of_the_kind_that_the_worker_gives_which_made_them() -> None:
    servers = mixed(logprobs_mode=("raw_logprobs", "processed_logprobs"))
    async with genapi.connect(servers.direct, transport=servers) as fleet:
        await fleet.wait_ready(timeout_s=5)
        seen = set()
        for session in range(16):
            reply = await fleet.generate(request(session=str(session)))
            assert reply.worker is not None
            seen.add((reply.worker.component, reply.logprobs_mode))
            async with fleet.stream(request(session=str(session))) as events:
                last = [event async for event in events][-1]
            assert isinstance(last, genapi.Finished)
            assert last.reply.logprobs_mode == reply.logprobs_mode
    assert seen == {("http://w0:1", "raw"), ("http://w1:1", "processed")}


@pytest.mark.parametrize(
    ("modes", "shown"),
    [
        (("raw_logprobs", "processed_logprobs"), None),
        (("processed_logprobs", "processed_logprobs"), "processed"),
    ],
)
async def test_behind_a_router_scores_have_a_kind_where_all_workers_give_the_same(
    modes: tuple[str, str], shown: str | None
) -> None:
    servers = mixed(logprobs_mode=modes)
    async with genapi.connect(servers.routed, transport=servers) as fleet:
        await fleet.wait_ready(timeout_s=5)
        assert {(await fleet.generate(request())).logprobs_mode for _ in range(4)} == {shown}


@pytest.mark.parametrize("routed", [False, True])
async def test_workers_that_serve_models_of_different_names_are_asked_for_none_but_their_own(
    routed: bool,
) -> None:
    servers = mixed(model=("one", "two"))
    target = servers.routed if routed else servers.direct
    async with genapi.connect(target, transport=servers) as fleet:
        await fleet.wait_ready(timeout_s=5)
        for session in range(16):
            assert (await fleet.generate(request(session=str(session)))).output.is_complete


async def test_a_stream_ends_in_the_reply_that_generate_returns() -> None:
    async with rig(1) as r:
        for sampling in (
            SamplingParams(max_tokens=9, temperature=0.0, logprobs=3, ignore_eos=True),
            SamplingParams(max_tokens=9, temperature=1.0, seed=7, n=3, logprobs=0),
        ):
            asked = GenerateRequest(prompt_token_ids=[5, 6], sampling=sampling)
            whole = await r.fleet.generate(asked)
            async with r.fleet.stream(asked) as events:
                seen = [event async for event in events]
            *chunks, last = seen
            assert isinstance(last, genapi.Finished)
            assert last.reply.outputs == whole.outputs
            for output in whole.outputs:
                ids: list[int] = []
                for chunk in chunks:
                    assert isinstance(chunk, genapi.TokenChunk)
                    if chunk.index == output.index:
                        ids.extend(chunk.token_ids)
                assert output.token_ids == ids


@pytest.mark.case("POOL-01")
async def test_waiting_for_a_slot_is_not_reported_as_a_server_that_is_slow() -> None:
    async with rig(1, options={"max_in_flight": 1}) as r:
        r.fail(0, GENERATE, "never_answer")
        async with anyio.create_task_group() as group:
            group.start_soon(r.fleet.generate, request())
            with anyio.fail_after(5):
                while not r.fleet.membership.members["memory://0"].in_flight:
                    await anyio.lowlevel.checkpoint()
            with pytest.raises(genapi.TransportError, match="max_in_flight=1") as caught:
                await r.fleet.generate(request(timeout_s=0.05))
            assert caught.value.phase == "not_sent"
            group.cancel_scope.cancel()


@pytest.mark.case("ABORT-05")
async def test_an_aborted_request_that_is_never_told_ends_within_its_own_bound() -> None:
    async with rig(1) as r:
        r.fail(0, GENERATE, "never_answer")
        async with anyio.create_task_group() as group:

            async def ask() -> None:
                with pytest.raises(genapi.TransportError, match="timeout_s"):
                    await r.fleet.generate(request(timeout_s=0.1))

            group.start_soon(ask)
            async with genapi.WeightPublisher(
                r.fleet, transport=genapi.weights.Memory(), mode="abort", timeouts=QUICK
            ) as publisher:
                with anyio.fail_after(5):
                    report = await publisher.publish(1, genapi.weights.from_tensors(weights(1)))
        assert report.committed


@pytest.mark.case("ABORT-05")
async def test_a_drain_that_does_not_end_is_given_up_within_its_own_bound_and_named() -> None:
    cluster = Cluster.from_query({"step_s": "0.002"}, clock=RealClock())
    transport = MemoryTransport(cluster)
    async with genapi.connect("embedded://", transport=transport) as fleet:
        await fleet.wait_ready(timeout_s=5)
        async with fleet.stream(request(tokens=4000)) as events:
            await anext(events)
            limits = QUICK.model_copy(update={"pause_s": 0.1})
            async with genapi.WeightPublisher(
                fleet, transport=genapi.weights.Memory(), mode="drain", timeouts=limits
            ) as publisher:
                with anyio.fail_after(5), pytest.raises(genapi.PublishError) as caught:
                    await publisher.publish(1, genapi.weights.from_tensors(weights(1)))
            assert cluster.workers[0].engine.num_running == 1
        (receipt,) = caught.value.report.receipts
        assert receipt.outcome is Outcome.UNTOUCHED
        assert "pause" in (receipt.error or "")
        assert receipt.fence is not None


@pytest.mark.case("DISC-07")
async def test_a_fleet_is_ready_only_when_health_says_so_and_a_refused_key_fails_at_once() -> None:
    cluster = Cluster.from_query({})
    for nth in (1, 2, 3):
        cluster.workers[0].faults.add(Fault("/health", "error", nth=nth, status=503, body=""))
    async with genapi.connect("embedded://", transport=MemoryTransport(cluster)) as fleet:
        with anyio.fail_after(10):
            snapshot = await fleet.wait_ready(timeout_s=8)
        assert len(snapshot.workers) == 1
    async with genapi.connect("embedded://?api_key=secret") as fleet:
        with anyio.fail_after(5), pytest.raises(genapi.AuthError):
            await fleet.wait_ready(timeout_s=60)


@pytest.mark.parametrize(
    ("query", "capability", "error"),
    [
        ({"scale_out": "false"}, "--enable-scale-out", genapi.UnsupportedError),
        ({"api_key": "secret"}, "key", genapi.AuthError),
    ],
)
async def test_a_server_that_cannot_generate_for_us_is_named_with_the_remedy(
    query: Mapping[str, str], capability: str, error: type[Exception]
) -> None:
    fleet = genapi.connect("embedded://?" + "&".join(f"{k}={v}" for k, v in query.items()))
    async with fleet:
        with anyio.fail_after(5), pytest.raises(error, match=capability):
            await fleet.generate(request(options=Options(route="native")))


async def test_admin_routes_that_are_switched_off_are_a_named_capability() -> None:
    async with genapi.connect("embedded://?dev_mode=false") as fleet:
        await fleet.wait_ready(timeout_s=2)
        reply = await fleet.generate(request())
        assert reply.output.token_ids == greedy(0, [1, 2, 3], 8)
        publisher = genapi.WeightPublisher(fleet, transport=genapi.weights.Memory())
        with pytest.raises(genapi.GenAPIError, match="VLLM_SERVER_DEV_MODE"):
            await publisher.adopt(0)


async def test_a_port_that_nobody_listens_on_is_named_when_ready_is_awaited() -> None:
    async with genapi.connect("vllm://127.0.0.1:9") as fleet:
        with anyio.fail_after(10), pytest.raises(genapi.FleetError, match=r"127\.0\.0\.1:9"):
            await fleet.wait_ready(timeout_s=0.3)
        with pytest.raises(genapi.TransportError) as caught:
            await fleet.generate(request())
        assert caught.value.phase == "not_sent"


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"prompt_token_ids": [1, -2]}, "-2"),
        ({"prompt_token_ids": [1.5]}, "1.5"),
        ({"prompt_token_ids": [True]}, "True"),
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt_token_ids": [1], "prompt": "x"}, "exactly one"),
        ({}, "exactly one"),
    ],
)
def test_a_bad_prompt_is_named_when_the_request_is_built(
    bad: Mapping[str, object], named: str
) -> None:
    with pytest.raises(pydantic.ValidationError, match=named):
        GenerateRequest.model_validate({"sampling": {"max_tokens": 1}, **bad})


@pytest.mark.parametrize("tokens", [0, -1, 1.5])
def test_a_bad_length_is_named_when_the_parameters_are_built(tokens: float) -> None:
    with pytest.raises(pydantic.ValidationError, match="max_tokens"):
        SamplingParams(max_tokens=tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "named"),
    [
        ("nowhere://h:1", "nowhere"),
        ("127.0.0.1:8000", "scheme"),
        ("vllm://h", "port"),
        ("vllm://", "address"),
        ("vllm://h:1,h:1", "twice"),
        ("vllm+ftp://h:1", r"vllm\+ftp"),
        ("vllm://u:p@h:1", "user info"),
    ],
)
def test_a_target_that_cannot_work_is_named(target: str, named: str) -> None:
    with pytest.raises(genapi.ConfigError, match=named):
        genapi.connect(target)


async def test_a_fleet_travels_as_its_config_and_never_live() -> None:
    fleet = genapi.connect("vllm://w1:8001", model="tiny", api_key="env:KEY")
    with pytest.raises(TypeError, match=r"fleet\.config"):
        pickle.dumps(fleet)
    there = pickle.loads(pickle.dumps(fleet.config))  # noqa: S301 - our own bytes
    assert there == fleet.config
    assert genapi.connect(there).config == fleet.config
