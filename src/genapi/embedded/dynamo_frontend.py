"""A Dynamo frontend over embedded workers: routing, replies, discovery, and what readiness says.

It knows workers by their registrations in a store whose leases outlive a killed process: discovery
names such a worker with an error, and after a moment without it the frontend even sends it requests
again, until the lease ends. A worker that was asked to sleep stays in discovery and gets none.
"""

import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from .calls import ByteStream, Call, Reply
from .clock import Clock
from .dynamo_config import DynamoFlags
from .dynamo_reply import Leg, Rendered, inference_choice, prompt_logprobs
from .dynamo_request import Generate, read_inference, read_openai
from .dynamo_shapes import (
    NOTHING,
    Refusal,
    bad_request,
    event,
    json_reply,
    nested,
    refused,
    unavailable,
)
from .dynamo_worker import DynamoWorker
from .engine import EngineDeadError
from .policy import Floats
from .protocol import Process
from .sampling import Sampling

__all__ = ("Frontend",)

LEASE_S = 9.0
"""How long the store keeps a process that was killed."""
_AVOIDED_S = 1.5
"""How long the frontend leaves a worker out whose connection broke."""
_GONE = (ConnectionResetError, EngineDeadError)


@dataclass(frozen=True, slots=True)
class Entry:
    """One registration in the store.

    Attributes:
        worker: whose.
        url: of the worker's own server.
        gone_s: how long its process has been gone; None = it is there.
    """

    worker: DynamoWorker
    url: str
    gone_s: float | None = None

    @property
    def is_routed(self) -> bool:
        """Whether the frontend may choose it."""
        return self.worker.registered and (self.gone_s is None or self.gone_s > _AVOIDED_S)

    @property
    def kind(self) -> str:
        """Its type, in the words of readiness."""
        return self.worker.config.role

    @property
    def component(self) -> str:
        """Its component."""
        return "prefill" if self.kind == "prefill" else self.worker.config.component

    def instance(self, endpoint: str) -> dict[str, Any]:
        """It as one of its endpoints."""
        name = self.worker.config.namespace
        ident = self.worker.instance_id
        return {
            "component": self.component,
            "endpoint": endpoint,
            "namespace": name,
            "instance_id": ident,
            "transport": {"tcp": f"127.0.0.1:1/{ident:x}/{name}/{self.component}/{endpoint}"},
        }


