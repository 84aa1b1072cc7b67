"""`SGLang`: the provider that the registry names."""

from collections.abc import Iterable, Sequence

from genapi.providers.base import (
    Admin,
    Capabilities,
    DecodeContext,
    Directory,
    Pin,
    StreamDecoder,
    WorkerFacts,
)
from genapi.providers.sglang import discovery, generate, render
from genapi.providers.sglang.admin import SGLangAdmin
from genapi.providers.sglang.errors import error_of
from genapi.providers.sglang.files import SGLangFiles
from genapi.providers.sglang.gateway import GatewayDirectory
from genapi.types.request import GenerateRequest
from genapi.types.response import GenerateResponse
from genapi.wire.flow import Flow, nothing_to_ask
from genapi.wire.http import HTTPCall, HTTPReply

__all__ = ("SGLang",)


class SGLang:
    """SGLang 0.5.19 to 0.5.23 over its native routes; see `providers.base.Provider`."""

    name = "sglang"
    directory: Directory | None = GatewayDirectory()
    _admin: Admin = SGLangAdmin()
    _files: Admin = SGLangFiles()

    def administer(self, facts: WorkerFacts | None, *, files: bool = False) -> Admin:
        """The administration of every SGLang server."""
        del facts
        return self._files if files else self._admin

    def check(self, request: GenerateRequest, capabilities: Capabilities | None) -> None:
        """Raise before any I/O what cannot be asked."""
        generate.check(request, capabilities)

    def attests(self, request: GenerateRequest) -> bool:
        """Whether every reply to such a request names versions."""
        return generate.attests(request)

    def render(
        self, request: GenerateRequest, *, model: str | None, capabilities: Iterable[Capabilities]
    ) -> Flow[GenerateRequest]:
        """The request as it is encoded."""
        return render.render(request, model=model, capabilities=capabilities)

    def refine(
        self, response: GenerateResponse, request: GenerateRequest, *, model: str | None
    ) -> Flow[GenerateResponse]:
        """The reply as it is: the chat route has read its tokens already."""
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
        """The call that asks for this generation."""
        del pin
        return generate.encode(request, wire_id=wire_id, model=model, salt=salt, stream=stream)

    def decode(self, reply: HTTPReply, context: DecodeContext) -> GenerateResponse:
        """The reply as a value."""
        return generate.decode(reply, context)

    def stream_decoder(self, context: DecodeContext) -> StreamDecoder:
        """A decoder for one streamed reply."""
        return generate.stream_decoder(context)

    def raise_for_status(self, reply: HTTPReply, context: DecodeContext) -> None:
        """Raise the typed error that a non-2xx answer is."""
        if not reply.ok:
            raise error_of(reply, now=context.now)

    def abort(self, wire_ids: Sequence[str], *, outputs: int = 1) -> tuple[HTTPCall, ...]:
        """The calls that end these generations."""
        return generate.abort(wire_ids, outputs=outputs)

    def inspect(self, known: WorkerFacts | None = None) -> Flow[WorkerFacts]:
        """What this worker is and can do: everything in the one round that its instance takes."""
        del known
        return discovery.inspect()
