"""What rests on which weights: stale, recomputed, salted and unsalted context are all different."""

import numpy as np

from genapi.embedded import EngineConfig, policy
from tests.unit.embedded.harness import Client, events, request, serving, until

OLD, NEW = policy.init(0), policy.init(1)
PROMPT = [(7 * i) % 64 for i in range(40)]
LENGTH = 24


async def interrupted(client: Client, *, clear: bool, reset: bool = False) -> tuple[list[int], int]:
    """Tokens of a request that lived through an update, and how many of them came before it."""
    reply = await client.send(
        "POST", "/inference/v1/generate", request(PROMPT, LENGTH) | {"stream": True}
    )
    await until(lambda: any(len(r.tracks[0].output) > 5 for r in client.worker.engine.requests))
    pause = {"mode": "keep", "clear_cache": str(clear).lower()}
    assert await client.post("/pause", query=pause) == (200, {"status": "paused"})
    await client.publish(NEW, "new")
    if reset:
        status, body = await client.post(
            "/reset_prefix_cache", query={"reset_running_requests": "true"}
        )
        assert (status, body) == (200, {"success": True})
    await client.post("/resume")
    chunks = await events(reply)
    choices = [c for chunk in chunks[:-1] for c in chunk["choices"]]
    spans = choices[-1]["weight_versions"]
    assert [span["version"] for span in spans] == ["default", "new"]
    assert (spans[0]["end"], spans[1]["end"]) == (spans[1]["start"], LENGTH)
    return [token for c in choices for token in c["token_ids"]], spans[1]["start"]


async def test_cleared_keep_continues_like_a_fresh_prefill_on_the_new_weights() -> None:
    async with serving() as client:
        await client.join()
        tokens, cut = await interrupted(client, clear=True)
    assert tokens[:cut] == policy.greedy(OLD, PROMPT, cut)
    fresh = policy.greedy(NEW, [*PROMPT, *tokens[:cut]], LENGTH - cut)
    assert tokens[cut:] == fresh


async def test_uncleared_keep_continues_on_old_values() -> None:
    async with serving() as client:
        await client.join()
        tokens, cut = await interrupted(client, clear=False)
    assert tokens[:cut] == policy.greedy(OLD, PROMPT, cut)
    model = policy.prepare(NEW)
    context = [*PROMPT, *tokens[:cut]]
    h = model.fold(None, list(policy.values(OLD, context[:-1])))
    for token in tokens[cut:]:
        h = model.fold(h, [model.table[context[-1]]])
        assert token == int(model.readout(h).argmax())
        context.append(token)
    assert tokens[cut:] != policy.greedy(NEW, context[: len(PROMPT) + cut], LENGTH - cut)


async def test_resetting_running_requests_repairs_an_uncleared_keep() -> None:
    async with serving() as client:
        await client.join()
        tokens, cut = await interrupted(client, clear=False, reset=True)
    assert tokens[cut:] == policy.greedy(NEW, [*PROMPT, *tokens[:cut]], LENGTH - cut)


async def test_recompute_gives_the_same_scores_as_a_fresh_run_bit_for_bit() -> None:
    async with serving() as client:
        first = await client.choice(PROMPT, LENGTH, sampling={"logprobs": 3})
        hit = await client.choice(PROMPT, LENGTH, sampling={"logprobs": 3})
    async with serving() as client:
        reply = await client.send(
            "POST",
            "/inference/v1/generate",
            request(PROMPT, LENGTH, sampling={"logprobs": 3}) | {"stream": True},
        )
        await until(lambda: any(len(r.tracks[0].output) > 5 for r in client.worker.engine.requests))
        await client.post("/pause", query={"mode": "keep"})
        assert client.worker.engine.num_running == 0
        await client.post("/resume")
        chunks = [c["choices"][0] for c in (await events(reply))[:-1]]
    assert hit == first
    assert [token for c in chunks for token in c["token_ids"]] == first["token_ids"]
    assert [e for c in chunks for e in c["logprobs"]["content"]] == first["logprobs"]["content"]


