"""A Dynamo worker over the embedded engine: its own server, and what it serves the frontend.

Two families of routes: Dynamo's Python worker of vLLM as it was recorded, and the native sidecar as
it was read. Every failure of a handler is a 200 that says so; what a handler does not catch is a
500. A pause of the Python worker leaves it in the frontend's routing, that of a sidecar does not.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import cache
from hashlib import blake2b
from typing import Any, cast

import msgspec

from .calls import Call, Reply
from .dynamo_config import DynamoFlags
from .dynamo_request import Generate
from .dynamo_shapes import not_json, worker_reply
from .dynamo_weights import FAILED, Rpc
from .engine import Engine, EngineDeadError, Pause, PauseMode
from .faults import Fault
from .policy import Floats
from .protocol import Identity
from .requests import Request
from .vllm_weights import PeerLost, WeightSession, WorkerError

__all__ = ("DynamoWorker",)

_Body = Mapping[str, Any]
_Handler = Callable[["DynamoWorker", _Body, Call], Awaitable[dict[str, Any]]]

_UNPAUSED = (
    "Worker must be paused via pause_generation() before updating weights. "
    "Call pause_generation() first, then update, then resume_generation()."
)
_FLUSHES = (
    "Unpaused weight updates cannot reset the prefix cache. "
    "Set 'reset_prefix_cache' to false or pause generation first."
)


class HandlerError(Exception):
    """A failure that a handler reports inside a 200."""


class DynamoWorker:
    """One worker process and its engine."""

    def __init__(self, config: DynamoFlags, engine: Engine, identity: Identity) -> None:
        self.config = config
        self.engine = engine
        digest = blake2b(identity.instance_id.encode(), digest_size=8).digest()
        self.instance_id = int.from_bytes(digest) | 1 << 63
        self.epoch_s = identity.epoch_s
        self.born = engine.clock.now()
        self.registered = True
        """Whether the frontend may send it requests."""
        self._version: Any = None
        self._declared = False
        self._paused = False
        self._lost: PeerLost | None = None
        backend = "genapi_memory" if config.weight_transfer else None
        world = config.tensor_parallel_size
        self._session = WeightSession(engine, world=world, backend=backend)
        self._rpc = Rpc(engine, self._session, extension=config.extension)
        self._handlers, self._advertised = self._tables(config)

    @property
    def holds(self) -> bool:
        """Whether requests wait for a resume."""
        return self.engine.pause_state is not Pause.NONE

    @property
    def routes(self) -> list[str]:
        """The routes that it advertises."""
        return sorted(self._advertised)

    @classmethod
    @cache
    def _tables(cls, config: DynamoFlags) -> tuple[Mapping[str, _Handler], Collection[str]]:
        """The routes of a worker, and those that it advertises."""
        if config.family == "mocker":
            return {}, ()
        if config.family == "vllm":
            python: dict[str, _Handler] = {
                "abort_request": cls._abort_request,
                "destroy_weights_update_group": cls._destroy_group,
                "flush_cache": cls._flush_cache,
                "get_weight_version": cls._get_weight_version,
                "init_weights_update_group": cls._init_group,
                "liveness_probe": cls._liveness_probe,
                "pause_generation": cls._pause,
                "resume_generation": cls._resume,
                "set_weight_version": cls._set_weight_version,
                "update_weights_from_disk": cls._update_from_disk,
                "update_weights_from_distributed": cls._update_from_distributed,
                "update_weights_from_tensor": cls._update_from_tensor,
            }
            hidden: dict[str, _Handler] = {
                "control/sleep": cls._sleep,
                "control/wake_up": cls._wake_up,
                "update/model_taints": cls._model_taints,
            }
            return python | hidden, tuple(python)
        control: dict[str, _Handler] = {
            "control/get_weight_version": cls._get_weight_version,
            "control/is_paused": cls._is_paused,
            "control/pause_generation": cls._pause,
            "control/resume_generation": cls._resume,
            "control/sleep": cls._sleep,
            "control/wake_up": cls._wake_up,
            "update/update_weight_version": cls._update_weight_version,
        }
        if config.family == "sidecar" and config.weight_transfer:
            control |= {
                "update/finish_weight_update": cls._finish_update,
                "update/init_weight_transfer_engine": cls._init_engine,
                "update/start_weight_update": cls._start_update,
                "update/update_weights": cls._update_weights,
            }
        return control, tuple(control)

    async def handle(self, call: Call, fault: Fault | None) -> Reply:
        """Answer one call to the worker's own server, whatever its method."""
        if call.path in ("/health", "/live"):
            return self._health()
        if call.path == "/collective_rpc" and self.config.family == "collective":
            return await self._collective(call)
        name = call.path.removeprefix("/engine/")
        handler = self._handlers.get(name)
        if handler is None or not call.path.startswith("/engine/"):
            message = f"Route {call.path} not found"
            return worker_reply(404, {"error": "Route not found", "message": message})
        try:
            body = msgspec.json.decode(call.body) if call.body else {}
        except (msgspec.DecodeError, ValueError, RecursionError):
            return not_json(call)
        peer_lost = fault is not None and fault.action == "peer_lost"
        self._lost = PeerLost(fault.after_tensors) if peer_lost and fault is not None else None
        return await self._answer(handler, body, call)

    async def _answer(self, handler: _Handler, body: object, call: Call) -> Reply:
        if not isinstance(body, dict):
            message = "request body must be a JSON object"
            return worker_reply(200, {"status": "error", "message": message})
        try:
            return worker_reply(200, await handler(self, body, call))
        except HandlerError as error:
            return worker_reply(200, {"status": "error", "message": str(error)})
        except WorkerError as error:
            message = FAILED.format(error)
            return worker_reply(200, {"status": "error", "message": message})
        except EngineDeadError:
            message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
            return worker_reply(200, {"status": "error", "message": message})
        except (ValueError, TypeError) as error:
            message = f"Python callback failed: {type(error).__name__}: {error}"
            return worker_reply(500, {"error": "Handler error", "message": message})

    def generate(
        self, wanted: Generate, request_id: str, *, handed: list[Floats] | None = None
    ) -> Request:
        """Begin what the frontend sends it.

        Raises:
            ConnectionResetError: The process is gone.
            EngineDeadError: Its engine is.
        """
        salt = None if wanted.salt is None else f"dynamo-cache-salt:{wanted.salt}"
        return self.engine.submit(
            request_id, wanted.prompt, sampling=wanted.sampling, salt=salt, handed=handed
        )

    def _health(self) -> Reply:
        up = self.engine.clock.now() - self.born
        names = ["generate", "rl"] if self.config.family != "mocker" else ["generate"]
        ready = self.config.family != "mocker" and self.engine.error is None
        body = {
            "status": "ready" if ready else "notready",
            "uptime": {"secs": int(up), "nanos": int(1e9 * (up % 1))},
            "endpoints": dict.fromkeys(names, "ready"),
        }
        return worker_reply(200 if ready else 503, body)

    # pause

    async def _pause(self, body: _Body, _: Call) -> dict[str, Any]:
        mode = body.get("mode", "keep")
        if mode not in ("keep", "wait", "abort"):
            raise HandlerError(f"Invalid mode '{mode}'; expected keep|wait|abort")
        clear = bool(body.get("clear_cache", False))
        if self.config.family != "vllm":
            self.registered = False
        await self.engine.hold(cast("PauseMode", mode), clear_cache=clear)
        self._paused = True
        return {"status": "ok", "message": "Engine paused", "mode": mode, "clear_cache": clear}

    async def _resume(self, _body: _Body, _: Call) -> dict[str, Any]:
        await self.engine.rpc(self.engine.resume)
        self._paused = False
        if self.config.family != "vllm":
            self.registered = True
        return {"status": "ok", "message": "Engine resumed"}

    async def _is_paused(self, _body: _Body, _: Call) -> dict[str, Any]:
        held = await self.engine.rpc(lambda: self.engine.pause_state is not Pause.NONE)
        return {"is_paused": held}

    async def _sleep(self, body: _Body, _: Call) -> dict[str, Any]:
        await self.engine.hold("keep", clear_cache=True)
        self.registered = False
        return {"status": "ok", "message": f"Engine slept (level={body.get('level', 1)})"}

    async def _wake_up(self, _body: _Body, _: Call) -> dict[str, Any]:
        await self.engine.rpc(self.engine.resume)
        self.registered = True
        return {"status": "ok", "message": "Engine woke"}

    async def _flush_cache(self, _body: _Body, _: Call) -> dict[str, Any]:
        await self.engine.rpc(lambda: self.engine.reset_prefix_cache(preempt=False))
        return {"status": "ok", "message": "Cache flushed"}  # also when it did nothing

    async def _abort_request(self, body: _Body, _: Call) -> dict[str, Any]:
        if "request_id" not in body:
            raise HandlerError("Missing 'request_id' in body")
        return {"status": "ok", "request_id": body["request_id"]}  # of whatever id

    async def _liveness_probe(self, _body: _Body, _: Call) -> dict[str, Any]:
        if self.engine.error is not None:
            return {"status": "ok", "alive": False, "message": "EngineDeadError"}
        return {"status": "ok", "alive": True}

    async def _model_taints(self, body: _Body, _: Call) -> dict[str, Any]:
        taints = body.get("taints")
        if not isinstance(taints, list) or not all(isinstance(taint, str) for taint in taints):
            raise ValueError("'taints' must be a JSON array of strings")
        return {"status": "ok"}

    # the label

    async def _get_weight_version(self, _body: _Body, _: Call) -> dict[str, Any]:
        version = await self.engine.rpc(lambda: self._version)
        if self.config.family != "vllm":
            return {"weight_version": version}
        return {"status": "ok", "version": version, "version_declared": self._declared}

    async def _set_weight_version(self, body: _Body, _: Call) -> dict[str, Any]:
        if "weight_version" not in body:
            raise HandlerError("Missing 'weight_version' in body")
        await self.engine.rpc(lambda: self._declare(body["weight_version"]))
        return {"status": "ok", "version": body["weight_version"]}

    async def _update_weight_version(self, body: _Body, _: Call) -> dict[str, Any]:
        await self.engine.rpc(lambda: self._declare(body["new_version"]))
        return {"status": "ok"}

    def _declare(self, version: Any) -> None:
        self._version, self._declared = version, True
        self.engine.label = str(version)

    # weights

    async def _init_group(self, body: _Body, _: Call) -> dict[str, Any]:
        rest = dict(body)
        method = rest.pop("engine_rpc", "init_broadcaster")
        await self.engine.rpc(lambda: self._rpc.call(method, rest))
        return {"status": "ok", "message": "Weight update group initialized"}

    async def _destroy_group(self, body: _Body, _: Call) -> dict[str, Any]:
        rest = dict(body)
        method = rest.pop("engine_rpc", "destroy_broadcaster")
        await self.engine.rpc(lambda: self._rpc.call(method, rest))
        return {"status": "ok", "message": "Weight update group destroyed"}

    async def _update_from_disk(self, body: _Body, _: Call) -> dict[str, Any]:
        if not self._paused:
            raise HandlerError(_UNPAUSED)
        path, method = body.get("model_path"), body.get("engine_rpc", "reload_weights")
        if not path:
            raise HandlerError("Missing 'model_path' in body")
        arguments = {"weights_path" if method == "reload_weights" else "weight_path": path}
        await self.engine.rpc(lambda: self._rpc.call(method, arguments))
        await self.engine.rpc(lambda: self.engine.reset_prefix_cache(preempt=False))
        return await self._updated(body)

    async def _update_from_distributed(self, body: _Body, call: Call) -> dict[str, Any]:
        rest, lost = dict(body), self._lost
        method = rest.pop("engine_rpc", "update_weights_from_path")
        anyway = rest.pop("allow_unpaused", False)
        reset = rest.pop("reset_prefix_cache", True)
        rest.pop("weight_version", None)
        if not self._paused and not anyway:
            raise HandlerError(_UNPAUSED)
        if not self._paused and reset:
            raise HandlerError(_FLUSHES)
        arrays = cast("list[Any] | None", call.attachment)
        await self.engine.rpc(lambda: self._rpc.call(method, rest, arrays=arrays, lost=lost))
        _take(arrays)
        if reset:
            await self.engine.rpc(lambda: self.engine.reset_prefix_cache(preempt=False))
        return await self._updated(body)

    async def _updated(self, body: _Body) -> dict[str, Any]:
        if "weight_version" not in body:
            return {"status": "ok", "version": "unknown", "version_declared": False}
        version = body["weight_version"]
        await self.engine.rpc(lambda: self._declare(version))
        return {"status": "ok", "version": version, "version_declared": True}

    async def _update_from_tensor(self, _body: _Body, _: Call) -> dict[str, Any]:
        raise HandlerError("update_weights_from_tensor is not implemented")

    # the sidecar's

    async def _init_engine(self, body: _Body, _: Call) -> dict[str, Any]:
        await self.engine.rpc(lambda: self._session.init(body["init_info"]))
        return {"status": "ok"}

    async def _start_update(self, _body: _Body, _: Call) -> dict[str, Any]:
        await self.engine.rpc(self._session.start)
        return {"status": "ok"}

    async def _update_weights(self, body: _Body, call: Call) -> dict[str, Any]:
        arrays, lost = cast("list[Any] | None", call.attachment), self._lost
        info = body["update_info"]
        await self.engine.rpc(lambda: self._session.update(info, arrays=arrays, lost=lost))
        _take(arrays)
        return {"status": "ok"}

    async def _finish_update(self, body: _Body, _: Call) -> dict[str, Any]:
        await self.engine.rpc(self._session.finish)
        if body.get("weight_version") is not None:
            await self.engine.rpc(lambda: self._declare(body["weight_version"]))
        return {"status": "ok"}

    async def _collective(self, call: Call) -> Reply:
        """The collective RPC of the engine's own server, which here is the same as the worker's."""
        body, lost = msgspec.json.decode(call.body), self._lost
        arrays = cast("list[Any] | None", call.attachment)

        async def run(_self: DynamoWorker, wanted: _Body, _: Call) -> dict[str, Any]:
            method, arguments = wanted["method"], wanted.get("kwargs") or {}
            rpc = self._rpc
            await self.engine.rpc(lambda: rpc.call(method, arguments, arrays=arrays, lost=lost))
            _take(arrays)
            return {"results": [None] * self.config.tensor_parallel_size}

        return await self._answer(run, body, call)


def _take(arrays: object) -> None:
    taken = getattr(arrays, "taken", None)
    if taken is not None:
        taken()
