"""A client of one embedded worker that speaks SGLang, and its recorded exchanges."""

import base64
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.abc

from genapi.embedded import EngineConfig, Fault, SglangConfig, VirtualClock, Worker, policy
from tests.unit.embedded.harness import Client, parsed, until

RECORDED = Path(__file__).parents[2] / "transcripts" / "sglang"
UPDATE = "/update_weights_from_distributed"
GROUP = "weight_update_group"
PROMPT = [1, 2, 3]


@dataclass(frozen=True)
class SglangClient(Client):
    """Calls to one worker, replies as status and parsed JSON."""

    async def generate(self, prompt: Sequence[int], n: int, **fields: Any) -> dict[str, Any]:
        """A finished greedy generation of `n` tokens; `sampling` overrides its parameters."""
        status, body = await self.post("/generate", request(prompt, n, **fields))
        assert status == 200, body
        assert isinstance(body, dict)
        return body

    async def tokens(self, prompt: Sequence[int], n: int, **fields: Any) -> list[int]:
        tokens: list[int] = (await self.generate(prompt, n, **fields))["output_ids"]
        return tokens

    async def pause(self, mode: str) -> None:
        assert (await self.post("/pause_generation", {"mode": mode}))[0] == 200

    async def resume(self) -> None:
        assert (await self.post("/continue_generation", {}))[0] == 200

    async def join_group(self, *, world: int = 2, **fields: Any) -> tuple[int, Any]:
        body = {
            "master_address": "127.0.0.1",
            "master_port": 29600,
            "rank_offset": 1,
            "world_size": world,
            "group_name": GROUP,
            "backend": "genapi_memory",
        }
        return await self.post("/init_weights_update_group", body | fields)

    async def update(self, weights: policy.Weights, **fields: Any) -> tuple[int, Any]:
        """One update call inside a session that is open already."""
        return await self.post(UPDATE, described(weights) | fields, attachment=[*weights.values()])

    async def publish(self, weights: policy.Weights, label: str, **fields: Any) -> None:
        """One whole session; joining and pausing is up to the caller."""
        assert (await self.post("/begin_weight_update", {}))[0] == 200
        status, reply = await self.update(weights, weight_version=label, **fields)
        assert status == 200, reply
        assert (await self.post("/end_weight_update", {}))[0] == 200

    async def label(self) -> object:
        """What the front end calls the weights."""
        return (await self.get("/model_info"))[1]["weight_version"]

    async def serves(self, weights: policy.Weights) -> bool:
        """Whether a prompt that is in no cache gives what these weights give."""
        salt = str(self.worker.engine.clock.now())
        return await self.tokens(PROMPT, 12, cache_salt=salt) == policy.greedy(weights, PROMPT, 12)


class Flying:
    """A request under way in a task of its own."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.body: Any = None
        self.lost = False

    def over(self) -> bool:
        return self.status is not None

    @property
    def meta(self) -> dict[str, Any]:
        meta: dict[str, Any] = self.body["meta_info"]
        return meta


@dataclass(frozen=True)
class Sky:
    """Where requests fly."""

    client: SglangClient
    group: anyio.abc.TaskGroup

    def launch(self, prompt: Sequence[int], n: int, **fields: Any) -> Flying:
        """Send a request and do not wait for it."""
        return self.call("/generate", request(prompt, n, **fields))

    async def fly(self, prompt: Sequence[int], n: int, *, seen: int = 3, **fields: Any) -> Flying:
        """Send a request, and wait until it has some tokens."""
        before = set(self.client.worker.engine.requests)
        flying = self.launch(prompt, n, **fields)
        await until(lambda: set(self.client.worker.engine.requests) - before)
        (new,) = set(self.client.worker.engine.requests) - before
        await until(lambda: len(new.tracks[0].output) >= seen)
        return flying

    def call(self, path: str, body: object, **fields: Any) -> Flying:
        """Send any call and do not wait for it."""
        flying = Flying()

        async def run() -> None:
            try:
                flying.status, flying.body = await self.client.post(path, body, **fields)
            except ConnectionResetError:
                flying.lost = True

        self.group.start_soon(run)
        return flying


@asynccontextmanager
async def serving(
    *, engine: EngineConfig | None = None, faults: Sequence[Fault] = (), **flags: Any
) -> AsyncIterator[SglangClient]:
    """A running worker on a virtual clock."""
    worker = Worker(
        SglangConfig(**flags), engine or EngineConfig(), clock=VirtualClock(), faults=faults
    )
    async with anyio.create_task_group() as group:
        group.start_soon(worker.run)
        yield SglangClient(worker)
        group.cancel_scope.cancel()


@asynccontextmanager
async def flights(**options: Any) -> AsyncIterator[tuple[SglangClient, Sky]]:
    """A running worker and requests in flight; those that are left at the end are dropped."""
    async with serving(**options) as client, anyio.create_task_group() as group:
        yield client, Sky(client, group)
        group.cancel_scope.cancel()


def request(prompt: Sequence[int], n: int, **fields: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": n, "temperature": 0} | fields.pop("sampling", {})
    return {"input_ids": list(prompt), "sampling_params": sampling} | fields


def described(weights: policy.Weights) -> dict[str, Any]:
    return {
        "names": list(weights),
        "dtypes": [str(array.dtype) for array in weights.values()],
        "shapes": [list(array.shape) for array in weights.values()],
        "group_name": GROUP,
    }


def encoded(weights: policy.Weights) -> list[str]:
    return [base64.b64encode(array.tobytes()).decode() for array in weights.values()]


def recorded(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())
    return content


async def replay(
    client: SglangClient, name: str, *, change: Callable[[Any], Any] = lambda body: body
) -> tuple[int, Any, str | None]:
    """Send a recorded request, its body changed; status, body and type of what comes back."""
    call = recorded(name)["request"]
    headers: Mapping[str, str] = call.get("headers") or {}
    body = call.get("json")
    reply = await client.send(
        call.get("method", "POST"),
        call["path"],
        None if body is None else change(body),
        query=call.get("params") or {},
        headers=headers,
    )
    kind = reply.headers.get("content-type")
    if kind == "application/json":
        return (*parsed(reply), kind)
    assert isinstance(reply.body, bytes)
    return reply.status, reply.body.decode(), kind
