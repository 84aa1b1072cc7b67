"""Request options that only SGLang has."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from genapi.types.request import ProviderOptions

__all__ = ("Options",)


class Options(ProviderOptions):
    """What SGLang can be asked for besides `SamplingParams`.

    What the reply holds beyond the shared fields is in `output.extra`.

    Attributes:
        route: how a generation is asked for. `native` is `/generate`: text goes as it is, messages
            are made ids by the server first and come back as plain text. `openai` is
            `/v1/completions` or `/v1/chat/completions`, with one output; the latter tells reasoning
            and tool calls apart, but not in a stream. `auto` takes the latter where there are tools
            to call or the server tells reasoning apart, and else `native`.
        chat: further fields for the chat template and what reads its reply, as SGLang's chat route
            names them (`tool_choice`, `chat_template_kwargs`, ...); with `messages`.
        stop_regex: regular expressions that end the output.
        no_stop_trim: keep the matched stop text in `text`.
        structural_tag: constrains the output, in SGLang's notation.
        routed_dp_rank: which data-parallel rank serves the request; None = any.
        sampling_params: further sampling parameters; SGLang refuses names that it does not know.
        body: further top-level fields of the request body. SGLang ignores names that it does not
            know without a word, so check the reply.
    """

    provider: Literal["sglang"] = "sglang"
    route: Literal["auto", "native", "openai"] = "auto"
    chat: Mapping[str, Any] = Field(default_factory=dict)
    stop_regex: tuple[str, ...] = ()
    no_stop_trim: bool = False
    structural_tag: str | None = None
    routed_dp_rank: Annotated[int, Field(ge=0, strict=True)] | None = None
    sampling_params: Mapping[str, Any] = Field(default_factory=dict)
    body: Mapping[str, Any] = Field(default_factory=dict)
