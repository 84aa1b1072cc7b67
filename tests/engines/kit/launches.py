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
from genapi.providers import dynamo, sglang, vllm
from tests.engines.kit import server as vllm_kit
from tests.engines.kit.dynamo.deployment import VLLM_WORKER
from tests.engines.kit.sglang import engine as sglang_kit
from tests.support.launched import sessions

__all__ = ("KINDS", "Launch", "launch_of")

Launch = vllm.Launch | sglang.Launch | dynamo.Launch
KINDS: dict[str, type[Launch]] = {
    "vllm": vllm.Launch,
    "sglang": sglang.Launch,
    "dynamo": dynamo.Launch,
}
SETTINGS = {
    "vllm": vllm_kit.SETTINGS,
    "sglang": sglang_kit.SETTINGS,
    "dynamo": VLLM_WORKER.variables,
}
FIELDS = (
    "--context-length=", "--dtype=", "--enable-scale-out", "--enforce-eager", "--host=",
    "--max-model-len=", "--served-model-name=", "--weight-transfer-config=",
)  # fmt: skip
"""The kit's flags that are fields of a launch."""
FLAGS = {"vllm": vllm_kit.FLAGS, "sglang": sglang_kit.FLAGS, "dynamo": ()}


def launch_of(scheme: str, environment: pathlib.Path, model: pathlib.Path, **more: Any) -> Launch:
    """Servers of a tiny model, as the kit's own are."""
    fields: dict[str, Any] = {
        "model": str(model),
        "model_name": "tiny",
        "python": str(environment / "bin" / "python"),
        "dtype": "float32",
        "max_model_len": 4096,
        "flags": tuple(flag for flag in FLAGS[scheme] if not flag.startswith(FIELDS)),
        "environment": SETTINGS[scheme],
    }
    if scheme != "sglang":
        fields["enforce_eager"] = True
        cache = {"VLLM_CACHE_ROOT": str(model.parent / scheme)}
        fields["environment"] = fields["environment"] | cache
    return KINDS[scheme].model_validate(fields | more)


async def main(scheme: str, config: str, folder: str) -> None:
    started: list[int] = []

    def observe(event: Event) -> None:
        if isinstance(event, ComponentStarted):
            started.append(event.pid)

    launch = KINDS[scheme].model_validate_json(config)
    async with genapi.launch(launch, folder=folder, observe=observe):
        sys.stdout.write(json.dumps([pid for leader in started for pid in sessions(leader)]) + "\n")
        sys.stdout.flush()
        await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
