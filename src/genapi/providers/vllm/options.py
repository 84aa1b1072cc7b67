"""Request options that only vLLM has."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from genapi.types.ids import IdSequence
from genapi.types.request import ProviderOptions

__all__ = ("Options", "Rendered")


class Options(ProviderOptions):
    """What vLLM can be asked for besides `SamplingParams`.

    Attributes:
        route: how a generation is asked for. `native` takes tokens and attests versions: text and
            messages are made ids by the server first. `openai` is `/v1/completions` or
            `/v1/chat/completions`, whose replies name no version; `auto` is `native` where the
            server has it.
        chat: further fields for the chat template and what reads its reply, as vLLM's chat route
            names them (`tool_choice`, `chat_template_kwargs`, ...); with `messages`.
        allowed_token_ids: only these ids may be generated; None = all.
        text: also return the generated text; logprobs of other candidates then have no ids on the
            native route, so `SamplingParams.logprobs` may not exceed 0 there.
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
    route: Literal["auto", "native", "openai"] = "auto"
    chat: Mapping[str, Any] = Field(default_factory=dict)
    allowed_token_ids: IdSequence | None = None
    text: bool = False
    include_stop_str_in_output: bool = False
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, strict=True)] | None = None
    data_parallel_rank: Annotated[int, Field(ge=0, strict=True)] | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    extra_args: Mapping[str, Any] | None = None
    body: Mapping[str, Any] = Field(default_factory=dict)


class Rendered(Options):
    """The options of a request whose prompt the server made ids of; genapi's own.

    Attributes:
        sampling_params: what the server's chat template asks of the draw.
        chat_request: the chat request that was rendered, where its reply has to be read as one.
    """

    sampling_params: Mapping[str, Any] = Field(default_factory=dict)
    chat_request: Mapping[str, Any] | None = None
