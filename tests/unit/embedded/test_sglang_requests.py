"""SGLang's generation route: what it takes, what it refuses where, what it says of its output."""

from typing import Any

import numpy as np
import pytest

from genapi.embedded import ByteStream, EngineConfig, policy
from tests.unit.embedded.harness import events, until
from tests.unit.embedded.sglang_harness import PROMPT, flights, request, serving

GREEDY = policy.greedy(policy.init(0), PROMPT, 16)
PARTIAL = {"ignore_eos": True}


async def frames_of(client: Any, body: dict[str, Any]) -> list[Any]:
    reply = await client.send("POST", "/generate", body | {"stream": True})
    return (await events(reply))[:-1]


async def test_greedy_tokens_are_those_of_the_weights() -> None:
    async with serving() as client:
        reply = await client.generate(PROMPT, 16)
    assert reply["output_ids"] == GREEDY
    assert reply["text"] == "".join(f"{token} " for token in GREEDY)


async def test_frames_are_cumulative_until_the_server_streams_increments() -> None:
    body = request(PROMPT, 5, return_logprob=True)
    async with serving() as client:
        whole = await frames_of(client, body)
    async with serving(incremental_streaming_output=True) as client:
        parts = await frames_of(client, body)
    for count, frame in enumerate(whole, start=1):
        assert frame["output_ids"] == GREEDY[:count]
        assert len(frame["meta_info"]["output_token_logprobs"]) == count
    assert [token for frame in parts for token in frame["output_ids"]] == GREEDY[:5]
    assert "".join(frame["text"] for frame in parts) == whole[-1]["text"]
    assert all(len(f["meta_info"]["output_token_logprobs"]) == len(f["output_ids"]) for f in parts)
    for frames in (whole, parts):
        finals = ["weight_versions" in frame["meta_info"] for frame in frames]
        assert finals == [False] * (len(frames) - 1) + [True]


async def test_a_frame_may_bring_several_tokens() -> None:
    async with serving() as client:
        slow = await frames_of(client, request(PROMPT, 7, sampling={"stream_interval": 3}))
    assert [len(frame["output_ids"]) for frame in slow] == [1, 4, 7]


async def test_a_frame_waits_while_its_end_could_begin_a_stop_string() -> None:
    first = str(GREEDY[2])
    async with serving() as client:
        stop = f"{first} never"
        frames = await frames_of(client, request(PROMPT, 6, sampling={"stop": stop}))
    assert not any(frame["output_ids"] == GREEDY[:3] for frame in frames[:-1])
    assert frames[-1]["output_ids"] == GREEDY[:6]


async def test_the_matched_stop_token_stays_in_the_ids_and_leaves_the_text() -> None:
    stop = GREEDY[4]
    end = GREEDY.index(stop) + 1
    async with serving() as client:
        reply = await client.generate(PROMPT, 16, sampling={"stop_token_ids": [stop]})
        kept = await client.generate(
            PROMPT, 16, sampling={"stop_token_ids": [stop], "no_stop_trim": True}
        )
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert reply["output_ids"] == kept["output_ids"] == GREEDY[:end]
    assert reply["text"] == "".join(f"{token} " for token in GREEDY[: end - 1])
    assert kept["text"] == "".join(f"{token} " for token in GREEDY[:end])


async def test_a_stop_string_and_an_end_of_text_are_named() -> None:
    async with serving(engine=EngineConfig(eos_token_id=GREEDY[3])) as client:
        ended = await client.generate(PROMPT, 16)
        reply = await client.generate(PROMPT, 16, sampling={"stop": [f" {GREEDY[1]}"], **PARTIAL})
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": GREEDY[3]}
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": f" {GREEDY[1]}"}
    assert reply["text"] == f"{GREEDY[0]}"


