"""Weights inside the update call: by reference in this process, as bytes to another one."""

import base64
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from genapi.errors import ConfigError, TransportError
from genapi.weights import Memory, TensorMeta
from genapi.weights.base import Bucket


def bucket(**tensors: Any) -> Bucket:
    metas = tuple(
        TensorMeta(name=name, dtype=str(t.dtype).removeprefix("torch."), shape=tuple(t.shape))
        for name, t in tensors.items()
    )
    return Bucket(metas, tuple(tensors.values()))


INFO = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2, 2]]}


async def test_a_worker_in_this_process_gets_the_arrays_themselves_but_may_not_write() -> None:
    sender = await Memory().sender(world_size=2, timeout_s=1)
    weight = np.arange(4, dtype=np.float32).reshape(2, 2)
    wire = sender.wire(bucket(w=weight), in_process=True)
    assert wire.update_info == INFO
    assert wire.attachment is not None
    (array,) = wire.attachment
    assert np.shares_memory(array, weight)
    assert not array.flags.writeable
    assert weight.flags.writeable


async def test_torch_tensors_are_handed_over_without_a_copy() -> None:
    torch = pytest.importorskip("torch")
    sender = await Memory().sender(world_size=2, timeout_s=1)
    weight = torch.ones(2, 2, requires_grad=True)
    wire = sender.wire(bucket(w=weight), in_process=True)
    assert wire.attachment is not None
    assert wire.attachment[0].ctypes.data == weight.data_ptr()
    with pytest.raises(ConfigError, match=r"'w' is torch\.bfloat16, which numpy lacks.*float32"):
        sender.wire(bucket(w=weight.to(torch.bfloat16)), in_process=True)


@pytest.mark.parametrize(
    "array",
    [
        pytest.param(np.arange(6, dtype="<f4").reshape(2, 3), id="plain"),
        pytest.param(np.arange(6, dtype="<f4").reshape(2, 3).T, id="transposed"),
        pytest.param(np.float64(3).reshape(()), id="scalar"),
        pytest.param(np.zeros((0, 3), dtype="<i8"), id="empty"),
    ],
)
async def test_another_process_gets_the_bytes_as_text(array: Any) -> None:
    sender = await Memory().sender(world_size=2, timeout_s=1)
    wire = sender.wire(bucket(w=array), in_process=False)
    assert wire.attachment is None
    (text,) = wire.update_info["data"]
    raw = np.frombuffer(base64.b64decode(text, validate=True), dtype=array.dtype)
    assert np.array_equal(raw.reshape(wire.update_info["shapes"][0]), array)


async def test_another_process_gets_dtypes_that_numpy_lacks_too() -> None:
    torch = pytest.importorskip("torch")
    sender = await Memory().sender(world_size=2, timeout_s=1)
    weight = torch.tensor([[1.5, -2.0], [0.0, 3.0]], dtype=torch.bfloat16)
    wire = sender.wire(bucket(w=weight, v=weight.t()), in_process=False)
    assert wire.update_info["dtype_names"] == ["bfloat16", "bfloat16"]
    for text, expected in zip(wire.update_info["data"], (weight, weight.t()), strict=True):
        raw = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.bfloat16)
        assert torch.equal(raw.view(2, 2), expected)


async def test_there_is_no_group_but_the_rank_plan_is_told_and_checked() -> None:
    sender = await Memory().sender(world_size=3, timeout_s=1)
    assert sender.init_info == {"world_size": 3}
    await sender.join()
    await sender.send(bucket(w=np.ones(1)))
    with pytest.raises(ConfigError, match=r"world_size=1: .*at least one rank"):
        await Memory().sender(world_size=1, timeout_s=1)


async def test_a_sender_that_has_left_sends_no_more() -> None:
    sender = await Memory().sender(world_size=2, timeout_s=1)
    sender.abandon()
    with pytest.raises(TransportError, match="has left"):
        await sender.join()
    with pytest.raises(TransportError, match="has left"):
        await sender.send(bucket(w=np.ones(1)))
    await sender.aclose()


@pytest.mark.parametrize(
    "limits",
    [{"bucket_bytes": 0}, {"bucket_tensors": 0}, {"stage_bytes": -1}, {"bucket_bytes": 1.5}],
)
def test_limits_under_which_nothing_could_be_sent_are_refused(limits: dict[str, Any]) -> None:
    ((name, value),) = limits.items()
    with pytest.raises(ConfigError, match=f"{name}={value}: pass a whole number"):
        Memory(**limits)


def test_the_public_names_load_no_torch() -> None:
    statement = (
        "import sys, genapi; genapi.weights.Memory(); genapi.weights.Gloo();"
        "import genapi.weights.staging; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", statement], check=True, timeout=30)


def test_without_torch_gloo_says_what_to_install() -> None:
    statement = (
        "import sys; sys.modules['torch'] = None; import genapi; genapi.weights.Memory()\n"
        "try: genapi.weights.Gloo()\n"
        "except genapi.ConfigError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", statement], check=True, capture_output=True, text=True, timeout=30
    )
    assert (
        done.stdout == "publishing over gloo needs torch: install genapi with its extra 'torch'\n"
    )
