"""`WeightPublisher`: moves a policy onto every worker of a fleet, as one transaction."""

import logging
import uuid
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, get_args

import anyio

from genapi.absence import Absences, Restarter, check_reached, nameless
from genapi.adoption import check_adoptable, label_all
from genapi.control import fan_out
from genapi.drive import Drive
from genapi.ending import to_the_end
from genapi.errors import (
    ConfigError,
    FleetError,
    GenAPIError,
    PublishError,
    SupersededError,
    TransportError,
    UnsupportedError,
)
from genapi.fleet import Fleet
from genapi.groups import Group, leave, regroup
from genapi.keeping import Keeping
from genapi.ledger import Ledger
from genapi.membership import Member
from genapi.probe import PROBE_IDS, Probe
from genapi.providers.base import Admin
from genapi.publication.evidence import Op
from genapi.publication.numbering import (
    run_of,
    step_number,
    version_to_adopt,
    version_to_publish,
)
from genapi.publication.plan import InFlightKV, PauseMode, PausePlan, PrefixCache
from genapi.publication.ranks import Ranked, RankPlan, plan_groups
from genapi.publication.transaction import Progress, Transaction
from genapi.publication.verification import Checks, levels_of
from genapi.receipts import receipt_of
from genapi.shown import few
from genapi.types.arguments import flag, one_of, whole, with_methods
from genapi.types.board import BoardState
from genapi.types.config import PublishTimeouts
from genapi.types.ids import TokenIds, WorkerId
from genapi.types.policy import (
    ContextRule,
    PolicyVersion,
    parse_updating_label,
    version_given,
)
from genapi.types.worker import (
    Fence,
    FenceStrength,
    Outcome,
    PublishReport,
    Receipt,
    Recovery,
    VerifyLevel,
)
from genapi.weights.base import (
    GroupTransport,
    TensorMeta,
    WeightSource,
    WeightStore,
    WeightTransport,
    check_source,
)

__all__ = ("WeightPublisher",)

_log = logging.getLogger(__name__)

OnPartial = Literal["hold", "serve"]

_LATER: Mapping[str, Any] = {
    "at_most": None,
    "latest_only": False,
}
"""Options that come with a later release, and the only value they have until then."""


