"""A worker on Dynamo's own runtime that serves the toy policy; run by Dynamo's Python.

    python policy_worker.py --model FOLDER --role prefill

Discovery, routing, streams and the system server are Dynamo's; the engine and what its routes
answer are the embedded ones. A prefill worker hands the values of a prompt's positions over to the
decode worker, as real ones hand over keys and values. The rule of this file: nothing of genapi's
but `genapi.embedded`. The folder is read for its tokenizer only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np

# Present in Dynamo's environment only.
import uvloop  # type: ignore[import-not-found]
from dynamo.common.rl import (  # type: ignore[import-not-found]
    RLRouteRegistry,
    register_rl_routes,
)
from dynamo.common.utils.runtime import create_runtime  # type: ignore[import-not-found]
from dynamo.llm import (  # type: ignore[import-not-found]
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    register_model,
)

from genapi.embedded.calls import Call
from genapi.embedded.clock import RealClock
from genapi.embedded.dynamo_config import DynamoFlags
from genapi.embedded.dynamo_worker import DynamoWorker
from genapi.embedded.engine import Engine, EngineConfig
from genapi.embedded.protocol import Identity
from genapi.embedded.requests import Track
from genapi.embedded.sampling import Sampling

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

__all__ = ("main",)

CONFIG = EngineConfig(logprobs_mode="processed_logprobs", step_s=0.002)
TYPES = {
    "aggregated": WorkerType.Aggregated,
    "prefill": WorkerType.Prefill,
    "decode": WorkerType.Decode,
}
NEEDS = {
    "aggregated": None,
    "prefill": [[WorkerType.Decode]],
    "decode": [[WorkerType.Prefill]],
}
Body = dict[str, Any]


class Policy:
    """The toy policy as an engine of Dynamo's."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.engine = Engine(CONFIG, RealClock())
        identity = Identity(instance_id=str(os.getpid()), epoch_s=0.0)
        self.worker = DynamoWorker(DynamoFlags(), self.engine, identity)

    def route(self, name: str) -> Callable[[Body], Awaitable[Body]]:
        """The handler of one of its engine routes."""

        async def answer(body: Body) -> Body:
            call = Call("POST", f"/engine/{name}", body=json.dumps(body).encode())
            reply = await self.worker.handle(call, None)
            answered: Body = json.loads(reply.body)  # type: ignore[arg-type]
            return answered

        return answer

    async def generate(self, request: Body, context: Any) -> AsyncIterator[Body]:
        """Answer one request of the frontend's, as vLLM's worker does."""
        handed = None
        if self.role == "decode":
            taken = request["prefill_result"]["disaggregated_params"]["kv_transfer_params"]
            handed = [np.asarray(row) for row in taken["values"]]
        running = self.engine.submit(
            context.id(),
            tuple(request["token_ids"]),
            sampling=read_sampling(request, most=1 if self.role == "prefill" else None),
            salt=((request.get("extra_args") or {}).get("nvext") or {}).get("cache_salt"),
            handed=handed,
        )
        (track,) = running.tracks
        sent, ended = 0, False
        try:
            while not ended:
                await running.changed()
                if context.is_stopped() or context.is_killed():
                    return
                made, ended = len(track.output), track.finish_reason is not None
                if ended or made > sent:
                    yield self._chunk(track, sent)
                    sent = made
        finally:
            self.engine.abort([running])

    def _chunk(self, track: Track, sent: int) -> Body:
        prompt = track.request.prompt
        out: Body = {"index": 0, "token_ids": track.output[sent:]}
        if track.scores:
            out["log_probs"] = [scores[0].logprob for scores in track.scores[sent:]]
        if track.finish_reason is None:
            return out
        cut = track.finish_reason == "abort"
        out["finish_reason"] = "cancelled" if cut else track.finish_reason
        out["completion_usage"] = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(track.output),
            "total_tokens": len(prompt) + len(track.output),
        }
        out["engine_data"] = {
            "completion_token_ids": list(track.output),
            "finished": True,
            # What no worker of a real engine says, for tests to hold traces against.
            "true_versions": list(track.labels),
        }
        if self.role == "prefill":
            rows = [row.tolist() for row in track.rows[: len(prompt)]]
            out["disaggregated_params"] = {"kv_transfer_params": {"values": rows}}
        return out


def read_sampling(request: Body, *, most: int | None) -> Sampling:
    """What the policy can be asked for."""
    stop, options = request.get("stop_conditions") or {}, request.get("sampling_options") or {}
    wanted = (request.get("output_options") or {}).get("logprobs")
    temperature, seed = options.get("temperature"), options.get("seed")
    return Sampling(
        max_tokens=most or stop.get("max_tokens") or 16,
        temperature=1.0 if temperature is None else temperature,
        seed=seed,
        logprobs=None if wanted is None else 1,
    )


async def main(model: str, role: str) -> None:
    """Serve until asked to stop."""
    runtime, loop = create_runtime(
        os.environ["DYN_DISCOVERY_BACKEND"],
        os.environ["DYN_REQUEST_PLANE"],
        os.environ["DYN_EVENT_PLANE"],
    )
    policy = Policy(role)
    component = "prefill" if role == "prefill" else "backend"
    endpoint = runtime.endpoint(f"dynamo.{component}.generate")
    listed = runtime.endpoint(f"dynamo.{component}.rl")
    registry = RLRouteRegistry(runtime, world_size=1)
    routes = {name: policy.route(name) for name in policy.worker.routes}
    register_rl_routes(runtime, registry, routes, enable_dispatch=True)

    async def dispatch(request: Body, context: Any = None) -> AsyncIterator[Body]:
        del context
        async for reply in registry.dispatch_stream(request):
            yield reply

    kind = ModelType.Prefill if role == "prefill" else ModelType.Chat | ModelType.Completions
    await register_model(
        ModelInput.Tokens,
        kind,
        endpoint,
        model,
        "tiny",
        worker_type=TYPES[role],
        kv_cache_block_size=16,
        runtime_config=ModelRuntimeConfig(),
        needs=NEEDS[role],
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, runtime.shutdown)
    steps = loop.create_task(policy.engine.run())
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(as_task(endpoint.serve_endpoint(policy.generate)))
            group.create_task(as_task(listed.serve_endpoint(dispatch)))
    finally:
        steps.cancel()


async def as_task(serving: Any) -> None:
    """What the runtime gives is awaitable and no coroutine."""
    await serving


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--role", choices=sorted(TYPES), default="aggregated")
    known = parser.parse_args()
    uvloop.run(main(known.model, known.role))
