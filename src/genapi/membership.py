"""What one process knows of a fleet's workers: who they are, what they hold, who gets traffic.

The rule of this file: no I/O and no waiting. Reads are told to it, decisions are read from it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from genapi.errors import ConfigError, FleetError
from genapi.events import Observe, WorkerFenced, ignore
from genapi.providers.base import Capabilities, Listed, WorkerFacts
from genapi.publication.intervals import Sight
from genapi.shown import few
from genapi.types.board import BoardState
from genapi.types.config import Topology
from genapi.types.ids import Role, WorkerId
from genapi.types.policy import ContextRule, PolicyVersion, is_updating_label, parse_label
from genapi.types.worker import Fence, FenceStrength, FleetSnapshot, Recovery, WorkerState

__all__ = ("Member", "Membership")

_TELLING = 12
"""A name of a life is random or a time. Shorter ones may be the same of two servers by chance."""


@dataclass(slots=True)
class Member:
    """One address and the life of the server that was last read there.

    Attributes:
        url: where it is administered.
        id: which life; None = never read.
        facts: what the last inspection showed.
        held: the last label of this life that named a version.
        fence: why it gets no traffic.
        told: the fence that a board or a read tells of, which they can lift; None = none.
        suspect: it refused a connection or died: read it again before using it.
        model: what a router has to be told of its model; None = the name that it gives itself.
        in_flight: requests of this process that it has now.
        joined: whether a directory listed it when versions were known already.
        notes: how many labels were noted.
        on_change: told when a label was noted.
    """

    url: str
    id: WorkerId | None = None
    facts: WorkerFacts | None = None
    held: object = None
    fence: Fence | None = None
    told: Fence | None = None
    suspect: bool = False
    model: str | None = None
    in_flight: int = 0
    joined: bool = False
    notes: int = 0
    on_change: Callable[[], None] = lambda: None

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
            self.hold(replace(self.facts, label=label))
            self.notes += 1
            self.on_change()

    def hold(self, facts: WorkerFacts) -> None:
        """Take in what was read of this life."""
        self.facts = facts
        if parse_label(facts.label) is not None:
            self.held = facts.label

    @property
    def sight(self) -> Sight | None:
        """What the last completed read showed of its version; None = that no longer counts."""
        if self.id is None or self.facts is None or self.suspect:
            return None
        return Sight(self.id, self.facts.label, self.fence is None, self.held)

    @property
    def is_paused(self) -> bool:
        """Whether the last read showed it paused."""
        return self.facts is not None and self.facts.paused is True

    @property
    def is_prefill(self) -> bool:
        """Whether it is there to prefill for others."""
        return self.facts is not None and self.facts.role is Role.PREFILL

    @property
    def is_updating(self) -> bool:
        """Whether its label was written ahead: an update is under way, or was left half-done."""
        return self.facts is not None and is_updating_label(self.facts.label)

    @property
    def left(self) -> Fence | None:
        """The fence that its own label says of it; None = it says nothing."""
        if not self.is_updating or self.facts is None:
            return None
        return Fence(
            strength=FenceStrength.PAUSED if self.is_paused else FenceStrength.CLIENT,
            reason=f"it is in the middle of an update ({self.facts.label!r})",
            recovery=Recovery.CLOSE_THEN_REPUBLISH,
        )

    @property
    def attests(self) -> bool:
        """Whether its replies name the versions of their tokens."""
        return self.facts is not None and self.facts.capabilities.spans

    @property
    def is_mute(self) -> bool:
        """Whether its label cannot be read."""
        return self.facts is not None and "admin" in self.facts.capabilities.missing


class _Inherited:
    """Fences of processes that took the place of one that a board fences.

    A process that starts reading now never knew the one before it.
    """

    def __init__(self, board: BoardState) -> None:
        self._board = board
        self._listed = {worker.id for worker in board.workers}
        fenced = [worker.id for worker in board.workers if worker.fence is not None]
        # One that was never reached is listed by its place alone.
        self._places = {*fenced, *(worker.rpartition("/")[0] for worker in fenced)}

    def fence(self, member: Member, identity: WorkerId) -> Fence | None:
        """The fence of a member that the board does not name, in a place that it fences."""
        if not self._places or str(identity) in self._listed:
            return None
        held, committed = member.version(self._board.run), self._board.committed
        if str(identity.model_copy(update={"instance": ""})) not in self._places or (
            held is not None and held == committed
        ):
            return None
        return Fence(
            strength=FenceStrength.CLIENT,
            reason=f"{identity} took the place of a fenced worker and was not published to since",
            recovery=Recovery.REPUBLISH,
        )


@dataclass(slots=True)
class Membership:
    """Every worker, in rank order, and the version they were proved to hold.

    Attributes:
        provider: the engines' provider.
        members: by address.
        run: the run whose labels count; None until known.
        committed: the newest version that every worker was proved to hold.
        final: the version that its publisher was closed with; None = a newer one may come.
        rules: what is guaranteed about the context of a version's tokens, as this process
            published or adopted it, or as a board tells.
        salted: whether requests carry the committed version in their cache salt.
        publishing: whether this process is publishing now.
        closed: whether new requests wait until its publication has ended.
        own: the versions that this process published.
        aborts: pauses that ended what ran, by this process: begun so far, and under way.
        on_change: told when anything was learnt that may let a request go that waits for it.
    """

    provider: str
    members: dict[str, Member]
    run: str | None = None
    committed: PolicyVersion | None = None
    final: PolicyVersion | None = None
    rules: dict[PolicyVersion, ContextRule] = field(default_factory=dict)
    salted: bool = False
    publishing: bool = False
    closed: bool = False
    own: set[PolicyVersion] = field(default_factory=set)
    aborts: tuple[int, int] = (0, 0)
    observe: Observe = ignore
    on_change: Callable[[], None] = lambda: None
    _lives: dict[str, int] = field(default_factory=dict)
    _barred: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for member in self.members.values():
            member.on_change = self._changed

    def _changed(self) -> None:
        self.on_change()

    @classmethod
    def of(
        cls, provider: str, urls: Iterable[str], *, run: str | None, observe: Observe
    ) -> "Membership":
        """A membership of workers that were not read yet."""
        members = {url: Member(url) for url in urls}
        return cls(provider=provider, members=members, run=run, observe=observe)

    def identify(self, url: str, facts: WorkerFacts) -> WorkerId:
        """The identity that facts read at `url` show."""
        if facts.id is not None:
            return facts.id
        if facts.instance is not None:
            instance = facts.instance
        else:
            # The engine does not name its life: a reconnect after a refusal begins a new one.
            member = self.members[url]
            life = self._lives.get(url, 0) + (1 if member.suspect else 0)
            instance = f"life-{life}"
        return WorkerId(provider=self.provider, component=url, instance=instance)

    def learn(self, url: str, facts: WorkerFacts, *, notes: int | None = None) -> WorkerId:
        """Take in what an inspection read; returns the identity.

        Args:
            url: where it was read.
            facts: what was read.
            notes: `member.notes` when the inspection started: a label that was noted since then is
                newer than the one that the inspection read. None = take the one that was read.
        """
        if url not in self.members:  # it had left, and is back
            self.members[url] = Member(url, joined=True, on_change=self._changed)
        member = self.members[url]
        before = member.sight
        identity = self.identify(url, facts)
        if notes not in (None, member.notes) and member.facts is not None and member.id == identity:
            facts = replace(facts, label=member.facts.label)
        if facts.instance is None and member.suspect:
            self._lives[url] = self._lives.get(url, 0) + 1
        known = member.id
        if known != identity:
            member.held = None
        member.hold(facts)
        member.id = identity
        member.suspect = False
        if known is not None and known != identity:
            was_fenced, member.fence = member.fence is not None, None
            if was_fenced or self._is_unproven(member):
                self._fence_new(member, f"{identity} took the place of {known}")
        elif known is None and member.joined and self._is_unproven(member):
            self._fence_new(member, f"{identity} joined")
        self._lift(member)
        if member.sight != before:
            self._changed()
        return identity

    def _is_unproven(self, member: Member) -> bool:
        if self.committed is None:
            return member.joined and self.publishing
        return member.version(self.run) != self.committed

    def _fence_new(self, member: Member, what: str) -> None:
        label = member.facts.label if member.facts is not None else None
        wanted = f", not {self.committed}" if self.committed is not None else ""
        self.fence(
            member,
            Fence(
                strength=FenceStrength.CLIENT,
                reason=f"{what} and holds {label!r}{wanted}",
                recovery=Recovery.REPUBLISH,
            ),
        )
        member.told = member.fence

    def enroll(self, listed: Sequence[Listed]) -> None:
        """Take in who a directory lists, in its order; those it lists no more are forgotten.

        While this process publishes nobody is forgotten: who is gone is only suspect then.
        """
        known = {member.id: member for member in self.members.values() if member.id is not None}
        taken = {worker.url for worker in listed if worker.error is None}
        before, members = self.members, dict[str, Member]()
        for worker in listed:
            identity = worker.facts.id
            member = None if identity is None else known.get(identity)
            if worker.error is not None:
                # Who cannot be reached is nobody new, and has nothing where another took its place.
                if member is None or member.url in taken:
                    continue
                member.suspect = True
            elif member is None:
                member = before.get(worker.url)
            if member is None:
                is_late = self.committed is not None or self.publishing
                member = Member(worker.url, joined=is_late, on_change=self._changed)
            elif worker.error is None and member.id == identity:
                member.url = worker.url
            member.model = worker.model
            members[member.url] = member
        for url, member in before.items():
            if self.publishing and url not in members:
                member.suspect = True
                members[url] = member
        if list(members) != list(before):
            self.members = members
            self._changed()

    def called(self, worker: WorkerId) -> Member | None:
        """Who goes by that name, which may lack all but the instance; None = nobody known."""
        for member in self.members.values():
            own = member.id
            if own is not None and (
                own == worker or (not worker.component and own.instance == worker.instance)
            ):
                return member
        return None

    @contextmanager
    def aborting(self) -> Iterator[None]:
        """Around a pause that ends what runs, from before it is asked until it was answered."""
        begun, under_way = self.aborts
        self.aborts = begun + 1, under_way + 1
        try:
            yield
        finally:
            begun, under_way = self.aborts
            self.aborts = begun, under_way - 1

    def heed(self, board: BoardState) -> None:
        """Take in what a board says: run, committed version, and fences of these workers."""
        self.run = self.run or board.run
        fences = {worker.id: worker.fence for worker in board.workers}
        listed = fences.keys() if board.phase == "idle" else ()
        inherited = _Inherited(board)
        for member in self.members.values():
            fence = None
            if member.id is not None:
                fence = fences.get(str(member.id)) or inherited.fence(member, member.id)
            if fence is not None and member.fence is None:
                member.told = fence
                self.fence(member, fence)
            elif fence is None and member.told is not None and str(member.id) in listed:
                # Whoever wrote the fence has verified the worker since.
                if member.fence == member.told:
                    self.fence(member, None)
                member.told = None
        self._barred = frozenset(worker.id for worker in board.workers if worker.fence is not None)
        told = board.committed
        if told is None or told.run != self.run or self.publishing:
            return
        self.rules.setdefault(told, board.context)
        if self.committed is None or told > self.committed:
            self.committed, self.salted = told, True
            for member in self.members.values():
                # What was concluded here is of an earlier publication than the one that committed.
                member.told = member.fence
            self._changed()
        self.end(told if board.final else None)
        for member in self.members.values():
            self._lift(member)

    def end(self, version: PolicyVersion | None) -> None:
        """No newer version than this one comes (None: one may)."""
        changed, self.final = version != self.final, version
        if changed:
            self._changed()

    def _lift(self, member: Member) -> None:
        """Lift a fence that was told of, of a worker that others have published to since."""
        if member.fence is None or member.fence != member.told or self.publishing:
            return
        held = member.version(self.run)
        serves = held is not None and not member.suspect and not member.is_paused
        if serves and str(member.id) not in self._barred and not self._is_behind(held):
            self.fence(member, None)
            member.told = None

    def _is_behind(self, held: PolicyVersion | None) -> bool:
        if held is None or self.committed is None:
            return held is None
        return held.run != self.committed.run or held < self.committed

    def fence(self, member: Member, fence: Fence | None) -> None:
        """Set or lift a fence; lifting is for a publication that verified the worker."""
        member.fence = fence
        if fence is not None and member.id is not None:
            self.observe(WorkerFenced(worker=member.id, reason=fence.reason))
        self._changed()

    def close(self) -> None:
        """From now on new requests wait: what is being published is not verified yet."""
        self.closed = True

    def open(self) -> None:
        """The publication has ended: requests go to whoever has no fence."""
        self.closed = False
        self._changed()

    def usable(self) -> list[Member]:
        """Those that may get traffic now.

        During a publication of this very fleet requests go on to the workers, which queue them,
        unless it is `closed`.
        """
        return [m for m in self.generating() if self.may_serve(m)]

    def may_serve(self, member: Member) -> bool:
        """Whether it may get traffic now, or its part of it."""
        return not member.suspect and not self._bars(member)

    def generating(self) -> list[Member]:
        """Those that requests are for: prefill workers only where there is nobody else."""
        members = list(self.members.values())
        return [m for m in members if not m.is_prefill] or members

    def _bars(self, member: Member) -> bool:
        return member.fence is not None or (member.is_updating and not self.publishing)

    def is_barred(self) -> bool:
        """Whether fences or their own labels keep all workers from traffic, behind a router too."""
        return bool(self.members) and all(self._bars(m) for m in self.members.values())

    def capabilities(self) -> Capabilities | None:
        """What the workers can do, as the first that was read shows; None = none was read."""
        for member in self.members.values():
            if member.facts is not None:
                return member.facts.capabilities
        return None

    def capable(self, member: Member | None) -> list[Capabilities]:
        """What those can do who may get a request: `member`, or anybody that was read (None)."""
        members = self.members.values() if member is None else (member,)
        return [m.facts.capabilities for m in members if m.facts is not None]

    def served(self, member: Member | None) -> tuple[str, ...] | None:
        """The models of `member`, or of everybody that was read (None); None = they differ."""
        members = self.members.values() if member is None else (member,)
        found = {
            (m.model,) if m.model is not None else m.facts.capabilities.models
            for m in members
            if m.facts is not None
        }
        return found.pop() if len(found) == 1 else None

    def commit(self, version: PolicyVersion, *, rule: ContextRule, salted: bool) -> None:
        """Every worker was proved to hold `version`."""
        self.run = version.run
        self.committed = version
        self.own.add(version)
        self.rules[version] = rule
        self.salted = salted
        self._changed()

    def settle(self) -> None:
        """Take the version that all labels agree on, where nothing speaks against it.

        A worker that is fenced, paused or suspect is no witness, and what this process committed
        is never moved back.
        """
        members = self.members.values()
        if any(m.fence is not None or m.suspect or m.is_paused for m in members):
            return
        versions = {m.version(self.run) for m in members}
        version = versions.pop() if len(versions) == 1 else None
        if version is None or version == self.committed:
            return
        if self.committed is not None and version.run == self.committed.run:
            if version < self.committed:
                return
        elif self.committed is None:
            # Whoever published it, entries of other versions are kept from this process's requests.
            self.salted = True
        self.committed = version
        self.run = self.run or version.run

    @property
    def salt(self) -> str | None:
        """What keeps cache entries of one version from requests of another; None = nothing."""
        return self.committed.label if self.salted and self.committed is not None else None

    def check_distinct(self) -> None:
        """Raise where two addresses were read to be one life of one server.

        Raises:
            ConfigError: names both.
        """
        found: dict[tuple[object, ...], Member] = {}
        for member in self.members.values():
            facts = member.facts
            if facts is None or member.suspect or facts.id is not None:
                continue
            # Ranks of one data-parallel group may have been started from one configuration.
            life = (facts.instance, facts.dp_group, facts.places)
            if facts.instance is None or len(facts.instance) < _TELLING:
                continue
            other = found.setdefault(life, member)
            if other is not member:
                raise ConfigError(
                    f"{other.url} and {member.url} are one server: both say that they are its life "
                    f"{facts.instance!r}; name each worker once"
                )

    def check(self, expect: Topology | None) -> None:
        """Compare with the expected topology.

        Raises:
            FleetError: another number of workers, roles or ranks; names what was seen.
        """
        if expect is None:
            return
        read = [m for m in self.members.values() if m.facts is not None]
        seen = few([m.name for m in read], separator=", ") or "none"
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
                    fence=m.fence or m.left,
                    ranks=m.facts.ranks,
                )
                for m in self.members.values()
                if m.id is not None and m.facts is not None
            ),
            committed=self.committed,
            final=self.final,
        )
