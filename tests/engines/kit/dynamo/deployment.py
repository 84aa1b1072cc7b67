"""Starts and stops real Dynamo deployments without a GPU, etcd or NATS.

A deployment is a frontend and workers of one kind that find each other in a folder. Everything
listens at 127.0.0.1. The rule of this file is that of `kit/server.py`: what is started here ends
here, whole process groups of it.

    with Deployment(environment, model, folder) as deployment:
        first, second = deployment.start(VLLM_WORKER), deployment.start(VLLM_WORKER)
        deployment.wait()
"""

from __future__ import annotations

import contextlib
import http
import http.client
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.engines.kit.priority import let_answer_first
from tests.engines.kit.server import (
    SETTINGS,
    STAND_INS,
    Face,
    Server,
    free_port,
    settle,
    spawn,
    wait_for,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType
    from typing import Self

__all__ = ("MOCKER", "POLICY", "VLLM_WORKER", "Deployment", "Kind")

POLICY_WORKER = pathlib.Path(__file__).parent / "policy_worker.py"
MODEL = "tiny"
FRONTEND = Face(scheme="dynamo", ready="/live")
WORKER = Face(scheme="dynamo", ready="/live")
IN_HAND = "dynamo_component_inflight_requests{"
NOWHERE = "tcp://127.0.0.1:9"

# Each with the reason why a deployment on one machine without services needs it.
PLANES = {
    "DYN_DISCOVERY_BACKEND": "file",  # the default is etcd
    "DYN_REQUEST_PLANE": "tcp",
    "DYN_EVENT_PLANE": "zmq",
    "DYN_HTTP_HOST": "127.0.0.1",
    "DYN_SYSTEM_HOST": "127.0.0.1",
    "DYN_TCP_RPC_HOST": "127.0.0.1",
    "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
    "DYN_EVENT_PLANE_HOST": "127.0.0.1",
    # Publishers of events listen at every interface, whatever their host is set to, unless a broker
    # is named, to which they connect. There is none: events go nowhere, which routing by turns
    # does not mind.
    "DYN_ZMQ_BROKER_URL": f"xsub={NOWHERE} , xpub={NOWHERE}",
    "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",  # nobody is served any more
    "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How one kind of worker is started.

    Attributes:
        program: what Python runs.
        flags: of every worker.
        variables: of its environment.
        is_listed: whether `/v1/rl/workers` lists it.
    """

    program: tuple[str, ...]
    flags: Callable[[pathlib.Path], Sequence[str]]
    variables: Mapping[str, str] = field(default_factory=dict)
    is_listed: bool = True


VLLM_WORKER = Kind(
    program=("-m", "dynamo.vllm"),
    flags=lambda model: (
        f"--model={model}",
        f"--served-model-name={MODEL}",
        "--enable-rl",
        "--dtype=float32",
        "--enforce-eager",
        "--max-model-len=4096",
        '--weight-transfer-config={"backend": "genapi_gloo"}',
    ),
    variables=SETTINGS | {"PYTHONPATH": str(STAND_INS), "STAND_INS": "torchvision"},
)
MOCKER = Kind(
    program=("-m", "dynamo.mocker"),
    flags=lambda model: (f"--model-path={model}", f"--model-name={MODEL}", "--speedup-ratio=100"),
    is_listed=False,
)
POLICY = Kind(program=(str(POLICY_WORKER),), flags=lambda model: (f"--model={model}",))


class Deployment:
    """A frontend, and whatever workers are started for it.

    Attributes:
        frontend: its server.
        workers: those that were started and not stopped since.
    """

    def __init__(
        self,
        environment: pathlib.Path,
        model: pathlib.Path,
        folder: pathlib.Path,
        *,
        flags: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.folder = folder
        self.workers: dict[Server, Kind] = {}
        self._python = str(environment / "bin" / "python")
        self._flags = flags
        self._stack = contextlib.ExitStack()
        self._started = 0

    def __enter__(self) -> Self:
        """Start the frontend.

        Raises:
            ServerError: it did not start.
        """
        (self.folder / "store").mkdir(parents=True)
        with contextlib.ExitStack() as undo:
            undo.push(self._stack)
            self.frontend = settle(self._start_frontend(), lambda _: self._start_frontend())
            undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop everything, the workers first."""
        self._stack.close()

    @property
    def target(self) -> str:
        """What a fleet connects to."""
        return f"dynamo://{self.frontend.address}?discovery={self._discovery}"

    @property
    def discovery_url(self) -> str:
        """Where the frontend lists workers."""
        return f"http://127.0.0.1:{self._discovery}"

    def listed(self) -> list[dict[str, Any]]:
        """What the frontend says of workers with routes of administration."""
        listing = Server(self.discovery_url, self.frontend.log, self.frontend.process, FRONTEND)
        status, body = listing.request("GET", "/v1/rl/workers")
        assert status == http.HTTPStatus.OK, body
        found: list[dict[str, Any]] = body["workers"]
        return found

    def start(self, kind: Kind, *flags: str) -> Server:
        """Start a worker and return at once; `wait` for it."""
        port = free_port()
        server = self._spawn(
            (*kind.program, *kind.flags(self.model), *flags),
            port,
            WORKER,
            {**kind.variables, "DYN_SYSTEM_PORT": str(port)},
        )
        self.workers[server] = kind
        return server

    def stop(self, server: Server) -> None:
        """Ask a worker to stop, and forget it."""
        del self.workers[server]
        server.stop()

    def kill(self, server: Server) -> None:
        """Kill a worker and its engine, and forget it."""
        del self.workers[server]
        server.kill()

    def wait(self) -> None:
        """Return when every worker that was started is routed to, and listed where it should be.

        Raises:
            ServerError: one of them ended, or it took too long.
        """
        servers = (self.frontend, *self.workers)
        wait_for(self._is_complete, *servers)
        for server in self.workers:
            let_answer_first(server.pid)

    def instance(self, server: Server) -> int:
        """The id of a worker that is listed."""
        (found,) = [w for w in self.listed() if w.get("system_url") == server.url]
        number: int = found["instance_id"]
        return number

    def busy(self) -> list[Server]:
        """The workers that have a request in hand."""
        return [server for server in self.workers if _in_hand(server) > 0]

    def _is_complete(self) -> bool:
        listed = {server.url for server, kind in self.workers.items() if kind.is_listed}
        try:
            status, body = self.frontend.request("GET", f"/v1/models/{MODEL}/ready")
            found = [worker for worker in self.listed() if "error" not in worker]
        except (OSError, http.client.HTTPException):
            return False
        if status != http.HTTPStatus.OK:
            return False
        types = body["namespaces"]["dynamo"]["worker_types"].values()
        return (
            sum(each["workers"] for each in types) == len(self.workers)
            and {worker.get("system_url") for worker in found} == listed
        )

    def _start_frontend(self) -> Server:
        port = free_port()
        self._discovery = free_port()
        return self._spawn(
            ("-m", "dynamo.frontend", f"--http-port={port}", *self._flags),
            port,
            FRONTEND,
            {"DYN_ENABLE_RL": "true", "DYN_RL_PORT": str(self._discovery)},
        )

    def _spawn(
        self, arguments: Sequence[str], port: int, face: Face, variables: Mapping[str, str]
    ) -> Server:
        self._started += 1
        places = {
            "DYN_FILE_KV": str(self.folder / "store"),
            "HOME": str(self.folder),  # where the frontend keeps copies of tokenizers
            "VLLM_CONFIG_ROOT": str(self.folder / "vllm"),
            # What the first worker finds out about the model's class takes each other one 10 s.
            "VLLM_CACHE_ROOT": str(self.model.parent / "dynamo"),
        }
        server = spawn(
            (self._python, *arguments),
            f"http://127.0.0.1:{port}",
            folder=self.folder / f"{face.ready.strip('/')}{self._started}",
            variables={**PLANES, **places, **variables},
            face=face,
        )
        self._stack.callback(server.stop)
        return server


def _in_hand(server: Server) -> float:
    status, text = server.request("GET", "/metrics")
    assert status == http.HTTPStatus.OK, text
    lines = [line for line in text.splitlines() if line.startswith(IN_HAND)]
    return sum(float(line.rpartition(" ")[2]) for line in lines if '="generate"' in line)
