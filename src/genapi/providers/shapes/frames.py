"""Replies that arrive as JSON frames of an event stream, ended by `[DONE]`.

The rule of this file: a stream is read by the same accumulation as a reply in one piece.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from genapi.errors import IncompleteError, ReplyError
from genapi.providers.shapes.tokens import Piece
from genapi.types.response import GenerateResponse, TokenChunk
from genapi.wire.http import HTTPReply
from genapi.wire.sse import SSEDecoder

__all__ = ("Accumulates", "FrameStream", "decode_whole")


class Accumulates(Protocol):
    """What takes in the bodies of one reply: a single one, or every frame of a stream."""

    def add(self, body: bytes) -> tuple[Sequence[Piece], Any]:
        """Take in one JSON body; return its new tokens, and the error it reports or None."""
        ...

    def unfinished(self) -> list[int]:
        """Indexes of the outputs that have no finish reason yet."""
        ...

    def response(self) -> GenerateResponse:
        """The whole reply."""
        ...

    def partial(self) -> GenerateResponse:
        """What has arrived."""
        ...


Reported = Callable[[Any, HTTPReply], Exception]
"""The exception for an error that a body with status 200 reports."""


class FrameStream:
    """Decodes one streamed reply; a `providers.base.StreamDecoder`."""

    def __init__(self, accumulator: Accumulates, reported: Reported) -> None:
        self._events = SSEDecoder()
        self._accumulator = accumulator
        self._reported = reported
        self._done = False

    def feed(self, chunk: bytes) -> list[TokenChunk]:
        """The tokens that `chunk` completes.

        Raises:
            ProviderError: the server reports an error in the stream; `.partial` has the tokens.
            ReplyError: the stream breaks its contract.
        """
        tokens: list[TokenChunk] = []
        for event in self._events.feed(chunk):
            if event == b"[DONE]":
                self._done = True
                continue
            try:
                new, error = self._accumulator.add(event)
            except ReplyError as broken:
                raise _with_body(broken, event) from None
            if error is not None:
                raise self._reported(error, HTTPReply(200, event))
            tokens += [piece.chunk() for piece in new if piece]
        return tokens

    def finish(self, *, framed: bool) -> GenerateResponse:
        """The whole reply, once the body has ended.

        Raises:
            IncompleteError: an output has no finish reason, or an unframed body no `[DONE]`.
            ReplyError: the weight spans do not fit the tokens.
        """
        if not self._done and (not framed or self._events.pending):
            raise IncompleteError(
                "the stream broke off before its [DONE]", partial=self._accumulator.partial()
            )
        return _finished(self._accumulator)

    def partial(self) -> GenerateResponse:
        """What has arrived so far; outputs without a finish reason end in ERROR."""
        return self._accumulator.partial()


def decode_whole(
    reply: HTTPReply, accumulator: Accumulates, reported: Reported
) -> GenerateResponse:
    """A reply that came in one piece, with a 2xx status.

    Raises:
        ProviderError: the body reports an error.
        ReplyError: the body breaks its contract.
        IncompleteError: an output has no finish reason.
    """
    try:
        _, error = accumulator.add(reply.body)
        if error is not None:
            raise reported(error, reply)
        return _finished(accumulator)
    except ReplyError as error:
        raise _with_body(error, reply.body, status=reply.status, url=reply.url) from None


def _finished(accumulator: Accumulates) -> GenerateResponse:
    missing = accumulator.unfinished()
    if missing:
        raise IncompleteError(
            f"the reply ended without a finish reason for choice {missing}",
            partial=accumulator.partial(),
        )
    return accumulator.response()


def _with_body(
    error: ReplyError, body: bytes, *, status: int | None = 200, url: str | None = None
) -> ReplyError:
    return ReplyError(str(error), body=body, status=status, url=url)
