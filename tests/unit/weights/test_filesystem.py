"""Weights as files: what is written, what is refused, and who is left alone."""

import errno
import gc
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from genapi import PolicyVersion
from genapi.errors import ConfigError, TransportError
from genapi.weights import Filesystem, TensorMeta, from_safetensors
from genapi.weights._disk import PosixDisk
from genapi.weights._versions import Versions
from genapi.weights.base import Bucket
from tests.support.simulated_disk import SimulatedDisk

ONE, TWO = PolicyVersion(run="r", step=1), PolicyVersion(run="r", step=2)
SOME = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2, np.float16)}
ROOT = pathlib.Path("/weights")


def metas_of(tensors: Mapping[str, Any]) -> tuple[TensorMeta, ...]:
    return tuple(
        TensorMeta(name=name, dtype=str(t.dtype).removeprefix("torch."), shape=tuple(t.shape))
        for name, t in tensors.items()
    )


async def buckets(tensors: Mapping[str, Any]) -> AsyncIterator[Bucket]:
    for meta in metas_of(tensors):
        yield Bucket((meta,), (tensors[meta.name],))


async def write(
    store: Filesystem, tensors: Mapping[str, Any] = SOME, version: PolicyVersion = ONE
) -> pathlib.Path:
    """As a publisher that is closed afterwards."""
    try:
        return await put(store, tensors, version)
    finally:
        await store.close()


async def put(
    store: Filesystem, tensors: Mapping[str, Any] = SOME, version: PolicyVersion = ONE
) -> pathlib.Path:
    return pathlib.Path(await store.write(version, metas_of(tensors), buckets(tensors)))


DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "float8_e4m3fn",
    "float8_e5m2",
]


@st.composite
def manifests(draw: st.DrawFn) -> list[tuple[str, str, tuple[int, ...]]]:
    letters = st.characters(codec="utf-8", exclude_characters="\0")
    names = draw(st.lists(st.text(letters, min_size=1), min_size=1, max_size=8, unique=True))
    shape = st.lists(st.integers(0, 4), max_size=3).map(tuple)
    return [
        (name, draw(st.sampled_from(DTYPES)), draw(shape))
        for name in names
        if name != "__metadata__"
    ] or [("w", "bfloat16", (3,))]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(manifest=manifests(), shard=st.integers(1, 200), seed=st.integers(0, 99))
def test_any_manifest_comes_back_bit_for_bit(
    manifest: list[tuple[str, str, tuple[int, ...]]],
    shard: int,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(seed)
    tensors = {}
    for name, dtype, shape in manifest:
        size = TensorMeta(name=name, dtype=dtype, shape=shape).nbytes
        raw = random.integers(0, 2 if dtype == "bool" else 256, size, np.uint8)
        tensors[name] = torch.zeros(shape, dtype=getattr(torch, dtype))
        if size:
            tensors[name].reshape(-1).view(torch.uint8).copy_(torch.from_numpy(raw))
    store = Filesystem(tmp_path_factory.mktemp("w") / "dir", shard_bytes=shard)
    source = from_safetensors(anyio.run(write, store, tensors))
    assert {m.name: (m.dtype, m.shape) for m in source.manifest()} == {
        name: (dtype, shape) for name, dtype, shape in manifest
    }
    for name, found in source:
        assert found.dtype == tensors[name].dtype
        assert raw_of(found) == raw_of(tensors[name])


def raw_of(tensor: Any) -> bytes:
    uint8 = sys.modules["torch"].uint8
    return bytes(tensor.reshape(-1).view(uint8).numpy().tobytes()) if tensor.numel() else b""


def folders(path: pathlib.Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))


