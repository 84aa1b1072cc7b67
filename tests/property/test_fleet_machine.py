"""Embedded fleets under a fault plan: whatever happens, nobody serves what was not proved.

Two fleets, as two processes would have them, publish to and generate on the same workers, while
calls fail, workers die and come back, and callers walk away. The engines themselves are watched:
at every token that one makes, its weights have to be those that its label names.

Everything happens in the time of a simulated loop, so that a run costs what it computes, limits
are checked to the moment, and a failure is reproduced from its seed.
"""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import anyio
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import genapi
from genapi import GenerateRequest, PolicyVersion, SamplingParams, WeightPublisher
from genapi.board import MemoryBoard
from genapi.embedded import (
    Cluster,
    EngineConfig,
    Fault,
    FaultPlan,
    SglangConfig,
    VllmConfig,
    Worker,
)
from genapi.embedded.protocol import ServerConfig
from genapi.events import Event, PhaseEnded, RequestEnded
from genapi.membership import Membership
from genapi.publication.table import Phase
from genapi.transports.memory import MemoryTransport
from genapi.types.config import PublishTimeouts
from genapi.types.ids import WorkerId
from genapi.types.policy import parse_label
from genapi.types.worker import Outcome, PublishReport
from tests.support.embedded_oracle import fresh, is_whole, weights_of
from tests.support.simulated import LoopClock, SimulatedLoop

WORKERS = 2
FLEETS = 2
STEP_S, RPC_S = 0.01, 0.005
REQUEST_S = 20.0
"""The `timeout_s` of every request."""
LATE_S = 1.0
"""How late an answer may be that is late: longer than some limits, shorter than others."""

TIMEOUTS = PublishTimeouts(
    preflight_s=3.0,
    stage_s=3.0,
    group_s=2.0,
    pause_s=4.0,
    confirm_s=2.0,
    begin_s=2.0,
    transfer_s=2.0,
    finish_s=2.0,
    label_s=2.0,
    verify_s=2.0,
    resume_s=2.0,
    cleanup_s=2.0,
)
LONGEST_S = 4.0
PUBLICATION_S = LONGEST_S * len(Phase)

ERROR_INSIDE = '{"error":{"message":"inside","type":"InternalServerError","code":500}}'


@dataclass(frozen=True)
class Speaks:
    """A protocol: its servers, its routes, and what it can do."""

    name: str
    config: ServerConfig
    paths: tuple[str, ...]
    update: str
    refused_flush: Fault
    modes: tuple[str, ...]


VLLM = Speaks(
    name="vllm",
    config=VllmConfig(),
    paths=(
        "/health",
        "/server_info",
        "/weight_info",
        "/is_paused",
        "/pause",
        "/resume",
        "/reset_prefix_cache",
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/update_weight_version",
        "/inference/v1/generate",
    ),
    update="/update_weights",
    refused_flush=Fault("/reset_prefix_cache", "error", status=200, body='{"success":false}'),
    modes=("keep", "drain", "abort"),
)
SGLANG = Speaks(
    name="sglang",
    config=SglangConfig(),
    paths=(
        "/ping",
        "/ready",
        "/server_info",
        "/model_info",
        "/pause_generation",
        "/continue_generation",
        "/flush_cache",
        "/init_weights_update_group",
        "/destroy_weights_update_group",
        "/begin_weight_update",
        "/update_weights_from_distributed",
        "/end_weight_update",
        "/update_weight_version",
        "/generate",
    ),
    update="/update_weights_from_distributed",
    refused_flush=Fault("/flush_cache", "error", status=400, body="Flush cache failed.\n"),
    modes=("keep", "abort"),
)


def faults(speaks: Speaks) -> st.SearchStrategy[Fault]:
    """What may go wrong with one call."""
    any_call = st.builds(
        Fault,
        path=st.sampled_from(speaks.paths),
        action=st.sampled_from(
            (
                "lose_reply",
                "refuse",
                "die_before",
                "die_during",
                "die_after",
                "never_answer",
                "garble",
                "error",
            )
        ),
        nth=st.integers(1, 3),
    )
    late = st.builds(
        Fault,
        path=st.sampled_from(speaks.paths),
        action=st.just("answer_late"),
        nth=st.integers(1, 2),
        delay_s=st.sampled_from((LATE_S, 3 * LATE_S)),
    )
    inside = st.builds(
        Fault,
        path=st.sampled_from(speaks.paths),
        action=st.just("error"),
        status=st.just(200),
        body=st.just(ERROR_INSIDE),
    )
    peer_lost = st.builds(
        Fault,
        path=st.just(speaks.update),
        action=st.just("peer_lost"),
        after_tensors=st.integers(0, 2),
    )
    return st.one_of(any_call, late, inside, st.just(speaks.refused_flush), peer_lost)


