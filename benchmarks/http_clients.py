"""Client CPU per generate-like call: aiohttp against httpx, through genapi's own transports.

    python benchmarks/http_clients.py [--calls N] [--rounds N] [--in-flight 16 256]

A server in a process of its own answers every call with the same 512 tokens and log-probabilities;
a request carries 1000 token ids. Clients take turns within one run, each in a fresh process, and
what counts is the user and system time of the client. Only ratios within one run mean anything.
"""

import argparse
import asyncio
import json
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from typing import Any

import anyio

from genapi.transports.base import Plane, Transport
from genapi.transports.http_aiohttp import AiohttpTransport
from genapi.transports.http_httpx import HttpxTransport
from genapi.wire.http import HTTPCall, json_body

CLIENTS: dict[str, type[AiohttpTransport | HttpxTransport]] = {
    "aiohttp": AiohttpTransport,
    "httpx": HttpxTransport,
}


class Server(asyncio.Protocol):
    """Answers as soon as a request is complete, without looking at it."""

    reply = b""

    def connection_made(self, transport: Any) -> None:
        """Keep the connection."""
        self._transport = transport
        self._received = b""

    def data_received(self, data: bytes) -> None:
        """Answer every request that `data` completes."""
        self._received += data
        while True:
            head, separator, rest = self._received.partition(b"\r\n\r\n")
            if not separator:
                return
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\r")[0])
            if len(rest) < length:
                return
            self._received = rest[length:]
            self._transport.write(self.reply)


async def serve() -> None:
    """Serve until killed; prints the port."""
    chance = random.Random(0)  # noqa: S311 - numbers for a benchmark
    choice = {
        "index": 0,
        "token_ids": [chance.randrange(150_000) for _ in range(512)],
        "logprobs": [-chance.expovariate(1.0) for _ in range(512)],
        "finish_reason": "length",
    }
    body = json_body({"request_id": "r", "choices": [choice]})
    head = (
        f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    Server.reply = head.encode() + body
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Server, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def measure(name: str, url: str, calls: int, in_flight: int) -> dict[str, float]:
    """Client CPU in milliseconds per call, wall-clock calls per second."""
    body = json_body({"token_ids": list(range(1000)), "sampling_params": {"max_tokens": 512}})
    call = HTTPCall(method="POST", path="/inference/v1/generate", body=body)
    transport: Transport = CLIENTS[name](Plane())
    left = 0

    async def worker() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            reply = await transport.send(url, call, headers={"authorization": "Bearer k"})
            if reply.status != 200:  # noqa: PLR2004 - what the server above answers
                raise RuntimeError(f"status {reply.status}")

    async def round_of(count: int) -> None:
        nonlocal left
        left = count
        async with anyio.create_task_group() as group:
            for _ in range(in_flight):
                group.start_soon(worker)

    await round_of(in_flight)  # connects
    before, since = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    await round_of(calls)
    after, seconds = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter() - since
    await transport.aclose()
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_ms": 1000 * cpu / calls, "calls_per_s": calls / seconds}


def child(*arguments: str) -> subprocess.Popen[str]:
    """This script in another process."""
    command = [sys.executable, __file__, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603 - ourselves


def compare(calls: int, rounds: int, levels: list[int]) -> None:
    """Run all clients in turns and print the table."""
    server = child("--serve")
    assert server.stdout is not None
    url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    try:
        for _ in range(rounds):
            for level in levels:
                for name in CLIENTS:
                    arguments = ("--client", name, "--url", url, "--calls", str(calls))
                    output, _ = child(*arguments, "--in-flight", str(level)).communicate()
                    found.setdefault((name, level), []).append(json.loads(output))
    finally:
        server.kill()
        server.wait()
    report(found, levels, calls=calls, rounds=rounds)


def report(
    found: dict[tuple[str, int], list[dict[str, float]]],
    levels: list[int],
    *,
    calls: int,
    rounds: int,
) -> None:
    """Print medians (least) of the rounds."""
    lines = [
        f"Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in CLIENTS)
        + f"; {calls} calls, {rounds} rounds, median [least]",
        "",
        "| client | in flight | CPU ms per call | against aiohttp | calls per s |",
        "| --- | --- | --- | --- | --- |",
    ]
    for level in levels:
        base = statistics.median(run["cpu_ms"] for run in found["aiohttp", level])
        for name in CLIENTS:
            cpu = [run["cpu_ms"] for run in found[name, level]]
            rate = statistics.median(run["calls_per_s"] for run in found[name, level])
            middle, least = statistics.median(cpu), min(cpu)
            ratio = f"{middle / base:.1f}x"
            lines.append(
                f"| {name} | {level} | {middle:.3f} [{least:.3f}] | {ratio} | {rate:.0f} |"
            )
    print("\n".join(lines))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[16, 256])
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--client", choices=CLIENTS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve())
    elif options.client:
        run = measure(options.client, options.url, options.calls, options.in_flight[0])
        print(json.dumps(asyncio.run(run)))
    else:
        compare(options.calls, options.rounds, options.in_flight)


if __name__ == "__main__":
    main()
