"""SGLang's weight updates: what a call does at once, what a failure leaves, who waits for whom."""

import base64
import pickle
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from genapi.embedded import ByteStream, Fault, policy
from tests.unit.embedded.harness import events, until
from tests.unit.embedded.sglang_harness import (
    GROUP,
    PROMPT,
    UPDATE,
    SglangClient,
    described,
    encoded,
    flights,
    request,
    serving,
)

OLD, NEW = policy.init(0), policy.init(1)
BEGIN, END = "/begin_weight_update", "/end_weight_update"


def part(*names: str) -> dict[str, Any]:
    return {name: NEW[name] for name in names}


def mixed(*names: str) -> dict[str, Any]:
    return {**OLD, **part(*names)}


async def refused(client: SglangClient, text: str, **fields: Any) -> None:
    """An update of everything that fails in these words."""
    status, reply = await client.update(NEW, **fields)
    assert (status, reply["success"]) == (400, False)
    assert text in reply["message"]


async def test_a_whole_update_serves_exactly_the_new_weights() -> None:
    async with serving() as client:
        assert (await client.join_group())[0] == 200
        await client.pause("retract")
        await client.publish(NEW, "v1")
        await client.resume()
        assert await client.label() == "v1"
        assert await client.serves(NEW)


@pytest.mark.parametrize("flat", [False, True])
async def test_base64_and_references_are_the_same(flat: bool) -> None:
    data = encoded(NEW)
    fields: dict[str, Any] = {"data": data}
    if flat:
        raw = b"".join(base64.b64decode(one) for one in data)
        fields = {
            "data": [base64.b64encode(raw).decode()],
            "load_format": "flattened_bucket",
        }
    async with serving() as client:
        await client.join_group()
        await client.post(BEGIN, {})
        status, reply = await client.post(UPDATE, described(NEW) | fields)
        assert (status, reply["message"]) == (200, "Succeeded to update parameter online.")
        assert await client.label() == "default"
        assert await client.serves(NEW)


async def test_the_sender_may_overwrite_its_arrays_afterwards() -> None:
    weights = {name: array.copy() for name, array in NEW.items()}
    async with serving() as client:
        await client.join_group()
        await client.publish(weights, "v1")
        for array in weights.values():
            array[:] = 0.0
        assert await client.serves(NEW)


async def test_a_bucket_has_to_be_aligned() -> None:
    body = {
        "names": ["a", policy.VALUE],
        "dtypes": ["bfloat16", "float32"],
        "shapes": [[1], [32, 32]],
        "group_name": GROUP,
        "load_format": "flattened_bucket",
    }
    async with serving() as client:
        await client.join_group()
        await client.post(BEGIN, {})
        status, reply = await client.post(UPDATE, body | {"data": [""]})
    assert status == 400
    assert reply["message"] == (
        f"Failed to receive weights: Unaligned received tensor {policy.VALUE}: byte offset 2, "
        "dtype torch.float32"
    )


async def test_each_call_is_served_at_once() -> None:
    """A request between two calls runs on weights that nobody made."""
    async with serving() as client:
        await client.join_group()
        await client.post(BEGIN, {})
        assert await client.serves(OLD)
        await client.update(part(policy.EMBED))
        assert await client.serves(mixed(policy.EMBED))
        assert not await client.serves(NEW)
        await client.update(part(policy.VALUE, policy.HEAD), weight_version="v1")
        assert await client.serves(NEW)
        assert (await client.post(END, {}))[0] == 200


async def test_without_a_session_nothing_is_received() -> None:
    async with serving() as client:
        await client.join_group()
        await refused(client, "must run between begin_weight_update() and end_weight_update()")
        assert await client.serves(OLD)


async def test_a_name_that_the_model_has_not_is_a_success() -> None:
    weights = part(policy.VALUE, policy.HEAD) | {"model.nope": NEW[policy.EMBED]}
    async with serving() as client:
        await client.join_group()
        await client.publish(weights, "v1")
        assert await client.label() == "v1"
        assert await client.serves(mixed(policy.VALUE, policy.HEAD))


