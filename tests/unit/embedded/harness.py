"""A client of one embedded worker, and recorded exchanges of a real server to hold it against."""

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np

from genapi.embedded import (
    ByteStream,
    Call,
    Clock,
    EngineConfig,
    Fault,
    Reply,
    VirtualClock,
    VllmConfig,
    Worker,
    policy,
)

RECORDED = Path(__file__).parents[2] / "transcripts" / "vllm"
LIMIT_S = 5


@dataclass(frozen=True)
class Client:
    """Calls to one worker, replies as status and parsed JSON."""

    worker: Worker

    async def send(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        attachment: object = None,
    ) -> Reply:
        raw = b"" if body is None else json.dumps(body).encode()
        query = {name: str(value) for name, value in (query or {}).items()}
        sent = {name.lower(): value for name, value in (headers or {}).items()}
        call = Call(method, path, query, sent, raw, attachment)
        with anyio.fail_after(LIMIT_S):
            return await self.worker.handle(call)

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        return parsed(await self.send("GET", path, **options))

    async def post(self, path: str, body: object = None, **options: Any) -> tuple[int, Any]:
        return parsed(await self.send("POST", path, body, **options))

    async def generate(self, prompt: Sequence[int], n: int, **fields: Any) -> dict[str, Any]:
        """A finished greedy generation of `n` tokens; `sampling` overrides its parameters."""
        status, body = await self.post("/inference/v1/generate", request(prompt, n, **fields))
        assert status == 200, body
        assert isinstance(body, dict)
        return body

    async def choice(self, prompt: Sequence[int], n: int, **fields: Any) -> dict[str, Any]:
        choice: dict[str, Any] = (await self.generate(prompt, n, **fields))["choices"][0]
        return choice

    async def join(self, *, world: int = 2) -> None:
        info = {"rank_offset": 1, "world_size": world}
        assert (await self.post("/init_weight_transfer_engine", {"init_info": info}))[0] == 200

    async def update(self, weights: policy.Weights) -> tuple[int, Any]:
        return await self.post(
            "/update_weights", {"update_info": info_of(weights)}, attachment=list(weights.values())
        )

    async def publish(self, weights: policy.Weights, label: str) -> None:
        """One whole session; pausing is up to the caller."""
        for path, body in (
            ("/start_weight_update", None),
            ("/update_weights", weights),
            ("/finish_weight_update", {"weight_version": label}),
        ):
            if body is weights:
                status, reply = await self.update(weights)
            else:
                status, reply = await self.post(path, body)
            assert status == 200, reply


@asynccontextmanager
async def serving(
    *,
    engine: EngineConfig | None = None,
    faults: Sequence[Fault] = (),
    clock: Clock | None = None,
    **flags: Any,
) -> AsyncIterator[Client]:
    """A running worker, on a virtual clock unless told otherwise."""
    worker = Worker(
        VllmConfig(**flags), engine or EngineConfig(), clock=clock or VirtualClock(), faults=faults
    )
    async with anyio.create_task_group() as group:
        group.start_soon(worker.run)
        yield Client(worker)
        group.cancel_scope.cancel()


def request(prompt: Sequence[int], n: int, **fields: Any) -> dict[str, Any]:
    sampling = {"max_tokens": n, "temperature": 0} | fields.pop("sampling", {})
    return {"token_ids": list(prompt), "sampling_params": sampling} | fields


def parsed(reply: Reply) -> tuple[int, Any]:
    assert isinstance(reply.body, bytes)
    return reply.status, json.loads(reply.body) if reply.body else ""


async def events(reply: Reply) -> list[Any]:
    """The events of a stream; `[DONE]` as text."""
    assert isinstance(reply.body, ByteStream)
    raw = b""
    with anyio.fail_after(LIMIT_S):
        async for piece in reply.body:
            raw += piece
    lines = [line.removeprefix("data: ") for line in raw.decode().split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def until(condition: Any) -> None:
    """Let the others run until something holds."""
    with anyio.fail_after(LIMIT_S):
        while not condition():
            await anyio.lowlevel.checkpoint()


def info_of(weights: policy.Weights) -> dict[str, Any]:
    return {
        "names": list(weights),
        "dtype_names": [str(array.dtype) for array in weights.values()],
        "shapes": [list(array.shape) for array in weights.values()],
    }


def some(weights: policy.Weights, *names: str) -> dict[str, Any]:
    return {name: np.asarray(weights[name]) for name in names}


def recorded(name: str) -> list[Any]:
    content: list[Any] = json.loads((RECORDED / f"{name}.json").read_text())
    return content


def exchanges(name: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Label, request and response of each recorded exchange that has both."""
    for entry in recorded(name):
        if "request" in entry and "response" in entry:
            yield entry["name"], entry["request"], entry["response"]


def keys_of(value: object) -> object:
    """The keys of a JSON value, all the way down; lists show their first element."""
    match value:
        case dict():
            return {key: keys_of(inner) for key, inner in value.items()}
        case [first, *_]:
            return [keys_of(first)]
        case _:
            return None
