"""Runs one publication: what the table asks is sent, bounded, and told back to the table.

The rule of this file: no decision about order or proof is taken here. The transaction runs in a
shielded task of its own, so that a cancellation is an event of the table and not an accident.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, Literal, TypeVar

import anyio

from genapi.asking import Asking
from genapi.errors import (
    ConfigError,
    FleetError,
    GenAPIError,
    ReplyError,
    SupersededError,
    TransportError,
)
from genapi.events import Observe, PhaseEnded, PhaseStarted, SenderProgress
from genapi.fleet import Fleet
from genapi.groups import Group, leave
from genapi.ledger import Ledger
from genapi.membership import Member
from genapi.probe import Probe
from genapi.providers.base import Admin, WorkerFacts
from genapi.publication.context import context_rule
from genapi.publication.digest import group_digest, plan_digest
from genapi.publication.evidence import Answer, Observed, Op
from genapi.publication.manifest import describe, explain
from genapi.publication.plan import PausePlan
from genapi.publication.table import READS, Act, Phase
from genapi.publication.transaction import (
    Abandon,
    ActDone,
    Acted,
    ActFailed,
    Answered,
    Ask,
    Broke,
    Cancelled,
    Command,
    Cut,
    Event,
    Transaction,
    advance,
    begin,
    conclude,
    fence,
    is_proved,
)
from genapi.types.config import PublishTimeouts
from genapi.types.ids import WorkerId
from genapi.types.policy import PolicyVersion
from genapi.types.worker import Fence, PhaseTime
from genapi.weights.base import (
    Bucket,
    Delivery,
    GroupTransport,
    Sender,
    TensorMeta,
    WeightSource,
    WeightStore,
)
from genapi.weights.staging import Stage, plan_buckets

__all__ = ("Drive", "Times")

T = TypeVar("T")

_RETRY_WAITS_S = (0.1, 0.4, 1.5)
_UNANSWERED = (Observed.LOST, Observed.NOT_SENT)
_COLLECTIVE = (Op.JOIN, Op.UPDATE)
"""What a worker answers when its whole group has done its part."""


@dataclass(slots=True)
class Times:
    """What was measured, in seconds of the loop's clock."""

    phases: list[PhaseTime] = field(default_factory=list)
    paused_from: dict[WorkerId, float] = field(default_factory=dict)
    paused_to: dict[WorkerId, float] = field(default_factory=dict)
    bytes_sent: dict[WorkerId, int] = field(default_factory=dict)

    def paused_s(self, worker: WorkerId) -> float:
        """How long the worker was paused, up to now where it still is."""
        start = self.paused_from.get(worker)
        if start is None:
            return 0.0
        return self.paused_to.get(worker, anyio.current_time()) - start


class _Slot(Generic[T]):
    """A value that several tasks wait for."""

    def __init__(self) -> None:
        self._set = anyio.Event()
        self._value: T | None = None

    def put(self, value: T | None) -> None:
        self._value = value
        self._set.set()

    def end(self) -> None:
        """Whoever still waits learns that none comes; a value that came stays."""
        self._set.set()

    async def ready(self) -> None:
        """Wait until there is a value, or none will come."""
        await self._set.wait()

    async def get(self) -> T:
        """The value.

        Raises:
            TransportError: there will be none.
        """
        await self.ready()
        if self._value is None:
            message = "the trainer's end failed before anything was sent"
            raise TransportError(message, phase="not_sent")
        return self._value


class _Heard:
    """What has come of asking one worker, at whatever moment it is given up.

    Attributes:
        answer: what counts if nothing more is heard.
    """

    def __init__(self, limit_s: float) -> None:
        self._held_up = Answer(
            Observed.NOT_SENT, f"not asked: the board gave no answer within {limit_s:g} s"
        )
        self._silent = Answer(Observed.LOST, f"no answer within {limit_s:g} s")
        self._asked = False
        self.answer = self._held_up

    @property
    def is_held_up(self) -> bool:
        """Whether the board has not said yet whether the worker may be asked."""
        return self.answer is self._held_up

    @property
    def is_silent(self) -> bool:
        """Whether the worker was asked and nothing came back."""
        return self.answer is self._silent

    def goes_out(self) -> None:
        """The worker is about to be asked; what an earlier try came to stays."""
        if not self._asked:
            self._asked, self.answer = True, self._silent

    def refused(self, answer: Answer) -> None:
        """The board said no; to a worker that was asked before, that says nothing."""
        if not self._asked:
            self.answer = answer


