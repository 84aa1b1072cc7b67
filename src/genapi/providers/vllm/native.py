"""Generation over `POST /inference/v1/generate`: token ids go in, token ids come out.

The rule of this file: every value that shapes the distribution or the length is sent, also at
its default, so that no default of the server (its `generation_config.json`) can step in.
"""

from collections.abc import Mapping
from typing import Any

from genapi.errors import UnsupportedError
from genapi.providers.shapes.options import add_fields
from genapi.providers.vllm.options import Options, Rendered
from genapi.types.ids import TokenIds
from genapi.types.request import GenerateRequest, SamplingParams, StructuredOutput
from genapi.wire.http import HTTPCall, json_body

__all__ = ("check", "encode", "own_sampling", "post", "shared_fields")

PATH = "/inference/v1/generate"

_NOTHING: Mapping[str, str] = {}


def check(request: GenerateRequest, options: Options) -> None:
    """Raise what this route cannot be asked.

    Raises:
        UnsupportedError: the route cannot do it.
    """
    if options.text and request.sampling.logprobs:
        raise UnsupportedError(
            "with Options(text=True) vLLM names candidates by text, not by id; use logprobs=0"
        )


def encode(
    request: GenerateRequest,
    options: Options,
    *,
    wire_id: str,
    model: str | None,
    salt: str | None,
    stream: bool,
) -> HTTPCall:
    """The call that asks for this generation; see `generate.encode`."""
    body: dict[str, Any] = {
        "request_id": wire_id,
        "token_ids": TokenIds(request.prompt_token_ids or ()).tolist(),
        "sampling_params": _sampling(request.sampling, options),
        "return_token_ids": True,
    }
    body |= shared_fields(request, options, model=model, salt=salt)
    if stream:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    if options.text:
        body["output_mode"] = "text"
    add_fields(body, options.body, of="body")
    return post(PATH, body, options)


def shared_fields(
    request: GenerateRequest, options: Options, *, model: str | None, salt: str | None
) -> dict[str, Any]:
    """The fields that every route of vLLM takes by the same name."""
    name = request.lora or model
    salts = [part for part in (salt, request.cache_salt) if part is not None]
    fields: dict[str, Any] = {}
    if name is not None:
        fields["model"] = name
    if salts:
        fields["cache_salt"] = "|".join(salts)
    if request.priority != 0:
        fields["priority"] = request.priority
    if options.kv_transfer_params is not None:
        fields["kv_transfer_params"] = options.kv_transfer_params
    return fields


def post(path: str, body: Mapping[str, Any], options: Options) -> HTTPCall:
    """The call that asks for a generation."""
    rank = options.data_parallel_rank
    headers = _NOTHING if rank is None else {"X-data-parallel-rank": str(rank)}
    return HTTPCall(method="POST", path=path, headers=headers, body=json_body(body))


def _sampling(sampling: SamplingParams, options: Options) -> dict[str, Any]:
    wire: dict[str, Any] = {
        "n": sampling.n,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "max_tokens": sampling.max_tokens,
        "seed": sampling.seed,
        "stop": sampling.stop,
        "logprobs": sampling.logprobs,
        **own_sampling(sampling, options),
    }
    if sampling.logit_bias:
        wire["logit_bias"] = sampling.logit_bias
    for name in ("skip_reading_prefix_cache", "extra_args"):
        value = getattr(options, name)
        if value is not None:
            wire[name] = value
    if isinstance(options, Rendered):
        wire |= options.sampling_params
    return wire


def own_sampling(sampling: SamplingParams, options: Options) -> dict[str, Any]:
    """The sampling fields beyond OpenAI's, which every route of vLLM takes by the same name."""
    wire: dict[str, Any] = {
        "top_k": max(sampling.top_k, 0),
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "min_tokens": sampling.min_tokens,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": TokenIds(sampling.stop_token_ids).tolist(),
        "bad_words": sampling.bad_words,
        "prompt_logprobs": sampling.prompt_logprobs,
        "include_stop_str_in_output": options.include_stop_str_in_output,
    }
    if sampling.structured_output is not None:
        wire["structured_outputs"] = _structured(sampling.structured_output)
    if options.allowed_token_ids is not None:
        wire["allowed_token_ids"] = TokenIds(options.allowed_token_ids).tolist()
    if options.thinking_token_budget is not None:
        wire["thinking_token_budget"] = options.thinking_token_budget
    return wire


def _structured(wanted: StructuredOutput) -> dict[str, Any]:
    fields = {
        "json": wanted.json_schema,
        "regex": wanted.regex,
        "choice": wanted.choice,
        "grammar": wanted.grammar,
    }
    return {name: value for name, value in fields.items() if value is not None}