async def test_a_tensor_that_does_not_fit_leaves_those_before_it() -> None:
    weights = part(policy.EMBED) | {policy.VALUE: np.zeros(4, np.float32)} | part(policy.HEAD)
    async with serving() as client:
        await client.join_group()
        await client.post(BEGIN, {})
        status, reply = await client.update(weights, weight_version="v1")
        assert status == 400
        assert reply["message"] == (
            "Failed to update parameter online: Attempted to load weight (torch.Size([4])) into "
            "parameter (torch.Size([32, 32])). The full weights of the ModelRunner are partially "
            "updated. Please discard the whole weights."
        )
        assert await client.label() == "default"
        assert await client.serves(mixed(policy.EMBED))
        # a whole update in the same session heals it
        await client.update(NEW, weight_version="v2")
        assert await client.serves(NEW)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"group_name": "nope"},
            f"Failed to receive weights: Group nope not in ['{GROUP}']. Please call",
        ),
        ({"dtypes": ["float33"] * 3}, "module 'torch' has no attribute 'float33'"),
        ({"shapes": [[1]] * 3}, "is invalid for input"),
    ],
)
async def test_what_cannot_be_received_touches_nothing(fields: dict[str, Any], text: str) -> None:
    async with serving() as client:
        await client.join_group()
        await client.post(BEGIN, {})
        await refused(client, text, **fields)
        assert await client.serves(OLD)


async def test_tensors_that_did_not_come_are_missed() -> None:
    async with serving() as client:
        await client.join_group()
        await client.post(BEGIN, {})
        status, reply = await client.post(UPDATE, described(NEW))
        assert (status, reply["message"]) == (
            400,
            "Failed to receive weights: expected 3 tensors with the call, got 0",
        )


async def test_a_lost_peer_leaves_its_call_undone_and_its_group_dead() -> None:
    async with serving(faults=[Fault(UPDATE, "peer_lost", nth=2, after_tensors=1)]) as client:
        await client.join_group()
        await client.post(BEGIN, {})
        await client.update(part(policy.EMBED))
        status, reply = await client.update(part(policy.VALUE, policy.HEAD), weight_version="v1")
        assert status == 400
        assert reply["message"].startswith("Failed to receive weights: ")
        assert "Connection closed by peer" in reply["message"]
        # everything of a call is received before anything is loaded, and the calls before are in
        assert await client.serves(mixed(policy.EMBED))
        assert await client.label() == "default"
        await refused(client, "Connection closed by peer")
        assert (await client.post(END, {}))[0] == 200
        status, reply = await client.join_group()
        assert (status, reply["message"].split(": ")[1]) == (
            400,
            "The specified group name has already been created, please use a different group name.",
        )
        leave = "/destroy_weights_update_group"
        assert (await client.post(leave, {"group_name": GROUP}))[0] == 200
        assert (await client.post(leave, {"group_name": GROUP}))[0] == 400
        await client.join_group()
        await client.publish(NEW, "v2")
        assert await client.serves(NEW)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"backend": "nccl"}, "an embedded engine has no backend 'nccl', only 'genapi_memory'"),
        ({"rank_offset": 0}, "ranks 0 to 1 are not those of a receiver in a group of 3"),
        ({"rank_offset": 2}, "ranks 2 to 3 are not those of a receiver in a group of 3"),
    ],
)
async def test_a_group_that_cannot_be(fields: dict[str, Any], text: str) -> None:
    async with serving(tp_size=2) as client:
        status, reply = await client.join_group(world=3, **fields)
        assert (status, reply["message"]) == (
            400,
            f"Failed to initialize custom process group: {text}.",
        )


async def test_pipeline_stages_cannot_join() -> None:
    async with serving(pp_size=2) as client:
        status, reply = await client.join_group(world=5)
    assert status == 400
    assert "2 pipeline stages would have the same ranks" in reply["message"]


async def test_digests_have_to_be_those_of_the_group_and_of_one_update() -> None:
    async with serving() as client:
        await client.join_group(digest="g")
        await client.post(BEGIN, {})
        await refused(client, "the digest is of the group 'h'", digest="h:p")
        await client.update(part(policy.EMBED), digest="g:p")
        await refused(client, "the digest is of the update 'q'", digest="g:q")
        await client.post(END, {})
        await client.post(BEGIN, {})
        assert (await client.update(NEW, digest="g:q"))[0] == 200


async def test_replicas_cannot_be_updated_through_a_group() -> None:
    async with serving(dp_size=2) as client:
        for path, body in (
            ("/init_weights_update_group", {"master_address": "h", "master_port": 1}),
            ("/destroy_weights_update_group", {}),
            (UPDATE, described(NEW)),
            ("/update_weights_from_tensor", {"serialized_named_tensors": []}),
        ):
            ranks = {"rank_offset": 1, "world_size": 3}
            reply = await client.send("POST", path, body | ranks)
            assert (reply.status, reply.body) == (500, b"Internal Server Error")