class Drive:
    """One publication over one fleet. `run` it once."""

    def __init__(  # noqa: PLR0913 - what a publication is made of
        self,
        tx: Transaction,
        *,
        fleet: Fleet,
        members: Mapping[WorkerId, Member],
        version: PolicyVersion,
        source: WeightSource,
        transport: GroupTransport | WeightStore,
        admin_of: Callable[[WorkerFacts | None], Admin],
        groups: Sequence[Group],
        plan: PausePlan,
        timeouts: PublishTimeouts,
        ledger: Ledger,
        left_out: Mapping[WorkerId, Fence | None],
        probe: Probe,
        known: tuple[TensorMeta, ...] | None,
    ) -> None:
        self.tx = tx
        self.times = Times()
        self.cause: BaseException | None = None
        self._fleet = fleet
        self._members = members
        self._version = version
        self._transport = transport
        self._path = ""
        self._groups = groups
        self._plan = plan
        self._timeouts = timeouts
        self._ledger = ledger
        self._left_out = left_out
        self._known = known
        # Requests that a paused engine queued would go on with the resume: with a probe they wait
        # here from the pause on.
        self._closes = Phase.PAUSE if "probe" in tx.checks.levels else Phase.RESUME
        self._asking = Asking(
            fleet=fleet,
            admin_of=admin_of,
            members=members,
            version=version,
            plan=plan,
            backend=transport.backend if isinstance(transport, GroupTransport) else "",
            probe=probe,
            levels=tx.checks.levels,
            timeouts=timeouts,
        )
        self._limits_s = self._asking.limits_s
        self._observe: Observe = fleet.observe
        self._stage = Stage(
            source,
            bucket_bytes=transport.bucket_bytes,
            bucket_tensors=transport.bucket_tensors,
            stage_bytes=transport.stage_bytes,
            on_progress=self._gathered,
        )
        self._senders = [_Slot[Sender]() for _ in groups]
        for slot, group in zip(self._senders, groups, strict=True):
            if group.sender is not None:
                slot.put(group.sender)
        self._bucket: _Slot[Bucket] = _Slot()
        self._deliveries: dict[WorkerId, Delivery] = {}
        self._buckets_left = 0
        self._ends: tuple[int, ...] = ()
        self._digests: dict[int, dict[str, str]] = {}
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._scopes: set[anyio.CancelScope] = set()
        self._in_collective: dict[WorkerId, anyio.CancelScope] = {}
        self._cancelled = False
        self._phase_since = 0.0

    @property
    def manifest(self) -> tuple[TensorMeta, ...]:
        """What the source holds; empty until it was read."""
        return self._stage.manifest

    @property
    def version(self) -> PolicyVersion:
        """What is published."""
        return self._version

    @property
    def has_stored(self) -> bool:
        """Whether it has put the version where workers load it from."""
        return bool(self._path)

    def blame(self, error: BaseException) -> None:
        """Note what the publication failed of: the first error, unless it was superseded."""
        if self.cause is None or isinstance(error, SupersededError):
            self.cause = error

    async def run(self) -> None:
        """Run to the end.

        A cancellation ends the transaction first; none of its phases then outlasts `cleanup_s`.
        """
        ended = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._run, ended)
            try:
                await ended.wait()
            except anyio.get_cancelled_exc_class():
                self._limit_all()
                self._inbox.put_nowait(Cancelled())
                raise

    async def _run(self, ended: anyio.Event) -> None:
        try:
            with anyio.CancelScope(shield=True):
                async with asyncio.TaskGroup() as tasks, self._stage:
                    await self._walk(tasks)
                await leave(self._broken())
        finally:
            ended.set()

    async def _walk(self, tasks: asyncio.TaskGroup) -> None:
        self._phase_since = anyio.current_time()
        self._observe(PhaseStarted(version=self._version, phase=self.tx.phase))
        self._take(*begin(self.tx), tasks)
        while not self.tx.ended:
            event = await self._inbox.get()
            self._take(*advance(self.tx, event), tasks)

    def _take(
        self, tx: Transaction, commands: tuple[Command, ...], tasks: asyncio.TaskGroup
    ) -> None:
        before, self.tx = self.tx, tx
        if tx.phase is not before.phase:
            self._entered(tx, before.phase)
        if Acted(Act.SEND) in commands:
            self._bucket = _Slot()
        for command in commands:
            match command:
                case Ask(worker, op):
                    tasks.create_task(self._ask(worker, op, retries=tx.row.retries))
                case Acted(act):
                    tasks.create_task(self._act(act))
                case Abandon(group):
                    self._abandon(group)
                case Cut():
                    for scope in self._scopes:
                        scope.cancel()

    def _entered(self, tx: Transaction, before: Phase) -> None:
        now = anyio.current_time()
        seconds, self._phase_since = now - self._phase_since, now
        self.times.phases.append(PhaseTime(phase=before, seconds=seconds))
        if tx.phase is self._closes:
            self._fleet.membership.close()
        self._observe(PhaseEnded(version=self._version, phase=before, seconds=seconds))
        if not tx.ended:
            self._observe(PhaseStarted(version=self._version, phase=tx.phase))

    def _bounded(self, limit_s: float) -> anyio.CancelScope:
        """A scope that a cancellation of the publication shortens, and `Cut` ends."""
        limit_s = min(limit_s, self._timeouts.cleanup_s) if self._cancelled else limit_s
        scope = anyio.CancelScope(deadline=anyio.current_time() + limit_s)
        self._scopes.add(scope)
        return scope

    def _limit_all(self) -> None:
        self._cancelled = True
        for scope in self._scopes:
            self._limit(scope)

    def _limit(self, scope: anyio.CancelScope) -> None:
        scope.deadline = min(scope.deadline, anyio.current_time() + self._timeouts.cleanup_s)

    async def _ask(self, worker: WorkerId, op: Op, *, retries: bool) -> None:
        if op is Op.PAUSE:
            self.times.paused_from[worker] = anyio.current_time()
        if op in _COLLECTIVE and self.tx.sends:
            answer = await self._answer_in_collective(worker, op)
        else:
            aborts = op is Op.SHUT or (op is Op.PAUSE and self._plan.mode == "abort")
            with self._fleet.membership.aborting() if aborts else nullcontext():
                answer = await self._answer_in_time(worker, op, retries=retries)
        delivery = self._deliveries.pop(worker, None) if op is Op.UPDATE else None
        if answer.observed is Observed.LOST and delivery is not None and delivery.was_taken:
            answer = Answer(Observed.DONE, "the reply was lost after the bucket was taken")
        if op is Op.RESUME and answer.done:
            self.times.paused_to[worker] = anyio.current_time()
        self._inbox.put_nowait(Answered(worker, op, answer))

    async def _answer_in_time(self, worker: WorkerId, op: Op, *, retries: bool) -> Answer:
        limit_s = self._limits_s[op]
        heard = _Heard(limit_s)
        with self._bounded(limit_s) as scope:
            await self._try(worker, op, heard)
            for wait in _RETRY_WAITS_S if retries else ():
                if heard.answer.observed not in _UNANSWERED:
                    break
                await anyio.sleep(wait)
                await self._try(worker, op, heard)
        self._scopes.discard(scope)
        return self._blamed(heard)

    async def _answer_in_collective(self, worker: WorkerId, op: Op) -> Answer:
        """The answer, for which less time is left once the group broke: then nothing comes."""
        number = self.tx.workers[worker].group
        limit_s = self._limits_s[op]
        # What the worker is asked to take has a limit of its own, of no more than this.
        with self._bounded(limit_s) as scope:
            await self._senders[number].ready()
            if op is Op.UPDATE:
                await self._bucket.ready()
        self._scopes.discard(scope)
        heard = _Heard(limit_s)
        with self._bounded(limit_s) as scope:
            self._in_collective[worker] = scope
            if number in self.tx.broken:
                self._limit(scope)
            await self._try(worker, op, heard)
        self._scopes.discard(scope)
        del self._in_collective[worker]
        if heard.is_silent and number in self.tx.broken:
            late = f"no answer, and none in {self._timeouts.cleanup_s:g} s after its group broke"
            return replace(heard.answer, detail=late)
        return self._blamed(heard)

    async def _try(self, worker: WorkerId, op: Op, heard: "_Heard") -> None:
        """Ask a worker, where the board lets the call go out."""
        try:
            if op not in READS:
                await self._ledger.check((self._version, self.tx.phase, self.tx.updates))
        except GenAPIError as error:
            # It is the board that says no, or does not answer: the worker was sent nothing.
            self.blame(error)
            heard.refused(Answer(Observed.NOT_SENT, str(error)))
            return
        heard.goes_out()
        heard.answer = await self._answer(worker, op)

    def _blamed(self, heard: "_Heard") -> Answer:
        """The answer; where the board held it up, that is what the publication failed of."""
        if heard.is_held_up and not self._cancelled:
            self.blame(TransportError(heard.answer.detail, phase="not_sent"))
        return heard.answer

    async def _answer(self, worker: WorkerId, op: Op) -> Answer:
        try:
            return await self._call(worker, op)
        except TransportError as error:
            if error.refused and op is not Op.INSPECT:
                return Answer(Observed.DEAD, str(error))
            seen = Observed.NOT_SENT if error.phase == "not_sent" else Observed.LOST
            return Answer(seen, str(error))
        except ReplyError as error:
            return Answer(Observed.LOST, str(error))
        except FleetError as error:
            return Answer(Observed.NOT_SENT, str(error))
        except GenAPIError as error:
            return Answer(Observed.REFUSED, str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, the transaction goes on
            self.blame(error)
            return Answer(Observed.LOST, f"{type(error).__name__}: {error}")

    async def _call(self, worker: WorkerId, op: Op) -> Answer:
        match op:
            case Op.JOIN:
                sender = await self._sender_of(worker)
                group = self._groups[self.tx.workers[worker].group]
                info = {**sender.init_info, **self._digest(worker, sender, of="group")}
                offset, backend = group.ranks.offsets[worker], self._group_transport.backend
                flow = self._asking.admin(worker).join(info, rank_offset=offset, backend=backend)
                return await self._asking.run(worker, op, flow)
            case Op.UPDATE:
                return await self._update(worker)
            case _:
                return await self._asking.ask(worker, op, self.tx)

    @property
    def _group_transport(self) -> GroupTransport:
        """The transport, where a phase that only groups have needs it."""
        if not isinstance(self._transport, GroupTransport):
            message = f"{type(self._transport).__name__} has no group"
            raise TypeError(message)
        return self._transport

    async def _update(self, worker: WorkerId) -> Answer:
        if not self.tx.sends:
            self.times.bytes_sent[worker] = self._stage.total_bytes
            info = {"weights_path": self._path, "label": self.tx.label}
            flow = self._asking.admin(worker).update(info, attachment=None)
            return await self._asking.run(worker, Op.UPDATE, flow)
        sender, bucket = await self._sender_of(worker), await self._bucket.get()
        in_process = self._fleet.control.in_process
        wire = sender.wire(bucket, in_process=in_process)
        sent = self.times.bytes_sent
        sent[worker] = sent.get(worker, 0) + bucket.nbytes
        if wire.attachment is not None:
            self._deliveries[worker] = wire.attachment
        info = {**wire.update_info, **self._digest(worker, sender, of="plan")}
        flow = self._asking.admin(worker).update(info, attachment=wire.attachment)
        return await self._asking.run(worker, Op.UPDATE, flow)

    def _digest(
        self, worker: WorkerId, sender: Sender, *, of: Literal["group", "plan"]
    ) -> dict[str, str]:
        """What the backend is told to agree on, where it is one that compares."""
        transport = self._group_transport
        if not transport.digests:
            return {}
        number = self.tx.workers[worker].group
        if number not in self._digests:
            offsets = self._groups[number].ranks.offsets
            group = group_digest(transport.backend, sender.init_info, offsets)
            plan = plan_digest(group, self._stage.manifest, self._ends)
            self._digests[number] = {"group": group, "plan": plan}
        return {"digest": self._digests[number][of]}

    async def _sender_of(self, worker: WorkerId) -> Sender:
        return await self._senders[self.tx.workers[worker].group].get()

    async def _act(self, act: Act) -> None:
        error, more = await self._tried(act, partial(self._acts[act], self))
        if error is None and act in (Act.JOIN, Act.SEND):
            async with asyncio.TaskGroup() as tasks:
                for number in self._acted_on(act):
                    tasks.create_task(self._act_in_group(act, number))
        if act is Act.JOIN:
            for sender in self._senders:
                sender.end()  # a group that broke before its turn gets none
        if error is not None:
            self._bucket.put(None)
            self._inbox.put_nowait(ActFailed(act, error))
            return
        self._inbox.put_nowait(ActDone(act, more=bool(more)))

    def _acted_on(self, act: Act) -> list[int]:
        return sorted(self.tx.whole - (self.tx.standing if act is Act.JOIN else set()))

    async def _act_in_group(self, act: Act, number: int) -> None:
        """Do the part of one group; when it fails the others know nothing of it."""
        what = {Act.JOIN: self._join, Act.SEND: self._send}[act]
        error, _ = await self._tried(act, partial(what, number))
        if error is not None:
            self._senders[number].put(None)
            self._inbox.put_nowait(Broke(act, number, error))

    async def _tried(
        self, act: Act, what: Callable[[], Awaitable[T]]
    ) -> tuple[str | None, T | None]:
        """What came of it in time: an error in words or None, and what it returned."""
        error, limit_s = "", self._act_limit_s(act)
        with self._bounded(limit_s) as scope:
            try:
                return None, await what()
            except Exception as raised:  # noqa: BLE001 - a source may raise anything
                self.blame(raised)
                error = f"{type(raised).__name__}: {raised}"
            finally:
                self._scopes.discard(scope)
        return error or f"{self._awaited(act)} within {limit_s:g} s", None

    def _awaited(self, act: Act) -> str:
        """Who did not do what, where the publisher's own part is late."""
        if act in (Act.INTEND, Act.COMMIT):
            return "the board gave no answer"
        if self._stage.awaited is not None:
            return f"the weight source did not give {self._stage.awaited}"
        if act is Act.STAGE:
            return f"{type(self._transport).__name__} did not write the version"
        return "not done"

    async def _act_stage(self) -> bool:
        await self._stage.prepare()
        in_process = self._fleet.control.in_process
        self._check_manifest()
        self._transport.check(self._stage.manifest, in_process=in_process)
        if isinstance(self._transport, WeightStore):
            self._path = await self._transport.write(
                self._version,
                self._stage.manifest,
                self._written(),
                supersedes=self._ledger.is_held,
            )
            return False
        buckets = plan_buckets(
            [meta.nbytes for meta in self._stage.manifest],
            bucket_bytes=self._transport.bucket_bytes,
            bucket_tensors=self._transport.bucket_tensors,
        )
        self._buckets_left = len(buckets)
        self._ends = tuple(bucket.stop for bucket in buckets)
        return False

    def _check_manifest(self) -> None:
        """Raise unless the tensors are those of the last publication, as far as one is known."""
        differences = () if self._known is None else explain(self._known, self._stage.manifest)
        if differences:
            raise ConfigError(
                "the manifest is not that of the last publication, so nothing was sent: "
                f"{describe(differences)}. Pass manifest_changed=True to publish(...) if that is "
                "meant"
            )

    async def _act_join(self) -> bool:
        return False  # all of it is done in each group

    async def _join(self, number: int) -> None:
        group = self._groups[number]
        group.sender = sender = await self._group_transport.sender(
            world_size=group.ranks.world_size, timeout_s=self._timeouts.group_s
        )
        if number in self.tx.broken:
            sender.abandon()  # given up before it was there
            return
        self._senders[number].put(sender)
        await sender.join()

    async def _act_send(self) -> bool:
        """Gather the next bucket, once for all groups; each is then sent it."""
        self._bucket.put(await anext(self._stage))
        self._buckets_left -= 1
        return self._buckets_left > 0

    async def _send(self, number: int) -> None:
        sender, bucket = await self._senders[number].get(), await self._bucket.get()
        if number not in self.tx.broken:
            await sender.send(bucket)

    async def _act_intend(self) -> bool:
        now = {worker: progress.fence for worker, progress in self.tx.workers.items()}
        await self._ledger.intend(self._version, [*now.items(), *self._left_out.items()])
        return False

    async def _act_commit(self) -> bool:
        barriers: dict[WorkerId, Fence | None] = dict.fromkeys(self.tx.workers)
        for worker, progress in self.tx.workers.items():
            if not is_proved(self.tx, progress):
                verdict = conclude(self.tx, progress, self._asking.admin(worker).verdicts)
                barriers[worker] = fence(self.tx, progress, verdict)
        rows = [*barriers.items(), *self._left_out.items()]
        rule = context_rule(self._plan)
        await self._ledger.commit(self._version, rows, rule)
        for worker, barrier in barriers.items():
            if barrier is not None:
                # Whoever is not proved is kept from traffic before the version counts.
                self._fleet.membership.fence(self._members[worker], barrier)
        salted = self._plan.prefix_cache == "salt"
        self._fleet.membership.commit(self._version, rule=rule, salted=salted)
        return False

    _acts: Mapping[Act, Callable[["Drive"], Awaitable[bool]]] = {
        Act.STAGE: _act_stage,
        Act.JOIN: _act_join,
        Act.INTEND: _act_intend,
        Act.SEND: _act_send,
        Act.COMMIT: _act_commit,
    }

    def _abandon(self, number: int) -> None:
        if not self.tx.whole:
            self._stage.abandon()
        sender = self._groups[number].sender
        if sender is not None:
            sender.abandon()
        for worker, scope in self._in_collective.items():
            if self.tx.workers[worker].group == number:
                self._limit(scope)

    def _broken(self) -> list[Group]:
        """Groups that a failure may have reached, which are of no further use."""
        touched = {p.group for p in self.tx.workers.values() if Op.BEGIN in p.asked}
        unproved = {p.group for p in self.tx.workers.values() if not is_proved(self.tx, p)}
        broken = self.tx.broken | (touched & unproved)
        return [self._groups[number] for number in sorted(broken)]

    def _gathered(self, done: int, total: int) -> None:
        self._observe(
            SenderProgress(
                version=self._version, what="gathered", bytes_done=done, bytes_total=total
            )
        )

    async def _written(self) -> AsyncIterator[Bucket]:
        """The buckets, for a store that asks for the next when it has written one."""
        done, total = 0, self._stage.total_bytes
        async for bucket in self._stage:
            yield bucket
            done += bucket.nbytes
            version = self._version
            self._observe(
                SenderProgress(version=version, what="written", bytes_done=done, bytes_total=total)
            )

    def _act_limit_s(self, act: Act) -> float:
        limits = self._timeouts
        return {
            Act.STAGE: limits.stage_s,
            Act.JOIN: limits.group_s,
            Act.SEND: limits.transfer_s,
            Act.INTEND: limits.label_s,
            Act.COMMIT: limits.label_s,
        }[act]
