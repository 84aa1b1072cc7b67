"""Both ends of the gloo transfer against each other, over real gloo, in separate processes."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from genapi.engine_side.receiver import chunk_ends
from genapi.weights._gloo_group import GlooGroup, GroupError, Parcel, pack, plan_chunks
from tests.unit.gloo_peer import Peer, content, held, listening_addresses

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="counts threads and sockets in /proc"
)

_c10d: Any = torch.distributed

HOST = "127.0.0.1"
LIMIT_S = 20.0
AT_ONCE_S = 2.0
# The second takes a while, and is more than the kernel's socket buffers hold.
HALVES = [torch.zeros(1), torch.zeros(128 << 20, dtype=torch.uint8)]
DYING_SENDER = """
import torch
from genapi.weights._gloo_group import GlooGroup, pack
group = GlooGroup("127.0.0.1")
print(group.port, flush=True)
group.join(2, timeout_s=20)
halves = [torch.zeros(1), torch.zeros(128 << 20, dtype=torch.uint8)]
info = {
    "names": ["t0", "t1"], "dtype_names": ["float32", "uint8"], "shapes": [[1], [128 << 20]]
}
group.send(pack(halves, info, packed=False, packed_buffer_size_bytes=0), timeout_s=20)
"""

DTYPES = sorted(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.uint16,
        torch.int32,
        torch.uint32,
        torch.int64,
        torch.uint64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    },
    key=str,
)


@pytest.fixture(scope="module")
def peers() -> Iterator[list[Peer]]:
    """Three receivers, enough for a rank that gets its data from another receiver."""
    started = [Peer() for _ in range(3)]
    try:
        for peer in started:
            peer.call("held")
        yield started
    finally:
        for peer in started:
            peer.stop()


def holdings(peers: list[Peer]) -> list[Any]:
    """Threads and sockets of gloo here and at the receivers, once those have left any group."""
    for peer in peers:
        peer.call("close")
    return [held(), *(peer.call("held") for peer in peers)]


def form(
    peers: list[Peer],
    *,
    packed: bool = False,
    limit: int = 0,
    timeout_s: float = LIMIT_S,
    host: str = HOST,
) -> GlooGroup:
    group = GlooGroup(host)
    world_size = 1 + len(peers)
    for rank, peer in enumerate(peers, start=1):
        peer.call("make", packed, limit, timeout_s)
        peer.ask("join", group.host, group.port, rank, world_size)
    group.join(world_size, timeout_s=LIMIT_S)
    for peer in peers:
        assert peer.answer().error is None
    return group


def described(tensors: list[Any]) -> tuple[list[str], list[str], list[list[int]]]:
    return (
        [f"t{i}" for i in range(len(tensors))],
        [str(t.dtype).removeprefix("torch.") for t in tensors],
        [list(t.shape) for t in tensors],
    )


def parcel(tensors: list[Any], *, packed: bool = False, limit: int = 0) -> Parcel:
    fields = ("names", "dtype_names", "shapes")
    info = dict(zip(fields, described(tensors), strict=True))
    return pack(tensors, info, packed=packed, packed_buffer_size_bytes=limit)


def example(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Every byte pattern the dtype has, NaNs included; bool has only two."""
    generator = torch.Generator().manual_seed(seed)
    numel = torch.empty(shape).numel()
    top = 2 if dtype == torch.bool else 256
    raw = torch.randint(top, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape) if numel else torch.empty(shape, dtype=dtype)


def exchange(
    group: GlooGroup, peers: list[Peer], tensors: list[torch.Tensor], *, packed: bool, limit: int
) -> list[list[Any]]:
    """Send one bucket; what each peer received, as broadcasts of (name, dtype, shape, bytes)."""
    for peer in peers:
        peer.ask("receive", *described(tensors))
    sent = group.send(parcel(tensors, packed=packed, limit=limit), timeout_s=LIMIT_S)
    assert sent == sum(t.nbytes for t in tensors)
    results = [peer.answer() for peer in peers]
    assert [r.error for r in results] == [None] * len(peers)
    return [r.value for r in results]


