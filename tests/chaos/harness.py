"""Kills a publisher, a worker or its engine at a moment of a publication, and sees what follows.

A scenario has four processes of the actors beside two workers: a client with a request in flight,
the publisher that is killed or loses a worker, a second publisher that knows only the target and
the board, and a third one with a restarter where a worker has to be restarted. The rule of this
file: only processes that were started here are killed, by their own id or group.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from genapi.publication.table import TABLE, Phase
from genapi.types.policy import parse_label

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

__all__ = (
    "HALVES",
    "PHASES",
    "SILENT",
    "SPOIL",
    "Actors",
    "Chaos",
    "Row",
    "Victim",
    "World",
    "table",
)

ACTORS = Path(__file__).parent / "actors.py"
BIRTH_S = 30.0
DEATH_S = 10.0
SLACK_S = 1.0
"""How much later than its `timeout_s` a request may end, beside what its process itself lagged."""
BUSY_S = 20.0
"""How much longer than usual anything may take on a machine that is busy."""

Victim = Literal["publisher", "worker", "engine"]

SILENT = {
    Phase.LABEL: "asks nobody on vLLM, where FINISH carries the label",
    Phase.SHUT: "asks only workers that fail the probe",
    Phase.OPEN: "asks nobody",
}
SPOIL = {
    Phase.CLOSE: "source",
    Phase.EXAMINE: "source",
    Phase.UNMARK: "cancel",
    Phase.RELEASE: "cancel",
}
"""How a publication is made to take its ways out."""

PHASES = tuple(phase for phase in TABLE if phase not in SILENT)
HALVES = tuple(phase for phase in PHASES if TABLE[phase].ask and phase is not Phase.PREFLIGHT)


class World(Protocol):
    """The workers, and what their weights make."""

    @property
    def urls(self) -> tuple[str, ...]:
        """Addresses of two workers."""
        ...

    @property
    def limits(self) -> Mapping[str, float]:
        """Bounds of a publication's phases."""
        ...

    @property
    def tokens(self) -> int:
        """Length of the long request: it takes longer than a publication."""
        ...

    @property
    def looks(self) -> int:
        """How many short requests are awaited between a failure and its recovery."""
        ...

    @property
    def limit_s(self) -> float:
        """The `timeout_s` of the long request."""
        ...

    @property
    def short_limit_s(self) -> float:
        """The `timeout_s` of a short one."""
        ...

    @property
    def prompt(self) -> tuple[int, ...]:
        """The prompt of all requests."""
        ...

    @property
    def target(self) -> str: ...

    def weights(self, step: int) -> dict[str, Any]: ...

    def kill(self, victim: Victim, index: int) -> None: ...

    def restart(self, url: str) -> None: ...

    def label(self, index: int) -> object: ...

    def check(self, step: int | None, before: Sequence[int], made: Sequence[int]) -> None: ...