class Frontend:
    """The HTTP server that requests go to, and the one that lists the workers."""

    addresses = 2

    def __init__(self, config: DynamoFlags, clock: Clock, *, epoch_s: float) -> None:
        self._config = config
        self._clock = clock
        self._epoch_s = epoch_s
        self._numbers = itertools.count(1)
        self._turns = itertools.count()
        self._processes: Sequence[tuple[Process, str]] = ()

    def attach(self, processes: Sequence[Process], urls: Sequence[str]) -> None:
        """Name the workers, and where each has its own server."""
        self._processes = tuple(zip(processes, urls, strict=True))

    async def handle(self, address: int, call: Call) -> Reply:
        """Answer one call: to the frontend, or to the listener of discovery beside it."""
        try:
            return await (self._discover(call) if address else self._handle(call))
        except Refusal as refusal:
            return refusal.reply

    @property
    def entries(self) -> list[Entry]:
        """What is in the store now."""
        found = []
        for process, url in self._processes:
            for server, ended in process.ended:
                gone_s = self._clock.now() - ended
                if gone_s < LEASE_S:
                    found.append(Entry(cast("DynamoWorker", server), url, gone_s))
            if process.alive:
                found.append(Entry(cast("DynamoWorker", process.server), url))
        return found

    # requests

    async def _handle(self, call: Call) -> Reply:
        model, here = self._config.model, list(self.entries)
        if call.path == f"/v1/models/{model}/ready":
            return self._ready(here)
        match call.path:
            case "/health":
                return self._health(here)
            case "/live":
                return json_reply(200, {"status": "live", "message": "Service is live"})
            case "/v1/models":
                return self._models(here)
            case "/v1/completions" | "/v1/chat/completions":
                return await self._openai(call, here)
            case "/inference/v1/generate" if self._config.inference_generate:
                return await self._inference(call, here)
        if call.path.startswith("/v1/models/"):
            raise refused(404, "Model not found")
        return json_reply(404, {"message": "Route not found", "type": "Not Found", "code": 404})

    async def _openai(self, call: Call, here: list[Entry]) -> Reply:
        if not here:
            return NOTHING
        engine = here[0].worker.engine.config
        wanted = read_openai(
            call,
            models={self._config.model: None},
            vocab=engine.vocab,
            room=engine.max_model_len,
            chat=call.path == "/v1/chat/completions",
        )
        if not self._serves(here):
            raise refused(
                503,
                f"Model `{self._config.model}` is not ready to serve requests yet. The deployment "
                "may still be starting up or is not fully provisioned. Please retry shortly.",
            )
        rendered = Rendered(
            wanted=wanted,
            reply_id=f"{'chatcmpl' if wanted.chat else 'cmpl'}-{next(self._numbers)}",
            model=self._config.model,
            created=self._now(),
            tell_versions=self._config.tell_versions,
        )
        echo = {k: v for k, v in call.headers.items() if k == "x-request-id"}
        # Whoever is pinned to is looked for before anything is answered.
        for name in (wanted.decode, wanted.prefill):
            if name is not None and not any(name == e.worker.instance_id for e in here):
                raise bad_request("Invalid request")
        if wanted.stream:
            source = self._events(rendered)
            headers = {"content-type": "text/event-stream", **echo}
            return Reply(200, headers, ByteStream(source, gone=lambda: _abort(rendered)))
        try:
            async for _ in self._run(rendered):
                pass
        except _GONE:
            raise Refusal(json_reply(503, _flat(unavailable()))) from None
        finally:
            _abort(rendered)
        reply = json_reply(200, rendered.whole())
        return Reply(200, {**reply.headers, **echo}, reply.body)

    async def _events(self, rendered: Rendered) -> AsyncGenerator[bytes, None]:
        sent, legs = 0, 0
        try:
            async for _ in self._run(rendered):
                if len(rendered.legs) != legs:
                    sent, legs = 0, len(rendered.legs)
                track = rendered.legs[-1].request.tracks[0]
                last, made = track.finish_reason is not None, len(track.output)
                if made > sent or last:
                    frame = event(rendered.chunk(sent, last=last))
                    sent = made  # more may be made before it is read
                    yield frame
        except _GONE:
            yield event({"error": unavailable()})
        else:
            if rendered.wanted.include_usage:
                yield event(rendered.usage_chunk())
        finally:
            _abort(rendered)
        yield b"data: [DONE]\n\n"

    async def _run(self, rendered: Rendered) -> AsyncGenerator[None, None]:
        """One worker after the other, as often as it may be migrated; a turn for each output."""
        wanted, left = rendered.wanted, self._config.migration_limit
        pinned = wanted.decode is not None
        while True:
            try:
                await self._begin(rendered, wanted)
                request, over = rendered.legs[-1].request, False
                while not over:
                    await request.changed()
                    over = request.done  # read before the turn: a slow reader sees the end too
                    yield
            except _GONE:
                leg = rendered.legs[-1] if rendered.legs else None
                if left == 0 or pinned:
                    raise
                left -= 1
                wanted = rendered.wanted.goes_on([t for leg in rendered.legs for t in leg.output])
                if leg is not None and not leg.output:
                    rendered.legs.pop()
            else:
                return

    async def _begin(self, rendered: Rendered, wanted: Generate) -> None:
        """Send it to a worker, whose prompt another one may have to prefill.

        Raises:
            ConnectionResetError: Nobody is there who can be reached.
        """
        prefill, handed = None, None
        if self._config.prefill:
            prefill = self._choose(wanted.prefill, prefills=True)
            handed = await self._prefill(prefill, wanted, rendered.reply_id)
        decode = self._choose(wanted.decode, prefills=False)
        request = decode.worker.generate(wanted, rendered.reply_id, handed=handed)
        rendered.legs.append(
            Leg(
                engine=decode.worker.engine,
                request=request,
                decode=decode.worker.instance_id,
                prefill=(prefill or decode).worker.instance_id,
                simulates=self._config.family == "mocker",
            )
        )

    async def _prefill(self, entry: Entry, wanted: Generate, reply_id: str) -> list[Floats]:
        """The values of the prompt's positions, which the decode worker goes on from."""
        first = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
        task = Generate(wanted.prompt, first, salt=wanted.salt)
        request = entry.worker.generate(task, f"prefill-{reply_id}")
        try:
            await request.finished()
        finally:
            entry.worker.engine.abort([request])
        return request.tracks[0].rows[: len(wanted.prompt)]

    def _choose(self, pinned: int | None, *, prefills: bool) -> Entry:
        here = [e for e in self.entries if (e.kind == "prefill") == prefills and e.is_routed]
        if pinned is not None:
            here = [e for e in self.entries if e.worker.instance_id == pinned]
        if not here:
            raise ConnectionResetError("no worker can be reached")
        chosen = here[next(self._turns) % len(here)]
        if chosen.gone_s is not None:
            raise ConnectionResetError(f"{chosen.url} takes no connections")
        return chosen

    async def _inference(self, call: Call, here: list[Entry]) -> Reply:
        if not here:
            raise nested(404, "no generate-capable model is registered")
        engine = here[0].worker.engine.config
        named, wanted = read_inference(call, vocab=engine.vocab, room=engine.max_model_len)
        reply_id = named or f"gen-{next(self._numbers)}"
        entry = self._choose(None, prefills=False)
        request = entry.worker.generate(wanted, reply_id)
        try:
            await request.finished()
        except _GONE:
            raise nested(503, "Service temporarily unavailable", "service_unavailable") from None
        finally:
            entry.worker.engine.abort([request])
        if request.tracks[0].finish_reason == "abort":
            raise nested(499, "request was cancelled", "request_cancelled")
        scores = None if request.prompt_scores is None else prompt_logprobs(request)
        body = {
            "request_id": reply_id,
            "choices": [inference_choice(request)],
            "prompt_logprobs": scores,
            "kv_transfer_params": None,
        }
        return json_reply(200, body)

    # what it says of itself

    def _health(self, here: list[Entry]) -> Reply:
        more = {"device_type": "cuda", "request_plane_codec": "msgpack"}
        found = [e.instance("generate") | more for e in here if e.worker.registered]
        if self._config.family != "mocker":
            found += [e.instance("rl") | more for e in here]
        ends = sorted({f"dyn://{i['namespace']}.{i['component']}.{i['endpoint']}" for i in found})
        return json_reply(200, {"status": "healthy", "endpoints": ends, "instances": found})

    def _models(self, here: list[Entry]) -> Reply:
        card = {
            "id": self._config.model,
            "object": "model",
            "created": self._now(),
            "owned_by": "nvidia",
            "context_window": here[0].worker.engine.config.max_model_len if here else 0,
        }
        return json_reply(200, {"object": "list", "data": [card] if here else []})

    def _kinds(self) -> Mapping[str, list[list[str]]]:
        """The types of workers that it takes, and what each needs."""
        if self._config.prefill:
            return {"decode": [["prefill"]], "prefill": [["decode"]]}
        return {"aggregated": []}

    def _counts(self, here: list[Entry]) -> dict[str, int]:
        return {kind: sum(e.kind == kind and e.is_routed for e in here) for kind in self._kinds()}

    def _serves(self, here: list[Entry]) -> bool:
        return all(self._counts(here).values())

    def _ready(self, here: list[Entry]) -> Reply:
        if not here:
            raise refused(404, "Model not found")
        counts = self._counts(here)
        missing = sorted(kind for kind, count in counts.items() if not count)
        types = {
            kind: {"workers": counts[kind], "needs": needs} for kind, needs in self._kinds().items()
        }
        state: dict[str, Any] = {"ready": not missing}
        if missing:
            state["reason"] = f"missing worker types: {', '.join(missing)}"
        state |= {
            "worker_types": types,
            "present": sorted(kind for kind, count in counts.items() if count),
            "missing_worker_types": missing,
        }
        body: dict[str, Any] = {"model": self._config.model, "ready": not missing}
        if missing:
            body["reason"] = "no namespace has all required worker types live"
        body["namespaces"] = {self._config.namespace: state}
        return json_reply(503 if missing else 200, body)

    # discovery

    async def _discover(self, call: Call) -> Reply:
        """Answer one call to the listener of discovery."""
        if call.path != "/v1/rl/workers":
            return NOTHING
        if call.method != "GET":
            return Reply(405, {}, b"")
        here = [] if self._config.family == "mocker" else list(self.entries)
        listed = sorted(map(self._listed, here), key=_place)
        body: dict[str, Any] = {"namespace": self._config.namespace, "workers": listed}
        if not self._config.older:
            body = {"protocol_version": 1} | body
        return json_reply(200, body)

    def _listed(self, entry: Entry) -> dict[str, Any]:
        config = entry.worker.config
        name = f"dyn://{config.namespace}.{entry.component}.rl"
        there = entry.gone_s is None
        if self._config.older:
            return {
                "component": entry.component,
                "instance_id": entry.worker.instance_id,
                "system_url": entry.url if there else None,
                "model": config.model,
                "routes": entry.worker.routes if there else [],
                "error": None if there else "unreachable",
            }
        listed = entry.instance("rl") | {"request_plane_url": name}
        if there:
            listed["system_url"] = entry.url
        if there and config.family == "collective":
            listed["admin_base_url"] = entry.url
        listed |= {"model": config.model, "routes": entry.worker.routes if there else []}
        if there:
            return listed | {"world_size": config.tensor_parallel_size}
        return listed | {"error": "Unavailable: TCP connection to 127.0.0.1:1 failed"}

    def _now(self) -> int:
        return int(self._epoch_s + self._clock.now())


def _place(listed: Mapping[str, Any]) -> tuple[str, int]:
    return listed["component"], listed["instance_id"]


def _flat(error: Mapping[str, Any]) -> dict[str, Any]:
    return {**error, "type": "Service Unavailable"}


def _abort(rendered: Rendered) -> None:
    """The client has left, or has its reply: whoever still works for it need not."""
    for leg in rendered.legs:
        leg.engine.abort([leg.request])
