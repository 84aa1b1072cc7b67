"""The board: its record and the record's JSON, and its address.

The record is what a publisher tells every other process. The rule of this file: a record that
cannot be read whole is an error, never a guess. Fields that only a newer writer knows are left
out; a format that only it knows is refused.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from pydantic import Field, ValidationError, model_validator

from genapi.errors import ConfigError, ReplyError
from genapi.shown import after_user_info
from genapi.types.base import Value
from genapi.types.policy import ContextRule, PolicyVersion, RunName, parse_label
from genapi.types.worker import Fence

__all__ = (
    "BoardAddress",
    "BoardPhase",
    "BoardState",
    "BoardWorker",
    "decode_board",
    "encode_board",
    "parse_board",
)

_FORMAT = 1
_REDIS_PORT = 6379
_REDIS_QUERY = {"key", "password", "username"}

BoardPhase = Literal["idle", "publishing", "held"]
"""`idle`: no publication is open; `publishing`: one is; `held`: one ended without a commit."""


class BoardWorker(Value):
    """One worker that the last publication concerned.

    Attributes:
        id: the text of its `WorkerId`.
        fence: why it gets no traffic; None = its publisher found no reason.
    """

    id: Annotated[str, Field(min_length=1)]
    fence: Fence | None = None


class BoardState(Value):
    """What one publisher says of a fleet. It outlives the publisher.

    A publication is open from before its first BEGIN until its version is proved: `target` is what
    the workers are being moved to. Whoever finds one open whose holder is gone recovers first.

    Attributes:
        run: the run that `committed` belongs to; None until one is known.
        epoch: counts the holders; it only grows.
        phase: `idle`, `publishing` or `held`; `target` is None exactly when it is `idle`.
        committed: the newest version that was proved on every worker; None = UNKNOWN.
        context: what is guaranteed about the context of its tokens.
        final: whether `committed` is the last version: its publisher was closed, and nobody has
            taken the board since.
        target: the version that workers may hold in part; it may be of an earlier run.
        workers: the workers of the publication that is open, else of the last one.
        holder: names the publisher: host, process and a mark of its own.
        since: when the phase began, in seconds of the holder's wall clock. For people: nothing is
            ordered by it.
    """

    run: RunName | None = None
    epoch: Annotated[int, Field(ge=0, strict=True)]
    phase: BoardPhase = "idle"
    committed: PolicyVersion | None = None
    context: ContextRule = "unknown"
    final: Annotated[bool, Field(strict=True)] = False
    target: PolicyVersion | None = None
    workers: tuple[BoardWorker, ...] = ()
    holder: Annotated[str, Field(min_length=1)]
    since: Annotated[float, Field(ge=0, strict=True)] = 0.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.phase == "idle") != (self.target is None):
            message = f"phase {self.phase!r} does not go with target {self.target}"
            raise ValueError(message)
        if self.committed is not None and self.committed.run != self.run:
            message = f"{self.committed} is not of run {self.run!r}"
            raise ValueError(message)
        if self.final and (self.committed is None or self.target is not None):
            message = f"final does not go with committed {self.committed}, target {self.target}"
            raise ValueError(message)
        ids = [worker.id for worker in self.workers]
        if len(set(ids)) != len(ids):
            message = f"a worker is named twice: {ids}"
            raise ValueError(message)
        return self

    def fence_of(self, worker: str) -> Fence | None:
        """Why the worker with this id gets no traffic; None = nothing is said against it."""
        return next((w.fence for w in self.workers if w.id == worker), None)


def encode_board(state: BoardState) -> bytes:
    """The state as one line of JSON. A worker without a fence is a plain string in it."""
    return json.dumps(
        {
            "format": _FORMAT,
            "run": state.run,
            "epoch": state.epoch,
            "phase": state.phase,
            "committed": _label(state.committed),
            "context": state.context,
            "final": state.final,
            "target": _label(state.target),
            "workers": [_worker(worker) for worker in state.workers],
            "holder": state.holder,
            "since": state.since,
        },
        separators=(",", ":"),
    ).encode()


def decode_board(data: bytes, *, source: str = "the board") -> BoardState:
    """The state that `encode_board` wrote, also if a newer genapi wrote more fields.

    Args:
        data: the JSON.
        source: where it was read, for messages.

    Raises:
        ReplyError: it is no such state, or of a format that this genapi does not know.
    """
    try:
        return _decode(data, source)
    except RecursionError:
        raise ReplyError(f"{source} holds a record that is nested too deeply", body=data) from None


def _decode(data: bytes, source: str) -> BoardState:
    try:
        raw = json.loads(data)
    except ValueError as error:
        raise ReplyError(f"{source} holds no JSON ({error})", body=data) from None
    if not isinstance(raw, dict) or "format" not in raw:
        raise ReplyError(f"{source} does not hold a board's record", body=data)
    if raw["format"] != _FORMAT or isinstance(raw["format"], bool):
        message = f"{source} has format {raw['format']!r}, this genapi reads {_FORMAT}; update it"
        raise ReplyError(message, body=data)
    try:
        return BoardState.model_validate(
            {
                "run": raw["run"],
                "epoch": raw["epoch"],
                "phase": raw["phase"],
                "committed": _version(raw["committed"]),
                "context": raw["context"],
                "final": raw["final"],
                "target": _version(raw["target"]),
                "workers": _read_workers(raw["workers"]),
                "holder": raw["holder"],
                "since": raw["since"],
            }
        )
    except KeyError as error:
        raise ReplyError(f"{source} has no {error}", body=data) from None
    except (TypeError, ValidationError, ValueError) as error:
        raise ReplyError(f"{source} holds a broken record: {error}", body=data) from None


def _label(version: PolicyVersion | None) -> str | None:
    return None if version is None else version.label


def _version(label: object) -> PolicyVersion | None:
    version = parse_label(label)
    if version is None and label is not None:
        message = f"{label!r} names no version"
        raise ValueError(message)
    return version


def _worker(worker: BoardWorker) -> str | dict[str, Any]:
    if worker.fence is None:
        return worker.id
    return {"id": worker.id, "fence": worker.fence.model_dump(mode="json")}


def _read_workers(raw: object) -> tuple[BoardWorker, ...]:
    if not isinstance(raw, list):
        message = f"workers are a list, not {raw!r}"
        raise ValueError(message)  # noqa: TRY004 - as pydantic's own
    return tuple(_read_worker(worker) for worker in raw)


def _read_worker(raw: str | Mapping[str, Any]) -> BoardWorker:
    if isinstance(raw, str):
        return BoardWorker(id=raw)
    fence = raw["fence"]
    if fence is not None:
        fence = {name: fence[name] for name in Fence.model_fields}
    return BoardWorker.model_validate({"id": raw["id"], "fence": fence})


class BoardAddress(Value):
    """A parsed board URL.

    Attributes:
        scheme: which kind of board; `rediss` is Redis over TLS.
        path: the directory of a `file:` board.
        host: where the Redis server is.
        port: its port.
        db: the number of its database.
        key: the key that holds the record.
        username: who logs in.
        password: a reference to the password: `env:NAME` or `file:PATH`.
    """

    scheme: Literal["file", "redis", "rediss"]
    path: str = ""
    host: str = ""
    port: Annotated[int, Field(gt=0, le=65535)] = _REDIS_PORT
    db: Annotated[int, Field(ge=0)] = 0
    key: str = "genapi:board"
    username: str | None = None
    password: str | None = None


def parse_board(url: str) -> BoardAddress:
    """The parts of a board's URL: `file:/shared/board` or `redis://host:6379/0?key=NAME`.

    A password is a reference, as in `redis://host?username=me&password=env:REDIS_PASSWORD`: the
    URL travels with a fleet's configuration.

    Raises:
        ConfigError: the URL cannot be read; the message names the part and the remedy.
    """
    shown = after_user_info(url)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise ConfigError(f"board {shown!r} is no URL ({error})") from None
    match parts.scheme:
        case "file":
            return _file_address(url, host, parts.path)
        case "redis" | "rediss" as scheme:
            if not host or parts.username is not None or parts.password is not None:
                raise ConfigError(
                    f"board {shown!r} is not redis://HOST:PORT/DB; a user name and a password are "
                    "written ?username=NAME&password=env:VARIABLE"
                )
            return BoardAddress(
                scheme=scheme,
                host=host,
                port=port or _REDIS_PORT,
                db=_database(shown, parts.path),
                **_redis_query(parts.query),
            )
        case _:
            raise ConfigError(
                f"board scheme {parts.scheme!r} is not known; write file:/DIRECTORY or "
                "redis://HOST:PORT/DB"
            )


def _file_address(url: str, host: str, escaped: str) -> BoardAddress:
    if host or not escaped.startswith("/") or "?" in url or "#" in url:
        raise ConfigError(f"board {url!r} is not file:/DIRECTORY with an absolute path")
    try:
        path = unquote(escaped, errors="strict")
        path.encode()
    except UnicodeError as error:
        raise ConfigError(f"board {url!r} names no path: {error}") from None
    if "\0" in path:
        raise ConfigError(f"board {url!r} names no path: there is a NUL in it")
    return BoardAddress(scheme="file", path=path)


def _database(shown: str, path: str) -> int:
    number = path.strip("/")
    if number and not (number.isascii() and number.isdecimal()):
        raise ConfigError(f"board {shown!r}: database {number!r} is not a number")
    return int(number or 0)


def _redis_query(text: str) -> dict[str, Any]:
    try:
        pairs = parse_qsl(text, strict_parsing=bool(text))
    except ValueError:
        raise ConfigError("the query of the board's URL is not name=value&...") from None
    query = dict(pairs)
    unknown = sorted(query.keys() - _REDIS_QUERY)
    if unknown or len(query) != len(pairs):
        raise ConfigError(
            f"the board's URL may have each of {sorted(_REDIS_QUERY)} once; it also has "
            f"{unknown or 'one twice'}"
        )
    if not query.get("password", "env:").startswith(("env:", "file:")):
        raise ConfigError(
            "the board's URL travels, so that its password is a reference: env:NAME or file:PATH"
        )
    return query
