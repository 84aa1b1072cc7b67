"""Request options that only Dynamo has."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from genapi.types.request import ProviderOptions

__all__ = ("Options",)


class Options(ProviderOptions):
    """What Dynamo can be asked for besides `SamplingParams`.

    What the reply holds beyond the shared fields is in `output.extra`.

    Attributes:
        include_stop_str_in_output: keep the matched stop text in `text`.
        max_thinking_tokens: most tokens of reasoning; None = no bound.
        extra_fields: further fields of `nvext` to ask for; Dynamo ignores names that it does not
            know without a word.
        nvext: further fields of `nvext`; Dynamo refuses names that it does not know.
        body: further top-level fields of the request body; Dynamo refuses most names that it does
            not know, and drops some (`logit_bias`) without a word.
    """

    provider: Literal["dynamo"] = "dynamo"
    include_stop_str_in_output: bool = False
    max_thinking_tokens: Annotated[int, Field(ge=0, strict=True)] | None = None
    extra_fields: tuple[str, ...] = ()
    nvext: Mapping[str, Any] = Field(default_factory=dict)
    body: Mapping[str, Any] = Field(default_factory=dict)
