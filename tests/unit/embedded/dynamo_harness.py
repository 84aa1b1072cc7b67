"""A client of one embedded Dynamo deployment, and recorded exchanges of a real one."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio

from genapi.embedded import ByteStream, Call, Cluster, DynamoConfig, EngineConfig, VirtualClock
from genapi.embedded.worker import Worker

RECORDED = Path(__file__).parents[2] / "transcripts" / "dynamo"
LIMIT_S = 20
FRONTEND, DISCOVERY, WORKER = 0, 1, 2
_PORTS = {
    28300: FRONTEND,
    18000: FRONTEND,
    28301: DISCOVERY,
    18001: DISCOVERY,
    28381: WORKER,
    18083: WORKER,
    28382: WORKER + 1,
}


@dataclass(frozen=True)
class DynamoClient:
    """Calls to one deployment, replies as status and parsed JSON or the lines of a stream."""

    cluster: Cluster

    async def send(
        self, address: int, method: str, path: str, body: object = None, **more: Any
    ) -> tuple[int, Any]:
        if isinstance(body, str):
            raw = body.encode()
        else:
            raw = b"" if body is None else json.dumps(body).encode()
        call = Call(method, path, {}, more.get("headers", {}), raw, more.get("attachment"))
        with anyio.fail_after(LIMIT_S):
            reply = await self.cluster.handle(address, call)
            if isinstance(reply.body, ByteStream):
                content = b"".join([piece async for piece in reply.body])
                return reply.status, [line for line in content.decode().split("\n\n") if line]
        text = reply.body.decode()
        return reply.status, json.loads(text) if text else text

    async def get(self, address: int, path: str) -> tuple[int, Any]:
        return await self.send(address, "GET", path)

    async def engine(self, route: str, body: object = None, *, worker: int = 0) -> Any:
        """What a worker answers to one of its routes, always with a 200."""
        status, reply = await self.send(WORKER + worker, "POST", f"/engine/{route}", body or {})
        assert status == 200, reply
        return reply

    async def complete(self, prompt: Sequence[int], n: int, **fields: Any) -> tuple[int, Any]:
        """A greedy completion of `n` tokens."""
        nvext = {"extra_fields": ["worker_id", "completion_token_ids"]} | fields.pop("nvext", {})
        body = {"model": "tiny", "prompt": list(prompt), "max_tokens": n, "temperature": 0}
        return await self.send(
            FRONTEND, "POST", "/v1/completions", body | {"nvext": nvext} | fields
        )

    async def replay(self, call: Mapping[str, Any], **change: Any) -> tuple[int, Any]:
        """What is answered to a recorded call."""
        asked = call["request"]
        url = urlsplit(asked["url"])
        body = change.get("body", asked["body"])
        address = _PORTS[url.port or 0]
        return await self.send(
            address, asked["method"], url.path, body, headers=dict(asked["headers"])
        )


def recorded(name: str) -> list[dict[str, Any]]:
    """The recorded calls of that name."""
    calls: list[dict[str, Any]] = json.loads((RECORDED / f"{name}.json").read_text())["calls"]
    return calls


def deployment(
    *, workers: int = 1, engine: EngineConfig | None = None, **flags: Any
) -> tuple[Cluster, VirtualClock]:
    """An embedded deployment that is not open yet."""
    clock, config = VirtualClock(), DynamoConfig(**flags)
    built = [
        Worker(own, engine or EngineConfig(), clock=clock, index=index)
        for index, own in enumerate(config.spread(workers))
    ]
    return Cluster(built, clock=clock, front=config.front(clock, epoch_s=1.0)), clock


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[DynamoClient]:
    """A running deployment on a virtual clock."""
    cluster, _ = deployment(**options)
    async with cluster:
        yield DynamoClient(cluster)
