"""Lists the processes of a fleet that serve /metrics, for Prometheus' service discovery (`http_sd_configs`,
`file_sd_configs`).

Every process that serves /metrics announces itself in the registry as long as it runs, no matter what started it,
so the list is that of all machines that share a Redis.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from typing import Any, Final

import redis.exceptions
import structlog

from kvloom_common.addresses import join_address, split_address
from kvloom_common.config import KvloomConfig
from kvloom_common.discovery.announcer import Announcer
from kvloom_common.discovery.records import MetricsTarget
from kvloom_common.discovery.registry import MetricsRegistry
from kvloom_common.trust.fabric_trust import FabricTrust
from kvloom_common.trust.seal import SealError

log = structlog.get_logger()

_WILDCARDS: Final = ("", "0.0.0.0", "::")


def metrics_registry(config: KvloomConfig, trust: FabricTrust) -> MetricsRegistry | None:
    """The one place that the list of targets comes from. None without Redis. The caller closes it."""
    url = config.redis.url
    return MetricsRegistry(url, config.redis.key_prefix, trust.sealer) if url else None


def http_sd(targets: Iterable[MetricsTarget]) -> list[dict[str, Any]]:
    """The targets in the format that Prometheus reads: a group for each, because labels belong to groups."""
    return [
        {
            "targets": [target.address],
            "labels": {
                "role": target.role,
                "process": target.name,
                "served_model": target.model,
                "__scheme__": target.scheme,
            },
        }
        for target in targets
    ]


class TargetsError(Exception):
    """The list cannot be read. The message says why."""


class TargetList:
    """The list, as an edge serves it."""

    def __init__(self, registry: MetricsRegistry | None, own: MetricsTarget) -> None:
        """`own`: all that is known without Redis."""
        self._registry = registry
        self._own = own

    async def read(self) -> list[MetricsTarget]:
        """Raises TargetsError while Redis cannot be reached: Prometheus then keeps the list that it has."""
        if self._registry is None:
            return [self._own]
        try:
            return await self._registry.list_targets()
        except (redis.exceptions.RedisError, OSError) as error:
            raise TargetsError("The list of processes cannot be read: Redis cannot be reached.") from error

    async def close(self) -> None:
        if self._registry is not None:
            await self._registry.close()


class TargetAnnouncement:
    """Keeps one process in the list; see kvloom_common.process.watched_files.following."""

    def __init__(self, config: KvloomConfig, trust: FabricTrust, *, role: str, name: str, address: str) -> None:
        """`address`: where the process serves /metrics."""
        self._config = config
        self._trust = trust
        scheme = "https" if config.tls.certificate_file else "http"
        self.target = MetricsTarget(scraped_address(config, address), role, name, _model(config), scheme)

    async def watch(self) -> None:
        """Announce the process until cancelled. Afterwards the announcement expires by itself: a successor at the same
        address may have renewed it."""
        registry = metrics_registry(self._config, self._trust)
        if registry is None:
            return
        announcer = Announcer(registry, self.target)
        try:
            await announcer.run()
        except SealError as error:  # addresses of others would be as good
            log.warning("metrics_announcement_failed", cause=str(error))
            await asyncio.Event().wait()
        finally:
            await announcer.close()


def _model(config: KvloomConfig) -> str:
    """Empty for a process that has several, or gets them from shards."""
    return "" if config.models or not config.model.path else config.model.name


def scraped_address(config: KvloomConfig, address: str) -> str:
    """host:port for scrapers: the advertised host or this machine's name instead of a wildcard, and brackets around an
    IPv6 address."""
    host, port = split_address(address)
    if host in _WILDCARDS:
        host = config.fabric.advertised_host or socket.gethostname()
    return join_address(host, port)
