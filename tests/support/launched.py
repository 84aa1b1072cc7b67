"""Launches of small real programs: what is written by a test itself, beside embedded engines.

`Beside` adds programs of Python code to a launch; each gets its port as its argument.
"""

import json
import os
import pathlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import anyio

from genapi.providers import vllm
from genapi.types.config import FleetConfig, Key
from genapi.types.launch import Component, Deployment, Launchable, Need, Place, PortWish
from tests.support.engine_process import STAND_INS

__all__ = (
    "LIMIT_S",
    "SERVE",
    "Beside",
    "alive",
    "engines",
    "gone",
    "read_json",
    "sessions",
)

LIMIT_S = 20.0
HOST = "127.0.0.1"

SERVE = """
import http.server, sys, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
"""
"""Answers 200 to every GET, in a thread."""


@dataclass(frozen=True)
class Beside:
    """A launch with more programs, or programs alone where there is no launch.

    With `more_ports` each has so many more, of the hundred below 15100, and `MORE_PORTS` is a
    variable that lists them. `more` are fields of each component as they are.
    """

    launch: Launchable | None
    code: Mapping[str, str]
    port: int | None = None
    variables: Mapping[str, str | Key] | None = None
    files: Mapping[str, Mapping[str, str | Key]] | None = None
    more_ports: int = 0
    worker: bool = False
    provider: str = "vllm"
    more: Mapping[str, object] | None = None

    @property
    def needs(self) -> tuple[Need, ...]:
        ports = {"http": PortWish(number=self.port)}
        ports |= {f"more{number}": PortWish(below=15100) for number in range(self.more_ports)}
        more = (Need(component=name, host=HOST, ports=ports) for name in self.code)
        return (*(self.launch.needs if self.launch else ()), *more)

    def located(self, find: Callable[[str], str]) -> "Beside":
        return replace(self, launch=self.launch.located(find)) if self.launch else self

    def plan(self, places: Mapping[str, Place]) -> Deployment:
        more = []
        for name, code in self.code.items():
            port = places[name].ports["http"]
            listed = [str(p) for wish, p in places[name].ports.items() if wish != "http"]
            said = {"MORE_PORTS": " ".join(listed)} if listed else {}
            more.append(
                Component(
                    name=name,
                    argv=(sys.executable, "-c", code, str(port)),
                    environment={**(self.variables or {}), **said},
                    files=self.files or {},
                    url=f"http://{HOST}:{port}",
                    ready="/",
                    worker=self.worker,
                ).model_copy(update=self.more)
            )
        if self.launch is None:
            target = f"vllm://{HOST}:{next(iter(places.values())).ports['http']}"
            return Deployment(components=tuple(more), fleet=FleetConfig(target=target))
        deployment = self.launch.plan(places)
        components = (*deployment.components, *more)
        return deployment.model_copy(update={"components": components})


def engines(workers: int = 1, **more: object) -> vllm.Launch:
    """Embedded engines in processes, started by vLLM's own command line."""
    return vllm.Launch.model_validate(
        {
            "model": "some/model",
            "model_name": "tiny",
            "workers": workers,
            "weight_backend": "genapi_memory",
            "environment": STAND_INS,
            **more,
        }
    )


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def sessions(leader: int) -> list[int]:
    """The processes of the session that a process leads."""
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            stat = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue
        if int(stat[3]) == leader and stat[0] not in "ZX":
            found.append(int(entry.name))
    return found


async def gone(*pids: int) -> None:
    """Wait until none of the processes runs."""
    with anyio.fail_after(LIMIT_S):
        while any(map(alive, pids)):  # noqa: ASYNC110 - they are nobody's children here
            await anyio.sleep(0.02)


def read_json(path: os.PathLike[str]) -> object:
    return json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
