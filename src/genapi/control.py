"""The administration plane: runs a provider's flows against workers, one or many at once.

The rule of this file: nothing here sends a call again, and nothing hides that a call may have run.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeVar

import anyio

from genapi.errors import AuthError, GenAPIError, ReplyError, TransportError
from genapi.events import AdminCalled, Observe
from genapi.transports.base import Transport
from genapi.wire.flow import Flow
from genapi.wire.http import Grant, HTTPCall, HTTPReply

__all__ = ("Control", "fan_out", "run_flow")

T = TypeVar("T")
K = TypeVar("K")

_Step = HTTPCall | tuple[HTTPCall, ...]
_Answer = HTTPReply | tuple[HTTPReply, ...]

Headers = Callable[[Grant | None], Mapping[str, str]]


class Control:
    """Runs flows over one transport.

    Args:
        transport: what carries the calls.
        headers: the headers that go to an address, credentials included, by the key that a call
            asks for.
        observe: told of every flow that ended.
        withheld: why no key is sent to an address though there is one; None = it is.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        headers: Callable[[str, Grant | None], Mapping[str, str]],
        observe: Observe,
        withheld: Callable[[str], str | None] = lambda _url: None,
    ) -> None:
        self._transport = transport
        self._headers = headers
        self._withheld = withheld
        self.observe = observe

    @property
    def in_process(self) -> bool:
        """Whether the workers are objects in this process."""
        return self._transport.in_process

    async def run(
        self,
        url: str,
        flow: Flow[T],
        *,
        operation: str,
        timeout_s: float,
        headers: Headers | None = None,
    ) -> T:
        """The result of `flow` against the worker at `url`; see `run_flow`.

        Args:
            url: where the worker is administered.
            flow: what to run.
            operation: its name, for messages and events.
            timeout_s: bound on the whole flow.
            headers: by the key that a call asks for, instead of those of the administration plane.
        """
        try:
            return await run_flow(
                flow,
                self._transport,
                url,
                headers=headers or partial(self._headers, url),
                elsewhere=self._headers,
                timeout_s=timeout_s,
                observe=self.observe,
                operation=operation,
            )
        except AuthError as error:
            why = self._withheld(error.url or url)
            if why is None:
                raise
            raise AuthError(
                f"{error}; {why}",
                status=error.status,
                code=error.code,
                body=error.body,
                url=error.url,
            ) from error


async def run_flow(
    flow: Flow[T],
    transport: Transport,
    base_url: str,
    *,
    headers: Headers,
    timeout_s: float,
    observe: Observe,
    operation: str,
    elsewhere: Callable[[str, Grant | None], Mapping[str, str]] = lambda _url, _grant: {},
) -> T:
    """The result of `flow`, whose calls go to `base_url` with `headers` for the key they ask for.

    Calls that name another base URL go there, with the headers that `elsewhere` has for it.

    Calls that are yielded together are sent together. One deadline bounds the whole flow. A call
    without an answer is thrown into the flow as its `TransportError`; when the time is up the flow
    is thrown one too, and may still return, but is sent nothing more. Of several lost calls the
    flow learns of one that may have run, if there is any.

    Raises:
        TransportError: the flow did not handle it, or the time was up. Its phase is `not_sent` only
            when no call of the flow was begun.
        ReplyError: an answer has a shape that the flow cannot read.
    """
    started = time.monotonic()

    def addressed(call: HTTPCall) -> tuple[str, Mapping[str, str]]:
        if call.base is None:
            return base_url, headers(call.grant)
        return call.base, elsewhere(call.base, call.grant)

    send = partial(_send, transport, addressed)
    failure: str | None = "cancelled"
    try:
        result = await _within(timeout_s, flow, send, what=f"{operation} on {base_url}")
        failure = None
    except GenAPIError as error:
        failure = str(error)
        raise
    except Exception as error:
        # A flow reads what a peer may have written: whatever it trips over is the peer's.
        failure = f"the answer cannot be read: {type(error).__name__}: {error}"
        raise ReplyError(f"{operation} on {base_url}: {failure}", url=base_url) from error
    finally:
        flow.close()
        seconds = time.monotonic() - started
        observe(AdminCalled(worker=base_url, operation=operation, seconds=seconds, error=failure))
    return result


async def fan_out(calls: Mapping[K, Callable[[], Awaitable[T]]]) -> dict[K, T | GenAPIError]:
    """What each call returned or failed with, in the order of `calls`.

    Every call is awaited to its end whatever happens to the others. Cancelling the caller cancels
    all of them. An error that is not genapi's is raised, once all have ended.
    """
    results: dict[K, T | GenAPIError] = {}
    bugs: list[Exception] = []

    async def one(key: K, call: Callable[[], Awaitable[T]]) -> None:
        try:
            results[key] = await call()
        except GenAPIError as error:
            results[key] = error
        # A mistake in one call must not cut off its siblings in the middle of an update.
        except Exception as error:  # noqa: BLE001
            bugs.append(error)

    # asyncio's own group: a task of anyio's, which could be cancelled alone, costs five times it.
    async with asyncio.TaskGroup() as group:
        for key, call in calls.items():
            group.create_task(one(key, call))
    if bugs:
        raise bugs[0] if len(bugs) == 1 else ExceptionGroup("several calls failed", bugs)
    return {key: results[key] for key in calls}


async def _within(
    timeout_s: float, flow: Flow[T], send: Callable[[_Step], Awaitable[_Answer]], *, what: str
) -> T:
    step: _Step = ()
    begun = False
    try:
        with anyio.move_on_after(timeout_s) as scope:
            step = next(flow)
            while anyio.current_time() < scope.deadline:
                begun = True
                try:
                    answer = await send(step)
                except TransportError as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(answer)
        late = _out_of_time(what, timeout_s, step, begun=begun)
        flow.throw(late)
    except StopIteration as end:
        result: T = end.value
        return result
    raise late


def _out_of_time(what: str, timeout_s: float, step: _Step, *, begun: bool) -> TransportError:
    calls = (step,) if isinstance(step, HTTPCall) else step
    waiting = " and ".join(f"{call.method} {call.path}" for call in calls)
    end = "it may have been acted on" if begun else "nothing was sent"
    return TransportError(
        f"{what}: no answer to {waiting} within {timeout_s:g} s; {end}",
        phase="may_have_run" if begun else "not_sent",
    )


async def _send(
    transport: Transport,
    addressed: Callable[[HTTPCall], tuple[str, Mapping[str, str]]],
    step: _Step,
) -> _Answer:
    async def one(call: HTTPCall) -> HTTPReply:
        base_url, headers = addressed(call)
        return await transport.send(base_url, call, headers=headers)

    if isinstance(step, HTTPCall):
        return await one(step)
    outcomes = await fan_out({i: partial(one, call) for i, call in enumerate(step)})
    lost = [error for error in outcomes.values() if isinstance(error, GenAPIError)]
    if lost:
        raise min(lost, key=_is_not_sent)
    return tuple(reply for reply in outcomes.values() if isinstance(reply, HTTPReply))


def _is_not_sent(error: GenAPIError) -> bool:
    return isinstance(error, TransportError) and error.phase == "not_sent"