@dataclass(eq=False)
class Publication:
    """One call of `publish`, and how it ended."""

    fleet: int
    step: int
    publisher: WeightPublisher
    task: asyncio.Task[None] | None = None
    report: PublishReport | None = None
    error: BaseException | None = None
    cancelled: bool = False


@dataclass(eq=False)
class Ask:
    """One request, and what came of it."""

    request: GenerateRequest
    sent_at: float
    task: asyncio.Task[None] | None = None
    results: list[object] = field(default_factory=list)
    cancelled: bool = False


class Watched:
    """A worker whose engine is looked at whenever it is about to make tokens."""

    def __init__(self, index: int, loop: SimulatedLoop, speaks: Speaks) -> None:
        self.worker = Worker(
            speaks.config,
            EngineConfig(step_s=STEP_S, rpc_s=RPC_S),
            clock=LoopClock(loop, self.look),
            index=index,
        )
        self.wrong: list[str] = []
        # A process that starts in the middle of a publication was never paused. All that can be
        # said of it then is that what it makes has no version.
        self.unpaused: set[str] = set()

    @property
    def is_unpaused(self) -> bool:
        return self.worker.instance_id in self.unpaused

    def look(self, slept_s: float) -> None:
        engine = self.worker.engine
        if slept_s == STEP_S and engine.num_running and engine.error is None:
            self.judge("makes a token")

    def judge(self, what: str) -> None:
        engine = self.worker.engine
        version = parse_label(engine.label)
        if version is None and self.is_unpaused:
            return
        if not engine.loaded:
            self.wrong.append(f"it {what} in the middle of an update ({engine.label!r})")
        elif version is None and engine.label != "default":
            self.wrong.append(f"it {what} under {engine.label!r}")
        elif not is_whole(engine.weights, version.step if version else 0):
            self.wrong.append(f"it {what} under {engine.label!r} with other weights")

    @property
    def version(self) -> PolicyVersion | None:
        return parse_label(self.worker.engine.label)


