"""The receiving end inside real vLLM, driven over vLLM's own routes without the SDK."""

from __future__ import annotations

import contextlib
import http
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from genapi.weights._gloo_group import GlooGroup, GroupError, Parcel, pack

if TYPE_CHECKING:
    import pathlib

    from tests.engines.conftest import Models, Reference, Serve
    from tests.engines.kit.server import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

# Long enough to fill blocks of the prefix cache: what is stale in it would show.
PROMPT = [300 + 7 * i for i in range(200)]
COUNT = 12
LIMIT_S = 60.0
CHUNK = 1 << 18

Pair = tuple["Server", "Server"]
Tensors = Sequence[tuple[str, torch.Tensor]]


class EngineError(Exception):
    """A route answered an error."""


def call(server: Server, route: str, body: object = None) -> Any:
    """POST, or GET where the route says so."""
    method, _, path = route.rpartition(" ")
    status, reply = server.request(method or "POST", path, body, timeout_s=LIMIT_S + 30)
    if status != http.HTTPStatus.OK:
        raise EngineError(f"{status} {reply}")
    return reply


def greedy(server: Server) -> list[int]:
    sampling = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
    body = {"token_ids": PROMPT, "sampling_params": sampling}
    (choice,) = call(server, "/inference/v1/generate", body)["choices"]
    ids = choice["token_ids"]
    assert isinstance(ids, list)
    return ids


def version(server: Server) -> Any:
    return call(server, "GET /weight_info")


def described(tensors: Tensors) -> dict[str, Any]:
    return {
        "names": [name for name, _ in tensors],
        "dtype_names": [str(t.dtype).removeprefix("torch.") for _, t in tensors],
        "shapes": [list(t.shape) for _, t in tensors],
    }


class Fleet:
    """Some servers, called all at once, and their update group."""

    def __init__(self, servers: Sequence[Server], *, packed: bool = False) -> None:
        self.servers = servers
        self.packed = packed
        self.pool = ThreadPoolExecutor(len(servers))
        self.group = GlooGroup("127.0.0.1")

    def post(self, route: str, body: Any = None) -> list[Future[Any]]:
        return [self.pool.submit(call, server, route, body) for server in self.servers]

    def all(self, route: str, body: Any = None) -> list[Any]:
        return [future.result() for future in self.post(route, body)]

    def join(self) -> None:
        sizes = [call(s, "GET /get_world_size")["world_size"] for s in self.servers]
        joining = [
            self.pool.submit(
                call,
                server,
                "/init_weight_transfer_engine",
                {
                    "init_info": {
                        "master_address": self.group.host,
                        "master_port": self.group.port,
                        "rank_offset": 1 + sum(sizes[:i]),
                        "world_size": 1 + sum(sizes),
                        "packed": self.packed,
                        "packed_buffer_size_bytes": CHUNK,
                        "packed_num_buffers": 2,
                        "timeout_s": LIMIT_S,
                    }
                },
            )
            for i, server in enumerate(self.servers)
        ]
        self.group.join(1 + sum(sizes), timeout_s=LIMIT_S)
        for future in joining:
            future.result()

    def update(self, tensors: Tensors) -> list[Future[Any]]:
        return self.post("/update_weights", {"update_info": described(tensors)})

    def parcel(self, tensors: Tensors) -> Parcel:
        return pack(
            [tensor for _, tensor in tensors],
            described(tensors),
            packed=self.packed,
            packed_buffer_size_bytes=CHUNK,
        )

    def send(self, tensors: Tensors) -> int:
        return self.group.send(self.parcel(tensors), timeout_s=LIMIT_S)

    def publish(self, tensors: Tensors, label: str) -> None:
        """Everything between pause and resume, in two update calls."""
        self.all("/pause?mode=keep")
        self.all("/start_weight_update")
        half = len(tensors) // 2
        for part in (tensors[:half], tensors[half:]):
            updates = self.update(part)
            self.send(part)
            for update in updates:
                update.result()
        self.all("/finish_weight_update", {"weight_version": label})
        self.all("/resume")


@contextlib.contextmanager
def fleet(servers: Sequence[Server], *, packed: bool = False) -> Iterator[Fleet]:
    made = Fleet(servers, packed=packed)
    try:
        made.join()
        yield made
    finally:
        made.group.abandon()
        made.pool.shutdown()


def weights(model: pathlib.Path) -> list[tuple[str, torch.Tensor]]:
    return sorted(load_file(model / "model.safetensors").items())


@pytest.fixture
def says(models: Models, reference: Reference) -> Callable[[Sequence[Server], int], None]:
    """Assert that the servers hold the weights of a seed."""

    def check(servers: Sequence[Server], seed: int) -> None:
        expected = reference(models.seed1 if seed else models.seed0, PROMPT, COUNT)
        for server in servers:
            expected.assert_said_by(greedy(server))

    return check


