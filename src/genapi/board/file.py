"""`FileBoard`: a board in a directory, also one that several hosts mount over NFS.

Every writing of the record is a file of its own, named by its generation and never changed:

    00000000000000000007.record
    00000000000000000008.record             the newest: this is the record
    .00000000000000000009-<nonce>.draft     somebody is about to write generation 9

A writer makes its draft durable and then links it to the name of the next generation. `link`
fails if the name is taken, on the server and whatever a client has cached, so that one writer
wins; there is no lock that a dead writer could leave behind. What a link call returns is not
trusted (a repeated NFS call fails after the first one succeeded): the nonce in the file decides.

Old generations are removed, and a writer that slept all the while could link one of them anew. It
changes nothing, since the newest file is never removed and readers take no other. The writer finds
out: either its file is the newest, or the next one names the nonce that it follows.

The rule of this file: it blocks, in a thread, one operation of a board at a time; and whatever
step a writer dies at, what is left can be read and written to.
"""

import errno
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import anyio
from anyio import to_thread

from genapi.board.base import NOTHING, Reading, Token
from genapi.errors import ConfigError, Phase, ReplyError, TransportError
from genapi.types.arguments import seconds
from genapi.types.board import BoardState, decode_board, encode_board

__all__ = ("FileBoard",)

T = TypeVar("T")

_KEPT = 32
"""How many generations stay: a writer that is slower than so many others is told "unknown"."""

_READS = 16
"""How often a reader looks again when the file that it was about to read was removed."""

_RECORD = re.compile(r"(\d{20})\.record")
_DRAFT = re.compile(r"\.(\d{20})-[0-9a-f]{32}\.draft")
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}
_NOT_HERE = {
    errno.EACCES,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}
_GONE = {errno.ENOENT, errno.ESTALE}
_NO_DIRECTORY_SYNC = {errno.EINVAL, errno.ENOTSUP}


class _Record(NamedTuple):
    token: Token
    after: str
    state: BoardState


