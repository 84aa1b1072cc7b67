"""Which key goes where, and where keys are read from.

A key is given to an origin, never to whoever answers:

    address asked            keys configured       what it gets
    requests go there        api_key               api_key
    administration, the      admin_api_key         admin_api_key
    origin of requests       api_key only          api_key
    administration, any      admin_api_key         admin_api_key
    other origin             api_key only          nothing
    administration, a        both                  api_key
    route that takes the     one of them           as above
    key of requests
    administration, where    any                   nothing
    only a list names it

Only a list names a host that is not in the configuration: not that of requests, of a worker in the
target, or of the list itself, and in no allowed origin. Whoever writes the list, or answers in its
place, could name any address. Ports are not looked at, since a list is there to tell them; all
names of this host are one where the configuration names one of them.

A reference to a variable that is unset or blank means no key, and then no Authorization header at
all. A file that is named has to be there; a blank one means no key.
The rule of this file: a key leaves it as a header and in no other way.
"""

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NoReturn, Self

from genapi.errors import ConfigError
from genapi.types.config import FleetConfig, Key, base_url
from genapi.wire.http import Grant
from genapi.wire.origin import host_of, is_loopback, origin, origins_like

__all__ = ("Credentials", "Grant", "admin_grant", "data_grant", "looked_up", "resolve")

_log = logging.getLogger(__name__)
_IN_PROCESS = "memory://"


def data_grant(url: str, *, request_origins: Iterable[str]) -> Grant | None:
    """Which key a request to `url` carries; None = none."""
    return "data" if origin(url) in {*request_origins} else None


def admin_grant(
    url: str,
    *,
    request_origins: Iterable[str],
    has_admin_key: bool,
    is_named: bool,
    wants_data_key: bool = False,
) -> Grant | None:
    """Which key an administration call to `url` carries; None = none.

    Args:
        url: where the call goes.
        request_origins: where requests go.
        has_admin_key: whether there is a key for administration alone.
        is_named: whether the configuration names its host, or allows the origin.
        wants_data_key: whether the route takes the key of requests, and there is one.
    """
    if has_admin_key and is_named:
        return "data" if wants_data_key else "admin"
    return data_grant(url, request_origins=request_origins)


def looked_up(key: Key, *, environment: Mapping[str, str]) -> str | None:
    """The text itself, whatever is in it; None when there is none, or a blank one.

    Raises:
        ConfigError: a file that cannot be read.
    """
    text = key.reveal()
    if key.is_reference:
        kind, _, name = text.partition(":")
        if not name:
            raise ConfigError(f"{key!r} names nothing; write {kind}:NAME")
        text = environment.get(name, "") if kind == "env" else _file_text(key, name)
    return text if text.strip() else None


def resolve(key: Key | None, *, environment: Mapping[str, str]) -> str | None:
    """The key itself; None when there is none to send.

    Raises:
        ConfigError: a file that cannot be read, a line break or another character that a header
            cannot carry. The message names the reference, never the key.
    """
    text = None if key is None else looked_up(key, environment=environment)
    if text is None:
        return None
    text = text.strip(" \t")
    if not (text.isascii() and text.isprintable()):
        raise ConfigError(
            f"{key!r} holds a line break or another character that a header cannot carry"
        )
    return text


def _file_text(key: Key, path: str) -> str:
    # A text file ends in a line feed; a line break anywhere else is a mistake.
    try:
        return Path(path).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{key!r} cannot be read: {reason}") from None


