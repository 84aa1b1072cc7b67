"""Versions of replies: waited for, pinned, inferred and checked.

The rule of this file: order comes from which read had ended before which call began, never from
clocks. What is inferred of a trace is `publication.intervals`; this file makes the reads.
"""

import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from types import MappingProxyType

import anyio

from genapi.errors import GenAPIError, StalePolicyError, UnsupportedError
from genapi.events import Observe, RequestRetried
from genapi.membership import Member, Membership
from genapi.publication.bounds import Bound, bounds_of, describe
from genapi.publication.context import with_contexts
from genapi.publication.intervals import Interval, Reading, Sights, infer, inferred_trace
from genapi.runs import Run, Sending
from genapi.types.config import FleetConfig
from genapi.types.ids import WorkerId
from genapi.types.policy import PolicyTrace, TraceSource
from genapi.types.request import GenerateRequest
from genapi.types.response import Attempt, FinishReason, GenerateOutput, GenerateResponse

__all__ = ("Versions", "is_bound", "is_undated", "may_meet", "stale")

_SHOWN = 8
_NOTHING: Sights = MappingProxyType({})
_CUT = {"finish_reason": FinishReason.ABORT}


class Versions:
    """What one client knows and asks of versions."""

    def __init__(
        self,
        config: FleetConfig,
        membership: Membership,
        *,
        routed: bool,
        pins: bool,
        look: Callable[[str | None], Awaitable[Reading]],
        is_old: Callable[[str | None], bool],
        attests: Callable[[GenerateRequest], bool],
        observe: Observe,
    ) -> None:
        self._config = config
        self._membership = membership
        self._routed = routed
        self._attests = attests
        self._pins = pins
        self._look = look
        self._is_old = is_old
        self._observe = observe
        self._change = anyio.Event()
        membership.on_change = self.changed

    def check(self, request: GenerateRequest) -> None:
        """Raise what cannot be asked of versions here: `UnsupportedError`, `ConfigError`."""
        if not is_bound(request):
            return
        self._bounds(request)
        if request.lora is not None:
            message = (
                "min_version and exact_version are about base weights, of which an adapter's reply "
                "says nothing; an adapter's version is its name"
            )
            raise UnsupportedError(message)
        members = self._membership.members.values()
        if all(m.is_mute and not (m.attests and self._attests(request)) for m in members):
            what = next(iter(members)).name if members else "the fleet"
            known = self._membership.capabilities()
            if known is not None:
                known.require("admin", where=f"a version of {what} cannot be known: it")

    def changed(self) -> None:
        """Something was learnt: whoever waits looks again."""
        change, self._change = self._change, anyio.Event()
        change.set()

    async def news(self) -> None:
        """Wait until something is learnt."""
        await self._change.wait()

    async def refresh(self, url: str | None) -> None:
        """Read one worker, or all, unless that was done within `refresh_s`."""
        if self._is_old(url):
            with anyio.move_on_after(self._config.admin_timeout_s):
                await self._look(url)

    def before(self, request: GenerateRequest, member: Member | None) -> Sights:
        """What is known of all who may serve a request, where their replies name no version.

        It is empty where they do, and where labels say nothing: of an adapter, or unread.
        """
        members = [member] if member is not None else list(self._membership.members.values())
        if request.lora is not None or not any(self.is_opaque(m, request) for m in members):
            return _NOTHING
        return {m.url: m.sight for m in members}

    def is_opaque(self, member: Member, request: GenerateRequest) -> bool:
        """Whether its replies to such a request name no version, but its label can be read."""
        return not (member.attests and self._attests(request)) and not member.is_mute

    def _bounds(self, request: GenerateRequest) -> tuple[Bound, ...]:
        members = self._membership.members.values()
        labels = [m.facts.label for m in members if m.facts is not None]
        return bounds_of(request, run=self._membership.run, labels=labels)

    async def wait_for_version(self, run: Run) -> None:
        """Wait until a worker may have the version that the request asks for.

        Raises:
            StalePolicyError: every worker is past it, or its publisher ended before it.
        """
        read = False
        while True:
            change = self._change
            if (read or not run.stale) and self._is_held(run):
                return
            if self._is_beyond_the_end(run):
                # A publisher that has started since then takes the end away.
                with run.waiting("its version"):
                    await self._look(None)
                final = self._membership.final
                if not self._is_held(run) and final and self._is_beyond_the_end(run):
                    raise stale(run, f"will not come, because its publisher ended with {final}")
            with run.waiting("its version"), anyio.move_on_after(self._config.refresh_s):
                if read and not self._is_old(None):
                    await change.wait()
                else:
                    read = True
                    await self._look(None)

    def _is_held(self, run: Run) -> bool:
        run.bounds = self._bounds(run.request)
        membership = self._membership
        # Where a router is told whom to ask it is as if it were not there.
        chooses = self._routed and not self._pins
        members = list(membership.members.values()) if chooses else membership.generating()
        usable = membership.usable()
        if not chooses and not usable:
            return True  # the sending says why nobody may get traffic
        # Of a reply that names nobody, the oldest worker behind the router may be the author.
        every = chooses and any(self.is_opaque(m, run.request) for m in members)
        met = (may_meet(m, run.bounds) for m in (members if chooses else usable))
        if all(met) if every else any(met):
            if not run.stale:
                run.lacking = None
            return True
        run.lacking = _labels(members)
        if all(any(b.is_past(m.version(b.run)) for b in run.bounds) for m in members):
            raise stale(run, "cannot be met any more")
        return False

    def _is_beyond_the_end(self, run: Run) -> bool:
        final = self._membership.final
        return final is not None and any(bound.is_beyond(final) for bound in run.bounds)

    async def dated(self, run: Run, response: GenerateResponse) -> GenerateResponse:
        """The reply with the versions between what was read before it and what is read now.

        The reply is complete: when no read comes in time it is returned all the same, unless its
        version is what was asked for.
        """
        sending = run.current
        assert sending is not None  # noqa: S101 - a reply has a sending
        before, reading = sending.before, Reading({})
        left_s = run.deadline - anyio.current_time()
        if run.bounds:
            run.lacking = run.lacking or "a reply whose version was not read in time"
        else:
            run.scope.deadline = math.inf
        with anyio.move_on_after(min(left_s, self._config.admin_timeout_s)), suppress(GenAPIError):
            alone = sending.member is not None and not self._routed
            reading = await self._look(sending.member.url if alone and sending.member else None)
        named = [w for w in (response.worker, response.prefill_worker) if w is not None]
        interval = infer(*_narrowed(before, reading, named), run=self._membership.run)
        rules, salted = self._membership.rules, sending.salted

        def dated(trace: PolicyTrace) -> PolicyTrace:
            if trace.source != TraceSource.INFERRED:
                return trace
            return with_contexts(inferred_trace(len(trace), interval), rules, salted=salted)

        cut = self._may_be_cut(sending, interval)
        outputs = tuple(
            o.model_copy(
                update={"policy": dated(o.policy), **(_CUT if _stopped(o) and cut else {})}
            )
            for o in response.outputs
        )
        return response.model_copy(update={"outputs": outputs})

    def _may_be_cut(self, sending: Sending, interval: Interval) -> bool:
        """Whether an aborting pause may have ended a reply of an engine that calls that a stop.

        Of a publication that this process did not do it only sees that labels changed.
        """
        knows = [m for m in self._membership.members.values() if m.facts is not None]
        if not any(m.facts.capabilities.aborts_as_stop for m in knows if m.facts):
            return False
        begun, under_way = sending.aborts
        if under_way or self._membership.aborts[0] != begun:
            return True
        published = interval.lo is not None and interval.lo != interval.hi
        return published and interval.hi not in self._membership.own

    def is_asked_for(self, run: Run, response: GenerateResponse) -> bool:
        """Whether the reply meets its bounds and is of a version at all where one was committed.

        If not, the run notes what it lacks.
        """
        author = self._of_unproved_weights(run, response)
        if author is not None:
            run.stale += 1
            run.lacking = (
                f"a reply of {author} that names no version: it was restarted, and nobody has "
                "published to it since"
            )
            return False
        if all(bound.covers(o.policy) for bound in run.bounds for o in response.outputs):
            return True
        run.stale += 1
        run.lacking = "a reply made by " + ", ".join(describe(o.policy) for o in response.outputs)
        return False

    def _of_unproved_weights(self, run: Run, response: GenerateResponse) -> object | None:
        """Who made a reply with weights that nobody has published; None = nobody is known to."""
        sending = run.current
        if sending is None or run.request.lora is not None or self._membership.committed is None:
            return None
        if self._routed:
            return self._newcomer(response)
        member = sending.member
        if member is None:
            return None
        is_another = member.id != sending.worker
        unknown = any(
            len(o.policy) > 0
            and o.policy.newest is None
            and (o.policy.source == TraceSource.ENGINE or is_another)
            for o in response.outputs
        )
        if unknown:
            member.suspect = True
        return member.name if unknown else None

    def _newcomer(self, response: GenerateResponse) -> WorkerId | None:
        """A worker that a reply names and that nobody knows, or that has yet to be published to."""
        for worker in (response.worker, response.prefill_worker):
            member = None if worker is None else self._membership.called(worker)
            is_new = member is None or (member.fence is not None and member.fence == member.told)
            if worker is not None and is_new:
                return worker
        return None

    async def before_another(self, run: Run) -> None:
        """A reply of another version than was asked for: note it, and wait a little.

        Raises:
            StalePolicyError: without `timeout_s`, replies are not asked for endlessly.
        """
        sending, policy = run.current, self._config.retry
        assert sending is not None  # noqa: S101 - a reply has a sending
        if run.request.timeout_s is None and run.stale >= policy.max_attempts:
            raise stale(run, f"was not met by {run.stale} replies")
        error = f"StalePolicyError: {run.lacking}"
        run.attempts.append(Attempt(wire_id=sending.wire_id, worker=sending.worker, error=error))
        wait_s = min(policy.backoff_s * run.stale, policy.max_backoff_s, self._config.refresh_s)
        self._observe(
            RequestRetried(
                request_id=run.request_id,
                attempt=len(run.attempts) + 1,
                error=error,
                wait_s=wait_s,
            )
        )
        with run.waiting("another reply, of the version that was asked for"):
            await anyio.sleep(wait_s)


