"""`connect()` and `Fleet`: discovery, requests and administration behind one object."""

import asyncio
import math
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any, Generic, NoReturn, Self, TypedDict, TypeVar, Unpack

import anyio

from genapi.board import Board, open_board
from genapi.board.base import NOTHING
from genapi.board.guarded import GuardedBoard
from genapi.client import Client
from genapi.control import Control, fan_out
from genapi.credentials import Credentials
from genapi.ending import to_the_end
from genapi.errors import (
    AuthError,
    ConfigError,
    FleetError,
    GenAPIError,
    NotReadyError,
    ReplyError,
    TransportError,
    UnsupportedError,
)
from genapi.events import Observe, guarded, ignore
from genapi.membership import Member, Membership
from genapi.providers import registry
from genapi.providers.base import (
    DecodeContext,
    Directory,
    Listed,
    Listing,
    Pin,
    Provider,
    WorkerFacts,
)
from genapi.publication.intervals import Reading, Rounds, Sight
from genapi.routing import Routing
from genapi.shown import few
from genapi.transports.base import Plane, Transport
from genapi.transports.http_aiohttp import AiohttpTransport
from genapi.transports.memory import MemoryTransport
from genapi.types.arguments import seconds, with_methods
from genapi.types.config import (
    FleetConfig,
    Key,
    RetryPolicy,
    Target,
    Topology,
    base_url,
    parse_target,
)
from genapi.types.ids import WorkerId
from genapi.types.policy import PolicyVersion
from genapi.types.request import GenerateRequest
from genapi.types.response import GenerateEvent, GenerateResponse
from genapi.types.worker import FleetSnapshot
from genapi.versions import Versions
from genapi.wire.flow import Flow, call

__all__ = ("Fleet", "connect")

T = TypeVar("T")

_BOARD = ("read", "compare_and_set", "aclose")
_CARRIER = ("send", "stream")
_POLL_S = (0.1, 2.0)
_ADMIN_CONNECT_S = 10.0
"""Shorter than a phase of a publication, so that what never connected is known as not sent."""
_CLOSE_S = 15.0
_LOOKS_PER_S = 50.0
"""Most workers read in a second to date replies: each read is about ten calls."""
_OUT_OF_TOUCH = 2.0
"""After so many `refresh_s` without a request, the next one waits for a look."""
_READS_AT_ONCE = 128
"""Most workers read at the same time: more hold up the event loop, and files run out.

It counts for reads of all and for reads of one apart: who reads one does not wait for all.
"""
_FINAL = (AuthError, ConfigError, UnsupportedError)
"""Failures that waiting does not mend."""


class FleetOptions(TypedDict, total=False):
    """The other fields of `FleetConfig`, as keywords of `connect`."""

    api_key: str | Key | None
    admin_api_key: str | Key | None
    allowed_origins: tuple[str, ...]
    discovery_url: str | None
    expect: Topology | None
    max_in_flight: int | None
    connect_timeout_s: float
    idle_timeout_s: float | None
    admin_timeout_s: float
    refresh_s: float
    retry: RetryPolicy
    strict: bool


def connect(
    target: str | FleetConfig,
    *,
    model: str | None = None,
    run: str | None = None,
    board: str | Board | None = None,
    transport: Transport | None = None,
    observe: Observe = ignore,
    **options: Unpack[FleetOptions],
) -> "Fleet":
    """A fleet at `target`; nothing is contacted before it is opened.

    Args:
        target: such as `vllm://w1:8001,w2:8001`, `vllm://router:8000?workers=w1:8001,w2:8001`
            (requests to the router, administration to the workers), `vllm+https://...`,
            `embedded://?protocol=vllm&workers=2`; or the `config` of another process's fleet.
        model: the served model's name; may be left out when only one is served.
        run: the training run whose versions count.
        board: a version board: a URL (`file:/path`, `redis://...`), which travels with
            `fleet.config`, or an object, which does not and gets `admin_timeout_s` for each
            operation; what it raises becomes a `TransportError` unless it is a `GenAPIError`.
        transport: what carries every call instead of genapi's own HTTP clients; the caller closes
            it, and it does not travel with `fleet.config`.
        observe: called with every event (`genapi.events`), on the event loop.
        options: the other fields of `FleetConfig`.

    Raises:
        ConfigError: the target or an option cannot work.
        pydantic.ValidationError: an option has a bad value.
    """
    named = {"model": model, "run": run, "board": board if isinstance(board, str) else None}
    given = {k: v for k, v in named.items() if v is not None} | options
    if not isinstance(target, str | FleetConfig):
        raise ConfigError(
            f"target={target!r}: pass text such as 'vllm://127.0.0.1:8000', or a FleetConfig"
        )
    if isinstance(target, FleetConfig):
        config = FleetConfig.model_validate({**dict(target), **given}) if given else target
    else:
        parse_target(target)  # its own error is plainer than a ValidationError around it
        config = FleetConfig.model_validate({"target": target, **given})
    held = None if isinstance(board, str) else board
    return Fleet(config, transport=transport, board=held, observe=observe)


