"""Generation over `/v1/completions` and `/v1/chat/completions`: SGLang's second path.

The rule of this file: ids, scores and versions come from `meta_info` where a reply has it, which a
chat reply in one piece does; a stream of completions has ids and names no version.
"""

from collections.abc import Sequence

import msgspec

from genapi.errors import ReplyError, UnsupportedError
from genapi.providers.base import DecodeContext
from genapi.providers.sglang.frames import MetaInfo, parse_meta
from genapi.providers.sglang.native import own_sampling, shared_fields
from genapi.providers.sglang.options import Options
from genapi.providers.sglang.remarks import remark_on
from genapi.providers.sglang.reply import keep_meta, stop_reason
from genapi.providers.shapes.choices import NULL, Output
from genapi.providers.shapes.openai import Body, Choice, OpenAIReply
from genapi.providers.shapes.openai_request import path_of, prompt_fields, sampling_fields
from genapi.providers.shapes.options import add_fields
from genapi.providers.shapes.spans import WireSpan
from genapi.types.request import GenerateRequest
from genapi.types.response import GenerateResponse, Usage
from genapi.wire.http import HTTPCall, json_body

__all__ = ("Accumulator", "check", "encode")


class _Metadata(msgspec.Struct):
    """What a reply in one piece says of the weights; with one output, of its tokens."""

    weight_versions: list[WireSpan] | None = None


_metadata = msgspec.json.Decoder(_Metadata)


def check(request: GenerateRequest, options: Options) -> None:
    """Raise what these routes cannot be asked.

    Raises:
        UnsupportedError: they have no field for it.
    """
    route = "SGLang's OpenAI routes"
    if request.sampling.n > 1:
        raise UnsupportedError(
            f"n={request.sampling.n}: {route} give each of several outputs an id of its own, so "
            f"that none could be aborted; send {request.sampling.n} requests with n=1, or use "
            "Options(route='native')"
        )
    if request.sampling.prompt_logprobs is not None:
        raise UnsupportedError(
            f"{route} do not score prompts by id; use Options(route='native') for prompt_logprobs"
        )
    for name in ("structural_tag", "sampling_params"):
        if getattr(options, name):
            raise UnsupportedError(f"{route} have no {name}; use Options(route='native')")


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
    chat = request.messages is not None
    if chat and stream:
        raise UnsupportedError(
            "SGLang's chat streams name no token ids; ask with generate, or use "
            "Options(route='native'), which streams the text as it is"
        )
    sampling = request.sampling
    body = prompt_fields(request)
    body |= sampling_fields(sampling, chat=chat, stream=stream)
    body |= own_sampling(sampling, options)
    body |= shared_fields(request, options, salt=salt)
    body |= {
        "rid": wire_id,
        "min_tokens": sampling.min_tokens,
        "priority": request.priority,
        "return_token_ids": True,
    }
    if model is not None:
        body["model"] = model
    if chat:
        body |= {"return_prompt_token_ids": True, "return_meta_info": True}
    add_fields(body, options.chat, of="chat")
    add_fields(body, options.body, of="body")
    return HTTPCall(method="POST", path=path_of(request), body=json_body(body), grant="data")


class Accumulator(OpenAIReply):
    """Takes in the bodies of one reply: a single one, or every frame of a stream."""

    def __init__(self, context: DecodeContext) -> None:
        super().__init__(context)
        self._cached: int | None = None

    def remark(self, response: GenerateResponse) -> None:
        """Say what the reply lacks."""
        remark_on(response, self.request, remark=self.context.remark)

    def ids_of(self, body: Body, choice: Choice) -> list[int] | None:
        """The new ids of a choice, which the two routes name differently."""
        del body
        return choice.token_ids if choice.response_token_ids is None else choice.response_token_ids

    def stop_of(self, choice: Choice) -> str | int | None:
        """What of the request's own stops matched."""
        return stop_reason(choice.matched_stop, self.request)

    def scores_of(
        self, output: Output, choice: Choice, ids: Sequence[int]
    ) -> list[float | None] | None:
        """The scores of a frame's tokens, by id where `meta_info` has them."""
        meta = _meta(choice)
        if meta is None or meta.output_token_logprobs is None:
            return super().scores_of(output, choice, ids)
        entries = meta.output_token_logprobs
        if len(entries) != len(ids):
            raise ReplyError(
                f"choice {output.index} has {len(ids)} token ids with {len(entries)} logprobs"
            )
        output.compare([entry[1] for entry in entries], ids)
        if output.with_top:
            for listed in meta.output_top_logprobs or ():
                found = listed or []
                output.add_top([entry[1] for entry in found], [entry[0] for entry in found])
        return [entry[0] for entry in entries]

    def heed_choice(self, output: Output, choice: Choice) -> None:
        """Take in versions and what else `meta_info` says."""
        if isinstance(choice.matched_stop, str | int):
            output.extra["matched"] = choice.matched_stop
        meta = _meta(choice)
        if meta is None:
            return
        self._cached = meta.cached_tokens
        output.spans = meta.weight_versions
        keep_meta(output, meta)

    def heed(self, body: Body) -> None:
        """Take in the versions of a reply in one piece, and what its prompt found in the cache."""
        if body.metadata != NULL:
            try:
                spans = _metadata.decode(body.metadata).weight_versions
            except msgspec.ValidationError as error:
                raise ReplyError(f"metadata breaks its contract: {error}") from None
            for output in self.outputs.values():
                output.spans = output.spans or spans
        if self._cached is not None:
            self.usage = Usage(**{**dict(self.usage), "cached_tokens": self._cached})


def _meta(choice: Choice) -> MetaInfo | None:
    return None if choice.meta_info == NULL else parse_meta(choice.meta_info)
