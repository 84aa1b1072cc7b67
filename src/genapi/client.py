"""The request plane: which worker gets a request, when it is sent again, how a stream is read.

The rule of this file: retries happen here and nowhere else, and never for anything but a
generation. Every sending has a wire id of its own.
"""

import random
import time
import uuid
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b

import anyio

from genapi.errors import (
    FleetError,
    GenAPIError,
    GenAPIWarning,
    ProviderError,
    ReplyError,
    TransportError,
    UnsupportedError,
)
from genapi.events import Observe, RequestEnded, RequestRetried
from genapi.membership import Member, Membership
from genapi.providers.base import DecodeContext, Provider
from genapi.publication.context import with_contexts
from genapi.transports.base import StreamReply, Transport
from genapi.types.config import FleetConfig
from genapi.types.policy import PolicyVersion
from genapi.types.request import GenerateRequest
from genapi.types.response import (
    Attempt,
    Finished,
    GenerateEvent,
    GenerateResponse,
    LogprobsMode,
)
from genapi.wire.http import HTTPCall, HTTPReply
from genapi.wire.retry import retry_wait_s

__all__ = ("Client",)

_ABORT_S = 5.0
_ERROR_BODY_BYTES = 1 << 20


@dataclass(slots=True)
class _Sending:
    """One sending of one request."""

    wire_id: str
    url: str
    member: Member | None
    salted: PolicyVersion | None
    remarks: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Run:
    """One request of the user's, over all its sendings."""

    request: GenerateRequest
    request_id: str
    attempts: list[Attempt] = field(default_factory=list)
    current: _Sending | None = None


