"""Sampling parameters change the tokens the way their names say."""

from typing import Any

import numpy as np
import pytest

from genapi.embedded import Cluster, EngineConfig, policy
from tests.unit.embedded.harness import Client, recorded, request, serving

PROMPT = [1, 2, 3]
GREEDY = policy.greedy(policy.init(0), PROMPT, 16)


async def sampled(n: int = 16, *, engine: EngineConfig | None = None, **sampling: Any) -> Any:
    async with serving(engine=engine) as client:
        return await client.choice(PROMPT, n, sampling={"temperature": 1.0, "seed": 1} | sampling)


async def test_seeds_reproduce_and_differ() -> None:
    async with serving() as client:
        outputs = [
            (await client.choice(PROMPT, 16, sampling={"temperature": 1.0, "seed": seed}))[
                "token_ids"
            ]
            for seed in (5, 5, 6)
        ]
        both = await client.generate(PROMPT, 16, sampling={"temperature": 1.0, "seed": 5, "n": 2})
    assert outputs[0] == outputs[1] != outputs[2]
    assert [c["token_ids"] for c in both["choices"]] == [outputs[0], outputs[2]]


async def test_unseeded_outputs_differ_within_and_between_workers() -> None:
    async with serving() as client:
        outputs = [
            tuple((await client.choice(PROMPT, 16, sampling={"temperature": 1.0}))["token_ids"])
            for _ in range(4)
        ]
        cluster = Cluster.from_query({"workers": "2"})
    async with cluster:
        for worker in cluster.workers:
            choice = await Client(worker).choice(PROMPT, 16, sampling={"temperature": 1.0})
            outputs.append(tuple(choice["token_ids"]))
    assert len(set(outputs)) == 5


@pytest.mark.parametrize(
    "narrow", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 0.0}]
)
async def test_the_narrowest_choice_is_greedy(narrow: dict[str, Any]) -> None:
    assert (await sampled(**narrow))["token_ids"] == GREEDY


async def test_truncation_draws_from_the_kept_tokens_only() -> None:
    choice = await sampled(n=48, top_k=3, logprobs=3)
    assert {entry["rank"] for entry in choice["logprobs"]["content"]} == {1, 2, 3}


async def test_samples_follow_the_distribution() -> None:
    weights = policy.init(0)
    async with serving(engine=EngineConfig(step_s=0.0)) as client:
        body = await client.generate(PROMPT, 1, sampling={"temperature": 0.5, "seed": 0, "n": 4000})
    counts = np.bincount([c["token_ids"][0] for c in body["choices"]], minlength=64) / 4000
    scores = policy.logits(weights, PROMPT)[-1] / 0.5
    probs = np.exp(scores - scores.max())
    assert np.abs(counts - probs / probs.sum()).sum() / 2 < 0.08


async def test_masks_and_biases() -> None:
    assert set((await sampled(allowed_token_ids=[4, 9]))["token_ids"]) == {4, 9}
    assert set((await sampled(logit_bias={"7": 100.0}))["token_ids"]) == {7}
    first, second = GREEDY[:2]
    choice = await sampled(n=2, temperature=0.0, bad_words=[f"{first} {second}"])
    assert choice["token_ids"][0] == first
    assert choice["token_ids"][1] != second
    assert (await sampled(n=1, temperature=0.0, bad_words=[f"{first}"]))["token_ids"] != [first]


async def test_penalties_spread_the_output() -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        penalty: dict[str, Any] = {name: 2.0}
        tokens = (await sampled(n=32, temperature=0.0, **penalty))["token_ids"]
        assert len(set(tokens)) == 32
    tokens = (await sampled(n=32, temperature=0.0, repetition_penalty=20.0))["token_ids"]
    assert len(set(tokens)) > len(set(policy.greedy(policy.init(0), PROMPT, 32)))


async def test_stopping() -> None:
    stop = GREEDY[4]
    first = GREEDY.index(stop)
    choice = await sampled(temperature=0.0, stop_token_ids=[stop])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["token_ids"] == GREEDY[: first + 1]
    late = await sampled(temperature=0.0, stop_token_ids=[stop], min_tokens=first + 2)
    assert stop not in late["token_ids"][: first + 1]
    assert len(late["token_ids"]) > first + 1
    ends = EngineConfig(eos_token_id=stop)
    choice = await sampled(temperature=0.0, engine=ends)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    choice = await sampled(temperature=0.0, engine=ends, ignore_eos=True)
    assert choice["token_ids"] == GREEDY


async def test_without_a_limit_the_context_is_filled() -> None:
    async with serving(engine=EngineConfig(max_model_len=20)) as client:
        body = {"token_ids": PROMPT, "sampling_params": {"temperature": 0}}
        _, reply = await client.post("/inference/v1/generate", body)
    choice = reply["choices"][0]
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (17, "length")


async def test_raw_scores_ignore_temperature_and_truncation() -> None:
    choice = await sampled(n=8, temperature=0.3, top_k=2, logprobs=0)
    expected = policy.logprobs(policy.init(0), [*PROMPT, *choice["token_ids"]])[3:]
    got = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert got == [float(np.float32(score)) for score in expected]


async def test_processed_scores_are_those_of_the_draw() -> None:
    """As recorded: renormalised over the kept tokens, the masked ones at -9999."""
    mode = EngineConfig(logprobs_mode="processed_logprobs")
    choice = await sampled(n=2, engine=mode, temperature=0.5, top_k=3, logprobs=5)
    recording = recorded("53_processed_logprobs")[0]["response"]["body"]["choices"][0]
    for entries in (choice["logprobs"]["content"], recording["logprobs"]["content"]):
        for entry in entries:
            top = entry["top_logprobs"]
            assert top[0]["token_id"] == entry["token_id"]
            assert sorted(score["rank"] for score in top) == [1, 2, 3, 4, 5]
            kept = [score["logprob"] for score in top if score["rank"] <= 3]
            assert np.exp(kept).sum() == pytest.approx(1.0, abs=1e-5)
            assert [s["logprob"] for s in top if s["rank"] > 3] == [-9999.0, -9999.0]
    greedy = await sampled(engine=mode, temperature=0.0, logprobs=2)
    assert greedy["logprobs"] == (await sampled(temperature=0.0, logprobs=2))["logprobs"]


@pytest.mark.parametrize(
    "sampling",
    [
        {"n": 0},
        {"n": 2},
        {"top_p": 0.0},
        {"top_k": -2},
        {"min_p": 2},
        {"max_tokens": 0},
        {"min_tokens": 9},
        {"presence_penalty": 3},
        {"repetition_penalty": 0},
        {"allowed_token_ids": []},
        {"stop_token_ids": [64]},
        {"temperature": "hot"},
        {"seed": 1.5},
        {"stop_token_ids": "7"},
        {"stop": 7},
        {"bad_words": ["word"]},
        {"logit_bias": [7]},
        {"logit_bias": {"64": 1}},
        {"allowed_token_ids": [1.0]},
    ],
)
async def test_values_out_of_range_are_refused(sampling: dict[str, Any]) -> None:
    async with serving() as client:
        body = request(PROMPT, 4, sampling=sampling)
        status, reply = await client.post("/inference/v1/generate", body)
    assert status == 400
    assert next(iter(sampling)) in reply["error"]["message"]
