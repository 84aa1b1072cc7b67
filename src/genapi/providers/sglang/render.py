"""Chats, and texts that several outputs go on from, over the native route: ids by `/v1/tokenize`.

A gateway makes no ids of chats: behind one a chat goes to the chat route. It reads one text, and
several lists of ids (RUN smg 1.13).
The rule of this file: ids are the server's own, so that what is asked, generated and trained on are
the same tokens.
"""

from collections.abc import Iterable
from typing import Any

from genapi.providers.base import Capabilities
from genapi.providers.sglang import openai
from genapi.providers.sglang.errors import error_of
from genapi.providers.sglang.generate import route_of
from genapi.providers.sglang.options import Options
from genapi.providers.shapes.openai_request import prompt_fields
from genapi.providers.shapes.options import add_fields, options_of
from genapi.providers.shapes.tokens import ids_in
from genapi.types.request import GenerateRequest
from genapi.wire.flow import Flow, call
from genapi.wire.http import HTTPCall, json_body

__all__ = ("render",)

TOKENIZE_PATH = "/v1/tokenize"
_OF_A_GATEWAY = (404, 422)
"""What a gateway answers, which makes ids of texts alone (RUN smg 1.13); SGLang does not."""


def render(
    request: GenerateRequest, *, model: str | None, capabilities: Iterable[Capabilities]
) -> Flow[GenerateRequest]:
    """The request as it is encoded: of a certain route, with ids where that takes no other prompt.

    Raises:
        UnsupportedError: only the chat route can serve it, and that cannot be asked so.
        ProviderError: the server refused the prompt; also its subclasses.
        ConfigError: it has no such route.
        ReplyError: it answered no ids.
    """
    if request.prompt_token_ids is not None or (
        request.prompt is not None and request.sampling.n == 1
    ):
        return request
    options, route = (
        options_of(request, Options(), engine="SGLang"),
        route_of(request, capabilities),
    )
    settled = options.model_copy(update={"route": route})
    second = request.model_copy(update={"options": options.model_copy(update={"route": "openai"})})
    if route == "openai":
        return second
    body: dict[str, Any] = prompt_fields(request)
    if request.prompt is not None:
        body["add_special_tokens"] = True
    if model is not None:
        body["model"] = model
    add_fields(body, options.chat, of="chat")
    asked = HTTPCall(method="POST", path=TOKENIZE_PATH, body=json_body(body), grant="data")
    reply = yield from call(asked)
    is_gateway = reply.status in _OF_A_GATEWAY and request.messages is not None
    if is_gateway and options.route == "auto":
        openai.check(second, options)
        return second
    if not reply.ok:
        raise error_of(reply, now=0.0)
    return request.model_copy(
        update={
            "prompt": None,
            "messages": None,
            "tools": (),
            "prompt_token_ids": ids_in(reply, "tokens"),
            "options": settled,
        }
    )