# versions


async def test_the_version_of_an_update_is_known_before_its_session_ends() -> None:
    async with serving() as client:
        await client.join_group()
        await client.post(BEGIN, {})
        await client.update(part(policy.EMBED), weight_version="v1")
        assert await client.label() == "v1"


async def test_a_flush_that_fails_leaves_new_weights_and_two_versions() -> None:
    async with flights() as (client, sky):
        flying = await sky.fly(PROMPT, 200)
        await client.pause("in_place")
        await client.join_group()
        await client.post(BEGIN, {})
        text = "Weights were updated, but the cache was not flushed"
        await refused(client, text, weight_version="v1")
        await client.post(END, {})
        assert await client.label() == "default"
        await client.resume()
        await until(flying.over)
        assert [span["version"] for span in flying.meta["weight_versions"]] == ["default", "v1"]
        assert await client.serves(NEW)
        frames = (await client.generate(PROMPT, 4))["meta_info"]
        assert frames["weight_version"] == "v1"


async def test_frames_on_the_way_name_the_version_of_the_front_end() -> None:
    async with serving() as client:
        body = request(PROMPT, 60, stream=True)
        reply = await client.send("POST", "/generate", body)
        assert isinstance(reply.body, ByteStream)
        await anext(reply.body)
        await client.pause("in_place")
        await client.join_group()
        await client.post(BEGIN, {})
        await client.update(NEW, weight_version="v1")
        await client.resume()
        versions = [f["meta_info"]["weight_version"] for f in (await events(reply))[:-1]]
    assert set(versions[:-1]) == {"default"}
    assert versions[-1] == "v1"


async def test_a_new_version_aborts_everything_unless_told_not_to() -> None:
    path = "/update_weight_version"
    async with flights() as (client, sky):
        kept = await sky.fly(PROMPT, 100)
        await client.post(path, {"new_version": "v1", "abort_all_requests": False})
        await until(kept.over)
        assert kept.meta["finish_reason"]["type"] == "length"
        assert [span["version"] for span in kept.meta["weight_versions"]] == ["default", "v1"]
        ended = await sky.fly(PROMPT, 900)
        assert (await client.post(path, {"new_version": "v2"}))[0] == 200
        await until(ended.over)
        assert ended.meta["finish_reason"]["type"] == "abort"
        # it takes one more step before it ends, which is the new version's already
        last = ended.meta["weight_versions"][-1]
        assert last["version"] == "v2"
        assert last["end"] - last["start"] == 1


async def test_an_update_may_abort_everything_first() -> None:
    async with flights() as (client, sky):
        flying = await sky.fly(PROMPT, 900)
        await client.join_group()
        session = sky.call(BEGIN, {})
        await client.worker.engine.clock.sleep(0.1)
        assert not session.over()
        await client.post("/abort_request", {"abort_all": True})
        await until(session.over)
        await until(flying.over)
        assert (await client.update(NEW, weight_version="v1", abort_all_requests=True))[0] == 200


# who waits for whom


async def test_without_a_pause_an_update_waits_for_what_runs_and_holds_up_what_comes() -> None:
    async with flights() as (client, sky):
        await client.join_group()
        flying = await sky.fly(PROMPT, 300)
        session = sky.call(BEGIN, {})
        await client.worker.engine.clock.sleep(0.01)
        behind = sky.launch([4], 4)
        await client.worker.engine.clock.sleep(0.05)
        assert [call.over() for call in (flying, session, behind)] == [False, False, False]
        await until(session.over)
        assert flying.over()
        await until(behind.over)


async def test_a_call_whose_client_left_still_has_its_turn() -> None:
    async with flights() as (client, sky):
        flying = await sky.fly(PROMPT, 300)
        async with anyio.create_task_group() as group:
            group.start_soon(client.post, BEGIN, {})
            await client.worker.engine.clock.sleep(0.01)
            group.cancel_scope.cancel()
        assert not flying.over()
        await until(flying.over)
        await client.worker.engine.clock.sleep(0.01)
        status, reply = await client.post(BEGIN, {})
        assert status == 400
        assert "already open" in reply["message"]


async def test_a_kill_ends_calls_that_wait() -> None:
    async with flights() as (client, sky):
        calls = [await sky.fly(PROMPT, 300), sky.call(BEGIN, {})]
        await client.worker.engine.clock.sleep(0.01)
        client.worker.kill()
        await until(lambda: all(call.lost for call in calls))


