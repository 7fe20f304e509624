"""A TCP port that belongs to one fabric and on which several of its processes listen.

With SO_REUSEPORT the kernel distributes new connections over all listeners, but any process of the same user can join
them, including another fabric. So the supervisor first claims the port exclusively. Then it holds it with a socket that
only sockets with SO_REUSEPORT can share: those of the children that are told to.
"""

from __future__ import annotations

import contextlib
import socket

BACKLOG = 1024
"""The largest number of connections that wait to be accepted."""


class SharedPort:
    """A port at `host` and `port` that is claimed until `close`."""

    def __init__(self, host: str, port: int) -> None:
        """Port 0 picks a free one. Raises OSError if any process listens on the port."""
        self.host = host
        self._family, self._address = _resolve(host, port)
        with self._socket() as probe:
            # Like servers do: closed connections in TIME_WAIT are no obstacle, a listening socket is.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(self._address)
            probe.listen(1)  # of two that bind at the same time, only one gets here
            self.port = int(probe.getsockname()[1])
            self._address = (self._address[0], self.port, *self._address[2:])
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._guard = self._member()
        self._listeners: list[socket.socket] = []

    def listener(self) -> socket.socket:
        """A new socket for a process that is to listen on the port. If no other socket listens, it already does, so
        that connections wait for the process; otherwise the other processes accept them. Raises OSError."""
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
        """True when any socket other than `besides` listens on the port."""
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
            with contextlib.suppress(OSError):  # like the servers of asyncio: "::" does not include 0.0.0.0
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        return made


def _resolve(host: str, port: int) -> tuple[int, tuple[str, int] | tuple[str, int, int, int]]:
    """Returns the first address of a name, IPv4 before IPv6. Raises OSError."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, address  # pyrefly: ignore[bad-return]  (of other families the resolver has none)
