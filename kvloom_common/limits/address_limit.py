"""Counts of what different keys hold at a time, and of the connections that each address has open."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Final, TypeVar

from kvloom_common.limits.client_address import Address, is_in, networks_of, parsed_address

_Key = TypeVar("_Key")


class KeyedCounts(dict[_Key, int]):
    """Keys that hold nothing count as 0 and take no memory."""

    __slots__ = ()

    def __missing__(self, key: _Key) -> int:
        return 0

    def add(self, key: _Key, count: int = 1) -> None:
        self[key] += count

    def remove(self, key: _Key, count: int = 1) -> None:
        """`key` must hold at least `count`."""
        self[key] -= count
        if not self[key]:
            del self[key]


SUBSCRIBER_BITS: Final = 64
"""A subscriber of an IPv6 provider has at least a network of this prefix length, and so any number of addresses."""


class AddressLimit:
    """Limits the connections of one address, so that it cannot take those of all others."""

    def __init__(self, max_connections: int, trusted_proxies: Sequence[str]) -> None:
        """Proxies have the connections of many clients, and no limit."""
        self._max_connections = max_connections
        self._trusted_proxies = networks_of(trusted_proxies)
        self._num_connections = KeyedCounts[Address]()

    def open(self, peer: str) -> Address | None:
        """Count a connection from `peer`. Returns what to `close` at its end; None if the connection does not count.
        Raises ValueError if the address has too many."""
        address = parsed_address(peer)
        if address is None or is_in(address, self._trusted_proxies):
            return None
        if isinstance(address, ipaddress.IPv6Address):
            suffix_bits = address.max_prefixlen - SUBSCRIBER_BITS
            address = ipaddress.IPv6Address(int(address) >> suffix_bits << suffix_bits)
        if self._num_connections[address] >= self._max_connections:
            raise ValueError("too many connections")
        self._num_connections.add(address)
        return address

    def close(self, address: Address) -> None:
        """A connection that `open` has counted has ended."""
        self._num_connections.remove(address)