# what a kept request rests on


async def kept(mode: str, *, flush: bool) -> tuple[list[int], int]:
    """The output of a request that lived through an update, and where the update was."""
    async with flights() as (client, sky):
        flying = await sky.fly(PROMPT, 120, seen=20)
        await client.pause(mode)
        await client.join_group()
        await client.publish(NEW, "v1", flush_cache=flush)
        await client.resume()
        await until(flying.over)
        return flying.body["output_ids"], flying.meta["weight_versions"][0]["end"]


async def test_what_was_retracted_is_computed_anew_under_the_new_weights() -> None:
    tokens, end = await kept("retract", flush=True)
    assert tokens[:end] == policy.greedy(OLD, PROMPT, end)
    assert tokens[end:] == policy.greedy(NEW, [*PROMPT, *tokens[:end]], len(tokens) - end)


async def test_what_was_frozen_goes_on_with_old_values() -> None:
    tokens, end = await kept("in_place", flush=False)
    assert tokens[:end] == policy.greedy(OLD, PROMPT, end)
    assert tokens[end:] != policy.greedy(NEW, [*PROMPT, *tokens[:end]], len(tokens) - end)


async def test_what_was_retracted_finds_its_old_prompt_if_the_cache_was_not_flushed() -> None:
    tokens, end = await kept("retract", flush=False)
    old, new = policy.prepare(OLD), policy.prepare(NEW)
    rows = [old.table[token] for token in PROMPT]
    rows += [new.table[token] for token in tokens[:end]]
    hidden = new.fold(None, rows)
    assert tokens[end] == int(new.readout(hidden).argmax())
    assert tokens[end:] != policy.greedy(NEW, [*PROMPT, *tokens[:end]], len(tokens) - end)


async def test_a_prefix_in_the_cache_is_stale_after_an_update_that_did_not_flush() -> None:
    async with serving() as client:
        await client.join_group()
        first = await client.generate(PROMPT, 12)
        await client.publish(NEW, "v1", flush_cache=False)
        again = await client.generate([*PROMPT, *first["output_ids"]], 12)
        assert again["meta_info"]["cached_tokens"] == len(PROMPT) + 11
        fresh = policy.greedy(NEW, [*PROMPT, *first["output_ids"]], 12)
        assert again["output_ids"] != fresh
        await client.send("POST", "/flush_cache")
        assert await client.tokens([*PROMPT, *first["output_ids"]], 12) == fresh


async def test_output_is_cached_when_its_request_has_ended() -> None:
    async with flights() as (client, sky):
        flying = await sky.fly(PROMPT, 60, seen=10)
        (running,) = client.worker.engine.requests
        prefix = [*PROMPT, *running.tracks[0].output[:5]]
        before = (await client.generate(prefix, 1))["meta_info"]["cached_tokens"]
        await until(flying.over)
        later = [*PROMPT, *flying.body["output_ids"]]
        after = (await client.generate(later, 1))["meta_info"]["cached_tokens"]
    assert before == len(PROMPT)
    assert after == len(later) - 1


# other ways in


def pickled(weights: Any) -> dict[str, Any]:
    payload = base64.b64encode(pickle.dumps(weights)).decode()
    return {"serialized_named_tensors": [payload], "weight_version": "v1"}


async def test_tensors_by_value_need_a_session_and_no_group() -> None:
    path = "/update_weights_from_tensor"
    async with serving() as client:
        status, reply = await client.post(path, pickled([*NEW.items()]))
        assert status == 400
        assert reply["message"].startswith("update_weights_from_tensor must run between")
        await client.post(BEGIN, {})
        assert (await client.post(path, pickled([*NEW.items()])))[0] == 200
        assert await client.serves(NEW)


@pytest.mark.parametrize("wrong", [[Path("x")], [(policy.VALUE, np.zeros(4))], 7])
async def test_a_payload_that_cannot_be_loaded_kills_the_server(wrong: Any) -> None:
    async with serving() as client:
        await client.post(BEGIN, {})
        with pytest.raises(ConnectionResetError):
            await client.post("/update_weights_from_tensor", pickled(wrong))
        await client.worker.exited()
        client.worker.restart()
        assert await client.serves(OLD)


