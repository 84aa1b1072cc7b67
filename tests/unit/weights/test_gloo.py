"""The sender of `Gloo` over real gloo, against receivers in processes of their own."""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

from genapi.errors import ConfigError, TransportError
from genapi.weights import Gloo, TensorMeta, from_tensors
from genapi.weights.base import Bucket, Sender
from genapi.weights.staging import Stage
from tests.unit.gloo_peer import Peer, Result, held

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="counts threads and sockets in /proc"
)

LIMIT_S = 20.0
AT_ONCE_S = 5.0
BIG = 64 << 20  # more bytes than the kernel's socket buffers take


@pytest.fixture(scope="module")
def peers() -> Iterator[list[Peer]]:
    started = [Peer() for _ in range(2)]
    try:
        for peer in started:
            peer.call("held")
        yield started
    finally:
        for peer in started:
            peer.stop()


@pytest.fixture(autouse=True)
def nothing_left(peers: list[Peer]) -> Iterator[None]:
    """Every test closes its sender, and that frees every thread."""
    before = held()[0]
    yield
    for peer in peers:
        peer.call("close")
    assert held()[0] == before
    for thread in threading.enumerate():
        if thread.name.startswith("genapi"):
            thread.join(AT_ONCE_S)  # it has said that it is done, and needs a moment to end
            assert not thread.is_alive(), thread.name


def ask_to_join(sender: Sender, peers: list[Peer]) -> None:
    info = sender.init_info
    for rank, peer in enumerate(peers, start=1):
        peer.call("make", info["packed"], info["packed_buffer_size_bytes"], info["timeout_s"])
        peer.ask("join", info["master_address"], info["master_port"], rank, info["world_size"])


async def answers(peers: list[Peer]) -> list[Result]:
    return [await anyio.to_thread.run_sync(peer.answer) for peer in peers]


async def joined(peers: list[Peer], transport: Gloo) -> Sender:
    sender = await transport.sender(world_size=1 + len(peers), timeout_s=LIMIT_S)
    ask_to_join(sender, peers)
    await sender.join()
    assert [a.error for a in await answers(peers)] == [None] * len(peers)
    return sender


def big_bucket() -> Bucket:
    meta = TensorMeta(name="big", dtype="uint8", shape=(BIG,))
    return Bucket((meta,), (np.zeros(BIG, np.uint8),))


class Begun(tuple[Any, ...]):  # noqa: SLOT001 - a tuple with slots can hold no attribute
    """Tensors that tell when the sending thread begins with them."""

    event: threading.Event

    def __iter__(self) -> Iterator[Any]:
        self.event.set()
        return super().__iter__()


async def give_up_in_the_middle(sender: Sender, give_up: Callable[[], None]) -> None:
    """Send what nobody takes, and give up once that has begun."""
    bucket = big_bucket()
    tensors = Begun(bucket.tensors)
    tensors.event = threading.Event()

    async def once_begun() -> None:
        assert await anyio.to_thread.run_sync(tensors.event.wait, LIMIT_S)
        give_up()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(once_begun)
        await sender.send(Bucket(bucket.metas, tensors))


async def join_and(sender: Sender, meanwhile: Callable[[], None]) -> None:
    async def soon() -> None:
        meanwhile()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(soon)
        await sender.join()


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "one by one"])
async def test_every_receiver_gets_every_tensor_of_a_source(
    peers: list[Peer], packed: bool
) -> None:
    weights = {
        "torch": torch.randn(5, 3),
        "bfloat16": torch.randn(7).to(torch.bfloat16),
        "transposed": torch.randn(4, 6).t(),
        "numpy": np.arange(12, dtype=np.float32).reshape(3, 4),
        "read-only": np.broadcast_to(np.float64(2.5), (3, 2)),
        "foreign": np.array([1, 2, 3], dtype=">i4"),
        "scalar": np.array(7, dtype=np.int64),
        "empty": torch.empty(0, 4),
    }
    transport = Gloo(bucket_bytes=64, bucket_tensors=3, stage_bytes=128, packed=packed)
    sender = await joined(peers, transport)
    got: dict[str, tuple[str, list[int], bytes]] = {}
    async with Stage(
        from_tensors(weights),
        bucket_bytes=transport.bucket_bytes,
        bucket_tensors=transport.bucket_tensors,
        stage_bytes=transport.stage_bytes,
    ) as stage:
        await stage.prepare()
        async for bucket in stage:
            info = sender.wire(bucket, in_process=False).update_info
            for peer in peers:
                peer.ask("receive", info["names"], info["dtype_names"], info["shapes"])
            await sender.send(bucket)
            first, second = await answers(peers)
            assert first.error is None
            assert first.value == second.value
            for name, *rest in (tensor for chunk in first.value for tensor in chunk):
                got[name] = tuple(rest)
    await sender.aclose()

    def expected(tensor: Any) -> tuple[str, list[int], bytes]:
        if isinstance(tensor, np.ndarray):
            tensor = torch.from_numpy(tensor.astype(tensor.dtype.newbyteorder("=")))
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return str(tensor.dtype), list(tensor.shape), raw

    assert got == {name: expected(tensor) for name, tensor in weights.items()}


