"""Generation: which of SGLang's routes is asked, and how its reply is read.

The native route (`native.py`) takes ids and texts and attests versions, streamed or not. OpenAI's
routes (`openai.py`) are the second path: a reply in one piece attests versions, a stream does not.
The rule of this file: a request that is encoded names its route, whatever was asked.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from genapi.errors import ProviderError, UnsupportedError
from genapi.providers.base import Capabilities, DecodeContext
from genapi.providers.sglang import native, openai
from genapi.providers.sglang.errors import error_of, error_value
from genapi.providers.sglang.options import Options
from genapi.providers.sglang.reply import Accumulator, Failed
from genapi.providers.shapes.errors import NOT_FINITE
from genapi.providers.shapes.frames import Accumulates, FrameStream, Reported, decode_whole
from genapi.providers.shapes.options import options_of
from genapi.providers.shapes.tokens import check_vocabulary
from genapi.types.request import GenerateRequest
from genapi.types.response import GenerateResponse
from genapi.wire.http import HTTPCall, HTTPReply, json_body

__all__ = ("abort", "attests", "check", "decode", "encode", "route_of", "stream_decoder")

ABORT_PATH = "/abort_request"
_BAD_REQUEST = 400


def _options(request: GenerateRequest) -> Options:
    return options_of(request, Options(), engine="SGLang")


def route_of(
    request: GenerateRequest, capabilities: Iterable[Capabilities] = ()
) -> Literal["native", "openai"]:
    """The route that such a request takes at servers that read that much out of chat replies.

    Raises:
        UnsupportedError: the options are another engine's.
    """
    asked = _options(request).route
    if asked != "auto":
        return asked
    if request.messages is None:
        return "native"
    reads = request.tools or any("reasoning" in known.parsers for known in capabilities)
    return "openai" if reads else "native"


def attests(request: GenerateRequest) -> bool:
    """Whether every reply to such a request names versions."""
    return route_of(request) == "native"


def check(request: GenerateRequest, capabilities: Capabilities | None) -> None:
    """Raise, before any I/O, what SGLang or this server cannot be asked.

    Raises:
        UnsupportedError: the route or the server cannot do it.
        ConfigError: an id lies beyond the server's vocabulary, where that is known: SGLang would
            die of it.
    """
    sampling, options = request.sampling, _options(request)
    native.check_sampling(sampling)
    if options.chat and request.messages is None:
        raise UnsupportedError("Options(chat=...) goes with messages=; pass it without, or chat")
    if route_of(request, () if capabilities is None else (capabilities,)) == "openai":
        openai.check(request, options)
    if capabilities is None:
        return
    where = "this SGLang server"
    capabilities.require("generate", where=where)
    if sampling.seed is not None:
        capabilities.require("seed", where=where)
    if request.priority != 0:
        capabilities.require("priority", where=where)
    if request.lora is not None:
        capabilities.require("lora", where=where)
    if request.prompt_token_ids is not None:
        check_vocabulary(request.prompt_token_ids, capabilities.vocab_size)


def encode(
    request: GenerateRequest, *, wire_id: str, model: str | None, salt: str | None, stream: bool
) -> HTTPCall:
    """The call that asks for this generation.

    Args:
        request: what is asked, as `render.render` returned it.
        wire_id: the id on the wire. Aborting matches ids by their beginning, so no live id may be
            the beginning of another request's.
        model: the served model's name, which OpenAI's routes take.
        salt: keeps prefix-cache entries of other policy versions out; joined with the user's.
        stream: whether frames are wanted.

    Raises:
        UnsupportedError: a stream cannot carry what is asked, or an option sets what genapi sets
            itself.
    """
    options = _options(request)
    if route_of(request) == "native":
        return native.encode(request, options, wire_id=wire_id, salt=salt, stream=stream)
    return openai.encode(request, options, wire_id=wire_id, model=model, salt=salt, stream=stream)


def abort(wire_ids: Sequence[str], *, outputs: int = 1) -> tuple[HTTPCall, ...]:
    """The calls that end these generations: SGLang takes one id a call, and all for none.

    Raises:
        UnsupportedError: an id is empty, which would end everything.
    """
    if not all(wire_ids):
        raise UnsupportedError("an empty id would end every request of the server")
    return tuple(
        HTTPCall(
            method="POST",
            path=ABORT_PATH,
            body=json_body({"rid": rid, "abort_all": False}),
            grant="admin",
        )
        for wire_id in wire_ids
        for rid in native.wire_ids(wire_id, outputs)
    )


def decode(reply: HTTPReply, context: DecodeContext) -> GenerateResponse:
    """A unary reply as a value.

    Raises:
        ProviderError: SGLang answered an error; also its subclasses, see `errors.error_of`.
        ConfigError: the server lacks the route.
        ReplyError: the reply breaks its contract.
        IncompleteError: the output has no finish reason.
    """
    if not reply.ok:
        raise error_of(reply, now=context.now)
    accumulator = _accumulator(context)
    return decode_whole(reply, accumulator, _reports(context, accumulator))


def stream_decoder(context: DecodeContext) -> FrameStream:
    """A decoder for one streamed reply, by the same accumulation as a unary one."""
    accumulator = _accumulator(context)
    return FrameStream(accumulator, _reports(context, accumulator))


def _accumulator(context: DecodeContext) -> Accumulates:
    kind = Accumulator if route_of(context.request) == "native" else openai.Accumulator
    return kind(context)


def _reports(context: DecodeContext, accumulator: Accumulates) -> Reported:
    """The error that a body with status 200 reports."""

    def reported(error: Any, reply: HTTPReply) -> Exception:
        partial = accumulator.partial()
        if isinstance(error, Failed):
            body = msgspec.json.encode({"error": {"message": error.message}})
            frame = HTTPReply(error.status, body, reply.headers, reply.url)
            raised = error_of(frame, now=context.now, partial=partial)
            if error.not_finite and isinstance(raised, ProviderError):
                raised.code = NOT_FINITE
            return raised
        frame = HTTPReply(
            error_value(error).code or _BAD_REQUEST, reply.body, reply.headers, reply.url
        )
        return error_of(frame, now=context.now, partial=partial)

    return reported
