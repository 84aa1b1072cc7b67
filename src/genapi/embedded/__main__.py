"""`python -m genapi.embedded`: one worker behind a socket, or a whole deployment behind several.

Besides the options shown by `--help`, every field of the protocol's and the engine's configuration
is an option: `--max-model-len 512 --api-key secret --step-s 0.01`.
"""

import argparse
import sys
from pathlib import Path

import anyio

from .faults import parse_faults

__all__ = ()

_EXTRA = ("httptools", "uvicorn")


def main() -> int:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(
        prog="python -m genapi.embedded", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--protocol", default="vllm", help="whose HTTP interface to speak")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="0 lets the kernel choose")
    parser.add_argument("--port-file", type=Path, help="file that gets the port once it listens")
    parser.add_argument(
        "--index", type=int, default=0, help="place among siblings; varies unseeded sampling"
    )
    parser.add_argument("--faults", default="[]", help="JSON list of faults to act out")
    known, rest = parser.parse_known_args()
    names, texts = rest[::2], rest[1::2]
    if len(names) != len(texts) or not all(name.startswith("--") for name in names):
        parser.error(f"expected pairs of --option value, got {' '.join(rest)}")
    options = {name[2:].replace("-", "_"): text for name, text in zip(names, texts, strict=True)}
    options["protocol"] = known.protocol

    try:
        from .server import serve  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        parser.exit(
            2, f"{parser.prog} needs {error.name}: install genapi with its extra 'embedded'\n"
        )

    async def run() -> int:
        return await serve(
            options,
            host=known.host,
            port=known.port,
            port_file=known.port_file,
            index=known.index,
            faults=parse_faults(known.faults),
        )

    try:
        return anyio.run(run)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
