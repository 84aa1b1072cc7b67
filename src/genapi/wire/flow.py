"""Flows: what takes several calls, written as a generator that does no I/O.

A provider yields a call (or several that may go at once) and is sent the replies. One driver
runs a flow over a transport; tests run it from recorded exchanges. A call that got no answer
is thrown into the generator as the `TransportError` it is.
"""

from collections.abc import Generator
from typing import TypeVar

from genapi.wire.http import HTTPCall, HTTPReply

__all__ = ("Flow", "call", "calls")

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
