"""Whatever the interleaving of updates: each token is that of the weights its span names."""

from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from genapi.embedded import Cluster, Worker, policy
from tests.unit.embedded.harness import Client

WEIGHTS = {"default": policy.init(0)} | {f"v{seed}": policy.init(seed) for seed in range(1, 4)}
MODELS = {label: policy.prepare(weights) for label, weights in WEIGHTS.items()}


@dataclass
class Flight:
    """A request, its reply, and the output lengths at which its computed values were dropped."""

    prompt: list[int]
    n: int
    salt: str
    cuts: list[int] = field(default_factory=list)
    choice: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Round:
    """Some steps, a pause, updates, and a resume."""

    steps: int
    clear: bool
    labels: tuple[str, ...]
    reset: bool
    joins: tuple[tuple[int, int], ...]
    """Requests that arrive while paused: (first token, length)."""


rounds = st.builds(
    Round,
    steps=st.integers(0, 12),
    clear=st.booleans(),
    labels=st.lists(st.sampled_from(sorted(WEIGHTS)), max_size=2).map(tuple),
    reset=st.booleans(),
    joins=st.lists(st.tuples(st.integers(0, 63), st.integers(1, 30)), max_size=2).map(tuple),
)


@given(
    plan=st.lists(rounds, max_size=4), starts=st.lists(st.integers(1, 40), min_size=1, max_size=3)
)
def test_every_token_is_that_of_the_weights_its_span_names(
    plan: list[Round], starts: list[int]
) -> None:
    flights: list[Flight] = []
    anyio.run(fly, plan, starts, flights)
    for flight in flights:
        check(flight)


async def fly(plan: list[Round], starts: list[int], flights: list[Flight]) -> None:
    cluster = Cluster.from_query({"block_size": "4"})
    client = Client(cluster.workers[0])

    async def run(flight: Flight) -> None:
        fields = {"cache_salt": flight.salt, "sampling": {"logprobs": 0}}
        flight.choice = await client.choice(flight.prompt, flight.n, **fields)

    with anyio.fail_after(5):
        async with cluster, anyio.create_task_group() as group:

            def start(first: int, n: int) -> None:
                flights.append(Flight([first, 3, first, 5, 9], n, salt=str(len(flights))))
                group.start_soon(run, flights[-1])

            await client.join()
            for index, n in enumerate(starts):
                start(index, n)
            for turn in plan:
                await cluster.clock.sleep(turn.steps * 0.001)
                await client.post("/pause", query={"mode": "keep", "clear_cache": turn.clear})
                if turn.clear:
                    cut(client.worker, flights)
                for label in turn.labels:
                    await client.publish(WEIGHTS[label], label)
                if turn.reset:
                    await client.post(
                        "/reset_prefix_cache", query={"reset_running_requests": "true"}
                    )
                    cut(client.worker, flights)
                for first, n in turn.joins:
                    start(first, n)
                await client.post("/resume")


def cut(worker: Worker, flights: list[Flight]) -> None:
    """Note how far each live request has come: everything it had computed is dropped here."""
    live = {live.salt: len(live.tracks[0].output) for live in worker.engine.requests}
    for flight in flights:
        if flight.salt in live:
            flight.cuts.append(live[flight.salt])


def check(flight: Flight) -> None:
    """Hold a reply against the policy, computing each position with the weights of its time."""
    tokens, spans = flight.choice["token_ids"], flight.choice["weight_versions"]
    labels = [span["version"] for span in spans for _ in range(span["start"], span["end"])]
    assert len(labels) == len(tokens) == flight.n
    assert spans[0]["start"] == 0
    scores = [entry["logprob"] for entry in flight.choice["logprobs"]["content"]]
    for at, label in enumerate(labels):
        fresh = max([0, *(cut for cut in flight.cuts if cut <= at)])
        rows = [MODELS[labels[fresh]].table[t] for t in [*flight.prompt, *tokens[:fresh]]]
        rows += [MODELS[labels[i + 1]].table[tokens[i]] for i in range(fresh, at)]
        logits = MODELS[label].readout(MODELS[label].fold(None, rows))
        assert tokens[at] == int(logits.argmax())
        assert scores[at] == np.float32(log_softmax(logits)[tokens[at]])


def log_softmax(logits: policy.Floats) -> policy.Floats:
    shifted = logits - logits.max()
    out: policy.Floats = shifted - np.log(np.exp(shifted).sum())
    return out
