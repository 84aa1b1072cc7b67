"""Generation through a frontend's OpenAI routes: ids or texts go in, ids come out in `nvext`.

The rule of this file: every value that shapes the distribution or the length is sent, also at its
default, so that no default of a worker (`generation_config.json`) can step in; and what the
frontend takes and drops without a word is refused here.

It is these routes and no other because they alone stream, name the worker and give ids:
`/inference/v1/generate` names no worker, so that nothing could be said of a reply's version.
"""

from typing import Any

import msgspec

from genapi.errors import ConfigError, UnsupportedError
from genapi.providers.base import Capabilities, DecodeContext, Pin
from genapi.providers.dynamo.errors import error_of
from genapi.providers.dynamo.options import Options
from genapi.providers.dynamo.reply import Accumulator
from genapi.providers.shapes.errors import UNAVAILABLE, error_value
from genapi.providers.shapes.frames import FrameStream, Reported, decode_whole
from genapi.providers.shapes.openai_request import path_of, prompt_fields
from genapi.providers.shapes.options import add_fields, options_of
from genapi.providers.shapes.tokens import check_vocabulary
from genapi.types.ids import TokenIds
from genapi.types.request import GenerateRequest, SamplingParams, StructuredOutput
from genapi.types.response import GenerateResponse
from genapi.wire.http import HTTPCall, HTTPReply, json_body

__all__ = ("check", "decode", "encode", "stream_decoder")

_MAX_TEMPERATURE = _MAX_REPETITION = 2.0
_SEEDS = range(-(2**63), 2**63)
_MOST_CANDIDATES, _MOST_CANDIDATES_OF_CHATS = 5, 20
_FIELDS = ("worker_id", "completion_token_ids", "prompt_token_ids", "engine_data", "stop_reason")


def check(request: GenerateRequest, capabilities: Capabilities | None) -> None:
    """Raise, before any I/O, what Dynamo or these workers cannot be asked.

    Raises:
        UnsupportedError: the route or the workers cannot do it.
        ConfigError: a value that the frontend refuses, or an id beyond the vocabulary.
    """
    options_of(request, Options(), engine="Dynamo")
    _check_sampling(request.sampling, chat=request.messages is not None)
    if request.priority != 0:
        raise UnsupportedError(
            f"priority={request.priority}: Dynamo serves higher ones first and genapi lower ones; "
            "pass Options(nvext={'agent_hints': {'priority': ...}}) with Dynamo's own number"
        )
    if request.lora is not None:
        raise UnsupportedError(
            "lora= on Dynamo is a model's name: connect with model= as the adapter's"
        )
    if capabilities is None:
        return
    where = "this Dynamo worker"
    capabilities.require("generate", where=where)
    if request.sampling.logprobs is not None or request.sampling.prompt_logprobs is not None:
        capabilities.require("logprobs", where=where)
    if request.prompt_token_ids is not None:
        check_vocabulary(request.prompt_token_ids, capabilities.vocab_size)


def _check_sampling(sampling: SamplingParams, *, chat: bool) -> None:
    if sampling.n > 1:
        raise UnsupportedError(
            f"n={sampling.n}: Dynamo gives token ids for one output a request; send {sampling.n} "
            "requests with n=1"
        )
    for name in ("logit_bias", "bad_words"):
        if getattr(sampling, name):
            raise UnsupportedError(f"Dynamo drops {name}; use structured_output")
    if sampling.ignore_eos and (sampling.stop or len(sampling.stop_token_ids)):
        raise UnsupportedError(
            "under ignore_eos Dynamo drops stop and stop_token_ids: leave one of them out"
        )
    most = _MOST_CANDIDATES_OF_CHATS if chat else _MOST_CANDIDATES
    if (sampling.logprobs or 0) > most:
        raise ConfigError(
            f"logprobs={sampling.logprobs}: Dynamo takes up to {_MOST_CANDIDATES}, and "
            f"{_MOST_CANDIDATES_OF_CHATS} with messages="
        )
    if sampling.temperature > _MAX_TEMPERATURE:
        raise ConfigError(f"temperature={sampling.temperature}: Dynamo takes 0 to 2")
    if sampling.repetition_penalty > _MAX_REPETITION:
        raise ConfigError(f"repetition_penalty={sampling.repetition_penalty}: Dynamo takes up to 2")
    if sampling.seed is not None and sampling.seed not in _SEEDS:
        raise ConfigError(f"seed={sampling.seed}: Dynamo takes whole numbers of 64 bits")


