"""Starts and stops real servers: vLLM, unless another engine is named.

The rule of this file: what is started here ends here. Each server leads a session of its own,
because an engine's processes outlive a parent that is killed: it is asked to stop by SIGTERM,
and then whatever is left of its process group is killed.

    with serving(environment, model, count=2, folder=logs) as (first, second):
        ...
"""

from __future__ import annotations

import contextlib
import functools
import http
import http.client
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio

from genapi.providers import dynamo, sglang, vllm
from genapi.types.launch import Place
from tests.engines.kit.priority import let_answer_first

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = (
    "STAND_INS",
    "VLLM",
    "Engine",
    "Face",
    "Launch",
    "Server",
    "ServerError",
    "free_port",
    "make_tokens",
    "port_was_taken",
    "serving",
    "settle",
    "spawn",
    "start",
    "wait_for",
    "wait_ready",
)

STAND_INS = pathlib.Path(__file__).parent / "stand_ins"
"""On a server's path: what engines import and has no build for a CPU."""
START_LIMIT_S = 240.0
STOP_LIMIT_S = 20.0
PORT_TRIES = 3
STARTS_LIMIT_S = 30.0
LOOK_EVERY_S = 0.2
LOOK_OFTEN_S = 0.1  # each look keeps the server from its requests
PORT_TAKEN = "ddress already in use"
PORTS = range(15000, 32000)
"""Below those that outgoing connections get: nobody takes one while its server restarts, and no
client that connects to a port without a server is connected to itself."""

# Each with the reason why a server on a small machine without a GPU needs it.
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the default takes a part of the machine's memory
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines share the cores
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # the first request for logprobs would compile for 20 s
    "GLOO_SOCKET_IFNAME": "lo",  # vLLM's own groups; genapi's takes the way to the trainer
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
REMOVED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "VLLM_PLUGINS")
FOREIGN = ("DYN_", "ETCD_", "NATS_")


Launch = vllm.Launch | sglang.Launch | dynamo.Launch


@dataclass(frozen=True, kw_only=True)
class Face:
    """What a server shows.

    Attributes:
        scheme: of targets.
        ready: the path that says 200 as soon as it serves.
    """

    scheme: str
    ready: str


@dataclass(frozen=True, kw_only=True)
class Engine(Face):
    """How servers of one engine are started: as `genapi.launch` starts them.

    Attributes:
        kind: the engine's launch, which has the command line and the variables.
        fields: of a launch on a machine without a GPU.
    """

    kind: type[Launch]
    fields: Mapping[str, Any]

    def launch(self, environment: pathlib.Path, model: pathlib.Path, **more: Any) -> Launch:
        """Servers of a tiny model."""
        fields: dict[str, Any] = {
            "model": str(model),
            "model_name": "tiny",
            "python": str(environment / "bin" / "python"),
            "dtype": "float32",
            "max_model_len": 4096,
            **self.fields,
        }
        # What the first server finds out about the model's class takes each other one of vLLM 10 s.
        cache = {"VLLM_CACHE_ROOT": str(model.parent / self.scheme)}
        fields["environment"] = cache | fields["environment"]
        return self.kind.model_validate(fields | more)


VLLM = Engine(
    scheme="vllm",
    kind=vllm.Launch,
    fields={"enforce_eager": True, "environment": SETTINGS},
    ready="/health",
)


