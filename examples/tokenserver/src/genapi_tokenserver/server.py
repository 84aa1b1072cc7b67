"""A token server in memory: ids in, ids out, over the engine that genapi brings for tests.

The protocol is as small as a provider's can be. `GET /state` tells what the server is. `POST
/tokens` generates, in one piece or as server-sent events. Administration is `/pause`, `/resume`,
`/join`, `/leave`, `/open`, `/load`, `/close`, `/label` and `/digest`, all POST. Tensors are loaded
into the live weights as they come; a server is paused while they do.
"""

import json
from base64 import b64decode
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from typing import Any, Self

import numpy as np

from genapi.embedded import (
    ByteStream,
    Call,
    Clock,
    Cluster,
    Engine,
    EngineConfig,
    Fault,
    Reply,
    VirtualClock,
    Worker,
)
from genapi.embedded.engine import Pause
from genapi.embedded.protocol import Identity
from genapi.embedded.requests import Request, Track
from genapi.embedded.sampling import Sampling

__all__ = ("TokenConfig", "TokenServer", "cluster")

_JSON = {"content-type": "application/json"}
_EVENTS = {"content-type": "text/event-stream"}
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
)


Route = Callable[[Call, Any], Awaitable[Reply]]


class RefusalError(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, code: str, text: str) -> None:
        super().__init__(text)
        body = json.dumps({"error": {"type": code, "message": text}}).encode()
        self.reply = Reply(status, _JSON, body)


@dataclass(frozen=True, slots=True)
class TokenConfig:
    """Flags of a server."""

    api_key: str | None = None
    label: str = "fresh"

    def tune(self, engine: EngineConfig) -> EngineConfig:
        """The engine as it is."""
        return engine

    def spread(self, count: int) -> Sequence[Self]:
        """Every server is built from the same."""
        return [self] * count

    def front(self, clock: Clock, *, epoch_s: float) -> None:
        """Nothing stands before the servers."""

    def build(self, engine: Engine, identity: Identity) -> "TokenServer":
        """A server that just came up."""
        return TokenServer(self, engine, identity)


