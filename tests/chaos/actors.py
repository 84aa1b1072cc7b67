"""The processes that are killed, take over, or watch: started by forking a process that is warm.

    actors.py        reads jobs, one JSON object per line, and forks a process for each

A job has `kind` and `out`, a pipe that gets the lines of the process: JSON objects, the first one
with its process id. A publisher may stand still at a moment of its publication and say so; then
it goes on when a line comes through the pipe `go`. A client makes one long request and then short
ones until a file appears.

The rule of this file: a process stands still by blocking its whole event loop, so that whoever
kills it there knows what it had sent.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import anyio

import genapi
from genapi.embedded import policy
from genapi.events import AdminCalled, Event, PhaseStarted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from genapi.types.ids import WorkerId

SHORT_TOKENS = 4
LIFE_S = 900
"""No process outlives whoever started it by more."""


@dataclass
class Pipe:
    """The lines that a process writes."""

    out: IO[str]

    def say(self, what: str, **more: Any) -> None:
        self.out.write(json.dumps({"what": what, "at": time.monotonic(), **more}) + "\n")
        self.out.flush()


class Failing:
    """Weights whose last tensor cannot be had."""

    def __init__(self, inner: genapi.weights.WeightSource) -> None:
        self.inner = inner

    def manifest(self) -> Sequence[genapi.weights.TensorMeta]:
        return self.inner.manifest()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        *first, _ = self.inner
        yield from first
        raise OSError("the last tensor is lost")


@dataclass
class Publisher:
    """One publication of one process.

    The job:
        target, board, step: what is published where.
        weights: `{"seed": n}` for embedded workers, `{"folder": path}` for real ones.
        limits: bounds of the phases.
        hold: the moment to stand still at: the start of a phase, or `PHASE/half`, when the first
            worker has answered what the phase asks. None = nowhere.
        spoil: `source`: the last tensor cannot be had. `cancel`: cancelled at the mark.
        restarts: whether workers that need it are restarted: whoever reads the lines does it.
        go: the pipe that is read to go on.
    """

    pipe: Pipe
    job: dict[str, Any]
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    phase: str = ""

    def observe(self, event: Event) -> None:
        if isinstance(event, PhaseStarted):
            self.phase = event.phase
            self.pipe.say("phase", phase=event.phase)
            if self.job.get("spoil") == "cancel" and event.phase == "mark":
                self.scope.cancel()
            self.stand_still(event.phase)
        elif isinstance(event, AdminCalled) and event.operation != "inspect":
            self.stand_still(f"{self.phase}/half")

    def stand_still(self, moment: str) -> None:
        if moment == self.job.get("hold"):
            self.job["hold"] = None
            self.pipe.say("held", moment=moment)
            self.wait_for_go()

    def wait_for_go(self) -> None:
        with open(self.job["go"], encoding="utf-8") as go:  # noqa: PTH123 - a pipe
            go.readline()

    async def restart(self, worker: WorkerId, url: str) -> None:
        self.pipe.say("restart", worker=str(worker), url=url)
        await anyio.to_thread.run_sync(self.wait_for_go)

    def source(self) -> genapi.weights.WeightSource:
        weights = self.job["weights"]
        if "folder" in weights:
            source = genapi.weights.from_safetensors(weights["folder"])
        else:
            source = genapi.weights.from_tensors(policy.init(weights["seed"]))
        return Failing(source) if self.job.get("spoil") == "source" else source

    def transport(self) -> genapi.weights.WeightTransport:
        # Several buckets, and a source that is read while they travel.
        if "folder" in self.job["weights"]:
            return genapi.weights.Gloo(timeout_s=20, bucket_tensors=8, stage_bytes=0)
        return genapi.weights.Memory(bucket_tensors=1, stage_bytes=0)

    async def run(self) -> None:
        fleet = genapi.connect(
            self.job["target"], run=self.job["run"], board=self.job["board"], observe=self.observe
        )
        async with fleet:
            publisher = genapi.WeightPublisher(
                fleet,
                transport=self.transport(),
                timeouts=genapi.PublishTimeouts(**self.job["limits"]),
                restarter=self.restart if self.job.get("restarts") else None,
            )
            error: str | None = None
            async with publisher:
                try:
                    with self.scope:
                        await publisher.publish(self.job["step"], self.source())
                except genapi.GenAPIError as failure:
                    error = f"{type(failure).__name__}: {failure}"
                report = publisher.last_report
                self.pipe.say(
                    "ended",
                    error=error,
                    report=None if report is None else report.model_dump(mode="json"),
                )


@dataclass
class Client:
    """Requests of a process that does not publish.

    The job:
        target, board, prompt, tokens: the long request.
        limit_s, short_limit_s: the `timeout_s` of the long request and of short ones.
        stop: the file whose appearance ends it.
    """

    pipe: Pipe
    job: dict[str, Any]
    lag_s: float = 0.0

    async def run(self) -> None:
        board, run = self.job["board"], self.job["run"]
        fleet = genapi.connect(self.job["target"], run=run, board=board, refresh_s=0.2)
        async with fleet, anyio.create_task_group() as clock:
            clock.start_soon(self.keep_time)
            async with anyio.create_task_group() as group:
                await fleet.snapshot()
                group.start_soon(self.long, fleet)
                while not self.is_told_to_stop():
                    await self.short(fleet)
                    await anyio.sleep(0.02)
            clock.cancel_scope.cancel()

    def is_told_to_stop(self) -> bool:
        return Path(self.job["stop"]).exists()

    async def keep_time(self) -> None:
        """Count how much later than asked for this process wakes up: a busy machine's share."""
        while True:
            asked_at = time.monotonic()
            await anyio.sleep(0.05)
            self.lag_s += time.monotonic() - asked_at - 0.05

    def request(self, tokens: int, limit_s: float) -> genapi.GenerateRequest:
        sampling = genapi.SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        return genapi.GenerateRequest(
            prompt_token_ids=self.job["prompt"], sampling=sampling, timeout_s=limit_s
        )

    async def long(self, fleet: genapi.Fleet) -> None:
        limit_s = self.job["limit_s"]
        since, reply, error = (time.monotonic(), self.lag_s), None, None
        try:
            async with fleet.stream(self.request(self.job["tokens"], limit_s)) as events:
                await anext(events)
                self.pipe.say("began")
                async for event in events:
                    if isinstance(event, genapi.Finished):
                        reply = event.reply
        except genapi.GenAPIError as failure:
            error, reply = failure, getattr(failure, "partial", None)
        self.tell("long", since, limit_s, reply, error)

    async def short(self, fleet: genapi.Fleet) -> None:
        limit_s = self.job["short_limit_s"]
        since, reply, error = (time.monotonic(), self.lag_s), None, None
        try:
            reply = await fleet.generate(self.request(SHORT_TOKENS, limit_s))
        except genapi.GenAPIError as failure:
            error = failure
        self.tell("short", since, limit_s, reply, error)

    def tell(
        self,
        what: str,
        since: tuple[float, float],
        limit_s: float,
        reply: genapi.GenerateResponse | None,
        error: genapi.GenAPIError | None,
    ) -> None:
        output = reply.outputs[0] if reply is not None and reply.outputs else None
        self.pipe.say(
            what,
            since=since[0],
            lag_s=self.lag_s - since[1],
            limit_s=limit_s,
            error=None if error is None else f"{type(error).__name__}: {error}",
            tokens=list(output.token_ids) if output else [],
            spans=[
                (s.start, s.end, s.lo and s.lo.label, s.hi and s.hi.label)
                for s in (output.policy.spans if output else ())
            ],
        )


KINDS = {"publisher": Publisher, "client": Client}


def work(job: dict[str, Any]) -> None:
    """Do one job in this process."""
    with open(job["out"], "w", encoding="utf-8") as out:  # noqa: PTH123 - a pipe
        pipe = Pipe(out)
        pipe.say("born", pid=os.getpid())

        async def run() -> None:
            await KINDS[job["kind"]](pipe, job).run()

        anyio.run(run)


def main() -> None:
    """Fork a process for each job, until standard input ends."""
    genapi.connect("vllm://localhost:1")  # the transports are imported by the first fleet
    if "--torch" in sys.argv:
        import torch  # noqa: F401, PLC0415 - only where tensors travel over gloo
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while line := sys.stdin.readline():
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.alarm(LIFE_S)
            try:
                work(json.loads(line))
            except BaseException:  # noqa: BLE001 - a fork must not go on as its parent
                traceback.print_exc()
            finally:
                os._exit(0)


if __name__ == "__main__":
    main()
