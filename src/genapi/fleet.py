"""`connect()` and `Fleet`: discovery, requests and administration behind one object."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Self

import anyio

from genapi.client import Client
from genapi.control import Control, fan_out
from genapi.credentials import Credentials
from genapi.errors import (
    AuthError,
    ConfigError,
    FleetError,
    GenAPIError,
    UnsupportedError,
)
from genapi.events import Observe, ignore
from genapi.membership import Membership
from genapi.providers import registry
from genapi.providers.base import Provider, WorkerFacts
from genapi.transports.base import Plane, Transport
from genapi.transports.http_aiohttp import AiohttpTransport
from genapi.transports.memory import MemoryTransport
from genapi.types.config import FleetConfig, Target, parse_target
from genapi.types.request import GenerateRequest
from genapi.types.response import GenerateEvent, GenerateResponse
from genapi.types.worker import FleetSnapshot

__all__ = ("Fleet", "connect")

_POLL_S = (0.1, 2.0)
_ADMIN_CONNECT_S = 10.0
"""Shorter than a phase of a publication, so that what never connected is known as not sent."""
_FINAL = (AuthError, ConfigError, UnsupportedError)
"""Failures that waiting does not mend."""


def connect(
    target: str | FleetConfig,
    *,
    model: str | None = None,
    run: str | None = None,
    board: str | None = None,
    transport: Transport | None = None,
    observe: Observe = ignore,
    **options: Any,
) -> "Fleet":
    """A fleet at `target`; nothing is contacted before it is opened.

    Args:
        target: such as `vllm://w1:8001,w2:8001`, `vllm://router:8000?workers=w1:8001,w2:8001`
            (requests to the router, administration to the workers), `vllm+https://...`,
            `embedded://?protocol=vllm&workers=2`; or the `config` of another process's fleet.
        model: the served model's name; may be left out when only one is served.
        run: the training run whose versions count.
        board: URL of a version board.
        transport: what carries every call instead of genapi's own HTTP clients; the caller closes
            it, and it does not travel with `fleet.config`.
        observe: called with every event (`genapi.events`), on the event loop.
        options: the other fields of `FleetConfig`.

    Raises:
        ConfigError: the target or an option cannot work.
        pydantic.ValidationError: an option has a bad value.
    """
    named = {"model": model, "run": run, "board": board}
    given = {k: v for k, v in named.items() if v is not None} | options
    if isinstance(target, FleetConfig):
        config = FleetConfig.model_validate({**dict(target), **given}) if given else target
    else:
        parse_target(target)  # its own error is plainer than a ValidationError around it
        config = FleetConfig.model_validate({"target": target, **given})
    return Fleet(config, transport=transport, observe=observe)


class Fleet:
    """The live face of the workers at one target. Use as `async with`, or `open` and `aclose`.

    One fleet belongs to one event loop. It does not pickle: send `fleet.config` to other
    processes and connect there.
    """

    def __init__(
        self,
        config: FleetConfig,
        *,
        transport: Transport | None = None,
        observe: Observe = ignore,
    ) -> None:
        self.config = config
        self.observe = observe
        self._own_transport = transport
        target = config.parsed
        if config.board is not None:
            message = f"board={config.board!r}: version boards are not supported yet"
            raise UnsupportedError(message)
        if target.discovery is not None or config.discovery_url is not None:
            what = target.discovery or config.discovery_url
            message = (
                f"workers={what!r}: discovery is not supported yet; list the workers as "
                "?workers=host:port,host:port"
            )
            raise UnsupportedError(message)
        self.provider: Provider = registry.provider(target.provider)
        self._target: Target = target
        self._stack: AsyncExitStack | None = None
        self._client: Client | None = None
        self._control: Control | None = None
        self._membership = Membership.of(
            target.provider, target.workers, run=config.run, observe=observe
        )
        self._reading = asyncio.Lock()
        self._revival: asyncio.Task[dict[str, GenAPIError]] | None = None
        self._revived_at = 0.0

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __reduce__(self) -> NoReturn:
        message = "a live fleet does not pickle; send fleet.config and genapi.connect() there"
        raise TypeError(message)

    def __repr__(self) -> str:
        state = "open" if self._client else "closed"
        return f"<Fleet {self.config.target} {state}>"

    async def open(self) -> None:
        """Make ready to talk. Contacts nobody except engines inside this process.

        Raises:
            ConfigError: a key cannot be read.
        """
        if self._client is not None:
            message = "the fleet is open already"
            raise FleetError(message)
        async with AsyncExitStack() as stack:
            requests, administration = await self._transports(stack)
            credentials = Credentials.of(self.config)
            self._control = Control(
                administration, headers=credentials.admin_headers, observe=self.observe
            )
            self._client = Client(
                self.config,
                self.provider,
                requests,
                self._membership,
                urls=self._target.requests,
                routed=self._target.routed,
                headers=credentials.data_headers,
                revive=self._revive,
                observe=self.observe,
            )
            self._stack = stack.pop_all()

    async def aclose(self) -> None:
        """Close every connection. Calls in flight end with `TransportError`."""
        self._client = self._control = None
        revival, self._revival = self._revival, None
        if revival is not None:
            revival.cancel()
            await asyncio.wait([revival])
        stack, self._stack = self._stack, None
        if stack is not None:
            await stack.aclose()

    async def _transports(self, stack: AsyncExitStack) -> tuple[Transport, Transport]:
        """What carries requests, and what carries administration."""
        own = self._own_transport
        if self._target.carrier == "embedded":
            if own is None:
                cluster = registry.embedded_cluster_type().from_query(self._target.query)
                own = MemoryTransport(cluster)
                stack.push_async_callback(own.aclose)
            if not isinstance(own, MemoryTransport):
                raise ConfigError("an embedded:// target takes a MemoryTransport, or none")
            self._membership = Membership.of(
                self._target.provider, own.urls, run=self.config.run, observe=self.observe
            )
        if own is not None:
            return own, own
        connect_s = self.config.connect_timeout_s
        requests = AiohttpTransport(Plane(connect_timeout_s=connect_s))
        stack.push_async_callback(requests.aclose)
        # A server that answered an administration error may close without a word: no reuse.
        plane = Plane(connect_timeout_s=min(connect_s, _ADMIN_CONNECT_S), keep_alive=False)
        administration = AiohttpTransport(plane)
        stack.push_async_callback(administration.aclose)
        return requests, administration

    @property
    def membership(self) -> Membership:
        """What is known of the workers; for genapi's own publisher."""
        return self._membership

    @property
    def control(self) -> Control:
        """The administration plane; for genapi's own publisher."""
        if self._control is None:
            raise FleetError(_CLOSED)
        return self._control

    def _requests(self) -> Client:
        if self._client is None:
            raise FleetError(_CLOSED)
        return self._client

    async def wait_ready(self, timeout_s: float) -> FleetSnapshot:
        """Wait until every worker answers and the topology is the expected one.

        A worker that is paused counts: it serves when whoever paused it has resumed it.

        Args:
            timeout_s: bound in seconds.

        Raises:
            FleetError: not ready in time; names what each worker answered last.
            AuthError: a worker refused the key.
            ConfigError: something else than the provider's engine answers.
        """
        failures: dict[str, GenAPIError] = {}
        missing = "the workers were not asked yet"
        wait = _POLL_S[0]
        with anyio.move_on_after(timeout_s):
            while True:
                failures = await self._read(list(self._membership.members))
                for error in failures.values():
                    if isinstance(error, _FINAL):
                        raise error
                if not failures:
                    try:
                        self._membership.check(self.config.expect)
                    except FleetError as error:
                        missing = str(error)
                    else:
                        self._membership.settle()
                        return self._membership.snapshot()
                await anyio.sleep(wait)
                wait = min(wait * 2, _POLL_S[1])
        seen = "; ".join(f"{url}: {error}" for url, error in failures.items()) or missing
        message = f"the fleet was not ready within timeout_s={timeout_s}: {seen}"
        raise FleetError(message)

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """The reply to one request.

        Cancelling the call ends the generation on the engine. An engine's own abort is a reply
        whose output has `FinishReason.ABORT`.

        Raises:
            UnsupportedError: the provider cannot do it; nothing was sent.
            ConfigError: a value is beyond what the server has.
            ProviderError: the server answered an error that no retry mended.
            TransportError: no usable answer, or none within `timeout_s`.
            ReplyError: the answer breaks its contract.
            FleetError: no worker may get traffic.
        """
        await self._known()
        return await self._requests().generate(request)

    @asynccontextmanager
    async def stream(self, request: GenerateRequest) -> AsyncIterator[AsyncIterator[GenerateEvent]]:
        """The reply while it arrives: `TokenChunk`s, then one `Finished` with the whole reply.

        Leaving the block ends the generation on the engine. Raises what `generate` raises, and
        `IncompleteError` for a stream that ended early; both carry what had arrived as `partial`.
        """
        await self._known()
        async with self._requests().stream(request) as events:
            yield events

    async def abort(self, request_id: str) -> int:
        """End generations of this process by the user's label; returns how many were asked to.

        They return what they have, with `FinishReason.ABORT`.
        """
        return await self._requests().abort(request_id)

    async def snapshot(self) -> FleetSnapshot:
        """All workers as a fresh read shows them. One that does not answer is not healthy."""
        await self._read(list(self._membership.members))
        self._membership.settle()
        return self._membership.snapshot()

    async def inspect(self, url: str, *, timeout_s: float | None = None) -> WorkerFacts:
        """What the worker at `url` is now, without taking it in; for genapi's own publisher."""
        return await self.control.run(
            url,
            self.provider.inspect(),
            operation="inspect",
            timeout_s=timeout_s or self.config.admin_timeout_s,
        )

    async def _read(self, urls: list[str]) -> dict[str, GenAPIError]:
        """Inspect and take in; returns the failures."""
        async with self._reading:
            results = await fan_out({url: partial(self.inspect, url) for url in urls})
            failures = {}
            for url, result in results.items():
                if isinstance(result, GenAPIError):
                    failures[url] = result
                    self._membership.members[url].suspect = True
                else:
                    self._membership.learn(url, result)
            return failures

    async def _known(self) -> None:
        """Before the first request, what the workers are has to be known."""
        self._requests()
        members = self._membership.members
        if any(m.facts is not None for m in members.values()):
            return
        failures = await self._read(list(members))
        if len(failures) == len(members):
            raise next(iter(failures.values()))
        self._membership.settle()

    async def _revive(self) -> None:
        """Read suspects again, at most every `refresh_s`; waits only when nobody can serve."""
        stranded = not self._membership.usable()
        now = asyncio.get_running_loop().time()
        if self._revival is None or self._revival.done():
            if not stranded and now - self._revived_at < self.config.refresh_s:
                return
            self._revived_at = now
            suspects = [m.url for m in self._membership.members.values() if m.suspect]
            # Owned by the fleet, which may be opened and closed in different tasks: aclose ends it.
            self._revival = asyncio.create_task(self._read(suspects))  # noqa: TID251
        if stranded:
            await asyncio.wait([self._revival])


_CLOSED = "the fleet is not open; use `async with genapi.connect(...) as fleet` or fleet.open()"
