"""The address of the client that sent a request, also when a reverse proxy forwarded it."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Final

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

MAX_PROXIES: Final = 16
"""How many addresses of X-Forwarded-For are read, from the right."""


def client_address(peer: str, forwarded_for: Sequence[str], trusted_proxies: Sequence[Network]) -> str:
    """Return the IP address of the client, without a port.

    `peer` is the address of the connection, and `forwarded_for` are the values of the X-Forwarded-For headers. Every
    proxy appends the address that it was connected from, so only what trusted proxies have appended can be believed:
    the search begins on the right and ends at the first address that is no trusted proxy's. It also ends at a value
    that is no address, since its author may have invented what stands to its left. Then the last trusted
    proxy counts as the client.
    """
    address = parsed_address(peer)
    if address is None or not is_in(address, trusted_proxies):
        return peer if address is None else str(address)
    hops = ",".join(forwarded_for).rsplit(",", MAX_PROXIES)[-MAX_PROXIES:]
    for hop in reversed(hops):
        found = parsed_address(_without_port(hop.strip()))
        if found is None:
            break
        address = found
        if not is_in(found, trusted_proxies):
            break
    return str(address)


def networks_of(texts: Sequence[str]) -> list[Network]:
    """The networks of CIDR notations, as in the configuration."""
    return [ipaddress.ip_network(text) for text in texts]


def is_in(address: Address, networks: Sequence[Network]) -> bool:
    return any(address in network for network in networks)


def parsed_address(text: str) -> Address | None:
    """The address; None if the text is none. An IPv4 address inside an IPv6 one is the IPv4 address."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _without_port(hop: str) -> str:
    """Some proxies append "1.2.3.4:5678" or "[::1]:5678"."""
    if hop.startswith("["):
        return hop[1:].partition("]")[0]
    return hop.partition(":")[0] if hop.count(":") == 1 else hop