class Fleet:
    """The live face of the workers at one target. Use as `async with`, or `open` and `aclose`.

    One fleet belongs to one event loop. It does not pickle: send `fleet.config` to other
    processes and connect there.
    """

    def __init__(
        self,
        config: FleetConfig,
        *,
        transport: Transport | None = None,
        board: Board | None = None,
        observe: Observe = ignore,
    ) -> None:
        if board is not None:
            with_methods("board", board, _BOARD, remedy="pass a URL, an open board, or None")
        if transport is not None:
            with_methods("transport", transport, _CARRIER, remedy="pass a transport, or None")
        with_methods("observe", observe, ["__call__"], remedy="pass a function that takes an event")
        self.config = config
        self.observe = guarded(observe)
        self.board: Board | None = _board(config, board)
        """The version board that publishers and readers share; None = there is none."""
        self._own_transport = transport
        target = config.parsed
        self.provider: Provider = registry.provider(target.provider)
        self._target: Target = target
        self._directory = _directory(self.provider, config)
        self._discovery: str | None = None
        self._listing = Listing(workers=(), missing="nothing was read yet")
        self._confirmed: set[tuple[WorkerId | None, str]] = set()
        self._unlisted: GenAPIError | None = None
        self._stack: AsyncExitStack | None = None
        self._client: Client | None = None
        self._control: Control | None = None
        self._credentials: Credentials | None = None
        workers = target.workers if self._directory is None else ()
        self._membership = Membership.of(
            target.provider, workers, run=config.run, observe=self.observe
        )
        self._frontends = target.requests
        # Held by a publication: two on one fleet run one after the other, whoever asks.
        self.publishing = asyncio.Lock()
        self._first = asyncio.Lock()
        self._reading: dict[str, asyncio.Lock] = {}
        self._reads_of_all = asyncio.Semaphore(_READS_AT_ONCE)
        self._reads_of_one = asyncio.Semaphore(_READS_AT_ONCE)
        self._read_at: dict[str, float] = {}
        self._looks: dict[str | None, _Look[Reading]] = {}
        self._lists: _Look[Listing] | None = None
        self._revivals: dict[str, asyncio.Task[dict[str, GenAPIError]]] = {}
        self._revived_at = 0.0
        self._following: asyncio.Task[None] | None = None
        self._followed_at = self._asked_at = -math.inf
        self._lost_touch = False
        self._turn = 0
        self._board_token = NOTHING

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __reduce__(self) -> NoReturn:
        message = "a live fleet does not pickle; send fleet.config and genapi.connect() there"
        raise TypeError(message)

    def __repr__(self) -> str:
        state = "open" if self._client else "closed"
        return f"<Fleet {self.config.target} {state}>"

    async def open(self) -> None:
        """Make ready to talk. Contacts nobody except engines inside this process.

        Raises:
            ConfigError: a key cannot be read.
        """
        if self._client is not None:
            message = "the fleet is open already"
            raise FleetError(message)
        async with AsyncExitStack() as stack:
            requests, administration = await self._transports(stack)
            credentials = self._credentials = Credentials.of(self.config)
            self._control = Control(
                administration,
                headers=credentials.admin_headers,
                observe=self.observe,
                withheld=credentials.withheld,
            )
            directory = self._directory
            routed = self._target.routed or directory is not None
            pins = directory is not None and directory.pins
            if directory is not None:
                config, listing = self.config, self._target.listing
                named = config.discovery_url and base_url(config.discovery_url, scheme="http")
                self._discovery = named or listing or directory.address(self._frontends[0])
            versions = Versions(
                self.config,
                self._membership,
                routed=routed,
                pins=pins,
                look=self._look,
                is_old=self._is_old,
                attests=self.provider.attests,
                observe=self.observe,
            )
            routing = Routing(
                self.config,
                self._membership,
                versions,
                urls=self._frontends,
                routed=routed,
                pins=pins,
                follow=self._follow,
                revive=self._revive,
                look=partial(self._look, None),
            )
            self._client = Client(
                self.config,
                self.provider,
                requests,
                self._membership,
                routing=routing,
                versions=versions,
                prepare=self._known,
                headers=credentials.data_headers,
                abort_headers=credentials.admin_headers,
                observe=self.observe,
            )
            self._stack = stack.pop_all()

    async def aclose(self) -> None:
        """Close every connection. Calls in flight end with `TransportError`.

        After 15 s what does not end is left, with a warning in the log. A cancellation is raised
        when all of that is done.
        """
        self._client = self._control = self._credentials = None
        what = f"the fleet at {self.config.target}"
        await to_the_end(self._close, what=what, limit_s=_CLOSE_S)

    async def _close(self) -> None:
        reads: list[asyncio.Task[Any]] = [*self._revivals.values()]
        if self._following is not None:
            reads.append(self._following)
        self._revivals, self._following = {}, None
        for read in reads:
            read.cancel()
        if reads:
            await asyncio.wait(reads)
        looks, self._looks = self._looks, {}
        for look in (*looks.values(), *([self._lists] if self._lists else ())):
            await look.aclose()
        self._lists = None
        stack, self._stack = self._stack, None
        if stack is not None:
            await stack.aclose()
        if self.board is not None and self.config.board is not None:
            await self.board.aclose()

    async def _transports(self, stack: AsyncExitStack) -> tuple[Transport, Transport]:
        """What carries requests, and what carries administration."""
        own = self._own_transport
        if self._target.carrier == "embedded":
            if own is None:
                try:
                    cluster = registry.embedded_cluster_type().from_query(self._target.query)
                except ValueError as error:
                    raise ConfigError(f"target {self.config.target!r}: {error}") from None
                own = MemoryTransport(cluster)
                stack.push_async_callback(own.aclose)
            if not isinstance(own, MemoryTransport):
                raise ConfigError("an embedded:// target takes a MemoryTransport, or none")
            if self._directory is not None:
                # The first is the frontend, the second lists the workers, who are the rest.
                self._frontends = own.urls[:1]
            elif tuple(self._membership.members) != own.urls:
                self._membership = Membership.of(
                    self._target.provider, own.urls, run=self.config.run, observe=self.observe
                )
        if own is not None:
            return own, own
        connect_s = self.config.connect_timeout_s
        requests = AiohttpTransport(Plane(connect_timeout_s=connect_s))
        stack.push_async_callback(requests.aclose)
        # A server that answered an administration error may close without a word: no reuse.
        plane = Plane(connect_timeout_s=min(connect_s, _ADMIN_CONNECT_S), keep_alive=False)
        administration = AiohttpTransport(plane)
        stack.push_async_callback(administration.aclose)
        return requests, administration

    @property
    def is_open(self) -> bool:
        """Whether it was opened and not closed since."""
        return self._client is not None

    @property
    def is_discovered(self) -> bool:
        """Whether its workers come and go as a directory lists them."""
        return self._directory is not None

    def check_discovered(self, *, whole: bool) -> None:
        """Raise unless the last snapshot read a list of workers; for genapi's own publisher.

        Args:
            whole: whether it has to be the expected topology.

        Raises:
            FleetError: it could not be read, it is empty, or somebody is missing.
        """
        if self._unlisted is not None:
            raise FleetError(str(self._unlisted)) from self._unlisted
        if not self._membership.members:
            raise FleetError(self._nobody())
        if whole:
            self._membership.check(self.config.expect)

    @property
    def membership(self) -> Membership:
        """What is known of the workers; for genapi's own publisher."""
        return self._membership

    @property
    def control(self) -> Control:
        """The administration plane; for genapi's own publisher."""
        if self._control is None:
            raise FleetError(_CLOSED)
        return self._control

    def _requests(self) -> Client:
        if self._client is None:
            raise FleetError(_CLOSED)
        return self._client

    async def wait_ready(self, timeout_s: float) -> FleetSnapshot:
        """Wait until every worker answers and the topology is the expected one.

        A worker that is paused counts: it serves when whoever paused it has resumed it.

        Args:
            timeout_s: bound in seconds.

        Raises:
            FleetError: not ready in time; names what each worker answered last.
            AuthError: a worker refused the key.
            ConfigError: something else than the provider's engine answers, or one server at two
                addresses.
        """
        self._requests()
        timeout_s = seconds("timeout_s", timeout_s)
        failures: dict[str, GenAPIError] = {}
        missing = ""
        wait = _POLL_S[0]
        with anyio.move_on_after(timeout_s):
            while True:
                failures = await self._read(None)
                for error in failures.values():
                    if isinstance(error, _FINAL):
                        raise error
                if not failures:
                    missing = self._lacks()
                    if not missing:
                        self._settle()
                        return self._membership.snapshot()
                await anyio.sleep(wait)
                wait = min(wait * 2, _POLL_S[1])
        members = self._membership.members
        silent = [url for url, member in members.items() if member.facts is None]
        failed = few([f"{url}: {error}" for url, error in failures.items()])
        seen = failed or missing or f"no answer yet from {self._awaited(silent or [*members])}"
        message = f"the fleet was not ready within timeout_s={timeout_s}: {seen}"
        raise FleetError(message)

    def _awaited(self, urls: list[str]) -> str:
        """Who is waited for: these, or the list where nobody is known of it yet."""
        return few(urls, separator=", ") or f"the list of workers at {self._discovery}"

    def _lacks(self) -> str:
        """What is missing of the fleet though everybody that was read answers; empty = nothing."""
        lacks = []
        try:
            self._membership.check_distinct()
        except ConfigError as error:
            if self._directory is None:
                raise
            lacks.append(str(error))  # a list may mend itself
        try:
            self._membership.check(self.config.expect)
        except FleetError as error:
            lacks.append(str(error))
        if self._directory is not None:
            if self._listing.missing is not None:
                lacks.append(self._listing.missing)
            if not self._membership.members:
                lacks.append(self._nobody())
            elif lacks and self._listing.missing is None and self._unusable():
                lacks.append(self._unusable())
        return "; ".join(lacks)

    def _nobody(self) -> str:
        """Why there is no worker, in words."""
        return self._unusable() or f"no workers are listed at {self._discovery}"

    def _unusable(self) -> str:
        """Who is listed and cannot be used, in words; empty = nobody."""
        listed = self._listing.workers
        reasons = [f"{worker.url}: {worker.error}" for worker in listed if worker.error is not None]
        if not reasons:
            return ""
        number = f"{len(reasons)} of the {len(listed)} workers that {self._discovery} lists"
        return f"{number} cannot be used: {few(reasons)}"

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """The reply to one request.

        Cancelling the call ends the generation on the engine. An engine's own abort is a reply
        whose output has `FinishReason.ABORT`.

        Raises:
            UnsupportedError: the provider cannot do it; nothing was sent.
            ConfigError: a value is beyond what the server has, or a version is of another run.
            StalePolicyError: `min_version` or `exact_version` was not met within `timeout_s`, or
                cannot be met any more.
            ProviderError: the server answered an error that no retry mended.
            TransportError: no usable answer, or none within `timeout_s`.
            ReplyError: the answer breaks its contract.
            IncompleteError: the server could not read what it generated; `partial` has the tokens.
            FleetError: no worker may get traffic.
        """
        return await self._requests().generate(_request(request))

    @asynccontextmanager
    async def stream(self, request: GenerateRequest) -> AsyncIterator[AsyncIterator[GenerateEvent]]:
        """The reply while it arrives: `TokenChunk`s, then one `Finished` with the whole reply.

        Leaving the block ends the generation on the engine. Raises what `generate` raises, and
        `IncompleteError` for a stream that ended early; both carry what had arrived as `partial`.
        A stream whose tokens turn out not to meet `min_version` or `exact_version` ends in
        `StalePolicyError`: what was handed out already cannot be made again.
        """
        async with self._requests().stream(_request(request)) as events:
            yield events

    async def abort(self, request_id: str) -> int:
        """End generations of this process by the user's label; returns how many were asked to.

        They return what they have, with `FinishReason.ABORT`.
        """
        if not isinstance(request_id, str):
            raise ConfigError(f"request_id={request_id!r}: pass the label of a request, as text")
        return await self._requests().abort(request_id)

    async def snapshot(self) -> FleetSnapshot:
        """All workers as a fresh read shows them. One that does not answer is not healthy."""
        self._requests()
        await self._read(None)
        self._settle()
        return self._membership.snapshot()

    async def inspect(
        self, url: str, *, known: WorkerFacts | None = None, timeout_s: float | None = None
    ) -> WorkerFacts:
        """What the worker at `url` is now, without taking it in; for genapi's own publisher.

        Args:
            url: where it is administered.
            known: what it was when last read: what cannot change in one life is not read again.
            timeout_s: bound in seconds; None = `admin_timeout_s`.
        """
        if self._directory is not None:
            known = self._listed(url, await self._list())
        return await self._inspect(url, known, timeout_s=timeout_s)

    async def listed(self) -> tuple[Listed, ...] | None:
        """Who the directory lists now, for genapi's own publisher; None = there is none.

        Raises:
            FleetError: it cannot be read now.
        """
        return None if self._directory is None else (await self._list()).workers

    @property
    def last_listed(self) -> tuple[Listed, ...]:
        """Who was in the last list that was taken in, for genapi's own publisher."""
        return self._listing.workers

    async def _inspect(
        self, url: str, known: WorkerFacts | None, *, timeout_s: float | None = None
    ) -> WorkerFacts:
        return await self.control.run(
            url,
            self.provider.inspect(known),
            operation="inspect",
            timeout_s=timeout_s or self.config.admin_timeout_s,
        )

    async def _list(self) -> Listing:
        """What the directory says in a read that starts from now on; all who ask share one.

        Raises:
            FleetError: it cannot be read now, which says nothing of any worker.
        """
        if self._lists is None:
            self._lists = _Look(self._read_list, every_s=1 / _LOOKS_PER_S)
        try:
            listing = await self._lists.ask()
        except (NotReadyError, TransportError) as error:
            raise FleetError(f"the workers cannot be listed: {error}") from error
        if listing is None:
            raise FleetError(_CLOSED)
        return listing

    async def _read_list(self) -> Listing:
        directory, discovery = self._directory, self._discovery
        assert directory is not None  # noqa: S101 - without one nothing is listed
        assert discovery is not None  # noqa: S101 - an open fleet has its address
        return await self.control.run(
            self._frontends[0],
            directory.read(discovery, model=self.config.model),
            operation="discover",
            timeout_s=self.config.admin_timeout_s,
        )

    def _listed(self, url: str, listing: Listing) -> WorkerFacts:
        """What a listing says of the worker at an address.

        Raises:
            TransportError: nobody is listed there any more (refused), or nobody can be reached.
        """
        found = listing.reached.get(url)
        if found is not None:
            return found.facts
        member = self._membership.members.get(url)
        for worker in listing.workers:
            named = worker.facts.id is not None and member is not None
            if worker.url == url or (named and member and worker.facts.id == member.id):
                message = f"{worker.facts.id or 'the worker'} at {url}: {worker.error}"
                raise TransportError(message, phase="not_sent", url=url)
        raise _unlisted(url, self._discovery)

    async def _enroll(self) -> Listing:
        """Take in who is listed; a change counts when a second read confirms it.

        Raises:
            FleetError: two reads do not agree.
        """
        listing = await self._list()
        if _who(listing) != self._confirmed:
            again = await self._list()
            if _who(again) != _who(listing):
                raise FleetError(f"the workers that {self._discovery} lists are changing")
            listing, self._confirmed = again, _who(again)
        self._listing = listing
        self._membership.enroll(listing.workers)
        return listing

    async def ask(
        self, url: str, request: GenerateRequest, *, operation: str, timeout_s: float
    ) -> GenerateResponse:
        """What the worker at `url` itself makes of a request, fenced or not, sent once.

        For genapi's own publisher. Nothing of a publication enters the request's cache salt.
        """
        if self._credentials is None or self._client is None:
            raise FleetError(_CLOSED)
        member, wire_id = self._membership.members[url], f"genapi-{operation}-{uuid.uuid4().hex}"
        models = member.facts.capabilities.models if member.facts is not None else ()
        model = self.config.model or (models[0] if len(models) == 1 else None)
        pin = None
        if self._directory is not None and self._directory.pins and member.id is not None:
            pin, url = Pin(worker=member.id), self._frontends[0]
        keys = self._credentials
        return await self.control.run(
            url,
            _exchange(self.provider, request, member, wire_id=wire_id, model=model, pin=pin),
            operation=operation,
            timeout_s=timeout_s,
            # A worker that no request of the user's goes to is known to administration alone.
            headers=lambda grant: keys.data_headers(url) or keys.admin_headers(url, grant),
        )

    async def _read(self, urls: list[str] | None) -> dict[str, GenAPIError]:
        """Inspect and take in these, or all (None), the board included; returns the failures."""
        if urls is None:
            self._followed_at = asyncio.get_running_loop().time()
        self._unlisted = None
        try:
            results = await self._take_in_all(urls)
        except GenAPIError as error:
            self._unlisted = error
            failures = {self._frontends[0]: error}
        else:
            failures = {url: r for url, r in results.items() if isinstance(r, GenAPIError)}
            for url in failures.keys() & self._membership.members.keys():
                self._membership.members[url].suspect = True
        await self._heed_board()
        return failures

    async def _take_in_all(self, urls: list[str] | None) -> dict[str, Sight | GenAPIError]:
        """Inspect these, or everybody who is listed now, and take them in.

        Raises:
            GenAPIError: the directory cannot be read.
        """
        listing = await self._enroll() if self._directory is not None else None
        members = self._membership.members
        wanted = list(members) if urls is None else [url for url in urls if url in members]
        reads = self._reads_of_one if urls is not None and len(urls) == 1 else self._reads_of_all
        return await fan_out({url: partial(self._take_in, url, listing, reads) for url in wanted})

    async def _take_in(self, url: str, listing: Listing | None, reads: asyncio.Semaphore) -> Sight:
        """Inspect one worker and take it in. Reads of one worker follow one another."""
        # Whoever waits for its turn among many keeps no other read of its worker waiting.
        async with reads, self._reading.setdefault(url, asyncio.Lock()):
            self._read_at[url] = asyncio.get_running_loop().time()
            member = self._membership.members.get(url)
            if member is None:
                raise _unlisted(url, self._discovery)
            notes = member.notes
            facts = await self._inspect(
                url, None if listing is None else self._listed(url, listing)
            )
            if self._membership.members.get(url) is not member:
                raise _unlisted(url, self._discovery)
            identity = self._membership.learn(url, facts, notes=notes)
            return Sight(identity, facts.label, member.fence is None)

    async def _look(self, url: str | None) -> Reading:
        """What a read shows that starts from now on, of one worker or (None) of all.

        It is shared by everyone who asks before it starts.
        """
        self._requests()
        look = self._looks.get(url)
        if look is None:
            urls = None if url is None else [url]
            every_s = max(1, len(self._membership.members)) / _LOOKS_PER_S
            look = self._looks[url] = _Look(partial(self._sights, urls), every_s=every_s)
        return await look.ask() or Reading({})

    async def _sights(self, urls: list[str] | None) -> Reading:
        results: dict[str, Sight | GenAPIError] = {}
        with suppress(GenAPIError):  # without the directory nothing is seen of anybody
            results = await self._take_in_all(urls)
        members = self._membership.members
        for url, result in results.items():
            # Only what says itself that it does not serve loses its traffic: a read that is slow
            # while weights move is no proof of anything.
            refused = isinstance(result, TransportError) and result.refused
            if (refused or isinstance(result, NotReadyError)) and url in members:
                members[url].suspect = True
        sights = {u: None if isinstance(r, GenAPIError) else r for u, r in results.items()}
        feed = await self._heed_board()
        self._settle()
        return Reading(sights, feed=feed)

    def _settle(self) -> None:
        """Take the version that all labels agree on, where no board knows better."""
        if self._board_token == NOTHING and not self._membership.publishing:
            self._membership.settle()

    async def _follow(self) -> None:
        """Look now and then at what others may have done; it waits only after a long silence.

        The board tells it, and of what no board tells one worker in turn: what changed there is
        then looked for everywhere.
        """
        if self._membership.publishing or not self._membership.members:
            return
        now, refresh_s = asyncio.get_running_loop().time(), self.config.refresh_s
        silent_s = now - max(self._asked_at, self._followed_at)
        self._asked_at = now
        task = self._following
        if now - self._followed_at > refresh_s and (task is None or task.done()):
            self._followed_at, self._lost_touch = now, silent_s > _OUT_OF_TOUCH * refresh_s
            # Owned by the fleet, which may be opened and closed in different tasks.
            task = self._following = asyncio.create_task(self._look_around())  # noqa: TID251
        if task is not None and self._lost_touch:
            await asyncio.wait([task], timeout=refresh_s)

    async def _look_around(self) -> None:
        if self._directory is not None:
            # Who is there may have changed, which no worker tells.
            with suppress(GenAPIError):
                await self._sights(None)
            return
        members = self._membership.members
        url = list(members)[self._turn % len(members)]
        self._turn += 1
        with suppress(GenAPIError):
            token, known = self._board_token, members[url].facts
            await self._sights([url])
            if self._board_token != token or _differ(known, members[url].facts):
                await self._sights([other for other in members if other != url])

    async def _heed_board(self) -> PolicyVersion | None:
        """Take in what the board says; returns the newest version that it names."""
        if self.board is None:
            return None
        state, self._board_token = await self.board.read()
        if state is None:
            return None
        self._membership.heed(state)
        return state.target or state.committed

    def _is_old(self, url: str | None) -> bool:
        """Whether no read of that worker, or of any (None), began within `refresh_s`."""
        now = asyncio.get_running_loop().time()
        urls = list(self._membership.members) if url is None else [url]
        return any(now - self._read_at.get(u, -math.inf) > self.config.refresh_s for u in urls)

    async def _known(self) -> None:
        """Before the first request, what the workers are has to be known."""
        self._requests()
        members = self._membership.members
        if any(m.facts is not None for m in members.values()):
            return
        async with self._first:
            if any(m.facts is not None for m in self._membership.members.values()):
                return
            failures = await self._read(None)
            members = self._membership.members
            if len(failures) >= max(1, len(members)):
                raise next(iter(failures.values()))
            if not members:
                raise FleetError(self._nobody())
            self._settle()

    async def _revive(self) -> None:
        """Read suspects again, and who is fenced by hearsay, at most every `refresh_s`.

        It waits only when nobody can serve.
        """
        stranded = not self._membership.usable()
        now = asyncio.get_running_loop().time()
        if not stranded and now - self._revived_at < self.config.refresh_s:
            return
        self._revived_at = now
        readings = []
        for member in self._membership.members.values():
            reading = self._revivals.get(member.url)
            is_told = member.fence is not None and member.fence == member.told
            due = member.suspect or (is_told and self._is_old(member.url))
            if due and (reading is None or reading.done()):
                # Owned by the fleet as well.
                reading = asyncio.create_task(self._read([member.url]))  # noqa: TID251
                self._revivals[member.url] = reading
            if reading is not None and not reading.done():
                readings.append(reading)
        if stranded and readings:
            # The first who answers is enough; a request's own limit bounds the wait.
            await asyncio.wait(readings, return_when=asyncio.FIRST_COMPLETED)


