"""Generation over `POST /generate`: token ids or a text go in, token ids come out.

The rule of this file: every value that shapes the distribution or the length is sent, also at
its default, so that no default of the server (`--preferred-sampling-params`) can step in.

Several outputs are asked for as a batch of one prompt: to `n` SGLang gives ids of its own, by which
nothing could be aborted.
"""

from typing import Any

from genapi.errors import ConfigError, UnsupportedError
from genapi.providers.sglang.options import Options
from genapi.providers.shapes.options import add_fields
from genapi.types.ids import TokenIds
from genapi.types.request import GenerateRequest, SamplingParams, StructuredOutput
from genapi.wire.http import HTTPCall, json_body

__all__ = ("check_sampling", "encode", "own_sampling", "shared_fields", "wire_ids")

PATH = "/generate"
_SEEDS = range(-(2**63), 2**63)


def check_sampling(sampling: SamplingParams) -> None:
    """Raise what no route of SGLang can be asked.

    Raises:
        UnsupportedError: SGLang has nothing like it.
        ConfigError: a seed is out of range.
    """
    if sampling.ignore_eos and len(sampling.stop_token_ids):
        raise UnsupportedError(
            "with ignore_eos=True SGLang goes on past stop_token_ids as well; leave one of them "
            "out, or forbid the end token by logit_bias"
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


def wire_ids(wire_id: str, outputs: int) -> list[str]:
    """The ids that the outputs of a request have; aborting needs each of them."""
    return [wire_id] if outputs == 1 else [f"{wire_id}_{index}" for index in range(outputs)]


def encode(
    request: GenerateRequest, options: Options, *, wire_id: str, salt: str | None, stream: bool
) -> HTTPCall:
    """The call that asks for this generation; see `generate.encode`."""
    sampling = request.sampling
    scored = sampling.logprobs is not None or sampling.prompt_logprobs is not None
    body: dict[str, Any] = {
        "rid": wire_id,
        "sampling_params": _several(_sampling(sampling, options), sampling),
        "return_logprob": scored,
        "logprob_start_len": -1 if sampling.prompt_logprobs is None else 0,
        "top_logprobs_num": sampling.logprobs or 0,
        "return_text_in_logprobs": False,
        "return_prompt_token_ids": True,
        "stream": stream,
        # Where the server schedules by priority, a request without one comes last.
        "priority": request.priority,
    }
    if request.prompt is not None:
        body["text"] = request.prompt
    else:
        ids = TokenIds(request.prompt_token_ids or ()).tolist()
        body["input_ids"] = ids if sampling.n == 1 else [ids] * sampling.n
    body |= shared_fields(request, options, salt=salt)
    add_fields(body, options.body, of="body")
    return HTTPCall(method="POST", path=PATH, body=json_body(body), grant="data")


def shared_fields(
    request: GenerateRequest, options: Options, *, salt: str | None
) -> dict[str, Any]:
    """The fields that every route of SGLang takes by the same name."""
    salts = [part for part in (salt, request.cache_salt) if part is not None]
    fields: dict[str, Any] = {}
    if salts:
        # READ 0.5.23 radix_cache.py: part of every key of the cache, and of its storage's hashes.
        fields["extra_key"] = "|".join(salts)
    if request.lora is not None:
        fields["lora_path"] = request.lora
    if options.routed_dp_rank is not None:
        fields["routed_dp_rank"] = options.routed_dp_rank
    return fields


def _several(wire: dict[str, Any], sampling: SamplingParams) -> Any:
    # A gateway reads no list here, which only seeds need: one each, or all outputs were the same.
    if sampling.n == 1 or sampling.seed is None:
        return wire
    seeds = range(sampling.seed, sampling.seed + sampling.n)
    return [{**wire, "sampling_seed": _wrapped(seed)} for seed in seeds]


def _wrapped(seed: int) -> int:
    return seed if seed in _SEEDS else seed - 2**64


def _sampling(sampling: SamplingParams, options: Options) -> dict[str, Any]:
    wire: dict[str, Any] = {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": sampling.min_tokens,
        "sampling_seed": sampling.seed,
        "stop": list(sampling.stop),
        "logit_bias": sampling.logit_bias or None,
        "structural_tag": options.structural_tag,
        "spaces_between_special_tokens": True,
        **own_sampling(sampling, options),
    }
    add_fields(wire, options.sampling_params, of="sampling_params")
    return wire


def own_sampling(sampling: SamplingParams, options: Options) -> dict[str, Any]:
    """The sampling fields beyond OpenAI's, which every route takes by the same name."""
    wire: dict[str, Any] = {
        "top_k": sampling.top_k if sampling.top_k > 0 else -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": TokenIds(sampling.stop_token_ids).tolist(),
        "stop_regex": list(options.stop_regex),
        "no_stop_trim": options.no_stop_trim,
        "skip_special_tokens": True,
        "json_schema": None,
        "regex": None,
        "ebnf": None,
    }
    if sampling.structured_output is not None:
        wire |= _structured(sampling.structured_output)
    return wire


def _structured(wanted: StructuredOutput) -> dict[str, Any]:
    if wanted.json_schema is not None:
        return {"json_schema": json_body(wanted.json_schema).decode()}
    if wanted.regex is not None:
        return {"regex": wanted.regex}
    return {"ebnf": wanted.grammar}
