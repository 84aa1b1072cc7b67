"""What a provider is: the interface that every engine's folder implements.

The rule of this file: a provider says what to send and what an answer means. It never sends,
waits, retries, reads a clock or draws a random number; all that comes in as arguments.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from genapi.errors import UnsupportedError
from genapi.publication.evidence import Answer, Seen, Verdict
from genapi.publication.plan import PausePlan
from genapi.publication.receivers import Receivers
from genapi.types.base import Value
from genapi.types.ids import Role, WorkerId
from genapi.types.request import GenerateRequest
from genapi.types.response import GenerateResponse, LogprobsMode, TokenChunk
from genapi.wire.flow import Flow
from genapi.wire.http import HTTPCall, HTTPReply

__all__ = (
    "Admin",
    "Capabilities",
    "DecodeContext",
    "Directory",
    "Listed",
    "Listing",
    "Pin",
    "Provider",
    "StreamDecoder",
    "WorkerFacts",
)


class Capabilities(Value):
    """What one life of a server can do.

    Attributes:
        engine_version: as the server names it.
        models: names it serves.
        max_model_len: longest prompt plus output in tokens; None = not known.
        vocab_size: ids lie below this; None = not known.
        spans: whether replies attest versions.
        logprobs_mode: which scores it gives; None = not known.
        weight_backend: the receiving backend it was started with; None = no weight updates.
        parsers: what it reads out of chat replies, as far as that is known: `reasoning`, `tools`.
        aborts_as_stop: whether an output that a pause aborts ends in `stop` as if by itself.
        pause_refuses: whether requests that arrive while it is paused are refused (503) instead
            of queued, in modes abort and drain.
        missing: what it cannot do (`generate`, `logprobs`, `seed`, `priority`, `lora`, `admin`,
            `weights` from a transfer group, weights from `files`, `drop_caches`, `probe`), each
            with the remedy.
    """

    engine_version: str | None = None
    models: tuple[str, ...] = ()
    max_model_len: int | None = None
    vocab_size: int | None = None
    spans: bool = False
    logprobs_mode: LogprobsMode | None = None
    weight_backend: str | None = None
    parsers: frozenset[str] = frozenset()
    pause_refuses: bool = False
    aborts_as_stop: bool = False
    missing: Mapping[str, str] = {}

    def require(self, capability: str, *, where: str) -> None:
        """Raise `UnsupportedError` with the remedy unless the server can do `capability`."""
        remedy = self.missing.get(capability)
        if remedy is not None:
            message = f"{where} cannot {capability}: {remedy}"
            raise UnsupportedError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What an inspection read from one worker.

    Attributes:
        instance: what changes when the process restarts; None = the engine does not say.
        ranks: processes that its rank group brings into a collective.
        places: the ranks its own processes take, counted from its rank offset, by the engine's own
            formula; every plan is checked against them.
        dp_group: servers with the same name here are one external data-parallel group, which
            shares one rank offset; None = it stands alone.
        role: unified, prefill or decode.
        label: its weight label.
        paused: whether it generates nothing now.
        asleep: whether its weights or caches are released.
        sleep_is_sure: whether no pause can be what `asleep` tells of.
        capabilities: what it can do.
        id: its whole name, where a directory gives it one; None = it goes by its address.
        details: what its provider notes for itself, such as how it is administered.
    """

    instance: str | None
    ranks: int = 1
    places: tuple[int, ...] = (0,)
    dp_group: str | None = None
    role: Role = Role.UNIFIED
    label: str | None = None
    paused: bool | None = None
    asleep: bool = False
    sleep_is_sure: bool = False
    capabilities: Capabilities = field(default_factory=Capabilities)
    id: WorkerId | None = None
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Who has to serve a request, where a router would choose.

    Attributes:
        worker: who generates.
        prefill: who prefills, under prefill/decode; None = the same worker.
    """

    worker: WorkerId
    prefill: WorkerId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """What a directory says of one worker.

    Attributes:
        url: where it is administered; a name without a server where it says none.
        facts: what is known of it without asking it; their `id` is None where the directory names
            no lives, which are read at the workers then.
        model: what a request that the frontend passes on has to call its model; None = what the
            worker calls it, which another publication may change.
        error: why the directory itself could not reach it; None = it could.
    """

    url: str
    facts: WorkerFacts
    model: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The workers behind a frontend at one moment.

    Attributes:
        workers: in the order that ranks follow.
        missing: what the frontend still lacks, in words; None = it serves.
        reached: those that the directory could reach, by their addresses.
    """

    workers: tuple[Listed, ...]
    missing: str | None = None
    reached: Mapping[str, Listed] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        reached = {worker.url: worker for worker in self.workers if worker.error is None}
        object.__setattr__(self, "reached", reached)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeContext:
    """What decoding has to know besides the reply.

    Attributes:
        request: what was asked.
        request_id: the logical id of the reply.
        wire_id: the id on the wire.
        run: labels of another run are UNKNOWN; None = any run.
        now: wall-clock seconds since the epoch, for `Retry-After` dates.
        worker: who was asked, or whom a router was told to ask; None = whoever it chose.
        logprobs_mode: what the worker's capabilities say.
        remark: told about what a reply lacks though it was asked for; the caller warns, or
            raises when it is strict.
    """

    request: GenerateRequest
    request_id: str
    wire_id: str
    run: str | None = None
    now: float = 0.0
    worker: WorkerId | None = None
    logprobs_mode: LogprobsMode | None = None
    remark: Callable[[str], None] = lambda _text: None