class Actor:
    """A process of `actors.py`, by the lines that it writes."""

    def __init__(self, out: Path, go: Path) -> None:
        self.go = go
        self.lines: list[dict[str, Any]] = []
        # Opened for writing as well, so that it is neither waited for nor at its end.
        self._pipe = os.open(out, os.O_RDWR | os.O_NONBLOCK)
        self._rest = b""
        self._taken = 0
        self._life: int | None = None
        pid = int(self.wait_for("born", limit_s=BIRTH_S)["pid"])
        # Names this process for ever, whoever has its id later; readable when it is gone.
        with contextlib.suppress(ProcessLookupError):
            self._life = os.pidfd_open(pid)

    def wait_for(self, *what: str, limit_s: float) -> dict[str, Any]:
        """The next line that is one of `what`."""
        deadline = time.monotonic() + limit_s
        while True:
            while self._taken < len(self.lines):
                line = self.lines[self._taken]
                self._taken += 1
                if line["what"] in what:
                    return line
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise AssertionError(f"no {what} within {limit_s} s; last: {self.lines[-3:]}")
            self._read(min(left_s, 0.5))
            if self.lines and self._taken == len(self.lines) and self._is_gone():
                self._read(0)
                if self._taken == len(self.lines):
                    raise AssertionError(f"gone before {what}; last: {self.lines[-3:]}")

    def _read(self, limit_s: float) -> None:
        readable, _, _ = select.select([self._pipe], [], [], limit_s)
        if readable:
            *whole, self._rest = (self._rest + os.read(self._pipe, 1 << 20)).split(b"\n")
            self.lines += map(json.loads, whole)

    def _is_gone(self, limit_s: float = 0.0) -> bool:
        return self._life is None or bool(select.select([self._life], [], [], limit_s)[0])

    def proceed(self) -> None:
        """Let it go on that stands still."""
        with self.go.open("w", encoding="utf-8") as go:
            go.write("\n")

    def kill(self) -> None:
        """Kill it, unless it is gone."""
        if self._life is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._life, signal.SIGKILL)
        self.join(DEATH_S)

    def join(self, limit_s: float) -> None:
        """Wait until it is gone; its last lines are read."""
        deadline = time.monotonic() + limit_s
        while not self._is_gone(0.1):
            assert time.monotonic() < deadline, f"alive after {limit_s} s: {self.lines[:1]}"
            self._read(0)  # it may wait for room in the pipe
        self._read(0)

    def close(self) -> None:
        try:
            self.kill()
        finally:
            os.close(self._pipe)
            if self._life is not None:
                os.close(self._life)