@pytest.mark.parametrize(
    "array",
    [
        pytest.param(np.arange(6, dtype="<f4").reshape(2, 3).T, id="transposed"),
        pytest.param(np.float64(3).reshape(()), id="scalar"),
        pytest.param(np.zeros((0, 3), dtype="<i8"), id="empty"),
    ],
)
async def test_arrays_of_numpy_come_back_as_they_are(array: Any, tmp_path: pathlib.Path) -> None:
    place = await write(Filesystem(tmp_path / "w"), {"byte": np.ones(3, np.uint8), "w": array})
    found = {name: np.asarray(tensor) for name, tensor in from_safetensors(place)}
    assert np.array_equal(found["w"], array)
    assert found["w"].dtype == array.dtype


async def test_a_version_lies_in_a_folder_of_its_name_and_is_told_by_the_path_of_the_workers(
    tmp_path: pathlib.Path,
) -> None:
    store = Filesystem(tmp_path / "w", worker_dir="/mnt/weights/")
    place = await store.write(
        PolicyVersion(run="my-run.1", step=7, attempt=2), metas_of(SOME), buckets(SOME)
    )
    assert place == "/mnt/weights/my-run.1-7-2"
    assert folders(tmp_path / "w" / "my-run.1-7-2") == ["STABLE", "model.safetensors"]


async def test_what_a_model_directory_has_beside_weights_is_copied_and_weights_are_not(
    tmp_path: pathlib.Path,
) -> None:
    base = tmp_path / "base"
    (base / "onnx").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        (base / name).write_text(name)
    for name in (
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        ".gitattributes",
    ):
        (base / name).write_text("old")
    place = await write(Filesystem(tmp_path / "w", base=base, shard_bytes=1))
    assert folders(place) == [
        "STABLE",
        "chat_template.jinja",
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert (place / "config.json").read_text() == "config.json"
    index = json.loads((place / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 28},
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00002-of-00002.safetensors",
        },
    }


async def test_old_versions_go_when_they_are_not_kept_and_not_needed(
    tmp_path: pathlib.Path,
) -> None:
    store = Filesystem(tmp_path, keep=2)
    versions = [PolicyVersion(run="r", step=step) for step in range(5)]
    for version in versions:
        await write(store, version=version)
    await store.tidy(versions[4], {versions[1]})
    assert folders(tmp_path) == ["r-1-1", "r-3-1", "r-4-1"]


async def test_what_a_writer_left_behind_is_removed_and_what_one_is_writing_is_not(
    tmp_path: pathlib.Path,
) -> None:
    left = tmp_path / "other-3-1"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    (left / ".writing").touch()
    at_work = Versions(tmp_path, PosixDisk()).draft(TWO, metas_of(SOME), shard_bytes=1)
    store = Filesystem(tmp_path)
    assert await store.taken() == {TWO}
    await write(store)
    assert folders(tmp_path) == ["r-1-1", "r-2-1"]
    at_work.discard()
    assert folders(tmp_path) == ["r-1-1"]


def everything(place: pathlib.Path) -> dict[str, bytes | None]:
    """Each path below, and what is in it where it is a file."""
    return {
        str(path.relative_to(place)): path.read_bytes() if path.is_file() else None
        for path in sorted(place.rglob("*"))
        if path.name != ".r.publisher"
    }


async def test_folders_that_are_not_genapis_stay_as_they_are_whatever_they_are_called(
    tmp_path: pathlib.Path,
) -> None:
    place, elsewhere = tmp_path / "w", tmp_path / "elsewhere"
    for folder in (place / "llama-3-8", place / "run-2-1" / "sub", elsewhere):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text("the only copy")
    (elsewhere / "STABLE").write_text("of another tool")
    (place / "empty-1-1").mkdir()
    (place / "file-1-1").write_text("a file")
    (place / "exp-1-1").symlink_to(elsewhere)
    (place / "r-0-1").symlink_to(elsewhere)
    (place / "gone-1-1").symlink_to(tmp_path / "gone")
    before, outside = everything(place), everything(elsewhere)
    store = Filesystem(place)
    await write(store, version=ONE)
    await write(store, version=TWO)
    await store.tidy(TWO, frozenset())
    after = everything(place)
    assert {name: after.get(name, "removed") for name in before} == before
    assert everything(elsewhere) == outside
    assert sorted({name.split("/")[0] for name in after} - set(before)) == ["r-2-1"]


