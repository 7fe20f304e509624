"""Where a service's Unix socket is, and who may talk over it: see kvloom/transport/local_stream.py."""

from __future__ import annotations

import os
import socket
import struct
import sys
from typing import Any, Final

_LOOPBACK: Final = frozenset(("127.0.0.1", "localhost", "[::1]", "0.0.0.0", "[::]"))
_CREDENTIALS: Final = struct.Struct("3i")


def local_socket_name(address: str) -> str | None:
    """The abstract socket beside a gRPC address; None for other machines' addresses and outside Linux."""
    host, _, port = address.rpartition(":")
    if not sys.platform.startswith("linux") or host not in _LOOPBACK or not port.isdigit():
        return None
    return f"\0kvloom/{port}"


def is_trusted(connection: Any) -> bool:
    """The peer is a process of this user, or root's. `connection`: the socket; None: it is gone."""
    if connection is None:
        return False
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(peer)[1] in (os.geteuid(), 0)