class StreamDecoder(Protocol):
    """Decodes one streamed reply; holds no more than that reply."""

    def feed(self, chunk: bytes) -> list[TokenChunk]:
        """The tokens that `chunk` completes.

        Raises:
            ProviderError: the server reports an error in the stream; `.partial` has the tokens.
            ReplyError: the stream breaks its contract.
        """
        ...

    def finish(self, *, framed: bool) -> GenerateResponse:
        """The whole reply, once the body has ended.

        Args:
            framed: whether the body ended as its framing promises.

        Raises:
            IncompleteError: a choice has no finish reason, or an unframed body no `[DONE]`.
        """
        ...

    def partial(self) -> GenerateResponse:
        """What has arrived so far; outputs without a finish reason end in ERROR."""
        ...


class Admin(Protocol):
    """Administration of one worker. Every operation is a flow that ends in an `Answer`.

    Flows turn errors into answers; a `TransportError` thrown into one is left to `lost`.

    Attributes:
        verdicts: what is proved by what a worker showed, by `verdicts_of` from the provider's rows.
        finish_sets_label: whether FINISH carries the label, so that LABEL asks nothing.
        marks: whether `label` aborts nothing, so that it can be written ahead of an update.
        receivers: the engine's own receivers of weights, which transports follow; None = genapi
            installs one into the engine.
    """

    verdicts: Mapping[Seen, Verdict]
    finish_sets_label: bool
    marks: bool
    receivers: Receivers | None

    def check(self, plan: PausePlan, facts: WorkerFacts, *, backend: str) -> None:
        """Raise `ConfigError` or `UnsupportedError` when this worker cannot be published to."""
        ...

    def join(self, init_info: Mapping[str, Any], *, rank_offset: int, backend: str) -> Flow[Answer]:
        """Join the transfer group; answers when every rank has joined.

        Args:
            init_info: what the sender says of the group, by vLLM's names.
            rank_offset: the first of the worker's ranks.
            backend: name of the receiving backend, where the engine is told it here.
        """
        ...

    def pause(self, plan: PausePlan) -> Flow[Answer]:
        """Stop generating, as the plan says; answers when the engine is idle."""
        ...

    def confirm(self) -> Flow[Answer]:
        """Read back that it is paused."""
        ...

    def heal(self) -> Flow[Answer]:
        """Close what an earlier failure left, so that a session can begin."""
        ...

    def begin(self) -> Flow[Answer]:
        """Open the update session."""
        ...

    def update(self, update_info: Mapping[str, Any], *, attachment: object | None) -> Flow[Answer]:
        """Receive one bucket, or load a directory; answers when every rank has loaded it.

        Args:
            update_info: what a sender says of the bucket, by vLLM's names; or `weights_path`, and
                the `label` for engines that set it with a load (`finish_sets_label`).
            attachment: what travels beside the call.
        """
        ...

    def finish(self, label: str | None) -> Flow[Answer]:
        """Close the session; with a label, set it after every rank has closed."""
        ...

    def label(self, label: str) -> Flow[Answer]:
        """Set the label alone."""
        ...

    def read(self) -> Flow[Answer]:
        """Read `label`, `paused` and `healthy` into the facts of the answer."""
        ...

    def has_checksum(self) -> Flow[Answer]:
        """Whether `checksum` can be asked, without the work of one; REFUSED with the remedy."""
        ...

    def checksum(self) -> Flow[Answer]:
        """Digest what it holds.

        Facts: `checksums`, a digest by the name of each parameter on each rank; `topology`, equal
        for workers whose digests can be compared; `blind`, how many of them show nothing.
        """
        ...

    def resume(self, plan: PausePlan) -> Flow[Answer]:
        """Carry out what the plan says of caches, then generate again."""
        ...

    def close(self) -> Flow[Answer]:
        """Close a session after a failure, without a label."""
        ...

    def leave(self) -> Flow[Answer]:
        """Leave the transfer group."""
        ...


