"""Builds a router from the configuration and makes it listen, in a process of its own or inside an edge's."""

from __future__ import annotations

import argparse
import dataclasses
import secrets
from pathlib import Path

from kvloom_common.config import KvloomConfig
from kvloom_common.metrics.exporter import MetricsExporter, NoMetrics, add_metrics_flags, open_metrics
from kvloom_common.models.catalogue import Catalogue
from kvloom_common.process import service
from kvloom_common.tenancy.table import TenantTable
from kvloom_common.trust.fabric_trust import NO_SECRET, FabricTrust
from router.core.core import RouterCore
from router.core.tenancy.limiter import Limiter
from router.core_settings import core_config
from router.incidents.recorded_core import RecordedCore, new_recorder
from router.server import RouterServer
from router.tenancy.lease_client import epoch_clock


@dataclasses.dataclass(frozen=True, slots=True)
class RouterListenOptions:
    """The ports of `router.host` where a router listens. Port 0 picks a free one."""

    port: int
    shares_port: bool = False
    """True when routers of the same supervisor share `port`. The supervisor keeps other processes from taking it."""
    own_port: int | None = None
    """A port that no other router shares, where edges find this one."""
    metrics_port: int | None = None
    """A port of `metrics.host`. Without it there is no /metrics."""
    shares_metrics_port: bool = False

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--share-port", action="store_true", help="let other routers listen on router.port too")
        parser.add_argument("--own-port", type=int, help="a port of its own where edges find this router; 0 picks one")
        add_metrics_flags(parser)

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace, port: int) -> RouterListenOptions:
        return cls(port, arguments.share_port, arguments.own_port, arguments.metrics_port, arguments.share_metrics_port)


async def open_router(
    config: KvloomConfig,
    catalogue: Catalogue,
    name: str,
    listen_options: RouterListenOptions,
    trust: FabricTrust = NO_SECRET,
) -> tuple[RouterServer, str, MetricsExporter | NoMetrics]:
    """Returns a listening router, its address, and its /metrics, which need to be followed. Raises StartError."""
    if not config.redis.url and not config.router.shards:
        raise service.StartError("redis.url is not set: the router finds its shards in Redis, or by router.shards")
    if not config.redis.url and config.control.enabled:
        raise service.StartError("redis.url is not set: what tenants use is counted in Redis (control.enabled)")
    host = config.router.host
    shares_port = listen_options.shares_port
    server = RouterServer(config, new_core(config, name), catalogue, name, shares_port=shares_port, trust=trust)
    address = await server.start(host, listen_options.port, listen_options.own_port)
    shares_metrics_port = listen_options.shares_metrics_port
    metrics = open_metrics(config, trust, "router", name, listen_options.metrics_port, shares_port=shares_metrics_port)
    return server, address, metrics


def new_core(config: KvloomConfig, name: str) -> RouterCore:
    """The core of the router of that name. Raises StartError."""
    try:
        limiter = Limiter(TenantTable, epoch_clock()) if config.control.enabled else None
        settings, seed = core_config(config), secrets.randbits(64)
        if config.router.records_incidents:
            if limiter is not None:
                raise service.StartError("router.records_incidents is for fabrics without tenants (control.enabled)")
            recorder = new_recorder(Path(config.data_dir), name, settings.policy)
            return RecordedCore(settings, seed, recorder)
        return RouterCore(settings, seed=seed, limiter=limiter)
    except ValueError as error:  # e.g. a placement policy that does not exist
        raise service.StartError(f"router: {error}") from error
