"""Flows: what takes several calls, written as a generator that does no I/O.

A provider yields a call (or several that may go at once) and is sent the replies. One driver
runs a flow over a transport; tests run it from recorded exchanges. A call that got no answer
is thrown into the generator as the `TransportError` it is.
"""

from collections.abc import Generator
from typing import TypeVar

from genapi.errors import TransportError
from genapi.wire.http import HTTPCall, HTTPReply

__all__ = ("Flow", "call", "calls", "nothing_to_ask", "resumed")

T = TypeVar("T")

Flow = Generator[HTTPCall | tuple[HTTPCall, ...], HTTPReply | tuple[HTTPReply, ...], T]


def call(request: HTTPCall) -> Flow[HTTPReply]:
    """Ask once: `reply = yield from` this, with one HTTP call."""
    reply = yield request
    if isinstance(reply, tuple):
        message = "a flow that yielded one call was sent several replies"
        raise TypeError(message)
    return reply


def calls(*requests: HTTPCall) -> Flow[tuple[HTTPReply, ...]]:
    """Ask several at once: a tuple of replies, in the order of the requests."""
    replies = yield requests
    if not isinstance(replies, tuple) or len(replies) != len(requests):
        message = f"a flow that yielded {len(requests)} calls was sent {replies!r}"
        raise TypeError(message)
    return replies


def nothing_to_ask(result: T) -> Flow[T]:
    """A flow that knows its result."""
    yield from ()
    return result


def resumed(flow: Flow[T], first: HTTPCall | tuple[HTTPCall, ...]) -> Flow[T]:
    """The rest of a flow whose first step was taken already: for whoever looks if it has any."""
    step = first
    try:
        while True:
            try:
                answer = yield step
            except TransportError as error:
                step = flow.throw(error)
            else:
                step = flow.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        flow.close()
