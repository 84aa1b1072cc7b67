"""What one process knows of a fleet's workers: who they are, what they hold, who gets traffic.

The rule of this file: no I/O and no waiting. Reads are told to it, decisions are read from it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from genapi.errors import FleetError
from genapi.events import Observe, WorkerFenced, ignore
from genapi.providers.base import Capabilities, WorkerFacts
from genapi.publication.context import ContextRule
from genapi.types.config import Topology
from genapi.types.ids import Role, WorkerId
from genapi.types.policy import PolicyVersion, parse_label
from genapi.types.worker import Fence, FenceStrength, FleetSnapshot, Recovery, WorkerState

__all__ = ("Member", "Membership")


@dataclass(slots=True)
class Member:
    """One address and the life of the server that was last read there.

    Attributes:
        url: where it is administered.
        id: which life; None = never read.
        facts: what the last inspection showed.
        fence: why it gets no traffic.
        suspect: it refused a connection or died: read it again before using it.
        in_flight: requests of this process that it has now.
    """

    url: str
    id: WorkerId | None = None
    facts: WorkerFacts | None = None
    fence: Fence | None = None
    suspect: bool = False
    in_flight: int = 0

    @property
    def name(self) -> str:
        """How messages call it."""
        return self.url

    def version(self, run: str | None) -> PolicyVersion | None:
        """The policy that its label named when it was last read; None = UNKNOWN."""
        return parse_label(self.facts.label, run=run) if self.facts else None

    def note_label(self, label: object) -> None:
        """Take in a label that was read back."""
        if self.facts is not None and isinstance(label, str):
            self.facts = replace(self.facts, label=label)


@dataclass(slots=True)
class Membership:
    """Every worker, in rank order, and the version they were proved to hold.

    Attributes:
        provider: the engines' provider.
        members: by address.
        run: the run whose labels count; None until known.
        committed: the newest version that every worker was proved to hold.
        rules: versions that this process published or adopted itself, with what that guarantees
            about the context of their tokens.
        salted: whether requests carry the committed version in their cache salt.
    """

    provider: str
    members: dict[str, Member]
    run: str | None = None
    committed: PolicyVersion | None = None
    rules: dict[PolicyVersion, ContextRule] = field(default_factory=dict)
    salted: bool = False
    observe: Observe = ignore
    _lives: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, provider: str, urls: Iterable[str], *, run: str | None, observe: Observe
    ) -> "Membership":
        """A membership of workers that were not read yet."""
        members = {url: Member(url) for url in urls}
        return cls(provider=provider, members=members, run=run, observe=observe)

    def identify(self, url: str, facts: WorkerFacts) -> WorkerId:
        """The identity that facts read at `url` show."""
        if facts.instance is not None:
            instance = facts.instance
        else:
            # The engine does not name its life: a reconnect after a refusal begins a new one.
            member = self.members[url]
            life = self._lives.get(url, 0) + (1 if member.suspect else 0)
            instance = f"life-{life}"
        return WorkerId(provider=self.provider, component=url, instance=instance)

    def learn(self, url: str, facts: WorkerFacts) -> WorkerId:
        """Take in what an inspection read; returns the identity."""
        member = self.members[url]
        identity = self.identify(url, facts)
        if facts.instance is None and member.suspect:
            self._lives[url] = self._lives.get(url, 0) + 1
        known = member.id
        member.facts = facts
        member.id = identity
        member.suspect = False
        if known is not None and known != identity:
            member.fence = None
            if self._is_unproven(member):
                self.fence(
                    member,
                    Fence(
                        strength=FenceStrength.CLIENT,
                        reason=f"{identity} took the place of {known} and holds "
                        f"{facts.label!r}, not {self.committed}",
                        recovery=Recovery.REPUBLISH,
                    ),
                )
        return identity

    def _is_unproven(self, member: Member) -> bool:
        return self.committed is not None and member.version(self.run) != self.committed

    def fence(self, member: Member, fence: Fence | None) -> None:
        """Set or lift a fence; lifting is for a publication that verified the worker."""
        member.fence = fence
        if fence is not None and member.id is not None:
            self.observe(WorkerFenced(worker=member.id, reason=fence.reason))

    def by_id(self, worker: WorkerId) -> Member:
        """The member with that identity.

        Raises:
            FleetError: nobody has it any more.
        """
        for member in self.members.values():
            if member.id == worker:
                return member
        message = f"{worker} is not a worker of this fleet any more"
        raise FleetError(message)

    def usable(self) -> list[Member]:
        """Those that may get traffic now."""
        return [m for m in self.members.values() if m.fence is None and not m.suspect]

    def capabilities(self) -> Capabilities | None:
        """What the workers can do, as the first that was read shows; None = none was read."""
        for member in self.members.values():
            if member.facts is not None:
                return member.facts.capabilities
        return None

    def commit(self, version: PolicyVersion, *, rule: ContextRule, salted: bool) -> None:
        """Every worker was proved to hold `version`."""
        self.run = version.run
        self.committed = version
        self.rules[version] = rule
        self.salted = salted

    def settle(self) -> None:
        """Take the version that all labels agree on, where nobody here published it."""
        versions = {m.version(self.run) for m in self.members.values()}
        if len(versions) != 1:
            return
        version = versions.pop()
        if version is not None and version != self.committed:
            self.committed = version
            self.run = self.run or version.run

    @property
    def salt(self) -> str | None:
        """What keeps cache entries of one version from requests of another; None = nothing."""
        return self.committed.label if self.salted and self.committed is not None else None

    def check(self, expect: Topology | None) -> None:
        """Compare with the expected topology.

        Raises:
            FleetError: another number of workers, roles or ranks; names what was seen.
        """
        if expect is None:
            return
        read = [m for m in self.members.values() if m.facts is not None]
        seen = ", ".join(m.name for m in read) or "none"
        if expect.workers is not None and len(read) != expect.workers:
            message = f"{len(read)} of {expect.workers} workers seen: {seen}"
            raise FleetError(message)
        ranks = sum(m.facts.ranks for m in read if m.facts)
        if expect.world_size is not None and ranks != expect.world_size:
            message = f"workers bring {ranks} ranks, expected {expect.world_size}: {seen}"
            raise FleetError(message)
        if expect.roles is not None:
            counts = {role: sum(m.facts.role == role for m in read if m.facts) for role in Role}
            if any(counts[role] != count for role, count in expect.roles.items()):
                message = f"roles seen {counts}, expected {dict(expect.roles)}: {seen}"
                raise FleetError(message)

    def snapshot(self) -> FleetSnapshot:
        """What is known now, as a value. Workers that were never read are left out."""
        return FleetSnapshot(
            workers=tuple(
                WorkerState(
                    id=m.id,
                    url=m.url,
                    role=m.facts.role,
                    version=m.version(self.run),
                    label=m.facts.label,
                    paused=m.facts.paused,
                    healthy=not m.suspect,
                    fence=m.fence,
                    ranks=m.facts.ranks,
                )
                for m in self.members.values()
                if m.id is not None and m.facts is not None
            ),
            committed=self.committed,
        )