async def test_workers_are_told_the_fields_of_the_nccl_backend() -> None:
    sender = await Gloo(bucket_bytes=1 << 20).sender(world_size=4, timeout_s=3)
    info = dict(sender.init_info)
    assert 0 < info.pop("master_port") < 1 << 16
    assert info == {
        "master_address": "127.0.0.1",
        "world_size": 4,
        "packed": True,
        "packed_buffer_size_bytes": 1 << 20,
        "packed_num_buffers": 2,
        "timeout_s": 3,
    }
    await sender.aclose()


@pytest.mark.parametrize(
    ("transport", "mebibytes", "limit_s"),
    [
        (Gloo(), 0, 30),
        (Gloo(), 256, 62),
        (Gloo(bucket_bytes=1 << 20), 2048, 286),  # one tensor, larger than a bucket
        (Gloo(timeout_s=7), 2048, 7),
    ],
)
async def test_a_bucket_gets_the_time_that_its_size_asks_and_receivers_a_little_more(
    transport: Gloo, mebibytes: int, limit_s: float
) -> None:
    sender = await transport.sender(world_size=2, timeout_s=3)
    meta = TensorMeta(name="w", dtype="uint8", shape=(mebibytes, 1 << 20))
    data = np.broadcast_to(np.uint8(0), meta.shape)
    info = sender.wire(Bucket((meta,), (data,)), in_process=False).update_info
    await sender.aclose()
    assert info["timeout_s"] == limit_s + 5


async def test_a_receiver_waits_as_long_as_its_update_call_says(peers: list[Peer]) -> None:
    sender = await joined(peers, Gloo(timeout_s=LIMIT_S))
    started = time.monotonic()
    peers[0].ask("receive", ["w"], ["uint8"], [[1]], timeout_s=0.3)
    answer = await anyio.to_thread.run_sync(peers[0].answer)
    assert "limit 0.3 s" in (answer.error or "")
    assert time.monotonic() - started < AT_ONCE_S
    await sender.aclose()


async def test_abandoning_ends_a_join_at_once() -> None:
    sender = await Gloo().sender(world_size=3, timeout_s=LIMIT_S)
    started = time.monotonic()

    with pytest.RaisesGroup(pytest.RaisesExc(TransportError, match="abandoned")) as caught:
        await join_and(sender, sender.abandon)
    assert time.monotonic() - started < AT_ONCE_S
    error = caught.value.exceptions[0]
    assert isinstance(error, TransportError)
    assert error.phase == "may_have_run"
    assert re.fullmatch(r"gloo://127\.0\.0\.1:\d+", error.url or "")
    await sender.aclose()


async def test_cancelling_a_join_ends_it_at_once() -> None:
    sender = await Gloo().sender(world_size=3, timeout_s=LIMIT_S)
    started = time.monotonic()
    with anyio.CancelScope() as scope:
        await join_and(sender, scope.cancel)
    await sender.aclose()
    assert scope.cancelled_caught
    assert time.monotonic() - started < AT_ONCE_S


async def test_a_join_ends_at_its_limit_when_workers_stay_away() -> None:
    sender = await Gloo().sender(world_size=3, timeout_s=0.5)
    started = time.monotonic()
    with pytest.raises(TransportError, match=r"3 ranks.*0\.5 s"):
        await sender.join()
    assert time.monotonic() - started < AT_ONCE_S
    await sender.aclose()


@pytest.mark.case("WUP-09")
async def test_abandoning_ends_a_send_at_once_on_both_sides(peers: list[Peer]) -> None:
    sender = await joined(peers, Gloo(timeout_s=LIMIT_S))
    started = time.monotonic()
    with pytest.RaisesGroup(pytest.RaisesExc(TransportError, match="abandoned")):
        await give_up_in_the_middle(sender, sender.abandon)
    for peer in peers:
        peer.ask("receive", ["big"], ["uint8"], [[BIG]])
    assert all(answer.error is not None for answer in await answers(peers))
    assert time.monotonic() - started < AT_ONCE_S
    await sender.aclose()


async def test_cancelling_a_send_ends_it_at_once_on_both_sides(peers: list[Peer]) -> None:
    sender = await joined(peers, Gloo(timeout_s=LIMIT_S))
    started = time.monotonic()
    with anyio.CancelScope() as scope:
        await give_up_in_the_middle(sender, scope.cancel)
    assert scope.cancelled_caught
    for peer in peers:
        peer.ask("receive", ["big"], ["uint8"], [[BIG]])
    assert all(answer.error is not None for answer in await answers(peers))
    await sender.aclose()
    assert time.monotonic() - started < AT_ONCE_S


