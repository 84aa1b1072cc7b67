"""A server that misbehaves on order: every request is handed to a script that writes raw bytes."""

import asyncio
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import anyio


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request as it arrived. Header names are lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    connection: int


class Exchange:
    """One request and the connection to answer it on."""

    def __init__(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.request = request
        self._reader = reader
        self._writer = writer

    @property
    def client_port(self) -> int:
        """The client's end of the connection."""
        port: int = self._writer.get_extra_info("peername")[1]
        return port

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def reply(self, status: int = 200, body: bytes = b"{}", *headers: str) -> None:
        lines = (f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *headers, "", "")
        await self.write("\r\n".join(lines).encode() + body)

    async def start_chunked(self, *headers: str) -> None:
        lines = ("HTTP/1.1 200 OK", "Transfer-Encoding: chunked", *headers, "", "")
        await self.write("\r\n".join(lines).encode())

    async def chunk(self, data: bytes) -> None:
        await self.write(b"%x\r\n%s\r\n" % (len(data), data))

    async def close(self) -> None:
        """Close the connection in order; what was written still arrives."""
        self._writer.close()

    async def reset(self) -> None:
        """Break the connection off as a killed process with unread input does."""
        linger = struct.pack("ii", 1, 0)
        self._writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, linger
        )
        self._writer.transport.abort()

    async def gone(self) -> None:
        """Wait until the client has closed its end."""
        while await self._read():
            pass

    async def _read(self) -> bytes:
        try:
            return await self._reader.read(2**16)
        except ConnectionError:
            return b""


Script = Callable[[Exchange], Awaitable[None]]


async def answer(exchange: Exchange) -> None:
    """The plainest script."""
    await exchange.reply()


@dataclass
class RawServer:
    """A running server. `requests` is what arrived; `connections` counts the accepted ones."""

    script: Script
    url: str = ""
    connections: int = 0
    requests: list[Request] = field(default_factory=list)
    _open: set[int] = field(default_factory=set)
    _changed: anyio.Event = field(default_factory=anyio.Event)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rpartition(":")[2])

    async def arrived(self, count: int) -> None:
        """Wait until `count` requests have arrived in all."""
        await self._until(lambda: len(self.requests) >= count)

    async def all_gone(self) -> None:
        """Wait until no client is connected."""
        await self._until(lambda: not self._open)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    def _change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        connection = self.connections
        self._open.add(connection)
        try:
            while (request := await _read_request(reader, connection)) is not None:
                self.requests.append(request)
                self._change()
                await self.script(Exchange(request, reader, writer))
                if writer.is_closing():
                    break
        except ConnectionError:
            pass
        finally:
            writer.close()
            self._open.discard(connection)
            self._change()


async def _read_request(reader: asyncio.StreamReader, connection: int) -> Request | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        method, target, _ = first.split(" ")
        pairs = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return Request(method=method, target=target, headers=headers, body=body, connection=connection)


@asynccontextmanager
async def serving(script: Script = answer) -> AsyncIterator[RawServer]:
    """A server on a port of its own, for the length of a block."""
    server = RawServer(script)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, backlog=1024)
    host, port = listener.sockets[0].getsockname()
    server.url = f"http://{host}:{port}"
    try:
        yield server
    finally:
        listener.close()
        with anyio.fail_after(5):
            await server.all_gone()


_FLOOD = """
import socket, sys, time
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
connection = listener.accept()[0]
connection.recv(65536)
connection.sendall(b"HTTP/1.1 200 OK\\r\\nConnection: close\\r\\n\\r\\n")
piece = bytes.fromhex(sys.argv[1]) * 1000
end = time.monotonic() + 10
while time.monotonic() < end:
    connection.sendall(piece)
"""


@contextmanager
def flooding(piece: bytes) -> Iterator[str]:
    """The URL of a process whose one answer is `piece` again and again, for ten seconds at most."""
    command = [sys.executable, "-I", "-c", _FLOOD, piece.hex()]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


@contextmanager
def refusing() -> Iterator[str]:
    """The URL of a port that is taken and on which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield "http://{}:{}".format(*taken.getsockname())


@contextmanager
def never_accepting() -> Iterator[str]:
    """The URL of a listener whose queue is full: a connect to it hangs."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        try:
            for one in waiting:
                one.setblocking(False)
                one.connect_ex(listener.getsockname())
            yield "http://{}:{}".format(*listener.getsockname())
        finally:
            for one in waiting:
                one.close()
