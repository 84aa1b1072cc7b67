"""SGLang's HTTP server over the embedded engine: what routes exist, for whom, and what they do.

The front end and the scheduler are told apart, as in the real server: each has its own idea of what
the weights are called, requests wait at the pause gate in the one and in the queue of the other,
and what the front end sends to the scheduler takes effect even if the client has left. Replies are
built in `sglang_shapes`, `sglang_reply` and `sglang_openai`, weight updates are in
`sglang_weights`.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import count
from typing import Any, Self, TypeVar, cast

import msgspec

from .calls import ByteStream, Call, Reply
from .clock import Clock
from .engine import Engine, EngineConfig
from .faults import Fault
from .protocol import Identity
from .requests import Request
from .sampling import Sampling
from .sglang_facts import SglangFlags, load_report, model_info, model_list, server_info
from .sglang_gate import Gate
from .sglang_openai import OpenAIStream, answered, read_openai, read_tokenize, whole
from .sglang_reply import Flight, Moment
from .sglang_request import (
    Item,
    Limits,
    checked,
    items_of,
    read_generate,
    rejection,
)
from .sglang_shapes import (
    BadValue,
    Fields,
    Refusal,
    Route,
    empty,
    internal,
    ok,
    outcome,
    plain,
    read_struct,
    text,
)
from .sglang_weights import UpdateOptions, WeightUpdater, engine_checksum, rank_checksum

__all__ = ("SglangConfig", "SglangServer")

T = TypeVar("T")
_OPEN = ("/health", "/ready", "/metrics")
_POLL_S = 1.0
_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. (When there are running or "
    "waiting requests, the operation will not be performed.)\n"
)
_NO_LORA = "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
_UPDATE = {
    "flush_cache": "bool",
    "abort_all_requests": "bool",
    "weight_version": "str?",
    "load_format": "str?",
    "selector": "selector",
}
_UPDATE_DEFAULTS = {
    "flush_cache": True,
    "abort_all_requests": False,
    "weight_version": None,
    "load_format": None,
    "selector": "all",
}
_BODIES: Mapping[str, tuple[int, str, Fields]] = {
    "/pause_generation": (
        1831,
        "pause_generation",
        Fields("PauseGenerationReqInput", {"mode": "pause"}, {"mode": "abort"}),
    ),
    "/continue_generation": (
        1844,
        "continue_generation",
        Fields(
            "ContinueGenerationReqInput",
            {"torch_empty_cache": "bool"},
            {"torch_empty_cache": True},
        ),
    ),
    "/abort_request": (
        1721,
        "abort_request",
        Fields("AbortReq", {"rid": "str?", "abort_all": "bool"}, {"rid": None, "abort_all": False}),
    ),
    "/begin_weight_update": (
        1458,
        "begin_weight_update",
        Fields("BeginWeightUpdateReqInput", {"selector": "selector"}, {"selector": "all"}),
    ),
    "/end_weight_update": (1473, "end_weight_update", Fields("EndWeightUpdateReqInput", {})),
    "/init_weights_update_group": (
        1404,
        "init_weights_update_group",
        Fields(
            "InitWeightsUpdateGroupReqInput",
            {
                "master_address": "str",
                "master_port": "int",
                "rank_offset": "int",
                "world_size": "int",
                "group_name": "str",
                "backend": "str",
            },
            {"group_name": "weight_update_group", "backend": "nccl"},
        ),
    ),
    "/destroy_weights_update_group": (
        1420,
        "destroy_weights_update_group",
        Fields(
            "DestroyWeightsUpdateGroupReqInput",
            {"group_name": "str"},
            {"group_name": "weight_update_group"},
        ),
    ),
    "/update_weights_from_distributed": (
        1488,
        "update_weights_from_distributed",
        Fields(
            "UpdateWeightsFromDistributedReqInput",
            {"names": "strs", "dtypes": "strs", "shapes": "shapes", "group_name": "str", **_UPDATE},
            {"group_name": "weight_update_group", **_UPDATE_DEFAULTS},
        ),
    ),
    "/update_weights_from_tensor": (
        1436,
        "update_weights_from_tensor",
        Fields(
            "UpdateWeightsFromTensorReqInput",
            {"serialized_named_tensors": "strs", **_UPDATE},
            _UPDATE_DEFAULTS,
        ),
    ),
    "/update_weights_from_disk": (
        1300,
        "update_weights_from_disk",
        Fields(
            "UpdateWeightFromDiskReqInput",
            {
                "model_path": "str",
                "load_format": "str?",
                "abort_all_requests": "bool",
                "weight_version": "str?",
                "flush_cache": "bool",
            },
            {
                "load_format": None,
                "abort_all_requests": False,
                "weight_version": None,
                "flush_cache": True,
            },
        ),
    ),
    "/update_weight_version": (
        1527,
        "update_weight_version",
        Fields(
            "UpdateWeightVersionReqInput",
            {"new_version": "str", "abort_all_requests": "bool"},
            {"abort_all_requests": True},
        ),
    ),
    "/get_weights_by_name": (
        1559,
        "get_weights_by_name",
        Fields(
            "GetWeightsByNameReqInput",
            {"name": "str", "truncate_size": "int"},
            {"truncate_size": 100},
        ),
    ),
    "/weights_checker": (
        1599,
        "check_weights",
        Fields(
            "CheckWeightsReqInput",
            {"action": "str", "skip_tensor_list": "strs?", "selector": "selector"},
            {"action": "checksum", "skip_tensor_list": None, "selector": "all"},
        ),
    ),
    "/release_memory_occupation": (
        1575,
        "release_memory_occupation",
        Fields("ReleaseMemoryOccupationReqInput", {"tags": "strs?"}, {"tags": None}),
    ),
    "/resume_memory_occupation": (
        1587,
        "resume_memory_occupation",
        Fields("ResumeMemoryOccupationReqInput", {"tags": "strs?"}, {"tags": None}),
    ),
}
_MEMORY = ("kv_cache", "weights", "cuda_graph")


@dataclass(frozen=True, slots=True)
class SglangConfig(SglangFlags):
    """A SGLang server to build."""

    def tune(self, engine: EngineConfig) -> EngineConfig:
        """The engine's configuration with this server's pages, scores and way to cache.

        The cache holds as many tokens as before, in pages of `page_size`.

        Raises:
            ValueError: Something is asked for that SGLang has a flag of its own for.
        """
        plain = EngineConfig()
        if engine.block_size != plain.block_size:
            raise ValueError(f"block_size={engine.block_size}: write page_size for SGLang")
        if engine.logprobs_mode == "processed_logprobs":
            raise ValueError(
                "logprobs_mode='processed_logprobs': SGLang's are scaled, or raw with "
                "return_original_logprob"
            )
        pages = max(engine.cache_blocks * engine.block_size // self.page_size, 1)
        return replace(
            engine,
            block_size=self.page_size,
            cache_blocks=pages,
            caches_while_running=False,
            logprobs_mode="raw_logprobs" if self.return_original_logprob else "scaled_logprobs",
        )

    def spread(self, count: int) -> Sequence[Self]:
        """Every server is built from the same."""
        return [self] * count

    def front(self, clock: Clock, *, epoch_s: float) -> None:
        """Nothing stands before the servers."""

    def build(self, engine: Engine, identity: Identity) -> "SglangServer":
        """A server that just came up."""
        return SglangServer(self, engine, identity)


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """One route: its handlers by method, and whether it is an administrator's."""

    methods: tuple[str, ...]
    handler: Callable[[Call], Awaitable[Reply]]
    admin: bool = False
    outlives: bool = False
    """Whether it goes on without its client."""


