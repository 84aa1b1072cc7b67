"""Every token's true version lies in its interval, behind a frontend that attests nothing.

The embedded workers tell here under which label they computed each token, which no worker of
Dynamo's own does and genapi does not read. Publications and requests are those of the other oracle.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio
import anyio.abc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import genapi
from genapi import FinishReason, GenerateResponse, PolicyVersion
from genapi.embedded import Cluster
from genapi.events import Event, PhaseStarted
from genapi.publication.plan import PausePlan
from genapi.transports.memory import MemoryTransport
from genapi.types.policy import parse_label
from tests.property.test_oracle import ASKS, PLANS, Ask, Publication, publications_of
from tests.support.embedded_oracle import fresh, step_of, weights_of
from tests.support.simulated import LoopClock, simulate

SPLIT = [p for p in PLANS["vllm"] if p.mode != "keep" or p.in_flight_kv == "stale"]
"""What can be carried out where other workers prefill."""


@dataclass
class Heard:
    """A reply, what was asked, and how many publications overlapped it."""

    ask: Ask
    prompt: tuple[int, ...]
    reply: GenerateResponse
    overlapping: int

    @property
    def true_versions(self) -> list[PolicyVersion]:
        """What the worker itself says of each token."""
        labels = self.reply.output.extra["engine_data"]["true_versions"]
        versions = [parse_label(label) for label in labels]
        assert None not in versions
        return [version for version in versions if version is not None]


@dataclass
class Play:
    """A fleet, the publications on it, and the replies that came."""

    fleet: genapi.Fleet
    group: anyio.abc.TaskGroup
    heard: list[Heard] = field(default_factory=list)
    asked: int = 0
    begun: int = 0
    ended: int = 0
    publication: Publication | None = None

    def __post_init__(self) -> None:
        self.fleet.observe = self.observe

    def observe(self, event: Event) -> None:
        if isinstance(event, PhaseStarted):
            self.start(event.phase)

    def start(self, moment: str | None) -> None:
        starts = {} if self.publication is None else self.publication.starts
        for ask in starts.get(moment, ()):
            self.group.start_soon(self.ask, ask)

    async def ask(self, ask: Ask) -> None:
        self.asked += 1
        prompt = (1 + self.asked % 60, 1 + self.asked // 60, 62)
        asked = genapi.GenerateRequest(
            prompt_token_ids=prompt,
            sampling=genapi.SamplingParams(max_tokens=ask.tokens, temperature=0.0, ignore_eos=True),
        )
        ended = self.ended
        if ask.streams:
            async with self.fleet.stream(asked) as events:
                *_, last = [event async for event in events]
            assert isinstance(last, genapi.Finished)
            reply = last.reply
        else:
            reply = await self.fleet.generate(asked)
        self.heard.append(Heard(ask, prompt, reply, self.begun - ended))


async def played(
    publications: Sequence[Publication], *, workers: int, prefill: int, last: Sequence[Ask]
) -> list[Heard]:
    """The replies to all requests, the publications one after the other."""
    query = {"protocol": "dynamo", "workers": str(workers + prefill), "prefill": str(prefill)}
    cluster = Cluster.from_query({**query, "tell_versions": "true"}, LoopClock())
    fleet = genapi.connect(
        "embedded://?protocol=dynamo", transport=MemoryTransport(cluster), run="r"
    )
    async with fleet:
        await fleet.wait_ready(timeout_s=5)
        async with anyio.create_task_group() as group:
            play = Play(fleet, group)
            publisher = genapi.WeightPublisher(fleet, transport=genapi.weights.Memory())
            await publisher.adopt(0)
            for step, publication in enumerate(publications, start=1):
                play.publication = publication
                play.start(None)
                await anyio.sleep(0.02)
                play.begun += 1
                report = await publisher.publish(
                    step,
                    genapi.weights.from_tensors(weights_of(step)),
                    mode=publication.plan.mode,
                    in_flight_kv=publication.plan.in_flight_kv,
                    prefix_cache=publication.plan.prefix_cache,
                )
                assert report.committed
                play.ended += 1
            play.publication = Publication(PausePlan(), {None: last})
            play.start(None)
        assert len(play.heard) == play.asked
        return play.heard


def check(heard: Heard) -> None:
    """Hold one reply against what its worker says."""
    output = heard.reply.output
    if output.finish_reason is FinishReason.ABORT:
        assert output.finish_raw == "stop"
    else:
        assert len(output.token_ids) == heard.ask.tokens
    assert heard.reply.worker is not None
    if not output.token_ids:
        return
    (span,) = output.policy.spans
    low, high = step_of(span.lo), step_of(span.hi)
    true = [version.step for version in heard.true_versions]
    assert len(true) == len(output.token_ids)
    assert low <= min(true)
    assert max(true) <= high
    assert high - low <= heard.overlapping
    if span.lo == span.hi == span.context:
        assert fresh(low, heard.prompt, output.token_ids) == list(output.token_ids)


@pytest.mark.timeout(300)
@given(
    publications=publications_of(PLANS["vllm"]),
    last=st.lists(ASKS, max_size=2),
    workers=st.integers(1, 2),
)
def test_every_true_version_lies_in_an_interval_as_wide_as_what_overlapped(
    publications: list[Publication], last: list[Ask], workers: int
) -> None:
    for one in simulate(lambda: played(publications, workers=workers, prefill=0, last=last)):
        check(one)


@pytest.mark.timeout(300)
@given(
    publications=publications_of(SPLIT),
    last=st.lists(ASKS, max_size=2),
    prefill=st.integers(1, 2),
)
def test_where_others_prefill_their_versions_are_in_the_interval_too(
    publications: list[Publication], last: list[Ask], prefill: int
) -> None:
    for one in simulate(lambda: played(publications, workers=2, prefill=prefill, last=last)):
        check(one)
        assert one.reply.prefill_worker is not None