def expected(tensors: list[torch.Tensor]) -> list[tuple[str, str, list[int], bytes]]:
    names, dtypes, shapes = described(tensors)
    return [
        (name, f"torch.{dtype}", shape, content(tensor))
        for name, dtype, shape, tensor in zip(names, dtypes, shapes, tensors, strict=True)
    ]


@pytest.mark.parametrize("packed", [False, True])
def test_every_dtype_and_shape_arrives_bit_for_bit(peers: list[Peer], packed: bool) -> None:
    tensors = [example(dtype, (3, 5)) for dtype in DTYPES]
    tensors += [example(torch.int8, (7,)), example(torch.float64, (1,))]  # the latter unaligned
    tensors += [example(torch.bfloat16, ()), torch.empty(0), torch.empty(4, 0, 2)]
    tensors += [example(torch.float32, (4, 6)).t(), example(torch.float16, (9,))[::2]]
    group = form(peers[:1], packed=packed, limit=64)
    try:
        (broadcasts,) = exchange(group, peers[:1], tensors, packed=packed, limit=64)
    finally:
        group.abandon()
    assert [item for broadcast in broadcasts for item in broadcast] == expected(tensors)
    assert (len(broadcasts) < len(tensors)) is packed


@pytest.mark.parametrize("packed", [False, True])
def test_a_bucket_of_nothing_moves_nothing(peers: list[Peer], packed: bool) -> None:
    group = form(peers[:1], packed=packed, limit=8)
    try:
        assert exchange(group, peers[:1], [], packed=packed, limit=8) == [[]]
        empties = [torch.empty(0), torch.empty(0, 3)]
        (broadcasts,) = exchange(group, peers[:1], empties, packed=packed, limit=8)
    finally:
        group.abandon()
    assert [item for broadcast in broadcasts for item in broadcast] == expected(empties)


def test_numpy_arrays_are_sent_as_they_are(peers: list[Peer]) -> None:
    array = torch.arange(6, dtype=torch.float32).view(2, 3).numpy()
    array.flags.writeable = False
    group = form(peers[:1])
    try:
        peers[0].ask("receive", ["t0"], ["float32"], [[2, 3]])
        group.send(parcel([array]), timeout_s=LIMIT_S)
        (((_, _, shape, data),),) = peers[0].answer().value
    finally:
        group.abandon()
    assert (shape, data) == ([2, 3], array.tobytes())


@given(sizes=st.lists(st.integers(0, 40)), limit=st.integers(-1, 100))
def test_both_ends_cut_the_same_chunks(sizes: list[int], limit: int) -> None:
    chunks = plan_chunks(sizes, limit)
    assert [i for chunk in chunks for i in chunk] == list(range(len(sizes)))
    assert [chunk.stop for chunk in chunks] == list(chunk_ends(sizes, limit))
    for chunk in chunks:
        total = sum(sizes[i] for i in chunk)
        assert total - sizes[chunk[-1]] <= limit or len(chunk) == 1
        assert total > limit or chunk is chunks[-1]


tensors_of_any_kind = st.lists(
    st.builds(
        example,
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
        st.integers(0, 99),
    ),
    max_size=8,
)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensors=tensors_of_any_kind, packed=st.booleans(), limit=st.integers(1, 300))
def test_any_bucket_arrives_in_the_chunks_that_were_planned(
    peers: list[Peer], tensors: list[torch.Tensor], packed: bool, limit: int
) -> None:
    group = form(peers[:1], packed=packed, limit=limit)
    try:
        (broadcasts,) = exchange(group, peers[:1], tensors, packed=packed, limit=limit)
    finally:
        group.abandon()
    assert [item for broadcast in broadcasts for item in broadcast] == expected(tensors)
    sizes = [t.nbytes for t in tensors]
    assert len(broadcasts) == len(plan_chunks(sizes, limit if packed else -1))


