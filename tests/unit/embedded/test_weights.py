"""Weight updates: what a session accepts, what breaks it, and what heals after which death."""

import base64
from typing import Any

import anyio
import numpy as np
import pytest

from genapi.embedded import Fault, policy
from tests.unit.embedded.harness import Client, info_of, request, serving, some, until

OLD, NEW = policy.init(0), policy.init(1)
PROMPT = [1, 2, 3]
NO_LOADER = "'Parameter' object has no attribute 'weight_loader'"
UPDATE = "/update_weights"


async def serves(client: Client, weights: policy.Weights) -> bool:
    tokens = (await client.choice(PROMPT, 12))["token_ids"]
    return bool(tokens == policy.greedy(weights, PROMPT, 12))


async def fails(client: Client, path: str, text: str, body: object = None, **options: Any) -> None:
    status, reply = await client.post(path, body, **options)
    assert status == 500
    assert text in reply["error"]["message"]


async def dies(client: Client) -> None:
    """The next generation kills the engine, one second later the process is gone."""
    assert await client.get("/health") == (200, "")
    status, reply = await client.post("/inference/v1/generate", request(PROMPT, 2))
    assert status == 500
    assert reply["error"]["message"].startswith("EngineCore encountered an issue")
    clock = client.worker.engine.clock
    died = clock.now()
    assert (await client.get("/health"))[0] == 503
    assert (await client.get("/version"))[0] == 200
    assert (await client.post("/start_weight_update"))[0] == 500
    await client.worker.exited()
    assert clock.now() == pytest.approx(died + 1.0, abs=0.01)
    with pytest.raises(ConnectionRefusedError):
        await client.get("/health")


async def test_a_whole_update_serves_exactly_the_new_weights() -> None:
    async with serving() as client:
        await client.join()
        await client.publish(NEW, "v1")
        assert await client.get("/weight_info") == (200, {"weight_version": "v1"})
        assert await serves(client, NEW)


async def test_base64_and_references_are_the_same() -> None:
    async with serving() as client:
        await client.join()
        data = [base64.b64encode(array.tobytes()).decode() for array in NEW.values()]
        await client.post("/start_weight_update")
        status, _ = await client.post(UPDATE, {"update_info": info_of(NEW) | {"data": data}})
        assert status == 200
        await client.post("/finish_weight_update")
        assert await client.get("/weight_info") == (200, {"weight_version": "default"})
        assert await serves(client, NEW)


async def test_bfloat16_bytes_are_widened() -> None:
    raw = (NEW[policy.HEAD].view(np.uint32) >> 16).astype(np.uint16)
    cut = NEW[policy.HEAD].view(np.uint32) & np.uint32(0xFFFF0000)
    async with serving() as client:
        await client.join()
        await client.post("/start_weight_update")
        info = {
            "names": [policy.HEAD],
            "dtype_names": ["bfloat16"],
            "shapes": [list(raw.shape)],
            "data": [base64.b64encode(raw.tobytes()).decode()],
        }
        assert (await client.post(UPDATE, {"update_info": info}))[0] == 200
        await client.post("/finish_weight_update")
        assert await serves(client, {**OLD, policy.HEAD: cut.view(np.float32)})


async def test_the_sender_may_overwrite_its_arrays_afterwards() -> None:
    weights = {name: array.copy() for name, array in NEW.items()}
    async with serving() as client:
        await client.join()
        await client.publish(weights, "v1")
        for array in weights.values():
            array[:] = 0.0
        await client.publish(some(NEW, policy.HEAD), "v2")
        assert await serves(client, NEW)


async def test_a_list_of_infos_has_one_per_rank() -> None:
    async with serving(data_parallel_size=2) as client:
        await client.join(world=3)
        await client.post("/start_weight_update")
        status, _ = await client.post(
            UPDATE, {"update_info": [info_of(NEW)] * 2}, attachment=tuple(NEW.values())
        )
        assert status == 200
        await client.post("/finish_weight_update")
        assert await serves(client, NEW)


