"""Generation: which of vLLM's routes is asked, and how its reply is read.

The native route (`native.py`) takes token ids and attests versions. A text or chat prompt is made
ids by the server first (`render.py`), so that it has both, too. OpenAI's routes (`openai.py`) are
for servers without the native one, and for whoever asks for them: their replies name no version.
The rule of this file: a request that is encoded names its route, whatever was asked.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from genapi.errors import UnsupportedError
from genapi.providers.base import Capabilities, DecodeContext
from genapi.providers.shapes.errors import error_value
from genapi.providers.shapes.frames import Accumulates, FrameStream, Reported, decode_whole
from genapi.providers.shapes.options import options_of
from genapi.providers.shapes.tokens import check_vocabulary
from genapi.providers.vllm import native, openai
from genapi.providers.vllm.errors import error_of
from genapi.providers.vllm.options import Options
from genapi.providers.vllm.reply import Accumulator
from genapi.types.request import GenerateRequest
from genapi.types.response import GenerateResponse
from genapi.wire.http import HTTPCall, HTTPReply, json_body

__all__ = (
    "ABORT_PATH",
    "abort",
    "attests",
    "check",
    "decode",
    "encode",
    "route_of",
    "stream_decoder",
)

ABORT_PATH = "/inference/v1/abort_requests"
_WIRE_IDS = ("generate-tokens-{}", "cmpl-{}-0", "chatcmpl-{}")
"""What vLLM makes of the id it is given, route by route; aborting needs that (transcript 40)."""


def _options(request: GenerateRequest) -> Options:
    return options_of(request, Options(), engine="vLLM")


def route_of(
    request: GenerateRequest, capabilities: Iterable[Capabilities] = ()
) -> Literal["native", "openai"]:
    """The route that such a request takes at servers that can do that much.

    Raises:
        UnsupportedError: the options are another engine's.
    """
    asked = _options(request).route
    if asked != "auto":
        return asked
    return "openai" if any("generate" in known.missing for known in capabilities) else "native"


def attests(request: GenerateRequest) -> bool:
    """Whether a reply to such a request names versions, as far as the request decides that."""
    return _options(request).route != "openai"


def check(request: GenerateRequest, capabilities: Capabilities | None) -> None:
    """Raise, before any I/O, what vLLM or this server cannot be asked.

    Raises:
        UnsupportedError: the route or the server cannot do it.
        ConfigError: an id lies beyond the server's vocabulary.
    """
    sampling, options = request.sampling, _options(request)
    if sampling.seed == -1:
        raise UnsupportedError("seed=-1 means 'no seed' to vLLM; pass another seed, or None")
    if options.chat and request.messages is None:
        raise UnsupportedError("Options(chat=...) goes with messages=; pass it without, or chat")
    route = route_of(request, () if capabilities is None else (capabilities,))
    if route == "native":
        native.check(request, options)
    else:
        openai.check(request, options)
    if capabilities is None:
        return
    if route == "native":
        capabilities.require("generate", where="this vLLM server")
    if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
        capabilities.require("logprobs", where="this vLLM server")
    if request.prompt_token_ids is not None:
        check_vocabulary(request.prompt_token_ids, capabilities.vocab_size)


def encode(
    request: GenerateRequest, *, wire_id: str, model: str | None, salt: str | None, stream: bool
) -> HTTPCall:
    """The call that asks for this generation.

    Args:
        request: what is asked, as `render.render` returned it.
        wire_id: the id on the wire, without vLLM's prefix.
        model: the served model's name; an adapter's name takes its place.
        salt: keeps prefix-cache entries of other policy versions out; joined with the user's.
        stream: whether frames are wanted.

    Raises:
        UnsupportedError: a stream cannot carry what is asked, or an option sets what genapi sets
            itself.
    """
    if stream and request.sampling.prompt_logprobs is not None:
        raise UnsupportedError(
            "vLLM's streams have no field for prompt_logprobs; ask with generate, or without them"
        )
    write = native.encode if route_of(request) == "native" else openai.encode
    options = _options(request)
    return write(request, options, wire_id=wire_id, model=model, salt=salt, stream=stream)


def abort(wire_ids: Sequence[str]) -> HTTPCall:
    """The call that ends these generations; vLLM answers at once and aborts in the background."""
    ids = [form.format(wire_id) for wire_id in wire_ids for form in _WIRE_IDS]
    return HTTPCall(method="POST", path=ABORT_PATH, body=json_body({"request_ids": ids}))


def decode(reply: HTTPReply, context: DecodeContext) -> GenerateResponse:
    """A unary reply as a value.

    Raises:
        ProviderError: vLLM answered an error; also its subclasses, see `errors.error_of`.
        ConfigError: the server lacks the route or the model.
        ReplyError: the reply breaks its contract.
        IncompleteError: an output has no finish reason.
    """
    if not reply.ok:
        raise error_of(reply, now=context.now, lora=context.request.lora)
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
    """The error that a body with status 200 reports (transcript 46; frames: READ serving.py)."""

    def reported(error: Any, reply: HTTPReply) -> Exception:
        status = error_value(error).code or 500
        frame = HTTPReply(status, reply.body, reply.headers, reply.url)
        return error_of(
            frame, now=context.now, lora=context.request.lora, partial=accumulator.partial()
        )

    return reported
