"""`Tokens`: the provider that the entry point names."""

from collections.abc import Iterable, Sequence

from genapi import GenerateRequest, GenerateResponse
from genapi.errors import ConfigError, UnsupportedError
from genapi.providers.base import (
    Admin,
    Capabilities,
    DecodeContext,
    Directory,
    Pin,
    StreamDecoder,
    WorkerFacts,
)
from genapi.wire.flow import Flow, call, nothing_to_ask
from genapi.wire.http import HTTPCall, HTTPReply, json_body

from . import generate
from .admin import BACKEND, TokensAdmin

__all__ = ("Tokens",)


class Tokens:
    """A token server; see `genapi.providers.base.Provider`."""

    name = "tokens"
    directory: Directory | None = None
    _admin: Admin = TokensAdmin()

    def administer(self, facts: WorkerFacts | None, *, files: bool = False) -> Admin:
        """The administration of every token server."""
        del facts
        if files:
            raise UnsupportedError("a token server loads no files: use genapi.weights.Memory()")
        return self._admin

    def check(self, request: GenerateRequest, capabilities: Capabilities | None) -> None:
        """Raise before any I/O what cannot be asked."""
        generate.check(request, capabilities)

    def attests(self, request: GenerateRequest) -> bool:
        """Every reply names versions."""
        del request
        return True

    def render(
        self, request: GenerateRequest, *, model: str | None, capabilities: Iterable[Capabilities]
    ) -> Flow[GenerateRequest]:
        """The request as it is: there are no texts to make ids of."""
        del model, capabilities
        return nothing_to_ask(request)

    def refine(
        self, response: GenerateResponse, request: GenerateRequest, *, model: str | None
    ) -> Flow[GenerateResponse]:
        """The reply as it is."""
        del request, model
        return nothing_to_ask(response)

    def encode(
        self,
        request: GenerateRequest,
        *,
        wire_id: str,
        model: str | None,
        salt: str | None,
        stream: bool,
        pin: Pin | None = None,
    ) -> HTTPCall:
        """The call that asks for this generation; there is one model."""
        del model, pin
        return generate.encode(request, wire_id=wire_id, salt=salt, stream=stream)

    def decode(self, reply: HTTPReply, context: DecodeContext) -> GenerateResponse:
        """The reply as a value."""
        return generate.decode(reply, context)

    def stream_decoder(self, context: DecodeContext) -> StreamDecoder:
        """A decoder for one streamed reply."""
        return generate.stream_decoder(context)

    def raise_for_status(self, reply: HTTPReply, context: DecodeContext) -> None:
        """Raise the typed error that a non-2xx answer is."""
        del context
        if not reply.ok:
            raise generate.error_of(reply)

    def abort(self, wire_ids: Sequence[str], *, outputs: int = 1) -> tuple[HTTPCall, ...]:
        """The call that ends these generations, of one output each."""
        del outputs
        body = json_body({"ids": list(wire_ids)})
        return (HTTPCall(method="POST", path="/cancel", body=body),)

    def inspect(self, known: WorkerFacts | None = None) -> Flow[WorkerFacts]:
        """What this worker is: one call tells everything."""
        del known
        reply = yield from call(HTTPCall(method="GET", path="/state"))
        if reply.status in (401, 503):
            raise generate.error_of(reply)
        state = reply.json_object() if reply.ok else {}
        if state.get("server") != "tokens/1":
            raise ConfigError(f"no token server at {reply.url}: it answered {reply.status}")
        return WorkerFacts(
            instance=state["life"],
            label=state["label"],
            paused=state["paused"],
            capabilities=Capabilities(
                engine_version=state["server"],
                models=(state["model"],),
                max_model_len=state["context"],
                vocab_size=state["vocabulary"],
                spans=True,
                logprobs_mode="raw",
                weight_backend=BACKEND,
            ),
        )
