"""Weights written into a directory that workers load them from: no group, no rank, no bucket.

The rule of this file: the event loop waits and threads do the work. Whatever a file system
refuses is an error that names the directory and the remedy, before anybody is paused.
"""

import errno
import threading
from collections.abc import AsyncIterable, Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from os import PathLike, fsencode, fspath
from pathlib import Path, PurePosixPath
from typing import TypeVar

import anyio

from genapi.errors import ConfigError, TransportError
from genapi.types.policy import PolicyVersion
from genapi.weights._claims import Claims
from genapi.weights._disk import Disk, PosixDisk
from genapi.weights._layout import check_storable
from genapi.weights._threads import run_in_thread
from genapi.weights._versions import Draft, Versions, name_of
from genapi.weights.base import Bucket, TensorMeta, check_limits, check_whole

__all__ = ("Filesystem",)

T = TypeVar("T")

_GRACE_S = 5.0
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_RIGHT = {errno.EACCES, errno.EPERM, errno.EROFS}
_WEIGHTS = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
)
"""Endings of files that hold weights, in whatever form: those of `base` are not copied."""
_CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class Filesystem:
    """Weights through files: each version is a model directory, which workers are told to load.

    It is written, made durable and marked while the fleet serves. There is no group: a failure
    reaches one worker, and SGLang's replicas (`--dp-size`) can be published to as well. Needs no
    torch.

    Attributes:
        dir: an absolute directory that every worker can read, under the same path or that of
            `worker_dir`. It is made where it is missing, the one above it is not.
        worker_dir: the path of `dir` on the workers' machines; None = the same.
        base: a model directory; what it holds beside weights (configuration, tokenizer) is copied
            into each version, so that a server can be started from it. None = the weights alone,
            which is all that a running engine asks for.
        keep: how many versions stay after a commit, the committed one included, and of each step
            only its newest attempt. What a worker may still be reading stays besides.
        shard_bytes: most bytes per file; one larger tensor goes alone.
        stage_bytes: most bytes held in memory.
        bucket_bytes: most bytes written at a time.
        bucket_tensors: most tensors written at a time.
        disk: what is asked of the file system, for tests to fail in its place.

    Raises:
        ConfigError: a path that is not absolute, or a limit under which nothing could be written.
    """

    dir: str | PathLike[str]
    _: KW_ONLY
    worker_dir: str | None = None
    base: str | PathLike[str] | None = None
    keep: int = 1
    shard_bytes: int = 4 << 30
    stage_bytes: int = 1 << 30
    bucket_bytes: int = 256 << 20
    bucket_tensors: int = 1024
    disk: Disk = field(default_factory=PosixDisk, repr=False, compare=False)
    _claims: Claims = field(default_factory=Claims, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_limits(self)
        for name in ("keep", "shard_bytes"):
            check_whole(self, name, least=1)
        for name in ("dir", "worker_dir", "base"):
            given = getattr(self, name)
            if given is None and name != "dir":
                continue
            if not isinstance(given, str | PathLike):
                raise ConfigError(f"{name}={given!r}: pass the path of a directory")
            path = fspath(given)
            if not _may_be_path(path):
                raise ConfigError(f"{name}={path!r} cannot be a path: pass text without NUL bytes")
            if name != "base" and not PurePosixPath(path).is_absolute():
                raise ConfigError(
                    f"{name}={path!r} is not absolute; workers would look for it elsewhere"
                )

    def check(self, manifest: Sequence[TensorMeta], *, in_process: bool) -> None:
        """Refuse what a safetensors file cannot hold.

        Raises:
            ConfigError: it names the tensor.
        """
        del in_process
        check_storable(manifest)

    def opened(self) -> "Filesystem":
        """This directory as one publisher has it, until it closes it or is gone."""
        return replace(self)

    async def close(self) -> None:
        """Let other publishers publish the same run here."""
        await self._in_thread(self._claims.close)

    async def taken(self) -> AbstractSet[PolicyVersion]:
        """Versions that cannot be written, because something has their names already.

        Raises:
            ConfigError: the directory cannot be read.
            TransportError: the file system failed.
        """
        return await self._in_thread(self._versions.taken)

    async def write(
        self,
        version: PolicyVersion,
        manifest: Sequence[TensorMeta],
        buckets: AsyncIterable[Bucket],
        *,
        supersedes: bool = False,
    ) -> str:
        """Write one version, durably; the path that workers are told to load.

        Whatever goes wrong, and when it is cancelled, what was written is removed again.

        Args:
            version: what its directory is named after; none has that name yet.
            manifest: every tensor.
            buckets: them, in that order.
            supersedes: whether to go on beside another publisher of the run that lives, as the
                board says that it was superseded. What is not of this publisher then stays.

        Raises:
            ConfigError: the directory cannot be written, is full, `base` is no model directory, the
                name is taken, or another publisher of the same run lives: it is named.
            TransportError: the file system failed.
        """
        begun = _Begun(partial(self._begin, version, manifest, supersedes=supersedes))
        try:
            draft = await self._in_thread(begun.make)
            async for bucket in buckets:
                await self._in_thread(partial(draft.add, bucket))
            await self._in_thread(partial(self._finish, draft))
        except BaseException:
            begun.give_up()
            with anyio.move_on_after(_GRACE_S, shield=True), suppress(OSError):
                await run_in_thread(begun.discard, name="genapi-files-discard")
            raise
        self._claims.written.add(version)
        return str(PurePosixPath(self.worker_dir or fspath(self.dir)) / name_of(version))

    async def discard(self, version: PolicyVersion) -> None:
        """Remove one version that nobody was told to load; one that is not there is removed.

        Raises:
            ConfigError: it may not be removed.
            TransportError: the file system failed.
        """
        await self._in_thread(partial(self._versions.discard, version))

    async def tidy(self, committed: PolicyVersion, needed: AbstractSet[PolicyVersion]) -> None:
        """Remove versions that nobody needs any more.

        Args:
            committed: what the fleet serves.
            needed: what a worker may be reading.

        Raises:
            ConfigError: they may not be removed.
            TransportError: the file system failed.
        """
        await self._in_thread(partial(self._tidy, committed, needed))

    @property
    def _versions(self) -> Versions:
        return Versions(Path(self.dir), self.disk)

    def _begin(
        self, version: PolicyVersion, manifest: Sequence[TensorMeta], *, supersedes: bool
    ) -> Draft:
        if self.base is not None and not self.disk.is_file(Path(self.base) / _CONFIG):
            raise ConfigError(
                f"base={fspath(self.base)!r} is no model directory: it has no {_CONFIG}"
            )
        directory = Path(self.dir)
        if not self.disk.is_directory(directory.parent):
            raise ConfigError(
                f"dir={fspath(self.dir)!r}: there is no directory {directory.parent}; create or "
                "mount it"
            )
        versions = self._versions
        versions.prepare(version)
        total = sum(meta.nbytes for meta in manifest)
        free = self.disk.free(directory)
        if free < total:
            raise self._full(f"a version takes {total} bytes and {free} are free")
        rival = self._claims.take(self.disk, directory, version.run, beside=supersedes)
        if rival is not None:
            raise ConfigError(
                f"dir={fspath(self.dir)!r}: {rival} publishes run {version.run!r} there: stop or "
                "close it, publish under another run= or into another directory, or share a board= "
                "with it to supersede it"
            )
        return versions.draft(version, manifest, shard_bytes=self.shard_bytes)

    def _tidy(self, committed: PolicyVersion, needed: AbstractSet[PolicyVersion]) -> None:
        alone = self._claims.rival(self.disk, Path(self.dir), committed.run) is None
        among = None if alone else frozenset(self._claims.written)
        self._versions.tidy(committed, needed=needed, keep=self.keep, among=among)

    def _finish(self, draft: Draft) -> None:
        draft.finish(self._beside())

    def _beside(self) -> Mapping[str, Callable[[], bytes]]:
        """What `base` has beside weights: names, and what reads them."""
        if self.base is None:
            return {}
        files = sorted(Path(self.base).iterdir())
        return {
            file.name: file.read_bytes
            for file in files
            if file.is_file() and not file.name.startswith(".") and not file.name.endswith(_WEIGHTS)
        }

    def _full(self, why: str) -> ConfigError:
        return ConfigError(
            f"dir={fspath(self.dir)!r} is full ({why}): free some space, lower keep={self.keep}, "
            "or name a directory on a larger file system"
        )

    async def _in_thread(self, function: Callable[[], T]) -> T:
        with self._named():
            return await run_in_thread(function, name="genapi-files")

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Turn what the system says into errors of genapi's that name the directory."""
        try:
            yield
        except OSError as error:
            where = f"dir={fspath(self.dir)!r}"
            if error.errno in _FULL:
                raise self._full(str(error)) from error
            if error.errno == errno.EFBIG:
                raise ConfigError(
                    f"{where}: a file may not be that large there ({error}): lower "
                    f"shard_bytes={self.shard_bytes}, raise the limit of this process "
                    "(ulimit -f), or name a directory on another file system"
                ) from error
            if error.errno == errno.EISDIR:
                raise ConfigError(
                    f"{where}: not all is removed ({error}): move it elsewhere"
                ) from error
            if error.errno in _NO_RIGHT:
                raise ConfigError(
                    f"{where} cannot be written ({error}): give this process the right to, or name "
                    "another directory"
                ) from error
            if error.errno in (errno.ENOTDIR, errno.EEXIST):
                raise ConfigError(f"{where} is in the way of a directory ({error})") from error
            if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
                raise ConfigError(
                    f"{where} cannot be a directory ({error}): name another one"
                ) from error
            if error.errno == errno.ENOENT:
                raise TransportError(
                    f"{where}: something was removed, or cannot be made ({error}); look whether it "
                    "is mounted",
                    phase="not_sent",
                ) from error
            raise TransportError(f"{where}: {error}", phase="not_sent") from error


def _may_be_path(path: object) -> bool:
    try:
        return isinstance(path, str) and b"\0" not in fsencode(path)
    except UnicodeEncodeError:
        return False


class _Begun:
    """A draft that a thread begins, also when nobody waits for it any more."""

    def __init__(self, begin: Callable[[], Draft]) -> None:
        self._begin = begin
        self._draft: Draft | None = None
        self._unwanted = threading.Event()
        self._beginning = threading.Lock()

    def make(self) -> Draft:
        """Begin; whoever gives up before or meanwhile finds the draft when it discards."""
        with self._beginning:
            if self._unwanted.is_set():
                raise TransportError("nothing is written: it was given up", phase="not_sent")
            self._draft = self._begin()
            return self._draft

    def give_up(self) -> None:
        """Have whoever writes stop, and begin nothing."""
        self._unwanted.set()
        if self._draft is not None:
            self._draft.give_up()

    def discard(self) -> None:
        """Remove what was begun; waits for whoever begins or writes."""
        with self._beginning:
            if self._draft is not None:
                self._draft.discard()
