"""`WeightPublisher`: moves a policy onto every worker of a fleet, as one transaction."""

import uuid
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import anyio

from genapi.control import fan_out
from genapi.drive import Drive, Group
from genapi.errors import (
    ConfigError,
    FleetError,
    GenAPIError,
    PublishError,
    UnsupportedError,
)
from genapi.fleet import Fleet
from genapi.membership import Member
from genapi.publication.context import context_rule
from genapi.publication.evidence import Op
from genapi.publication.plan import InFlightKV, PauseMode, PausePlan, PrefixCache
from genapi.publication.ranks import Ranked, plan_ranks
from genapi.publication.transaction import Progress, Transaction, conclude, fence
from genapi.types.config import PublishTimeouts
from genapi.types.ids import WorkerId
from genapi.types.policy import PolicyVersion, is_updating_label, parse_label
from genapi.types.worker import Evidence, Outcome, PublishReport, Receipt
from genapi.weights.base import WeightSource, WeightTransport

__all__ = ("WeightPublisher",)

_LATER: Mapping[str, Any] = {
    "on_partial": "hold",
    "min_workers": None,
    "max_workers_per_group": None,
    "restarter": None,
    "at_most": None,
    "latest_only": False,
}
"""Options that come with a later release, and the only value they have until then."""


