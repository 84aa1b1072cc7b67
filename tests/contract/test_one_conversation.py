"""One conversation with every provider: the same tokens and scores, and the same kind of reply."""

from typing import Any

import numpy as np
import pytest

from genapi import GenerateResponse
from genapi.testing.contract import PROFILES, Memory, Profile, Rig

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore::genapi.errors.GenAPIWarning"),
]

FLAGS = {
    "vllm": {"prompt_tokens_details": "true", "block_size": "1"},
    "dynamo": {"block_size": "1"},
}
"""What servers are started with to tell what others tell unasked."""

OTHERWISE = {"request_id", "attempts", "worker", "prefill_worker", "logprobs_mode", "extra"}
"""Fields in which replies may differ; `policy` is compared apart."""
SCORES = ["logprobs"]
UNSAID = {"text", "model", "stop_reason"}
"""What a route may not tell: vLLM's for ids no text, SGLang's no model, Dynamo's no stop id."""


async def conversation(profile: Profile, temperature: float) -> list[GenerateResponse]:
    """Six turns, one of them streamed and one cut by a stop id, with a publication between."""
    flags = FLAGS.get(profile.provider, {})
    async with Rig(profile, Memory()).stand(flags=flags, run="r") as s, s.publisher() as p:
        await p.adopt(0)
        drawn = {"temperature": temperature}
        asked = s.request(tokens=6, request_id="mine", session="one", sampling=drawn)
        replies = [await s.fleet.generate(asked)]
        asked = asked.extended(replies[-1].output.token_ids, [7, 8])
        replies.append(await s.streamed(asked))
        asked = asked.extended(replies[-1].output.token_ids, [9])
        await p.publish(1, s.weights(1))
        replies += [await s.fleet.generate(asked), await s.streamed(asked)]
        stop = {**drawn, "stop_token_ids": list(range(0, 64, 4)), "ignore_eos": False}
        scored = {**stop, "prompt_logprobs": 0}
        for sampling in (scored, {**drawn, "top_k": 5, "top_p": 0.9, "min_tokens": 3}):
            again = s.request(tokens=12, request_id="mine", sampling=sampling)
            replies.append(await s.fleet.generate(again))
        return replies


def compared(reply: GenerateResponse, other: GenerateResponse) -> list[str]:
    """The fields in which two replies differ."""
    found = [
        name
        for name in set(GenerateResponse.model_fields) - OTHERWISE - {"outputs"}
        if differ(name, getattr(reply, name), getattr(other, name))
    ]
    for one, two in zip(reply.outputs, other.outputs, strict=True):
        names = set(type(one).model_fields) - {"extra", "policy"}
        found += [name for name in names if differ(name, getattr(one, name), getattr(two, name))]
    return sorted(found)


def differ(name: str, one: Any, two: Any) -> bool:
    if name in UNSAID and None in (one, two):
        return False
    if isinstance(one, np.ndarray):
        return not np.array_equal(one, two, equal_nan=True)
    return bool(one != two)


@pytest.fixture(scope="module")
def first() -> Profile:
    """Whoever the others are held against; it attests its versions."""
    return PROFILES[0]


others = pytest.mark.parametrize("profile", PROFILES[1:], ids=lambda profile: profile.provider)


@others
async def test_at_temperature_one_every_provider_gives_the_same_replies(
    profile: Profile, first: Profile
) -> None:
    wanted, got = [await conversation(one, 1.0) for one in (first, profile)]
    found = [compared(one, two) for one, two in zip(wanted, got, strict=True)]
    # The last one truncates, before which some servers score and after which others do.
    truncated = [] if "processed" not in (first.logprobs_mode, profile.logprobs_mode) else SCORES
    assert found == [[]] * 5 + [truncated]
    assert len({reply.output.token_ids for reply in wanted}) == 6
    for one, two in zip(wanted, got, strict=True):
        versions = (one.output.policy.arrays(), two.output.policy.arrays())
        attested, interval = versions
        assert (interval.lo <= attested.lo).all()
        assert (attested.hi <= interval.hi).all()


@others
async def test_at_another_temperature_scores_are_of_the_kind_that_each_reply_names(
    profile: Profile, first: Profile
) -> None:
    wanted, got = [await conversation(one, 0.7) for one in (first, profile)]
    for one, two in zip(wanted, got, strict=True):
        assert one.logprobs_mode == first.logprobs_mode
        assert two.logprobs_mode == profile.logprobs_mode
        same = one.logprobs_mode == two.logprobs_mode
        assert compared(one, two) == ([] if same else ["logprobs"])
