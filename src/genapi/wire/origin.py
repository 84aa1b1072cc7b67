"""Origins of URLs: who a key is given to, and who is on this host. No I/O, no name look-up."""

from ipaddress import ip_address
from urllib.parse import urlsplit

from genapi.errors import ConfigError

__all__ = ("is_loopback", "origin")

_DEFAULT_PORTS = {"http": 80, "https": 443}


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
        raise ConfigError(f"{_shown(url)!r} is not an origin; write scheme://host:port")
    name = f"[{host}]" if ":" in host else host
    port = _DEFAULT_PORTS.get(scheme) if port is None else port
    return f"{scheme}://{name}" if port is None else f"{scheme}://{name}:{port}"


def is_loopback(url: str) -> bool:
    """Whether the URL's host is written as this host: `localhost` or a loopback address."""
    host = urlsplit(url).hostname or ""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _shown(url: str) -> str:
    # What stands before an "@" may be a password.
    return url.rpartition("@")[2]
