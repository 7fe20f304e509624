"""How many connections each address has open."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Final

from edge_http.wire.client_address import Address, parsed_address

SUBSCRIBER_BITS: Final = 64
"""A subscriber of an IPv6 provider has at least a network of this prefix length, and so any number of addresses."""


class AddressLimit:
    """Limits the connections of one address, so that it cannot take those of all others."""

    def __init__(self, max_connections: int, trusted_proxies: Sequence[str]) -> None:
        """Proxies have the connections of many clients, and no limit."""
        self._max_connections = max_connections
        self._trusted_proxies = [ipaddress.ip_network(network) for network in trusted_proxies]
        self._num_connections: dict[Address, int] = {}

    def open(self, peer: str) -> Address | None:
        """Count a connection from `peer`. Returns what to `close` at its end; None if the connection does not count.
        Raises ValueError if the address has too many."""
        address = parsed_address(peer)
        if address is None or any(address in network for network in self._trusted_proxies):
            return None
        if isinstance(address, ipaddress.IPv6Address):
            suffix_bits = address.max_prefixlen - SUBSCRIBER_BITS
            address = ipaddress.IPv6Address(int(address) >> suffix_bits << suffix_bits)
        num_connections = self._num_connections.get(address, 0)
        if num_connections >= self._max_connections:
            raise ValueError("too many connections")
        self._num_connections[address] = num_connections + 1
        return address

    def close(self, address: Address) -> None:
        """A connection that `open` has counted has ended."""
        num_connections = self._num_connections[address] - 1
        if num_connections:
            self._num_connections[address] = num_connections
        else:
            del self._num_connections[address]
