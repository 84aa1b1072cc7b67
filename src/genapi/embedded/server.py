"""The socket shell: one worker behind uvicorn, in a process of its own, on the real clock.

ASGI here is only translation. What a real server does to a connection (reset it, hang up after a
reply) needs the transport, which a small subclass of uvicorn's own protocol passes on in the scope.
"""

import json
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl

import anyio
import anyio.lowlevel
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .calls import Call
from .clock import RealClock
from .faults import Fault
from .worker import Worker, read_config

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
    port to `port_file`. Port 0 lets the kernel choose.

    Raises:
        ValueError: Options that the worker does not know.
        OSError: The address cannot be bound.
    """
    config, engine = read_config(options)
    clock = RealClock()
    epoch_s = time.time() - clock.now()
    worker = Worker(config, engine, clock=clock, index=index, faults=faults, epoch_s=epoch_s)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=2048) as listener:
        bound = listener.getsockname()[1]
        name = f"[{host}]" if family == socket.AF_INET6 else host
        facts = {
            "url": f"http://{name}:{bound}",
            "pid": os.getpid(),
            "instance_id": worker.instance_id,
        }

        def announce() -> None:
            if port_file is not None:
                draft = port_file.with_name(f"{port_file.name}.{os.getpid()}")
                draft.write_text(f"{bound}\n")
                draft.replace(port_file)
            print(json.dumps(facts), flush=True)  # noqa: T201

        server = _Server(_App(worker), announce)
        async with anyio.create_task_group() as group:
            group.start_soon(worker.run)
            group.start_soon(server.exit_with, worker)
            await server.serve(sockets=[listener])
            group.cancel_scope.cancel()
    return 1 if server.orphaned else 0


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
        self._app.worker.kill()  # whoever waits, for a resume perhaps, must not hold up the exit
        await super().shutdown(sockets=sockets)

    async def exit_with(self, worker: Worker) -> None:
        await worker.exited()
        self.orphaned = not self.should_exit
        self.should_exit = True


class _App:
    """ASGI to calls."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    async def __call__(
        self, scope: MutableMapping[str, Any], receive: _Receive, send: _Send
    ) -> None:
        call = await _read_call(scope, receive)
        if call is None:
            return
        async with anyio.create_task_group() as group:
            group.start_soon(_cancel_when_gone, receive, group.cancel_scope)
            await self._reply(call, scope[_TRANSPORT], send)
            group.cancel_scope.cancel()

    async def _reply(self, call: Call, transport: Any, send: _Send) -> None:
        try:
            reply = await self.worker.handle(call)
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
