"""Chat prompts over the native route: the server makes ids of them by `/v1/tokenize`.

A gateway does not do that: behind one a chat goes to the chat route.
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
    """The request as it is encoded: of a certain route, and a chat on the native one with ids.

    Raises:
        UnsupportedError: only the chat route can serve it, and that cannot be asked so.
        ProviderError: the server refused the prompt; also its subclasses.
        ConfigError: it has no such route.
        ReplyError: it answered no ids.
    """
    if request.messages is None:
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
    if model is not None:
        body["model"] = model
    add_fields(body, options.chat, of="chat")
    asked = HTTPCall(method="POST", path=TOKENIZE_PATH, body=json_body(body), grant="data")
    reply = yield from call(asked)
    if reply.status in _OF_A_GATEWAY and options.route == "auto":
        openai.check(second, options)
        return second
    if not reply.ok:
        raise error_of(reply, now=0.0)
    return request.model_copy(
        update={
            "messages": None,
            "tools": (),
            "prompt_token_ids": ids_in(reply, "tokens"),
            "options": settled,
        }
    )
