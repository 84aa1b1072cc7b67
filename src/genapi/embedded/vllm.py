"""vLLM's HTTP server over the embedded engine: which routes exist, who may call them, what they do.

Switches of the configuration are flags and environment of a real server. Replies are built in
`vllm_shapes` and `vllm_reply`, weight transfer is in `vllm_weights`.
"""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from itertools import count
from typing import Any, Self, cast

import anyio

from .calls import ByteStream, Call, Reply
from .clock import Clock
from .engine import Engine, EngineConfig, EngineDeadError, Pause, PauseMode
from .faults import Fault
from .protocol import Identity
from .requests import Request
from .vllm_facts import BACKEND, VllmFlags, model_list, vllm_config
from .vllm_openai import OpenAIRenderer, derendered, read_openai, read_tokenize, rendered
from .vllm_reply import ENGINE_DEAD, Renderer
from .vllm_request import read_generate
from .vllm_shapes import (
    Refusal,
    bad_request,
    empty,
    flag,
    internal,
    invalid,
    json_object,
    ok,
    plain,
    worker_failed,
)
from .vllm_weights import PeerLost, WeightSession, WorkerError

__all__ = ("VllmConfig", "VllmServer")

_Handler = Callable[["VllmServer", Call], Awaitable[Reply]]
_GUARDED = ("/v1", "/v2", "/inference", "/cohere")


@dataclass(frozen=True, slots=True)
class VllmConfig(VllmFlags):
    """A vLLM server to build."""

    def tune(self, engine: EngineConfig) -> EngineConfig:
        """The engine's configuration as it is.

        Raises:
            ValueError: A mode of logprobs that vLLM does not have.
        """
        if engine.logprobs_mode == "scaled_logprobs":
            raise ValueError(
                "logprobs_mode='scaled_logprobs': vLLM has raw_logprobs and processed_logprobs"
            )
        return engine

    def spread(self, count: int) -> Sequence[Self]:
        """Every server is built from the same."""
        return [self] * count

    def front(self, clock: Clock, *, epoch_s: float) -> None:
        """Nothing stands before the servers."""

    def build(self, engine: Engine, identity: Identity) -> "VllmServer":
        """A server that just came up."""
        return VllmServer(self, engine, identity)