@pytest.mark.parametrize(
    ("info", "text"),
    [
        ({"rank_offset": 1, "world_size": 4}, "rank 4 is out of range"),
        ({"rank_offset": 0, "world_size": 9}, "rank 0 is the trainer's"),
        ({"rank_offset": 1, "world_size": 9, "bogus": 1}, "unexpected keyword argument 'bogus'"),
        ({"world_size": 9}, "missing 1 required keyword-only argument: 'rank_offset'"),
    ],
)
async def test_a_rank_plan_that_cannot_be(info: dict[str, int], text: str) -> None:
    async with serving(tensor_parallel_size=2, data_parallel_size=2) as client:
        await fails(client, "/init_weight_transfer_engine", text, {"init_info": info})
        await client.post("/start_weight_update")
        await fails(client, UPDATE, "not initialized", {"update_info": info_of(NEW)})


async def test_joining_takes_the_fields_of_the_nccl_backend() -> None:
    info = {
        "master_address": "127.0.0.1",
        "master_port": 1,
        "rank_offset": 3,
        "world_size": 4,
        "packed": True,
        "packed_buffer_size_bytes": 1,
        "packed_num_buffers": 2,
    }
    async with serving() as client:
        assert (await client.post("/init_weight_transfer_engine", {"init_info": info}))[0] == 200


async def test_a_partial_update_is_accepted_and_mixes() -> None:
    async with serving() as client:
        await client.join()
        await client.publish(some(NEW, policy.HEAD), "partial")
        assert await client.get("/weight_info") == (200, {"weight_version": "partial"})
        assert await serves(client, {**OLD, policy.HEAD: NEW[policy.HEAD]})


async def test_an_empty_labelled_session_moves_only_the_label() -> None:
    async with serving() as client:
        await client.post("/start_weight_update")
        await client.post("/finish_weight_update", {"weight_version": "empty"})
        assert await client.get("/weight_info") == (200, {"weight_version": "empty"})
        assert await serves(client, OLD)


async def test_a_finish_whose_caller_left_still_sets_its_label() -> None:
    async with serving() as client:
        await client.post("/start_weight_update")
        async with anyio.create_task_group() as group:
            group.start_soon(client.post, "/finish_weight_update", {"weight_version": "v1"})
            await until(lambda: client.worker.engine.loaded)
            assert client.worker.engine.label == "default"
            group.cancel_scope.cancel()
        assert await client.get("/weight_info") == (200, {"weight_version": "v1"})


async def test_publisher_gone_between_start_and_update() -> None:
    async with serving() as client:
        await client.join()
        await client.post("/start_weight_update")
        await fails(client, "/start_weight_update", "already active")
        await fails(client, "/shutdown_weight_transfer_engine", "Cannot release a trainer")
        assert (await client.post("/finish_weight_update"))[0] == 200
        await client.join()
        await client.publish(NEW, "v1")
        assert await serves(client, NEW)


async def test_an_update_that_does_not_parse_heals_by_a_whole_session() -> None:
    async with serving() as client:
        await client.join()
        await client.post("/start_weight_update")
        await fails(client, UPDATE, "Invalid update_info", {"update_info": {"names": ["a"]}})
        await fails(client, "/finish_weight_update", "without a matching start")
        await client.publish(NEW, "v1")
        assert await serves(client, NEW)


async def test_generating_after_an_update_that_did_not_parse_kills() -> None:
    async with serving() as client:
        await client.join()
        await client.post("/start_weight_update")
        await fails(client, UPDATE, "Invalid update_info", {"update_info": {"names": ["a"]}})
        await dies(client)