class WeightPublisher:
    """Publishes weights onto every worker of a fleet: all of them, or an error with receipts.

    Publications on one fleet run one after the other. A publication
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
        verify: Sequence[VerifyLevel] = ("label",),
        probe_ids: Sequence[int] | None = None,
        probe_tolerance: float = 1e-3,
        probe_max_gap: float = 0.1,
        timeouts: PublishTimeouts | None = None,
        on_partial: OnPartial = "hold",
        min_workers: int | None = None,
        max_workers_per_group: int | None = None,
        restarter: Restarter | None = None,
    ) -> None:
        """Touch nothing yet.

        Args:
            fleet: an open fleet.
            transport: how weights travel: `genapi.weights.Gloo()`, `genapi.weights.Memory()`,
                `genapi.weights.Filesystem(dir)`.
            mode: what happens to running requests: `keep` freezes them, `drain` lets them
                finish, `abort` ends them.
            in_flight_kv: under `keep`, whether frozen requests recompute their keys and values
                on the new weights (`recompute`) or go on with the old ones (`stale`).
            prefix_cache: `salt` and `flush` keep old entries out; `stale` lets them be reused.
            verify: how a worker is verified. `label`, always: its label is read back.
                `checksum`: its bytes are compared with those of the others, while paused.
                `probe`: once resumed and before requests go to it, its scores of a few ids are
                compared with those of the others and the trainer.
            probe_ids: the ids that are scored; None = twelve that every model has.
            probe_tolerance: most nats between the scores of two workers.
            probe_max_gap: most nats between a score of a worker and the trainer's own.
            timeouts: bounds of the phases.
            on_partial: `hold`: unless every worker committed nobody resumes. `serve`: with at least
                `min_workers` proved they serve the version, and the others are fenced. Whoever
                refuses connections, gives no answer or has to be restarted is then left out from
                the start, with a receipt, until it is back.
            min_workers: goes with `on_partial="serve"`, at least 1.
            max_workers_per_group: most workers that one failed collective reaches: they are divided
                into groups of at most so many, which get every bucket side by side. None = one
                group of all. Files have no groups: each worker fails alone.
            restarter: `async (worker, url)`: restarts a server that needs it. It is called before a
                publication for every worker that cannot be healed, or that refused connections, was
                not ready or gave no answer for `preflight_s` when it was read once more; and again
                after a publication that ended so, which is then tried again.

        Raises:
            ConfigError: an argument cannot be taken: the message names it, its value and what to
                pass; or the cache decisions do not fit the mode.
        """
        if not isinstance(fleet, Fleet):
            raise ConfigError(f"fleet={fleet!r}: pass what genapi.connect() returns, open")
        if not isinstance(timeouts, PublishTimeouts | None):
            raise ConfigError(f"timeouts={timeouts!r}: pass a genapi.PublishTimeouts, or None")
        if restarter is not None:
            with_methods("restarter", restarter, ["__call__"], remedy="pass a function, or None")
        max_workers_per_group, min_workers = (
            None if value is None else whole(name, value, least=1, more=", or None")
            for name, value in (
                ("max_workers_per_group", max_workers_per_group),
                ("min_workers", min_workers),
            )
        )
        one_of("on_partial", on_partial, get_args(OnPartial))
        if (on_partial == "serve") != (min_workers is not None):
            raise ConfigError(
                f"on_partial={on_partial!r} with min_workers={min_workers!r}: 'serve' needs "
                "min_workers of at least 1, and 'hold' takes none"
            )
        self._levels = levels_of(verify)
        ids = PROBE_IDS if probe_ids is None else _probe_ids(probe_ids)
        self._probe = Probe(ids, tolerance=probe_tolerance, max_gap=probe_max_gap)
        self._fleet = fleet
        self._given = self._transport = _opened(transport)
        self._admin_of = partial(
            fleet.provider.administer, files=isinstance(self._transport, WeightStore)
        )
        self._admin_of(None)  # raises where workers cannot be told to load files
        self._plan = PausePlan(mode, in_flight_kv, prefix_cache)
        self._timeouts = timeouts or PublishTimeouts()
        self._groups: tuple[Group, ...] = ()
        self._max_workers_per_group = max_workers_per_group
        self._attempts: dict[int, int] = {}
        self._stored: AbstractSet[PolicyVersion] = frozenset()
        self._manifest: tuple[TensorMeta, ...] | None = None
        self._ledger = Ledger(fleet.board)
        self._min_workers = min_workers
        self._restarter = restarter
        self._absences = Absences(
            fleet, timeouts=self._timeouts, min_workers=min_workers, restarter=restarter
        )
        store = self._transport
        self._keeping = (
            Keeping(fleet, store, ledger=self._ledger, limit_s=self._timeouts.cleanup_s)
            if isinstance(store, WeightStore)
            else None
        )
        self._left_open: BoardState | None = None
        self._in_doubt: set[str] = set()
        self._last: PolicyVersion | None = None
        self.last_report: PublishReport | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose(final=error is None)

    @property
    def probe_ids(self) -> TokenIds:
        """The ids that the probe scores: a trainer scores the same ones for `probe_logprobs`."""
        return self._probe.ids

    async def aclose(self, *, final: bool = True) -> None:
        """Say that no newer version comes, and leave the transfer groups on both sides.

        Files of publications that failed are removed, but for what a worker may be reading.

        Bounded, and done before a cancellation is raised; workers keep what they hold. A publisher
        that only adopted, or whose last publication did not commit, says nothing of an end.

        Args:
            final: whether nobody publishes after this publisher. Requests that wait for a newer
                version are then refused, until another publisher starts. `async with` passes
                whether its block ended without an error.
        """
        await to_the_end(partial(self._close, final=final), what="the publisher")

    async def _close(self, *, final: bool) -> None:
        last, self._last = self._last, None
        if final and last is not None:
            await self._finish(last)
        if self._keeping is not None:
            await self._tidy_up()
            await self._keeping.release()
        groups, self._groups = self._groups, ()
        members = {w for group in groups if group.sender is not None for w in group.ranks.offsets}
        try:
            with anyio.move_on_after(self._timeouts.cleanup_s):
                await self._have_left(members)
        finally:
            await leave(groups)

    async def _finish(self, last: PolicyVersion) -> None:
        membership, limit_s = self._fleet.membership, self._timeouts.cleanup_s
        if not self._fleet.is_open or membership.committed != last:
            return  # another publisher of this fleet goes on
        why = f"no answer within cleanup_s={limit_s:g}"
        with anyio.move_on_after(limit_s):
            try:
                await self._ledger.finish()
            except SupersededError:
                return
            except GenAPIError as error:
                why = str(error)
            else:
                membership.end(last)
                return
        _log.warning("the board was not told that %s is the last version: %s", last, why)

    async def _tidy_up(self) -> None:
        """Remove files of publications that failed, by what is known now of who may read them."""
        if self._keeping is None or not self._keeping.has_failed:
            return
        why, limit_s = None, self._timeouts.cleanup_s
        with anyio.move_on_after(limit_s, shield=True) as scope:
            try:
                await self._ledger.check(self)
                if self._fleet.is_open:
                    await self._fleet.snapshot()
            except SupersededError:
                return  # a version of the same name may be another publisher's by now
            except GenAPIError as error:
                why = str(error)
        if scope.cancelled_caught:
            why = f"the board or a worker gave no answer within cleanup_s={limit_s:g}"
        await self._keeping.close(why)

    async def _have_left(self, workers: AbstractSet[WorkerId]) -> None:
        fleet = self._fleet
        if not workers or not fleet.is_open:
            return
        await fan_out(
            {
                member.url: partial(
                    fleet.control.run,
                    member.url,
                    self._admin_of(member.facts).leave(),
                    operation="leave",
                    timeout_s=self._timeouts.cleanup_s,
                )
                for member in fleet.membership.members.values()
                if member.id in workers
            }
        )

    async def adopt(self, step: int | PolicyVersion) -> PublishReport:
        """Label workers that hold the right weights already; moves nothing.

        Use it once for freshly started servers, whose label is a sentinel. Workers that carry
        `step` of this run already are left as they are.

        Args:
            step: the step (of the fleet's run) that the workers hold.

        Raises:
            ConfigError: the version would not be taken by the board: an older one, another run.
            FleetError: a worker cannot be read, or carries another version.
            PublishError: a label could not be set or read back.
        """
        step = version_given("step", step)
        async with self._fleet.publishing:
            self.last_report = None
            await self._take_lease()
            members = await self._everyone(fresh=True)
            check_reached(members.values())
            version, rule = self._version_to_adopt(step, members)
            self._ledger.check_commit(version)
            receipts = await label_all(self._fleet, members, version, timeouts=self._timeouts)
            committed = all(r.outcome is Outcome.COMMITTED for r in receipts)
            errors = [r.error for r in receipts if r.error]
            report = PublishReport(
                version=version,
                committed=committed,
                receipts=receipts,
                error=None if committed else errors[0] if errors else "not every label was set",
            )
            if not committed:
                self.last_report = report
                raise PublishError(str(report), report=report)
            self._attempts[version.step] = version.attempt
            await self._ledger.commit(version, [(worker, None) for worker in members], rule)
            self.last_report = report
            self._fleet.membership.commit(version, rule=rule, salted=self._salted)
            return report

    async def publish(  # noqa: PLR0913 - what may differ from one publication to the next
        self,
        step: int | PolicyVersion,
        source: WeightSource,
        *,
        mode: PauseMode | None = None,
        in_flight_kv: InFlightKV | None = None,
        prefix_cache: PrefixCache | None = None,
        probe_logprobs: Any = None,
        manifest_changed: bool = False,
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
            probe_logprobs: the trainer's own log-probability of each of `probe_ids` given those
                before it, under these very weights; the first is not looked at. Goes with
                `verify=("probe",)`: what the engines hold is then held against the trainer's
                model, not only against each other. The largest difference is `report.probe_gap`.
            manifest_changed: whether the tensors may be others than those of the publisher's last
                publication. Otherwise names, dtypes and shapes are held against them before
                anybody is paused, and the error explains every difference.
            at_most: comes later.
            latest_only: comes later.

        Raises:
            ConfigError: the step is not newer, the cache decisions do not fit the mode, or
                `probe_logprobs` does not fit the probe.
            FleetError: a worker was never reached, or not restarted (in time); or fewer than
                `min_workers` are listed.
            AuthError, ConfigError: from a server that might have had to be restarted.
            PublishError: not every worker committed; `.report` has a receipt for each.
        """
        _only_now(at_most=at_most, latest_only=latest_only)
        step = version_given("step", step)
        check_source(source)
        flag("manifest_changed", manifest_changed)
        plan = PausePlan(
            self._plan.mode if mode is None else mode,
            self._plan.in_flight_kv if in_flight_kv is None else in_flight_kv,
            self._plan.prefix_cache if prefix_cache is None else prefix_cache,
        )
        checks = self._checks(probe_logprobs)
        async with self._fleet.publishing:
            self.last_report = self._last = None
            await self._check_enough()
            await self._take_lease()
            missing = await self._absences.restart_broken()
            if manifest_changed:
                self._manifest = None
            report, cause = await self._try(step, source, plan, checks)
            broken = any(
                r.recovery is Recovery.RESTART_THEN_PUBLISH and r.url not in missing
                for r in report.receipts
            )
            if broken and self._restarter is not None and not isinstance(cause, SupersededError):
                try:
                    await self._absences.restart_broken()
                except GenAPIError as error:
                    cause = error  # what has been published, and what not, is in the report
                else:
                    report, cause = await self._try(step, source, plan, checks)
            if isinstance(cause, SupersededError):
                raise cause
            if not report.committed:
                raise PublishError(str(report), report=report) from cause
            self._last = report.version
            return report

    def _checks(self, probe_logprobs: Any) -> Checks:
        if probe_logprobs is not None and "probe" not in self._levels:
            raise ConfigError("probe_logprobs goes with verify=('probe',)")
        trainer = None if probe_logprobs is None else self._probe.trainer_scores(probe_logprobs)
        return Checks(self._levels, self._probe.tolerance, trainer, self._probe.max_gap)

    async def _try(
        self, step: int | PolicyVersion, source: WeightSource, plan: PausePlan, checks: Checks
    ) -> tuple[PublishReport, BaseException | None]:
        """One attempt: its report, and what it failed of."""
        serve = self._min_workers is not None
        everyone = await self._everyone(fresh=serve)
        self._check_listed()
        self._stored = await self._keeping.taken() if self._keeping is not None else frozenset()
        version = self._version_to_publish(step, everyone)
        if version.attempt > 1 and not serve:
            # Somebody else may have finished the step since this process read the workers.
            everyone = await self._everyone(fresh=True)
            version = self._version_to_publish(step, everyone)
        self._attempts[version.step] = version.attempt
        left_out = await self._absences.leave_out(everyone, version)
        members = {worker: m for worker, m in everyone.items() if worker not in left_out}
        check_reached(members.values())
        if isinstance(self._given, GroupTransport):
            receivers = self._admin_of_all(members.values()).receivers
            self._transport = self._given.towards(receivers)
        self._groups = await regroup(self._groups, self._rank_plans(members))
        drive = self._drive(version, source, members, plan=plan, checks=checks, left_out=left_out)
        held = self._ledger.target
        self._fleet.membership.publishing = True
        try:
            await drive.run()
        finally:
            report = self._settle(drive, everyone, version, left_out)
            self._fleet.membership.publishing = False
            self._fleet.membership.open()
            end = partial(self._end, drive, everyone, report, held=held)
            await to_the_end(end, what="the publication")
        if report.committed:
            self._manifest = drive.manifest
            if self._keeping is not None:
                await self._keeping.tidy(version)
        return report, drive.cause

    async def _take_lease(self) -> None:
        """Take the board over, and take in what it says of workers."""
        found = await self._ledger.take(self._fleet.membership.run)
        if found is not None:
            self._fleet.membership.heed(found)
            if found.phase == "publishing" and found.holder != self._ledger.holder:
                self._left_open = found
                self._in_doubt = {worker.id for worker in found.workers}
        self._fleet.membership.end(None)

    def _doubt(self, member: Member) -> None:
        """Fence whoever an open publication names, when it is met first.

        It may be half-updated, also where no label says so. From then on its fence speaks for it.
        """
        found, name = self._left_open, str(member.id)
        if found is None or name not in self._in_doubt:
            return
        self._in_doubt.remove(name)
        if member.fence is None or member.fence.recovery is Recovery.REPUBLISH:
            barrier = Fence(
                strength=FenceStrength.PAUSED if member.is_paused else FenceStrength.CLIENT,
                reason=f"{found.holder} left the publication of {found.target} open",
                recovery=Recovery.CLOSE_THEN_REPUBLISH,
            )
            self._fleet.membership.fence(member, barrier)

    async def _end(
        self,
        drive: Drive,
        everyone: Mapping[WorkerId, Member],
        report: PublishReport,
        *,
        held: PolicyVersion | None,
    ) -> None:
        """Write down how a publication ended, and remove what it stored in vain. Bounded."""
        is_ours = await self._write_end(drive, everyone, report, held=held)
        in_vain = drive.has_stored and not drive.tx.committed
        if self._keeping is not None and is_ours and in_vain:
            await self._keeping.withdraw(report.version)

    async def _write_end(
        self,
        drive: Drive,
        everyone: Mapping[WorkerId, Member],
        report: PublishReport,
        *,
        held: PolicyVersion | None,
    ) -> bool:
        """Write onto the board how a publication ended that did not commit, or moved a fence.

        One that began nothing leaves what was `held` before. A board that does not take it is
        noted; the report is not lost for that. Returns whether the board is known to be ours: a
        publisher that took it over may write, and serve, a version of the same name.
        """
        fences = [(worker, member.fence) for worker, member in everyone.items()]
        workers = drive.tx.workers.values()
        fenced = any(fence for _, fence in fences) or any(p.fence for p in workers)
        if isinstance(drive.cause, SupersededError):
            return False
        if drive.tx.committed and not fenced:
            return True
        if drive.tx.committed:
            target = None
        else:
            target = report.version if any(Op.BEGIN in p.asked for p in workers) else held
        limit_s = self._timeouts.cleanup_s
        with anyio.move_on_after(limit_s, shield=True) as scope:
            try:
                await self._ledger.end(fences, target=target)
            except GenAPIError as error:
                drive.blame(error)
            else:
                return True
        if scope.cancelled_caught:
            message = f"the board did not take the end within cleanup_s={limit_s:g}"
            drive.blame(TransportError(message, phase="may_have_run"))
        return False

    def _admin_of_all(self, members: Iterable[Member]) -> Admin:
        """What the workers' administrations agree on.

        Raises:
            FleetError: they do not agree.
        """
        admins = {m.name: self._admin_of(m.facts) for m in members}
        ways = {(a.finish_sets_label, a.marks, a.receivers) for a in admins.values()}
        if len(ways) > 1:
            raise FleetError(
                f"the workers are administered in ways that cannot be mixed in one publication: "
                f"{few(admins, separator=', ')}"
            )
        return next(iter(admins.values()), self._admin_of(None))

    def _rank_plans(self, members: Mapping[WorkerId, Member]) -> list[RankPlan]:
        facts = {w: m.facts for w, m in members.items() if m.facts is not None}
        if isinstance(self._transport, WeightStore):
            return [RankPlan(2, {worker: 1}) for worker in facts]  # each fails alone
        try:
            return plan_groups(
                [Ranked(w, f.ranks, f.dp_group) for w, f in facts.items()],
                {w: f.places for w, f in facts.items()},
                at_most=self._max_workers_per_group,
            )
        except ValueError as error:
            raise FleetError(str(error)) from None

    @property
    def _salted(self) -> bool:
        return self._plan.prefix_cache == "salt"

    async def _everyone(self, *, fresh: bool = False) -> dict[WorkerId, Member]:
        """Every worker, in rank order; one that was never reached goes by its address."""
        membership = self._fleet.membership
        unread = any(m.id is None or m.suspect for m in membership.members.values())
        if fresh or unread or self._fleet.is_discovered:
            await self._fleet.snapshot()
        if self._fleet.is_discovered:
            self._fleet.check_discovered(whole=self._min_workers is None)
        membership.check_distinct()
        for member in membership.members.values():
            self._doubt(member)
        return {m.id or nameless(membership.provider, m): m for m in membership.members.values()}

    async def _check_enough(self) -> None:
        if self._min_workers is None:
            return
        if self._fleet.is_discovered:
            await self._fleet.snapshot()  # who is listed now
            self._check_listed()
            return
        there = len(self._fleet.membership.members)
        if self._min_workers > there:
            message = f"min_workers={self._min_workers}, and the fleet has {there} workers"
            raise ConfigError(message)

    def _check_listed(self) -> None:
        """Raise where a directory lists fewer workers than have to serve; more may come back."""
        if self._min_workers is None or not self._fleet.is_discovered:
            return
        self._fleet.check_discovered(whole=False)
        there = len(self._fleet.membership.members)
        if self._min_workers > there:
            raise FleetError(f"{there} workers are listed, and min_workers={self._min_workers}")

    def _run_of(self, step: int | PolicyVersion, members: Mapping[WorkerId, Member]) -> str:
        membership = self._fleet.membership
        held = [v for m in members.values() if (v := m.version(None)) is not None]
        run = run_of(step, held, run=membership.run, mint=_new_run)
        membership.run = run
        return run

    def _version_to_adopt(
        self, step: int | PolicyVersion, members: Mapping[WorkerId, Member]
    ) -> tuple[PolicyVersion, ContextRule]:
        for member in members.values():
            check_adoptable(member)
        run = self._run_of(step, members)
        held = [v for m in members.values() if (v := m.version(run)) is not None]
        version = version_to_adopt(step, held, run=run)
        # A server that carries no version yet cached what its only weights made, unless its cache
        # outlives it; of one that carries a version, only its publisher knows what caches hold.
        facts = [m.facts for m in members.values() if m.facts is not None]
        is_known = not held and not any("drop_caches" in f.capabilities.missing for f in facts)
        rule = self._fleet.membership.rules.get(version, "own" if is_known else "unknown")
        return version, rule

    def _version_to_publish(
        self, step: int | PolicyVersion, members: Mapping[WorkerId, Member]
    ) -> PolicyVersion:
        run, number = self._run_of(step, members), step_number(step)
        return version_to_publish(
            step,
            [v for m in members.values() if (v := m.version(run)) is not None],
            run=run,
            committed=self._fleet.membership.committed,
            tried=self._tried(number, run, members),
            unfinished=any(_may_lack(m, number, run) for m in members.values()),
        )

    def _tried(self, number: int, run: str, members: Mapping[WorkerId, Member]) -> int:
        """The last attempt of a step that anybody is known to have made; 0 = none."""
        labels = [m.facts.label for m in members.values() if m.facts is not None]
        begun = [parse_updating_label(label, run=run) for label in labels]
        begun.append(self._ledger.target)
        begun.extend(self._stored)
        others = [v.attempt for v in begun if v is not None and (v.run, v.step) == (run, number)]
        return max([self._attempts.get(number, 0), *others])

    def _drive(
        self,
        version: PolicyVersion,
        source: WeightSource,
        members: dict[WorkerId, Member],
        *,
        plan: PausePlan,
        checks: Checks,
        left_out: Mapping[WorkerId, Receipt],
    ) -> Drive:
        groups, transport = self._groups, self._transport
        admin = self._admin_of_all(members.values())
        sends = isinstance(transport, GroupTransport)
        tx = Transaction(
            label=version.label,
            workers={
                worker: Progress(fence=members[worker].fence, group=number)
                for number, group in enumerate(groups)
                for worker in group.ranks.offsets
            },
            standing=frozenset(
                n for n, g in enumerate(groups) if g.sender is not None or not sends
            ),
            sends=sends,
            finish_sets_label=admin.finish_sets_label,
            marks=admin.marks,
            acknowledged=isinstance(transport, GroupTransport) and transport.acknowledges,
            checks=checks,
            min_workers=self._min_workers,
        )
        return Drive(
            tx,
            fleet=self._fleet,
            members=members,
            version=version,
            source=source,
            transport=transport,
            admin_of=self._admin_of,
            groups=groups,
            plan=plan,
            timeouts=self._timeouts,
            ledger=self._ledger,
            left_out={worker: receipt.fence for worker, receipt in left_out.items()},
            probe=self._probe,
            known=self._manifest,
        )

    def _settle(
        self,
        drive: Drive,
        everyone: Mapping[WorkerId, Member],
        version: PolicyVersion,
        left_out: Mapping[WorkerId, Receipt],
    ) -> PublishReport:
        tx = drive.tx
        receipts = tuple(
            left_out[worker]
            if worker in left_out
            else receipt_of(
                worker,
                member,
                tx,
                times=drive.times,
                fleet=self._fleet,
                verdicts=self._admin_of(member.facts).verdicts,
            )
            for worker, member in everyone.items()
        )
        if self._keeping is not None:
            self._keeping.note(tx, version)
        serving = sum(r.outcome is Outcome.COMMITTED and r.fence is None for r in receipts)
        committed = tx.committed and serving >= (self._min_workers or len(receipts))
        report = PublishReport(
            version=version,
            committed=committed,
            receipts=receipts,
            phases=tuple(drive.times.phases),
            error=None if committed else tx.error or "the publication did not end",
        )
        self.last_report = report
        return report


def _opened(transport: WeightTransport) -> GroupTransport | WeightStore:
    if not isinstance(transport, type):
        if isinstance(transport, GroupTransport):
            return transport
        if isinstance(transport, WeightStore):
            return transport.opened()
        for kind in (WeightStore, GroupTransport):
            if lacks := _lacked(transport, kind):
                raise ConfigError(
                    f"transport={transport!r} is no weight transport: it lacks {', '.join(lacks)} "
                    f"of genapi.weights.base.{kind.__name__}"
                )
    raise ConfigError(
        f"transport={transport!r} is no weight transport: pass genapi.weights.Gloo(), "
        "Memory() or Filesystem(dir)"
    )


def _lacked(transport: object, kind: type) -> list[str]:
    """What it lacks of a kind that it seems meant to be of; empty = it has nothing of that kind."""
    names = {name for name in dir(kind) if not name.startswith("_")}
    own = names - {*dir(WeightTransport)}
    return sorted(names - {*dir(transport)}) if own & {*dir(transport)} else []


def _probe_ids(ids: Sequence[int]) -> TokenIds:
    try:
        return TokenIds(ids)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"probe_ids={ids!r}: {error}") from None


def _may_lack(member: Member, number: int, run: str) -> bool:
    """Whether the worker may lack that step, or not serve it."""
    if member.fence is not None or member.is_paused:
        return True
    held = member.version(run)
    return not member.suspect and (held is None or held.step != number)


def _new_run() -> str:
    return f"run-{uuid.uuid4().hex[:12]}"


def _only_now(**options: Any) -> None:
    for name, value in options.items():
        if value != _LATER[name]:
            message = f"{name}={value!r} is not supported yet; leave it at {_LATER[name]!r}"
            raise UnsupportedError(message)
