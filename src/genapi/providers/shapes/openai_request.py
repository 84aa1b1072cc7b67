"""Fields of requests to `/v1/completions` and `/v1/chat/completions` that engines share.

The rule of this file: every value that shapes the distribution or the length is sent, also at its
default, so that no default of the server can step in. What only one engine takes is the provider's.
"""

from typing import Any

from genapi.types.ids import TokenIds
from genapi.types.request import GenerateRequest, SamplingParams

__all__ = ("CHAT_PATH", "COMPLETIONS_PATH", "path_of", "prompt_fields", "sampling_fields")

COMPLETIONS_PATH = "/v1/completions"
CHAT_PATH = "/v1/chat/completions"


def path_of(request: GenerateRequest) -> str:
    """The route that takes such a prompt."""
    return COMPLETIONS_PATH if request.messages is None else CHAT_PATH


def prompt_fields(request: GenerateRequest) -> dict[str, Any]:
    """The prompt, in the form it was given."""
    if request.messages is not None:
        fields: dict[str, Any] = {"messages": request.messages}
        if request.tools:
            fields["tools"] = request.tools
        return fields
    if request.prompt is not None:
        return {"prompt": request.prompt}
    return {"prompt": TokenIds(request.prompt_token_ids or ()).tolist()}


def sampling_fields(sampling: SamplingParams, *, chat: bool, stream: bool) -> dict[str, Any]:
    """The fields that OpenAI's routes name, scores and stream included."""
    fields: dict[str, Any] = {
        "n": sampling.n,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "seed": sampling.seed,
        "stop": list(sampling.stop),
    }
    if sampling.logit_bias:
        fields["logit_bias"] = {str(k): v for k, v in sampling.logit_bias.items()}
    if chat:
        fields["logprobs"] = sampling.logprobs is not None
        if sampling.logprobs is not None:
            fields["top_logprobs"] = sampling.logprobs
    elif sampling.logprobs is not None:
        fields["logprobs"] = sampling.logprobs
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return fields
