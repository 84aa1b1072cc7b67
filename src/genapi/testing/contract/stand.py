"""What a body of the contract suite holds, and what it needs of a provider and of a carrier.

The rule of this file: a body learns what an engine is called and how its routes are called, and
nothing else that tells one from another.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, Protocol

import anyio

import genapi
from genapi.events import AdminCalled, Event
from genapi.providers.base import Admin
from genapi.publication.evidence import Answer
from genapi.publication.plan import PausePlan
from genapi.transports.base import Transport
from genapi.types.config import PublishTimeouts
from genapi.types.response import LogprobsMode
from genapi.weights.base import WeightSource, WeightTransport
from genapi.wire.flow import Flow

from .manifest import CarrierName
from .meddling import Action, Meddling, Trouble

__all__ = ("Carrier", "Operation", "Profile", "Rig", "Servers", "Stand")

Operation = Literal[
    "health", "generate", "join", "pause", "resume", "begin", "update", "finish", "label", "sleep"
]
_NUMBERS = count()
_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One provider, as the suite has to know it.

    Attributes:
        provider: its name, the scheme of its targets.
        paths: its routes, by what they are for; `health` is one that every inspection reads, and
            `sleep` is not wanted of who is excluded from `publish:asleep`. Words after a path are
            words of the body, where one path serves several purposes.
        logprobs_mode: of which distribution its scores are when a server has its defaults.
        excluded: behaviours that it does not have, each with the reason, by their ids.
        front: how a target names what stands before the servers, by the addresses `{0}`, `{1}`
            that this has; None = requests go to the servers themselves.
        sleeping: flags of servers that can be put to sleep.
    """

    provider: str
    paths: Mapping[Operation, str]
    logprobs_mode: LogprobsMode
    excluded: Mapping[str, str] = field(default_factory=dict)
    front: str | None = None
    sleeping: Mapping[str, str] = field(default_factory=dict)


class Servers(Protocol):
    """Servers of one provider that a carrier brought up.

    Attributes:
        addresses: of the servers, `host:port` or whole URLs, in the order that a fleet has.
        front: what stands before them, as a target names it; None = nothing.
        transport: what carries calls to them.
    """

    @property
    def front(self) -> str | None:
        """What stands before the servers, as a target names it."""
        ...

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of the servers."""
        ...

    @property
    def transport(self) -> Transport:
        """What carries calls to them."""
        ...

    def kill(self, index: int) -> None:
        """End a server's process at once."""
        ...

    def restart(self, index: int) -> None:
        """Start it anew at the same address, with its first weights and label."""
        ...

    def running(self, index: int) -> int:
        """How many sequences its engine works on."""
        ...

    def lose_peer(self, index: int) -> None:
        """Let the sender of its next update go away while it receives."""
        ...

    def overwrite(self, index: int, tensors: dict[str, Any]) -> None:
        """Put other tensors into its engine, past every session."""
        ...

    async def sleep(self, index: int) -> None:
        """Put it to sleep: its weights or caches are released."""
        ...


class Carrier(Protocol):
    """Brings servers of one provider, and the weights that fit them.

    Attributes:
        name: which carrier it is.
        prompt: ids to ask with, at least two blocks of a prefix cache long.
        long: tokens enough for a publication to happen while they are made.
        timeouts: bounds of the phases of a publication.
        patience_s: bound on waiting for a server that starts.
    """

    name: CarrierName
    prompt: tuple[int, ...]
    long: int
    timeouts: PublishTimeouts
    patience_s: float

    def servers(
        self, profile: Profile, count: int, flags: Mapping[str, str]
    ) -> AbstractAsyncContextManager[Servers]:
        """At least so many servers, with the weights of seed 0; they serve, as also afterwards."""
        ...

    def sender(self) -> WeightTransport:
        """What sends weights to them."""
        ...

    def weights(self, seed: int) -> WeightSource:
        """The weights of seed 0 or 1."""
        ...

    def tensors(self, seed: int) -> dict[str, Any]:
        """The same, by name."""
        ...

    def check(self, seed: int, prompt: Sequence[int], token_ids: Sequence[int]) -> None:
        """Fail unless the weights of that seed answer the prompt with these ids, greedily."""
        ...