class _Visit:
    """One call to `/generate`: what it holds until it is over."""

    def __init__(self) -> None:
        self.flights: list[Flight] = []
        self.single = True
        self.reading = False
        self.left = False
        self.admission: asyncio.Task[None] | None = None
        self.lasting: asyncio.Task[None] | None = None
        """Holds the lock for a streamed reply until it is made, be it read or not."""


class SglangServer:
    """One API server process and its scheduler."""

    def __init__(self, config: SglangFlags, engine: Engine, identity: Identity) -> None:
        self._config = config
        self._engine = engine
        self._identity = identity
        self._numbers = count()
        self._turns = count()
        self._gate = Gate()
        self._states: dict[str, Flight] = {}
        self._healthy = True
        self._heard_at = -1.0
        self._lost: set[Call] = set()
        """Calls whose sender goes away."""
        self._version = engine.label = config.weight_version
        self._model_path = config.model
        self._limits = Limits(
            vocab=engine.config.vocab,
            context=engine.config.max_model_len,
            seeded=config.enable_deterministic_inference,
        )
        self._weights = WeightUpdater(
            engine, ranks=config.tp_size, stages=config.pp_size, crash=self._crash
        )
        self._endpoints = self._table()

    @property
    def holds(self) -> bool:
        """Whether requests wait at the gate; after an abort the scheduler itself goes on."""
        return self._gate.shut

    async def handle(self, call: Call, fault: Fault | None) -> Reply:
        """Answer one call as the real server would.

        Raises:
            ConnectionResetError: The process went away meanwhile, or the call took it down.
        """
        if self._engine.error is not None:
            raise ConnectionResetError(str(self._engine.error))
        endpoint = self._endpoints.get(call.path)
        if self._locked(call, endpoint):
            return plain(401, {"error": "Unauthorized"})
        if endpoint is None:
            return plain(404, {"detail": "Not Found"})
        if call.method not in endpoint.methods:
            allow = ", ".join(endpoint.methods)
            return plain(405, {"detail": "Method Not Allowed"}, allow=allow)
        if fault is not None and fault.action == "peer_lost":
            self._lost.add(call)
        try:
            if endpoint.outlives:
                task = self._engine.start(_awaited(endpoint.handler(call)))
                return await self._engine.outcome(task)
            return await endpoint.handler(call)
        except Refusal as refusal:
            return refusal.reply

    def _table(self) -> dict[str, _Endpoint]:
        def user(handler: Callable[[Call], Awaitable[Reply]], *methods: str) -> _Endpoint:
            return _Endpoint(methods, handler)

        def admin(handler: Callable[[Call], Awaitable[Reply]], *methods: str) -> _Endpoint:
            return _Endpoint(methods or ("POST",), handler, admin=True, outlives=True)

        either = ("GET", "POST")
        return {
            "/ready": user(self._ready, "GET"),
            "/health": user(self._health, "GET"),
            "/health_generate": user(self._health, "GET"),
            "/ping": user(self._ping, "GET"),
            "/model_info": user(self._model_info, "GET"),
            "/get_model_info": user(self._model_info, "GET"),
            "/server_info": user(self._server_info, "GET"),
            "/get_server_info": user(self._server_info, "GET"),
            "/v1/models": user(self._models, "GET"),
            "/v1/loads": user(self._loads, "GET"),
            "/tokenize": user(self._tokenize, "POST"),
            "/v1/tokenize": user(self._tokenize, "POST"),
            "/v1/completions": user(self._completions, "POST"),
            "/v1/chat/completions": user(self._chat, "POST"),
            "/generate": user(self._generate, "POST", "PUT"),
            "/flush_cache": admin(self._flush_cache, *either),
            "/pause_generation": admin(self._pause),
            "/continue_generation": admin(self._continue),
            "/abort_request": admin(self._abort_request),
            "/begin_weight_update": admin(self._begin),
            "/end_weight_update": admin(self._end),
            "/init_weights_update_group": admin(self._join),
            "/destroy_weights_update_group": admin(self._leave_group),
            "/update_weights_from_distributed": admin(self._update_from_group),
            "/update_weights_from_tensor": admin(self._update_from_tensor),
            "/update_weights_from_disk": admin(self._update_from_disk),
            "/update_weight_version": admin(self._update_version),
            "/get_weights_by_name": admin(self._weights_by_name, *either),
            "/weights_checker": admin(self._check_weights, *either),
            "/release_memory_occupation": admin(self._release_memory, *either),
            "/resume_memory_occupation": admin(self._resume_memory, *either),
            "/load_lora_adapter": admin(self._no_lora),
            "/unload_lora_adapter": admin(self._no_lora),
            "/remote_instance_transfer_engine_info": admin(self._no_transfer_engine, "GET"),
        }

    def _locked(self, call: Call, endpoint: _Endpoint | None) -> bool:
        if call.path.startswith(_OPEN):
            return False
        user, admin = self._config.api_key, self._config.admin_api_key
        known = endpoint is not None and call.method in endpoint.methods
        key = (admin or user) if known and endpoint is not None and endpoint.admin else user
        scheme, _, given = call.headers.get("authorization", "").partition(" ")
        return key is not None and (scheme.lower() != "bearer" or given != key)

    # facts

    async def _ready(self, _: Call) -> Reply:
        return empty(200 if self._healthy and not self._gate.shut else 503)

    async def _ping(self, _: Call) -> Reply:
        return empty(200 if self._healthy else 503)

    async def _health(self, call: Call) -> Reply:
        """A generation of one token; any other sign of life of the scheduler will do as well."""
        if call.path == "/health" and not self._config.health_generation:
            return empty()
        clock, visit = self._engine.clock, _Visit()
        began = clock.now()
        item = Item(
            rid=f"HEALTH_CHECK_{self._new_id()}",
            token_ids=(0,),
            params={"max_new_tokens": 1, "temperature": 0.0},
        )
        visit.admission = self._engine.start(self._admit(visit, [item], 1))
        await asyncio.sleep(0)  # it is with the scheduler before time passes
        alive = False
        try:
            while not alive and clock.now() < began + self._config.health_timeout_s:
                await clock.sleep(_POLL_S)
                if self._engine.error is not None:
                    raise self._engine.error
                alive = max(self._heard_at, self._engine.stepped_at) > began
        finally:
            self._leave(visit)
        self._healthy = alive
        return empty(200 if alive else 503)

    async def _model_info(self, _: Call) -> Reply:
        return ok(model_info(self._config, model_path=self._model_path, version=self._version))

    async def _server_info(self, _: Call) -> Reply:
        facts = server_info(
            self._config, self._engine.config, instance_id=self._identity.instance_id
        )
        return ok(await self._ask(lambda: facts))

    async def _models(self, _: Call) -> Reply:
        created = self._created()
        return ok(model_list(self._model_path, self._engine.config, created=created))

    async def _loads(self, _: Call) -> Reply:
        engine = self._engine
        return ok(
            load_report(
                self._config,
                engine.config,
                running=engine.num_running,
                waiting=engine.num_waiting,
                now=self._identity.epoch_s + engine.clock.now(),
            )
        )

    async def _tokenize(self, call: Call) -> Reply:
        limits = self._limits
        return ok(read_tokenize(call, vocab=limits.vocab, context=limits.context))

    # generation

    async def _generate(self, call: Call) -> Reply:
        body, visit = read_generate(call), _Visit()
        if body.get("stream"):
            visit.admission = self._engine.start(self._arrive(visit, body))
            visit.lasting = self._engine.start(self._last(visit, visit.admission))
            headers = {"content-type": "text/event-stream; charset=utf-8", "vary": "Origin"}
            stream = ByteStream(self._events(visit), gone=lambda: self._leave(visit))
            return Reply(200, headers, stream)
        try:
            await self._arrive(visit, body)
            replies = [await self._finished(flight) for flight in visit.flights]
        finally:
            self._leave(visit)
        return ok(replies[0] if visit.single else replies)

    def _created(self) -> int:
        return int(self._identity.epoch_s + self._engine.clock.now())

    async def _completions(self, call: Call) -> Reply:
        return await self._openai(call, chat=False)

    async def _chat(self, call: Call) -> Reply:
        return await self._openai(call, chat=True)

    async def _openai(self, call: Call, *, chat: bool) -> Reply:
        config, visit = self._config, _Visit()
        body = read_openai(
            call,
            chat=chat,
            vocab=self._limits.vocab,
            context=self._limits.context,
            reasoning=config.reasoning_parser,
            calls=config.tool_call_parser,
        )
        if body.stream:
            visit.admission = self._engine.start(self._arrive(visit, body.native))
            headers = {"content-type": "text/event-stream; charset=utf-8", "vary": "Origin"}
            events = self._openai_events(visit, OpenAIStream(body, self._created()))
            return Reply(200, headers, ByteStream(events, gone=lambda: self._leave(visit)))
        try:
            await self._arrive(visit, body.native)
            replies = [await self._finished(flight) for flight in visit.flights]
        except BadValue as refusal:
            return answered(refusal)
        finally:
            self._leave(visit)
        return ok(whole(body, replies, created=self._created(), new_id=self._new_id()))

    async def _openai_events(
        self, visit: _Visit, stream: OpenAIStream
    ) -> AsyncGenerator[bytes, None]:
        try:
            if visit.admission is not None:
                await self._engine.outcome(visit.admission)
            async with aclosing(self._frames(visit.flights)) as frames:
                async for index, frame in frames:
                    yield _event(stream.chunk(index, frame))
        except BadValue as refusal:
            yield _event({"error": {"message": refusal.message, "type": "BadRequestError"}})
        else:
            if stream.body.include_usage:
                yield _event(stream.closing())
        yield b"data: [DONE]\n\n"
        self._leave(visit)

    async def _arrive(self, visit: _Visit, body: Mapping[str, Any]) -> None:
        items, visit.single, n = items_of(body, vocab=self._limits.vocab, new_id=self._new_id)
        rank = body.get("routed_dp_rank", body.get("data_parallel_rank"))
        if rank is not None and not 0 <= rank < self._config.ranks:
            raise BadValue(f"routed_dp_rank={rank} out of range [0, {self._config.ranks})")
        await self._admit(visit, items, n)

    async def _admit(self, visit: _Visit, items: Sequence[Item], n: int) -> None:
        """Bring sequences past the gate and to the scheduler."""
        try:
            visit.flights = self._registered(items)
            await self._gate.enter()
            visit.reading = True
            if n > 1:
                await self._spread(visit, n)
                return
            for flight in visit.flights:
                self._send(flight, checked(flight.item, self._limits))
        except BaseException:
            self._leave(visit)
            raise

    async def _last(self, visit: _Visit, admission: asyncio.Task[None]) -> None:
        """Let go of the lock when the last token is made: sockets take what no client reads yet."""
        await asyncio.wait([admission])
        for flight in visit.flights:
            if flight.request is not None:
                await flight.request.finished()
        self._unlock(visit)

    async def _spread(self, visit: _Visit, n: int) -> None:
        """Compute each prompt once, then send `n` samples of it under ids of their own."""
        originals = visit.flights
        samplings = [checked(flight.item, self._limits) for flight in originals]
        for flight, sampling in zip(originals, samplings, strict=True):
            (warm,) = self._registered([replace(flight.item, rid=self._new_id(), stream=False)])
            visit.flights = [*visit.flights, warm]
            self._send(warm, replace(sampling, max_tokens=0))
            await self._finished(warm)
        for flight in originals:
            self._states.pop(flight.item.rid, None)
        visit.flights = []
        for flight, sampling in zip(originals, samplings, strict=True):
            copies = [replace(flight.item, rid=self._new_id()) for _ in range(n)]
            visit.flights += self._registered(copies)
            for sample in visit.flights[-n:]:
                self._send(sample, sampling)

    def _registered(self, items: Sequence[Item]) -> list[Flight]:
        for item in items:
            if item.rid in self._states:
                raise BadValue(f"Duplicate request ID detected: {item.rid}")
        now, interval = self._engine.clock.now(), self._config.stream_interval
        flights = [Flight(item, now=now, interval=interval) for item in items]
        self._states.update((flight.item.rid, flight) for flight in flights)
        return flights

    def _send(self, flight: Flight, sampling: Sampling) -> None:
        item = flight.item
        prompt: Sequence[int] = item.token_ids
        for token in prompt:
            if not 0 <= token < self._limits.vocab:
                raise self._crash(f"token id {token} is out of vocabulary")
        flight.rejected = rejection(item, self._limits)
        if flight.rejected is not None:
            # what the scheduler refuses runs one step on a prompt of one token
            prompt = prompt[:1]
            sampling = replace(sampling, max_tokens=1, prompt_logprobs=None)
        if self._config.ranks > 1:
            flight.dp_rank = next(self._turns) % self._config.ranks
        flight.request = self._engine.submit(item.rid, prompt, sampling=sampling, salt=item.salt)
        flight.request.ending = flight.rejected is not None

    async def _finished(self, flight: Flight) -> dict[str, Any]:
        await _sent(flight).finished()
        self._over(flight)
        if flight.rejected is not None:
            raise BadValue(flight.rejected)
        return flight.reply(self._moment())

    async def _events(self, visit: _Visit) -> AsyncGenerator[bytes, None]:
        try:
            if visit.admission is not None:
                await self._engine.outcome(visit.admission)
            async with aclosing(self._frames(visit.flights)) as frames:
                async for index, frame in frames:
                    yield _event(frame if visit.single else {**frame, "index": index})
        except BadValue as refusal:
            error = {
                "message": refusal.message,
                "type": "invalid_request_error",
                "code": 400,
                "retryable": False,
            }
            yield _event({"error": error})
        yield b"data: [DONE]\n\n"
        self._leave(visit)

    async def _frames(
        self, flights: Sequence[Flight]
    ) -> AsyncGenerator[tuple[int, dict[str, Any]], None]:
        """Frames of sequences as they come; steps merge when the reader is slow."""
        increments = self._config.incremental_streaming_output
        async with aclosing(_changes([_sent(flight) for flight in flights])) as changes:
            async for index in changes:
                flight = flights[index]
                if flight.ready and not flight.over:
                    frame = flight.frame(self._moment(), increments=increments)
                    if frame["meta_info"]["finish_reason"] is not None:
                        self._over(flight)
                    yield index, frame

    def _over(self, flight: Flight) -> None:
        if self._states.get(flight.item.rid) is flight:
            del self._states[flight.item.rid]

    def _leave(self, visit: _Visit) -> None:
        """Let go of what a call holds; what it has with the scheduler is aborted there."""
        if visit.left:
            return
        visit.left = True
        for task in (visit.admission, visit.lasting):
            if task is not None:
                task.cancel()
        for flight in visit.flights:
            self._over(flight)
        self._unlock(visit)
        sent = [flight.request for flight in visit.flights if flight.request is not None]
        live = [request for request in sent if not request.done]
        if live and self._engine.error is None:
            self._engine.post(lambda: self._engine.abort(live, at_step=True))

    def _unlock(self, visit: _Visit) -> None:
        if visit.reading:
            visit.reading = False
            self._gate.lock.release_read()

    def _moment(self) -> Moment:
        return Moment(
            now=self._engine.clock.now(),
            epoch_s=self._identity.epoch_s,
            front=self._version,
            scheduler=self._engine.label,
            vocab=self._limits.vocab,
        )

    # abort and pause

    async def _abort_request(self, call: Call) -> Reply:
        body = self._struct(call)
        if body["abort_all"]:
            self._abort_all()
        else:
            self._abort(body["rid"] or "")
        return empty()

    def _abort_all(self) -> None:
        engine = self._engine
        engine.post(lambda: engine.abort(engine.requests, at_step=True))

    def _abort(self, rid: str) -> None:
        """Only an id that is known here goes to the scheduler, once; there it is a prefix."""
        flight, engine = self._states.get(rid), self._engine
        if not rid or flight is None or flight.abort_sent:
            return
        flight.abort_sent = True
        engine.post(
            lambda: engine.abort(
                [r for r in engine.requests if r.request_id.startswith(rid)], at_step=True
            )
        )

    async def _pause(self, call: Call) -> Reply:
        mode, engine = self._struct(call)["mode"], self._engine
        async with self._gate.turn:
            self._gate.shut = True
            if mode == "abort":
                # requests that are frozen never end, and nobody else gets a turn until they do
                while True:
                    self._abort_all()
                    if not self._gate.lock.locked:
                        break
                    await engine.clock.sleep(_POLL_S)
            else:
                engine.post(engine.freeze)
                if mode == "retract":
                    engine.post(engine.preempt)
        return ok({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, call: Call) -> Reply:
        self._struct(call)
        async with self._gate.turn:
            self._gate.shut = False
            self._engine.post(self._engine.resume)
            self._gate.turn.notify_all()
        return ok({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush_cache(self, call: Call) -> Reply:
        given = call.query.get("timeout", "0")
        if re.fullmatch(r"\d+(\.\d*)?", given) is None:
            raise BadValue(f"timeout must be a number of seconds, got {given!r}")
        clock, timeout = self._engine.clock, float(given)
        deadline = clock.now() + timeout
        while timeout > 0 and not self._unoccupied():
            if clock.now() >= deadline:
                return text(400, "Timed out waiting for idle state.")
            await clock.sleep(min(self._engine.config.step_s, deadline - clock.now()))
        done = await self._ask(self._weights.flush)
        return text(200, _FLUSHED) if done else text(400, "Flush cache failed.\n")

    def _unoccupied(self) -> bool:
        return self._engine.num_running == self._engine.num_waiting == 0

    # weights

    async def _begin(self, call: Call) -> Reply:
        self._struct(call)
        return await self._session(self._weights.begin)

    async def _end(self, call: Call) -> Reply:
        self._struct(call)
        return await self._session(self._weights.end)

    async def _session(self, effect: Callable[[], tuple[bool, str]]) -> Reply:
        async with self._gate.updating():
            success, message = await self._ask(effect)
        return outcome(success, " | ".join([message] * self._config.ranks))

    async def _join(self, call: Call) -> Reply:
        body = self._struct(call)
        self._require_one_replica()
        return outcome(*await self._ask(lambda: self._weights.join(body)))

    async def _leave_group(self, call: Call) -> Reply:
        body = self._struct(call)
        self._require_one_replica()
        return outcome(*await self._ask(lambda: self._weights.leave(body["group_name"])))

    async def _update_from_group(self, call: Call) -> Reply:
        lost = call in self._lost
        self._lost.discard(call)
        body = self._struct(call)
        arrays = cast("Sequence[Any] | None", call.attachment)
        reply, success = await self._update(
            body,
            lambda options: self._weights.from_group(body, options, arrays=arrays, lost=lost),
        )
        taken = getattr(arrays, "taken", None)
        if success and taken is not None:
            taken()
        return reply

    async def _update_from_tensor(self, call: Call) -> Reply:
        body = self._struct(call)
        payloads = body["serialized_named_tensors"]
        reply, _ = await self._update(
            body, lambda options: self._weights.from_pickles(payloads, options)
        )
        return reply

    async def _update(
        self, body: Mapping[str, Any], effect: Callable[[UpdateOptions], tuple[bool, str]]
    ) -> tuple[Reply, bool]:
        self._require_one_replica()
        if body["abort_all_requests"]:
            self._abort_all()
        options = UpdateOptions(body["weight_version"], body["flush_cache"])
        async with self._gate.updating():
            success, message = await self._ask(lambda: effect(options))
        if success:
            message += self._relabelled(options.weight_version)
        return outcome(success, message), success

    async def _update_from_disk(self, call: Call) -> Reply:
        body = self._struct(call)
        if body["abort_all_requests"]:
            self._abort_all()
        options = UpdateOptions(body["weight_version"], body["flush_cache"])
        folder, ranks = body["model_path"], self._config.ranks

        async def load() -> tuple[bool, str]:
            return await self._ask(lambda: self._weights.from_disk(folder, options))

        async with self._gate.turn:
            shut = self._gate.shut
        if shut:
            success, message = await load()
        else:
            async with self._gate.lock.writing():
                success, message = await load()
        message = " | ".join([message] * ranks)
        if success:
            self._model_path = folder
            message += self._relabelled(options.weight_version)
        return outcome(success, message, num_paused_requests=0 if ranks == 1 else [0] * ranks)

    def _relabelled(self, version: str | None) -> str:
        """Take over the version that an update came with, and the end of its message."""
        if version is None:
            return ""
        self._version = version
        return f" Weight version updated to {version}."

    async def _update_version(self, call: Call) -> Reply:
        body = self._struct(call)
        version = body["new_version"]
        if body["abort_all_requests"]:
            self._abort_all()
        await self._ask(lambda: self._weights.relabel(version))
        self._version = version
        message = f"Weight version updated to {version}"
        return ok({"success": True, "message": message, "new_version": version})

    async def _weights_by_name(self, call: Call) -> Reply:
        body = self._struct(call)
        name, size = body["name"], body["truncate_size"]
        rows = await self._ask(lambda: self._weights.rows(name, size))
        if rows is None:
            raise BadValue("Get parameter by name failed")
        return ok(rows if self._config.ranks == 1 else [rows] * self._config.ranks)

    async def _check_weights(self, call: Call) -> Reply:
        body = self._struct(call) if call.body else {"action": "checksum"}
        skipped = body.get("skip_tensor_list") or []
        success, message, sums = await self._ask(
            lambda: self._weights.check(body["action"], skipped)
        )
        ranks, size = self._config.ranks, self._config.tp_size
        message = " | ".join([message] * ranks)
        if sums is None:
            return outcome(success, message)
        whole = rank_checksum(sums)
        found = [
            {
                "checksums": sums,
                "per_gpu_checksum": whole,
                "parallelism_info": [
                    {
                        "role": "target",
                        "tp_rank": rank,
                        "tp_size": size,
                        "dp_rank": dp,
                        "dp_size": self._config.attn_dp_size,
                        "pp_rank": 0,
                        "pp_size": self._config.pp_size,
                        "rank": rank,
                        "size": size,
                    }
                ],
            }
            for dp in range(ranks)
            for rank in range(size)
        ]
        engine = engine_checksum([whole] * len(found))
        return outcome(success, message, ranks=found, per_engine_checksum=engine)

    # what the embedded engine has no use for

    async def _release_memory(self, call: Call) -> Reply:
        tags = self._struct(call)["tags"] or _MEMORY
        await self._ask(lambda: self._weights.release(tags))
        return ok(None)

    async def _resume_memory(self, call: Call) -> Reply:
        tags = self._struct(call)["tags"] or _MEMORY
        await self._ask(lambda: self._weights.regain(tags))
        return ok(None)

    async def _no_lora(self, _: Call) -> Reply:
        body = {
            "rid": None,
            "http_worker_ipc": None,
            "success": False,
            "error_message": _NO_LORA,
            "loaded_adapters": None,
        }
        return plain(400, body)

    async def _no_transfer_engine(self, call: Call) -> Reply:
        rank = call.query.get("rank", "")
        raise BadValue(f"Failed to get transfer engine info for rank {rank}")

    # helpers

    async def _ask(self, effect: Callable[[], T]) -> T:
        """The scheduler's answer to something, which also is a sign of life."""
        result = await self._engine.rpc(effect)
        self._heard_at = self._engine.clock.now()
        return result

    def _struct(self, call: Call) -> dict[str, Any]:
        line, function, fields = _BODIES[call.path]
        return read_struct(call, Route(call.path, function, line), fields)

    def _require_one_replica(self) -> None:
        if self._config.dp_size != 1:
            raise internal()

    def _crash(self, reason: str) -> Exception:
        """End the process, and what to raise then."""
        error = ConnectionResetError(f"the server process died: {reason}")
        self._engine.fail(error)
        return error

    def _new_id(self) -> str:
        seed = f"{self._identity.instance_id}:{next(self._numbers)}"
        return blake2b(seed.encode(), digest_size=16).hexdigest()


def _sent(flight: Flight) -> Request:
    if flight.request is None:
        raise RuntimeError(f"request {flight.item.rid!r} is not with the scheduler")
    return flight.request


async def _changes(requests: Sequence[Request]) -> AsyncGenerator[int, None]:
    """Which request has something new, until all are over."""
    if len(requests) == 1:  # in time with the steps
        while True:
            await requests[0].changed()
            over = requests[0].done
            yield 0
            if over:
                return
    waits: dict[asyncio.Task[None], int] = {}

    def wait(index: int) -> None:
        waits[asyncio.get_running_loop().create_task(requests[index].changed())] = index

    try:
        for index in range(len(requests)):
            wait(index)
        while waits:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waits.__getitem__):
                index = waits.pop(task)
                task.result()
                over = requests[index].done
                yield index
                if not over:
                    wait(index)
    finally:
        for task in waits:
            task.cancel()


async def _awaited(work: Awaitable[T]) -> T:
    return await work


def _event(frame: object) -> bytes:
    return b"data: " + msgspec.json.encode(frame) + b"\n\n"
