"""The name of a service's Unix socket, and which peers are trusted on it (kvloom/transport/local_stream.py)."""

from __future__ import annotations

import os
import socket
import struct
import sys
from typing import Any, Final

_LOOPBACK: Final = frozenset(("127.0.0.1", "localhost", "[::1]", "0.0.0.0", "[::]"))
_CREDENTIALS: Final = struct.Struct("3i")


def local_socket_name(address: str) -> str | None:
    """The abstract socket of a gRPC address; None for addresses of other machines, and outside Linux."""
    host, _, port = address.rpartition(":")
    if not sys.platform.startswith("linux") or host not in _LOOPBACK or not port.isdigit():
        return None
    return f"\0kvloom/{port}"


def is_trusted(connection: Any) -> bool:
    """True when the peer is a process of this user or of root. `connection`: the socket; None if it is gone."""
    if connection is None:
        return False
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(peer)[1] in (os.geteuid(), 0)