class VllmServer:
    """One API server process and its engine."""

    def __init__(self, config: VllmFlags, engine: Engine, identity: Identity) -> None:
        self._config = config
        self._engine = engine
        self._identity = identity
        self._numbers = count()
        self._sleeping = False
        self._lost: PeerLost | None = None
        self._weights = WeightSession(
            engine,
            world=config.replica_size * config.data_parallel_size,
            backend=BACKEND if config.weight_transfer else None,
        )
        self._routes = self._table(config)

    @property
    def holds(self) -> bool:
        """Whether requests wait for a resume."""
        return self._engine.pause_state is not Pause.NONE

    async def handle(self, call: Call, fault: Fault | None) -> Reply:
        """Answer one call as the real server would.

        Raises:
            ConnectionResetError: The process was killed meanwhile.
        """
        if self._locked(call):
            return plain(401, {"error": "Unauthorized"}, vary=False)
        handlers = self._routes.get(call.path)
        if handlers is None:
            return plain(404, {"detail": "Not Found"})
        handler = handlers.get(call.method)
        if handler is None:
            return plain(405, {"detail": "Method Not Allowed"}, allow=", ".join(handlers))
        self._lost = (
            PeerLost(fault.after_tensors)
            if fault is not None and fault.action == "peer_lost"
            else None
        )
        try:
            return await handler(self, call)
        except Refusal as refusal:
            return refusal.reply
        except EngineDeadError:
            return internal(ENGINE_DEAD).reply
        except WorkerError as error:
            return worker_failed(str(error)).reply

    @classmethod
    @cache
    def _table(cls, config: VllmFlags) -> dict[str, dict[str, _Handler]]:
        """The routes of a server with these flags."""
        routes: dict[str, dict[str, _Handler]] = {
            "/health": {"GET": cls._health},
            "/version": {"GET": cls._version},
            "/v1/models": {"GET": cls._models},
            "/tokenize": {"POST": cls._tokenize},
            "/v1/completions": {"POST": cls._completions},
            "/v1/chat/completions": {"POST": cls._chat},
        }
        if config.scale_out:
            routes["/v1/chat/completions/render"] = {"POST": cls._render}
            routes["/v1/chat/completions/derender"] = {"POST": cls._derender}
            routes["/inference/v1/generate"] = {"POST": cls._generate}
            routes["/inference/v1/abort_requests"] = {"POST": cls._abort_listed}
        elif not config.is_line("0.31"):
            routes["/inference/v1/generate"] = {"POST": cls._scale_out_off}
        if config.dev_mode:
            routes |= {
                "/get_world_size": {"GET": cls._world_size},
                "/server_info": {"GET": cls._server_info},
                "/is_paused": {"GET": cls._is_paused},
                "/is_sleeping": {"GET": cls._is_sleeping},
                "/weight_info": {"GET": cls._weight_info},
                "/pause": {"POST": cls._pause},
                "/resume": {"POST": cls._resume},
                "/sleep": {"POST": cls._sleep},
                "/wake_up": {"POST": cls._wake_up},
                "/abort_requests": {"POST": cls._abort_any},
                "/reset_prefix_cache": {"POST": cls._reset_prefix_cache},
                "/init_weight_transfer_engine": {"POST": cls._init_weight_transfer},
                "/start_weight_update": {"POST": cls._start_weight_update},
                "/update_weights": {"POST": cls._update_weights},
                "/finish_weight_update": {"POST": cls._finish_weight_update},
                "/update_weight_version": {"POST": cls._update_weight_version},
                "/collective_rpc": {"POST": cls._collective_rpc},
            }
            if not config.is_line("0.31"):
                routes["/shutdown_weight_transfer_engine"] = {"POST": cls._shutdown_weight_transfer}
                routes["/weight_checker"] = {"POST": cls._weight_checker}
        return routes

    def _locked(self, call: Call) -> bool:
        key = self._config.api_key
        guarded = key is not None and call.path.startswith(_GUARDED)
        return guarded and call.headers.get("authorization") != f"Bearer {key}"

    # facts

    async def _health(self, _: Call) -> Reply:
        return empty() if self._engine.error is None else Reply(503, {"vary": "Origin"}, b"")

    async def _version(self, _: Call) -> Reply:
        return ok({"version": self._config.version})

    async def _models(self, _: Call) -> Reply:
        created, number = self._created(), self._random_id()
        engine = self._engine.config
        return ok(model_list(self._config, engine, created=created, permission_id=number))

    async def _world_size(self, call: Call) -> Reply:
        wide = flag(call.query, "include_dp", default=True)
        size = self._config.replica_size
        return ok({"world_size": size * self._config.data_parallel_size if wide else size})

    async def _server_info(self, call: Call) -> Reply:
        form = call.query.get("config_format", "text")
        if form not in ("text", "json"):
            raise _literal("query.config_format", form, "'text' or 'json'")
        facts: object = vllm_config(
            self._config, self._engine.config, instance_id=self._identity.instance_id
        )
        shown = facts if form == "json" else str(facts)
        env = {"VLLM_SERVER_DEV_MODE": True}
        return ok({"vllm_config": shown, "vllm_env": env, "system_env": {}})

    # generation

    async def _generate(self, call: Call) -> Reply:
        engine = self._engine
        body = read_generate(call, engine, models=[self._config.model])
        self._check_admission(call)
        own = call.headers.get("x-request-id") or body.request_id or self._random_id()
        request = engine.submit(
            f"generate-tokens-{own}", body.token_ids, sampling=body.sampling, salt=body.salt
        )
        renderer = Renderer(
            body=body,
            request=request,
            model=self._config.model,
            created=self._created(),
            show_cached=self._config.prompt_tokens_details,
            attests=not self._config.is_line("0.31"),
        )
        return await self._answer(request, renderer, stream=body.stream)

    async def _tokenize(self, call: Call) -> Reply:
        return ok(read_tokenize(call, self._engine, models=[self._config.model]))

    async def _completions(self, call: Call) -> Reply:
        return await self._openai(call, chat=False)

    async def _chat(self, call: Call) -> Reply:
        return await self._openai(call, chat=True)

    async def _openai(self, call: Call, *, chat: bool) -> Reply:
        config, engine = self._config, self._engine
        body = read_openai(call, engine, models=[config.model], chat=chat)
        self._check_admission(call)
        own = call.headers.get("x-request-id") or body.request_id or self._random_id()
        reply_id = f"chatcmpl-{own}" if chat else f"cmpl-{own}"
        request = engine.submit(
            reply_id if chat else f"{reply_id}-0",
            body.token_ids,
            sampling=body.sampling,
            salt=body.salt,
        )
        renderer = OpenAIRenderer(
            body=body,
            request=request,
            reply_id=reply_id,
            model=config.model,
            created=self._created(),
            fingerprint=f"vllm-{config.version}-{self._identity.instance_id[:8]}",
            show_cached=config.prompt_tokens_details,
            thinks=config.reasoning_parser,
        )
        return await self._answer(request, renderer, stream=body.stream)

    async def _render(self, call: Call) -> Reply:
        config = self._config
        body = read_openai(call, self._engine, models=[config.model], chat=True)
        own = f"chatcmpl-{body.request_id or self._random_id()}"
        return ok(rendered(body, request_id=own, thinks=config.reasoning_parser))

    async def _derender(self, call: Call) -> Reply:
        config = self._config
        return ok(
            derendered(
                call,
                model=config.model,
                created=self._created(),
                thinks=config.reasoning_parser,
                new_id=f"chatcmpl-tool-{self._random_id()}",
            )
        )

    async def _answer(
        self, request: Request, renderer: Renderer | OpenAIRenderer, *, stream: bool
    ) -> Reply:
        engine = self._engine
        if stream:
            headers = {"content-type": "text/event-stream; charset=utf-8", "vary": "Origin"}
            return Reply(
                200, headers, ByteStream(renderer.events(), gone=lambda: engine.abort([request]))
            )
        try:
            await request.finished()
        finally:
            engine.abort([request])
        if request.has_nan:
            raise bad_request("Out of range float values are not JSON compliant")
        return ok(renderer.whole())

    def _check_admission(self, call: Call) -> None:
        self._check_rank(call.headers)
        if self._config.is_line("0.33") and self._engine.pause_state is Pause.NEW:
            raise bad_request(
                "Generation is paused. Please retry after it resumes.",
                kind="ServiceUnavailableError",
                status=503,
            )

    async def _scale_out_off(self, _: Call) -> Reply:
        raise bad_request(
            "This endpoint needs the server flag --enable-scale-out.",
            kind="PermissionDeniedError",
            status=403,
        )

    def _check_rank(self, headers: Mapping[str, str]) -> None:
        asked, size = headers.get("x-data-parallel-rank"), self._config.data_parallel_size
        if asked is not None and asked.isdigit() and int(asked) >= size:
            raise bad_request(f"data_parallel_rank {asked} is out of range [0, {size}).")

    async def _abort_listed(self, call: Call) -> Reply:
        ids = _request_ids(call)
        if not ids:
            raise bad_request("Missing 'request_ids' in request body", kind="Bad Request")
        self._abort(ids)
        return empty()

    async def _abort_any(self, call: Call) -> Reply:
        ids = _request_ids(call)
        if ids is None:
            ids = [request.request_id for request in self._engine.requests]
        self._abort(ids)
        return ok({"status": "aborted", "aborted": len(ids)})

    def _abort(self, ids: list[str]) -> None:
        wanted = set(ids)
        self._engine.abort(
            [request for request in self._engine.requests if request.request_id in wanted]
        )

    # pause and sleep

    async def _pause(self, call: Call) -> Reply:
        await self._engine.hold(
            _mode(call), clear_cache=flag(call.query, "clear_cache", default=True)
        )
        return ok({"status": "paused"})

    async def _resume(self, _: Call) -> Reply:
        await self._engine.rpc(self._engine.resume)
        return ok({"status": "resumed"})

    async def _is_paused(self, _: Call) -> Reply:
        return ok(
            {
                "is_paused": await self._engine.rpc(
                    lambda: self._engine.pause_state is not Pause.NONE
                )
            }
        )

    async def _sleep(self, call: Call) -> Reply:
        level = call.query.get("level", "1")
        if level not in ("0", "1", "2"):
            raise _literal("query.level", level, "0, 1 or 2")
        await self._engine.hold(_mode(call), clear_cache=True)
        self._sleeping = True
        return ok({"status": "sleeping", "level": int(level)})

    async def _wake_up(self, call: Call) -> Reply:
        tags = call.query.get("tags")
        if tags in (None, "scheduling"):
            await self._engine.rpc(self._engine.resume)
            self._sleeping = False
        return ok({"status": "awake", "tags": None if tags is None else [tags]})

    async def _is_sleeping(self, _: Call) -> Reply:
        # as 0.32 answers: a server that is merely paused says that it sleeps
        held = await self._engine.rpc(
            lambda: self._sleeping or self._engine.pause_state is not Pause.NONE
        )
        return ok({"is_sleeping": held})

    async def _reset_prefix_cache(self, call: Call) -> Reply:
        preempt = flag(call.query, "reset_running_requests", default=False)
        done = await self._engine.rpc(lambda: self._engine.reset_prefix_cache(preempt=preempt))
        return ok({"success": done})

    # weights

    async def _weight_info(self, _: Call) -> Reply:
        return ok({"weight_version": await self._engine.rpc(lambda: self._engine.label)})

    async def _update_weight_version(self, call: Call) -> Reply:
        version = _string(json_object(call), "new_version")
        await self._engine.rpc(lambda: self._set_label(version))
        return ok({"success": True, "new_version": version})

    async def _init_weight_transfer(self, call: Call) -> Reply:
        info = _mapping(json_object(call), "init_info")
        await self._engine.rpc(lambda: self._weights.init(info))
        return ok({"message": "Weight transfer initialized"})

    async def _shutdown_weight_transfer(self, _: Call) -> Reply:
        await self._engine.rpc(self._weights.shutdown)
        return ok({"message": "Weight transfer shut down"})

    async def _start_weight_update(self, _: Call) -> Reply:
        await self._engine.rpc(self._weights.start)
        return ok({"message": "Weight update started"})

    async def _update_weights(self, call: Call) -> Reply:
        body, lost = json_object(call), self._lost
        infos = body.get("update_info")
        info = infos[0] if isinstance(infos, list) and infos else _mapping(body, "update_info")
        arrays = cast("list[Any] | None", call.attachment)
        await self._engine.rpc(lambda: self._weights.update(info, arrays=arrays, lost=lost))
        taken = getattr(arrays, "taken", None)
        if taken is not None:
            taken()
        return ok({"message": "Weights updated"})

    async def _finish_weight_update(self, call: Call) -> Reply:
        body = json_object(call, required=False)
        version = None if body.get("weight_version") is None else _string(body, "weight_version")
        # a client that leaves does not stop the handler between the two calls
        with anyio.CancelScope(shield=True):
            await self._engine.rpc(self._weights.finish)
            if version is not None:
                await self._engine.rpc(lambda: self._set_label(version))
        return ok({"message": "Weight update finished"})

    async def _collective_rpc(self, call: Call) -> Reply:
        try:
            body = json.loads(call.body)
        except json.JSONDecodeError as error:
            raise bad_request(f"JSON decode error: {error}", kind="Bad Request") from error
        if not isinstance(body, dict):
            raise bad_request("Request body must be a JSON object", kind="Bad Request")
        if body.get("method") is None:
            raise bad_request("Missing 'method' in request body", kind="Bad Request")
        if body["method"] != "reload_weights":
            raise WorkerError(f"'CPUWorker' object has no attribute {body['method']!r}")
        folder = body.get("kwargs", {}).get("weights_path") or self._config.model
        try:
            await self._engine.rpc(lambda: self._weights.reload(folder))
        except WorkerError as error:
            # Its server tells no paths of its machine.
            raise WorkerError(str(error).replace(folder, "<path>")) from error
        return ok({"results": [None] * self._config.replica_size})

    async def _weight_checker(self, call: Call) -> Reply:
        body = json_object(call)
        action, baseline = body.get("action"), body.get("baseline")
        if action not in ("checksum", "compare"):
            raise _literal("body.action", action, "'checksum' or 'compare'")
        if not isinstance(baseline, dict):
            baseline = {}
            if action == "compare":
                raise bad_request(
                    "action='compare' requires a 'baseline' object", kind="Bad Request"
                )
        sums = await self._engine.rpc(self._weights.checksums)
        config = self._config
        found = {
            f"dp{dp}:pp{pp}:pcp0:tp{tp}:{name}": digest
            for dp in range(config.data_parallel_size)
            for pp in range(config.pipeline_parallel_size)
            for tp in range(config.tensor_parallel_size)
            for name, digest in sums.items()
        }
        if action == "checksum":
            return ok({"checksums": found})
        keys = sorted(found.keys() | baseline.keys())
        mismatches = [key for key in keys if found.get(key) != baseline.get(key)]
        return ok({"match": not mismatches, "mismatches": mismatches})

    # helpers

    def _set_label(self, label: str) -> None:
        self._engine.label = label

    def _created(self) -> int:
        return int(self._identity.epoch_s + self._engine.clock.now())

    def _random_id(self) -> str:
        seed = f"{self._identity.instance_id}:{next(self._numbers)}"
        return blake2b(seed.encode(), digest_size=8).hexdigest()