async def test_scores_are_scaled_by_the_temperature_and_ignore_truncation() -> None:
    async with serving() as client:
        sampled = await client.generate(
            PROMPT, 8, return_logprob=True, sampling={"temperature": 0.3, "top_k": 2}
        )
    async with serving(return_original_logprob=True) as client:
        raw = await client.generate(
            PROMPT, 8, return_logprob=True, sampling={"temperature": 0.3, "top_k": 2}
        )
    weights = policy.init(0)
    for reply, temperature in ((sampled, 0.3), (raw, 1.0)):
        logits = policy.logits(weights, [*PROMPT, *reply["output_ids"]])[2:-1] / temperature
        scores = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1))[:, None]
        scores -= logits.max(-1, keepdims=True)
        got = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
        expected = [row[token] for row, token in zip(scores, reply["output_ids"], strict=True)]
        assert got == pytest.approx(expected, abs=1e-5)


async def test_scores_of_a_prompt_are_never_scaled_and_begin_with_nothing() -> None:
    async with serving() as client:
        for temperature in (0.0, 0.3):
            reply = await client.generate(
                [*PROMPT, 4],
                1,
                return_logprob=True,
                logprob_start_len=1,
                top_logprobs_num=1,
                token_ids_logprob=[9],
                sampling={"temperature": temperature},
            )
            meta = reply["meta_info"]
            expected = policy.logprobs(policy.init(0), [*PROMPT, 4])
            assert meta["input_token_logprobs"][0] == [None, 2, None]
            assert [entry[1] for entry in meta["input_token_logprobs"]] == [2, 3, 4]
            got = [entry[0] for entry in meta["input_token_logprobs"][1:]]
            assert got == pytest.approx(list(expected[2:]), abs=1e-6)
            assert meta["input_top_logprobs"][0] is None
            assert [len(top) for top in meta["input_top_logprobs"][1:]] == [1, 1]
            assert [ids[0][1] for ids in meta["input_token_ids_logprobs"][1:]] == [9, 9]


async def test_the_last_id_of_the_vocabulary_is_shown_as_0_in_the_scores_of_a_prompt() -> None:
    async with serving() as client:
        reply = await client.generate([5, 63, 7], 1, return_logprob=True, logprob_start_len=0)
    assert [entry[1] for entry in reply["meta_info"]["input_token_logprobs"]] == [5, 0, 7]


async def test_the_most_likely_tokens_are_listed_whether_or_not_one_was_drawn() -> None:
    async with serving() as client:
        reply = await client.generate(
            PROMPT,
            20,
            return_logprob=True,
            top_logprobs_num=3,
            sampling={"temperature": 2.0},
        )
    meta, drawn_outside = reply["meta_info"], 0
    for own, top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        values = [entry[0] for entry in top]
        assert len(top) == 3
        assert values == sorted(values, reverse=True)
        drawn_outside += own[1] not in [entry[1] for entry in top]
        assert own[1] not in [entry[1] for entry in top] or own in top
    assert drawn_outside


async def test_seeds_mean_nothing_without_deterministic_inference() -> None:
    sampling = {"temperature": 1.0, "sampling_seed": 5}
    async with serving() as client:
        drawn = [tuple(await client.tokens(PROMPT, 16, sampling=sampling)) for _ in range(3)]
    assert len(set(drawn)) == 3
    async with serving(enable_deterministic_inference=True) as client:
        drawn = [tuple(await client.tokens(PROMPT, 16, sampling=sampling)) for _ in range(3)]
        unseeded = await client.post(
            "/generate", request(PROMPT, 16, sampling={"temperature": 1.0, "n": 2})
        )
    assert len(set(drawn)) == 1
    assert len({tuple(reply["output_ids"]) for reply in unseeded[1]}) == 1