class World:
    """The workers, the fleets over them, and all that is under way. Runs in its own loop."""

    def __init__(self, speaks: Speaks, *, has_board: bool) -> None:
        self.loop = SimulatedLoop()
        self.speaks = speaks
        self.watched = [Watched(index, self.loop, speaks) for index in range(WORKERS)]
        self.cluster: Cluster
        self.board = MemoryBoard() if has_board else None
        self.fleets: list[genapi.Fleet] = []
        self.publications: list[Publication] = []
        self.asks: list[Ask] = []
        self.ended: Counter[str] = Counter()
        self.committed: list[PolicyVersion | None] = [None] * FLEETS
        self.proved: set[PolicyVersion] = set()
        self.wrong: list[str] = []
        self.step = 0
        self.numbers = itertools.count()
        self.stack = contextlib.AsyncExitStack()

    def run(self, main: Callable[[], Awaitable[None]]) -> None:
        """Run until it is done; whatever else is under way goes on meanwhile."""

        async def bounded() -> None:
            with anyio.fail_after(100 * PUBLICATION_S):
                await main()

        self.loop.run_until_complete(bounded())

    async def open(self) -> None:
        self.cluster = Cluster([w.worker for w in self.watched], clock=LoopClock(self.loop))
        await self.cluster.open()
        for number in range(FLEETS):
            fleet = genapi.connect(
                f"embedded://?protocol={self.speaks.name}",
                transport=MemoryTransport(self.cluster),
                run="r",
                board=self.board,
                observe=self.observer(number),
                admin_timeout_s=2.0,
                refresh_s=1.0,
            )
            await self.stack.enter_async_context(fleet)
            self.fleets.append(fleet)
            await fleet.wait_ready(timeout_s=10)
        publisher = self.publisher(0)
        await publisher.adopt(0)
        self.proved.add(PolicyVersion(run="r", step=0))
        for fleet in self.fleets:
            await fleet.snapshot()

    def observer(self, number: int) -> Callable[[Event], None]:
        def observe(event: Event) -> None:
            if isinstance(event, RequestEnded):
                self.ended[event.request_id] += 1
            elif isinstance(event, PhaseEnded):
                self.phase_ended(number, event)

        return observe

    def phase_ended(self, number: int, event: PhaseEnded) -> None:
        if event.seconds > LONGEST_S + 0.01:
            self.wrong.append(f"{event.phase} took {event.seconds} s")
        committed = self.fleets[number].membership.committed
        if event.phase == Phase.COMMIT and committed == event.version:
            self.proved.add(event.version)

    def publisher(self, number: int) -> WeightPublisher:
        return WeightPublisher(
            self.fleets[number],
            transport=genapi.weights.Memory(bucket_tensors=1),
            timeouts=TIMEOUTS,
            max_workers_per_group=(None, 1)[number],
        )

    def publish(self, number: int, step: int, **plan: str) -> Publication:
        publication = Publication(number, step, self.publisher(number))
        publication.task = self.loop.create_task(self._publish(publication, plan))
        self.publications.append(publication)
        return publication

    async def _publish(self, publication: Publication, plan: dict[str, str]) -> None:
        try:
            publication.report = await publication.publisher.publish(
                publication.step,
                source(publication.step),
                **plan,  # type: ignore[arg-type]
            )
        except genapi.GenAPIError as error:
            publication.error = error
            publication.report = publication.publisher.last_report
        except asyncio.CancelledError:
            publication.report = publication.publisher.last_report
        if publication.report is not None:
            self.check_fences(self.fleets[publication.fleet].membership, publication.report)

    def check_fences(self, membership: Membership, report: PublishReport) -> None:
        """Whoever published sends nothing to whom its receipts fence."""
        usable = [member.id for member in membership.usable()]
        for receipt in report.receipts:
            if receipt.fence is not None and receipt.worker in usable:
                self.wrong.append(f"{receipt.worker} may get traffic: {receipt.fence}")

    def ask(self, number: int, *, tokens: int, streams: bool, prompt: int) -> Ask:
        request = GenerateRequest(
            prompt_token_ids=(1 + prompt, 2, 3),
            request_id=f"ask-{next(self.numbers)}",
            sampling=SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True),
            timeout_s=REQUEST_S,
        )
        ask = Ask(request, self.loop.time())
        ask.task = self.loop.create_task(self._ask(self.fleets[number], ask, streams=streams))
        self.asks.append(ask)
        return ask

    async def _ask(self, fleet: genapi.Fleet, ask: Ask, *, streams: bool) -> None:
        try:
            if streams:
                async with fleet.stream(ask.request) as events:
                    async for event in events:
                        if isinstance(event, genapi.Finished):
                            ask.results.append(event.reply)
            else:
                ask.results.append(await fleet.generate(ask.request))
        except genapi.GenAPIError as error:
            ask.results.append(error)
        except asyncio.CancelledError:
            ask.results.append("cancelled")
        late_s = self.loop.time() - ask.sent_at - REQUEST_S
        if late_s > 0.1:
            self.wrong.append(f"{ask.request.request_id} ended {late_s} s late")

    @property
    def open_publications(self) -> list[Publication]:
        return [p for p in self.publications if p.task is not None and not p.task.done()]

    @property
    def open_asks(self) -> list[Ask]:
        return [a for a in self.asks if a.task is not None and not a.task.done()]

    async def turns(self, count: int) -> None:
        """Let every task that is ready have so many turns."""
        for _ in range(count):
            await asyncio.sleep(0)

    async def settle(self) -> None:
        """Wait until no publication and no request is under way."""
        tasks = [p.task for p in self.open_publications] + [a.task for a in self.open_asks]
        if open_tasks := [task for task in tasks if task is not None]:
            await asyncio.wait(open_tasks)

    async def recover(self) -> None:
        """Nothing fails any more: one publication with a restarter has to bring everybody back."""
        for watched in self.watched:
            watched.worker.faults = FaultPlan()
        await self.settle()
        self.step += 1
        publisher = WeightPublisher(
            self.fleets[0],
            transport=genapi.weights.Memory(),
            timeouts=TIMEOUTS,
            restarter=self.restart,
        )
        report = await publisher.publish(self.step, source(self.step))
        assert report.committed
        # Without a board, what another fleet concluded stands until it publishes again itself.
        for number, fleet in enumerate(self.fleets if self.board is not None else self.fleets[:1]):
            await fleet.snapshot()
            asks = [self.ask(number, tokens=3, streams=False, prompt=p) for p in range(4)]
            await self.settle()
            for ask in asks:
                assert len(ask.results) == 1
                assert isinstance(ask.results[0], genapi.GenerateResponse), ask.results
                assert ask.results[0].output.policy.oldest == report.version
        await publisher.aclose()
        await self.stack.aclose()
        await self.cluster.aclose()

    async def restart(self, _worker: WorkerId, url: str) -> None:
        self.watched[int(url.removeprefix("memory://"))].worker.restart()

    def restart_any(self, index: int) -> None:
        """A worker comes back by itself, whatever is under way."""
        watched = self.watched[index]
        watched.worker.restart()
        if self.open_publications:
            watched.unpaused.add(watched.worker.instance_id)

    # what has to hold

    def check(self) -> None:
        assert not self.wrong, self.wrong
        for index, watched in enumerate(self.watched):
            engine = watched.worker.engine
            if watched.worker.alive and engine.error is None and not watched.worker.holds:
                watched.judge("runs")
            assert not watched.wrong, f"worker {index}: {watched.wrong}"
        for number, fleet in enumerate(self.fleets):
            self.check_fleet(number, fleet.membership)
        for publication in self.publications:
            self.check_publication(publication)
        for ask in self.asks:
            self.check_ask(ask)
        self.publications = self.open_publications
        self.asks = self.open_asks

    def check_fleet(self, number: int, membership: Membership) -> None:
        before, now = self.committed[number], membership.committed
        if before is not None:
            assert now is not None
            assert (now.step, now.attempt) >= (before.step, before.attempt)
        self.committed[number] = now
        if now is None:
            return
        assert now in self.proved, f"{now} was proved by nobody"
        for watched, member in zip(self.watched, membership.members.values(), strict=True):
            worker = watched.worker
            known = member.id is not None and member.id.instance == worker.instance_id
            serves = worker.alive and not worker.holds
            # Where it is paused a request waits, and who has not read it may send it one.
            if known and serves and member in membership.usable():
                held = watched.version
                assert held is not None, f"{member.url} may get traffic"
                assert held.step >= now.step, f"{member.url} holds {held}, not {now}"

    def check_publication(self, publication: Publication) -> None:
        if publication.task is None or not publication.task.done():
            return
        publication.task.result()
        report = publication.report
        if report is not None:
            assert len({receipt.worker for receipt in report.receipts}) == WORKERS
            assert len(report.receipts) == WORKERS
            assert report.seconds <= PUBLICATION_S
            for receipt in report.receipts:
                served = receipt.outcome is Outcome.COMMITTED and receipt.fence is None
                assert served or receipt.fence is not None or receipt.recovery is None
            if report.committed:
                assert report.version in self.proved

    def check_ask(self, ask: Ask) -> None:
        if ask.task is None or not ask.task.done():
            return
        ask.task.result()
        assert len(ask.results) == 1
        assert self.ended[ask.request.request_id or ""] == 1
        reply = ask.results[0]
        if not isinstance(reply, genapi.GenerateResponse):
            return
        output, prompt = reply.output, ask.request.prompt_token_ids
        assert prompt is not None
        assert output.is_complete == (len(output.token_ids) == ask.request.sampling.max_tokens)
        for span in output.policy.spans:
            assert span.lo == span.hi
            # UNKNOWN would be a server that was restarted and that nobody has published to since.
            assert span.lo is not None
            step = span.lo.step
            before = [*prompt, *output.token_ids[: span.start]]
            made = output.token_ids[span.start : span.end]
            assert fresh(step, before, made) == list(made)


