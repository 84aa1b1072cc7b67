"""How a fleet is reached: `FleetConfig`, its target, keys, retries and time limits.

The rule of this file: a configuration travels (pickle, JSON, TOML) and never carries a secret.
Keys are references that are looked up where they are used.
"""

import tomllib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self
from urllib.parse import parse_qsl, unquote, urlsplit

import tomli_w
from pydantic import Field, GetCoreSchemaHandler, StrictBool, model_validator
from pydantic_core import CoreSchema, core_schema

from genapi.errors import ConfigError
from genapi.shown import after_user_info
from genapi.types.address import host_port
from genapi.types.arguments import Index, Seconds
from genapi.types.base import Value
from genapi.types.board import parse_board
from genapi.types.ids import Role
from genapi.types.policy import RunName

__all__ = (
    "FleetConfig",
    "HiddenText",
    "Key",
    "PublishTimeouts",
    "RetryPolicy",
    "Target",
    "Topology",
    "base_url",
    "parse_target",
)

_REFERENCES = ("env:", "file:")
_QUERY = {"workers", "discovery"}  # discovery: a port, host:port or URL of the list of workers
_MAX_PORT = 65535


class Key:
    """An API key: a reference (`env:NAME`, `file:PATH`) or a literal that never leaves memory.

    Its repr never shows a literal; dumping or pickling a literal raises `ConfigError`.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        if "\n" in text or "\r" in text:
            message = "an API key has a line break in it; strip it from the variable or file"
            raise ConfigError(message)
        self._text = text

    @property
    def is_reference(self) -> bool:
        """Whether this names where the key is, instead of being it."""
        return self._text.startswith(_REFERENCES)

    @property
    def reference(self) -> str:
        """The reference.

        Raises:
            ConfigError: the key is a literal, which may not be written anywhere.
        """
        if not self.is_reference:
            message = (
                "a literal API key cannot be dumped or pickled; "
                "configure a reference such as 'env:GENAPI_KEY' or 'file:/run/secrets/key'"
            )
            raise ConfigError(message)
        return self._text

    def reveal(self) -> str:
        """The text as given: the reference, or the literal key."""
        return self._text

    def __repr__(self) -> str:
        return f"Key({self._text!r})" if self.is_reference else "Key('**********')"

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reference,)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def parse(value: Any) -> Key:
            if isinstance(value, Key):
                return value
            if not isinstance(value, str):
                message = f"a key is text or a reference, got {type(value).__name__}"
                raise ValueError(message)  # noqa: TRY004 - pydantic wants ValueError
            return cls(value)

        return core_schema.no_info_plain_validator_function(
            parse,
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda key: key.reference
            ),
        )


class HiddenText(Key):
    """What a variable may hold, held as a key is: it is in no header, so that any text will do."""

    __slots__ = ()

    def __init__(self, text: str) -> None:
        self._text = text


class Topology(Value):
    """The exact workers a fleet has to have before it is ready; None = not checked.

    Attributes:
        workers: how many workers.
        roles: how many of each role.
        world_size: how many ranks all workers have together.
    """

    workers: Annotated[int, Field(ge=1, strict=True), Index] | None = None
    roles: Mapping[Role, Annotated[int, Field(ge=0, strict=True), Index]] | None = None
    world_size: Annotated[int, Field(ge=1, strict=True), Index] | None = None


class RetryPolicy(Value):
    """When a generation is sent again. Weight updates are never retried.

    Attributes:
        max_attempts: sendings in all, the first included.
        backoff_s: first wait; doubles each time.
        max_backoff_s: longest own wait.
        jitter: fraction by which a wait is randomly shortened, 0 to 1.
        max_retry_after_s: a server that asks for a longer wait is not asked again.
        retry_lost_replies: send again when the request may have run (with a new wire id, after
            the old one was aborted).
    """

    max_attempts: Annotated[int, Field(ge=1, strict=True), Index] = 3
    backoff_s: Seconds = 0.5
    max_backoff_s: Seconds = 8.0
    jitter: Annotated[float, Field(ge=0, le=1, strict=True)] = 0.25
    max_retry_after_s: Annotated[float, Field(ge=0, strict=True)] = 120.0
    retry_lost_replies: StrictBool = True


class PublishTimeouts(Value):
    """Bounds of a publication's phases, in seconds."""

    preflight_s: Seconds = 30.0
    stage_s: Seconds = 600.0
    group_s: Seconds = 60.0
    pause_s: Seconds = 120.0
    confirm_s: Seconds = 30.0
    begin_s: Seconds = 60.0
    transfer_s: Seconds = 600.0
    finish_s: Seconds = 300.0
    label_s: Seconds = 30.0
    verify_s: Seconds = 30.0
    checksum_s: Seconds = 300.0
    probe_s: Seconds = 300.0
    resume_s: Seconds = 60.0
    cleanup_s: Seconds = 15.0
    restart_s: Seconds = 600.0