class Client:
    """Sends generations. Safe for any number of calls at once on one event loop."""

    def __init__(  # noqa: PLR0913 - what a request plane is made of
        self,
        config: FleetConfig,
        provider: Provider,
        transport: Transport,
        membership: Membership,
        *,
        urls: tuple[str, ...],
        routed: bool,
        headers: Callable[[str], Mapping[str, str]],
        revive: Callable[[], Awaitable[None]],
        observe: Observe,
    ) -> None:
        self._config = config
        self._provider = provider
        self._transport = transport
        self._membership = membership
        self._routers = dict.fromkeys(urls, 0) if routed else None
        self._headers = headers
        self._revive = revive
        self._observe = observe
        self._limit = anyio.CapacityLimiter(config.max_in_flight) if config.max_in_flight else None
        self._runs: dict[str, list[_Run]] = {}

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """The reply to one request; see `Fleet.generate`."""
        self._check(request)
        with self._run(request) as run:
            async with self._bounded(run):
                while True:
                    async with self._sending(run, stream=False) as (sending, call, context):
                        reply = await self._transport.send(
                            sending.url, call, headers=self._headers(sending.url)
                        )
                        return self._finish(run, self._provider.decode(reply, context))

    @asynccontextmanager
    async def stream(self, request: GenerateRequest) -> AsyncIterator[AsyncIterator[GenerateEvent]]:
        """The reply while it arrives; see `Fleet.stream`."""
        self._check(request)
        with self._run(request) as run:
            async with self._bounded(run), AsyncExitStack() as stack:
                reply, context = await self._open_stream(run, stack)
                stack.enter_context(self._leased(run))
                yield await stack.enter_async_context(aclosing(self._events(run, reply, context)))

    async def _open_stream(
        self, run: _Run, stack: AsyncExitStack
    ) -> tuple[StreamReply, DecodeContext]:
        while True:
            async with (
                self._sending(run, stream=True) as (sending, call, context),
                AsyncExitStack() as attempt,
            ):
                reply = await attempt.enter_async_context(
                    self._transport.stream(sending.url, call, headers=self._headers(sending.url))
                )
                await self._raise_for_status(reply, context)
                stack.push_async_callback(attempt.pop_all().aclose)
                return reply, context

    async def abort(self, request_id: str) -> int:
        """End what runs under that label; returns how many sendings were asked to end."""
        sendings = [r.current for r in self._runs.get(request_id, []) if r.current is not None]
        async with anyio.create_task_group() as group:
            for sending in sendings:
                group.start_soon(self._abort, sending)
        return len(sendings)

    def _check(self, request: GenerateRequest) -> None:
        for name in ("min_version", "exact_version"):
            if getattr(request, name) is not None:
                message = f"{name} is not supported yet; filter replies with OffPolicyWindow"
                raise UnsupportedError(message)
        self._provider.check(request, self._membership.capabilities())

    @contextmanager
    def _run(self, request: GenerateRequest) -> Iterator[_Run]:
        run = _Run(request, request.request_id or f"req-{uuid.uuid4().hex}")
        runs = self._runs.setdefault(run.request_id, [])
        runs.append(run)
        started = time.monotonic()
        error: str | None = None
        try:
            yield run
        except BaseException as failure:
            error = f"{type(failure).__name__}: {failure}"
            raise
        finally:
            runs.remove(run)
            if not runs:
                del self._runs[run.request_id]
            member = run.current.member if run.current else None
            self._observe(
                RequestEnded(
                    request_id=run.request_id,
                    worker=member.id if member else None,
                    error=error,
                    seconds=time.monotonic() - started,
                )
            )

    @asynccontextmanager
    async def _bounded(self, run: _Run) -> AsyncIterator[None]:
        timeout = run.request.timeout_s
        with anyio.move_on_after(timeout) as scope:
            if self._limit is None:
                yield
            else:
                async with self._limit:
                    yield
        if scope.cancelled_caught:
            raise self._timed_out(run, timeout or 0.0)

    def _timed_out(self, run: _Run, timeout_s: float) -> TransportError:
        if run.current is None:
            slots = self._config.max_in_flight
            message = f"not sent within timeout_s={timeout_s}: waited for max_in_flight={slots}"
            return TransportError(message, phase="not_sent")
        url = run.current.url
        message = f"no complete reply from {url} within timeout_s={timeout_s}"
        return TransportError(message, phase="may_have_run", url=url)

    @asynccontextmanager
    async def _sending(
        self, run: _Run, *, stream: bool
    ) -> AsyncIterator[tuple[_Sending, HTTPCall, DecodeContext]]:
        """One sending: a failure that is worth another one is swallowed after the wait."""
        member, url = await self._pick(run.request)
        salted = self._membership.committed if self._membership.salted else None
        sending = _Sending(f"genapi-{uuid.uuid4().hex}", url, member, salted)
        run.current = sending
        request = run.request
        call = self._provider.encode(
            request,
            wire_id=sending.wire_id,
            model=self._model(),
            salt=self._membership.salt,
            stream=stream,
        )
        context = DecodeContext(
            request=request,
            request_id=run.request_id,
            wire_id=sending.wire_id,
            run=self._membership.run,
            now=time.time(),
            worker=member.id if member else None,
            logprobs_mode=self._logprobs_mode(),
            remark=sending.remarks.append,
        )
        try:
            with self._leased(run):
                yield sending, call, context
        except GenAPIError as error:
            wait = self._after_failure(run, error)
            if wait is None:
                raise
            if self._routers is not None and not _not_sent(error):
                await self._abort(sending)
            await anyio.sleep(wait)

    @contextmanager
    def _leased(self, run: _Run) -> Iterator[None]:
        sending = run.current
        if sending is None:
            yield
            return
        self._count(sending, 1)
        try:
            yield
        finally:
            self._count(sending, -1)

    def _count(self, sending: _Sending, change: int) -> None:
        if sending.member is not None:
            sending.member.in_flight += change
        elif self._routers is not None:
            self._routers[sending.url] += change

    async def _pick(self, request: GenerateRequest) -> tuple[Member | None, str]:
        if self._routers is not None:
            return None, min(self._routers, key=self._routers.__getitem__)
        usable = self._membership.usable()
        if not usable or any(m.suspect for m in self._membership.members.values()):
            await self._revive()
            usable = self._membership.usable()
        if not usable:
            raise FleetError(self._why_none())
        if request.session is not None:
            member = max(usable, key=lambda m: _affinity(request.session or "", m.url))
        else:
            least = min(m.in_flight for m in usable)
            member = random.choice([m for m in usable if m.in_flight == least])  # noqa: S311 - spreading load
        return member, member.url

    def _why_none(self) -> str:
        reasons = [
            f"{m.name}: {m.fence.reason} (way back: {m.fence.recovery})"
            if m.fence
            else f"{m.name}: does not answer"
            for m in self._membership.members.values()
        ]
        return "no worker may get traffic; " + "; ".join(reasons)

    def _model(self) -> str | None:
        if self._config.model is not None:
            return self._config.model
        known = self._membership.capabilities()
        return known.models[0] if known is not None and len(known.models) == 1 else None

    def _logprobs_mode(self) -> LogprobsMode | None:
        known = self._membership.capabilities()
        return known.logprobs_mode if known is not None else None

    def _after_failure(self, run: _Run, error: GenAPIError) -> float | None:
        sending = run.current
        if sending is None:
            return None
        member = sending.member
        run.attempts.append(
            Attempt(
                wire_id=sending.wire_id,
                worker=member.id if member else None,
                error=f"{type(error).__name__}: {error}",
            )
        )
        died = isinstance(error, ProviderError) and error.code == "engine_dead"
        if member is not None and (died or isinstance(error, TransportError)):
            member.suspect = True
        cause = TransportError(str(error), phase="may_have_run") if died else error
        chance = random.random()  # noqa: S311 - spreads waits
        wait = retry_wait_s(cause, self._config.retry, attempt=len(run.attempts), chance=chance)
        if wait is not None:
            self._observe(
                RequestRetried(
                    request_id=run.request_id,
                    attempt=len(run.attempts) + 1,
                    error=str(error),
                    wait_s=wait,
                )
            )
        return wait

    def _finish(self, run: _Run, response: GenerateResponse) -> GenerateResponse:
        sending = run.current
        assert sending is not None  # noqa: S101 - a reply has a sending
        self._heed(sending.remarks)
        member = sending.member
        self._notice_version(run.request, response, member)
        worker = member.id if member else response.worker
        attempt = Attempt(wire_id=sending.wire_id, worker=worker)
        rules, salted = self._membership.rules, sending.salted
        outputs = tuple(
            o.model_copy(update={"policy": with_contexts(o.policy, rules, salted=salted)})
            for o in response.outputs
        )
        return response.model_copy(
            update={
                "worker": worker,
                "attempts": (*run.attempts, attempt),
                "outputs": outputs,
            }
        )

    def _notice_version(
        self, request: GenerateRequest, response: GenerateResponse, member: Member | None
    ) -> None:
        """A worker that attests no known version, where one was committed, was restarted."""
        if member is None or request.lora is not None or self._membership.committed is None:
            return
        traces = [o.policy for o in response.outputs if len(o.policy)]
        if any(t.source == "engine" and t.newest is None for t in traces):
            member.suspect = True

    def _heed(self, remarks: list[str]) -> None:
        if not remarks:
            return
        if self._config.strict:
            raise ReplyError("; ".join(remarks))
        for remark in remarks:
            warnings.warn(remark, GenAPIWarning, stacklevel=4)

    async def _abort(self, sending: _Sending) -> None:
        call = self._provider.abort([sending.wire_id])
        urls = [sending.url] if sending.member else [*(self._routers or {})]
        with anyio.move_on_after(_ABORT_S, shield=True):
            for url in urls:
                try:
                    await self._transport.send(url, call, headers=self._headers(url))
                except TransportError:
                    continue

    async def _raise_for_status(self, reply: StreamReply, context: DecodeContext) -> None:
        if reply.status == 200:  # noqa: PLR2004 - the only status a stream has
            return
        body = b""
        async for chunk in reply.chunks:
            body += chunk
            if len(body) > _ERROR_BODY_BYTES:
                break
        whole = HTTPReply(reply.status, body, reply.headers, reply.url)
        self._provider.raise_for_status(whole, context)

    async def _events(
        self, run: _Run, reply: StreamReply, context: DecodeContext
    ) -> AsyncGenerator[GenerateEvent, None]:
        decoder = self._provider.stream_decoder(context)
        chunks = reply.chunks
        while True:
            try:
                with anyio.fail_after(self._config.idle_timeout_s):
                    chunk = await anext(chunks, None)
            except TimeoutError:
                idle = self._config.idle_timeout_s
                message = f"{reply.url} sent nothing for idle_timeout_s={idle}"
                raise TransportError(message, phase="answered", url=reply.url) from None
            if chunk is None:
                break
            for event in decoder.feed(chunk):
                yield event
        yield Finished(reply=self._finish(run, decoder.finish(framed=reply.framed)))


def _not_sent(error: GenAPIError) -> bool:
    return isinstance(error, TransportError) and error.phase == "not_sent"


def _affinity(session: str, url: str) -> bytes:
    """Rendezvous hashing: a session keeps its worker while that one is usable."""
    return blake2b(f"{session}\0{url}".encode(), digest_size=8).digest()
