"""Versions of weights in a directory: written, made durable, then marked, and removed.

    DIR/<run>-<step>-<attempt>/    one version: a model directory as Hugging Face lays it out
        model-00001-of-00002.safetensors ...   model.safetensors.index.json   config.json ...
        STABLE        the marker, with the digest of the manifest: everything else is durable
        .writing      the first file there, locked by whoever writes; free, and no marker: left

The rule of this file: it blocks, in a thread of its own, and at every moment the marker is there
only if all that it vouches for is durable. So the marker comes last and goes first. And at every
moment one of the two is there, durably, beside anything else: a directory that has neither, or is a
link, is not genapi's and stays as it is. A name that is taken is never taken again.
"""

import errno
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path

from genapi.errors import ConfigError, TransportError
from genapi.publication.digest import manifest_digest
from genapi.types.policy import PolicyVersion
from genapi.weights._disk import Disk
from genapi.weights._layout import INDEX, index_of, plan_shards
from genapi.weights._tensors import bytes_of
from genapi.weights.base import Bucket, TensorMeta

__all__ = ("MARKER", "Draft", "Versions", "name_of", "version_of")

MARKER = "STABLE"

_LOCK = ".writing"
_DRAFT = f"{MARKER}.draft"
_NAME = re.compile(r"(.+)-(0|[1-9][0-9]{0,17})-([1-9][0-9]{0,17})")
_PIECE = 16 << 20
"""How much is written between two looks at whether that is still wanted."""
_TRIES = 8


def name_of(version: PolicyVersion) -> str:
    """The name of a version's directory."""
    return f"{version.run}-{version.step}-{version.attempt}"


def version_of(name: str) -> PolicyVersion | None:
    """The version that a directory of this name holds; None = it is no version's."""
    match = _NAME.fullmatch(name)
    if match is None or re.fullmatch(r"[A-Za-z0-9._-]+", match[1]) is None:
        return None
    return PolicyVersion(run=match[1], step=int(match[2]), attempt=int(match[3]))


