"""What is asked of one worker during a publication: which calls, and what their replies show.

The rule of this file: each operation is asked once and answered as it is. When it is asked, how
long it is waited for in all and what follows is `drive`'s, as are joining and updating, which go
with the trainer's end.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from genapi.errors import GenAPIError, ProviderError, TransportError, UnsupportedError
from genapi.fleet import Fleet
from genapi.membership import Member
from genapi.probe import Probe
from genapi.providers.base import Admin, WorkerFacts
from genapi.publication.evidence import Answer, Observed, Op
from genapi.publication.plan import PausePlan
from genapi.publication.transaction import Transaction
from genapi.types.config import PublishTimeouts
from genapi.types.ids import WorkerId
from genapi.types.policy import PolicyVersion, parse_label
from genapi.types.worker import Recovery, VerifyLevel
from genapi.wire.flow import Flow

__all__ = ("Asking",)

_NO_LABEL = "default"
"""What a worker that told no label is given back: engines take a text only, and call theirs so."""


class Asking:
    """The questions of one publication to its workers.

    Attributes:
        limits_s: seconds that one worker may take for each operation, retries included.
    """

    def __init__(  # noqa: PLR0913 - what a publication is made of
        self,
        *,
        fleet: Fleet,
        admin_of: Callable[[WorkerFacts | None], Admin],
        members: Mapping[WorkerId, Member],
        version: PolicyVersion,
        plan: PausePlan,
        backend: str,
        probe: Probe,
        levels: tuple[VerifyLevel, ...],
        timeouts: PublishTimeouts,
    ) -> None:
        """Ask nothing yet."""
        self._fleet = fleet
        self._admin_of = admin_of
        self._members = members
        self._version = version
        self._plan = plan
        self._backend = backend
        self._probe = probe
        self._levels = levels
        self._timeouts = timeouts
        self.limits_s = self._limits()

    async def ask(self, worker: WorkerId, op: Op, tx: Transaction) -> Answer:
        """The answer of a worker to anything but JOIN and UPDATE."""
        match op:
            case Op.INSPECT:
                return await self._inspect(worker, tx)
            case Op.MARK | Op.UNMARK | Op.LABEL:
                return await self._label(worker, op, tx)
            case Op.READ:
                return await self._read(worker, tx)
            case Op.PROBE:
                return await self._probed(worker, tx)
            case Op.SHUT:
                return await self._shut(worker)
            case _:
                return await self.run(worker, op, self._plain[op](self, tx, self.admin(worker)))

    def admin(self, worker: WorkerId) -> Admin:
        """How that worker is administered."""
        return self._admin_of(self._members[worker].facts)

    async def run(self, worker: WorkerId, op: Op, flow: Flow[Answer]) -> Answer:
        """The answer of a worker to a flow of the provider's."""
        url = self._members[worker].url
        return await self._fleet.control.run(url, flow, operation=op, timeout_s=self.limits_s[op])

    async def _inspect(self, worker: WorkerId, tx: Transaction) -> Answer:
        url = self._members[worker].url
        membership = self._fleet.membership
        facts, found = await self._who(worker, Op.INSPECT)
        if found != worker:
            # One odd read changes nothing: the change has to be seen twice.
            facts, found = await self._who(worker, Op.INSPECT)
        if found != worker:
            membership.learn(url, facts)
            detail = f"{found} answers in place of {worker}; publish again to include it"
            return Answer(Observed.REFUSED, detail)
        fence = tx.workers[worker].fence
        if fence is not None and fence.recovery is Recovery.RESTART_THEN_PUBLISH:
            return Answer(Observed.REFUSED, f"restart it first: {fence.reason}")
        held = parse_label(facts.label, run=self._version.run)
        if held is not None and (held.step, held.attempt) >= (
            self._version.step,
            self._version.attempt,
        ):
            membership.learn(url, facts)
            return Answer(Observed.REFUSED, f"it holds {held} already; publish a newer step")
        if fence is not None and not facts.sleep_is_sure:
            # This process paused it itself, which may be all that is told as sleep.
            facts = replace(facts, asleep=False)
        admin = self._admin_of(facts)
        admin.check(self._plan, facts, backend=self._backend)
        await self._check_levels(worker, facts)
        membership.learn(url, facts)
        return Answer(Observed.DONE, facts={"label": facts.label, "paused": facts.paused})

    async def _check_levels(self, worker: WorkerId, facts: WorkerFacts) -> None:
        """Raise unless the worker can be verified as was asked, before anything is touched."""
        if "probe" in self._levels:
            url, limit_s = self._members[worker].url, self._timeouts.probe_s
            await self._probe.check(self._fleet, worker, url, facts, timeout_s=limit_s)
        if "checksum" in self._levels:
            admin = self._admin_of(facts)
            answer = await self.run(worker, Op.INSPECT, admin.has_checksum())
            if not answer.done:
                raise UnsupportedError(answer.detail)

    async def _label(self, worker: WorkerId, op: Op, tx: Transaction) -> Answer:
        told = tx.workers[worker].found.get("label")
        found = told if isinstance(told, str) else _NO_LABEL
        label = {Op.MARK: self._version.updating_label, Op.UNMARK: found}.get(op, tx.label)
        if op is not Op.MARK:
            # A label of a version would be believed of whatever process has it.
            _, there = await self._who(worker, op)
            if there != worker:
                return Answer(Observed.REFUSED, f"{there} answers in place of {worker}")
        answer = await self.run(worker, op, self.admin(worker).label(label))
        return replace(answer, facts={"label": label}) if answer.done else answer

    async def _read(self, worker: WorkerId, tx: Transaction) -> Answer:
        """Read the label back and, where it is this attempt's, what the worker holds."""
        read = await self.run(worker, Op.READ, self.admin(worker).read())
        own = read.done and read.facts.get("label") == tx.label
        if not own or "checksum" not in self._levels:
            return read
        sums = await self.run(worker, Op.READ, self.admin(worker).checksum())
        return replace(sums, facts={**read.facts, **sums.facts})

    async def _shut(self, worker: WorkerId) -> Answer:
        """Pause it again, ending what it generates, and let its label say so to everybody."""
        admin = self.admin(worker)
        paused = await self.run(worker, Op.SHUT, admin.pause(PausePlan(mode="abort")))
        if not paused.done or not admin.marks:
            return paused
        label = self._version.updating_label
        answer = await self.run(worker, Op.SHUT, admin.label(label))
        return replace(answer, facts={"label": label}) if answer.done else answer

    async def _probed(self, worker: WorkerId, tx: Transaction) -> Answer:
        """Read once more who answers, under which label, and how it scores the probe's ids."""
        url = self._members[worker].url
        facts, found = await self._who(worker, Op.PROBE)
        self._fleet.membership.learn(url, facts)
        if found != worker or facts.label != tx.label:
            detail = f"{found} answers in place of {worker} and holds {facts.label!r}"
            return Answer(Observed.OTHER_LABEL, detail)
        seen = {"label": facts.label, "paused": facts.paused}
        if "probe" not in self._levels:
            return Answer(Observed.DONE, facts=seen)
        try:
            scores = await self._probe.score(self._fleet, url, timeout_s=self._timeouts.probe_s)
        except GenAPIError as error:
            return Answer(_why_no_score(error), str(error), seen)
        return Answer(Observed.DONE, facts={**seen, "scores": scores})

    async def _who(self, worker: WorkerId, op: Op) -> tuple[WorkerFacts, WorkerId]:
        """What answers where the worker was, and its identity."""
        member = self._members[worker]
        limit_s = self.limits_s[op]
        facts = await self._fleet.inspect(member.url, known=member.facts, timeout_s=limit_s)
        return facts, self._fleet.membership.identify(member.url, facts)

    _plain: Mapping[Op, Callable[["Asking", Transaction, Admin], Flow[Answer]]] = {
        Op.PAUSE: lambda self, _tx, admin: admin.pause(self._plan),
        Op.CONFIRM: lambda _self, _tx, admin: admin.confirm(),
        Op.HEAL: lambda _self, _tx, admin: admin.heal(),
        Op.BEGIN: lambda _self, _tx, admin: admin.begin(),
        Op.FINISH: lambda _self, tx, admin: admin.finish(
            tx.label if admin.finish_sets_label else None
        ),
        Op.RESUME: lambda self, _tx, admin: admin.resume(self._plan),
        Op.CLOSE: lambda _self, _tx, admin: admin.close(),
    }

    def _limits(self) -> Mapping[Op, float]:
        limits = self._timeouts
        checksum_s = limits.checksum_s if "checksum" in self._levels else 0.0
        probe_s = limits.probe_s if "probe" in self._levels else 0.0
        return {
            Op.INSPECT: limits.preflight_s + probe_s,
            # The trainer's end gives up first; whoever does not answer then is the one to name.
            Op.JOIN: limits.group_s + limits.cleanup_s,
            Op.UPDATE: limits.transfer_s + limits.cleanup_s,
            Op.PAUSE: limits.pause_s,
            Op.CONFIRM: limits.confirm_s,
            Op.MARK: limits.label_s,
            Op.UNMARK: limits.label_s,
            Op.HEAL: limits.begin_s,
            Op.BEGIN: limits.begin_s,
            Op.FINISH: limits.finish_s,
            Op.LABEL: limits.label_s,
            Op.READ: limits.verify_s + checksum_s,
            Op.RESUME: limits.resume_s,
            Op.CLOSE: limits.cleanup_s,
            Op.PROBE: limits.verify_s + probe_s,
            Op.SHUT: limits.pause_s + limits.label_s,
        }


def _why_no_score(error: GenAPIError) -> Observed:
    if isinstance(error, ProviderError) and error.code == "engine_dead":
        return Observed.DEAD
    return Observed.LOST if isinstance(error, TransportError) else Observed.REFUSED
