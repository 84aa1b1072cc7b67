"""`python -m genapi.demo`: reinforcement learning end to end, with real weight publication.

A small policy learns to write tokens of the lowest quarter of its vocabulary. Rollouts are in
flight all the time, also while new weights are published onto the workers they run on.

Standard output ends with a table of the steps and one line of JSON; progress goes to standard
error. The exit status is 0 when every publication committed and the reward rose, 130 after
Ctrl-C, 2 for a command line that cannot be, and 1 otherwise.
"""

import argparse
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
from anyio.abc import TaskStatus

from genapi import GenAPIError, OffPolicyWindow, weights
from genapi.demo.learner import Learner
from genapi.demo.loop import Plan, learning, prepared, run
from genapi.demo.processes import worker_processes
from genapi.demo.report import Record
from genapi.embedded import policy

__all__ = ("main",)

_VOCAB = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    options = _parse(arguments)
    record = Record()
    started = time.monotonic()
    complaint: str | None = None
    try:
        anyio.run(_run, options, record)
    except KeyboardInterrupt:
        record.stopped_by = signal.SIGINT
    except Exception as error:  # noqa: BLE001 - however a run ends, what it did is shown
        complaint = _explain(error)
    else:
        complaint = record.complaint()
    if record.superseded:
        _tell(f"{record.superseded} rollouts made way for newer ones")
    print(record.table())
    print(json.dumps(record.summary(seconds=time.monotonic() - started)), flush=True)
    if record.stopped_by is not None:
        _tell("stopped early; nothing that was started is left")
        return 128 + record.stopped_by
    if complaint is not None:
        _tell(f"FAILED: {complaint}")
        return 1
    return 0


async def _run(options: argparse.Namespace, record: Record) -> None:
    """Run until the end or the first signal; later ones change nothing."""

    async def watch(*, task_status: TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for number in signals:
                record.stopped_by = record.stopped_by or number
                work.cancel()

    async with anyio.create_task_group() as tasks:
        work = anyio.CancelScope()
        await tasks.start(watch)
        with work:
            async with AsyncExitStack() as stack:
                target = await _target(options, stack)
                await run(_plan(options, target), record, tell=_tell)
        tasks.cancel_scope.cancel()


async def _target(options: argparse.Namespace, stack: AsyncExitStack) -> str:
    if options.target is not None:
        return str(options.target)
    if not options.processes:
        return f"embedded://?protocol=vllm&workers={options.workers}&seed={options.seed}"
    processes = worker_processes(options.workers, seed=options.seed, tell=_tell)
    return f"vllm://{','.join(await stack.enter_async_context(processes))}"


def _plan(options: argparse.Namespace, target: str) -> Plan:
    window = OffPolicyWindow(
        max_lag=options.max_lag, on_stale="keep" if options.no_publish else "drop"
    )
    if options.target is None:
        learner = Learner(policy.init(options.seed))
        return Plan(
            target=target,
            steps=options.steps,
            seed=options.seed,
            window=window,
            transport=weights.Memory(),
            improve=learning(learner, vocab=_VOCAB),
            publish=not options.no_publish,
        )
    sources = [weights.from_safetensors(path) for path in options.weights]
    for source in sources:
        next(iter(source), None)  # what cannot be read is told before anything runs
    return Plan(
        target=target,
        steps=options.steps,
        seed=options.seed,
        vocab=options.vocab,
        rewarded=False,
        window=window,
        transport=weights.Gloo() if sources else None,
        improve=prepared(sources) if sources else None,
        publish=bool(sources),
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m genapi.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=_at_least(1), default=20, help="how many steps (20)")
    parser.add_argument("--seed", type=_at_least(0), default=0, help="of weights and draws (0)")
    parser.add_argument(
        "--max-lag", type=_at_least(0), default=2, help="versions that a rollout may be old (2)"
    )
    embedded = parser.add_argument_group("on the embedded engine")
    embedded.add_argument("--workers", type=_at_least(1), help="how many workers (2)")
    embedded.add_argument(
        "--processes", action="store_true", help="each worker in a process, behind a socket"
    )
    embedded.add_argument(
        "--no-publish",
        action="store_true",
        help="learn from stale rollouts and publish nothing; fails, since nothing gets better",
    )
    servers = parser.add_argument_group("on servers that run")
    servers.add_argument("--target", help="such as vllm://127.0.0.1:8001,127.0.0.1:8002")
    servers.add_argument(
        "--weights",
        action="append",
        default=[],
        type=Path,
        metavar="PATH",
        help="safetensors to publish in turn over gloo, once per set; none: publish nothing",
    )
    servers.add_argument(
        "--vocab", type=_at_least(1), help="prompts are random ids below this (64)"
    )
    options = parser.parse_args(arguments)
    for problem in _conflicts(options):
        parser.error(problem)
    options.workers = options.workers or 2
    options.vocab = options.vocab or _VOCAB
    return options


def _conflicts(options: argparse.Namespace) -> Iterator[str]:
    if options.target is not None:
        for name in ("workers", "processes", "no_publish"):
            if getattr(options, name):
                yield f"--{name.replace('_', '-')} is for the embedded engine, without --target"
    else:
        for name in ("weights", "vocab"):
            if getattr(options, name):
                yield f"--{name} needs --target"


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return value

    return number


def _explain(error: BaseException) -> str:
    """The first cause in a sentence; with its traceback where it is not one of genapi's own."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, GenAPIError):
        traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
