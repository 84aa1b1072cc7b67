"""A version that is marked is whole, whenever the machine fails and whatever its disk kept."""

import pathlib
from collections.abc import AsyncIterator, Sequence

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import genapi
from genapi import PolicyVersion
from genapi.publication.digest import manifest_digest
from genapi.weights import Filesystem, TensorMeta
from genapi.weights._versions import Versions, name_of, removable, version_of
from genapi.weights.base import Bucket
from tests.support.simulated_disk import PowerCut, SimulatedDisk
from tests.support.weight_sources import metas, pairs

DIR = pathlib.Path("/weights")
TENSORS = metas((3, 2), (5,), (), (0, 4), (2, 2))
FIRST, SECOND = PolicyVersion(run="r", step=1), PolicyVersion(run="r", step=2)
AGAIN = PolicyVersion(run="r", step=2, attempt=2)
SHARD = 32


def store(disk: SimulatedDisk) -> Filesystem:
    return Filesystem(DIR, shard_bytes=SHARD, disk=disk)


async def each(manifest: Sequence[TensorMeta]) -> AsyncIterator[Bucket]:
    for meta, (_, tensor) in zip(manifest, pairs(manifest), strict=True):
        yield Bucket((meta,), (tensor,))


async def write(disk: SimulatedDisk, version: PolicyVersion = FIRST) -> None:
    one = store(disk)
    try:
        place = await one.write(version, TENSORS, each(TENSORS))
    finally:
        await one.close()
    assert place == f"/weights/{name_of(version)}"


async def publish_twice(disk: SimulatedDisk) -> None:
    """Two versions, the second once more as after a restart, and what is older removed."""
    await write(disk)
    await write(disk, SECOND)
    one = store(disk)
    assert SECOND in await one.taken()
    try:
        await one.write(AGAIN, TENSORS, each(TENSORS))
        await one.tidy(AGAIN, {AGAIN})
    finally:
        await one.close()


async def write_next(disk: SimulatedDisk) -> PolicyVersion:
    """Another attempt of the first step, whatever there is of it."""
    taken = await store(disk).taken()
    attempt = 1 + max([v.attempt for v in taken if v.step == FIRST.step], default=0)
    version = FIRST.model_copy(update={"attempt": attempt})
    await write(disk, version)
    return version


def folders(disk: SimulatedDisk) -> list[str]:
    if not disk.is_directory(DIR):
        return []
    return [name for name in disk.names(DIR) if disk.is_directory(DIR / name)]


def content(disk: SimulatedDisk, version: PolicyVersion) -> dict[str, bytes]:
    place = DIR / name_of(version)
    return {name: disk.read(place / name) for name in disk.names(place)}


def steps_of(procedure: object) -> int:
    disk = SimulatedDisk()
    anyio.run(procedure, disk)  # type: ignore[arg-type]
    return disk.steps


WHOLE = SimulatedDisk()
anyio.run(write, WHOLE)
STEPS = steps_of(publish_twice)


def test_a_version_is_a_model_directory_and_its_marker_says_which_tensors_it_has() -> None:
    files = content(WHOLE, FIRST)
    assert sorted(files) == [
        "STABLE",
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    assert files["STABLE"].decode() == manifest_digest(TENSORS) + "\n"
    second = files["model-00002-of-00003.safetensors"][-24:]
    assert np.frombuffer(second, np.float32).tolist() == [1, 1, 1, 1, 1, 2]


@given(at=st.integers(0, STEPS - 1), seed=st.integers(0, 2**32))
def test_whatever_a_failing_machine_kept_what_is_marked_is_whole(at: int, seed: int) -> None:
    disk = SimulatedDisk(fails_at=at)
    with pytest.raises(PowerCut):
        anyio.run(publish_twice, disk)
    disk.restart(seed)
    whole = content(WHOLE, FIRST)
    for name in folders(disk):
        version = version_of(name)
        assert version is not None
        files = content(disk, version)
        if "STABLE" in files:
            files.pop(".writing", None)
            assert files == whole
    # Whoever comes next removes what is not whole, and is not kept from writing.
    assert content(disk, anyio.run(write_next, disk)) == whole
    for name in folders(disk):
        assert disk.is_file(DIR / name / "STABLE") or not disk.names(DIR / name)


@given(at=st.integers(1, STEPS), number=st.sampled_from([5, 28]))
def test_whatever_the_system_refuses_is_an_error_and_leaves_nothing_unmarked(
    at: int, number: int
) -> None:
    disk = SimulatedDisk()
    disk.refuses_at, disk.refusal = at, number
    try:
        anyio.run(publish_twice, disk)
    except genapi.GenAPIError as error:
        assert "/weights" in str(error)  # noqa: PT017 - it may also have been got over
    assert not disk.is_open
    anyio.run(write_next, disk)
    for name in folders(disk):
        assert disk.is_file(DIR / name / "STABLE") or not disk.names(DIR / name)


versions = st.builds(
    PolicyVersion,
    run=st.sampled_from(["r", "s"]),
    step=st.integers(0, 6),
    attempt=st.integers(1, 3),
)


@given(st.sets(versions), versions, st.sets(versions), st.integers(1, 4))
def test_what_serves_what_is_read_and_the_newest_stay_and_nothing_else_of_the_run_that_is_older(
    stable: set[PolicyVersion], committed: PolicyVersion, needed: set[PolicyVersion], keep: int
) -> None:
    removed = set(removable(stable | {committed}, committed, needed=needed, keep=keep))
    kept = (stable | {committed}) - removed
    assert committed in kept
    assert not removed & needed

    def place(version: PolicyVersion) -> tuple[int, int]:
        return version.step, version.attempt

    own = [
        v for v in stable | {committed} if v.run == committed.run and place(v) <= place(committed)
    ]
    steps = sorted({v.step for v in own})[-keep:]
    newest = {max((v for v in own if v.step == step), key=place) for step in steps}
    assert newest <= kept
    assert removed == set(own) - newest - needed


def test_versions_of_somebody_else_and_other_names_are_left_alone() -> None:
    disk = SimulatedDisk()
    anyio.run(write, disk)
    for name in ("notes", "r-1", "r-01-1", "r-1-0", "a b-1-1"):
        disk.make_directory(DIR / name)
        assert version_of(name) is None
    assert Versions(DIR, disk).stable() == [FIRST]
    anyio.run(store(disk).tidy, PolicyVersion(run="other", step=9), frozenset())
    assert "r-1-1" in disk.names(DIR)
