"""Generation over `POST /generate`: token ids go in, token ids come out.

The rule of this file: every value that shapes the distribution or the length is sent, also at
its default, so that no default of the server (`--preferred-sampling-params`) can step in.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from genapi.errors import ConfigError, ProviderError, UnsupportedError
from genapi.providers.base import Capabilities, DecodeContext
from genapi.providers.sglang.errors import error_of, error_value
from genapi.providers.sglang.options import Options
from genapi.providers.sglang.reply import Accumulator, Failed
from genapi.providers.shapes.errors import NOT_FINITE
from genapi.providers.shapes.frames import FrameStream, Reported, decode_whole
from genapi.providers.shapes.options import add_fields, options_of
from genapi.providers.shapes.tokens import check_vocabulary
from genapi.types.ids import TokenIds
from genapi.types.request import GenerateRequest, SamplingParams, StructuredOutput
from genapi.types.response import GenerateResponse
from genapi.wire.http import HTTPCall, HTTPReply, json_body

__all__ = ("abort", "check", "decode", "encode", "stream_decoder")

PATH = "/generate"
ABORT_PATH = "/abort_request"

_SEEDS = range(-(2**63), 2**63)
_BAD_REQUEST = 400


def check(request: GenerateRequest, capabilities: Capabilities | None) -> None:
    """Raise, before any I/O, what SGLang or this server cannot be asked.

    Raises:
        UnsupportedError: the route or the server cannot do it.
        ConfigError: an id lies beyond the server's vocabulary, where that is known: SGLang would
            die of it.
    """
    if request.prompt_token_ids is None:
        form = "messages" if request.messages is not None else "prompt"
        raise UnsupportedError(
            f"SGLang's {PATH} is asked with token ids, not {form}=; text and chat prompts come "
            "with the OpenAI routes: until then tokenize and pass prompt_token_ids="
        )
    sampling = request.sampling
    options_of(request, Options(), engine="SGLang")
    _check_sampling(sampling)
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
    check_vocabulary(request.prompt_token_ids, capabilities.vocab_size)


def _check_sampling(sampling: SamplingParams) -> None:
    if sampling.n > 1:
        raise UnsupportedError(
            f"n={sampling.n}: SGLang gives each of several outputs an id of its own, so that none "
            f"could be aborted; send {sampling.n} requests with n=1"
        )
    if sampling.bad_words:
        raise UnsupportedError(
            "SGLang has no bad_words; use logit_bias on their ids, or structured_output"
        )
    wanted = sampling.structured_output
    if wanted is not None and wanted.choice is not None:
        raise UnsupportedError(
            "SGLang has no structured_output choice; use regex with the texts as alternatives"
        )
    if sampling.seed is not None and sampling.seed not in _SEEDS:
        raise ConfigError(f"seed={sampling.seed}: SGLang takes whole numbers of 64 bits")


def encode(request: GenerateRequest, *, wire_id: str, salt: str | None, stream: bool) -> HTTPCall:
    """The call that asks for this generation.

    Args:
        request: what is asked.
        wire_id: the id on the wire. Aborting matches ids by their beginning, so no live id may be
            the beginning of another.
        salt: keeps prefix-cache entries of other policy versions out; joined with the user's.
        stream: whether frames are wanted.

    Raises:
        UnsupportedError: an option sets what genapi sets itself.
    """
    options, sampling = options_of(request, Options(), engine="SGLang"), request.sampling
    salts = [part for part in (salt, request.cache_salt) if part is not None]
    scored = sampling.logprobs is not None or sampling.prompt_logprobs is not None
    body: dict[str, Any] = {
        "rid": wire_id,
        "input_ids": TokenIds(request.prompt_token_ids or ()).tolist(),
        "sampling_params": _sampling(sampling, options),
        "return_logprob": scored,
        "logprob_start_len": -1 if sampling.prompt_logprobs is None else 0,
        "top_logprobs_num": sampling.logprobs or 0,
        "return_text_in_logprobs": False,
        "return_prompt_token_ids": True,
        "stream": stream,
        # Where the server schedules by priority, a request without one comes last.
        "priority": request.priority,
    }
    if salts:
        # READ 0.5.23 radix_cache.py: part of every key of the cache, and of its storage's hashes.
        body["extra_key"] = "|".join(salts)
    if request.lora is not None:
        body["lora_path"] = request.lora
    if options.routed_dp_rank is not None:
        body["routed_dp_rank"] = options.routed_dp_rank
    add_fields(body, options.body, of="body")
    return HTTPCall(method="POST", path=PATH, body=json_body(body), grant="data")


def abort(wire_ids: Sequence[str]) -> HTTPCall:
    """The call that ends this generation.

    Raises:
        UnsupportedError: not exactly one id; SGLang takes one, and all for none.
    """
    if len(wire_ids) != 1 or not wire_ids[0]:
        raise UnsupportedError(f"SGLang aborts one request a call, not {len(wire_ids)}")
    body = json_body({"rid": wire_ids[0], "abort_all": False})
    return HTTPCall(method="POST", path=ABORT_PATH, body=body, grant="admin")


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
    accumulator = Accumulator(context)
    return decode_whole(reply, accumulator, _reports(context, accumulator))


def stream_decoder(context: DecodeContext) -> FrameStream:
    """A decoder for one streamed reply, by the same accumulation as a unary one."""
    accumulator = Accumulator(context)
    return FrameStream(accumulator, _reports(context, accumulator))


def _reports(context: DecodeContext, accumulator: Accumulator) -> Reported:
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


def _sampling(sampling: SamplingParams, options: Options) -> dict[str, Any]:
    wire: dict[str, Any] = {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k > 0 else -1,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": sampling.min_tokens,
        "ignore_eos": sampling.ignore_eos,
        "sampling_seed": sampling.seed,
        "stop": list(sampling.stop),
        "stop_token_ids": TokenIds(sampling.stop_token_ids).tolist(),
        "stop_regex": list(options.stop_regex),
        "logit_bias": sampling.logit_bias or None,
        "json_schema": None,
        "regex": None,
        "ebnf": None,
        "structural_tag": options.structural_tag,
        "no_stop_trim": options.no_stop_trim,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
    }
    if sampling.structured_output is not None:
        wire |= _structured(sampling.structured_output)
    add_fields(wire, options.sampling_params, of="sampling_params")
    return wire


def _structured(wanted: StructuredOutput) -> dict[str, Any]:
    if wanted.json_schema is not None:
        return {"json_schema": json_body(wanted.json_schema).decode()}
    if wanted.regex is not None:
        return {"regex": wanted.regex}
    return {"ebnf": wanted.grammar}
