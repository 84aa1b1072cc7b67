"""One server of an engine, whichever it is, for tests that say the same of several engines.

The rule of this file: a test is told where to publish to and where to ask, and not how the servers
are started.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest

from tests.engines.kit.dynamo.deployment import VLLM_WORKER, Deployment
from tests.engines.kit.server import Server

__all__ = ("Place", "Standing", "marked", "of_dynamo", "of_servers", "on", "place_in")


@dataclass(frozen=True)
class Place:
    """One server that is published to.

    Attributes:
        server: it.
        target: what a fleet connects to.
        front: where requests go.
    """

    server: Server
    target: str
    front: Server


@dataclass(frozen=True)
class Standing:
    """Servers of one engine.

    Attributes:
        alone: gives one that a test leaves serving.
        own: gives one that a test may ruin.
    """

    alone: Callable[[], Place]
    own: Callable[[], AbstractContextManager[Place]]


def place_in(deployment: Deployment) -> Place:
    """The only worker of a deployment."""
    (server,) = deployment.workers
    return Place(server, deployment.target, deployment.frontend)


def _revived(deployment: Deployment) -> Place:
    for server in [s for s in deployment.workers if s.process.poll() is not None]:
        deployment.kill(server)
    if not deployment.workers:
        deployment.start(VLLM_WORKER)
    deployment.wait()
    return place_in(deployment)


def of_dynamo(deployment: Deployment) -> Standing:
    """A frontend and one worker, another one where the last one has ended."""

    @contextlib.contextmanager
    def ruined() -> Iterator[Place]:
        place = _revived(deployment)
        try:
            yield place
        finally:
            deployment.kill(place.server)

    return Standing(lambda: _revived(deployment), ruined)


@contextlib.contextmanager
def of_servers(
    serve: Callable[[int], AbstractContextManager[tuple[Server, ...]]],
) -> Iterator[Standing]:
    """Servers that are asked themselves; the one that is left serving is started when needed."""
    with contextlib.ExitStack() as stack:

        @contextlib.contextmanager
        def served() -> Iterator[Place]:
            with serve(1) as (server,):
                yield Place(server, f"{server.engine.scheme}://{server.address}", server)

        one: list[Place] = []

        def alone() -> Place:
            if not one:
                one.append(stack.enter_context(served()))
            return one[0]

        yield Standing(alone, served)


def on(*kinds: str) -> pytest.MarkDecorator:
    """Run a test on these engines."""
    return pytest.mark.parametrize("kind", [marked(kind) for kind in kinds], indirect=True)


def marked(kind: str, *more: str) -> Any:
    """A case of a test, which takes longer on Dynamo."""
    marks = [pytest.mark.long] if kind == "dynamo" else []
    return pytest.param(kind, *more, marks=marks)
