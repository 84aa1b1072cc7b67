"""What is asked of a file system to make a directory durable: `Disk`.

The rule of this file: one method is one thing that a machine may fail before, after or within.
Nothing is durable before it was synced: the bytes of a file by `sync`, the names in a directory
by `sync_directory`.
"""

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol

__all__ = ("Disk", "PosixDisk")

_NO_DIRECTORY_SYNC = {errno.EINVAL, errno.ENOTSUP}


_locked: set[int] = set()


def _keep_no_locks() -> None:
    """In a process that was forked off: a lock is its parent's, and ends with it.

    The numbers stay taken, so that whoever closes them closes nothing else.
    """
    if _locked:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for file in _locked:
            os.dup2(nothing, file, inheritable=False)
        os.close(nothing)
        _locked.clear()


os.register_at_fork(after_in_child=_keep_no_locks)


class Disk(Protocol):
    """A file system. Every method raises `OSError` as the system call does."""

    def free(self, path: Path) -> int:
        """Bytes that may still be written there."""
        ...

    def names(self, path: Path) -> list[str]:
        """What a directory holds."""
        ...

    def is_file(self, path: Path) -> bool:
        """Whether there is such a file."""
        ...

    def is_directory(self, path: Path) -> bool:
        """Whether there is such a directory."""
        ...

    def is_link(self, path: Path) -> bool:
        """Whether that name stands for another place."""
        ...

    def make_directory(self, path: Path) -> None:
        """Make one that is not there; the one above it is."""
        ...

    def create(self, path: Path) -> int:
        """A new, empty file, opened for writing."""
        ...

    def write(self, file: int, data: bytes | memoryview, offset: int) -> None:
        """Put all of `data` there."""
        ...

    def sync(self, file: int) -> None:
        """Make the file's bytes durable."""
        ...

    def close(self, file: int) -> None:
        """Close it, and let go of its lock."""
        ...

    def lock(self, path: Path, *, make: bool = True) -> int | None:
        """A file, locked until it is closed; None = this file system has no locks.

        Args:
            path: its name, which is no link.
            make: whether it is made where it is missing.

        Raises:
            BlockingIOError: somebody else has locked it.
        """
        ...

    def is_called(self, file: int, path: Path) -> bool:
        """Whether an open file is what has that name still."""
        ...

    def read(self, path: Path) -> bytes:
        """All that a small file holds."""
        ...

    def rename(self, old: Path, new: Path) -> None:
        """Give a file the name of another, at once."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file."""
        ...

    def remove_directory(self, path: Path) -> None:
        """Remove a directory that is empty."""
        ...

    def sync_directory(self, path: Path) -> None:
        """Make durable which names a directory holds."""
        ...


class PosixDisk:
    """The file system of this machine, local or mounted."""

    def free(self, path: Path) -> int:
        """Bytes that this user may still write there."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def names(self, path: Path) -> list[str]:
        """What a directory holds."""
        return os.listdir(path)  # noqa: PTH208 - the names alone

    def is_file(self, path: Path) -> bool:
        """Whether there is such a file."""
        return path.is_file()

    def is_directory(self, path: Path) -> bool:
        """Whether there is such a directory."""
        return path.is_dir()

    def is_link(self, path: Path) -> bool:
        """Whether that name stands for another place."""
        return path.is_symlink()

    def make_directory(self, path: Path) -> None:
        """Make one that is not there."""
        path.mkdir()

    def create(self, path: Path) -> int:
        """A new, empty file, opened for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, file: int, data: bytes | memoryview, offset: int) -> None:
        """Put all of `data` there."""
        left = memoryview(data)
        while left:
            written = os.pwrite(file, left, offset)
            left, offset = left[written:], offset + written

    def sync(self, file: int) -> None:
        """Make the file's bytes durable."""
        os.fsync(file)

    def close(self, file: int) -> None:
        """Close it, and let go of its lock."""
        _locked.discard(file)
        os.close(file)

    def lock(self, path: Path, *, make: bool = True) -> int | None:
        """A file that nobody else has locked, which ends with this process at the latest."""
        how = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if make else 0)
        while True:
            file = os.open(path, how, 0o644)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self.is_called(file, path):
                    _locked.add(file)
                    return file
            except BlockingIOError:
                os.close(file)
                raise
            except OSError:
                os.close(file)
                return None
            os.close(file)  # removed by who had it, between the two calls

    def is_called(self, file: int, path: Path) -> bool:
        """Whether an open file is what has that name still."""
        try:
            return os.path.samestat(os.fstat(file), path.lstat())
        except FileNotFoundError:
            return False

    def read(self, path: Path) -> bytes:
        """All that a small file holds."""
        return path.read_bytes()

    def rename(self, old: Path, new: Path) -> None:
        """Give a file the name of another, at once."""
        old.rename(new)

    def remove(self, path: Path) -> None:
        """Remove a file; one that somebody else removed is gone."""
        path.unlink(missing_ok=True)

    def remove_directory(self, path: Path) -> None:
        """Remove a directory that is empty."""
        with suppress(FileNotFoundError):
            path.rmdir()

    def sync_directory(self, path: Path) -> None:
        """Make durable which names a directory holds, where that can be asked for."""
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY_SYNC:
                raise
        finally:
            os.close(directory)