def _request_ids(call: Call) -> list[str] | None:
    try:
        ids = json.loads(call.body).get("request_ids")
    except (ValueError, AttributeError) as error:
        raise bad_request("Invalid JSON format", kind="Bad Request") from error
    return None if ids is None else [str(entry) for entry in ids]


def _mode(call: Call) -> PauseMode:
    mode = call.query.get("mode", "abort")
    if mode not in ("abort", "wait", "keep"):
        raise _literal("query.mode", mode, "'abort', 'wait' or 'keep'")
    return cast("PauseMode", mode)


def _literal(loc: str, got: object, expected: str) -> Refusal:
    ctx = f"{{'expected': \"{expected}\"}}"
    return invalid("literal_error", loc, f"Input should be {expected}", got=got, ctx=ctx)


def _string(body: Mapping[str, Any], name: str) -> str:
    if name not in body:
        raise invalid("missing", f"body.{name}", "Field required", got=None)
    value = body[name]
    if not isinstance(value, str):
        raise invalid("string_type", f"body.{name}", "Input should be a valid string", got=value)
    return value


def _mapping(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    if name not in body:
        raise invalid("missing", f"body.{name}", "Field required", got=None)
    value = body[name]
    if not isinstance(value, dict):
        raise invalid("dict_type", f"body.{name}", "Input should be a valid dictionary", got=value)
    return value
