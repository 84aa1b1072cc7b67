"""Two embedded workers behind sockets, each in a process of its own, for `harness.Chaos`."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING, Any, Self

from tests.engines.kit.server import free_port
from tests.support.embedded_oracle import fresh

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from tests.chaos.harness import Victim

START_S = 60.0
DEATH_S = 10.0
STEP_S = "0.0015"

__all__ = ("EmbeddedWorld",)


class EmbeddedWorld:
    """`python -m genapi.embedded`, twice. Version `step` is `policy.init(step)`."""

    limits = dict.fromkeys(
        (
            "preflight_s",
            "stage_s",
            "group_s",
            "pause_s",
            "confirm_s",
            "begin_s",
            "transfer_s",
            "finish_s",
            "label_s",
            "verify_s",
            "resume_s",
            "probe_s",
            "cleanup_s",
        ),
        2.0,
    ) | {"restart_s": 10.0}
    tokens = 200
    looks = 1
    limit_s = 20.0
    short_limit_s = 0.3
    prompt = tuple(range(1, 40))

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        self.urls: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        return "vllm://" + ",".join(url.removeprefix("http://") for url in self.urls)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.push(self)
            for index in range(2):
                self._processes.append(self._spawn(index, free_port()))
            self.urls = tuple(map(self._url, self._processes))
            undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for index in range(len(self._processes)):
            self.kill("worker", index)

    def _spawn(self, index: int, port: int) -> subprocess.Popen[str]:
        options = ("--index", str(index), "--port", str(port), "--step-s", STEP_S)
        return subprocess.Popen(
            [sys.executable, "-m", "genapi.embedded", *options], stdout=subprocess.PIPE, text=True
        )

    def _url(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], START_S)
        assert readable, "the worker does not start"
        return str(json.loads(process.stdout.readline())["url"])

    def weights(self, step: int) -> dict[str, Any]:
        return {"seed": step}

    def kill(self, victim: Victim, index: int) -> None:
        del victim  # it is one process
        process = self._processes[index]
        process.kill()
        process.wait(DEATH_S)
        if process.stdout is not None:
            process.stdout.close()

    def restart(self, url: str) -> None:
        index = self.urls.index(url)
        self.kill("worker", index)
        self._processes[index] = self._spawn(index, int(url.rpartition(":")[2]))
        assert self._url(self._processes[index]) == url

    def label(self, index: int) -> object:
        with urllib.request.urlopen(f"{self.urls[index]}/weight_info", timeout=5) as reply:  # noqa: S310
            return json.load(reply)["weight_version"]

    def check(self, step: int | None, before: Sequence[int], made: Sequence[int]) -> None:
        best = fresh(step or 0, before, made)
        assert best == list(made), f"step {step}: {best} expected, not {list(made)}"