async def test_a_prefix_outlives_an_update_unless_salted_or_cleared() -> None:
    """The four contexts of one prompt under new weights."""
    async with serving(prompt_tokens_details=True) as client:
        await client.join()
        await client.generate(PROMPT, LENGTH)
        await client.post("/pause", query={"mode": "keep", "clear_cache": "false"})
        await client.publish(NEW, "new")
        await client.post("/resume")
        stale = await client.generate(PROMPT, LENGTH)
        salted = await client.generate(PROMPT, LENGTH, cache_salt="new")
        again = await client.generate(PROMPT, LENGTH, cache_salt="new")
        await client.post("/reset_prefix_cache")
        cleared = await client.generate(PROMPT, LENGTH)
    fresh = policy.greedy(NEW, PROMPT, LENGTH)
    assert tokens_of(salted) == tokens_of(again) == tokens_of(cleared) == fresh
    assert tokens_of(stale) not in (fresh, policy.greedy(OLD, PROMPT, LENGTH))
    assert stale["choices"][0]["weight_versions"] == [{"version": "new", "start": 0, "end": LENGTH}]
    assert [cached(reply) for reply in (stale, salted, again, cleared)] == [32, 0, 32, 0]


async def test_pausing_with_a_cleared_cache_leaves_no_stale_prefix() -> None:
    for mode in ("abort", "wait", "keep"):
        async with serving() as client:
            await client.join()
            await client.generate(PROMPT, 4)
            await client.post("/pause", query={"mode": mode})
            await client.publish(NEW, "new")
            await client.post("/resume")
            assert tokens_of(await client.generate(PROMPT, 8)) == policy.greedy(NEW, PROMPT, 8)


async def test_generated_blocks_are_reused_by_the_next_turn() -> None:
    async with serving(prompt_tokens_details=True) as client:
        first = await client.generate(PROMPT, 24)
        turn = [*PROMPT, *tokens_of(first), 5, 6]
        second = await client.generate(turn, 4)
    assert cached(second) == 48
    assert tokens_of(second) == policy.greedy(OLD, turn, 4)


async def test_scoring_a_prompt_reads_no_cache() -> None:
    async with serving(prompt_tokens_details=True) as client:
        await client.generate(PROMPT, 4)
        reply = await client.generate(PROMPT, 1, sampling={"prompt_logprobs": 0})
        read = await client.generate(
            PROMPT, 1, sampling={"prompt_logprobs": 0, "skip_reading_prefix_cache": False}
        )
    assert (cached(reply), cached(read)) == (0, 32)
    scores = [entry[str(token)]["logprob"] for entry, token in scored(reply)]
    assert scores == [float(np.float32(score)) for score in policy.logprobs(OLD, PROMPT)[1:]]


async def test_a_block_that_is_there_stays_although_newer_values_were_computed() -> None:
    async with serving() as client:
        await client.join()
        await client.generate(PROMPT, 1)
        await client.publish(NEW, "new")
        stale = await client.generate(PROMPT, LENGTH)
        await client.generate(PROMPT, 1, sampling={"prompt_logprobs": 0})
        again = await client.generate(PROMPT, LENGTH)
    assert tokens_of(stale) == tokens_of(again) != policy.greedy(NEW, PROMPT, LENGTH)


async def test_resetting_refuses_while_requests_hold_values() -> None:
    async with serving() as client:
        reply = await client.send(
            "POST", "/inference/v1/generate", request([1], 40) | {"stream": True}
        )
        await until(lambda: client.worker.engine.num_running)
        assert await client.post("/reset_prefix_cache") == (200, {"success": False})
        await events(reply)
        assert await client.post("/reset_prefix_cache") == (200, {"success": True})


async def test_a_small_cache_forgets_the_least_recently_used_prefix() -> None:
    async with serving(engine=EngineConfig(cache_blocks=2), prompt_tokens_details=True) as client:
        for first in (1, 2, 1, 3):
            await client.generate([first] * 17, 1)
        kept = await client.generate([1] * 17, 1)
        lost = await client.generate([2] * 17, 1)
    assert (cached(kept), cached(lost)) == (16, 0)


def tokens_of(reply: dict[str, object]) -> list[int]:
    return reply["choices"][0]["token_ids"]  # type: ignore[index, no-any-return]


def cached(reply: dict[str, object]) -> int:
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]  # type: ignore[index, no-any-return]


def scored(reply: dict[str, object]) -> list[tuple[dict[str, dict[str, float]], int]]:
    entries = reply["prompt_logprobs"]
    return list(zip(entries[1:], PROMPT[1:], strict=True))  # type: ignore[index]
