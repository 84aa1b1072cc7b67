"""Text and chat prompts over the native route: the server makes ids of them, and sense of a reply.

A text goes to `/tokenize`, messages go to `/v1/chat/completions/render`, which applies the chat
template and says what it asks of the draw (constraints of tool calls, say). What a reply to them
means, reasoning and tool calls, `/v1/chat/completions/derender` reads out of its ids.
The rule of this file: ids are the server's own, so that what is asked, generated and trained on are
the same tokens.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from genapi.providers.base import Capabilities
from genapi.providers.shapes.openai import read_messages
from genapi.providers.shapes.options import options_of
from genapi.providers.shapes.tokens import ids_in
from genapi.providers.vllm.errors import error_of
from genapi.providers.vllm.generate import route_of
from genapi.providers.vllm.openai import body_of
from genapi.providers.vllm.options import Options, Rendered
from genapi.types.ids import TokenIds
from genapi.types.request import GenerateRequest
from genapi.types.response import GenerateResponse
from genapi.wire.flow import Flow, call
from genapi.wire.http import HTTPCall, HTTPReply, json_body

__all__ = ("refine", "render")

TOKENIZE_PATH = "/tokenize"
RENDER_PATH = "/v1/chat/completions/render"
DERENDER_PATH = "/v1/chat/completions/derender"

_OF_TEMPLATE = ("structured_outputs", "skip_special_tokens")
"""Sampling parameters that a chat template or its parsers decide."""
_OF_PROMPT = ("features", "reasoning_ended", "reasoning_parser_kwargs")
"""Fields of a rendered request that go with its ids."""


def render(
    request: GenerateRequest, *, model: str | None, capabilities: Iterable[Capabilities]
) -> Flow[GenerateRequest]:
    """The request as it is encoded: of a certain route, and on the native one with ids.

    Raises:
        ProviderError: the server refused the prompt; also its subclasses.
        ConfigError: it has no such route.
        ReplyError: it answered no ids.
    """
    options, route = options_of(request, Options(), engine="vLLM"), route_of(request, capabilities)
    if route == "openai":
        return request.model_copy(update={"options": options.model_copy(update={"route": route})})
    if request.prompt_token_ids is not None:
        return request
    fields = dict(options)
    # Scores of other candidates have no ids where the text comes along.
    fields |= {"route": "native", "text": options.text or not request.sampling.logprobs}
    if request.prompt is not None:
        ids = yield from _tokenized(request, model)
    else:
        body = body_of(request, options, model=model, salt=None, stream=False)
        shown = yield from _asked(RENDER_PATH, body)
        ids = ids_in(shown, "token_ids")
        fields["body"] = {**_given(shown.json_object(), _OF_PROMPT), **options.body}
        drawn = shown.json_object().get("sampling_params")
        fields["sampling_params"] = _drawn(drawn if isinstance(drawn, dict) else {})
        parsed = request.tools or "reasoning_parser_kwargs" in fields["body"]
        if parsed or not fields["text"]:
            fields["chat_request"] = body
    return request.model_copy(
        update={
            "prompt": None,
            "messages": None,
            "tools": (),
            "prompt_token_ids": ids,
            "options": Rendered.model_construct(**fields),
        }
    )


def refine(
    response: GenerateResponse, request: GenerateRequest, *, model: str | None
) -> Flow[GenerateResponse]:
    """The reply with what the server's parsers make of it, where it is one to a chat.

    Args:
        response: the reply.
        request: what `render` returned.
        model: the served model's name.

    Raises:
        ProviderError: the server could not read its own tokens.
        ReplyError: it answered something else.
    """
    options = request.options
    if not isinstance(options, Rendered) or options.chat_request is None:
        return response
    prompt = TokenIds(request.prompt_token_ids or ()).tolist()
    choices = [
        {
            "index": output.index,
            "token_ids": output.token_ids.tolist(),
            "finish_reason": output.finish_raw,
            "stop_reason": output.stop_reason,
        }
        for output in response.outputs
    ]
    body: dict[str, Any] = {
        "generate_response": {"request_id": response.request_id, "choices": choices},
        "prompt_tokens": len(prompt),
        "prompt_token_ids": prompt,
        "chat_request": options.chat_request,
    }
    if model is not None:
        body["model"] = model
    reply = yield from _asked(DERENDER_PATH, body)
    return read_messages(reply, response)


def _tokenized(request: GenerateRequest, model: str | None) -> Flow[TokenIds]:
    body: dict[str, Any] = {"prompt": request.prompt, "add_special_tokens": True}
    if model is not None:
        body["model"] = model
    shown = yield from _asked(TOKENIZE_PATH, body)
    return ids_in(shown, "tokens")


def _asked(path: str, body: Mapping[str, Any]) -> Flow[HTTPReply]:
    reply = yield from call(HTTPCall(method="POST", path=path, body=json_body(body)))
    if not reply.ok:
        raise error_of(reply, now=0.0)
    return reply


def _drawn(params: Mapping[str, Any]) -> dict[str, Any]:
    found = _given(params, _OF_TEMPLATE)
    if isinstance(wanted := found.get("structured_outputs"), dict):
        # What is private to vLLM is dropped, as is everything that is not set.
        found["structured_outputs"] = {
            name: value
            for name, value in wanted.items()
            if value not in (None, False) and not name.startswith("_")
        }
    return found


def _given(fields: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: fields[name] for name in names if fields.get(name) is not None}