class Versions:
    """All versions in one directory."""

    def __init__(self, directory: Path, disk: Disk) -> None:
        self._directory = directory
        self._disk = disk

    def prepare(self, version: PolicyVersion) -> None:
        """Make the directory, and remove what a writer of that version that died has left."""
        if self._directory.name in self._disk.names(self._directory.parent):
            if self._disk.is_link(self._directory) and not self._disk.is_directory(self._directory):
                raise ConfigError(
                    f"{self._directory} is a link that leads to no directory: make or mount what "
                    "it leads to"
                )
        else:
            self._disk.make_directory(self._directory)
            self._disk.sync_directory(self._directory.parent)
        self._remove_if_left(version)

    def draft(
        self, version: PolicyVersion, manifest: Sequence[TensorMeta], *, shard_bytes: int
    ) -> "Draft":
        """Begin to write a version.

        Raises:
            ConfigError: its name is taken.
        """
        place = self._directory / name_of(version)
        for _ in range(_TRIES):
            try:
                self._disk.make_directory(place)
            except FileExistsError:
                if not self._is_free(place):
                    raise self._taken(place) from None
            try:
                lock = self._disk.lock(place / _LOCK)
            except FileNotFoundError:
                continue  # an empty one that somebody was removing
            except BlockingIOError:
                raise self._taken(place) from None
            draft = Draft(self._disk, place, manifest, shard_bytes=shard_bytes, lock=lock)
            try:
                self._disk.sync_directory(place)
                alone = self._disk.names(place) == [_LOCK]
            except BaseException:
                draft.let_go()
                raise
            if alone:
                return draft
            draft.let_go()
            raise self._taken(place)
        raise TransportError(f"{place} is removed again and again", phase="not_sent")

    def taken(self) -> set[PolicyVersion]:
        """Versions whose names are taken, by whatever it is, once all that was left is removed."""
        if not self._disk.is_directory(self._directory):
            return set()
        for version in self._found():
            self._remove_if_left(version)
        return {v for v in self._found() if not self._is_free(self._directory / name_of(v))}

    def discard(self, version: PolicyVersion) -> None:
        """Remove a version, if it is there; an empty directory is none."""
        place = self._directory / name_of(version)
        if place.name in self._disk.names(self._directory) and not self._is_free(place):
            if not {MARKER, _LOCK} & {*(self._names_in(place) or [])}:
                raise self._taken(place)
            self._remove(version)

    def stable(self) -> list[PolicyVersion]:
        """Versions that are whole."""
        return [version for version in self._found() if self._is_stable(version)]

    def tidy(
        self,
        committed: PolicyVersion,
        *,
        needed: AbstractSet[PolicyVersion],
        keep: int,
        among: AbstractSet[PolicyVersion] | None,
    ) -> None:
        """Remove versions of the same run but those of the newest `keep` steps up to `committed`.

        Args:
            committed: what the fleet serves, which stays.
            needed: what a worker may be reading, which stays as well.
            keep: of how many steps the newest attempt stays, `committed` included.
            among: the only ones to remove, as others are somebody else's; None = all may go.
        """
        stable = [v for v in self.stable() if among is None or v in among]
        failed: OSError | None = None
        for version in removable(stable, committed, needed=needed, keep=keep):
            try:
                self._remove(version)
            except BlockingIOError:
                continue  # somebody else does
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _found(self) -> list[PolicyVersion]:
        found = map(version_of, self._disk.names(self._directory))
        return [version for version in found if version is not None]

    def _is_stable(self, version: PolicyVersion) -> bool:
        place = self._directory / name_of(version)
        return not self._disk.is_link(place) and self._disk.is_file(place / MARKER)

    def _names_in(self, place: Path) -> list[str] | None:
        """What is in a directory; None = it is none."""
        if self._disk.is_link(place) or not self._disk.is_directory(place):
            return None
        return self._disk.names(place)

    def _is_free(self, place: Path) -> bool:
        """Whether a version may be written there: an empty directory was left, or is nobody's."""
        return self._names_in(place) == []

    def _taken(self, place: Path) -> ConfigError:
        """Why a version cannot be written there."""
        names = self._names_in(place) or []
        if MARKER in names:
            why = "is a version already, which workers may be loading: publish another attempt of "
            return ConfigError(f"{place} {why}the step, or the next one")
        if _LOCK in names:
            why = "is being written by somebody else, or was left by a writer that died: publish "
            return ConfigError(f"{place} {why}another attempt of the step, or the next one")
        return ConfigError(
            f"{place} is not genapi's, and in the way of the version of that name: move it away, "
            "or publish under another run= or into another directory"
        )

    def _remove_if_left(self, version: PolicyVersion) -> None:
        """Remove one that is neither marked nor being written, where that can be known and done."""
        place = self._directory / name_of(version)
        lock = None
        try:
            if self._disk.is_link(place) or self._is_stable(version):
                return
            lock = self._disk.lock(place / _LOCK, make=False)
            if lock is not None and not self._is_stable(version):
                _check_plain(self._disk, place)
                _remove(self._disk, place)
        except OSError:
            return
        finally:
            if lock is not None:
                self._disk.close(lock)

    def _remove(self, version: PolicyVersion) -> None:
        """Remove one that is genapi's."""
        place = self._directory / name_of(version)
        _check_plain(self._disk, place)
        lock = self._disk.lock(place / _LOCK)
        try:
            _remove(self._disk, place)
        finally:
            if lock is not None:
                self._disk.close(lock)


def _check_plain(disk: Disk, place: Path) -> None:
    """Raise where a version holds a directory, which is none of genapi's: it stays as it is."""
    for name in disk.names(place):
        if disk.is_directory(place / name) and not disk.is_link(place / name):
            raise IsADirectoryError(
                errno.EISDIR, "a version holds a directory that is not genapi's", str(place / name)
            )


def _remove(disk: Disk, place: Path) -> None:
    """Remove a directory whose `.writing` is locked, and says whose it is to the last."""
    disk.sync_directory(place)
    disk.remove(place / MARKER)
    disk.sync_directory(place)
    for name in disk.names(place):
        if name != _LOCK:
            disk.remove(place / name)
    disk.sync_directory(place)
    disk.remove(place / _LOCK)
    try:
        disk.remove_directory(place)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # somebody else writes there now
            raise