def test_a_group_serves_many_buckets_and_leaves_nothing_behind(peers: list[Peer]) -> None:
    before = holdings(peers)
    group = form(peers, packed=True, limit=1000)
    during = held()
    for seed in range(5):
        tensors = [example(torch.bfloat16, (30, 7), seed), example(torch.int8, (seed,), seed)]
        for broadcasts in exchange(group, peers, tensors, packed=True, limit=1000):
            assert [item for broadcast in broadcasts for item in broadcast] == expected(tensors)
    group.abandon()
    assert during != before[0]
    assert holdings(peers) == before


def test_only_the_given_address_listens(peers: list[Peer]) -> None:
    pids = [peers[0].call("pid"), peers[1].call("pid")]
    rendezvous = GlooGroup("127.0.0.2")
    mine = listening_addresses(os.getpid())
    rendezvous.abandon()
    assert "0200007F" in mine
    assert not mine & {"00000000", "0" * 32}

    group = form(peers[:2])
    try:
        for pid in pids:
            assert listening_addresses(pid) == {"0100007F"}
    finally:
        group.abandon()


def test_a_receiver_that_comes_after_the_end_is_refused_at_once(peers: list[Peer]) -> None:
    group = GlooGroup(HOST)
    group.abandon()
    peers[0].call("make", False, 0, LIMIT_S)
    peers[0].ask("join", group.host, group.port, 1, 2)
    result = peers[0].answer()
    assert result.error is not None
    assert "refused" in result.error
    assert result.took_s < AT_ONCE_S


def engines_own(port: int) -> bool:
    """Meet as an engine's own receiver does, with half an hour's patience; whether that failed."""
    half_an_hour = dt.timedelta(minutes=30)
    try:
        store = _c10d.TCPStore(HOST, port, 3, is_master=False, timeout=half_an_hour)
        store.get("the address of rank 0")
    except RuntimeError:
        return True
    return False


def test_an_engines_own_receivers_that_come_too_late_are_turned_away_until_the_group_is_closed(
    peers: list[Peer],
) -> None:
    before = holdings(peers)
    group = GlooGroup(HOST, plain=True)
    with ThreadPoolExecutor(3) as pool:
        joining = pool.submit(group.join, 3, timeout_s=LIMIT_S)
        early = pool.submit(engines_own, group.port)
        group.abandon()
        assert "abandoned" in str(joining.exception(AT_ONCE_S))
        assert early.result(AT_ONCE_S)
        for _ in range(3):
            late = [pool.submit(engines_own, group.port) for _ in range(2)]
            assert all(receiver.result(AT_ONCE_S) for receiver in late)
            group.abandon()
    assert group.close(timeout_s=AT_ONCE_S)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, group.port))
    assert holdings(peers) == before