@pytest.mark.parametrize("what", ["folder", "link", "file"])
async def test_what_is_in_the_way_of_a_version_and_not_genapis_is_refused_and_stays(
    what: str, tmp_path: pathlib.Path
) -> None:
    place, elsewhere = tmp_path / "w" / "r-1-1", tmp_path / "elsewhere"
    for folder in (elsewhere, place.parent if what != "folder" else place):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text("the only copy")
    if what == "link":
        place.symlink_to(elsewhere)
    elif what == "file":
        place.write_text("a file")
    before = everything(tmp_path)
    store = Filesystem(place.parent)
    with pytest.raises(ConfigError, match=r"r-1-1 is not genapi's, .*move it away"):
        await write(store)
    with pytest.raises(ConfigError, match="not genapi's"):
        await store.discard(ONE)
    assert everything(tmp_path) == before


async def test_an_empty_folder_that_is_called_like_a_version_stays_when_that_is_discarded(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "r-1-1").mkdir()
    store = Filesystem(tmp_path)
    await store.discard(ONE)
    assert folders(tmp_path) == ["r-1-1"]
    await write(store)
    await store.discard(ONE)
    assert folders(tmp_path) == []


async def test_a_version_that_is_there_is_never_written_over(tmp_path: pathlib.Path) -> None:
    await write(Filesystem(tmp_path))
    before = everything(tmp_path)
    heir = Filesystem(tmp_path)
    assert await heir.taken() == {ONE}
    with pytest.raises(ConfigError, match=r"r-1-1 is a version already, which workers may be load"):
        await write(heir, {"a": np.zeros(3, np.float32)})
    assert everything(tmp_path) == before


async def test_a_version_that_somebody_is_writing_is_not_written_by_another(
    tmp_path: pathlib.Path,
) -> None:
    at_work = Versions(tmp_path, PosixDisk()).draft(ONE, metas_of(SOME), shard_bytes=1)
    heir = Filesystem(tmp_path)
    assert await heir.taken() == {ONE}
    with pytest.raises(ConfigError, match=r"r-1-1 is being written by somebody else"):
        await write(heir)
    at_work.discard()
    assert await heir.taken() == frozenset()
    await write(heir)


async def test_a_run_has_one_publisher_in_a_directory_until_it_closes(
    tmp_path: pathlib.Path,
) -> None:
    first, second = Filesystem(tmp_path).opened(), Filesystem(tmp_path).opened()
    await put(first)
    with pytest.raises(ConfigError, match=r"another publisher of this process .*run 'r' there: st"):
        await put(second, version=TWO)
    await put(second, version=PolicyVersion(run="other", step=1))
    await first.close()
    await put(second, version=TWO)
    await second.close()
    assert sorted(PosixDisk().names(tmp_path)) == ["other-1-1", "r-1-1", "r-2-1"]


async def test_a_publisher_that_went_on_beside_another_counts_when_that_is_gone(
    tmp_path: pathlib.Path,
) -> None:
    first, second, third = (Filesystem(tmp_path).opened() for _ in range(3))
    await put(first)
    await second.write(TWO, metas_of(SOME), buckets(SOME), supersedes=True)
    await first.close()
    with pytest.raises(ConfigError, match=r"another publisher of this process .*publisher-2\)"):
        await put(third, version=PolicyVersion(run="r", step=3))
    await second.close()
    (tmp_path / ".r.publisher-2").write_text("process 1 on a machine that was switched off\n")
    await put(third, version=PolicyVersion(run="r", step=3))
    await third.close()
    assert sorted(PosixDisk().names(tmp_path)) == ["r-1-1", "r-2-1", "r-3-1"]