def _differ(known: WorkerFacts | None, now: WorkerFacts | None) -> bool:
    """Whether somebody has published, paused or restarted between two reads."""
    if known is None or now is None:
        return True
    return (known.instance, known.label, known.paused) != (now.instance, now.label, now.paused)


def _exchange(
    provider: Provider,
    request: GenerateRequest,
    member: Member,
    *,
    wire_id: str,
    model: str | None,
    pin: Pin | None,
) -> Flow[GenerateResponse]:
    known = [] if member.facts is None else [member.facts.capabilities]
    rendered = yield from provider.render(request, model=model, capabilities=known)
    asked = provider.encode(
        rendered, wire_id=wire_id, model=model, salt=None, stream=False, pin=pin
    )
    reply = yield from call(asked)
    # Whoever is pinned to has to be named by the reply itself: a pin that was dropped on the way
    # shows in nothing else.
    by = member.id if pin is None or not reply.ok else None
    context = DecodeContext(request=rendered, request_id=wire_id, wire_id=wire_id, worker=by)
    response = provider.decode(reply, context)
    if pin is not None and (response.worker is None or not _is_named(pin.worker, response.worker)):
        who = "somebody who is not named" if response.worker is None else response.worker
        raise ReplyError(f"{who} answered in place of {pin.worker}", url=reply.url)
    return response


