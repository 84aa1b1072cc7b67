"""Generation over `POST /inference/v1/generate`: token ids go in, token ids come out.

The rule of this file: every value that shapes the distribution or the length is sent, also at
its default, so that no default of the server (its `generation_config.json`) can step in.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from genapi.errors import ConfigError, IncompleteError, ReplyError, UnsupportedError
from genapi.providers.base import Capabilities, DecodeContext
from genapi.providers.vllm.errors import error_of, error_value
from genapi.providers.vllm.options import Options
from genapi.providers.vllm.reply import Accumulator
from genapi.types.ids import TokenIds
from genapi.types.request import GenerateRequest, SamplingParams, StructuredOutput
from genapi.types.response import GenerateResponse, TokenChunk
from genapi.wire.http import HTTPCall, HTTPReply, json_body
from genapi.wire.sse import SSEDecoder

__all__ = ("GenerateStream", "abort", "check", "decode", "encode")

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
    options = _options(request)
    if options.text and sampling.logprobs:
        raise UnsupportedError(
            "with Options(text=True) vLLM names candidates by text, not by id; use logprobs=0"
        )
    if capabilities is None:
        return
    capabilities.require("generate", where="this vLLM server")
    if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
        capabilities.require("logprobs", where="this vLLM server")
    if capabilities.vocab_size is not None:
        ids = np.asarray(TokenIds(request.prompt_token_ids))
        beyond = ids >= capabilities.vocab_size
        if beyond.any():
            position = int(np.argmax(beyond))
            raise ConfigError(
                f"prompt_token_ids[{position}] is {ids[position]}; the server's vocabulary has "
                f"{capabilities.vocab_size} ids: check that the tokenizer is the model's"
            )


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
    options = _options(request)
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
    _add(body, options.body)
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
    try:
        _, error = accumulator.add(reply.body)
        if error is not None:
            raise _reported(error, reply, context, accumulator)
        return _finished(accumulator)
    except ReplyError as error:
        raise _with_body(error, reply.body, status=reply.status, url=reply.url) from None


class GenerateStream:
    """Decodes one streamed reply, by the same accumulation as a unary one."""

    def __init__(self, context: DecodeContext) -> None:
        self._context = context
        self._events = SSEDecoder()
        self._accumulator = Accumulator(context)
        self._done = False

    def feed(self, chunk: bytes) -> list[TokenChunk]:
        """The tokens that `chunk` completes.

        Raises:
            ProviderError: vLLM reports an error in the stream; `.partial` has the tokens.
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
                frame = HTTPReply(200, event)
                raise _reported(error, frame, self._context, self._accumulator)
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


def _finished(accumulator: Accumulator) -> GenerateResponse:
    missing = accumulator.unfinished()
    if missing:
        raise IncompleteError(
            f"the reply ended without a finish reason for choice {missing}",
            partial=accumulator.partial(),
        )
    return accumulator.response()


def _reported(
    error: Any, reply: HTTPReply, context: DecodeContext, accumulator: Accumulator
) -> Exception:
    """The error that a body with status 200 reports (transcript 46; frames: READ serving.py)."""
    status = error_value(error).code or 500
    frame = HTTPReply(status, reply.body, reply.headers, reply.url)
    return error_of(
        frame, now=context.now, lora=context.request.lora, partial=accumulator.partial()
    )


def _with_body(
    error: ReplyError, body: bytes, *, status: int | None = 200, url: str | None = None
) -> ReplyError:
    return ReplyError(str(error), body=body, status=status, url=url)


def _options(request: GenerateRequest) -> Options:
    if request.options is None:
        return Options()
    if not isinstance(request.options, Options):
        raise UnsupportedError(
            f"options are {type(request.options).__module__}.{type(request.options).__name__}; "
            "this fleet speaks vLLM: pass genapi.providers.vllm.Options(...)"
        )
    return request.options


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


def _add(body: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        if name in body:
            raise UnsupportedError(f"Options(body=...) may not set {name!r}: genapi sets it")
        body[name] = value