@pytest.mark.parametrize("packed", [False, True])
def test_weights_reach_two_servers_in_one_group_and_back(
    vllm_pair: Pair,
    models: Models,
    says: Callable[[Sequence[Server], int], None],
    packed: bool,
) -> None:
    says(vllm_pair, 0)
    with fleet(vllm_pair, packed=packed) as group:
        for seed, model in ((1, models.seed1), (0, models.seed0)):
            label = f"packed={packed} seed={seed}"
            tensors = weights(model)
            started = time.monotonic()
            group.publish(tensors, label)
            print(f"published {label} in {time.monotonic() - started:.2f} s")
            says(vllm_pair, seed)
            for server in vllm_pair:
                assert label in json.dumps(version(server))
        group.all("/shutdown_weight_transfer_engine")


class Halting(tuple[torch.Tensor, ...]):  # noqa: SLOT001 - a tuple with slots can hold no attribute
    """Broadcasts of which one is not there until it is let go."""

    at: int
    reached: threading.Event
    let_go: threading.Event

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index, data in enumerate(super().__iter__()):
            if index == self.at:
                self.reached.set()
                assert self.let_go.wait(LIMIT_S)
            yield data


def test_a_sender_that_goes_in_mid_transfer_fails_the_updates_at_once_and_a_new_group_heals(
    vllm_pair: Pair, models: Models, says: Callable[[Sequence[Server], int], None]
) -> None:
    tensors = weights(models.seed1)
    with fleet(vllm_pair) as group, ThreadPoolExecutor(1) as pool:
        group.all("/pause?mode=keep")
        group.all("/start_weight_update")
        updates = group.update(tensors)
        parcel = group.parcel(tensors)
        halting = Halting(parcel.broadcasts)
        halting.at, halting.reached, halting.let_go = 9, threading.Event(), threading.Event()
        halted = replace(parcel, broadcasts=halting)
        sending = pool.submit(group.group.send, halted, timeout_s=LIMIT_S)
        assert halting.reached.wait(LIMIT_S)
        started = time.monotonic()
        group.group.abandon()
        failures = [update.exception(LIMIT_S) for update in updates]
        took_s = time.monotonic() - started
        halting.let_go.set()
        assert isinstance(sending.exception(LIMIT_S), GroupError)
    print(f"updates failed {took_s:.2f} s after the sender left")
    assert took_s < 5
    for failure in failures:
        assert isinstance(failure, EngineError)
        assert "update group broke" in str(failure)
    with fleet(vllm_pair) as healing:
        # What arrived is buffered by the engine; an empty session clears it away.
        healing.all("/start_weight_update")
        healing.all("/finish_weight_update")
        healing.publish(tensors, "healed")
        says(vllm_pair, 1)
        healing.publish(weights(models.seed0), "back")
        says(vllm_pair, 0)


def test_a_rejected_tensor_fails_both_ends_and_the_engine_is_lost(
    serve: Serve, models: Models
) -> None:
    tensors = weights(models.seed1)
    bad = [
        (name, tensor.t().contiguous() if "q_proj" in name else tensor) for name, tensor in tensors
    ]
    with serve() as servers, fleet(servers) as group:
        group.all("/pause?mode=keep")
        group.all("/start_weight_update")
        (update,) = group.update(bad)
        with pytest.raises(GroupError):
            group.send(bad)
        failure = update.exception(LIMIT_S)
        assert isinstance(failure, EngineError)
        print(f"rejected with: {failure}")
        assert servers[0].is_healthy()
        with fleet(servers) as again:
            again.all("/start_weight_update")
            with pytest.raises(EngineError) as second:
                again.all("/finish_weight_update")
        print(f"closing the session: {second.value}")


PLUGIN = """
import sys, importlib.metadata as metadata
(entry,) = metadata.entry_points(group="vllm.general_plugins", name="genapi")
function = entry.load()
assert function.__module__ == "genapi.engine_side.vllm", function
ours = {name for name in sys.modules if name.partition(".")[0] == "genapi"}
allowed = {"genapi", "genapi.engine_side", "genapi.engine_side.receiver", "genapi.engine_side.vllm"}
assert ours == allowed, ours
for name in ("vllm", "pydantic", "httpx", "anyio", "msgspec", "aiohttp"):
    assert name not in sys.modules, name
from genapi.engine_side.receiver import GlooReceiver
receiver = GlooReceiver(packed=True, packed_buffer_size_bytes=64, timeout_s=60.0)
receiver.join("127.0.0.1", int(sys.argv[1]), rank=1, world_size=2)
for tensors in receiver.receive(["a", "b"], ["bfloat16", "float32"], [[3], [40]]):
    for name, tensor in tensors:
        print(name, tensor.dtype, tensor.double().sum().item())
receiver.close()
"""


def test_the_plugin_needs_torch_and_nothing_else(torch_environment: pathlib.Path) -> None:
    group = GlooGroup("127.0.0.1")
    with subprocess.Popen(
        [torch_environment / "bin" / "python", "-W", "ignore", "-c", PLUGIN, str(group.port)],
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    ) as process:
        try:
            group.join(2, timeout_s=LIMIT_S)
            tensors = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(40)}
            parcel = pack(
                list(tensors.values()),
                described(list(tensors.items())),
                packed=True,
                packed_buffer_size_bytes=64,
            )
            group.send(parcel, timeout_s=LIMIT_S)
        finally:
            output, _ = process.communicate(timeout=LIMIT_S)
            group.abandon()
    assert process.returncode == 0
    assert output.split("\n")[:2] == ["a torch.bfloat16 3.0", "b torch.float32 40.0"]
