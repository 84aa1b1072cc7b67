"""Workers behind an SGLang gateway: how they are listed, and what a fleet makes of the list."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import pytest

import genapi
from genapi import ConfigError, NotReadyError, ReplyError, Topology
from genapi.embedded import Cluster
from genapi.providers.base import Listing
from genapi.providers.sglang.provider import SGLang
from genapi.transports.base import StreamReply
from genapi.transports.memory import MemoryTransport
from genapi.wire.http import HTTPCall, HTTPReply
from tests.contract.embedded import weights
from tests.support.sglang_wire import recorded
from tests.support.transcripts import play

GATEWAY = "http://gateway:30000"
RECORDED = json.loads(recorded("gateway_list_workers").body)["workers"][0]


def listed(url: str, **more: Any) -> dict[str, Any]:
    return {**RECORDED, "url": url, **more}


def read(*workers: dict[str, Any], model: str | None = None) -> Listing:
    body = json.dumps({"workers": workers, "total": len(workers)}).encode()
    return read_body(body, model=model)


def read_body(body: bytes, *, status: int = 200, model: str | None = None) -> Listing:
    directory = SGLang().directory
    assert directory is not None
    listing, (call,) = play(
        directory.read(GATEWAY, model=model),
        lambda call: HTTPReply(status, body, {}, GATEWAY + call.path),
    )
    assert (call.method, call.path, call.base, call.grant) == ("GET", "/workers", GATEWAY, "data")
    return listing


def test_a_recorded_list_names_the_worker_and_where_it_is_administered() -> None:
    listing = read_body(recorded("gateway_list_workers").body)
    assert [(w.url, w.error) for w in listing.workers] == [("http://127.0.0.1:31000", None)]
    assert listing.missing is None


def test_workers_have_one_order_whatever_the_gateways() -> None:
    urls = ["http://b:1", "http://a:1", "http://c:1"]
    assert [w.url for w in read(*map(listed, urls)).workers] == sorted(urls)


def test_replicas_of_one_server_are_one_worker() -> None:
    listing = read(listed("http://a:1@0"), listed("http://a:1@1"), listed("http://b:1"))
    assert [w.url for w in listing.workers] == ["http://a:1", "http://b:1"]


def test_workers_of_another_model_are_left_out() -> None:
    other = listed("http://b:1", model_id="other", models=[{"id": "other"}])
    listing = read(listed("http://a:1"), other, model="/models/tiny-llama-a")
    assert [w.url for w in listing.workers] == ["http://a:1"]
    wanted = f"the gateway at {GATEWAY} has no workers of model 'mine'"
    assert read(other, model="mine").missing == wanted


@pytest.mark.parametrize("how", [{"connection_mode": "grpc"}, {"runtime_type": "vllm"}])
def test_a_worker_that_sglang_over_http_does_not_reach_says_so(how: dict[str, Any]) -> None:
    (worker,) = read(listed("http://a:1", **how)).workers
    assert worker.error is not None
    assert "not SGLang over http" in worker.error


def test_a_gateway_that_calls_nobody_healthy_does_not_serve_yet() -> None:
    sick = listed("http://a:1", is_healthy=False)
    assert "none of its 1 workers healthy" in (read(sick).missing or "")
    # A paused worker fails its checks, and is there all the same.
    assert read(sick, listed("http://b:1")).missing is None
    assert len(read(sick).workers) == 1


@pytest.mark.case("WIRE-07")
def test_no_workers_yet_is_a_list_that_serves_nothing() -> None:
    listing = read()
    assert listing.workers == ()
    assert listing.missing == f"the gateway at {GATEWAY} has no workers"


@pytest.mark.case("WIRE-07")
@pytest.mark.parametrize(
    "body", [b'{"workers": null}', b'{"detail": "Not Found"}', b"<html>busy</html>", b"[]"]
)
def test_an_answer_that_is_no_list_is_a_broken_reply_and_shown(body: bytes) -> None:
    with pytest.raises(ReplyError, match=r"lists no workers") as raised:
        read_body(body)
    assert raised.value.body == body
    assert body.decode() in str(raised.value)


def test_an_address_without_a_list_is_told_how_to_name_workers() -> None:
    with pytest.raises(ConfigError, match=r"\?workers=HOST:PORT"):
        read_body(b'{"detail":"Not Found"}', status=404)
    with pytest.raises(NotReadyError):
        read_body(b"", status=503)


class Gateway:
    """A gateway before embedded SGLang servers at `http://w0:1`, `http://w1:1`, ...

    It passes generations on in turn, and answers administration as `smg` does.
    """

    in_process = True

    def __init__(self, workers: int, **query: str) -> None:
        wanted = {"protocol": "sglang", "workers": str(workers), **query}
        self.cluster = Cluster.from_query(wanted)
        self.keys: dict[str, set[str | None]] = {}
        self.inner = MemoryTransport(self.cluster)
        self.listed = [f"http://w{index}:1" for index in range(workers)]
        self.how: dict[str, dict[str, Any]] = {}
        self.administered: set[str] = set()
        self.generated: list[str] = []

    def _place(self, base_url: str, call: HTTPCall) -> tuple[str, HTTPReply | None]:
        if base_url != GATEWAY:
            self.administered.add(base_url)
            index = int(base_url.removeprefix("http://w").removesuffix(":1"))
            return f"memory://{index}", None
        if call.path == "/workers":
            body = {"workers": [listed(url, **self.how.get(url, {})) for url in self.listed]}
            return "", HTTPReply(200, json.dumps(body).encode(), {}, GATEWAY + call.path)
        if call.path == "/v1/chat/completions":
            model = json.loads(call.body or b"{}").get("model")
            if model != RECORDED["model_id"]:
                return "", _no_model(model)
        if call.path in ("/generate", "/v1/chat/completions"):
            target = self.listed[len(self.generated) % len(self.listed)]
            self.generated.append(target)
            return f"memory://{target.removeprefix('http://w').removesuffix(':1')}", None
        text = f"Invalid URL ({call.method} {call.path})"
        error = {"error": {"type": "invalid_request_error", "code": "unknown_url", "message": text}}
        return "", HTTPReply(404, json.dumps(error).encode(), {}, GATEWAY + call.path)

    async def send(
        self, base_url: str, call: HTTPCall, *, headers: Mapping[str, str] = {}
    ) -> HTTPReply:
        self.keys.setdefault(base_url, set()).add(headers.get("authorization"))
        url, reply = self._place(base_url, call)
        reply = reply or await self.inner.send(url, call, headers=headers)
        return replace(reply, url=base_url + call.path)

    @asynccontextmanager
    async def stream(
        self, base_url: str, call: HTTPCall, *, headers: Mapping[str, str] = {}
    ) -> AsyncIterator[StreamReply]:
        url, _ = self._place(base_url, call)
        async with self.inner.stream(url, call, headers=headers) as reply:
            yield reply

    async def aclose(self) -> None:
        await self.inner.aclose()


def _no_model(model: object) -> HTTPReply:
    text = f"No worker available for model '{model}'"
    error = {"type": "invalid_request_error", "code": "model_not_found", "message": text}
    url = f"{GATEWAY}/v1/chat/completions"
    return HTTPReply(404, json.dumps({"error": error}).encode(), {}, url)


@asynccontextmanager
async def behind(gateway: Gateway, **options: Any) -> AsyncIterator[genapi.Fleet]:
    target = f"sglang://{GATEWAY.removeprefix('http://')}?workers=discover"
    try:
        async with genapi.connect(target, transport=gateway, **options) as fleet:
            yield fleet
    finally:
        await gateway.aclose()


def request(**more: Any) -> genapi.GenerateRequest:
    sampling = genapi.SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    return genapi.GenerateRequest(prompt_token_ids=[1, 2, 3], sampling=sampling, **more)


async def test_requests_go_to_the_gateway_and_administration_to_the_workers() -> None:
    gateway = Gateway(2)
    async with behind(gateway) as fleet:
        snapshot = await fleet.wait_ready(timeout_s=5)
        assert [worker.url for worker in snapshot.workers] == gateway.listed
        async with genapi.WeightPublisher(fleet, transport=genapi.weights.Memory()) as publisher:
            await publisher.adopt(3)
            replies = [await fleet.generate(request(min_version=3)) for _ in range(2)]
    assert sorted(gateway.generated) == gateway.listed
    assert gateway.administered == set(gateway.listed)
    assert all(r.output.policy.oldest == r.output.policy.newest for r in replies)
    assert all(r.output.policy.newest and r.output.policy.newest.step == 3 for r in replies)


async def test_a_chat_names_the_model_as_the_gateway_does_and_not_as_the_worker() -> None:
    async with behind(Gateway(2)) as fleet:
        chat = genapi.GenerateRequest(
            messages=[{"role": "user", "content": "hello"}],
            sampling=genapi.SamplingParams(max_tokens=4),
        )
        assert len((await fleet.generate(chat)).output.token_ids) == 4


async def test_a_worker_that_is_restarted_at_another_address_is_found_by_the_list_alone() -> None:
    gateway = Gateway(3)
    before, after = gateway.listed[:2], [gateway.listed[0], gateway.listed[2]]
    gateway.listed = before
    restarted: list[str] = []

    async def restart(_worker: object, url: str) -> None:
        restarted.append(url)
        gateway.listed = after

    async with behind(gateway) as fleet:
        await fleet.wait_ready(timeout_s=5)
        async with genapi.WeightPublisher(
            fleet, transport=genapi.weights.Memory(), restarter=restart
        ) as publisher:
            await publisher.adopt(0)
            gateway.cluster.workers[1].kill()
            with anyio.fail_after(20):
                report = await publisher.publish(1, genapi.weights.from_tensors(weights(1)))
    assert restarted == before[1:]
    assert [receipt.url for receipt in report.receipts] == after


KEYS = {"api_key": "data", "admin_api_key": "admin"}


async def test_a_worker_that_only_the_list_names_gets_no_key_and_the_error_says_so() -> None:
    gateway = Gateway(2, **KEYS)
    wanted = "http://w[01]:1, which only the list of workers names: add it to allowed_origins"
    async with behind(gateway, **KEYS) as fleet:
        with pytest.raises(genapi.AuthError, match=wanted):
            await fleet.wait_ready(timeout_s=5)
    assert gateway.keys == {GATEWAY: {"Bearer data"}, "http://w0:1": {None}, "http://w1:1": {None}}


async def test_a_listed_worker_that_is_allowed_gets_the_keys() -> None:
    gateway = Gateway(2, **KEYS)
    async with behind(gateway, allowed_origins=("http://w0:1", "http://w1:*"), **KEYS) as fleet:
        assert len((await fleet.wait_ready(timeout_s=5)).workers) == 2
        async with genapi.WeightPublisher(fleet, transport=genapi.weights.Memory()) as publisher:
            await publisher.adopt(3)
    for url in gateway.listed:
        assert gateway.keys[url] == {"Bearer data", "Bearer admin"}


async def test_a_worker_that_joins_and_one_that_leaves_are_seen() -> None:
    gateway = Gateway(2)
    both, gateway.listed = gateway.listed, gateway.listed[:1]
    async with behind(gateway) as fleet:
        first = await fleet.wait_ready(timeout_s=5)
        assert [worker.url for worker in first.workers] == both[:1]
        gateway.listed = both
        assert [worker.url for worker in (await fleet.snapshot()).workers] == both
        gateway.listed = both[1:]
        assert [worker.url for worker in (await fleet.snapshot()).workers] == both[1:]


async def test_a_fleet_is_ready_when_everybody_that_it_expects_is_listed() -> None:
    gateway = Gateway(3)
    all_of_them, gateway.listed = gateway.listed, gateway.listed[:1]
    async with behind(gateway, expect=Topology(workers=3)) as fleet:
        with pytest.raises(genapi.FleetError, match="1 of 3 workers seen"):
            await fleet.wait_ready(timeout_s=0.5)
        gateway.listed = all_of_them
        with anyio.fail_after(5):
            assert len((await fleet.wait_ready(timeout_s=5)).workers) == 3


async def test_a_worker_that_cannot_be_used_is_named_with_why_where_nobody_else_is_listed() -> None:
    gateway = Gateway(1)
    gateway.how["http://w0:1"] = {"connection_mode": "grpc"}
    why = (
        rf"1 of the 1 workers that {GATEWAY} lists cannot be used: http://w0:1: "
        "it is sglang over grpc, not SGLang over http"
    )
    async with behind(gateway) as fleet:
        with pytest.raises(genapi.FleetError, match=why):
            await fleet.wait_ready(timeout_s=0.3)
        with pytest.raises(genapi.FleetError, match=why):
            await fleet.generate(request())
        async with genapi.WeightPublisher(fleet, transport=genapi.weights.Memory()) as publisher:
            with pytest.raises(genapi.FleetError, match=why):
                await publisher.adopt(0)


@pytest.mark.parametrize("address", ["user:hunter2@w0:1", "user:hunter2@w0", "user:hunter2@1"])
async def test_the_user_info_of_a_listed_address_is_in_no_error(address: str) -> None:
    gateway = Gateway(1)
    gateway.listed = [f"http://{address}"]
    async with behind(gateway) as fleet:
        with pytest.raises(genapi.FleetError, match="cannot be used: http://") as unready:
            await fleet.wait_ready(timeout_s=0.3)
        with pytest.raises(genapi.FleetError, match="cannot be used: http://") as unserved:
            await fleet.generate(request())
    for caught in (unready, unserved):
        assert "hunter2" not in str(caught.value)


async def test_a_worker_that_cannot_be_used_is_named_with_why_where_it_is_expected() -> None:
    gateway = Gateway(2)
    gateway.how["http://w1:1"] = {"runtime_type": "vllm"}
    why = "1 of 2 workers seen: .*; 1 of the 2 workers .* cannot be used: http://w1:1: it is vllm"
    async with behind(gateway, expect=Topology(workers=2)) as fleet:
        with pytest.raises(genapi.FleetError, match=why):
            await fleet.wait_ready(timeout_s=0.3)


async def test_one_server_that_is_listed_twice_is_said_to_be_one() -> None:
    gateway = Gateway(2)
    gateway.listed.append("http://w00:1")
    wanted = "http://w00:1 and http://w0:1 are one server"
    async with behind(gateway) as fleet:
        with pytest.raises(genapi.FleetError, match=wanted):
            await fleet.wait_ready(timeout_s=0.3)
        gateway.listed.pop()
        assert len((await fleet.wait_ready(timeout_s=5)).workers) == 2


class Crowd:
    """A gateway that lists 300 workers, none of which answers; or each refuses."""

    in_process = False

    def __init__(self, *, refuses: bool) -> None:
        self.refuses = refuses
        self.asked: set[str] = set()

    async def send(
        self, base_url: str, call: HTTPCall, *, headers: Mapping[str, str] = {}
    ) -> HTTPReply:
        del headers
        if call.path == "/workers":
            body = {"workers": [listed(f"http://w:{number}") for number in range(1000, 1300)]}
            return HTTPReply(200, json.dumps(body).encode(), {}, base_url + call.path)
        self.asked.add(base_url)
        if self.refuses:
            raise genapi.TransportError("refused", phase="not_sent", url=base_url)
        await anyio.sleep_forever()
        raise AssertionError

    stream = send  # nothing is streamed


async def test_of_many_workers_some_are_read_at_a_time_and_the_error_names_the_first() -> None:
    transport: Any = Crowd(refuses=False)
    async with genapi.connect("sglang://gateway:1?workers=discover", transport=transport) as fleet:
        with pytest.raises(genapi.FleetError, match=r"no answer yet from .* 295 more$") as caught:
            await fleet.wait_ready(timeout_s=1)
    assert str(caught.value).count("http://w:") == 5
    assert 0 < len(transport.asked) <= 128


async def test_of_many_workers_that_fail_the_errors_name_the_first() -> None:
    transport: Any = Crowd(refuses=True)
    async with genapi.connect("sglang://gateway:1?workers=discover", transport=transport) as fleet:
        with pytest.raises(genapi.FleetError, match=r"refused; and 295 more$") as unready:
            await fleet.wait_ready(timeout_s=2)
        async with genapi.WeightPublisher(fleet, transport=genapi.weights.Memory()) as publisher:
            with pytest.raises(genapi.FleetError, match="and 295 more were never") as unreached:
                await publisher.adopt(0)
    for caught in (unready, unreached):
        assert str(caught.value).count("http://w:") == 5
    assert len(transport.asked) == 300


def test_a_list_elsewhere_is_for_a_target_that_discovers() -> None:
    with pytest.raises(ConfigError, match=r"\?workers=discover"):
        genapi.connect("sglang://w:1", discovery_url="http://gateway:1")
    with pytest.raises(genapi.UnsupportedError, match="not supported"):
        genapi.connect("vllm://router:1?workers=discover")