def removable(
    stable: Iterable[PolicyVersion],
    committed: PolicyVersion,
    *,
    needed: AbstractSet[PolicyVersion],
    keep: int,
) -> list[PolicyVersion]:
    """Which whole versions nobody needs any more; those of other runs, and newer ones, stay.

    Of one step only the newest attempt counts and stays: those before it did not commit.
    """
    place = (committed.step, committed.attempt)
    older = [v for v in stable if v.run == committed.run and (v.step, v.attempt) < place]
    newest = {committed.step: committed}
    for version in sorted(older, key=lambda v: (v.step, v.attempt), reverse=True):
        newest.setdefault(version.step, version)
    kept = [*newest.values()][:keep]
    return [version for version in older if version not in kept and version not in needed]


class Draft:
    """One version that is being written, from whatever threads."""

    def __init__(
        self,
        disk: Disk,
        place: Path,
        manifest: Sequence[TensorMeta],
        *,
        shard_bytes: int,
        lock: int | None,
    ) -> None:
        self._disk = disk
        self._place = place
        self._lock = lock
        self._digest = manifest_digest(manifest)
        self._shards = plan_shards(manifest, shard_bytes=shard_bytes)
        self._slots = iter(
            [
                (shard, start, number + 1)
                for shard in self._shards
                for number, (_, start) in enumerate(shard.starts)
            ]
        )
        self._open: int | None = None
        self._unwanted = threading.Event()
        self._working = threading.Lock()

    def give_up(self) -> None:
        """Have whoever writes stop. From any thread; it is `discard` that removes what is there."""
        self._unwanted.set()

    def add(self, bucket: Bucket) -> None:
        """Write the next tensors, in the order of the manifest; a file that is full is durable."""
        with self._working:
            for tensor in bucket.tensors:
                shard, start, number = next(self._slots)
                if self._open is None:
                    self._open = self._disk.create(self._place / shard.name)
                    self._put(self._open, shard.head, 0)
                self._put(self._open, bytes_of(tensor), start)
                if number == len(shard.starts):
                    self._close(self._open)

    def finish(self, files: Mapping[str, Callable[[], bytes]]) -> None:
        """Write what else belongs to it, and mark it when all of it is durable.

        Args:
            files: name and content.
        """
        with self._working:
            index = index_of(self._shards)
            if index is not None:
                self._write(INDEX, index)
            for name, content in files.items():
                self._write(name, content())
            self._disk.sync_directory(self._place)
            self._disk.sync_directory(self._place.parent)
            self._write(_DRAFT, self._digest.encode() + b"\n")
            self._disk.rename(self._place / _DRAFT, self._place / MARKER)
            self._disk.sync_directory(self._place)
            self._disk.remove(self._place / _LOCK)
            self.let_go()

    def discard(self) -> None:
        """Remove it, marked or not, so that it takes no space; waits for whoever writes."""
        with self._working:
            try:
                if self._lock is None:
                    self._lock = self._disk.lock(self._place / _LOCK)
                _remove(self._disk, self._place)
            finally:
                self.let_go()

    def _write(self, name: str, content: bytes) -> None:
        self._open = self._disk.create(self._place / name)
        self._put(self._open, content, 0)
        self._close(self._open)

    def _put(self, file: int, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        for begin in range(0, len(view), _PIECE):
            if self._unwanted.is_set():
                raise TransportError(f"{self._place} was given up", phase="not_sent")
            self._disk.write(file, view[begin : begin + _PIECE], offset + begin)

    def _close(self, file: int) -> None:
        self._disk.sync(file)
        self._open = None
        self._disk.close(file)

    def let_go(self) -> None:
        """Leave what is there to whoever comes next."""
        for file in (self._open, self._lock):
            if file is not None:
                with suppress(OSError):  # closed is what it is all the same
                    self._disk.close(file)
        self._open = self._lock = None
