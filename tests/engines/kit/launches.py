"""How `genapi.launch` starts real servers without a GPU, and a program that does.

    python -m tests.engines.kit.launches vllm|sglang|dynamo CONFIG_JSON FOLDER

launches one, says which processes there are, and waits to be ended from outside.
"""

from __future__ import annotations

import asyncio
import json
import pathlib
import sys
from typing import Any

import genapi
from genapi.events import ComponentStarted, Event
from genapi.providers import dynamo
from tests.engines.kit.dynamo.deployment import VLLM_WORKER
from tests.engines.kit.server import VLLM, Engine, Launch
from tests.engines.kit.sglang.engine import SGLANG
from tests.support.launched import sessions

__all__ = ("ENGINES", "launch_of")

ENGINES = {
    "vllm": VLLM,
    "sglang": SGLANG,
    "dynamo": Engine(
        scheme="dynamo",
        kind=dynamo.Launch,
        fields={"enforce_eager": True, "environment": VLLM_WORKER.variables},
        ready="/health",
    ),
}


def launch_of(scheme: str, environment: pathlib.Path, model: pathlib.Path, **more: Any) -> Launch:
    """Servers of a tiny model, as the kit's own are."""
    return ENGINES[scheme].launch(environment, model, **more)


async def main(scheme: str, config: str, folder: str) -> None:
    started: list[int] = []

    def observe(event: Event) -> None:
        if isinstance(event, ComponentStarted):
            started.append(event.pid)

    launch = ENGINES[scheme].kind.model_validate_json(config)
    async with genapi.launch(launch, folder=folder, observe=observe):
        sys.stdout.write(json.dumps([pid for leader in started for pid in sessions(leader)]) + "\n")
        sys.stdout.flush()
        await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