def encode(
    request: GenerateRequest,
    *,
    wire_id: str,
    model: str | None,
    salt: str | None,
    stream: bool,
    pin: Pin | None,
) -> HTTPCall:
    """The call that asks for this generation.

    Args:
        request: what is asked.
        wire_id: the id in the frontend's logs; it comes back as a header.
        model: the served model's name.
        salt: keeps prefix-cache entries of other policy versions out; joined with the user's.
        stream: whether chunks are wanted.
        pin: who has to serve it; None = whoever the frontend chooses.

    Raises:
        ConfigError: no model is named.
        UnsupportedError: an option sets what genapi sets itself.
    """
    if model is None:
        raise ConfigError(
            "Dynamo has to be told the model: pass model= to connect(), since the frontend serves "
            "none or several"
        )
    options = options_of(request, Options(), engine="Dynamo")
    body: dict[str, Any] = {
        "model": model,
        **prompt_fields(request),
        **_sampling(request.sampling, chat=request.messages is not None),
        "include_stop_str_in_output": options.include_stop_str_in_output,
        "stream": stream,
        "nvext": _nvext(request, options, salt=salt, pin=pin),
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    add_fields(body, options.body, of="body")
    return HTTPCall(
        method="POST",
        path=path_of(request),
        headers={"x-request-id": wire_id},
        body=json_body(body),
    )


def decode(reply: HTTPReply, context: DecodeContext) -> GenerateResponse:
    """A unary reply as a value.

    Raises:
        ProviderError: Dynamo answered an error; also its subclasses, see `errors.error_of`.
        ConfigError: the frontend does not serve the model.
        ReplyError: the reply breaks its contract.
        IncompleteError: the output has no finish reason.
    """
    if not reply.ok:
        raise error_of(reply, now=context.now, pinned=context.worker)
    accumulator = Accumulator(context)
    return decode_whole(reply, accumulator, _reports(context, accumulator))


def stream_decoder(context: DecodeContext) -> FrameStream:
    """A decoder for one streamed reply, by the same accumulation as a unary one."""
    accumulator = Accumulator(context)
    return FrameStream(accumulator, _reports(context, accumulator))


def _reports(context: DecodeContext, accumulator: Accumulator) -> Reported:
    """The error that a body with status 200 reports; a `[DONE]` after it means nothing."""

    def reported(error: Any, reply: HTTPReply) -> Exception:
        status = error_value(error).code or UNAVAILABLE
        body = msgspec.json.encode({"error": error})
        frame = HTTPReply(status, body, reply.headers, reply.url)
        return error_of(frame, now=context.now, partial=accumulator.partial())

    return reported


def _sampling(sampling: SamplingParams, *, chat: bool) -> dict[str, Any]:
    wire: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k > 0 else -1,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "ignore_eos": sampling.ignore_eos,
    }
    if sampling.seed is not None:
        wire["seed"] = sampling.seed
    if sampling.stop:
        wire["stop"] = list(sampling.stop)
    if len(sampling.stop_token_ids):
        wire["stop_token_ids"] = TokenIds(sampling.stop_token_ids).tolist()
    # 1 and not 0, which some handlers take for "off": the chosen token comes either way.
    if sampling.logprobs is not None:
        most = max(sampling.logprobs, 1)
        wire |= {"logprobs": True, "top_logprobs": most} if chat else {"logprobs": most}
    if sampling.logprobs:  # their texts are not one for each id
        wire["return_tokens_as_token_ids"] = True
    if sampling.prompt_logprobs is not None:
        wire["prompt_logprobs"] = max(sampling.prompt_logprobs, 1)
    if sampling.structured_output is not None:
        wire |= _structured(sampling.structured_output)
    return wire


def _structured(wanted: StructuredOutput) -> dict[str, Any]:
    if wanted.json_schema is not None:
        return {"guided_json": wanted.json_schema}
    if wanted.regex is not None:
        return {"guided_regex": wanted.regex}
    if wanted.choice is not None:
        return {"guided_choice": list(wanted.choice)}
    return {"guided_grammar": wanted.grammar}


def _nvext(
    request: GenerateRequest, options: Options, *, salt: str | None, pin: Pin | None
) -> dict[str, Any]:
    fields = [*_FIELDS]
    if request.sampling.prompt_logprobs is not None:
        fields.append("prompt_logprobs")
    fields += [name for name in options.extra_fields if name not in fields]
    nvext: dict[str, Any] = {"extra_fields": fields}
    salts = [part for part in (salt, request.cache_salt) if part is not None]
    if salts:
        nvext["cache_salt"] = "|".join(salts)
    if pin is not None:
        nvext |= _pinned(pin)
    if options.max_thinking_tokens is not None:
        nvext["max_thinking_tokens"] = options.max_thinking_tokens
    add_fields(nvext, options.nvext, of="nvext")
    return nvext


def _pinned(pin: Pin) -> dict[str, int]:
    worker = int(pin.worker.instance)
    if pin.prefill is None:
        return {"backend_instance_id": worker}
    return {"decode_worker_id": worker, "prefill_worker_id": int(pin.prefill.instance)}