@dataclass
class Stand:
    """A ready fleet, the servers behind it, and what happened."""

    profile: Profile
    carrier: Carrier
    servers: Servers
    fleet: genapi.Fleet
    meddling: Meddling
    events: list[Event]

    def request(self, *, tokens: int = 8, logprobs: int | None = 0, **more: Any) -> Any:
        """A greedy request for exactly so many tokens; `sampling` overrides its parameters."""
        sampling = {
            "max_tokens": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "logprobs": logprobs,
            **more.pop("sampling", {}),
        }
        return genapi.GenerateRequest.model_validate(
            {"prompt_token_ids": self.carrier.prompt, "sampling": sampling, **more}
        )

    def publisher(self, **options: Any) -> genapi.WeightPublisher:
        """A publisher of this fleet."""
        return publisher(self.fleet, self.carrier, **options)

    def weights(self, seed: int) -> WeightSource:
        """The weights of seed 0 or 1."""
        return self.carrier.weights(seed)

    def fail(
        self, worker: int, operation: Operation | None, action: Action, **details: Any
    ) -> None:
        """Let a later call go wrong: to that route, or to any when None."""
        route = None if operation is None else self.profile.paths[operation]
        address = self.servers.addresses[worker]
        if operation == "generate":
            address = (self.servers.front or address).partition("?")[0]
        self.meddling.add(Trouble(route, action, address=address, worker=worker, **details))

    def url(self, worker: int) -> str:
        """Where a worker is administered."""
        address = self.servers.addresses[worker]
        return address if "://" in address else f"http://{address}"

    def sent(self, operation: Operation) -> int:
        """How many calls went to that route."""
        return self.meddling.sent(self.profile.paths[operation])

    def asked(self, operation: str) -> int:
        """How many times a worker was administered so."""
        return sum(isinstance(e, AdminCalled) and e.operation == operation for e in self.events)

    def check(self, seed: int, reply: genapi.GenerateResponse) -> None:
        """Fail unless the reply is what the weights of that seed answer."""
        prompt = reply.prompt_token_ids or self.carrier.prompt
        self.carrier.check(seed, prompt, reply.output.token_ids)

    async def everywhere(self, **more: Any) -> list[genapi.GenerateResponse]:
        """One reply from each worker that gets requests."""
        replies = {}
        for session in range(16):
            reply = await self.fleet.generate(self.request(session=str(session), **more))
            replies[str(reply.worker)] = reply
            if len(replies) == len(self.servers.addresses):
                break
        return list(replies.values())

    async def streamed(self, request: Any) -> genapi.GenerateResponse:
        """The reply that a stream ends in."""
        async with self.fleet.stream(request) as events:
            return await finished(events)

    async def label(self, worker: int, label: str) -> None:
        """Label a worker as somebody else would."""
        await self._administer(worker, lambda admin: admin.label(label))

    async def pause(self, worker: int) -> None:
        """Pause a worker as somebody else would."""
        plan = PausePlan("keep", "recompute", "flush")
        await self._administer(worker, lambda admin: admin.pause(plan))

    async def _administer(self, worker: int, asked: Callable[[Admin], Flow[Answer]]) -> None:
        member = list(self.fleet.membership.members.values())[worker]
        flow = asked(self.fleet.provider.administer(member.facts))
        control = self.fleet.control
        answer = await control.run(member.url, flow, operation="meddle", timeout_s=_LIMIT_S)
        assert answer.done, answer

    @asynccontextmanager
    async def another(self, **options: Any) -> AsyncIterator[genapi.Fleet]:
        """A ready fleet over the same servers, as another process would have it."""
        given = {"run": self.fleet.config.run, "transport": self.meddling, **options}
        async with genapi.connect(self.fleet.config.target, **given) as fleet:
            await fleet.wait_ready(timeout_s=self.carrier.patience_s)
            yield fleet


def publisher(fleet: genapi.Fleet, carrier: Carrier, **options: Any) -> genapi.WeightPublisher:
    """A publisher with the carrier's sender and bounds."""
    given = {"transport": carrier.sender(), "timeouts": carrier.timeouts, **options}
    return genapi.WeightPublisher(fleet, **given)


async def finished(events: AsyncIterator[Any]) -> genapi.GenerateResponse:
    """The reply that the rest of a stream ends in."""
    with anyio.fail_after(_LIMIT_S):
        last = [event async for event in events][-1]
    assert isinstance(last, genapi.Finished)
    return last.reply


@dataclass(frozen=True, slots=True)
class Rig:
    """What a body is given: how to bring up servers of one provider on one carrier."""

    profile: Profile
    carrier: Carrier

    @asynccontextmanager
    async def fleet(
        self, workers: int = 1, *, flags: Mapping[str, str] | None = None, **options: Any
    ) -> AsyncIterator[Stand]:
        """A fleet that was opened and has asked nobody yet."""
        async with self.carrier.servers(self.profile, workers, flags or {}) as servers:
            meddling = Meddling(servers.transport, servers.kill, servers.lose_peer)
            events: list[Event] = []
            target = f"{self.profile.provider}://{servers.front or ','.join(servers.addresses)}"
            given = {"run": f"contract-{next(_NUMBERS)}", **options}
            fleet = genapi.connect(target, transport=meddling, observe=events.append, **given)
            async with fleet:
                yield Stand(self.profile, self.carrier, servers, fleet, meddling, events)

    @asynccontextmanager
    async def stand(
        self, workers: int = 1, *, flags: Mapping[str, str] | None = None, **options: Any
    ) -> AsyncIterator[Stand]:
        """A ready fleet."""
        async with self.fleet(workers, flags=flags, **options) as stand:
            await stand.fleet.wait_ready(timeout_s=self.carrier.patience_s)
            yield stand
