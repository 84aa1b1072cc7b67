"""Loads from a folder by embedded vLLM, with what was recorded of vLLM 0.32 for each failure."""

import json
from pathlib import Path

import numpy as np
import pytest

from genapi.embedded import Call, policy
from tests.unit.embedded.harness import Client, exchanges, parsed, serving
from tests.unit.embedded.test_sglang_transcripts import save
from tests.unit.embedded.test_weights import NO_LOADER, dies, serves

OLD, NEW = policy.init(0), policy.init(1)
START, FINISH = "/start_weight_update", "/finish_weight_update"
RPC = "/collective_rpc"


async def load(client: Client, folder: object) -> tuple[int, str]:
    """Status and message of a load."""
    kwargs = {"weights_path": str(folder), "is_checkpoint_format": True}
    status, reply = await client.post(RPC, {"method": "reload_weights", "kwargs": kwargs})
    if status == 200:
        assert reply == {"results": [None]}
        return status, ""
    return status, str(reply["error"]["message"])


def cut(folder: Path, size: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])


def recorded(name: str) -> tuple[int, str]:
    (found,) = [r for label, _, r in exchanges("43b_reload_weights") if label == name]
    return found["status"], str(found["body"]["error"]["message"])


async def test_a_folder_is_served_exactly_and_again_and_again(tmp_path: Path) -> None:
    async with serving() as client:
        for weights in (NEW, OLD, NEW):
            assert await load(client, save(tmp_path / "w", weights)) == (200, "")
            assert await serves(client, weights)


async def test_what_cannot_be_read_is_refused_as_recorded_and_the_next_load_is_whole(
    tmp_path: Path,
) -> None:
    good = save(tmp_path / "good", NEW)
    (tmp_path / "empty").mkdir()
    for name, size in (("header", 20), ("cut", -10)):
        save(tmp_path / name, NEW)
        cut(tmp_path / name, size)
    async with serving() as client:
        for name in ("nowhere", "empty", "header", "cut"):
            assert await load(client, tmp_path / name) == recorded(name)
            assert await load(client, good) == (200, "")
            assert await serves(client, NEW)


async def test_a_model_in_pieces_dies_with_the_next_token(tmp_path: Path) -> None:
    async with serving() as client:
        assert (await load(client, tmp_path / "nowhere"))[0] == 500
        await dies(client)


async def halved(client: Client, tmp_path: Path) -> None:
    """Leave it with half of a checkpoint, whose second file is cut short."""
    names = list(NEW)
    save(tmp_path / "half", {names[0]: NEW[names[0]]})
    (tmp_path / "half" / "model.safetensors").rename(tmp_path / "half" / "a.safetensors")
    save(tmp_path / "half", {names[1]: NEW[names[1]]})
    cut(tmp_path / "half", -10)
    assert await load(client, tmp_path / "half") == recorded("second file cut")


async def test_half_a_load_fails_the_next_one_which_clears_it_away(tmp_path: Path) -> None:
    good = save(tmp_path / "good", NEW)
    async with serving() as client:
        await halved(client, tmp_path)
        status, message = await load(client, good)
        assert (status, message) == recorded("whole after half")
        assert NO_LOADER in message
        assert await load(client, good) == (200, "")
        assert await serves(client, NEW)


async def test_half_a_load_is_closed_by_an_empty_session(tmp_path: Path) -> None:
    good = save(tmp_path / "good", NEW)
    async with serving() as client:
        await halved(client, tmp_path)
        for path in (START, FINISH):
            assert (await client.post(path))[0] == 200
        assert await load(client, good) == (200, "")
        assert await serves(client, NEW)


async def test_an_unknown_name_is_closed_likewise_and_another_shape_by_nothing(
    tmp_path: Path,
) -> None:
    good = save(tmp_path / "good", NEW)
    unknown = save(tmp_path / "unknown", NEW | {"model.other.weight": np.zeros(2, np.float32)})
    shape = save(tmp_path / "shape", NEW | {policy.VALUE: np.zeros((3, 3), np.float32)})
    async with serving() as client:
        status, message = await load(client, unknown)
        assert status == 500
        assert "There is no module or parameter named 'model.other.weight'" in message
        for path in (START, FINISH):
            assert (await client.post(path))[0] == 200
        assert await load(client, good) == (200, "")
        assert await serves(client, NEW)
        assert (await load(client, shape))[0] == 500
        assert (await client.post(START))[0] == 200
        for path in (FINISH, START):
            assert (await client.post(path))[0] == 500
        assert (await load(client, good))[0] == 500


@pytest.mark.parametrize("label", ["unknown method", "no method", "bad json"])
async def test_other_calls_of_methods_are_answered_as_recorded(label: str) -> None:
    (found,) = [
        (call, response) for name, call, response in exchanges("43_collective_rpc") if name == label
    ]
    call, response = found
    async with serving() as client:
        raw = str(call.get("raw_body") or json.dumps(call["json"])).encode()
        reply = await client.worker.handle(Call("POST", RPC, {}, {}, raw))
        assert parsed(reply) == (response["status"], response["body"])