async def test_samples_have_ids_of_their_own_and_cannot_be_aborted_by_the_one_given() -> None:
    async with flights() as (client, sky):
        flying = sky.launch(PROMPT, 300, rid="mine", sampling={"n": 2, "temperature": 1.0})
        await until(lambda: client.worker.engine.num_running == 2)
        assert await client.post("/abort_request", {"rid": "mine"}) == (200, "")
        await until(flying.over)
        ids = {reply["meta_info"]["id"] for reply in flying.body}
        assert len(ids) == 2
        assert "mine" not in ids
        reasons = [reply["meta_info"]["finish_reason"]["type"] for reply in flying.body]
        assert reasons == ["length", "length"]


async def test_one_bad_item_fails_its_batch() -> None:
    async with serving(engine=EngineConfig(max_model_len=32)) as client:
        body = {"input_ids": [[1], [2] * 40], "sampling_params": {"max_new_tokens": 4}}
        status, reply = await client.post("/generate", body)
        assert status == 400
        assert reply["error"]["message"].startswith("The input (40 tokens) is longer")
        await until(lambda: client.worker.engine.requests == ())


async def test_a_context_is_six_tokens_shorter_than_it_says() -> None:
    async with serving(engine=EngineConfig(max_model_len=32)) as client:
        reply = await client.generate([1] * 25, 7, sampling=PARTIAL)
        assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
        status, refused = await client.post("/generate", request([1] * 26, 6))
        assert status == 400
        assert refused["error"]["message"] == (
            "Input length (26 tokens) exceeds the maximum allowed length (26 tokens). "
            "Use a shorter input or enable --allow-auto-truncate."
        )


async def test_what_the_scheduler_refuses_is_an_abort_with_a_token_in_a_stream() -> None:
    async with serving(engine=EngineConfig(max_model_len=32)) as client:
        (frame,) = await frames_of(client, request([1] * 26, 6))
    assert len(frame["output_ids"]) == 1
    assert frame["meta_info"]["prompt_tokens"] == 1
    reason = frame["meta_info"]["finish_reason"]
    assert (reason["type"], reason["status_code"], reason["err_type"]) == (
        "abort",
        400,
        "BadRequestError",
    )


async def test_an_output_of_nothing_has_an_empty_span() -> None:
    async with serving() as client:
        reply = await client.generate(PROMPT, 0)
    assert (reply["output_ids"], reply["text"]) == ([], "")
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert reply["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 0}]


async def test_prefixes_are_shared_by_the_token_and_told_apart_by_salt_or_extra_key() -> None:
    cached = []
    prompt = [9, 10, 11, 12, 13, 14]
    async with serving() as client:
        for fields in (
            {},
            {},
            {"cache_salt": "x"},
            {"cache_salt": "x"},
            {"extra_key": "x"},
            {"extra_key": "x"},
            {"cache_salt": "y"},
        ):
            meta = (await client.generate(prompt, 1, **fields))["meta_info"]
            cached.append(meta["cached_tokens"])
    assert cached == [0, 5, 0, 5, 0, 5, 0]


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"top_p": 0.0}, "top_p must be in (0, 1], got 0.0."),
        ({"top_k": -2, "temperature": 1}, "top_k must be -1 (disable) or at least 1, got -2."),
        ({"min_p": 2}, "min_p must be in [0, 1], got 2."),
        ({"presence_penalty": 3}, "presence_penalty must be in [-2, 2], got 3."),
        ({"min_new_tokens": 9}, "min_new_tokens must be in [0, max_new_tokens(4)], got 9."),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0, got -1."),
        ({"logit_bias": {"64": 1.0}}, "logit_bias must has keys in [0, 63], got 64."),
        ({"temperature": "hot"}, 'invalid type: string "hot", expected f64'),
        ({"stop_token_ids": "7"}, 'invalid type: string "7", expected a sequence'),
    ],
)
async def test_values_out_of_range_are_refused(sampling: dict[str, Any], message: str) -> None:
    async with serving() as client:
        status, reply = await client.post("/generate", request(PROMPT, 4, sampling=sampling))
    assert status == 400
    error = reply["error"]
    assert (error if isinstance(error, str) else error["message"]) == message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"rid": ["a"]}, "The specified rids length mismatch with the batch_size"),
        ({"rid": ["a", "a"]}, "Duplicate request IDs detected within the request: ['a']"),
    ],
)
async def test_ids_of_a_batch_have_to_add_up(body: dict[str, Any], message: str) -> None:
    async with serving() as client:
        status, reply = await client.post("/generate", {"input_ids": [[1], [2]], **body})
    assert status == 400
    assert reply["error"]["message"].startswith(message)