class Credentials:
    """The keys of one fleet, read once, and the headers that carry them.

    Refuses to be pickled; its repr shows no key.
    """

    def __init__(
        self,
        *,
        data_key: str | None = None,
        admin_key: str | None = None,
        request_origins: Iterable[str] = (),
        named: Iterable[str] = (),
        allowed_origins: Iterable[str] = (),
    ) -> None:
        """Hold the keys.

        Args:
            data_key: the key of requests.
            admin_key: the key of administration.
            request_origins: where requests go.
            named: URLs whose hosts the configuration names.
            allowed_origins: patterns of further origins that may get a key.

        Raises:
            ConfigError: an allowed origin is none.
        """
        self._keys: dict[Grant, str | None] = {"data": data_key, "admin": admin_key}
        self._request_origins = frozenset(request_origins)
        urls = [*self._request_origins, *named]
        self._hosts = frozenset(map(host_of, urls))
        self._is_here = any(map(is_loopback, urls))
        self._allowed = tuple(map(origins_like, allowed_origins))
        self._warned: set[str] = set()

    @classmethod
    def of(cls, config: FleetConfig, *, environment: Mapping[str, str] | None = None) -> Self:
        """The credentials that a configuration refers to, looked up now.

        Raises:
            ConfigError: a key that cannot be used, or an allowed origin that is none.
        """
        found = os.environ if environment is None else environment
        target = config.parsed
        lists = [target.listing] if target.listing else []
        if config.discovery_url:
            lists.append(base_url(config.discovery_url, scheme="http"))
        return cls(
            data_key=resolve(config.api_key, environment=found),
            admin_key=resolve(config.admin_api_key, environment=found),
            request_origins=map(origin, target.requests),
            named=[*target.workers, *lists],
            allowed_origins=config.allowed_origins,
        )

    def data_headers(self, url: str) -> dict[str, str]:
        """The headers that a request to `url` carries."""
        if url.startswith(_IN_PROCESS):
            return self._headers("data")
        return self._headers(data_grant(url, request_origins=self._request_origins))

    def admin_headers(self, url: str, grant: Grant | None = None) -> dict[str, str]:
        """The headers that an administration call to `url` carries.

        With `grant="data"` the call is to a route that takes the key of requests. Whoever may get
        the admin key may get that one, too.

        The first time a key goes to another host unencrypted there is a warning, unless the origin
        is in `allowed_origins`; and so is there the first time that one is withheld.
        """
        has_admin_key = self._keys["admin"] is not None
        wants_data_key = grant == "data" and self._keys["data"] is not None
        if url.startswith(_IN_PROCESS):
            return self._headers("admin" if has_admin_key and not wants_data_key else "data")
        headers = self._headers(
            admin_grant(
                url,
                request_origins=self._request_origins,
                has_admin_key=has_admin_key,
                is_named=self._is_named(url),
                wants_data_key=wants_data_key,
            )
        )
        if headers and self._is_exposed(url):
            self._warn(
                f"a key goes unencrypted to {origin(url)} for administration; use https, or name "
                "the origin in allowed_origins to accept this",
                of="exposed",
            )
        withheld = self.withheld(url)
        if withheld is not None:
            self._warn(withheld, of="withheld")
        return headers

    def withheld(self, url: str) -> str | None:
        """Why an administration call to `url` carries no key though there is one; None = it may."""
        if url.startswith(_IN_PROCESS) or self._keys["admin"] is None or self._is_named(url):
            return None
        where = origin(url)
        return (
            f"no key is sent to {where}, which only the list of workers names: add it to "
            f"allowed_origins, where a * may be the port or a part of the host ('{where}', "
            "'http://10.1.*.*:*', 'https://*.pods.example:*')"
        )

    def _is_named(self, url: str) -> bool:
        if host_of(url) in self._hosts or (self._is_here and is_loopback(url)):
            return True
        return self._is_allowed(url)

    def _is_allowed(self, url: str) -> bool:
        return any(allows(url) for allows in self._allowed)

    def _is_exposed(self, url: str) -> bool:
        plain = url.startswith("http://") and not is_loopback(url)
        return plain and not self._is_allowed(url)

    def _warn(self, message: str, *, of: str) -> None:
        if of not in self._warned:
            self._warned.add(of)
            _log.warning("%s", message)

    def _headers(self, grant: Grant | None) -> dict[str, str]:
        key = None if grant is None else self._keys[grant]
        return {} if key is None else {"authorization": f"Bearer {key}"}

    def __repr__(self) -> str:
        held = " and ".join(name for name, key in self._keys.items() if key is not None)
        return f"Credentials({held or 'no'} key)"

    def __reduce__(self) -> NoReturn:
        raise ConfigError("credentials cannot be pickled; send fleet.config and open it there")