class Actors:
    """Forks actors from a process that has imported what they need."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self._mother = subprocess.Popen(
            [sys.executable, str(ACTORS), *options],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def start(self, kind: Literal["publisher", "client"], **job: Any) -> Actor:
        name = f"{next(self._numbers)}-{kind}"
        out, go = self._folder / name, self._folder / f"{name}-go"
        os.mkfifo(out)
        os.mkfifo(go)
        pipe = os.open(out, os.O_RDWR | os.O_NONBLOCK)  # whoever writes needs a reader at once
        try:
            stdin = self._mother.stdin
            assert stdin is not None
            stdin.write(json.dumps({"kind": kind, "out": str(out), "go": str(go), **job}) + "\n")
            stdin.flush()
            return Actor(out, go)
        finally:
            os.close(pipe)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The group is hers while she is not waited for, and holds whoever she forked.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._mother.pid, signal.SIGKILL)
        self._mother.wait(DEATH_S)
        assert self._mother.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._mother.stdin.close()


@dataclass(frozen=True)
class Row:
    """What one failure led to; a line of the table in the docs.

    Attributes:
        moment: the phase, or `PHASE/half`.
        victim: what was killed.
        receipts: one for each worker; of the publication that saw the failure, or else of the
            next one.
        serves: what requests got before anything was done about it.
        seconds: from the kill to the commit on both workers, `restart_s` included.
        restart_s: how long the restarts took that were asked for.
        recovery: what was done.
        load: the machine's load average at the end, which the seconds depend on.
    """

    moment: str
    victim: Victim
    receipts: tuple[str, ...]
    serves: tuple[str, ...]
    seconds: float
    restart_s: float
    recovery: tuple[str, ...]
    load: float


@dataclass
class Chaos:
    """Scenarios one after the other over the same workers and the same board."""

    world: World
    actors: Actors
    folder: Path
    step: int = 0
    rows: list[Row] = field(default_factory=list)
    restart_s: float = 0.0
    spoilt: bool = False

    @property
    def common(self) -> dict[str, Any]:
        """What every process is told; the run is known from the board alone."""
        board = self.folder / "board"
        board.mkdir(exist_ok=True)
        return {"target": self.world.target, "board": f"file:{board}", "run": None}

    def publisher(self, step: int, **more: Any) -> Actor:
        return self.actors.start(
            "publisher",
            step=step,
            weights=self.world.weights(step),
            limits=dict(self.world.limits),
            **{**self.common, **more},
        )

    def begin(self) -> None:
        """The first publication; from here on the board knows the run."""
        self.step += 1
        with contextlib.closing(self.publisher(self.step, run="chaos")) as first:
            ended = first.wait_for("ended", limit_s=self.bound_s)
            assert ended["error"] is None, ended

    @property
    def bound_s(self) -> float:
        """No publication outlasts it, whatever fails: no phase outlasts its own limit."""
        return sum(self.world.limits.values()) + BUSY_S

    def play(self, moment: str, victim: Victim) -> Row:
        """One scenario; fails when anything that has to hold does not."""
        if self.spoilt:
            self._begin_anew()
        self.spoilt = True
        row = self._play(moment, victim)
        self.spoilt = False
        self.rows.append(row)
        return row

    def _begin_anew(self) -> None:
        """After a scenario that failed nothing is known: other servers, another board."""
        for url in self.world.urls:
            self.world.restart(url)
        self.folder = self.folder / "anew"
        self.folder.mkdir()
        self.begin()

    def _play(self, moment: str, victim: Victim) -> Row:
        old, self.restart_s = self.step, 0.0
        stop = self.folder / f"stop-{old}"
        with contextlib.ExitStack() as stack:
            client = self.actors.start(
                "client",
                prompt=self.world.prompt,
                tokens=self.world.tokens,
                limit_s=self.world.limit_s,
                short_limit_s=self.world.short_limit_s,
                stop=str(stop),
                **self.common,
            )
            stack.callback(client.close)
            client.wait_for("began", limit_s=BIRTH_S)
            hit_at, report = self._strike(moment, victim, stack)
            left_at = time.monotonic()
            self._outlast(client, left_at)
            recovering_at = time.monotonic()
            receipts, recovery = self._recover(old + 2, report)
            self.step = old + 2
            seconds = left_at - hit_at + time.monotonic() - recovering_at
            self._wait_for_version(client, self.step)
            stop.touch()
            client.join(self.world.limit_s + BUSY_S)
            assert "long" in {line["what"] for line in client.lines}
        for index in range(len(self.world.urls)):
            version = parse_label(self.world.label(index))
            assert version is not None
            assert version.step == self.step
        self._judge(client)
        return Row(
            moment=moment,
            victim=victim,
            receipts=receipts,
            serves=self._served(client, left_at, recovering_at, old),
            seconds=seconds,
            restart_s=self.restart_s,
            recovery=recovery,
            load=os.getloadavg()[0],
        )

    def _strike(
        self, moment: str, victim: Victim, stack: contextlib.ExitStack
    ) -> tuple[float, dict[str, Any] | None]:
        """Kill at the moment; when that was, and what a surviving publisher reports."""
        phase = Phase(moment.partition("/")[0])
        if phase is Phase.HEAL:
            # Only what an earlier failure left is healed.
            broken = self.publisher(self.step + 1, hold=Phase.TRANSFER)
            stack.callback(broken.close)
            broken.wait_for("held", limit_s=self.bound_s)
            broken.kill()
        first = self.publisher(self.step + 1, hold=moment, spoil=SPOIL.get(phase))
        stack.callback(first.close)
        first.wait_for("held", limit_s=self.bound_s)
        hit_at = time.monotonic()
        if victim == "publisher":
            first.kill()
            return hit_at, None
        self.world.kill(victim, 1)
        first.proceed()
        ended = first.wait_for("ended", limit_s=self.bound_s)
        return hit_at, ended

    def _outlast(self, client: Actor, since: float) -> None:
        """Wait for short requests that started after that moment."""
        for _ in range(self.world.looks):
            limit_s = 2 * self.world.short_limit_s + BUSY_S
            while client.wait_for("short", limit_s=limit_s)["since"] < since:
                pass

    def _recover(
        self, step: int, seen: dict[str, Any] | None
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Publish again as one who knows only the target and the board, until it commits."""
        receipts = _receipts(seen) if seen is not None else ()
        recovery: list[str] = []
        for restarts in (False, True):
            publisher = self.publisher(step, restarts=restarts)
            with contextlib.closing(publisher):
                ended, restarted = self._ended(publisher)
            receipts = receipts or _receipts(ended)
            if restarted:
                recovery.append(f"restart {' and '.join(restarted)}")
            recovery.append("publish")
            report = ended["report"]
            if ended["error"] is None:
                assert report["committed"]
                assert len(report["receipts"]) == len(self.world.urls)
                assert all(r["outcome"] == "committed" for r in report["receipts"])
                return receipts, tuple(recovery)
            assert not restarts, f"not even with restarts: {ended}"
            if report is None:
                # A worker that nobody reaches is named before anything begins.
                assert any(url in ended["error"] for url in self.world.urls), ended
            else:
                assert len(report["receipts"]) == len(self.world.urls)
                ways = [r["recovery"] for r in report["receipts"]]
                assert "restart_then_publish" in ways, f"nobody says what to restart: {ended}"
            recovery.pop()
        raise AssertionError("unreachable")

    def _ended(self, publisher: Actor) -> tuple[dict[str, Any], list[str]]:
        restarted: list[str] = []
        while True:
            line = publisher.wait_for("ended", "restart", limit_s=self.bound_s)
            if line["what"] == "ended":
                return line, restarted
            since = time.monotonic()
            self.world.restart(line["url"])
            self.restart_s += time.monotonic() - since
            restarted.append(f"worker {1 + self.world.urls.index(line['url'])}")
            publisher.proceed()

    def _wait_for_version(self, client: Actor, step: int) -> None:
        deadline = time.monotonic() + 2 * self.world.short_limit_s + BUSY_S
        while True:
            left_s = deadline - time.monotonic()
            line = client.wait_for("short", limit_s=max(left_s, 0.0))
            if {_step(label) for *_, label in line["spans"]} == {step}:
                return

    def _judge(self, client: Actor) -> None:
        """No request outlasts its limit, no token is of other weights than its trace names."""
        for line in client.lines:
            if line["what"] not in ("long", "short"):
                continue
            took_s = line["at"] - line["since"]
            assert took_s <= line["limit_s"] + SLACK_S + line["lag_s"], line
            assert line["error"] is not None or line["tokens"], line
            for start, end, lo, hi in line["spans"]:
                assert lo == hi, f"nothing is attested: {line}"
                step = _step(lo)
                if step is None and line["error"] is not None:
                    continue  # a stream that broke off: the engine names versions at the end
                # Otherwise UNKNOWN is only what a server has that just started.
                assert step is not None or self.restart_s > 0, line
                before = [*self.world.prompt, *line["tokens"][:start]]
                try:
                    self.world.check(step, before, line["tokens"][start:end])
                except AssertionError as error:
                    raise AssertionError(f"{error}: {line}") from None

    def _served(self, client: Actor, since: float, until: float, old: int) -> tuple[str, ...]:
        """What short requests got that started between the failure and the recovery."""
        names = {old: "the old version", old + 1: "the new version", None: "an unknown version"}
        seen: dict[str, None] = {}
        for line in client.lines:
            if line["what"] == "short" and since < line["since"] < until:
                if line["error"] is None:
                    seen |= {names[_step(lo)]: None for _, _, lo, _ in line["spans"]}
                else:
                    seen[_plainly(line["error"])] = None
        return tuple(seen)


def _plainly(error: str) -> str:
    name, _, text = error.partition(": ")
    return (
        "nobody: requests wait for their timeout"
        if "within timeout_s" in text
        else f"nobody: {name}"
    )


def _step(label: object) -> int | None:
    version = parse_label(label)
    return None if version is None else version.step


def _receipts(ended: dict[str, Any]) -> tuple[str, ...]:
    report = ended["report"]
    if report is None:
        return (str(ended["error"]).partition(":")[0],)
    return tuple(
        f"{r['outcome']}, {r['evidence']}" + (f", {r['recovery']}" if r["recovery"] else "")
        for r in report["receipts"]
    )


def table(rows: Sequence[Row]) -> str:
    """The rows as markdown."""
    lines = [
        "| at | receipts | what serves then | back after | way back |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        receipts = (
            f"both: {row.receipts[0]}"
            if len(set(row.receipts)) == 1
            else "; ".join(f"{n}: {text}" for n, text in enumerate(row.receipts, start=1))
        )
        restart = f", {row.restart_s:.1f} s of it the restart" if row.restart_s else ""
        cells = (
            row.moment,
            receipts,
            ", ".join(row.serves),
            f"{row.seconds:.1f} s{restart}",
            ", ".join(row.recovery),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
