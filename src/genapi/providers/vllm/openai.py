"""Generation over `/v1/completions` and `/v1/chat/completions`: vLLM's other routes.

They take prompts in every form and name ids where asked to (`return_token_ids`), never a version.
The rule of this file: candidates are asked for as ids (`return_tokens_as_token_ids`), since their
texts do not tell them apart.
"""

from typing import Any

from genapi.errors import UnsupportedError
from genapi.providers.base import DecodeContext
from genapi.providers.shapes.openai import OpenAIReply
from genapi.providers.shapes.openai_request import path_of, prompt_fields, sampling_fields
from genapi.providers.shapes.options import add_fields
from genapi.providers.vllm.native import own_sampling, post, shared_fields
from genapi.providers.vllm.options import Options
from genapi.providers.vllm.remarks import remark_on
from genapi.providers.vllm.reply import NO_SCORE
from genapi.types.request import GenerateRequest
from genapi.types.response import GenerateResponse
from genapi.wire.http import HTTPCall

__all__ = ("Accumulator", "body_of", "check", "encode")


def check(request: GenerateRequest, options: Options) -> None:
    """Raise what these routes cannot be asked.

    Raises:
        UnsupportedError: they have no field for it.
    """
    del request
    if options.skip_reading_prefix_cache is not None:
        raise UnsupportedError(
            "vLLM's OpenAI routes have no skip_reading_prefix_cache; use a cache_salt of its own, "
            "or the native route (Options(route='native'), vLLM with --enable-scale-out)"
        )


def body_of(
    request: GenerateRequest, options: Options, *, model: str | None, salt: str | None, stream: bool
) -> dict[str, Any]:
    """The body of a request in the form of its prompt, without its id."""
    chat = request.messages is not None
    body = prompt_fields(request)
    body |= sampling_fields(request.sampling, chat=chat, stream=stream)
    body |= own_sampling(request.sampling, options)
    body |= shared_fields(request, options, model=model, salt=salt)
    if not chat:
        body["add_special_tokens"] = request.prompt is not None
    if options.extra_args is not None:
        body["vllm_xargs"] = options.extra_args
    add_fields(body, options.chat, of="chat")
    return body


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
    body = body_of(request, options, model=model, salt=salt, stream=stream)
    body |= {
        "request_id": wire_id,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    add_fields(body, options.body, of="body")
    return post(path_of(request), body, options)


class Accumulator(OpenAIReply):
    """Takes in the bodies of one reply: a single one, or every frame of a stream."""

    def __init__(self, context: DecodeContext) -> None:
        super().__init__(context, hole=NO_SCORE)

    def remark(self, response: GenerateResponse) -> None:
        """Say what the reply lacks."""
        remark_on(response, self.request, remark=self.context.remark)