@contextlib.contextmanager
def sending(
    group: GlooGroup, tensors: list[torch.Tensor], *, timeout_s: float = LIMIT_S
) -> Iterator[Future[int]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(group.send, parcel(tensors), timeout_s=timeout_s)


@pytest.mark.parametrize("receivers", [1, 2, 3])
def test_abandoning_in_mid_transfer_fails_both_ends_at_once(
    peers: list[Peer], receivers: int
) -> None:
    before = holdings(peers)
    group = form(peers[:receivers], timeout_s=2.0)
    with sending(group, HALVES, timeout_s=2.0) as send:
        for peer in peers[:receivers]:
            peer.ask("receive_one", *described(HALVES))
        for peer in peers[:receivers]:
            assert peer.answer().error is None
            peer.ask("go_on")  # now the big half is under way
        group.abandon()
        failure = send.exception(AT_ONCE_S)
        results = [peer.answer() for peer in peers[:receivers]]
    assert isinstance(failure, GroupError)
    assert "abandoned" in str(failure)
    for result in results:
        assert result.error is not None
        assert "the update group broke while 't1'" in result.error
        assert result.took_s < AT_ONCE_S
    # Nobody closed anything: every end left by itself, and what it held goes by its limit.
    assert [held(), *(peer.call("held") for peer in peers)] == before


def test_abandoning_between_buckets_fails_the_next_receive_at_once(peers: list[Peer]) -> None:
    before = holdings(peers)
    group = form(peers[:2])
    exchange(group, peers[:2], [torch.ones(3)], packed=False, limit=0)
    assert group.close(timeout_s=AT_ONCE_S)
    for peer in peers[:2]:
        peer.ask("receive", *described(HALVES))
    for peer in peers[:2]:
        result = peer.answer()
        assert result.error is not None
        assert result.took_s < AT_ONCE_S
    assert [held(), *(peer.call("held") for peer in peers)] == before


def test_abandoning_ends_a_send_that_nobody_takes(peers: list[Peer]) -> None:
    before = holdings(peers)
    group = form(peers[:1])
    with sending(group, HALVES) as send:
        peers[0].ask("receive_one", *described(HALVES))
        assert peers[0].answer().error is None  # now the big half is in the way
        assert group.close(timeout_s=AT_ONCE_S)
        failure = send.exception(AT_ONCE_S)
    assert isinstance(failure, GroupError)
    assert "abandoned" in str(failure)
    assert holdings(peers) == before


def test_abandoning_ends_a_join_that_waits_for_somebody(peers: list[Peer]) -> None:
    before = holdings(peers)
    group = GlooGroup(HOST)
    peers[0].call("make", False, 0, 1.0)  # in case it comes too late: the store's client retries
    peers[0].ask("join", group.host, group.port, 1, 3)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(group.join, 3, timeout_s=LIMIT_S)
        group.abandon()
        failure = joining.exception(AT_ONCE_S)
    result = peers[0].answer()
    assert isinstance(failure, GroupError)
    assert "abandoned" in str(failure)
    assert result.error is not None
    assert result.took_s < 2 * AT_ONCE_S
    assert [held(), *(peer.call("held") for peer in peers)] == before


@pytest.mark.parametrize("how", ["close", "kill"])
def test_a_receiver_that_leaves_in_mid_transfer_fails_sender_and_siblings_at_once(
    peers: list[Peer], how: str
) -> None:
    leaver = Peer()
    try:
        leaver.call("held")
        group = form([leaver, peers[0]], timeout_s=3.0)
        with sending(group, [*HALVES, torch.zeros(1)]) as send:
            for peer in (leaver, peers[0]):
                peer.ask("receive_one", *described([*HALVES, torch.zeros(1)]))
            assert leaver.answer().error is None
            assert peers[0].answer().error is None
            peers[0].ask("go_on")
            leaver.process.kill() if how == "kill" else leaver.call("close")
            failure = send.exception(AT_ONCE_S)
            result = peers[0].answer()
        assert isinstance(failure, GroupError)
        assert result.error is not None
        assert result.took_s < AT_ONCE_S
    finally:
        leaver.stop()


@pytest.mark.parametrize("waiting", [False, True])
def test_a_sender_that_dies_fails_its_receivers_at_once(peers: list[Peer], waiting: bool) -> None:
    peers[0].call("make", False, 0, LIMIT_S)
    with subprocess.Popen(
        [sys.executable, "-c", DYING_SENDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as sender:
        assert sender.stdout is not None
        port = int(sender.stdout.readline())
        peers[0].call("join", HOST, port, 1, 2)
        peers[0].ask("receive_one" if waiting else "held", *(described(HALVES) if waiting else ()))
        peers[0].answer()
        if waiting:
            peers[0].ask("go_on")
        sender.kill()
    if not waiting:
        peers[0].ask("receive", *described(HALVES))
    result = peers[0].answer()
    assert result.error is not None
    assert result.took_s < AT_ONCE_S


def test_a_bucket_is_sent_when_every_receiver_is_done_with_it(peers: list[Peer]) -> None:
    group = form(peers[:2])
    tensors = [torch.ones(3)]
    peers[0].ask("receive", *described(tensors))
    peers[1].ask("receive_one", *described(tensors))
    with sending(group, tensors) as send:
        assert peers[1].answer().error is None  # received, and still loading
        assert not wait([send], timeout=0.3).done
        peers[1].ask("go_on")
        assert send.result(LIMIT_S) == 12
    assert peers[0].answer().error is None
    assert peers[1].answer().error is None
    group.abandon()


def test_an_operation_that_ends_as_a_slice_of_its_wait_does_is_not_taken_for_late(
    peers: list[Peer],
) -> None:
    group, tensors = form(peers), [torch.ones(3)]
    *waiting, last = peers
    for number in range(40):
        for peer in waiting:
            peer.ask("receive", *described(tensors))
        last.ask("receive_one", *described(tensors))
        with sending(group, tensors) as send:
            assert last.answer().error is None
            # All others wait in slices of 0.1 s: the last one comes when the first slice ends.
            assert not wait([send], timeout=0.0985 + number % 20 * 0.0001).done
            last.ask("go_on")
            assert send.result(LIMIT_S) == 12
        assert [peer.answer().error for peer in peers] == [None] * 3
    group.abandon()


def test_a_receiver_that_cannot_load_what_came_fails_the_sender_and_its_siblings(
    peers: list[Peer],
) -> None:
    group = form(peers[:2])
    tensors = [torch.ones(3)]
    peers[0].ask("receive", *described(tensors))
    peers[1].ask("receive_one", *described(tensors))
    with sending(group, tensors) as send:
        assert peers[1].answer().error is None
        peers[1].call("close")
        assert isinstance(send.exception(AT_ONCE_S), GroupError)
        result = peers[0].answer()
    assert result.error is not None
    assert "the other ranks" in result.error
    assert result.took_s < AT_ONCE_S


def test_a_bucket_that_does_not_come_in_time_fails_both_ends(peers: list[Peer]) -> None:
    group = form(peers[:1], timeout_s=0.3)
    peers[0].ask("receive", *described([torch.zeros(1)]))
    result = peers[0].answer()
    assert result.error is not None
    assert result.took_s < AT_ONCE_S
    with pytest.raises(GroupError, match="update group of 2 ranks broke"):
        group.send(parcel([torch.zeros(1)]), timeout_s=LIMIT_S)


def test_a_send_that_is_not_taken_in_time_ends_the_group(peers: list[Peer]) -> None:
    group = form(peers[:1])
    with pytest.raises(GroupError, match=r"2 ranks broke: .*Timed out"):
        group.send(parcel(HALVES), timeout_s=0.2)
    peers[0].ask("receive", *described(HALVES))
    result = peers[0].answer()
    assert result.error is not None
    assert result.took_s < AT_ONCE_S


@pytest.mark.parametrize(
    ("shapes", "limit"),
    [([[3], [4]], 100), ([[4], [4]], 100), ([[3], [5]], 8)],
    ids=["other total", "same total", "other chunks"],
)
def test_data_of_another_size_than_expected_is_refused_before_it_flows(
    peers: list[Peer], shapes: list[list[int]], limit: int
) -> None:
    group = form(peers[:1], packed=True, limit=limit)
    peers[0].ask("receive", ["t0", "t1"], ["float32", "float32"], shapes)
    sent = parcel([torch.zeros(3), torch.zeros(5)], packed=True, limit=100)
    with pytest.raises(GroupError):
        group.send(sent, timeout_s=LIMIT_S)
    result = peers[0].answer()
    group.abandon()
    assert result.error is not None
    assert "the sender announced 32 bytes in 1 broadcasts" in result.error


@pytest.mark.parametrize(
    "description",
    [
        (["t1", "t0"], ["float32", "int32"], [[2, 3], [3, 2]]),
        (["t0", "other"], ["float32", "int32"], [[2, 3], [3, 2]]),
        (["t0", "t1"], ["int32", "float32"], [[2, 3], [3, 2]]),
        (["t0", "t1"], ["float32", "int32"], [[3, 2], [3, 2]]),
        (["t0", "t1"], ["float32", "int32"], [[2, 3], [6]]),
    ],
    ids=["order", "name", "dtype", "shape", "rank"],
)
@pytest.mark.parametrize("packed", [False, True])
def test_other_tensors_of_the_same_sizes_are_refused_before_the_first_one(
    peers: list[Peer], description: tuple[list[Any], ...], packed: bool
) -> None:
    group = form(peers[:1], packed=packed, limit=100)
    tensors = [torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.int32)]
    peers[0].ask("receive_one", *description)
    with pytest.raises(GroupError):
        group.send(parcel(tensors, packed=packed, limit=100), timeout_s=LIMIT_S)
    result = peers[0].answer()
    group.abandon()
    assert result.error is not None
    assert "other tensors, or another order" in result.error


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ((["a"], ["float32"], []), "must be of one length"),
        ((["a"], ["float33"], [[1]]), "unknown to torch"),
        ((["a"], ["nn"], [[1]]), "unknown to torch"),
        ((["a"], ["float32"], [[2, -1]]), "less than nothing"),
    ],
)
def test_a_bad_description_is_refused_before_anything_is_received(
    peers: list[Peer], description: tuple[list[Any], ...], message: str
) -> None:
    group = form(peers[:1])
    try:
        peers[0].ask("receive", *description)
        result = peers[0].answer()
        assert result.error is not None
        assert result.error.startswith("ValueError")
        assert message in result.error
        # Nothing was consumed, and the group still works.
        assert exchange(group, peers[:1], [torch.ones(2)], packed=False, limit=0)
    finally:
        group.abandon()