async def test_a_publisher_that_nobody_has_any_more_holds_nothing(tmp_path: pathlib.Path) -> None:
    await put(Filesystem(tmp_path))
    for thread in threading.enumerate():
        if thread.name.startswith("genapi-files"):
            thread.join(20)
    gc.collect()
    await put(Filesystem(tmp_path), version=TWO)
    assert folders(tmp_path) == ["r-1-1", "r-2-1"]


class Unlocked(PosixDisk):
    """A file system without locks."""

    def lock(self, path: pathlib.Path, *, make: bool = True) -> int | None:
        path.touch()
        return None


async def test_without_locks_nobody_is_refused_and_nothing_is_written_over(
    tmp_path: pathlib.Path,
) -> None:
    first, second = (Filesystem(tmp_path, disk=Unlocked()) for _ in range(2))
    await put(first)
    before = everything(tmp_path)
    assert await second.taken() == {ONE}
    with pytest.raises(ConfigError, match="is a version already"):
        await put(second)
    assert everything(tmp_path) == before
    await put(second, version=TWO)
    await first.close()
    await second.close()
    assert folders(tmp_path) == ["r-1-1", "r-2-1"]


class Unsteady(PosixDisk):
    """Has no locks the first time that one is asked for."""

    asked = 0

    def lock(self, path: pathlib.Path, *, make: bool = True) -> int | None:
        self.asked += 1
        return super().lock(path, make=make) if self.asked > 1 else None


async def test_a_publisher_that_could_not_lock_its_own_file_is_told_who_publishes_all_the_same(
    tmp_path: pathlib.Path,
) -> None:
    first, second = Filesystem(tmp_path), Filesystem(tmp_path)
    await put(first)
    await second.write(TWO, metas_of(SOME), buckets(SOME), supersedes=True)
    await first.close()
    with pytest.raises(ConfigError, match="another publisher of this process"):
        await put(Filesystem(tmp_path, disk=Unsteady()), version=PolicyVersion(run="r", step=3))
    assert folders(tmp_path) == ["r-1-1", "r-2-1"]


ORPHANED = """
import os, sys
import anyio
from tests.unit.weights.test_filesystem import Filesystem, put

store = Filesystem(sys.argv[1])
anyio.run(put, store)
print("written", flush=True)
sys.stdin.readline()
begun, beginning = os.pipe()
if os.fork() == 0:
    os.write(beginning, b"-")
    sys.stdin.read()
    os._exit(0)
os.read(begun, 1)
os.kill(os.getpid(), 9)
"""


async def test_a_publisher_is_named_while_its_process_lives_and_what_it_forked_holds_nothing(
    tmp_path: pathlib.Path,
) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with anyio.fail_after(30):
        async with await anyio.open_process(
            [sys.executable, "-c", ORPHANED, str(tmp_path)], env=environment
        ) as other:
            assert other.stdin is not None
            assert other.stdout is not None
            assert (await other.stdout.receive()).startswith(b"written")
            with pytest.raises(ConfigError, match=rf"process {other.pid} on .* publishes run 'r'"):
                await write(Filesystem(tmp_path), version=TWO)
            await other.stdin.send(b"\n")
            assert await other.wait() == -9
            await write(Filesystem(tmp_path), version=TWO)
            await other.stdin.aclose()
    assert folders(tmp_path) == ["r-1-1", "r-2-1"]


KILLED = """
import os, pathlib, signal, sys
import anyio
from genapi.weights._disk import PosixDisk
from tests.unit.weights.test_filesystem import ONE, Filesystem, write

class Deadly(PosixDisk):
    def __init__(self, left):
        self.left = left

    def __getattribute__(self, name):
        if name not in ("left", "__class__", "__dict__"):
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__getattribute__(name)

folder, step = sys.argv[1], 0
while True:
    pid = os.fork()
    if pid == 0:
        anyio.run(write, Filesystem(f"{folder}/{step}", shard_bytes=8, disk=Deadly(step)))
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if not os.WIFSIGNALED(status):
        sys.exit(os.waitstatus_to_exitcode(status))
    step += 1
"""


