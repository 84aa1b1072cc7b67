"""The socket shell: one worker behind uvicorn, in a process of its own, on the real clock.

What stands before workers is in one process with them, each at a port of its own. ASGI here is only
translation. What a real server does to a connection (reset it, hang up after a
reply) needs the transport, which a small subclass of uvicorn's own protocol passes on in the scope.
"""

import json
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl

import anyio
import anyio.lowlevel
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from genapi.types.address import url_of

from .calls import Call
from .clock import RealClock
from .faults import Fault
from .worker import Cluster, Worker, read_config

__all__ = ("serve",)

_TRANSPORT = "genapi.transport"
_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]


async def serve(
    options: Mapping[str, str],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    port_file: Path | None = None,
    index: int = 0,
    faults: Sequence[Fault] = (),
) -> int:
    """Serve one worker until a signal or its own exit; returns the exit status.

    Once it listens, it prints one line of JSON with `url`, `pid` and `instance_id`, and writes the
    port to `port_file`. Port 0 lets the kernel choose. Of a deployment with something before its
    workers the first address is that of requests, whose `port` it is; all of them, the workers'
    last, are in `urls`.

    Raises:
        ValueError: Options that the worker does not know.
        OSError: The address cannot be bound.
    """
    clock = RealClock()
    cluster = _cluster(options, clock, index=index, faults=faults)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as stack:
        listeners = [
            stack.enter_context(socket.create_server((host, wanted), family=family, backlog=2048))
            for wanted in (port, *[0] * (len(cluster.names) - 1))
        ]
        ports = [listener.getsockname()[1] for listener in listeners]
        urls = [url_of(host, bound) for bound in ports]
        if cluster.front is not None:
            cluster.front.attach(cluster.workers, urls[cluster.front.addresses :])
        facts = {
            "url": urls[0],
            "pid": os.getpid(),
            "instance_id": cluster.workers[0].instance_id,
            **({} if cluster.front is None else {"urls": urls}),
        }

        def announce() -> None:
            if port_file is not None:
                draft = port_file.with_name(f"{port_file.name}.{os.getpid()}")
                draft.write_text(f"{ports[0]}\n")
                draft.replace(port_file)
            print(json.dumps(facts), flush=True)  # noqa: T201

        server = _Server(_App(cluster, ports), announce)
        async with anyio.create_task_group() as group:
            for worker in cluster.workers:
                group.start_soon(worker.run)
            group.start_soon(server.exit_with, cluster.workers)
            await server.serve(sockets=listeners)
            group.cancel_scope.cancel()
    return 1 if server.orphaned else 0


def _cluster(
    options: Mapping[str, str], clock: RealClock, *, index: int, faults: Sequence[Fault]
) -> Cluster:
    """The worker that these options describe, or several with what stands before them."""
    rest = dict(options)
    asked = rest.pop("workers", None)
    config, engine = read_config(rest)
    epoch_s = time.time() - clock.now()
    front = config.front(clock, epoch_s=epoch_s)
    if front is None and asked is not None:
        raise ValueError(f"workers={asked!r}: this process is one worker; start as many as wanted")
    if asked is not None and not asked.isdecimal():
        raise ValueError(f"workers={asked!r}: expected int")
    return Cluster(
        [
            Worker(
                own,
                engine,
                clock=clock,
                index=index + number,
                faults=() if number else faults,
                epoch_s=epoch_s,
            )
            for number, own in enumerate(config.spread(int(asked or 1)))
        ],
        clock=clock,
        front=front,
    )


class _Protocol(HttpToolsProtocol):
    """Passes the connection's transport on to the application."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast("dict[str, Any]", self.scope)[_TRANSPORT] = self.transport


class _Server(uvicorn.Server):
    """Says when it listens, and goes when its worker goes."""

    def __init__(self, app: "_App", announce: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_Protocol,
                lifespan="off",
                log_level="warning",
                access_log=False,
                timeout_keep_alive=60,
                timeout_graceful_shutdown=1,
            )
        )
        self.orphaned = False
        self._app = app
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for worker in self._app.cluster.workers:
            worker.kill()  # whoever waits, for a resume perhaps, must not hold up the exit
        await super().shutdown(sockets=sockets)

    async def exit_with(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            await worker.exited()
        self.orphaned = not self.should_exit
        self.should_exit = True


class _App:
    """ASGI to calls; the port tells whom they are to."""

    def __init__(self, cluster: Cluster, ports: Sequence[int]) -> None:
        self.cluster = cluster
        self._addresses = {port: number for number, port in enumerate(ports)}

    async def __call__(
        self, scope: MutableMapping[str, Any], receive: _Receive, send: _Send
    ) -> None:
        call = await _read_call(scope, receive)
        if call is None:
            return
        async with anyio.create_task_group() as group:
            group.start_soon(_cancel_when_gone, receive, group.cancel_scope)
            address = self._addresses[scope["server"][1]]
            await self._reply(address, call, scope[_TRANSPORT], send)
            group.cancel_scope.cancel()

    async def _reply(self, address: int, call: Call, transport: Any, send: _Send) -> None:
        try:
            reply = await self.cluster.handle(address, call)
            headers = [(name.encode(), value.encode()) for name, value in reply.headers.items()]
            if isinstance(reply.body, bytes):
                headers.append((b"content-length", str(len(reply.body)).encode()))
                await send(
                    {"type": "http.response.start", "status": reply.status, "headers": headers}
                )
                await send({"type": "http.response.body", "body": reply.body})
            else:
                await send(
                    {"type": "http.response.start", "status": reply.status, "headers": headers}
                )
                try:
                    async for piece in reply.body:
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                finally:
                    await reply.body.aclose()
                await send({"type": "http.response.body", "body": b""})
            if reply.closes:
                transport.close()
        except (ConnectionResetError, ConnectionRefusedError):
            transport.abort()
            # uvicorn learns of it in the next turn of the loop, and would send a 500 before
            await anyio.lowlevel.checkpoint()


async def _read_call(scope: MutableMapping[str, Any], receive: _Receive) -> Call | None:
    """The call in a request, or None when the client left before it was complete."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if not message.get("more_body", False):
            break
    return Call(
        method=scope["method"],
        path=scope["path"],
        query=dict(parse_qsl(scope["query_string"].decode(), keep_blank_values=True)),
        headers={
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        },
        body=bytes(body),
    )


async def _cancel_when_gone(receive: _Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
