"""Origins of URLs: who a key is given to, and who is on this host. No I/O, no name look-up."""

from collections.abc import Callable
from ipaddress import ip_address
from urllib.parse import urlsplit

from genapi.errors import ConfigError
from genapi.shown import after_user_info
from genapi.types.address import host_port

__all__ = ("host_of", "is_loopback", "origin", "origins_like")

_DEFAULT_PORTS = {"http": 80, "https": 443}
_OCTETS = 4


def origin(url: str) -> str:
    """`scheme://host:port` of an absolute URL, in lower case and with the port written out.

    Two URLs have one origin exactly when these texts are equal. Names are compared as they are
    written: `localhost` and `127.0.0.1` differ.

    Raises:
        ConfigError: the URL has no scheme, no host or a bad port.
    """
    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme, parts.hostname, parts.port
    except ValueError:
        scheme, host, port = "", None, None
    if not scheme or not host:
        raise ConfigError(f"{after_user_info(url)!r} is not an origin; write scheme://host:port")
    port = _DEFAULT_PORTS.get(scheme) if port is None else port
    return f"{scheme}://{host_port(host, port)}"


def origins_like(pattern: str) -> Callable[[str], bool]:
    """Whether a URL is of an origin that a pattern allows.

    Args:
        pattern: an origin, in which `*` may be the port, the host, the labels before a name
            (`*.pods.example`) or numbers of an IPv4 address (`10.1.*.*`).

    Raises:
        ConfigError: it is none.
    """
    head = pattern.removesuffix(":*")
    wanted = urlsplit(origin(head))
    host, port = wanted.hostname or "", wanted.port
    labels = host.split(".")
    of_address = len(labels) == _OCTETS and all(part.isdecimal() or part == "*" for part in labels)
    if not of_address and "*" in host.removeprefix("*.") and host != "*":
        raise ConfigError(
            f"{after_user_info(pattern)!r} is not an origin; write scheme://host:port, where * may "
            "be the port, the host, what is before a name (*.pods.example) or numbers of an "
            "address (10.1.*.*)"
        )

    def allows(url: str) -> bool:
        there = urlsplit(origin(url))
        other = there.hostname or ""
        parts = other.split(".")
        if host in ("*", other):
            fits = True
        elif of_address:
            fits = len(parts) == _OCTETS and all(
                theirs == own or (own == "*" and theirs.isdecimal())
                for own, theirs in zip(labels, parts, strict=True)
            )
        else:
            fits = host.startswith("*.") and other.endswith(host[1:])
        ported = head != pattern or there.port == port
        return fits and ported and there.scheme == wanted.scheme

    return allows


def host_of(url: str) -> str:
    """The host of a URL, in lower case."""
    return urlsplit(url).hostname or ""


def is_loopback(url: str) -> bool:
    """Whether the URL's host is written as this host: `localhost` or a loopback address."""
    host = urlsplit(url).hostname or ""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