@pytest.mark.parametrize("cut", [0, 1], ids=["another shape", "a byte too few"])
async def test_a_folder_without_weights_is_refused_and_one_that_cannot_be_loaded_kills(
    cut: int, tmp_path: Path
) -> None:
    path = "/update_weights_from_disk"
    async with serving() as client:
        status, reply = await client.post(path, {"model_path": str(tmp_path)})
        assert (status, reply["message"]) == (
            400,
            f"Failed to get weights iterator: Cannot find any model weights with `{tmp_path}`.",
        )
        head = b'{"lm_head.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
        (tmp_path / "model.safetensors").write_bytes(
            len(head).to_bytes(8, "little") + head + bytes(4 - cut)
        )
        with pytest.raises(ConnectionResetError):
            await client.post(path, {"model_path": str(tmp_path)})
        await client.worker.exited()


async def test_memory_may_be_released_when_idle_and_resumed_when_released() -> None:
    tags = {"tags": ["weights"]}
    async with serving() as client:
        assert await client.post("/release_memory_occupation", tags) == (200, None)
        assert await client.serves(OLD)
        assert await client.post("/resume_memory_occupation", tags) == (200, None)
        with pytest.raises(ConnectionResetError):
            await client.post("/resume_memory_occupation", tags)
        await client.worker.exited()
    async with flights() as (client, sky):
        flying = await sky.fly(PROMPT, 900)
        await client.pause("in_place")
        with pytest.raises(ConnectionResetError):
            await client.post("/release_memory_occupation", {})
        await until(lambda: flying.lost)


# what is there


async def test_checksums_are_equal_when_the_weights_are() -> None:
    async with serving() as client:
        await client.join_group()
        sums = [(await client.post("/weights_checker", {"action": "checksum"}))[1]]
        for weights, label in ((NEW, "v1"), (OLD, "v2")):
            await client.publish(weights, label)
            sums.append((await client.post("/weights_checker"))[1])
    assert sums[0] == sums[2] != sums[1]
    assert list(sums[0]["ranks"][0]["checksums"]) == list(policy.shapes())


async def test_a_snapshot_is_compared_with_once() -> None:
    async with serving() as client:
        await client.join_group()
        check = "/weights_checker"
        assert await client.post(check, {"action": "compare"}) == (
            400,
            {"success": False, "message": ""},
        )
        assert (await client.post(check, {"action": "snapshot"}))[0] == 200
        await client.publish(part(policy.HEAD), "v1")
        status, reply = await client.post(check, {"action": "compare"})
        assert status == 400
        assert reply["message"] == f"check tensor equality failed:\nname={policy.HEAD} "
        skip = {"action": "compare", "skip_tensor_list": ["lm_head"]}
        assert (await client.post(check, skip))[0] == 200
        assert (await client.post(check, skip))[0] == 400
        assert (await client.post(check, {"action": "reset_tensors"}))[0] == 200
        assert not await client.serves(NEW)
        status, reply = await client.post(check, {"action": "nope"})
        assert (status, reply["message"]) == (400, "Unsupported action='nope'")


async def test_a_restart_forgets_groups_sessions_and_versions() -> None:
    async with serving() as client:
        await client.join_group()
        await client.publish(NEW, "v1")
        await client.post(BEGIN, {})
        client.worker.restart()
        assert await client.label() == "default"
        assert await client.serves(OLD)
        assert (await client.join_group())[0] == 200
        assert (await client.post(END, {}))[0] == 400


async def test_a_lost_reply_has_taken_effect() -> None:
    faults = [Fault(UPDATE, "lose_reply"), Fault(END, "lose_reply")]
    async with serving(faults=faults) as client:
        await client.join_group()
        await client.post(BEGIN, {})
        with pytest.raises(ConnectionResetError):
            await client.update(NEW, weight_version="v1")
        assert await client.label() == "v1"
        with pytest.raises(ConnectionResetError):
            await client.post(END, {})
        assert (await client.post(END, {}))[0] == 400
        assert await client.serves(NEW)


@pytest.mark.parametrize("action", ["die_before", "die_during", "die_after"])
async def test_a_death_loses_everything(action: Any) -> None:
    async with serving(faults=[Fault(UPDATE, action)]) as client:
        await client.join_group()
        await client.post(BEGIN, {})
        with pytest.raises(ConnectionResetError):
            await client.update(NEW, weight_version="v1")
        with pytest.raises(ConnectionRefusedError):
            await client.label()
        client.worker.restart()
        assert await client.serves(OLD)