class Directory(Protocol):
    """How the workers behind a frontend are found.

    Attributes:
        always: whether every target of the provider is a frontend; else only one that asks for
            its workers to be discovered.
        pins: whether a request may name the worker that has to serve it.
    """

    always: bool
    pins: bool

    def address(self, frontend: str) -> str:
        """Where the workers of the frontend at this base URL are listed, unless told otherwise."""
        ...

    def read(self, discovery: str, *, model: str | None) -> Flow[Listing]:
        """What the frontend, at which this runs, and the list at `discovery` say of the workers.

        Raises:
            NotReadyError: they do not serve yet.
            ConfigError: something else answers there.
            ReplyError: an answer breaks its contract.
        """
        ...


class Provider(Protocol):
    """One engine's protocol.

    Attributes:
        name: the scheme of its targets.
        directory: how workers behind a frontend are found; None = they are listed in the target.
    """

    name: str
    directory: Directory | None

    def administer(self, facts: WorkerFacts | None, *, files: bool = False) -> Admin:
        """The administration of such a worker.

        Args:
            facts: what it is; None = it was not read yet.
            files: whether it loads weights from files, in one call, where nothing is joined, begun
                or closed; otherwise they come through a transfer group.

        Raises:
            UnsupportedError: such workers cannot be told to load files.
        """
        ...

    def check(self, request: GenerateRequest, capabilities: Capabilities | None) -> None:
        """Raise before any I/O what cannot be asked.

        Raises:
            UnsupportedError: the provider, or this server, cannot do it.
            ConfigError: a value is beyond what this server has (an id, say).
        """
        ...

    def attests(self, request: GenerateRequest) -> bool:
        """Whether a reply to such a request names versions, where the engine can do that."""
        ...

    def render(
        self, request: GenerateRequest, *, model: str | None, capabilities: Iterable[Capabilities]
    ) -> Flow[GenerateRequest]:
        """The request as it is encoded, for the server that the flow asks.

        A text or chat prompt becomes ids where a route takes ids alone; what was left open is
        settled.

        Args:
            request: what is asked.
            model: the served model's name.
            capabilities: of everybody who may serve it.
        """
        ...

    def refine(
        self, response: GenerateResponse, request: GenerateRequest, *, model: str | None
    ) -> Flow[GenerateResponse]:
        """The reply with what the server that the flow asks makes of it: tool calls, reasoning.

        Args:
            response: the reply as it was decoded.
            request: what `render` returned.
            model: the served model's name.
        """
        ...

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
        """The call that asks for a generation that `render` returned.

        `pin` is given only where the directory pins.
        """
        ...

    def decode(self, reply: HTTPReply, context: DecodeContext) -> GenerateResponse:
        """The reply as a value.

        Raises:
            ProviderError: the server answered an error.
            ReplyError: the answer breaks its contract.
        """
        ...

    def stream_decoder(self, context: DecodeContext) -> StreamDecoder:
        """A decoder for one streamed reply."""
        ...

    def raise_for_status(self, reply: HTTPReply, context: DecodeContext) -> None:
        """Raise the typed error that a non-2xx answer is."""
        ...

    def abort(self, wire_ids: Sequence[str], *, outputs: int = 1) -> tuple[HTTPCall, ...]:
        """The calls that end these generations, of `outputs` outputs each.

        None where only the end of their connection does.
        """
        ...

    def inspect(self, known: WorkerFacts | None = None) -> Flow[WorkerFacts]:
        """What this worker is and can do.

        Args:
            known: what it was when last read. Capabilities and ranks of the same instance may be
                taken from there; instance, label, pause, sleep and health never. Of a worker that
                a directory lists, what that says now: then the instance is taken from there.

        Raises:
            NotReadyError: it does not serve yet (starting, 503).
            AuthError: it refused the key.
            ConfigError: another kind of server answers there.
        """
        ...