class FileBoard:
    """A board in a directory. Every host that mounts it may use it.

    The directory is made by the first write; the one above it has to be there. The file system
    has to have hard links: local ones and NFS do.
    """

    def __init__(self, path: str | os.PathLike[str], *, timeout_s: float = 10.0) -> None:
        """Touch nothing yet.

        Args:
            path: the board's own directory, absolute, since other processes are elsewhere.
            timeout_s: bound on one operation.

        Raises:
            ConfigError: it is no path, or not an absolute one, or the bound is none.
        """
        try:
            is_path = b"\0" not in os.fsencode(path)
        except (TypeError, UnicodeError):
            is_path = False
        if not is_path:
            raise ConfigError(f"board directory {path!r} is no path that a file system can have")
        self._directory = Path(path)
        self._timeout_s = seconds("timeout_s", timeout_s)
        # A call that was given up may still be at work: the next one waits for it.
        self._one = threading.Lock()
        if not self._directory.is_absolute():
            raise ConfigError(
                f"board directory {os.fspath(path)!r} is not absolute; other processes would look "
                "for it elsewhere"
            )

    def __repr__(self) -> str:
        return f"FileBoard({os.fspath(self._directory)!r})"

    async def read(self) -> Reading:
        """The newest record."""
        return await self._in_thread(self._read, phase="not_sent")

    async def compare_and_set(self, token: Token, new: BoardState) -> Token | None:
        """Write `new` if the record is still the one that `token` was read with."""
        return await self._in_thread(partial(self._swap, token, new), phase="may_have_run")

    async def aclose(self) -> None:
        """Do nothing: no file stays open between two operations."""

    async def _in_thread(self, operation: Callable[[], T], *, phase: Phase) -> T:
        limit_s = self._timeout_s
        start = threading.Lock()  # taken by whoever is first: the operation, or giving up

        def work() -> T:
            if not self._one.acquire(timeout=limit_s):
                raise self._late("not_sent")
            try:
                if not start.acquire(blocking=False):
                    raise self._late("not_sent")
                return operation()
            finally:
                self._one.release()

        alone = anyio.CapacityLimiter(1)  # threads that others keep busy are not waited for
        try:
            with anyio.move_on_after(limit_s):
                return await to_thread.run_sync(work, abandon_on_cancel=True, limiter=alone)
        finally:
            started = not start.acquire(blocking=False)
        raise self._late(phase if started else "not_sent")

    def _late(self, phase: Phase) -> TransportError:
        message = (
            f"board {self._directory}: the file system did not answer in {self._timeout_s:g} s"
        )
        return TransportError(message, phase=phase)

    # ------------------------------------------------------------------ in a thread

    def _read(self) -> Reading:
        record = self._record()
        return Reading(record.state, record.token) if record else Reading(None, NOTHING)

    def _record(self) -> _Record | None:
        with self._named("not_sent"):
            for _ in range(_READS):
                newest = self._newest()
                if newest == 0:
                    return None
                record = self._load(newest)
                if record is not None:
                    return record
        message = f"board {self._directory}: every file found was removed before it could be read"
        raise TransportError(message, phase="not_sent")

    def _newest(self) -> int:
        """The highest generation there is; opening the directory makes NFS ask the server."""
        try:
            names = [entry.name for entry in self._directory.iterdir()]
        except FileNotFoundError:
            if self._directory.is_symlink() and not self._directory.exists():
                message = (
                    f"board {self._directory}: it is a link to '{self._directory.readlink()}', "
                    "where nothing is; create or mount that directory"
                )
                raise ConfigError(message) from None
            if self._directory.parent.is_dir():
                return 0
            message = (
                f"board {self._directory}: there is no directory {self._directory.parent}; "
                "create or mount it"
            )
            raise ConfigError(message) from None
        return max((int(m[1]) for m in map(_RECORD.fullmatch, names) if m), default=0)

    def _load(self, generation: int) -> _Record | None:
        path = self._path(generation)
        try:
            data = path.read_bytes()
        except IsADirectoryError:
            raise ReplyError(f"{path} is a directory, and no record of a board") from None
        except OSError as error:
            if error.errno in _GONE:
                return None
            raise
        head, separator, body = data.partition(b"\n")
        match head.split():
            case [b"genapi-board", number, nonce, *after] if (
                separator and number == b"%d" % generation and len(after) <= 1
            ):
                state = decode_board(body, source=str(path))
                past = after[0].decode("ascii", "replace") if after else ""
                return _Record(Token(generation, nonce.decode("ascii", "replace")), past, state)
        raise ReplyError(f"{path} does not hold generation {generation} of a board", body=data)

    def _swap(self, expected: Token, new: BoardState) -> Token | None:
        record = self._record()
        if (record.token if record else NOTHING) != expected:
            return None
        mine = Token(expected.generation + 1, uuid.uuid4().hex)
        draft = self._directory / f".{mine.generation:020}-{mine.nonce}.draft"
        head = f"genapi-board {mine.generation} {mine.nonce} {expected.nonce}".rstrip()
        with self._named("not_sent"):
            self._make_directory()
            try:
                _write_durably(draft, head.encode() + b"\n" + encode_board(new) + b"\n")
                won = self._link(draft, mine)
            except FileNotFoundError:
                # Drafts of generations that are there are removed, and so may whole boards be.
                return None
            finally:
                with suppress(OSError):
                    draft.unlink()
        if won:
            self._tidy(mine.generation)
        return mine if won else None

    def _make_directory(self) -> None:
        try:
            self._directory.mkdir()
            _sync_directory(self._directory.parent)
        except FileExistsError:
            pass
        except FileNotFoundError:
            message = (
                f"board {self._directory}: no directory can be made in {self._directory.parent}; "
                "put the board elsewhere"
            )
            raise ConfigError(message) from None

    def _link(self, draft: Path, mine: Token) -> bool:
        failure: OSError | None = None
        try:
            os.link(draft, self._path(mine.generation))
        except OSError as error:
            failure = error
        if failure is not None and failure.errno in _NO_LINKS:
            raise ConfigError(
                f"board {self._directory}: the file system has no hard links ({failure.strerror}); "
                "put the board on another one, or use a redis:// board"
            )
        with self._named("may_have_run"):
            return self._is_record(mine, failure)

    def _is_record(self, mine: Token, failure: OSError | None) -> bool:
        """Whether the generation that was just linked is this writer's, and counts."""
        newest = self._newest()
        record = self._load(mine.generation)
        if record is not None and record.token != mine:
            return False
        if newest > mine.generation:
            follower = self._load(mine.generation + 1)
            if follower is None:
                raise self._overtaken(mine, newest)
            if follower.after != mine.nonce:
                return False
        elif record is None:
            raise failure or self._overtaken(mine, newest)
        _sync_directory(self._directory)
        return True

    def _overtaken(self, mine: Token, newest: int) -> TransportError:
        message = (
            f"board {self._directory}: generation {mine.generation} was overtaken, {newest} is the "
            "newest; whether it was this writer's cannot be seen any more"
        )
        return TransportError(message, phase="may_have_run")

    def _tidy(self, newest: int) -> None:
        """Remove old generations, and drafts that came too late or whose writers died."""
        with suppress(OSError):
            for path in self._directory.iterdir():
                record, draft = _RECORD.fullmatch(path.name), _DRAFT.fullmatch(path.name)
                old = record is not None and int(record[1]) <= newest - _KEPT
                late = draft is not None and int(draft[1]) <= newest
                if old or late:
                    path.unlink(missing_ok=True)

    def _path(self, generation: int) -> Path:
        return self._directory / f"{generation:020}.record"

    @contextmanager
    def _named(self, phase: Phase) -> Iterator[None]:
        """Turn what the system says into errors of genapi's that name the board."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            message = f"board {self._directory}: {error.strerror}"
            if error.errno in _NOT_HERE:
                raise ConfigError(message) from error
            raise TransportError(message, phase=phase) from error


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(directory)
