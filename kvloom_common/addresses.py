"""An address is host:port, with brackets around a host of IPv6: [::1]:8080.

Configurations may write such a host with brackets or without: `join_address` takes both, and `bare_host` is what
sockets and resolvers want.
"""

from __future__ import annotations


def bare_host(host: str) -> str:
    """A host without brackets."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def url_host(host: str) -> str:
    """A host as it is in addresses and URLs."""
    bare = bare_host(host)
    return f"[{bare}]" if ":" in bare else bare


def join_address(host: str, port: int | str) -> str:
    return f"{url_host(host)}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """The host, without brackets, and the port. Raises ValueError if there is no port."""
    host, _, port = address.rpartition(":")
    return bare_host(host), int(port)