def _request(request: object) -> GenerateRequest:
    """A request, which a message never shows: it may be a prompt."""
    if not isinstance(request, GenerateRequest):
        raise ConfigError(
            f"the request is a {type(request).__name__}: pass a genapi.GenerateRequest(prompt=..., "
            "sampling=SamplingParams(max_tokens=...))"
        )
    return request


def _is_named(worker: WorkerId, name: WorkerId) -> bool:
    """Whether a name, which may lack all but the instance, is that worker's."""
    return name == worker or (not name.component and name.instance == worker.instance)


def _board(config: FleetConfig, given: Board | None) -> Board | None:
    if given is not None:
        return GuardedBoard(given, timeout_s=config.admin_timeout_s)
    return None if config.board is None else open_board(config.board)


def _directory(provider: Provider, config: FleetConfig) -> Directory | None:
    """How the workers of a target are found; None = it lists them.

    Raises:
        UnsupportedError: it asks for a way that there is not.
        ConfigError: it lists workers behind a frontend that lists them itself.
    """
    target, found = config.parsed, provider.directory
    if found is not None and found.always:
        if target.carrier == "http" and "workers" in target.query:
            raise ConfigError(
                f"target {config.target!r}: {provider.name} lists its workers itself; leave out "
                "workers=, and name the list as ?discovery=PORT where it is not on the next port"
            )
        return found
    what = target.discovery or config.discovery_url or target.listing
    if target.carrier != "http" or what is None:
        return None
    if found is not None and target.discovery == "discover":
        return found
    if found is not None and target.discovery is None:
        raise ConfigError(
            f"target {config.target!r}: a list of workers at {what!r} is for a target with "
            "?workers=discover"
        )
    message = (
        f"workers={what!r}: discovery is not supported yet; list the workers as "
        "?workers=host:port,host:port"
    )
    raise UnsupportedError(message)