class TokenServer:
    """One server process."""

    def __init__(self, config: TokenConfig, engine: Engine, identity: Identity) -> None:
        self._config, self._engine, self._identity = config, engine, identity
        self._numbers = count()
        self._joined = self._open = False
        engine.label = config.label
        self._routes: Mapping[str, Route] = {
            "/state": self._state,
            "/tokens": self._tokens,
            "/cancel": self._cancel,
            "/pause": self._pause,
            "/resume": self._resume,
            "/join": self._join,
            "/leave": self._leave,
            "/open": self._begin,
            "/load": self._load,
            "/close": self._close,
            "/label": self._label,
            "/digest": self._digest,
        }

    @property
    def holds(self) -> bool:
        """Whether requests wait for a resume."""
        return self._engine.pause_state is not Pause.NONE

    async def handle(self, call: Call, fault: Fault | None) -> Reply:
        """Answer one call."""
        try:
            route = self._route(call, fault)
            return await route(call, json.loads(call.body or b"{}"))
        except RefusalError as refusal:
            return refusal.reply

    def _route(self, call: Call, fault: Fault | None) -> Route:
        key = self._config.api_key
        if key is not None and call.headers.get("authorization") != f"Bearer {key}":
            raise RefusalError(401, "key", "this server wants another key")
        if call.path not in self._routes:
            raise RefusalError(404, "route", f"there is no {call.path}")
        if fault is not None:  # the only one that a worker does not act out itself
            raise RefusalError(500, "peer", "the sender went away")
        return self._routes[call.path]

    async def _do(self, effect: Callable[[], object]) -> Reply:
        await self._engine.rpc(effect)
        return _ok({})

    async def _state(self, _call: Call, _body: Any) -> Reply:
        config = self._engine.config
        return _ok(
            {
                "server": "tokens/1",
                "life": self._identity.instance_id,
                "model": "tiny",
                "context": config.max_model_len,
                "vocabulary": config.vocab,
                "label": self._engine.label,
                "paused": self.holds,
            }
        )

    # generation

    async def _tokens(self, _call: Call, body: Any) -> Reply:
        prompt, longest = body["prompt"], self._engine.config.max_model_len
        if len(prompt) + body["count"] > longest:
            raise RefusalError(400, "overlong", f"prompt and output exceed {longest} tokens")
        given = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
        given["stop_token_ids"] = tuple(given.get("stop_token_ids", ()))
        sampling = Sampling(max_tokens=body["count"], **given)
        request = self._engine.submit(body["id"], prompt, sampling=sampling, salt=body.get("salt"))
        if body.get("stream"):
            gone = lambda: self._engine.abort([request])  # noqa: E731 - a callback of one line
            return Reply(200, _EVENTS, ByteStream(_events(request), gone=gone))
        try:
            await request.finished()
        finally:
            self._engine.abort([request])
        return _ok(_frame(request, 0))

    async def _cancel(self, _call: Call, body: Any) -> Reply:
        wanted = set(body["ids"])
        self._engine.abort([r for r in self._engine.requests if r.request_id in wanted])
        return _ok({})

    # administration

    async def _pause(self, _call: Call, body: Any) -> Reply:
        await self._engine.hold(body["mode"], clear_cache=body["clear"])
        return _ok({})

    async def _resume(self, _call: Call, body: Any) -> Reply:
        if body["clear"]:
            await self._engine.rpc(lambda: self._engine.reset_prefix_cache(preempt=True))
        return await self._do(self._engine.resume)

    async def _join(self, _call: Call, body: Any) -> Reply:
        if not 1 <= body["rank"] < body["world"]:
            raise RefusalError(400, "rank", f"rank {body['rank']} is none of a group's receivers")
        self._joined = True
        return _ok({})

    async def _leave(self, _call: Call, _body: Any) -> Reply:
        self._joined = False
        return _ok({})

    async def _begin(self, _call: Call, _body: Any) -> Reply:
        if not self._joined or self._open:
            raise RefusalError(409, "session", "no group was joined, or a session is open")
        self._open = True
        return _ok({})

    async def _load(self, call: Call, body: Any) -> Reply:
        if not self._open:
            raise RefusalError(409, "session", "no session is open")
        given: Any = call.attachment
        arrays = given or [np.frombuffer(b64decode(text), "<f4") for text in body["data"]]
        for name, shape, array in zip(body["names"], body["shapes"], arrays, strict=True):
            held = self._engine.weights.get(name)
            if held is None or list(held.shape) != shape:
                raise RefusalError(400, "tensor", f"{name} of shape {shape} does not fit")
            tensor = np.array(array, dtype=np.float32).reshape(shape)
            self._engine.install({**self._engine.weights, name: tensor})
        if given is not None:
            given.taken()
        return _ok({})

    async def _close(self, _call: Call, body: Any) -> Reply:
        if not self._open:
            raise RefusalError(409, "session", "no session is open")
        self._open = False
        return _ok({}) if body.get("label") is None else await self._label(_call, body)

    async def _label(self, _call: Call, body: Any) -> Reply:
        return await self._do(lambda: setattr(self._engine, "label", body["label"]))

    async def _digest(self, _call: Call, _body: Any) -> Reply:
        weights = self._engine.weights.items()
        return _ok({name: sha256(array.tobytes()).hexdigest() for name, array in weights})


def cluster(workers: int, flags: Mapping[str, str]) -> Cluster:
    """Servers in this process, under one clock."""
    clock, config = VirtualClock(), TokenConfig(**flags)
    engine = EngineConfig()
    made = [Worker(config, engine, clock=clock, index=index) for index in range(workers)]
    return Cluster(made, clock=clock)


def _ok(value: object) -> Reply:
    return Reply(200, _JSON, json.dumps(value).encode())


def _frame(request: Request, start: int) -> dict[str, Any]:
    track: Track = request.tracks[0]
    frame: dict[str, Any] = {"tokens": track.output[start:]}
    if request.sampling.logprobs is not None:
        frame["scores"] = [scores[0].logprob for scores in track.scores[start:]]
        frame["candidates"] = [
            [[score.token_id, score.logprob] for score in scores] for scores in track.scores[start:]
        ]
    if track.finish_reason is not None:
        frame["end"] = {"why": track.finish_reason, "stop": track.stop_reason}
        frame["versions"] = [
            {"version": label, "start": first, "end": last} for label, first, last in track.spans()
        ]
        frame["prompt"] = list(request.prompt)
        frame["cached"] = request.cached_tokens
        if request.prompt_scores is not None:
            own = [scores[0].logprob for scores in request.prompt_scores]
            frame["prompt_scores"] = [None, *own]
    return frame


async def _events(request: Request) -> AsyncGenerator[bytes, None]:
    sent = 0
    while True:
        await request.changed()
        frame = _frame(request, sent)
        sent += len(frame["tokens"])
        yield b"data: " + json.dumps(frame).encode() + b"\n\n"
        if "end" in frame:
            return