def source(step: int) -> genapi.weights.WeightSource:
    return genapi.weights.from_tensors(weights_of(step))


WORKER = st.integers(0, WORKERS - 1)
FLEET = st.integers(0, FLEETS - 1)


class FleetMachine(RuleBasedStateMachine):
    """What may happen, in any order."""

    world: World

    def __init__(self, speaks: Speaks) -> None:
        super().__init__()
        self.speaks = speaks

    @initialize(has_board=st.booleans())
    def open(self, has_board: bool) -> None:
        self.world = World(self.speaks, has_board=has_board)
        self.world.run(self.world.open)

    @rule(worker=WORKER, fault=st.runner().flatmap(lambda machine: faults(machine.speaks)))
    def something_will_go_wrong(self, worker: int, fault: Fault) -> None:
        self.world.watched[worker].worker.faults.add(fault)

    @rule(worker=WORKER)
    def a_worker_dies(self, worker: int) -> None:
        self.world.watched[worker].worker.kill()

    @rule(worker=WORKER)
    def a_worker_restarts(self, worker: int) -> None:
        self.world.restart_any(worker)

    @rule(
        fleet=FLEET,
        again=st.booleans(),
        mode=st.runner().flatmap(lambda machine: st.sampled_from(machine.speaks.modes)),
        prefix_cache=st.sampled_from(("salt", "flush")),
        turns=st.integers(0, 60),
    )
    def somebody_publishes(
        self, fleet: int, again: bool, mode: str, prefix_cache: str, turns: int
    ) -> None:
        world = self.world
        if world.board is None and any(p.fleet != fleet for p in world.open_publications):
            world.run(world.settle)  # without a board nothing keeps two publishers apart
        if not again or world.step == 0:
            world.step += 1
        world.publish(fleet, world.step, mode=mode, prefix_cache=prefix_cache)
        world.run(lambda: world.turns(turns))

    @precondition(lambda self: bool(self.world.open_publications))
    @rule(data=st.data(), turns=st.integers(0, 40))
    def a_publication_is_cancelled(self, data: st.DataObject, turns: int) -> None:
        world = self.world
        world.run(lambda: world.turns(turns))
        if world.open_publications:
            publication = data.draw(st.sampled_from(range(len(world.open_publications))))
            task = world.open_publications[publication].task
            assert task is not None
            task.cancel()

    @rule(
        fleet=FLEET,
        tokens=st.sampled_from((1, 5, 60, 300)),
        streams=st.booleans(),
        prompt=st.integers(0, 5),
    )
    def somebody_asks(self, fleet: int, tokens: int, streams: bool, prompt: int) -> None:
        self.world.ask(fleet, tokens=tokens, streams=streams, prompt=prompt)
        self.world.run(lambda: self.world.turns(3))

    @precondition(lambda self: bool(self.world.open_asks))
    @rule(data=st.data(), turns=st.integers(0, 40))
    def a_request_is_cancelled(self, data: st.DataObject, turns: int) -> None:
        world = self.world
        world.run(lambda: world.turns(turns))
        if world.open_asks:
            task = world.open_asks[data.draw(st.sampled_from(range(len(world.open_asks))))].task
            assert task is not None
            task.cancel()

    @rule(seconds=st.sampled_from((0.001, 0.02, 0.3, 2.0, 10.0)))
    def time_passes(self, seconds: float) -> None:
        self.world.run(lambda: anyio.sleep(seconds))

    @rule(fleet=FLEET)
    def somebody_reads(self, fleet: int) -> None:
        async def read() -> None:
            with contextlib.suppress(genapi.GenAPIError):
                await self.world.fleets[fleet].snapshot()

        self.world.run(read)

    @rule()
    def everything_ends(self) -> None:
        self.world.run(self.world.settle)

    @invariant()
    def nobody_serves_what_was_not_proved(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        world = getattr(self, "world", None)
        if world is None:
            return
        try:
            if not any(w.wrong for w in world.watched) and not world.wrong:
                world.run(world.recover)
                world.check()
        finally:
            for task in asyncio.all_tasks(world.loop):
                task.cancel()
            world.loop.run_until_complete(asyncio.sleep(0))
            world.loop.close()


@pytest.mark.parametrize("speaks", [VLLM, SGLANG], ids=lambda speaks: speaks.name)
def test_whatever_fails_nobody_serves_what_was_not_proved(speaks: Speaks) -> None:
    class Machine(FleetMachine):
        def __init__(self) -> None:
            super().__init__(speaks)

    fewer = 1 if speaks is VLLM else 4  # the client under it is the same
    examples = settings(
        max_examples=settings().max_examples // fewer,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Machine, settings=examples)