class ServerError(Exception):
    """A server did not start; the message holds the end of its log."""


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        url: its base URL.
        log: the file that holds all its output.
        process: its API server process, the leader of its process group.
        engine: what it shows.
        gone: set when the whole group has ended; its id may then be another's.
    """

    url: str
    log: pathlib.Path
    process: subprocess.Popen[bytes]
    engine: Face = VLLM
    gone: threading.Event = field(default_factory=threading.Event, repr=False)

    @property
    def pid(self) -> int:
        """Process id of the API server, and id of the group with the engine's processes."""
        return self.process.pid

    @property
    def address(self) -> str:
        """`host:port`."""
        return self.url.removeprefix("http://")

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of its output."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def request(
        self, method: str, path: str, body: object = None, *, timeout_s: float = 60.0
    ) -> tuple[int, Any]:
        """Call a route on a connection of its own; the status, and the body as JSON or text."""
        connection = http.client.HTTPConnection(self.address, timeout=timeout_s)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            text = reply.read().decode()
        finally:
            connection.close()
        try:
            return reply.status, json.loads(text)
        except ValueError:
            return reply.status, text

    def metric(self, name: str) -> float:
        """A gauge or counter of `/metrics`, over all its labels."""
        _, text = self.request("GET", "/metrics")
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(f"{name}{{"))
        return sum(float(value) for _, value in lines)

    async def generating(self, requests: int) -> None:
        """Wait until it runs so many requests and each has got tokens (vLLM)."""
        with anyio.fail_after(STARTS_LIMIT_S):
            while self.metric("vllm:num_requests_running") != requests:  # noqa: ASYNC110 - polled
                await anyio.sleep(LOOK_OFTEN_S)
        await make_tokens(self, tokens=10 * requests)

    def is_healthy(self) -> bool:
        """Whether it says that it serves."""
        try:
            status, _ = self.request("GET", self.engine.ready, timeout_s=5.0)
        except (OSError, http.client.HTTPException):
            return False
        return status == http.HTTPStatus.OK

    def kill(self) -> None:
        """Kill the API server and the engine, as a machine that fails would; again does nothing."""
        if not self.gone.is_set():
            self._signal_group(signal.SIGKILL)
            self._wait_for_group()
            self.gone.set()

    def stop(self) -> None:
        """Ask it to stop, then kill what is left."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_LIMIT_S)
        self.kill()

    def _signal_group(self, number: int) -> bool:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    def _wait_for_group(self) -> None:
        self.process.wait(STOP_LIMIT_S)
        deadline = time.monotonic() + STOP_LIMIT_S
        while self._signal_group(0):
            if time.monotonic() > deadline:
                raise ServerError(f"processes of group {self.pid} survive SIGKILL")
            _pause()


async def make_tokens(*servers: Server, tokens: int) -> None:
    """Wait until servers of vLLM have together made so many more tokens."""

    def made() -> float:
        return sum(server.metric("vllm:generation_tokens_total") for server in servers)

    wanted = made() + tokens
    with anyio.fail_after(STARTS_LIMIT_S):
        while made() < wanted:  # noqa: ASYNC110 - polled
            await anyio.sleep(LOOK_OFTEN_S)


@contextlib.contextmanager
def serving(
    environment: pathlib.Path,
    model: pathlib.Path,
    *,
    count: int = 1,
    folder: pathlib.Path,
    flags: Sequence[str] = (),
    engine: Engine = VLLM,
) -> Iterator[tuple[Server, ...]]:
    """Servers of one model, started at the same time and stopped at the end.

    Raises:
        ServerError: one of them died or was not ready in time.
    """
    with contextlib.ExitStack() as stack:

        def launch(number: int, attempt: int) -> Server:
            place = folder / f"server{number}-{attempt}"
            server = start(environment, model, folder=place, flags=flags, engine=engine)
            stack.callback(server.stop)
            return server

        started = [launch(number, 1) for number in range(count)]
        yield tuple(
            settle(server, functools.partial(launch, number))
            for number, server in enumerate(started)
        )


def settle(server: Server, again: Callable[[int], Server]) -> Server:
    """The server as soon as it answers, or a later one where somebody took its port.

    The port was free when it was chosen. `again` starts another attempt, of a given number.

    Raises:
        ServerError: one of them ended for another reason, or did not answer in time.
    """
    for attempt in range(2, PORT_TRIES + 1):
        try:
            wait_ready(server)
        except ServerError:
            if not port_was_taken(server):
                raise
        else:
            return server
        server = again(attempt)
    wait_ready(server)
    return server


def start(
    environment: pathlib.Path,
    model: pathlib.Path,
    *,
    folder: pathlib.Path,
    flags: Sequence[str] = (),
    port: int | None = None,
    engine: Engine = VLLM,
) -> Server:
    """Start a server and return at once; its log goes to `folder`.

    Without `port` it gets one that is free.
    """
    place = Place(folder=str(folder), ports={"http": port or free_port()}, shared=str(folder))
    launch = engine.launch(environment, model)
    (component,) = launch.plan(dict.fromkeys(launch.worker_names, place)).components
    variables = {name: str(value) for name, value in component.environment.items()}
    return spawn(
        (*component.argv, *flags),
        component.url,
        folder=folder,
        variables={"VLLM_CONFIG_ROOT": str(folder / "vllm"), **variables},
        face=engine,
    )


def spawn(
    command: Sequence[str],
    url: str,
    *,
    folder: pathlib.Path,
    variables: Mapping[str, str],
    face: Face,
) -> Server:
    """Run a server that will answer at `url`; it leads a process group of its own.

    Of this process's environment it inherits what names no foreign interpreter or deployment.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.txt"
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in REMOVED and not name.startswith(FOREIGN)
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=inherited | dict(variables),
            cwd=folder,
            start_new_session=True,
        )
    return Server(url, log, process, face)


def wait_ready(server: Server, *, limit_s: float = START_LIMIT_S) -> None:
    """Return when the server answers; from then on that goes before making tokens.

    Raises:
        ServerError: it ended, or did not answer within `limit_s`.
    """
    wait_for(server.is_healthy, server, limit_s=limit_s)
    let_answer_first(server.pid)


def wait_for(
    condition: Callable[[], bool], *servers: Server, limit_s: float = START_LIMIT_S
) -> None:
    """Return when something holds that takes these servers to run.

    Raises:
        ServerError: one of them ended, or it did not hold within `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    while not condition():
        for server in servers:
            status = server.process.poll()
            if status is not None:
                raise ServerError(f"the server ended with {status}:\n{server.log_tail()}")
        if time.monotonic() > deadline:
            tails = "\n\n".join(server.log_tail() for server in servers)
            raise ServerError(f"no answer within {limit_s:g} s:\n{tails}")
        _pause()


def _pause() -> None:
    threading.Event().wait(LOOK_EVERY_S)


def free_port() -> int:
    """A port that nobody listens at."""
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerError("no port is free")


def port_was_taken(server: Server) -> bool:
    """Whether a server ended because somebody else listens at its port."""
    return PORT_TAKEN in server.log_tail(200)
