"""A TCP port that belongs to one fabric and that several of its processes listen on.

With SO_REUSEPORT the kernel spreads new connections over all listeners, but it lets any process of the same user join
in, another fabric too. So the supervisor takes the port exclusively first, and then holds it with a socket that only
those get past who ask for SO_REUSEPORT: children that it told to.
"""

from __future__ import annotations

import contextlib
import socket

BACKLOG = 1024
"""Connections that wait for a process to take them."""


class SharedPort:
    """Claimed until `close`. `host` and `port` are where it is."""

    def __init__(self, host: str, port: int) -> None:
        """Port 0 picks one. Raises OSError when any process listens there."""
        self.host = host
        self._family, self._address = _resolve(host, port)
        with self._socket() as probe:
            # As servers do: what is left of closed connections is no obstacle, a listening socket is.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(self._address)
            probe.listen(1)  # of two that bind at the same time, only one gets here
            self.port = int(probe.getsockname()[1])
            self._address = (self._address[0], self.port, *self._address[2:])
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._guard = self._member()
        self._listeners: list[socket.socket] = []

    def listener(self) -> socket.socket:
        """A socket of its own for a process that is to listen there. While nobody else does, it listens already, so
        that whoever comes waits for the process; else others serve them. Raises OSError."""
        listener = self._member()
        try:
            if not self.is_served():
                listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
        self._listeners.append(listener)
        return listener

    def is_served(self, *, besides: socket.socket | None = None) -> bool:
        """Whether any socket listens there."""
        self._listeners = [one for one in self._listeners if one.fileno() >= 0]
        return any(
            one is not besides and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) for one in self._listeners
        )

    def close(self) -> None:
        self._guard.close()

    def _member(self) -> socket.socket:
        member = self._socket()
        try:
            member.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            member.bind(self._address)
        except OSError:
            member.close()
            raise
        return member

    def _socket(self) -> socket.socket:
        made = socket.socket(self._family, socket.SOCK_STREAM)
        if self._family == socket.AF_INET6:
            with contextlib.suppress(OSError):  # as asyncio's servers: "::" is not also 0.0.0.0
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        return made


def _resolve(host: str, port: int) -> tuple[int, tuple[str, int] | tuple[str, int, int, int]]:
    """Of a name with several addresses the first, IPv4 before IPv6. Raises OSError."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, address  # pyright: ignore[reportReturnType]  (of other families the resolver has none)