async def test_a_send_ends_at_its_limit_when_nobody_receives(peers: list[Peer]) -> None:
    sender = await joined(peers, Gloo(timeout_s=0.5))
    started = time.monotonic()
    with pytest.raises(TransportError, match="broke"):
        await sender.send(big_bucket())
    assert time.monotonic() - started < AT_ONCE_S
    await sender.aclose()


async def test_a_receiver_that_leaves_ends_the_send(peers: list[Peer]) -> None:
    sender = await joined(peers, Gloo(timeout_s=LIMIT_S))
    for peer in peers:
        await anyio.to_thread.run_sync(peer.call, "close")
    started = time.monotonic()
    with pytest.raises(TransportError, match="broke"):
        await sender.send(big_bucket())
    assert time.monotonic() - started < AT_ONCE_S
    await sender.aclose()


class Counted(tuple[Any, ...]):  # noqa: SLOT001 - a tuple with slots can hold no attribute
    """Tensors that count how often they are gone through."""

    times = 0

    def __iter__(self) -> Iterator[Any]:
        self.times += 1
        return super().__iter__()


async def test_a_receiver_killed_in_mid_transfer_fails_its_own_group_at_once_and_no_other(
    peers: list[Peer],
) -> None:
    metas = tuple(TensorMeta(name=n, dtype="uint8", shape=(s,)) for n, s in (("a", 1), ("b", BIG)))
    tensors = Counted((np.ones(1, np.uint8), np.ones(BIG, np.uint8)))
    bucket = Bucket(metas, tensors)
    transport = Gloo(packed=False, timeout_s=LIMIT_S)
    victim = Peer()
    try:
        hit, whole = await joined([victim], transport), await joined(peers, transport)
        info = whole.wire(bucket, in_process=False).update_info
        described = [info[name] for name in ("names", "dtype_names", "shapes")]
        victim.ask("receive_one", *described)
        for peer in peers:
            peer.ask("receive_one", *described)
        failed = anyio.Event()

        async def fail() -> None:
            with pytest.raises(TransportError, match="broke"):
                await hit.send(bucket)
            failed.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail)
            tasks.start_soon(whole.send, bucket)
            assert [a.error for a in await answers([victim, *peers])] == [None] * 3
            victim.process.kill()  # both groups are in the middle of the second tensor
            with anyio.fail_after(AT_ONCE_S):
                await failed.wait()
            for peer in peers:
                peer.ask("go_on")
        for answer in await answers(peers):
            assert answer.error is None
            assert answer.value == [[("b", "torch.uint8", [BIG], bytes([1]) * BIG)]]
        assert tensors.times == 1  # laid out once for both groups
        await hit.aclose()
        await whole.aclose()
    finally:
        victim.stop()


async def test_after_a_failure_the_group_is_of_no_further_use() -> None:
    sender = await Gloo().sender(world_size=2, timeout_s=LIMIT_S)
    with pytest.raises(TransportError, match="nobody has joined"):
        await sender.send(big_bucket())
    with pytest.raises(TransportError, match="was abandoned") as caught:
        await sender.send(big_bucket())
    assert caught.value.phase == "not_sent"
    await sender.aclose()
    await sender.aclose()


async def test_closing_frees_every_socket(peers: list[Peer]) -> None:
    before = held()[1]
    sender = await joined(peers, Gloo())
    assert held()[1] > before
    await sender.aclose()
    assert held()[1] == before


CANCELLED_AND_NEVER_CLOSED = """
import anyio
from genapi.weights import Gloo

async def main():
    sender = await Gloo().sender(world_size=3, timeout_s=20)
    with anyio.move_on_after(0.2):
        await sender.join()
    print("done", flush=True)

anyio.run(main)
"""


async def test_a_sender_that_was_never_closed_lets_the_process_end() -> None:
    done = await anyio.to_thread.run_sync(
        lambda: subprocess.run(
            [sys.executable, "-c", CANCELLED_AND_NEVER_CLOSED],
            check=True,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    )
    assert done.stdout == "done\n"


@pytest.mark.parametrize(
    ("host", "complaint"),
    [
        pytest.param("0.0.0.0", "every interface", id="wildcard"),  # noqa: S104 - refused
        pytest.param("192.0.2.1", "Cannot assign", id="not ours"),
        pytest.param("no-such-host.invalid", "pass an address", id="no such name"),
    ],
)
async def test_a_host_that_workers_cannot_reach_is_refused(host: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)host='{host}'.*{complaint}"):
        await Gloo(host).sender(world_size=2, timeout_s=LIMIT_S)


async def test_a_group_without_receivers_is_refused() -> None:
    with pytest.raises(ConfigError, match="world_size=1"):
        await Gloo().sender(world_size=1, timeout_s=1)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan")])
def test_a_limit_that_bounds_nothing_is_refused(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="pass seconds"):
        Gloo(timeout_s=timeout_s)