def _unlisted(url: str, discovery: str | None) -> TransportError:
    """What a read fails with of a worker that left: as if it refused the connection."""
    error = TransportError(f"nobody is listed at {url} by {discovery}", phase="not_sent", url=url)
    error.__cause__ = ConnectionRefusedError(url)
    return error


def _who(listing: Listing) -> set[tuple[WorkerId | None, str]]:
    """Who is listed where, as far as anybody can be reached."""
    return {(w.facts.id, w.url) for w in listing.workers if w.error is None}


class _Look(Generic[T]):
    """One read that is done over and over, each time for all who asked before it started.

    The task that reads is owned by the fleet and ends when nobody asks any more.
    """

    def __init__(self, read: Callable[[], Awaitable[T]], *, every_s: float) -> None:
        self._read = read
        self._every_s = every_s
        self._rounds = Rounds()
        self._answers: dict[int, asyncio.Future[T | None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._next_at = 0.0

    async def ask(self) -> T | None:
        """What a read shows that starts from now on; None = the fleet was closed meanwhile."""
        number = self._rounds.ask()
        answer = self._answers.get(number)
        if answer is None:
            answer = self._answers[number] = asyncio.get_running_loop().create_future()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())  # noqa: TID251 - the fleet ends it
        return await asyncio.shield(answer)

    async def _run(self) -> None:
        now = asyncio.get_running_loop().time
        while self._rounds.is_due:
            await asyncio.sleep(self._next_at - now())
            self._next_at = now() + self._every_s
            answer = self._answers.pop(self._rounds.start())
            try:
                answer.set_result(await self._read())
            except Exception as error:  # noqa: BLE001 - it is raised where it is awaited
                answer.set_exception(error)
                answer.exception()  # whoever asked may wait no longer, and then nobody sees it
            finally:
                self._rounds.end()
                _leave_unknown(answer)

    async def aclose(self) -> None:
        """Stop reading; whoever still waits learns nothing."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for answer in self._answers.values():
            _leave_unknown(answer)


def _leave_unknown(answer: asyncio.Future[T | None]) -> None:
    if not answer.done():
        answer.set_result(None)


_CLOSED = "the fleet is not open; use `async with genapi.connect(...) as fleet` or fleet.open()"