class WeightPublisher:
    """Publishes weights onto every worker of a fleet: all of them, or an error with receipts.

    One publisher per fleet; publications of one publisher run one after the other. A publication
    pauses the workers, moves the weights, reads back each worker's label and only then resumes.
    After a failure past the first BEGIN nobody is resumed: the receipts name the way back, and a
    later `publish` takes it where no restart is needed.
    """

    def __init__(  # noqa: PLR0913 - the call site is fixed
        self,
        fleet: Fleet,
        *,
        transport: WeightTransport,
        mode: PauseMode = "keep",
        in_flight_kv: InFlightKV = "recompute",
        prefix_cache: PrefixCache = "salt",
        verify: tuple[str, ...] = ("label",),
        timeouts: PublishTimeouts | None = None,
        on_partial: Literal["hold", "serve"] = "hold",
        min_workers: int | None = None,
        max_workers_per_group: int | None = None,
        restarter: Any = None,
    ) -> None:
        """Touch nothing yet.

        Args:
            fleet: an open fleet.
            transport: how tensors travel: `genapi.weights.Gloo()`, `genapi.weights.Memory()`.
            mode: what happens to running requests: `keep` freezes them, `drain` lets them
                finish, `abort` ends them.
            in_flight_kv: under `keep`, whether frozen requests recompute their keys and values
                on the new weights (`recompute`) or go on with the old ones (`stale`).
            prefix_cache: `salt` and `flush` keep old entries out; `stale` lets them be reused.
            verify: how a worker is verified; `label` reads its label back.
            timeouts: bounds of the phases.
            on_partial: `hold`: unless every worker committed nobody resumes.
            min_workers: comes with `on_partial="serve"`.
            max_workers_per_group: comes later.
            restarter: comes later.

        Raises:
            ConfigError: the cache decisions do not fit the mode.
            UnsupportedError: an option that is not supported yet.
        """
        _only_now(
            on_partial=on_partial,
            min_workers=min_workers,
            max_workers_per_group=max_workers_per_group,
            restarter=restarter,
        )
        if verify != ("label",):
            message = f"verify={verify!r} is not supported yet; use verify=('label',)"
            raise UnsupportedError(message)
        self._fleet = fleet
        self._transport = transport
        self._plan = PausePlan(mode, in_flight_kv, prefix_cache)
        self._timeouts = timeouts or PublishTimeouts()
        self._group: Group | None = None
        self._attempts: dict[int, int] = {}
        self._one = anyio.Lock()
        self.last_report: PublishReport | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Leave the transfer group on both sides. Bounded; workers keep what they hold."""
        group, self._group = self._group, None
        if group is None:
            return
        fleet = self._fleet
        with anyio.move_on_after(self._timeouts.cleanup_s, shield=True):
            urls = [m.url for m in fleet.membership.members.values() if m.id in group.key]
            admin = fleet.provider.admin
            await fan_out(
                {
                    url: partial(
                        fleet.control.run,
                        url,
                        admin.leave(),
                        operation="leave",
                        timeout_s=self._timeouts.cleanup_s,
                    )
                    for url in urls
                }
            )
        await group.sender.aclose()

    async def adopt(self, step: int | PolicyVersion) -> PublishReport:
        """Label workers that hold the right weights already; moves nothing.

        Use it once for freshly started servers, whose label is a sentinel. Workers that carry
        `step` of this run already are left as they are.

        Args:
            step: the step (of the fleet's run) that the workers hold.

        Raises:
            FleetError: a worker cannot be read, or carries another version.
            PublishError: a label could not be set or read back.
        """
        async with self._one:
            members = await self._members()
            version = self._version_to_adopt(step, members)
            results = await fan_out(
                {worker: partial(self._adopt, m.url, version) for worker, m in members.items()}
            )
            receipts = tuple(
                self._adopted(worker, members[worker], version, result)
                for worker, result in results.items()
            )
            committed = all(r.outcome is Outcome.COMMITTED for r in receipts)
            errors = [r.error for r in receipts if r.error]
            report = PublishReport(
                version=version,
                committed=committed,
                receipts=receipts,
                error=None if committed else errors[0] if errors else "not every label was set",
            )
            self.last_report = report
            if not committed:
                raise PublishError(str(report), report=report)
            self._attempts[version.step] = version.attempt
            self._fleet.membership.commit(version, rule="own", salted=self._salted)
            return report

    async def publish(
        self,
        step: int | PolicyVersion,
        source: WeightSource,
        *,
        mode: PauseMode | None = None,
        in_flight_kv: InFlightKV | None = None,
        prefix_cache: PrefixCache | None = None,
        at_most: int | None = None,
        latest_only: bool = False,
    ) -> PublishReport:
        """Move the weights of `source` onto every worker under the version `step`.

        Cancelling it ends the transaction first, none of whose phases then outlasts `cleanup_s`;
        `last_report` has the receipts then.

        Args:
            step: newer than the committed step, or a new attempt of one that did not commit.
            source: the weights.
            mode: as in the constructor, for this publication.
            in_flight_kv: likewise.
            prefix_cache: likewise.
            at_most: comes later.
            latest_only: comes later.

        Raises:
            ConfigError: the step is not newer, or the cache decisions do not fit the mode.
            FleetError: a worker was never reached.
            PublishError: not every worker committed; `.report` has a receipt for each.
        """
        _only_now(at_most=at_most, latest_only=latest_only)
        plan = PausePlan(
            mode or self._plan.mode,
            in_flight_kv or self._plan.in_flight_kv,
            prefix_cache or self._plan.prefix_cache,
        )
        async with self._one:
            members = await self._members()
            version = self._version_to_publish(step, members)
            drive = self._drive(version, source, members, plan)
            try:
                await drive.run()
            finally:
                self._group = drive.group
                report = self._settle(drive, members, version)
            if not report.committed:
                raise PublishError(str(report), report=report) from drive.cause
            return report

    @property
    def _salted(self) -> bool:
        return self._plan.prefix_cache == "salt"

    async def _members(self) -> dict[WorkerId, Member]:
        membership = self._fleet.membership
        unread = any(m.id is None or m.suspect for m in membership.members.values())
        if unread:
            await self._fleet.snapshot()
        strangers = [m.name for m in membership.members.values() if m.id is None]
        if strangers:
            message = (
                f"workers {', '.join(strangers)} were never reached, so nothing can be published; "
                "wait_ready() says why"
            )
            raise FleetError(message)
        return {m.id: m for m in membership.members.values() if m.id is not None}

    def _run_of(self, step: int | PolicyVersion) -> str:
        membership = self._fleet.membership
        run = membership.run
        if isinstance(step, PolicyVersion):
            if run is not None and step.run != run:
                message = f"{step} is of run {step.run!r}, but the fleet's run is {run!r}"
                raise ConfigError(message)
            return step.run
        return run or f"run-{uuid.uuid4().hex[:12]}"

    def _version_to_adopt(
        self, step: int | PolicyVersion, members: Mapping[WorkerId, Member]
    ) -> PolicyVersion:
        run = self._run_of(step)
        number = step.step if isinstance(step, PolicyVersion) else step
        for member in members.values():
            label = member.facts.label if member.facts else None
            if is_updating_label(label):
                raise FleetError(
                    f"{member.name} was left in the middle of an update ({label!r}); publish to it"
                )
        held = {m.version(self._fleet.membership.run) for m in members.values()} - {None}
        attempt = step.attempt if isinstance(step, PolicyVersion) else 1
        for version in held:
            assert version is not None  # noqa: S101 - None was taken out
            if version.step != number:
                message = (
                    f"cannot adopt step {number}: a worker already carries {version}; "
                    "adopt that step, or publish"
                )
                raise FleetError(message)
            run, attempt = version.run, version.attempt
        return PolicyVersion(run=run, step=number, attempt=attempt)

    def _version_to_publish(
        self, step: int | PolicyVersion, members: Mapping[WorkerId, Member]
    ) -> PolicyVersion:
        membership = self._fleet.membership
        run = self._run_of(step)
        number = step.step if isinstance(step, PolicyVersion) else step
        held = [v for m in members.values() if (v := m.version(run)) is not None]
        newest = max([v.step for v in held], default=-1)
        if membership.committed is not None:
            newest = max(newest, membership.committed.step)
        if number < newest or (
            membership.committed is not None and number == membership.committed.step
        ):
            message = f"step {number} is not newer than {newest}, which the fleet holds already"
            raise ConfigError(message)
        tried = [v.attempt for v in held if v.step == number] + [self._attempts.get(number, 0)]
        attempt = max(tried) + 1
        if isinstance(step, PolicyVersion):
            attempt = max(attempt, step.attempt)
        self._attempts[number] = attempt
        return PolicyVersion(run=run, step=number, attempt=attempt)

    def _drive(
        self,
        version: PolicyVersion,
        source: WeightSource,
        members: dict[WorkerId, Member],
        plan: PausePlan,
    ) -> Drive:
        ranks = plan_ranks(
            Ranked(worker, m.facts.ranks if m.facts else 1, m.facts.dp_group if m.facts else None)
            for worker, m in members.items()
        )
        group = self._group
        stands = group is not None and group.key == tuple(members)
        tx = Transaction(
            label=version.label,
            workers={worker: Progress(fence=m.fence) for worker, m in members.items()},
            join=not stands,
            finish_sets_label=self._fleet.provider.admin.finish_sets_label,
            acknowledged=self._transport.acknowledges,
        )
        return Drive(
            tx,
            fleet=self._fleet,
            members=members,
            version=version,
            source=source,
            transport=self._transport,
            ranks=ranks,
            plan=plan,
            timeouts=self._timeouts,
            group=group,
            commit=partial(
                self._fleet.membership.commit,
                version,
                rule=context_rule(plan),
                salted=plan.prefix_cache == "salt",
            ),
        )

    def _settle(
        self, drive: Drive, members: Mapping[WorkerId, Member], version: PolicyVersion
    ) -> PublishReport:
        tx = drive.tx
        receipts = tuple(self._receipt(drive, worker, member) for worker, member in members.items())
        report = PublishReport(
            version=version,
            committed=tx.committed,
            receipts=receipts,
            phases=tuple(drive.times.phases),
            error=None if tx.committed else tx.error or "the publication did not end",
        )
        self.last_report = report
        return report

    def _receipt(self, drive: Drive, worker: WorkerId, member: Member) -> Receipt:
        tx, membership = drive.tx, self._fleet.membership
        progress = tx.workers[worker]
        verdict = conclude(tx, progress, self._fleet.provider.admin.verdicts)
        before = member.version(membership.run)
        after = before
        read = progress.answers.get(Op.READ)
        if read is not None and "label" in read.facts:
            label = read.facts["label"]
            after = parse_label(label)
            member.note_label(label)
        elif Op.BEGIN in progress.asked:
            after = None
        barrier = fence(tx, progress, verdict)
        membership.fence(member, barrier)
        failure = progress.failure
        return Receipt(
            worker=worker,
            url=member.url,
            outcome=verdict.outcome,
            evidence=verdict.evidence,
            version_before=before,
            version_after=after,
            paused_s=drive.times.paused_s(worker),
            bytes_sent=drive.times.bytes_sent.get(worker, 0),
            fence=barrier,
            recovery=verdict.recovery,
            error=None
            if failure is None
            else f"{failure[0]}: {failure[1].observed}: {failure[1].detail}".rstrip(": "),
        )

    async def _adopt(self, url: str, version: PolicyVersion) -> str | None:
        control, admin = self._fleet.control, self._fleet.provider.admin
        timeouts = self._timeouts
        member = self._fleet.membership.members[url]
        if member.facts is not None:
            member.facts.capabilities.require("admin", where=url)
        if member.facts is None or member.facts.label != version.label:
            answer = await control.run(
                url,
                admin.label(version.label),
                operation=Op.LABEL,
                timeout_s=timeouts.label_s,
            )
            if not answer.done:
                raise FleetError(f"label on {url}: {answer.observed}: {answer.detail}")
        answer = await control.run(
            url, admin.read(), operation=Op.READ, timeout_s=timeouts.verify_s
        )
        label = answer.facts.get("label")
        return label if isinstance(label, str) else None

    def _adopted(
        self,
        worker: WorkerId,
        member: Member,
        version: PolicyVersion,
        result: str | GenAPIError | None,
    ) -> Receipt:
        before = member.version(None)
        proved = result == version.label
        if proved:
            member.note_label(version.label)
        if isinstance(result, GenAPIError):
            error: str | None = str(result)
        else:
            error = None if proved else f"label read back is {result!r}"
        return Receipt(
            worker=worker,
            url=member.url,
            outcome=Outcome.COMMITTED if proved else Outcome.UNTOUCHED,
            evidence=Evidence.OWN_LABEL if proved else Evidence.NOT_BEGUN,
            version_before=before,
            version_after=version if proved else None,
            error=error,
        )


def _only_now(**options: Any) -> None:
    for name, value in options.items():
        if value != _LATER[name]:
            message = f"{name}={value!r} is not supported yet; leave it at {_LATER[name]!r}"
            raise UnsupportedError(message)