class Target(Value):
    """A parsed target.

    Attributes:
        provider: which engine's protocol is spoken.
        carrier: `http`, or `embedded` for engines inside this process.
        requests: base URLs that requests go to.
        workers: base URLs that administration goes to, in rank order; empty = discovered.
        discovery: how workers are found when not listed: `dns:...`, `file:...`, `discover`.
        listing: base URL of the list of workers, where the target names it.
        routed: whether requests go to a router that is not itself a worker.
        query: every query parameter as given.
    """

    provider: str
    carrier: Literal["http", "embedded"] = "http"
    requests: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    discovery: str | None = None
    listing: str | None = None
    routed: bool = False
    query: Mapping[str, str] = Field(default_factory=dict)


def base_url(address: str, *, scheme: str) -> str:
    """`scheme://host:port/prefix` of an address, without a trailing slash or `/v1`.

    Raises:
        ConfigError: not http(s), no host, user info, a bad port, or a port that is missing.
    """
    text = address if "://" in address else f"{scheme}://{address}"
    shown = after_user_info(address)
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        why = f" ({error})" if shown == address else ""
        message = f"address {shown!r} is not host:port{why}"
        raise ConfigError(message) from None
    if parts.scheme not in ("http", "https"):
        message = f"address {shown!r} is not http or https; write host:port"
        raise ConfigError(message)
    if not parts.hostname:
        message = f"address {shown!r} names no host; write host:port"
        raise ConfigError(message)
    if parts.username or parts.password or parts.query or parts.fragment:
        message = f"address of {parts.hostname!r} may not hold user info, a query or a fragment"
        raise ConfigError(message)
    if port is None or not 0 < port <= _MAX_PORT:
        message = f"address {shown!r} names no port; write {parts.hostname}:PORT"
        raise ConfigError(message)
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{host_port(parts.hostname, port)}{path}"


def _split(addresses: str, scheme: str) -> tuple[str, ...]:
    parts = [part.strip() for part in addresses.split(",")]
    urls = tuple(base_url(part, scheme=scheme) for part in parts if part)
    if len(set(urls)) != len(urls):
        message = f"{addresses!r} names one address twice; every worker is listed once"
        raise ConfigError(message)
    return urls


def parse_target(text: str) -> Target:
    """The parts of a target such as `vllm://w1:8001,w2:8001` or `vllm://router:80?workers=...`.

    Raises:
        ConfigError: the target cannot be read; the message names the part and the remedy.
    """
    head, separator, rest = text.partition("://")
    if not separator:
        message = f"target {text!r} has no scheme; write for example vllm://127.0.0.1:8000"
        raise ConfigError(message)
    name, _, secure = head.partition("+")
    if not name or secure not in ("", "https", "http"):
        message = f"target scheme {head!r} is not PROVIDER or PROVIDER+https"
        raise ConfigError(message)
    if name in ("http", "https"):
        shown = after_user_info(rest)
        secured = "+https" if name == "https" else ""
        message = (
            f"target {name}://{shown} names no provider; write for example vllm{secured}://{shown}"
        )
        raise ConfigError(message)
    scheme = secure or "http"
    addresses, _, query_text = rest.partition("?")
    query = _query(query_text)
    if name == "embedded":
        return Target(provider=query.get("protocol", "vllm"), carrier="embedded", query=query)
    unknown = sorted(query.keys() - _QUERY)
    if unknown:
        message = f"target {text!r} has unknown parameters {unknown}; known are {sorted(_QUERY)}"
        raise ConfigError(message)
    requests = _split(unquote(addresses), scheme)
    if not requests:
        message = f"target {text!r} names no address; write {name}://HOST:PORT"
        raise ConfigError(message)
    workers, listing = query.get("workers"), _listing(query, requests[0])
    if workers is None:
        return Target(
            provider=name, requests=requests, workers=requests, listing=listing, query=query
        )
    if workers == "discover" or workers.startswith(("dns:", "file:")):
        return Target(
            provider=name,
            requests=requests,
            discovery=workers,
            listing=listing,
            routed=True,
            query=query,
        )
    listed = _split(workers, scheme)
    if not listed:
        message = f"workers={workers!r} names no address; write workers=HOST:PORT,..."
        raise ConfigError(message)
    return Target(provider=name, requests=requests, workers=listed, routed=True, query=query)


