"""`VLLM`: the provider that the registry names."""

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
from genapi.providers.vllm import discovery, generate, render
from genapi.providers.vllm.admin import VLLMAdmin
from genapi.providers.vllm.errors import error_of
from genapi.providers.vllm.files import VLLMFiles
from genapi.types.request import GenerateRequest
from genapi.types.response import GenerateResponse
from genapi.wire.flow import Flow
from genapi.wire.http import HTTPCall, HTTPReply

__all__ = ("VLLM",)


class VLLM:
    """vLLM 0.31 to 0.33 over its own routes; see `providers.base.Provider`."""

    name = "vllm"
    directory: Directory | None = None
    _admin: Admin = VLLMAdmin()
    _files: Admin = VLLMFiles()

    def administer(self, facts: WorkerFacts | None, *, files: bool = False) -> Admin:
        """The administration of every VLLM server."""
        del facts
        return self._files if files else self._admin

    def check(self, request: GenerateRequest, capabilities: Capabilities | None) -> None:
        """Raise before any I/O what cannot be asked."""
        generate.check(request, capabilities)

    def attests(self, request: GenerateRequest) -> bool:
        """Whether a reply to such a request names versions."""
        return generate.attests(request)

    def render(
        self, request: GenerateRequest, *, model: str | None, capabilities: Iterable[Capabilities]
    ) -> Flow[GenerateRequest]:
        """The request as it is encoded."""
        return render.render(request, model=model, capabilities=capabilities)

    def refine(
        self, response: GenerateResponse, request: GenerateRequest, *, model: str | None
    ) -> Flow[GenerateResponse]:
        """The reply with what the server makes of it."""
        return render.refine(response, request, model=model)

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
            raise error_of(reply, now=context.now, lora=context.request.lora)

    def abort(self, wire_ids: Sequence[str], *, outputs: int = 1) -> tuple[HTTPCall, ...]:
        """The call that ends these generations, whatever number of outputs they have."""
        del outputs
        return (generate.abort(wire_ids),)

    def inspect(self, known: WorkerFacts | None = None) -> Flow[WorkerFacts]:
        """What this worker is and can do."""
        return discovery.inspect(known)
