"""The request plane: sends generations, again where that is right, and reads their replies.

The rule of this file: retries happen here and nowhere else, and never for anything but a
generation. Every sending has a wire id of its own.
"""

import math
import random
import time
import uuid
import warnings
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import anyio
import numpy as np

from genapi.control import run_flow
from genapi.errors import (
    FleetError,
    GenAPIError,
    GenAPIWarning,
    IncompleteError,
    ProviderError,
    ReplyError,
    TransportError,
)
from genapi.events import Observe, RequestEnded, RequestRetried
from genapi.membership import Member, Membership
from genapi.providers.base import Capabilities, DecodeContext, Provider, StreamDecoder
from genapi.publication.context import with_contexts
from genapi.routing import Routing, VersionGoneError
from genapi.runs import AbortedError, Run, Sending
from genapi.transports.base import StreamReply, Transport
from genapi.transports.bodies import whole
from genapi.types.config import FleetConfig
from genapi.types.ids import TokenIds, WorkerId
from genapi.types.policy import PolicyTrace
from genapi.types.request import GenerateRequest
from genapi.types.response import (
    Attempt,
    Finished,
    FinishReason,
    GenerateEvent,
    GenerateOutput,
    GenerateResponse,
    TokenChunk,
)
from genapi.versions import Versions, is_bound, is_undated, stale
from genapi.wire.flow import Flow, resumed
from genapi.wire.http import HTTPCall, HTTPReply
from genapi.wire.retry import retry_wait_s

__all__ = ("Client",)

T = TypeVar("T")

_ABORT_S = 5.0
_EVENT_STREAM = "text/event-stream"


@dataclass(frozen=True, slots=True)
class _Opened:
    """A stream that began; `whole` = the server sent the reply in one piece instead."""

    reply: StreamReply
    context: DecodeContext
    whole: GenerateResponse | None = None