@pytest.mark.parametrize("bad", ["shape", "name"])
@pytest.mark.parametrize("then", ["generate", "republish", "close"])
async def test_a_rejected_tensor_needs_a_restart(bad: str, then: str) -> None:
    async with serving() as client:
        await client.join()
        await client.post("/start_weight_update")
        await client.update(some(NEW, policy.EMBED))
        name, text = (
            ("model.nope.weight", "There is no module or parameter named")
            if bad == "name"
            else (policy.VALUE, "Attempted to load weight (torch.Size([4])) into parameter")
        )
        info = {"names": [name], "dtype_names": ["float32"], "shapes": [[4]]}
        await fails(client, UPDATE, text, {"update_info": info}, attachment=[np.zeros(4)])
        assert await client.get("/weight_info") == (200, {"weight_version": "default"})
        if then != "generate":
            assert (await client.post("/start_weight_update"))[0] == 200
        if then == "republish":
            await fails(
                client,
                UPDATE,
                NO_LOADER,
                {"update_info": info_of(NEW)},
                attachment=list(NEW.values()),
            )
        if then == "close":
            await fails(client, "/finish_weight_update", text)
            await fails(client, "/start_weight_update", "already active")
        await dies(client)
        client.worker.restart()
        assert await client.get("/weight_info") == (200, {"weight_version": "default"})
        assert await serves(client, OLD)
        await client.join()
        await client.publish(NEW, "v1")
        assert await serves(client, NEW)


async def lose_peer(client: Client) -> None:
    await client.join()
    await client.post("/pause", query={"mode": "keep"})
    await client.post("/start_weight_update")
    status, reply = await client.update(NEW)
    assert status == 500
    assert "Connection closed by peer" in reply["error"]["message"]


async def test_a_lost_peer_heals_by_an_empty_session() -> None:
    async with serving(faults=[Fault(UPDATE, "peer_lost")]) as client:
        await lose_peer(client)
        await client.post("/start_weight_update")
        assert (await client.post("/finish_weight_update"))[0] == 200
        await client.publish(NEW, "v1")
        await client.post("/resume")
        assert await serves(client, NEW)


async def test_a_lost_peer_and_only_an_empty_session_leaves_a_mixture() -> None:
    async with serving(faults=[Fault(UPDATE, "peer_lost", after_tensors=1)]) as client:
        await lose_peer(client)
        await client.post("/start_weight_update")
        await client.post("/finish_weight_update")
        await client.post("/resume")
        assert await serves(client, {**OLD, policy.EMBED: NEW[policy.EMBED]})


async def test_a_lost_peer_and_a_straight_republication_needs_a_restart() -> None:
    async with serving(faults=[Fault(UPDATE, "peer_lost")]) as client:
        await lose_peer(client)
        await client.post("/start_weight_update")
        status, reply = await client.update(NEW)
        assert status == 500
        assert NO_LOADER in reply["error"]["message"]
        await client.post("/start_weight_update")
        await fails(client, "/finish_weight_update", NO_LOADER)
        await client.post("/resume")
        await dies(client)


async def test_a_peer_lost_before_any_tensor_heals_by_a_whole_session() -> None:
    async with serving(faults=[Fault(UPDATE, "peer_lost", after_tensors=0)]) as client:
        await lose_peer(client)
        await client.publish(NEW, "v1")
        await client.post("/resume")
        assert await serves(client, NEW)


async def test_starting_an_update_under_a_running_request_kills() -> None:
    async with serving() as client:
        await client.join()
        reply = await client.send(
            "POST", "/inference/v1/generate", request(PROMPT, 50) | {"stream": True}
        )
        chunks: list[Any] = []
        async for piece in reply.body:  # type: ignore[union-attr]
            if not chunks:
                assert (await client.post("/start_weight_update"))[0] == 200
            chunks.append(piece)
    assert chunks[-1] == b"data: [DONE]\n\n"
    assert b"EngineCore encountered an issue" in chunks[-2]


async def test_weight_transfer_that_is_not_configured() -> None:
    async with serving(weight_transfer=False) as client:
        for path, body in (
            ("/init_weight_transfer_engine", {"init_info": {}}),
            ("/start_weight_update", None),
            ("/finish_weight_update", None),
            ("/shutdown_weight_transfer_engine", None),
            (UPDATE, {"update_info": info_of(NEW)}),
        ):
            await fails(client, path, "Weight transfer not configured", body)
