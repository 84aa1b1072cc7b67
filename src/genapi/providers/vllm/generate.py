"""Generation over `POST /inference/v1/generate`: token ids go in, token ids come out.

The rule of this file: every value that shapes the distribution or the length is sent, also at
its default, so that no default of the server (its `generation_config.json`) can step in.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from genapi.errors import UnsupportedError
from genapi.providers.base import Capabilities, DecodeContext
from genapi.providers.shapes.errors import error_value
from genapi.providers.shapes.frames import FrameStream, Reported, decode_whole
from genapi.providers.shapes.options import add_fields, options_of
from genapi.providers.shapes.tokens import check_vocabulary
from genapi.providers.vllm.errors import error_of
from genapi.providers.vllm.options import Options
from genapi.providers.vllm.reply import Accumulator
from genapi.types.ids import TokenIds
from genapi.types.request import GenerateRequest, SamplingParams, StructuredOutput
from genapi.types.response import GenerateResponse
from genapi.wire.http import HTTPCall, HTTPReply, json_body

__all__ = ("abort", "check", "decode", "encode", "stream_decoder")

PATH = "/inference/v1/generate"
ABORT_PATH = "/inference/v1/abort_requests"
WIRE_PREFIX = "generate-tokens-"
"""vLLM puts this before the id it is given; aborting needs the prefixed id (transcript 40)."""

_NOTHING: Mapping[str, str] = {}


def check(request: GenerateRequest, capabilities: Capabilities | None) -> None:
    """Raise, before any I/O, what vLLM or this server cannot be asked.

    Raises:
        UnsupportedError: the route or the server cannot do it.
        ConfigError: an id lies beyond the server's vocabulary.
    """
    if request.prompt_token_ids is None:
        form = "messages" if request.messages is not None else "prompt"
        raise UnsupportedError(
            f"vLLM's {PATH} takes token ids, not {form}=; text and chat prompts come with the "
            "OpenAI and render routes: until then tokenize and pass prompt_token_ids="
        )
    sampling = request.sampling
    if sampling.seed == -1:
        raise UnsupportedError("seed=-1 means 'no seed' to vLLM; pass another seed, or None")
    options = options_of(request, Options(), engine="vLLM")
    if options.text and sampling.logprobs:
        raise UnsupportedError(
            "with Options(text=True) vLLM names candidates by text, not by id; use logprobs=0"
        )
    if capabilities is None:
        return
    capabilities.require("generate", where="this vLLM server")
    if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
        capabilities.require("logprobs", where="this vLLM server")
    check_vocabulary(request.prompt_token_ids, capabilities.vocab_size)


def encode(
    request: GenerateRequest, *, wire_id: str, model: str | None, salt: str | None, stream: bool
) -> HTTPCall:
    """The call that asks for this generation.

    Args:
        request: what is asked.
        wire_id: the id on the wire, without vLLM's prefix.
        model: the served model's name; an adapter's name takes its place.
        salt: keeps prefix-cache entries of other policy versions out; joined with the user's.
        stream: whether frames are wanted.

    Raises:
        UnsupportedError: a stream cannot carry what is asked.
    """
    if stream and request.sampling.prompt_logprobs is not None:
        raise UnsupportedError(
            "vLLM's stream has no field for prompt_logprobs; ask with generate, or without them"
        )
    options = options_of(request, Options(), engine="vLLM")
    name = request.lora or model
    salts = [part for part in (salt, request.cache_salt) if part is not None]
    body: dict[str, Any] = {
        "request_id": wire_id,
        "token_ids": TokenIds(request.prompt_token_ids or ()).tolist(),
        "sampling_params": _sampling(request.sampling, options),
        "return_token_ids": True,
    }
    if name is not None:
        body["model"] = name
    if salts:
        body["cache_salt"] = "|".join(salts)
    if request.priority != 0:
        body["priority"] = request.priority
    if stream:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    if options.text:
        body["output_mode"] = "text"
    if options.kv_transfer_params is not None:
        body["kv_transfer_params"] = options.kv_transfer_params
    add_fields(body, options.body, of="body")
    rank = options.data_parallel_rank
    headers = _NOTHING if rank is None else {"X-data-parallel-rank": str(rank)}
    return HTTPCall(method="POST", path=PATH, headers=headers, body=json_body(body))


def abort(wire_ids: Sequence[str]) -> HTTPCall:
    """The call that ends these generations; vLLM answers at once and aborts in the background."""
    ids = [WIRE_PREFIX + wire_id for wire_id in wire_ids]
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
    accumulator = Accumulator(context)
    return decode_whole(reply, accumulator, _reports(context, accumulator))


def stream_decoder(context: DecodeContext) -> FrameStream:
    """A decoder for one streamed reply, by the same accumulation as a unary one."""
    accumulator = Accumulator(context)
    return FrameStream(accumulator, _reports(context, accumulator))


def _reports(context: DecodeContext, accumulator: Accumulator) -> Reported:
    """The error that a body with status 200 reports (transcript 46; frames: READ serving.py)."""

    def reported(error: Any, reply: HTTPReply) -> Exception:
        status = error_value(error).code or 500
        frame = HTTPReply(status, reply.body, reply.headers, reply.url)
        return error_of(
            frame, now=context.now, lora=context.request.lora, partial=accumulator.partial()
        )

    return reported


def _sampling(sampling: SamplingParams, options: Options) -> dict[str, Any]:
    wire: dict[str, Any] = {
        "n": sampling.n,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "ignore_eos": sampling.ignore_eos,
        "seed": sampling.seed,
        "stop": sampling.stop,
        "stop_token_ids": TokenIds(sampling.stop_token_ids).tolist(),
        "bad_words": sampling.bad_words,
        "logprobs": sampling.logprobs,
        "prompt_logprobs": sampling.prompt_logprobs,
        "include_stop_str_in_output": options.include_stop_str_in_output,
    }
    if sampling.logit_bias:
        wire["logit_bias"] = sampling.logit_bias
    if sampling.structured_output is not None:
        wire["structured_outputs"] = _structured(sampling.structured_output)
    if options.allowed_token_ids is not None:
        wire["allowed_token_ids"] = TokenIds(options.allowed_token_ids).tolist()
    for name in ("skip_reading_prefix_cache", "thinking_token_budget", "extra_args"):
        value = getattr(options, name)
        if value is not None:
            wire[name] = value
    return wire


def _structured(wanted: StructuredOutput) -> dict[str, Any]:
    fields = {
        "json": wanted.json_schema,
        "regex": wanted.regex,
        "choice": wanted.choice,
        "grammar": wanted.grammar,
    }
    return {name: value for name, value in fields.items() if value is not None}
