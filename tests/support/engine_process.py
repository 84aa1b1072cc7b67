"""What the modules of `engine_modules` share, and where a launch finds them.

A launch runs `python -m vllm.entrypoints.openai.api_server` and the like; with this variable in its
environment that is a stand-in, strict about its flags, with the embedded engine behind.
"""

import os
import pathlib

import anyio

import genapi
from genapi.embedded.server import serve

__all__ = ("STAND_INS", "serve_embedded")

_HERE = pathlib.Path(__file__).parent
STAND_INS = {
    "PYTHONPATH": os.pathsep.join(
        map(
            str,
            (_HERE / "engine_modules", _HERE.parents[1], pathlib.Path(genapi.__file__).parents[1]),
        )
    )
}


def serve_embedded(host: str, port: int, **options: str | None) -> int:
    given = {name: value for name, value in options.items() if value is not None}

    async def run() -> int:
        return await serve(given, host=host, port=port)

    return anyio.run(run)