def test_a_rank_that_cannot_be_a_receiver_is_refused(peers: list[Peer]) -> None:
    for rank, world_size in ((0, 2), (2, 2), (-1, 2)):
        peers[0].ask("join", HOST, 1, rank, world_size)
        result = peers[0].answer()
        assert result.error is not None
        assert "not a receiver's" in result.error


def test_receiving_without_a_group_says_so(peers: list[Peer]) -> None:
    peers[0].call("make", False, 0, LIMIT_S)
    peers[0].ask("receive", *described([torch.zeros(1)]))
    assert peers[0].answer().error == (
        "RuntimeError: there is no update group: it was never joined, or it broke earlier"
    )


def test_a_sender_that_was_never_joined_or_is_gone_says_so() -> None:
    group = GlooGroup(HOST)
    with pytest.raises(GroupError, match="nobody has joined it"):
        group.send(parcel([torch.zeros(1)]), timeout_s=1)
    with pytest.raises(GroupError, match="it was abandoned"):
        group.send(parcel([torch.zeros(1)]), timeout_s=1)
    with pytest.raises(GroupError, match="it was abandoned"):
        group.join(2, timeout_s=1)


def test_a_join_without_receivers_is_bounded_and_cleans_up() -> None:
    before = held()
    group = GlooGroup(HOST)
    with pytest.raises(GroupError, match=r"did not form within 0\.3 s"):
        group.join(2, timeout_s=0.3)
    assert held() == before


@pytest.mark.parametrize("world_size", [0, 1])
def test_a_group_needs_a_receiver(world_size: int) -> None:
    group = GlooGroup(HOST)
    with pytest.raises(ValueError, match="a group is the trainer and its receivers"):
        group.join(world_size, timeout_s=1)
    group.abandon()


def test_the_rendezvous_needs_an_address_that_receivers_can_reach() -> None:
    with pytest.raises(ValueError, match="every interface"):
        GlooGroup("0.0.0.0")  # noqa: S104 - refused
    with pytest.raises(OSError, match="assign"):
        GlooGroup("192.0.2.1")


def test_ipv6_works_where_the_machine_has_it(peers: list[Peer]) -> None:
    try:
        group = form(peers[:1], host="::1")
    except OSError:
        pytest.skip("no IPv6 on this machine")
    try:
        assert exchange(group, peers[:1], [torch.ones(2)], packed=False, limit=0)
    finally:
        group.abandon()