class Client:
    """Sends generations. Safe for any number of calls at once on one event loop."""

    def __init__(  # noqa: PLR0913 - what a request plane is made of
        self,
        config: FleetConfig,
        provider: Provider,
        transport: Transport,
        membership: Membership,
        *,
        routing: Routing,
        versions: Versions,
        prepare: Callable[[], Awaitable[None]],
        headers: Callable[[str], Mapping[str, str]],
        abort_headers: Callable[[str], Mapping[str, str]],
        observe: Observe,
    ) -> None:
        self._config = config
        self._provider = provider
        self._transport = transport
        self._membership = membership
        self._routing = routing
        self._versions = versions
        self._prepare = prepare
        self._headers = headers
        self._abort_headers = abort_headers
        self._observe = observe
        self._can_abort = bool(provider.abort(["genapi"]))
        self._slots = anyio.Semaphore(config.max_in_flight) if config.max_in_flight else None
        self._runs: dict[str, list[Run]] = {}

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """The reply to one request; see `Fleet.generate`."""
        self._provider.check(request, None)
        with self._run(request) as run:
            async with self._bounded(run):
                try:
                    return await self._generate(run)
                except AbortedError:
                    return _aborted(run)

    async def _generate(self, run: Run) -> GenerateResponse:
        await self._make_ready(run)
        while True:
            if run.is_bound:
                await self._versions.wait_for_version(run)
            try:
                async with self._slot(run):
                    response = await self._exchange(run)
            except VersionGoneError:
                continue
            if is_undated(run, response):
                response = await self._versions.dated(run, response)
            if self._versions.is_asked_for(run, response):
                return response
            await self._versions.before_another(run)

    async def _exchange(self, run: Run) -> GenerateResponse:
        while True:
            async with self._sending(run, stream=False) as (sending, call, context):
                reply: HTTPReply | None = None
                with self._cutting(sending):
                    reply = await self._transport.send(
                        sending.url, call, headers=self._headers(sending.url)
                    )
                if reply is None:
                    raise AbortedError
                response = await self._refined(run, self._provider.decode(reply, context), context)
                return self._finish(run, response)

    @asynccontextmanager
    async def stream(self, request: GenerateRequest) -> AsyncIterator[AsyncIterator[GenerateEvent]]:
        """The reply while it arrives; see `Fleet.stream`."""
        self._provider.check(request, None)
        with self._run(request) as run:
            async with AsyncExitStack() as stack:
                try:
                    async with self._bounded(run):
                        opened = await self._open_stream(run, stack)
                except AbortedError:
                    events = _only(_aborted(run))
                else:
                    stack.enter_context(self._leased(run))
                    events = self._events(run, opened)
                yield await stack.enter_async_context(aclosing(events))

    async def _open_stream(self, run: Run, stack: AsyncExitStack) -> _Opened:
        await self._make_ready(run)
        while True:
            if run.is_bound:
                await self._versions.wait_for_version(run)
            async with AsyncExitStack() as slot:
                await slot.enter_async_context(self._slot(run))
                with suppress(VersionGoneError):
                    opened = await self._exchange_stream(run, slot)
                    await stack.enter_async_context(slot.pop_all())
                    return opened

    async def _exchange_stream(self, run: Run, stack: AsyncExitStack) -> _Opened:
        while True:
            async with (
                self._sending(run, stream=True) as (sending, call, context),
                AsyncExitStack() as attempt,
            ):
                reply = await attempt.enter_async_context(
                    self._transport.stream(sending.url, call, headers=self._headers(sending.url))
                )
                whole = await self._whole(reply, context)
                stack.push_async_callback(attempt.pop_all().aclose)
                return _Opened(reply, context, whole)

    async def _whole(self, reply: StreamReply, context: DecodeContext) -> GenerateResponse | None:
        """The reply of a server that does not stream: an error, or everything at once."""
        if reply.headers.get("content-type", "").startswith(_EVENT_STREAM):
            return None
        body = await whole(reply.chunks, url=reply.url, status=reply.status)
        return self._provider.decode(
            HTTPReply(reply.status, body, reply.headers, reply.url), context
        )

    async def abort(self, request_id: str) -> int:
        """End what runs under that label; returns how many requests were asked to end."""
        runs = list(self._runs.get(request_id, []))
        async with anyio.create_task_group() as group:
            for run in runs:
                run.abort()
                if run.current is not None:
                    group.start_soon(self._abort, run.current)
        return len(runs)

    async def _make_ready(self, run: Run) -> None:
        with run.waiting("the workers to be read"):
            await self._prepare()
        run.checked = self._membership.capabilities()
        self._provider.check(run.request, run.checked)
        self._versions.check(run.request)

    @contextmanager
    def _run(self, request: GenerateRequest) -> Iterator[Run]:
        request_id = request.request_id or f"req-{uuid.uuid4().hex}"
        run = Run(request, request_id, is_bound=is_bound(request))
        if request.timeout_s is not None:
            run.deadline = anyio.current_time() + request.timeout_s
        runs = self._runs.setdefault(request_id, [])
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
                del self._runs[request_id]
            member = run.current.member if run.current else None
            self._observe(
                RequestEnded(
                    request_id=request_id,
                    worker=member.id if member else None,
                    error=error,
                    seconds=time.monotonic() - started,
                )
            )

    @asynccontextmanager
    async def _bounded(self, run: Run) -> AsyncIterator[None]:
        with anyio.CancelScope(deadline=run.deadline) as run.scope:
            yield
        if run.scope.cancelled_caught:
            raise _timed_out(run)

    @asynccontextmanager
    async def _slot(self, run: Run) -> AsyncIterator[None]:
        if self._slots is None:
            yield
            return
        held = False
        try:
            with run.waiting(f"one of max_in_flight={self._config.max_in_flight} slots"):
                await self._slots.acquire()
                held = True
            yield
        finally:
            if held:
                self._slots.release()

    @asynccontextmanager
    async def _sending(
        self, run: Run, *, stream: bool
    ) -> AsyncIterator[tuple[Sending, HTTPCall, DecodeContext]]:
        """One sending: a failure that is worth another one is swallowed after the wait."""
        while True:
            sending, capable = await self._dispatched(run)
            ready = None
            async with self._again(run, sending):
                ready = await self._written(run, sending, capable, stream=stream)
            # While a prompt was made ids the fleet may have closed, or the worker been fenced.
            if self._routing.may_go(sending) and ready is not None:
                break
        async with self._again(run, sending):
            with self._leased(run):
                yield sending, *ready

    @asynccontextmanager
    async def _again(self, run: Run, sending: Sending) -> AsyncIterator[None]:
        """Swallow a failure that is worth another sending, after the wait."""
        try:
            yield
        except GenAPIError as error:
            wait_s = self._after_failure(run, sending, error)
            if wait_s is None:
                raise
            if _may_have_run(error):
                await self._abort(sending, within_s=run.deadline - anyio.current_time())
            with run.waiting("its next sending"):
                await anyio.sleep(wait_s)

    async def _dispatched(self, run: Run) -> tuple[Sending, list[Capabilities]]:
        """Where the next sending goes, and what those can do who may serve it."""
        member, url = await self._pick(run)
        membership, request = self._membership, run.request
        capable = membership.capable(member)
        if member is not None:
            for known in capable:
                if known != run.checked:
                    self._provider.check(request, known)
        sending = Sending(
            wire_id=f"genapi-{uuid.uuid4().hex}",
            url=url,
            member=member,
            worker=member.id if member else None,
            salted=membership.committed if membership.salted else None,
            model=self._model(member),
            outputs=request.sampling.n,
            before=self._versions.before(request, None if self._routing.is_routed else member),
            aborts=membership.aborts,
            pin=self._routing.pin(run, member),
        )
        run.current = sending
        return sending, capable

    async def _written(
        self, run: Run, sending: Sending, capable: list[Capabilities], *, stream: bool
    ) -> tuple[HTTPCall, DecodeContext]:
        """The call that is sent, and what its reply is read with."""
        rendered = await self._rendered(run, sending, capable)
        call = self._provider.encode(
            rendered,
            wire_id=sending.wire_id,
            model=sending.model,
            salt=None if sending.salted is None else sending.salted.label,
            stream=stream,
            pin=sending.pin,
        )
        mode = _agreed(known.logprobs_mode for known in capable)
        context = DecodeContext(
            request=rendered,
            request_id=run.request_id,
            wire_id=sending.wire_id,
            run=self._membership.run,
            now=time.time(),
            worker=sending.worker,
            logprobs_mode=mode,
            remark=sending.remarks.append,
        )
        return call, context

    async def _rendered(
        self, run: Run, sending: Sending, capable: list[Capabilities]
    ) -> GenerateRequest:
        """The request as the worker is asked it; a prompt that is no ids is made some there."""
        flow = self._provider.render(run.request, model=sending.model, capabilities=capable)
        try:
            return await self._ask(run, sending, flow, operation="render")
        except TransportError as error:
            # Whatever became of it, nothing was generated.
            raise TransportError(str(error), phase="not_sent", url=error.url) from error

    async def _refined(
        self, run: Run, response: GenerateResponse, context: DecodeContext
    ) -> GenerateResponse:
        """The reply with what the worker makes of its tokens.

        Raises:
            IncompleteError: it makes nothing of them; `.partial` has them. They are not made anew.
        """
        sending = run.current
        assert sending is not None  # noqa: S101 - a reply has a sending
        flow = self._provider.refine(response, context.request, model=sending.model)
        try:
            return await self._ask(run, sending, flow, operation="refine")
        except GenAPIError as error:
            why = f"the tokens came, and the server could not read them: {error}"
            raise IncompleteError(why, partial=response) from error

    async def _ask(self, run: Run, sending: Sending, flow: Flow[T], *, operation: str) -> T:
        try:
            first = next(flow)
        except StopIteration as end:
            result: T = end.value
            return result
        return await run_flow(
            resumed(flow, first),
            self._transport,
            sending.url,
            headers=lambda _: self._headers(sending.url),
            timeout_s=min(run.deadline - anyio.current_time(), self._config.admin_timeout_s),
            observe=self._observe,
            operation=operation,
        )

    async def _pick(self, run: Run) -> tuple[Member | None, str]:
        """Somebody who may get the request; that nobody answers is worth another look."""
        looks = 0
        while True:
            try:
                with run.waiting("a worker that may get it"):
                    picked = await self._routing.pick(run)
            except TransportError as error:
                looks += 1
                wait_s = self._wait_s(error, attempt=looks)
                if wait_s is None:
                    last = f"; last: {run.attempts[-1].error}" if run.attempts else ""
                    raise FleetError(f"{error}{last}") from error
                with run.waiting("a worker that answers"):
                    await anyio.sleep(wait_s)
            else:
                return picked

    def _wait_s(self, error: GenAPIError, *, attempt: int) -> float | None:
        chance = random.random()  # noqa: S311 - spreads waits
        return retry_wait_s(error, self._config.retry, attempt=attempt, chance=chance)

    @contextmanager
    def _leased(self, run: Run) -> Iterator[None]:
        sending = run.current
        if sending is None:
            yield
            return
        self._routing.count(sending, 1)
        try:
            yield
        finally:
            self._routing.count(sending, -1)

    def _model(self, member: Member | None) -> str | None:
        if self._config.model is not None:
            return self._config.model
        models = self._membership.served(member)
        return models[0] if models is not None and len(models) == 1 else None

    def _after_failure(self, run: Run, sending: Sending, error: GenAPIError) -> float | None:
        """Note a failed sending; returns the seconds to wait before the next, None = none."""
        member = sending.member
        run.attempts.append(
            Attempt(
                wire_id=sending.wire_id,
                worker=sending.worker,
                error=f"{type(error).__name__}: {error}",
            )
        )
        died = isinstance(error, ProviderError) and error.code == "engine_dead"
        lost = isinstance(error, TransportError) and sending.url == (member and member.url)
        gone = isinstance(error, ProviderError) and error.code == "no_worker"
        if member is not None and (died or lost or gone):
            member.suspect = True
        cause = TransportError(str(error), phase="may_have_run") if died else error
        wait_s = self._wait_s(cause, attempt=len(run.attempts))
        if wait_s is not None:
            self._observe(
                RequestRetried(
                    request_id=run.request_id,
                    attempt=len(run.attempts) + 1,
                    error=str(error),
                    wait_s=wait_s,
                )
            )
        return wait_s

    def _finish(self, run: Run, response: GenerateResponse) -> GenerateResponse:
        sending = run.current
        assert sending is not None  # noqa: S101 - a reply has a sending
        self._heed(sending.remarks)
        worker = self._named(response.worker)
        attempt = Attempt(wire_id=sending.wire_id, worker=worker)
        rules, salted = self._membership.rules, sending.salted
        outputs = tuple(
            o.model_copy(update={"policy": with_contexts(o.policy, rules, salted=salted)})
            for o in response.outputs
        )
        return response.model_copy(
            update={
                "worker": worker,
                "prefill_worker": self._named(response.prefill_worker),
                "attempts": (*run.attempts, attempt),
                "outputs": outputs,
            }
        )

    def _named(self, worker: WorkerId | None) -> WorkerId | None:
        """The whole name of a worker that a reply may name by its instance alone."""
        member = None if worker is None else self._membership.called(worker)
        return worker if member is None else member.id

    def _heed(self, remarks: list[str]) -> None:
        if not remarks:
            return
        if self._config.strict:
            raise ReplyError("; ".join(remarks))
        for remark in remarks:
            warnings.warn(remark, GenAPIWarning, stacklevel=4)

    async def _abort(self, sending: Sending, *, within_s: float = _ABORT_S) -> None:
        calls = self._provider.abort([sending.wire_id], outputs=sending.outputs)
        if not calls:
            sending.is_cut = True
            sending.scope.cancel()
            return
        with anyio.move_on_after(min(within_s, _ABORT_S), shield=True):
            async with anyio.create_task_group() as group:
                for url in self._routing.abort_urls(sending):
                    for call in calls:
                        group.start_soon(self._send_abort, url, call, url == sending.url)

    @contextmanager
    def _cutting(self, sending: Sending | None) -> Iterator[None]:
        """Around a wait for the engine, which an abort ends where nothing else reaches it."""
        if self._can_abort or sending is None:
            yield
            return
        sending.scope = anyio.CancelScope()
        if sending.is_cut:
            sending.scope.cancel()
        with sending.scope:
            yield

    async def _send_abort(self, url: str, call: HTTPCall, asked_there: bool) -> None:  # noqa: FBT001 - start_soon passes by position
        # A router is asked as it was for the generation: it gets no key of administration.
        as_asked = asked_there and (call.grant != "admin" or url not in self._membership.members)
        headers = self._headers(url) if as_asked else self._abort_headers(url)
        with suppress(TransportError):  # who does not answer has nothing to end
            await self._transport.send(url, call, headers=headers)

    async def _events(self, run: Run, opened: _Opened) -> AsyncGenerator[GenerateEvent, None]:
        if opened.whole is not None:
            response = opened.whole
            for out in response.outputs:
                yield TokenChunk(index=out.index, token_ids=out.token_ids, logprobs=out.logprobs)
        else:
            decoder = self._provider.stream_decoder(opened.context)
            async with aclosing(self._chunks(run, opened.reply, decoder)) as chunks:
                async for chunk in chunks:
                    yield chunk
            if run.current is not None and run.current.is_cut:
                response = _ended(run, _cut_off(decoder.partial()))
            else:
                try:
                    response = decoder.finish(framed=opened.reply.framed)
                except IncompleteError as error:
                    # Of an output that is aborted before its first token some routes say nothing.
                    if not run.is_aborted or error.partial is None:
                        raise
                    response = _ended(run, error.partial)
        response = self._finish(run, await self._refined(run, response, opened.context))
        if is_undated(run, response):
            response = await self._versions.dated(run, response)
        if not self._versions.is_asked_for(run, response):
            raise stale(run, "was not met by a stream whose tokens were handed out already")
        yield Finished(reply=response)

    async def _chunks(
        self, run: Run, reply: StreamReply, decoder: StreamDecoder
    ) -> AsyncGenerator[TokenChunk, None]:
        """The tokens as they arrive.

        Raises:
            IncompleteError: the body broke off, or nothing came in time; `.partial` has the rest.
        """
        pieces = aiter(reply.chunks)
        idle_s = self._config.idle_timeout_s
        bounded = idle_s is not None or run.deadline < math.inf
        while True:
            piece: bytes | None = None
            try:
                with self._cutting(run.current):
                    if bounded:
                        left_s = run.deadline - anyio.current_time()
                        with anyio.fail_after(min(left_s, math.inf if idle_s is None else idle_s)):
                            piece = await anext(pieces, None)
                    else:
                        piece = await anext(pieces, None)
            except TimeoutError:
                over = anyio.current_time() >= run.deadline
                limit = f"timeout_s={run.request.timeout_s}" if over else f"idle_timeout_s={idle_s}"
                why = f"no complete reply from {reply.url} within {limit}"
                raise IncompleteError(why, partial=decoder.partial()) from None
            except TransportError as error:
                member = run.current.member if run.current else None
                if member is not None and run.current is not None and run.current.url == member.url:
                    member.suspect = True
                raise IncompleteError(str(error), partial=decoder.partial()) from error
            if piece is None:
                return
            for chunk in decoder.feed(piece):
                yield chunk


