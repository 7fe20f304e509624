"""Closes connections of addresses that have too many, for servers which do not say what they accept, as gRPC's."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Collection, Iterator
from typing import Final

import structlog

from kvloom_common.limits.address_limit import AddressLimit

log = structlog.get_logger()

SWEEP_SECONDS: Final = 1.0
_DESCRIPTORS: Final = "/proc/self/fd"
_TCP_FAMILIES: Final[Collection[int]] = (socket.AF_INET, socket.AF_INET6)

_Peer = tuple[str, int]


class ConnectionSweep:
    """Looks once a second at this process's sockets, in a thread, and only if they are more than one address may have.
    What it closes has usually been open for less than that."""

    def __init__(self, max_connections: int, new_limit: Callable[[], AddressLimit]) -> None:
        """An address may have `max_connections`. `new_limit` returns a limit of that number, which has counted
        nothing."""
        self._max_connections = max_connections
        self._new_limit = new_limit
        self._known: set[_Peer] = set()
        self.ports: set[int] = set()
        """The ports of the server."""

    async def watch(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            if num_closed := await asyncio.to_thread(self.sweep):
                log.warning("excess_connections_closed", num_connections=num_closed)

    def sweep(self) -> int:
        """Returns how many connections were closed. The latest ones of an address are closed first."""
        try:
            descriptors = os.listdir(_DESCRIPTORS)
        except OSError:  # no descriptor is free; the next sweep follows soon
            return 0
        if len(descriptors) <= self._max_connections:
            self._known.clear()
            return 0
        peers = {peer: fd for name in descriptors if (peer := self._peer_of(fd := int(name))) is not None}
        limit, excess = self._new_limit(), list[_Peer]()
        for peer in sorted(peers, key=lambda peer: peer not in self._known):
            try:
                limit.open(peer[0])
            except ValueError:
                excess.append(peer)
        self._known = peers.keys() - excess
        return sum(self._close(peers[peer], peer) for peer in excess)

    def _peer_of(self, descriptor: int) -> _Peer | None:
        """The other end of a connection of the server's ports; None if the descriptor is none."""
        for connection in _sockets(descriptor):
            try:
                if connection.getsockname()[1] in self.ports:
                    host, port = connection.getpeername()[:2]
                    return host, port
            except (OSError, IndexError, TypeError):
                return None  # it listens, has ended meanwhile, or is no TCP socket
        return None

    def _close(self, descriptor: int, peer: _Peer) -> int:
        """The server notices as if its peer had closed it. Meanwhile the descriptor may have become another's."""
        for connection in _sockets(descriptor):
            try:
                if connection.getpeername()[:2] == peer:
                    connection.shutdown(socket.SHUT_RDWR)
                    return 1
            except OSError:
                break
        return 0


def _sockets(descriptor: int) -> Iterator[socket.socket]:
    """The socket of a descriptor that belongs to other code, for as long as it is used; none if it is no TCP socket."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        return
    try:
        found = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return
    with found:
        if found.family in _TCP_FAMILIES and found.type == socket.SOCK_STREAM:
            yield found
