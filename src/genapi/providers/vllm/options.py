"""Request options that only vLLM has."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from genapi.types.ids import IdSequence
from genapi.types.request import ProviderOptions

__all__ = ("Options",)


class Options(ProviderOptions):
    """What vLLM can be asked for besides `SamplingParams`.

    Attributes:
        allowed_token_ids: only these ids may be generated; None = all.
        text: also return the generated text; logprobs of other candidates then have no ids, so
            `SamplingParams.logprobs` may not exceed 0.
        include_stop_str_in_output: keep the matched stop text in `text`.
        skip_reading_prefix_cache: compute the whole prompt anew; None = the server decides.
        thinking_token_budget: most tokens of reasoning; None = no bound.
        data_parallel_rank: which internal data-parallel rank serves the request; None = any.
        kv_transfer_params: handed to the server's KV connector (prefill/decode).
        extra_args: handed to the server's own sampling plugins.
        body: further top-level fields of the request body. vLLM ignores names that it does not
            know without a word, so check the reply.
    """

    provider: Literal["vllm"] = "vllm"
    allowed_token_ids: IdSequence | None = None
    text: bool = False
    include_stop_str_in_output: bool = False
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, strict=True)] | None = None
    data_parallel_rank: Annotated[int, Field(ge=0, strict=True)] | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    extra_args: Mapping[str, Any] | None = None
    body: Mapping[str, Any] = Field(default_factory=dict)
