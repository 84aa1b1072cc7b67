"""Every greedy token under random publications is what its trace says, and nothing else.

Requests start before, during and after publications, stay in flight through them, and are
recomputed from the weights and the context that the trace names. With a cache decision that lets
old keys and values be used, the same check has to fail, and the trace has to say so.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.abc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import genapi
from genapi import FinishReason, GenerateRequest, GenerateResponse, SamplingParams, TokenChunk
from genapi.embedded import Cluster
from genapi.events import Event, PhaseStarted
from genapi.publication.plan import PausePlan
from genapi.transports.memory import MemoryTransport
from tests.support.embedded_oracle import fresh, mismatches, replay, step_of, weights_of
from tests.support.simulated import LoopClock, simulate

PLANS = {
    "vllm": (
        PausePlan("keep", "recompute", "flush"),
        PausePlan("keep", "recompute", "salt"),
        PausePlan("keep", "stale", "salt"),
        PausePlan("keep", "stale", "stale"),
        PausePlan("drain", "recompute", "flush"),
        PausePlan("drain", "recompute", "salt"),
        PausePlan("drain", "recompute", "stale"),
        PausePlan("abort", "recompute", "flush"),
        PausePlan("abort", "recompute", "salt"),
        PausePlan("abort", "recompute", "stale"),
    ),
    "sglang": (
        PausePlan("keep", "recompute", "flush"),
        PausePlan("keep", "recompute", "salt"),
        PausePlan("keep", "stale", "salt"),
        PausePlan("keep", "stale", "stale"),
        PausePlan("abort", "recompute", "flush"),
        PausePlan("abort", "recompute", "salt"),
        PausePlan("abort", "recompute", "stale"),
    ),
}
"""What each engine can carry out, by its protocol."""

VLLM, SILENT, SGLANG = (
    {"protocol": "vllm", "version": "0.32.0"},
    {"protocol": "vllm", "version": "0.31.0"},
    {"protocol": "sglang"},
)
"""Servers; the replies of the second name no versions."""


def clean(plans: Sequence[PausePlan]) -> list[PausePlan]:
    """Those that leave nothing stale."""
    return [plan for plan in plans if "stale" not in (plan.in_flight_kv, plan.prefix_cache)]


MOMENTS = (None, "preflight", "group", "pause", "mark", "transfer", "finish", "resume", "probe")
"""None: the time before a publication, after the one before it."""

PREFIXES = tuple(tuple(1 + (7 * n + 3 * k) % 60 for k in range(40)) for n in range(2))
"""Long enough for two blocks of the prefix cache."""


@dataclass(frozen=True)
class Ask:
    """A request. Those with a prefix share it with others; those without share nothing."""

    prefix: int | None = None
    tokens: int = 60
    streams: bool = False


@dataclass(frozen=True)
class Publication:
    """One publication, and the requests that start at its phases."""

    plan: PausePlan
    starts: Mapping[str | None, Sequence[Ask]] = field(default_factory=dict)


@dataclass
class Heard:
    """A reply, with what was asked."""

    ask: Ask
    prompt: tuple[int, ...]
    reply: GenerateResponse


ASKS = st.builds(
    Ask,
    prefix=st.sampled_from((None, 0, 1)),
    tokens=st.sampled_from((1, 7, 40, 160)),
    streams=st.booleans(),
)
STARTS = st.dictionaries(
    st.sampled_from(MOMENTS), st.lists(ASKS, min_size=1, max_size=2), max_size=4
)


def publications_of(plans: Sequence[PausePlan]) -> st.SearchStrategy[list[Publication]]:
    """One after the other, each with one of the plans."""
    one = st.builds(Publication, plan=st.sampled_from(plans), starts=STARTS)
    return st.lists(one, min_size=1, max_size=4)


class Play:
    """A fleet, publications of the steps 1, 2, ... on it, and the replies that came."""

    def __init__(self, fleet: genapi.Fleet, group: anyio.abc.TaskGroup) -> None:
        self.fleet = fleet
        self.group = group
        self.heard: list[Heard] = []
        self.asked = 0
        self.starts: Mapping[str | None, Sequence[Ask]] = {}
        fleet.observe = self.observe

    def observe(self, event: Event) -> None:
        if isinstance(event, PhaseStarted):
            self.start(event.phase)

    def start(self, moment: str | None) -> None:
        for ask in self.starts.get(moment, ()):
            self.group.start_soon(self.ask, ask)

    async def ask(self, ask: Ask) -> None:
        self.asked += 1
        own = (1 + self.asked % 60, 1 + self.asked // 60, 62)
        prompt = own if ask.prefix is None else PREFIXES[ask.prefix]
        request = GenerateRequest(
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=ask.tokens, temperature=0.0, ignore_eos=True),
        )
        if ask.streams:
            async with self.fleet.stream(request) as events:
                *chunks, last = [event async for event in events]
            assert isinstance(last, genapi.Finished)
            reply = last.reply
            streamed = [t for c in chunks if isinstance(c, TokenChunk) for t in c.token_ids]
            assert streamed == list(reply.output.token_ids)
        else:
            reply = await self.fleet.generate(request)
        self.heard.append(Heard(ask, prompt, reply))


async def played(
    publications: Iterable[Publication],
    *,
    workers: int,
    servers: Mapping[str, str],
    last: Sequence[Ask] = (),
) -> list[Heard]:
    """The replies to all requests, the publications one after the other."""
    clock = LoopClock()
    cluster = Cluster.from_query({"workers": str(workers), **servers}, clock)
    target = f"embedded://?protocol={servers['protocol']}"
    fleet = genapi.connect(target, transport=MemoryTransport(cluster), run="r")
    async with fleet:
        await fleet.wait_ready(timeout_s=5)
        async with anyio.create_task_group() as group:
            play = Play(fleet, group)
            publisher = genapi.WeightPublisher(fleet, transport=genapi.weights.Memory())
            await publisher.adopt(0)
            for step, publication in enumerate(publications, start=1):
                play.starts = publication.starts
                play.start(None)
                await anyio.sleep(0.02)
                report = await publisher.publish(
                    step,
                    genapi.weights.from_tensors(weights_of(step)),
                    mode=publication.plan.mode,
                    in_flight_kv=publication.plan.in_flight_kv,
                    prefix_cache=publication.plan.prefix_cache,
                )
                assert report.committed
            play.starts = {None: last}
            play.start(None)
        assert len(play.heard) == play.asked
        return play.heard


def check(heard: Heard, plans: Mapping[int, PausePlan]) -> None:
    """Hold one reply against what its trace says."""
    output = heard.reply.output
    if output.finish_reason is FinishReason.ABORT:
        assert not output.is_complete
    else:
        assert len(output.token_ids) == heard.ask.tokens
    trace = output.policy
    assert all(span.is_attested for span in trace.spans)
    steps = [step_of(span.lo) for span in trace.spans for _ in range(span.start, span.end)]
    assert steps == sorted(steps)
    named = {version for span in trace.spans for version in (span.lo, span.context)}
    assert trace.is_pure == (len(named) == 1)
    for span in trace.spans:
        if span.context == span.lo:
            before = [*heard.prompt, *output.token_ids[: span.start]]
            made = output.token_ids[span.start : span.end]
            assert fresh(step_of(span.lo), before, made) == list(made)
        else:
            # Some decision let older keys and values be read.
            made_by = [plan for step, plan in plans.items() if step <= step_of(span.lo)]
            assert any("stale" in (plan.in_flight_kv, plan.prefix_cache) for plan in made_by)
    if heard.ask.prefix is None:
        # It found nothing in a cache, so that what it rests on is known whatever was decided.
        best = replay(
            heard.prompt,
            output.token_ids,
            steps,
            recomputes=lambda step: step == 0 or plans[step].in_flight_kv == "recompute",
        )
        assert best == list(output.token_ids)


def check_interval(heard: Heard) -> None:
    """Where nothing is attested a reply has one interval, which is exact where its ends meet."""
    output = heard.reply.output
    assert len(output.policy.spans) == (1 if output.token_ids else 0)
    for span in output.policy.spans:
        assert span.lo is not None
        assert span.hi is not None
        if span.lo == span.hi == span.context:
            assert fresh(span.lo.step, heard.prompt, output.token_ids) == list(output.token_ids)


def plays(servers: Mapping[str, str]) -> st.SearchStrategy[tuple[Mapping[str, str], Any]]:
    plans = PLANS[servers["protocol"]]
    drawn = st.one_of(publications_of(clean(plans)), publications_of(plans))
    return st.tuples(st.just(servers), drawn)


def judged(
    play: tuple[Mapping[str, str], list[Publication]], last: list[Ask], workers: int
) -> None:
    servers, publications = play
    plans = {step: publication.plan for step, publication in enumerate(publications, start=1)}
    heard = simulate(lambda: played(publications, workers=workers, servers=servers, last=last))
    for one in heard:
        if servers == SILENT:
            check_interval(one)
        else:
            check(one, plans)
            if len(clean(list(plans.values()))) == len(plans):
                assert mismatches(one.prompt, one.reply.output) == 0


@pytest.mark.timeout(300)
@given(
    play=st.sampled_from((VLLM, VLLM, SILENT)).flatmap(plays),
    last=st.lists(ASKS, max_size=2),
    workers=st.integers(1, 2),
)
def test_every_token_is_what_the_weights_and_the_context_of_its_trace_make(
    play: tuple[Mapping[str, str], list[Publication]], last: list[Ask], workers: int
) -> None:
    judged(play, last, workers)


@pytest.mark.timeout(300)
@settings(max_examples=settings().max_examples // 3)  # the client under it is the same
@given(play=plays(SGLANG), last=st.lists(ASKS, max_size=2), workers=st.integers(1, 2))
def test_every_token_of_an_sglang_is_what_the_weights_and_the_context_of_its_trace_make(
    play: tuple[Mapping[str, str], list[Publication]], last: list[Ask], workers: int
) -> None:
    judged(play, last, workers)


# The same check must be able to fail: between unrelated weights every prompt differs.

CONTROL = [Ask(prefix=n % 2, tokens=120, streams=n > 1) for n in range(4)]


engines = pytest.mark.parametrize("servers", [VLLM, SGLANG], ids=lambda one: one["protocol"])


@engines
@pytest.mark.parametrize("prefix_cache", ["salt", "stale"])
def test_keys_and_values_left_stale_in_flight_are_found_and_the_trace_is_impure(
    prefix_cache: str, servers: Mapping[str, str]
) -> None:
    plan = PausePlan("keep", "stale", "salt" if prefix_cache == "salt" else "stale")
    publication = Publication(plan, {None: CONTROL})
    for one in simulate(lambda: played([publication], workers=2, servers=servers)):
        trace = one.reply.output.policy
        assert [step_of(span.lo) for span in trace.spans] == [0, 1]
        assert trace.spans[1].context != trace.spans[1].lo
        assert not trace.is_pure
        assert mismatches(one.prompt, one.reply.output) > 0


@pytest.mark.parametrize(
    ("servers", "plan"),
    [
        (VLLM, PausePlan("drain", "recompute", "stale")),
        (VLLM, PausePlan("abort", "recompute", "stale")),
        (SGLANG, PausePlan("abort", "recompute", "stale")),
    ],
    ids=["vllm-drain", "vllm-abort", "sglang-abort"],
)
def test_a_stale_prefix_that_is_reused_is_found_and_the_trace_is_impure(
    servers: Mapping[str, str], plan: PausePlan
) -> None:
    prime: dict[str | None, list[Ask]] = {None: [Ask(prefix=0, tokens=1), Ask(prefix=1, tokens=1)]}
    # The first one takes the salt off the requests, so that the second leaves entries to find.
    publications = [Publication(plan), Publication(plan, prime)]
    later = [Ask(prefix=0), Ask(prefix=1, streams=True)]
    heard = simulate(lambda: played(publications, workers=1, servers=servers, last=later))
    assert [len(one.reply.output.token_ids) for one in heard] == [1, 1, 60, 60]
    for one in heard[2:]:
        output = one.reply.output
        assert [step_of(span.lo) for span in output.policy.spans] == [2]
        assert output.policy.spans[0].context is None
        assert not output.policy.is_pure
        assert mismatches(one.prompt, output) > 0