def _listing(query: Mapping[str, str], frontend: str) -> str | None:
    """Where `discovery=` says that workers are listed; a port alone is one of the frontend's host.

    Raises:
        ConfigError: it is no address.
    """
    given = query.get("discovery")
    if given is None:
        return None
    parts = urlsplit(frontend)
    if given.isdecimal():
        given = host_port(parts.hostname or "", given)
    return base_url(given, scheme=parts.scheme)


def _query(text: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text))
    except ValueError:
        message = f"query {text!r} of the target is not name=value&..."
        raise ConfigError(message) from None
    query = dict(pairs)
    if len(query) != len(pairs):
        message = f"query {text!r} of the target names one parameter twice"
        raise ConfigError(message)
    return query


class FleetConfig(Value):
    """Everything another process needs to reach the same fleet.

    Attributes:
        target: such as `vllm://w1:8001,w2:8001`.
        model: the served model's name; None = the only one that the workers serve.
        run: the training run whose versions count; None = taken from the first publication.
        board: URL of the version board; None = none.
        api_key: key of the request plane.
        admin_api_key: key of the administration plane; without it `api_key` is used there, but
            only towards an origin that also gets requests.
        allowed_origins: origins that may get `admin_api_key`, over plain HTTP without a warning,
            besides those on hosts that the target names: where a list of workers names others. In
            one, `*` may be the port, the host, what is before a name (`https://*.pods.example:*`)
            or numbers of an IPv4 address (`http://10.1.*.*:*`).
        discovery_url: where workers are listed, when it cannot be derived.
        expect: the topology the fleet has to have.
        max_in_flight: most requests at once from this process; None = no limit.
        connect_timeout_s: bound on one TCP and TLS connect.
        idle_timeout_s: longest silence between two chunks of a stream; None = none.
        admin_timeout_s: bound on one read of the administration plane.
        refresh_s: how long what is known of the workers stays good.
        retry: when a generation is sent again.
        strict: logprob holes, ignored options and raw scores at temperature != 1 are errors.
    """

    target: str
    model: str | None = None
    run: RunName | None = None
    board: str | None = None
    api_key: Key | None = None
    admin_api_key: Key | None = None
    allowed_origins: tuple[str, ...] = ()
    discovery_url: str | None = None
    expect: Topology | None = None
    max_in_flight: Annotated[int, Field(ge=1, strict=True), Index] | None = None
    connect_timeout_s: Seconds = 30.0
    idle_timeout_s: Seconds | None = None
    admin_timeout_s: Seconds = 30.0
    refresh_s: Seconds = 5.0
    retry: RetryPolicy = RetryPolicy()
    strict: StrictBool = False

    @model_validator(mode="after")
    def _readable(self) -> Self:
        parse_target(self.target)
        if self.board is not None:
            parse_board(self.board)
        return self

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """The configuration that `to_toml` wrote."""
        return cls.model_validate(tomllib.loads(text))

    def to_toml(self) -> str:
        """The configuration as TOML; what is not set is left out.

        Raises:
            ConfigError: a key is given literally, which may not be written anywhere.
        """
        for key in (self.api_key, self.admin_api_key):
            if key is not None:
                _ = key.reference
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))

    @property
    def parsed(self) -> Target:
        """The target in parts."""
        return parse_target(self.target)
