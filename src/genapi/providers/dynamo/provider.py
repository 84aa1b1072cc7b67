"""`Dynamo`: the provider that the registry names."""

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
from genapi.providers.dynamo import discovery, generate
from genapi.providers.dynamo.admin import admin_of
from genapi.providers.dynamo.errors import error_of
from genapi.providers.dynamo.files import files_of
from genapi.types.request import GenerateRequest
from genapi.types.response import GenerateResponse
from genapi.wire.flow import Flow, nothing_to_ask
from genapi.wire.http import HTTPCall, HTTPReply

__all__ = ("Dynamo",)


class Dynamo:
    """Dynamo 1.6: requests through a frontend; see `providers.base.Provider`."""

    name = "dynamo"
    directory: Directory | None = discovery.DynamoDirectory()

    def administer(self, facts: WorkerFacts | None, *, files: bool = False) -> Admin:
        """The administration of a worker, by the routes that it advertises."""
        return files_of(facts) if files else admin_of(facts)

    def check(self, request: GenerateRequest, capabilities: Capabilities | None) -> None:
        """Raise before any I/O what cannot be asked."""
        generate.check(request, capabilities)

    def attests(self, request: GenerateRequest) -> bool:
        """No reply names versions."""
        del request
        return False

    def render(
        self, request: GenerateRequest, *, model: str | None, capabilities: Iterable[Capabilities]
    ) -> Flow[GenerateRequest]:
        """The request as it is: the frontend takes texts and chats."""
        del model, capabilities
        return nothing_to_ask(request)

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
        return generate.encode(
            request, wire_id=wire_id, model=model, salt=salt, stream=stream, pin=pin
        )

    def decode(self, reply: HTTPReply, context: DecodeContext) -> GenerateResponse:
        """The reply as a value."""
        return generate.decode(reply, context)

    def stream_decoder(self, context: DecodeContext) -> StreamDecoder:
        """A decoder for one streamed reply."""
        return generate.stream_decoder(context)

    def raise_for_status(self, reply: HTTPReply, context: DecodeContext) -> None:
        """Raise the typed error that a non-2xx answer is."""
        if not reply.ok:
            raise error_of(reply, now=context.now, pinned=context.worker)

    def abort(self, wire_ids: Sequence[str], *, outputs: int = 1) -> tuple[HTTPCall, ...]:
        """There is no such call: workers know a request by an id that the frontend makes."""
        del wire_ids, outputs
        return ()

    def inspect(self, known: WorkerFacts | None = None) -> Flow[WorkerFacts]:
        """What a worker says itself besides what the list says of it."""
        return discovery.inspect(known if known is not None else WorkerFacts(instance=None))