async def test_a_writer_killed_at_any_step_leaves_no_marker_and_nothing_in_the_way(
    tmp_path: pathlib.Path,
) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    await anyio.run_process(command, env=environment)
    runs = [tmp_path / str(step) for step in range(len(folders(tmp_path)))]
    assert len(runs) > 20
    marked = [(run / "r-1-1" / "STABLE").exists() for run in runs]
    assert marked == sorted(marked)
    assert not marked[0]
    for run, is_marked in zip(runs, marked, strict=True):
        place = run / "r-1-1" if is_marked else await write(Filesystem(run, shard_bytes=8))
        names = folders(place)
        assert names[0] == "STABLE"
        assert folders(run) == ["r-1-1"]
        found = {name: tensor.tolist() for name, tensor in from_safetensors(place)}
        assert found == {"a": [[0, 1, 2], [3, 4, 5]], "b": [1, 1]}


class Halting(PosixDisk):
    """Holds the second writing until it is let go."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.writes = 0

    def write(self, file: int, data: bytes | memoryview, offset: int) -> None:
        self.writes += 1
        if self.writes == 2:
            self.reached.set()
            assert self.go_on.wait(20)
        super().write(file, data, offset)


async def test_a_writing_that_is_cancelled_stops_and_removes_what_it_wrote(
    tmp_path: pathlib.Path,
) -> None:
    disk = Halting()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write, Filesystem(tmp_path, disk=disk))
        await anyio.to_thread.run_sync(disk.reached.wait, 20)
        disk.go_on.set()
        tasks.cancel_scope.cancel()
    assert folders(tmp_path) == []
    assert disk.writes < 4


class Held(PosixDisk):
    """Holds one call until it is let go, and tells when the next lock was asked for."""

    def __init__(self, at: str) -> None:
        self.at = at
        self.reached, self.go_on, self.locked = (threading.Event() for _ in range(3))

    def _hold(self, here: str) -> None:
        if here == self.at:
            self.reached.set()
            assert self.go_on.wait(20)

    def free(self, path: pathlib.Path) -> int:
        self._hold("begin")
        return super().free(path)

    def lock(self, path: pathlib.Path, *, make: bool = True) -> int | None:
        try:
            return super().lock(path, make=make)
        finally:
            self.locked.set()

    def sync_directory(self, path: pathlib.Path) -> None:
        if (path / "STABLE").exists():
            self._hold("marked")
        super().sync_directory(path)


@pytest.mark.parametrize("at", ["begin", "marked"])
async def test_a_writing_that_is_cancelled_leaves_nothing_though_it_was_just_begun_or_all_written(
    at: str, tmp_path: pathlib.Path
) -> None:
    disk = Held(at)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write, Filesystem(tmp_path, disk=disk))
        assert await anyio.to_thread.run_sync(disk.reached.wait, 20)
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.wait_all_tasks_blocked()
            disk.go_on.set()
    assert await anyio.to_thread.run_sync(disk.locked.wait, 20)
    assert folders(tmp_path) == []


async def test_a_source_that_fails_half_way_leaves_nothing(tmp_path: pathlib.Path) -> None:
    async def failing() -> AsyncIterator[Bucket]:
        yield await anext(buckets(SOME))
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        await Filesystem(tmp_path).write(ONE, metas_of(SOME), failing())
    assert folders(tmp_path) == []


class Counted(PosixDisk):
    """Knows what is open, and may refuse to remove files of weights."""

    def __init__(self, *, refuses: bool) -> None:
        self.open: set[int] = set()
        self.refuses = refuses

    def create(self, path: pathlib.Path) -> int:
        file = super().create(path)
        self.open.add(file)
        return file

    def lock(self, path: pathlib.Path, *, make: bool = True) -> int | None:
        file = super().lock(path, make=make)
        if file is not None:
            self.open.add(file)
        return file

    def close(self, file: int) -> None:
        self.open.remove(file)
        super().close(file)

    def remove(self, path: pathlib.Path) -> None:
        if self.refuses and path.name.endswith(".safetensors"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        super().remove(path)


@pytest.mark.parametrize("what", ["the directory vanishes", "nothing can be removed"])
async def test_a_writing_that_fails_leaves_no_file_open(what: str, tmp_path: pathlib.Path) -> None:
    place = tmp_path / "w"
    disk = Counted(refuses=what == "nothing can be removed")

    async def failing() -> AsyncIterator[Bucket]:
        yield await anext(buckets(SOME))
        if not disk.refuses:
            shutil.rmtree(place)
        raise RuntimeError("no more")

    store = Filesystem(place, disk=disk).opened()
    for version in (ONE, TWO):
        with pytest.raises(RuntimeError, match="no more"):
            await store.write(version, metas_of(SOME), failing())
        assert len(disk.open) == 1  # by which it has the run
    await store.close()
    assert not disk.open


async def test_a_run_is_taken_anew_when_somebody_removed_the_directory(
    tmp_path: pathlib.Path,
) -> None:
    place = tmp_path / "w"
    first, second = Filesystem(place).opened(), Filesystem(place).opened()
    await put(first)
    shutil.rmtree(place)
    await put(first)
    with pytest.raises(ConfigError, match="another publisher of this process"):
        await put(second, version=TWO)
    shutil.rmtree(place)
    await put(second)
    with pytest.raises(ConfigError, match="another publisher of this process"):
        await put(first, version=TWO)
    await first.close()
    await second.close()
    assert PosixDisk().names(place) == ["r-1-1"]


def disk_with_root(room: int = 1 << 20) -> SimulatedDisk:
    return SimulatedDisk(room=room)


async def test_a_disk_that_is_too_small_is_told_before_anything_is_written() -> None:
    disk = disk_with_root(room=27)
    with pytest.raises(ConfigError, match=r"takes 28 bytes and 27 are free.*lower keep=1"):
        await write(Filesystem(ROOT, disk=disk))
    assert disk.names(ROOT) == []


@pytest.mark.parametrize(
    ("number", "kind", "text"),
    [
        (errno.ENOSPC, ConfigError, r"dir='/weights' is full .*No space left.*free some space"),
        (errno.EDQUOT, ConfigError, r"dir='/weights' is full"),
        (errno.EFBIG, ConfigError, r"dir='/weights': .*that large .*lower shard_bytes=\d+, raise"),
        (errno.ENAMETOOLONG, ConfigError, r"dir='/weights' cannot be a directory .*name another"),
        (errno.ENOENT, TransportError, r"dir='/weights': something was removed, .*mounted"),
        (errno.EACCES, ConfigError, r"dir='/weights' cannot be written .*the right to"),
        (errno.EROFS, ConfigError, r"dir='/weights' cannot be written"),
        (errno.EIO, TransportError, r"dir='/weights': .*Input/output error"),
    ],
)
async def test_what_the_system_refuses_names_the_directory_and_the_remedy(
    number: int, kind: type[Exception], text: str
) -> None:
    disk = disk_with_root()
    await write(Filesystem(ROOT, disk=disk), version=TWO)
    disk.refuses_at, disk.refusal = disk.steps + 20, number
    with pytest.raises(kind, match=text):
        await write(Filesystem(ROOT, disk=disk))
    assert disk.names(ROOT) == ["r-2-1"]


async def test_a_directory_that_is_not_mounted_is_not_made(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no directory .*gone; create or mount it"):
        await write(Filesystem(tmp_path / "gone" / "w"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="in the way of a directory"):
        await write(Filesystem(tmp_path / "file"))


@pytest.mark.parametrize("leads_to", ["gone", "w"])
async def test_a_link_that_leads_nowhere_is_told_with_the_remedy(
    leads_to: str, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "w").symlink_to(tmp_path / leads_to)
    store = Filesystem(tmp_path / "w")
    assert await store.taken() == frozenset()
    with pytest.raises(ConfigError, match=r"/w is a link that leads to no directory: make or moun"):
        await write(store)


async def test_a_link_that_leads_to_a_directory_is_written_to(tmp_path: pathlib.Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "w").symlink_to(tmp_path / "real")
    await write(Filesystem(tmp_path / "w"))
    assert folders(tmp_path / "real") == ["r-1-1"]


async def test_a_version_that_holds_a_folder_of_somebody_stays_as_it_is_and_the_others_go(
    tmp_path: pathlib.Path,
) -> None:
    store = Filesystem(tmp_path)
    versions = [PolicyVersion(run="r", step=step) for step in range(4)]
    for version in versions:
        await write(store, version=version)
    for name in ("r-1-1", "r-9-1"):
        (tmp_path / name / "mine").mkdir(parents=True)
        (tmp_path / name / "mine" / "notes").write_text("the only copy")
    (tmp_path / "r-9-1" / ".writing").touch()
    (tmp_path / "r-9-1" / "model.safetensors").write_text("half")
    before = everything(tmp_path / "r-1-1"), everything(tmp_path / "r-9-1")
    with pytest.raises(ConfigError, match=r"not genapi's: '.*/r-1-1/mine'\): move it elsewhere"):
        await store.tidy(versions[3], frozenset())
    assert folders(tmp_path) == ["r-1-1", "r-3-1", "r-9-1"]
    await write(store, version=PolicyVersion(run="r", step=4))
    assert (everything(tmp_path / "r-1-1"), everything(tmp_path / "r-9-1")) == before


async def test_a_base_that_is_no_model_directory_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"is no model directory: it has no config\.json"):
        await write(Filesystem(tmp_path / "w", base=tmp_path))
    assert not (tmp_path / "w").exists()


def test_tensors_that_a_file_cannot_hold_are_refused_by_name() -> None:
    def refused(**fields: Any) -> Any:
        meta = TensorMeta(**({"name": "w", "dtype": "float32", "shape": (2,)} | fields))
        return Filesystem("/w").check([meta], in_process=False)

    with pytest.raises(ConfigError, match=r"'w' is complex128, which safetensors files"):
        refused(dtype="complex128")
    with pytest.raises(ConfigError, match="called '__metadata__'"):
        refused(name="__metadata__")
    refused()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"dir": "w"}, r"dir='w' is not absolute"),
        ({"dir": "/w", "worker_dir": "w"}, r"worker_dir='w' is not absolute"),
        ({"dir": "/a\0b"}, r"dir='/a\\x00b' cannot be a path: pass text without NUL"),
        ({"dir": "/\ud800"}, r"dir='/\\ud800' cannot be a path"),
        ({"dir": "/w", "worker_dir": "/\0"}, r"worker_dir='/\\x00' cannot be a path"),
        ({"dir": "/w", "base": "/\0"}, r"base='/\\x00' cannot be a path"),
        ({"dir": "/w", "keep": 0}, r"keep=0: pass a whole number"),
        ({"dir": "/w", "shard_bytes": 0}, r"shard_bytes=0: pass"),
        ({"dir": "/w", "bucket_bytes": 0}, r"bucket_bytes=0: pass"),
    ],
)
def test_settings_that_cannot_be_are_refused_at_once(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Filesystem(**settings)


def test_neither_torch_nor_safetensors_is_imported_to_write_files(tmp_path: pathlib.Path) -> None:
    code = """
import sys, anyio
from tests.unit.weights.test_filesystem import Filesystem, write
anyio.run(write, Filesystem(sys.argv[1]))
assert not {"torch", "safetensors"} & set(sys.modules)
"""
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "w")],
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (tmp_path / "w" / "r-1-1" / "STABLE").exists()
