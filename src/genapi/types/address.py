"""How a host and a port are written in a URL. No look-up, no I/O."""

__all__ = ("host_port", "url_of")


def host_port(host: str, port: int | str | None) -> str:
    """`host:port`, an IPv6 address in brackets; without a port the host alone."""
    name = f"[{host}]" if ":" in host else host
    return name if port is None else f"{name}:{port}"


def url_of(host: str, port: int) -> str:
    """The base URL of what listens there."""
    return f"http://{host_port(host, port)}"
