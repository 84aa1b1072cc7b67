"""A Dynamo frontend's reading of generation requests, with its words where they were recorded.

Fields that the frontend does not know are refused, others are taken and dropped: both as it does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .calls import Call
from .dynamo_shapes import bad_request, nested, read_json, refused
from .sampling import Sampling

__all__ = ("Generate", "read_completions", "read_inference")

_NVEXT = (
    "greed_sampling",
    "use_raw_prompt",
    "annotations",
    "backend_instance_id",
    "token_data",
    "max_thinking_tokens",
    "cache_salt",
    "extra_fields",
    "metadata_upload",
    "prefill_worker_id",
    "decode_worker_id",
    "dp_rank",
    "prefill_dp_rank",
    "agent_hints",
    "request_timestamp_ms",
    "routing_constraints",
    "router",
)
_KNOWN = frozenset(
    [
        "model",
        "prompt",
        "max_tokens",
        "min_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "seed",
        "stop",
        "frequency_penalty",
        "repetition_penalty",
        "stop_token_ids",
        "ignore_eos",
        "n",
        "logit_bias",
        "logprobs",
        "suffix",
        "prompt_logprobs",
        "skip_special_tokens",
        "guided_json",
        "guided_regex",
        "guided_grammar",
        "guided_choice",
        "cache_salt",
        "include_stop_str_in_output",
        "echo",
        "user",
        "return_tokens_as_token_ids",
        "best_of",
        "nvext",
        "allowed_token_ids",
        "metadata",
        "stream",
        "stream_options",
    ]
)
_DESERIALIZE = "Failed to deserialize the JSON body into the target type"
_MAX_TEMPERATURE = _MAX_REPETITION = 2.0
_DEFAULT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Generate:
    """A checked request for one output."""

    prompt: tuple[int, ...]
    sampling: Sampling
    stream: bool = False
    include_usage: bool = False
    salt: str | None = None
    fields: frozenset[str] = frozenset()
    decode: int | None = None
    """The worker that has to serve it."""
    prefill: int | None = None

    def goes_on(self, output: list[int]) -> "Generate":
        """What is left of it, for another worker, after so much output."""
        left = self.sampling.max_tokens - len(output)
        sampling = replace(self.sampling, max_tokens=left, prompt_logprobs=None)
        return replace(self, prompt=(*self.prompt, *output), sampling=sampling)


def read_completions(call: Call, *, models: Mapping[str, Any], vocab: int, room: int) -> Generate:
    """Check a call to `/v1/completions`.

    Raises:
        Refusal: It is wrong; the reply says how.
    """
    body = read_json(call)
    if body.get("model") not in models:
        raise refused(404, "Model not found")
    unknown = [name for name in body if name not in _KNOWN]
    if unknown:
        names = ", ".join(f"`{name}`" for name in unknown)
        raise bad_request(f"Validation: Unsupported parameter(s): {names}")
    nvext = body.get("nvext") or {}
    for name in nvext:
        if name not in _NVEXT:
            known = ", ".join(f"`{known}`" for known in _NVEXT)
            where = f"at line 1 column {call.body.index(name.encode()) + len(name) + 1}"
            message = f"unknown field `{name}`, expected one of {known} {where}"
            raise bad_request(f"{_DESERIALIZE}: {message}")
    stream = bool(body.get("stream"))
    options = body.get("stream_options")
    if options is not None and not stream:
        raise bad_request(
            "Validation: The 'stream_options' field is only allowed when 'stream' is set to true."
        )
    fields = frozenset(nvext.get("extra_fields") or ())
    if "completion_token_ids" in fields and (body.get("n") or 1) != 1:
        raise bad_request(
            'Validation: `nvext.extra_fields=["completion_token_ids"]` requires exactly one '
            "generated choice"
        )
    prompt = _prompt(nvext.get("token_data") or body.get("prompt"), vocab)
    sampling = _sampling(body, room=room - len(prompt))
    pinned = nvext.get("backend_instance_id")
    return Generate(
        prompt=prompt,
        sampling=sampling,
        stream=stream,
        include_usage=bool((options or {}).get("include_usage")),
        salt=nvext.get("cache_salt") or body.get("cache_salt"),
        fields=fields,
        decode=nvext.get("decode_worker_id", pinned),
        prefill=nvext.get("prefill_worker_id", pinned),
    )


def read_inference(call: Call, *, vocab: int, room: int) -> tuple[str | None, Generate]:
    """Check a call to `/inference/v1/generate`; returns the id it names, too.

    Raises:
        Refusal: It is wrong, or wants a stream.
    """
    body = read_json(call)
    if body.get("stream"):
        raise nested(
            501,
            "streaming (stream=true) is not implemented for /inference/v1/generate yet",
            "not_implemented",
        )
    prompt = _prompt(body.get("token_ids"), vocab)
    params = body.get("sampling_params") or {}
    sampling = _sampling(params, room=room - len(prompt))
    return body.get("request_id"), Generate(prompt, sampling, salt=body.get("cache_salt"))


def _prompt(prompt: object, vocab: int) -> tuple[int, ...]:
    """The ids of a prompt; of a text, one for each word that is a number."""
    if isinstance(prompt, str):
        prompt = [int(word) for word in prompt.split() if word.isdecimal()]
    if not isinstance(prompt, list) or not prompt:
        raise bad_request("Validation: Prompt string array cannot be empty")
    if any(type(token) is not int or not 0 <= token < vocab for token in prompt):
        raise bad_request("Invalid request")
    return tuple(prompt)


def _sampling(params: Mapping[str, Any], *, room: int) -> Sampling:
    asked = params.get("max_tokens")
    if asked is not None and asked < 1:
        raise bad_request(f"Validation: Max tokens must be greater than 0, got {asked}")
    temperature = params.get("temperature")
    if temperature is not None and not 0 <= temperature <= _MAX_TEMPERATURE:
        raise bad_request(f"Validation: Temperature must be between 0 and 2, got {temperature}")
    repetition = params.get("repetition_penalty") or 1.0
    if not 0 < repetition <= _MAX_REPETITION:
        raise bad_request(
            f"Validation: Repetition penalty must be between 0 and 2, got {repetition}"
        )
    ignores = bool(params.get("ignore_eos"))
    stop = params.get("stop") or ()
    return Sampling(
        max_tokens=max(1, min(room, asked if asked is not None else _DEFAULT_TOKENS)),
        temperature=1.0 if temperature is None else float(temperature),
        top_p=float(params.get("top_p") or 1.0),
        top_k=max(int(params.get("top_k") or 0), 0),
        min_p=float(params.get("min_p") or 0.0),
        seed=params.get("seed"),
        # Both are dropped when the end token is to be ignored.
        stop=() if ignores else (stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=() if ignores else tuple(params.get("stop_token_ids") or ()),
        include_stop_str_in_output=bool(params.get("include_stop_str_in_output")),
        ignore_eos=ignores,
        min_tokens=int(params.get("min_tokens") or 0),
        logprobs=params.get("logprobs"),
        prompt_logprobs=params.get("prompt_logprobs"),
        presence_penalty=float(params.get("presence_penalty") or 0.0),
        frequency_penalty=float(params.get("frequency_penalty") or 0.0),
        repetition_penalty=float(repetition),
    )