def _agreed(values: Iterable[T]) -> T | None:
    """What all say; None where they differ, and of nobody."""
    said = set(values)
    return said.pop() if len(said) == 1 else None


def _may_have_run(error: GenAPIError) -> bool:
    return isinstance(error, TransportError) and error.phase != "not_sent"


def _timed_out(run: Run) -> GenAPIError:
    timeout = f"timeout_s={run.request.timeout_s}"
    if run.lacking is not None:
        return stale(run, f"was not met within {timeout}", may_wait=True)
    if run.current is None:
        message = f"not sent within {timeout}: waited for {run.waits_for}"
        return TransportError(message, phase="not_sent")
    url = run.current.url
    message = f"no complete reply from {url} within {timeout}"
    return TransportError(message, phase="may_have_run", url=url)


def _cut_off(partial: GenerateResponse) -> GenerateResponse:
    """What had arrived of a stream that was aborted by leaving it."""
    outputs = tuple(
        o
        if o.finish_reason is not FinishReason.ERROR or o.finish_raw is not None
        else o.model_copy(update={"finish_reason": FinishReason.ABORT})
        for o in partial.outputs
    )
    return partial.model_copy(update={"outputs": outputs})


def _aborted(run: Run) -> GenerateResponse:
    """The reply of a request that was aborted while no worker had it."""
    nothing = GenerateResponse(request_id=run.request_id, outputs=(), attempts=tuple(run.attempts))
    return _ended(run, nothing)


def _ended(run: Run, partial: GenerateResponse) -> GenerateResponse:
    """What came of a request until it was aborted."""
    sampling = run.request.sampling
    nothing = np.empty(0, dtype=np.float32) if sampling.logprobs is not None else None
    came = {output.index: output for output in partial.outputs}
    outputs = [
        came.get(index)
        or GenerateOutput(
            index=index,
            token_ids=TokenIds(),
            logprobs=nothing,
            finish_reason=FinishReason.ERROR,
            policy=PolicyTrace(),
        )
        for index in range(sampling.n)
    ]
    ended = (
        o if o.is_complete else o.model_copy(update={"finish_reason": FinishReason.ABORT})
        for o in outputs
    )
    return partial.model_copy(update={"outputs": tuple(ended)})


async def _only(response: GenerateResponse) -> AsyncGenerator[GenerateEvent, None]:
    yield Finished(reply=response)
