"""Two real vLLM servers, for `harness.Chaos`."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tests.engines.kit.server import Server, ServerError, port_was_taken, start, wait_ready

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from tests.chaos.harness import Victim
    from tests.engines.conftest import Models, Oracle

__all__ = ("VllmWorld",)

TIE = 1e-4
PORT_TRIES = 3
LIMITS = {
    "preflight_s": 20.0,
    "stage_s": 20.0,
    "group_s": 20.0,
    "pause_s": 10.0,
    "confirm_s": 10.0,
    "begin_s": 10.0,
    "transfer_s": 15.0,
    "finish_s": 10.0,
    "label_s": 10.0,
    "verify_s": 10.0,
    "resume_s": 10.0,
    "probe_s": 10.0,
    "cleanup_s": 10.0,
    "restart_s": 240.0,
}
"""Bounds of a publication's phases: a call to a server whose engine died may wait for them."""


class VllmWorld:
    """Version `step` is the model of seed 0 or 1, in turn."""

    limits = LIMITS
    tokens = 1200
    looks = 2
    limit_s = 300.0
    short_limit_s = 3.0
    prompt = tuple(300 + 7 * i for i in range(200))

    def __init__(self, environment: Path, models: Models, oracle: Oracle, folder: Path) -> None:
        self._environment = environment
        self._models = models
        self._oracle = oracle
        self._folder = folder
        self._starts = 0
        self.servers: list[Server] = []
        self.urls: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        return "vllm://" + ",".join(server.address for server in self.servers)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.push(self)
            for _ in range(2):
                self.servers.append(self._start())
            for index in range(2):
                self._await_ready(index)
            undo.pop_all()
        self.urls = tuple(server.url for server in self.servers)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.ExitStack() as stack:
            for server in self.servers:
                stack.callback(server.stop)

    def _start(self, port: int | None = None) -> Server:
        self._starts += 1
        folder = self._folder / f"server-{self._starts}"
        return start(self._environment, self._models.seed0, folder=folder, port=port)

    def _await_ready(self, index: int) -> None:
        for left in reversed(range(PORT_TRIES)):
            server = self.servers[index]
            try:
                wait_ready(server)
            except ServerError:
                if not left or not port_was_taken(server):
                    raise
                server.kill()
                self.servers[index] = self._start(_port(server.url) if self.urls else None)
            else:
                return

    def _model(self, step: int | None) -> Path:
        # A server that just started has seed 0 and no version.
        return self._models.seed1 if step is not None and step % 2 else self._models.seed0

    def weights(self, step: int) -> dict[str, Any]:
        return {"folder": str(self._model(step))}

    def kill(self, victim: Victim, index: int) -> None:
        server = self.servers[index]
        if victim == "worker":
            server.kill()
        else:
            os.kill(engine_of(server), signal.SIGKILL)

    def restart(self, url: str) -> None:
        index = self.urls.index(url)
        self.servers[index].kill()
        self.servers[index] = self._start(_port(url))
        self._await_ready(index)

    def label(self, index: int) -> object:
        status, body = self.servers[index].request("GET", "/weight_info")
        assert status == 200, body
        return body["weight_version"]

    def check(self, step: int | None, before: Sequence[int], made: Sequence[int]) -> None:
        said = self._oracle(self._model(step), before, made)
        for place, (token, (best, margin)) in enumerate(zip(made, said, strict=True)):
            assert token == best or margin <= TIE, (
                f"step {step}, token {place}: {best}, not {token}"
            )


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


def engine_of(server: Server) -> int:
    """The id of the engine's process: a child of the API server with its group."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            _, _, rest = status.read_text(encoding="utf-8").rpartition(")")
            _, parent, group = rest.split()[:3]
            command = (status.parent / "cmdline").read_bytes()
            if int(group) == server.pid and int(parent) == server.pid and b"EngineCore" in command:
                return int(status.parent.name)
    raise AssertionError(f"no engine process of {server.pid}")