def is_bound(request: GenerateRequest) -> bool:
    """Whether the request asks for a version."""
    return request.min_version is not None or request.exact_version is not None


def is_undated(run: Run, response: GenerateResponse) -> bool:
    """Whether a reply leaves versions to be inferred, and there is something to infer them from."""
    return (
        run.current is not None
        and bool(run.current.before)
        and any(
            o.policy.source == TraceSource.INFERRED and (o.policy.spans or _stopped(o))
            for o in response.outputs
        )
    )


def _stopped(output: GenerateOutput) -> bool:
    return output.finish_reason is FinishReason.STOP


def _narrowed(
    before: Sights, reading: Reading, named: Sequence[WorkerId]
) -> tuple[Sights, Reading]:
    """What was read of the workers that a reply names, or of all where it names nobody."""
    if not named:
        return before, reading
    own = {url: s for url, s in before.items() if s is not None and s.worker in named}
    if len(own) != len(named):
        return _NOTHING, reading
    sights = {url: sight for url, sight in reading.sights.items() if url in own}
    return own, reading._replace(sights=sights)


def may_meet(member: Member, bounds: tuple[Bound, ...]) -> bool:
    """Whether what is known of a worker lets its next reply be within the bounds."""
    if member.is_mute:
        return member.attests  # the reply will tell
    sight = member.sight
    return sight is not None and all(b.admits(sight.version(b.run)) for b in bounds)


def stale(run: Run, what: str, *, may_wait: bool = False) -> StalePolicyError:
    """The error of a request whose version was not met."""
    asked = " and ".join(map(str, run.bounds)) or "a version that was published"
    more = ", or wait longer (timeout_s)" if may_wait else ""
    return StalePolicyError(
        f"{asked} {what}; seen: {run.lacking}. Publish it, ask for a version that is still served"
        f"{more}"
    )


def _labels(members: list[Member]) -> str:
    shown = [f"{m.name} holds {m.facts.label!r}" if m.facts else m.name for m in members[:_SHOWN]]
    more = len(members) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")
