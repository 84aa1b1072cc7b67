"""Whatever the interleaving of pauses and updates on SGLang: each token is what it rests on.

It is noted at which lengths of an output its values were dropped and the cache was flushed. From
that every token is recomputed, with each position under the weights that its value was computed
with, and its version is the one that its span names.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import anyio
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from genapi.embedded import Cluster, Worker, policy
from tests.unit.embedded.sglang_harness import SglangClient, request

WEIGHTS = {"default": policy.init(0)} | {f"v{seed}": policy.init(seed) for seed in range(1, 4)}
MODELS = {label: policy.prepare(weights) for label, weights in WEIGHTS.items()}


@dataclass
class Flight:
    """A request, its reply, and what happened at which lengths of its output."""

    prompt: list[int]
    n: int
    salt: str
    events: list[tuple[int, Literal["retract", "flush"]]] = field(default_factory=list)
    reply: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Round:
    """Some steps, a pause, updates, and a resume."""

    steps: int
    mode: Literal["abort", "retract", "in_place"]
    labels: tuple[str, ...]
    flush: bool
    joins: tuple[tuple[int, int], ...]
    """Requests that arrive while paused: (first token, length)."""


rounds = st.builds(
    Round,
    steps=st.integers(0, 12),
    mode=st.sampled_from(["abort", "retract", "in_place"]),
    labels=st.lists(st.sampled_from(sorted(WEIGHTS)), max_size=2).map(tuple),
    flush=st.booleans(),
    joins=st.lists(st.tuples(st.integers(0, 63), st.integers(1, 30)), max_size=2).map(tuple),
)


@given(
    plan=st.lists(rounds, max_size=4), starts=st.lists(st.integers(1, 40), min_size=1, max_size=3)
)
def test_every_token_is_what_the_weights_and_the_values_of_its_time_make(
    plan: list[Round], starts: list[int]
) -> None:
    flights: list[Flight] = []
    anyio.run(fly, plan, starts, flights)
    for flight in flights:
        check(flight)


async def fly(plan: list[Round], starts: list[int], flights: list[Flight]) -> None:
    cluster = Cluster.from_query({"protocol": "sglang"})
    client = SglangClient(cluster.workers[0])

    async def run(flight: Flight) -> None:
        body = request(flight.prompt, flight.n, cache_salt=flight.salt, return_logprob=True)
        status, flight.reply = await client.post("/generate", body)
        assert status == 200

    with anyio.fail_after(60):
        async with cluster, anyio.create_task_group() as group:

            def start(first: int, n: int) -> None:
                flights.append(Flight([first, 3, first, 5, 9], n, salt=str(len(flights))))
                group.start_soon(run, flights[-1])

            await client.join_group()
            for index, n in enumerate(starts):
                start(index, n)
            for turn in plan:
                await cluster.clock.sleep(turn.steps * 0.001)
                await client.pause(turn.mode)
                # the reply does not wait for the scheduler, what is asked of it afterwards does
                await client.post("/get_weights_by_name", {"name": policy.VALUE})
                for label in turn.labels:
                    await client.publish(WEIGHTS[label], label, flush_cache=False)
                if turn.mode == "retract":
                    note(client.worker, flights, "retract")
                if turn.flush and (await client.send("POST", "/flush_cache")).status == 200:
                    note(client.worker, flights, "flush")
                for first, n in turn.joins:
                    start(first, n)
                await client.resume()


def note(worker: Worker, flights: list[Flight], event: Literal["retract", "flush"]) -> None:
    """Write down how far each live request had come."""
    live = {live.salt: len(live.tracks[0].output) for live in worker.engine.requests}
    for flight in flights:
        length = live.get(f"{flight.salt}\0")
        if length is not None:
            flight.events.append((length, event))


def check(flight: Flight) -> None:
    """Hold a reply against the policy, computing each position with the weights of its time."""
    tokens, meta = flight.reply["output_ids"], flight.reply["meta_info"]
    labels = [s["version"] for s in meta["weight_versions"] for _ in range(s["start"], s["end"])]
    assert len(labels) == len(tokens) == meta["completion_tokens"]
    assert len(tokens) == flight.n or meta["finish_reason"]["type"] == "abort"
    scores = [entry[0] for entry in meta["output_token_logprobs"]]
    context, events = list(flight.prompt), list(flight.events)
    owners: list[str] = []
    cached: list[str] = []
    for at, (token, label) in enumerate(zip(tokens, labels, strict=True)):
        while events and events[0][0] <= at:
            if events.pop(0)[1] == "retract":
                owners = []
            else:
                cached = []
        if owners:
            owners.append(label)
        else:
            reused = cached[: len(context) - 1]
            owners = reused + [label] * (len(context) - len(reused))
            cached += owners[len(cached) :]
        rows = [MODELS[owner].table[t] for owner, t in zip(owners, context, strict=True)]
        logits = MODELS[label].readout(MODELS[label].fold(None, rows))
        assert token == int(logits.argmax())
        assert scores[at] == np.float32(log_softmax(logits)[token])
        context.append(token)


def log_softmax(logits: policy.Floats) -> policy.Floats:
    shifted = logits - logits.max()
    out: policy.Floats = shifted - np.log(np.exp(shifted).sum())
    return out