@pytest.mark.parametrize(
    ("path", "sent", "headers", "said"),
    [
        ("/generate", [1], {}, "instance of GenerateReqInput', 'input': [1], 'ctx'"),
        ("/pause_generation", [1], {}, "valid dictionary', 'input': [1]}"),
        ("/pause_generation", [1], {}, "instance of PauseGenerationReqInput', 'input': [1]"),
        ("/generate", {}, {"content-type": "text/plain"}, "'input': b'{}'"),
        ("/generate", {"rid": 5}, {}, "'loc': ('body', 'rid', 'list[str]')"),
        ("/generate", {"input_ids": ["a"]}, {}, "elements must be int or list; got str"),
        ("/generate", {"stream": "maybe"}, {}, "'type': 'bool_parsing', 'loc': ('body', 'stream')"),
        ("/abort_request", {"rid": 5}, {}, "'type': 'string_type', 'loc': ('body', 'function-"),
    ],
)
async def test_bodies_of_the_wrong_kind_are_refused(
    path: str, sent: object, headers: dict[str, str], said: str
) -> None:
    async with serving() as client:
        status, reply = await client.post(path, sent, headers=headers)
    assert (status, reply["type"]) == (400, "Bad Request")
    assert said in reply["message"]


# aborts


async def test_an_abort_reaches_the_ids_that_begin_with_a_live_one() -> None:
    async with flights() as (client, sky):
        longer = await sky.fly([1], 900, rid="abc-1")
        await client.post("/abort_request", {"rid": "abc"})  # nobody has this id
        await client.worker.engine.clock.sleep(0.05)
        assert not longer.over()
        own = await sky.fly([2], 900, rid="abc")
        await client.post("/abort_request", {"rid": "abc"})
        await until(lambda: own.over() and longer.over())
        for flying in (own, longer):
            assert flying.meta["finish_reason"] == {
                "type": "abort",
                "message": "Aborted",
                "status_code": None,
                "err_type": None,
            }
            assert flying.meta["completion_tokens"] == len(flying.body["output_ids"]) > 0


async def test_an_abort_without_an_id_is_ignored_and_one_of_all_ends_all() -> None:
    async with flights() as (client, sky):
        one, two = await sky.fly([1], 900), await sky.fly([2], 900)
        assert await client.post("/abort_request", {}) == (200, "")
        await client.worker.engine.clock.sleep(0.05)
        assert not one.over()
        await client.post("/abort_request", {"abort_all": True})
        await until(lambda: one.over() and two.over())
        assert one.body["output_ids"] == policy.greedy(
            policy.init(0), [1], len(one.body["output_ids"])
        )


async def test_an_abort_at_the_gate_is_lost_and_so_is_every_later_one() -> None:
    async with flights() as (client, sky):
        await client.pause("in_place")
        flying = sky.launch(PROMPT, 900, rid="gate")
        await client.post("/abort_request", {"rid": "gate"})
        await client.resume()
        await until(lambda: client.worker.engine.num_running)
        await client.post("/abort_request", {"rid": "gate"})
        await until(flying.over)
        assert flying.meta["finish_reason"]["type"] == "length"


async def test_an_id_at_the_gate_is_in_use() -> None:
    async with flights() as (client, sky):
        await client.pause("retract")
        sky.launch(PROMPT, 9, rid="same")
        await client.worker.engine.clock.sleep(0.01)
        status, reply = await client.post("/generate", request(PROMPT, 4, rid="same"))
        assert (status, reply["error"]["message"]) == (
            400,
            "Duplicate request ID detected: same",
        )


async def test_bad_values_are_refused_behind_the_gate_and_bad_bodies_before_it() -> None:
    async with flights(engine=EngineConfig(max_model_len=32)) as (client, sky):
        await client.pause("retract")
        long = sky.launch([1] * 40, 4)
        assert (await client.post("/generate", request([], 4)))[0] == 400
        assert (await client.post("/generate", request([1], 4, sampling={"x": 1})))[0] == 400
        await client.worker.engine.clock.sleep(5.0)
        assert not long.over()
        await client.resume()
        await until(long.over)
        assert long.status == 400


async def test_an_abort_of_what_is_frozen_waits_for_the_resume() -> None:
    async with flights() as (client, sky):
        flying = await sky.fly(PROMPT, 900, rid="frozen")
        await client.pause("in_place")
        await client.post("/abort_request", {"rid": "frozen"})
        await client.worker.engine.clock.sleep(5.0)
        assert not flying.over()
        await client.resume()
        await until(flying.over)
        assert flying.meta["finish_reason"]["message"] == "Aborted"


QUEUED = {"type": "abort", "message": "Abort in waiting queue"}


async def test_an_abort_of_what_was_retracted_loses_what_the_front_end_had_not_heard() -> None:
    async with flights() as (client, sky):
        flying = await sky.fly(PROMPT, 900, rid="r", seen=60)
        await client.pause("retract")
        await client.post("/abort_request", {"rid": "r"})
        await until(flying.over)
    assert flying.body["output_ids"] == policy.greedy(policy.init(0), PROMPT, 50)
    assert flying.meta["finish_reason"] == QUEUED
    assert flying.meta["weight_versions"] == [{"version": "default", "start": 0, "end": 50}]
    assert flying.meta["completion_tokens"] == 50
    assert "prompt_tokens" not in flying.meta


@pytest.mark.parametrize("increments", [False, True])
async def test_an_abort_of_a_retracted_stream_ends_with_all_or_with_its_last_token_once_more(
    increments: bool,
) -> None:
    async with serving(incremental_streaming_output=increments) as client:
        reply = await client.send("POST", "/generate", request(PROMPT, 900, rid="r", stream=True))
        assert isinstance(reply.body, ByteStream)
        frames = [await anext(reply.body) for _ in range(20)]
        await client.pause("retract")
        (retracted,) = client.worker.engine.requests
        frames.append(await anext(reply.body))
        heard = list(retracted.tracks[0].output)
        await client.post("/abort_request", {"rid": "r"})
        last = (await events(reply))[-2]
    assert last["output_ids"] == (heard[-1:] if increments else heard)
    assert last["text"] == "".join(f"{token} " for token in heard)
    assert last["meta_info"]["finish_reason"] == QUEUED
    assert last["meta_info"]["completion_tokens"] == len(heard)


async def test_a_client_that_leaves_ends_its_request() -> None:
    async with serving() as client:
        reply = await client.send("POST", "/generate", request(PROMPT, 900, stream=True))
        assert isinstance(reply.body, ByteStream)
        await anext(reply.body)
        await reply.body.aclose()
        await until(lambda: client.worker.engine.requests == ())
        await client.pause("abort")


async def test_a_kill_resets_streams_and_whole_replies() -> None:
    async with serving() as client:
        reply = await client.send("POST", "/generate", request(PROMPT, 900, stream=True))
        assert isinstance(reply.body, ByteStream)
        await anext(reply.body)
        client.worker.kill()
        with pytest.raises(ConnectionResetError):
            await events(reply)
        with pytest.raises(ConnectionRefusedError):
            await client.get("/ping")
