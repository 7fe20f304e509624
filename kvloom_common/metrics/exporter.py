"""The metrics of one process other than an edge: served, and listed for scrapers."""

from __future__ import annotations

import argparse
import asyncio

from kvloom_common.config import KvloomConfig
from kvloom_common.metrics.server import MetricsServer
from kvloom_common.metrics.targets import TargetAnnouncement
from kvloom_common.process.watched_files import Watcher, following
from kvloom_common.trust.fabric_trust import FabricTrust


def add_metrics_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--metrics-port", type=int, help="serve /metrics on this port of metrics.host; 0 picks one")
    parser.add_argument("--share-metrics-port", action="store_true", help="let a successor listen on that port too")


class MetricsExporter:
    """Serves /metrics from its construction on; see kvloom_common.process.watched_files.following."""

    def __init__(self, server: MetricsServer, announcement: TargetAnnouncement, *, shares_port: bool) -> None:
        self._server = server
        self._announcement = announcement
        self._shares_port = shares_port
        self.address = server.address

    async def watch(self) -> None:
        """Keep the process listed, and follow changes of keys and certificates, until cancelled."""
        await self.serve(asyncio.Event())

    async def serve(self, stop: asyncio.Event) -> None:
        """Like `watch`. When `stop` is set, a port that successors share is left to them at once: a scraper that
        reaches both processes by turns would take every change for a restart."""
        async with following(self._server, self._announcement):
            await stop.wait()
            if not self._shares_port:
                await asyncio.Event().wait()
        self._server.close()

    def until(self, stop: asyncio.Event) -> Watcher:
        return _Until(self, stop)


class NoMetrics:
    """A process without --metrics-port."""

    address = ""

    async def watch(self) -> None:
        await asyncio.Event().wait()

    def until(self, stop: asyncio.Event) -> Watcher:  # noqa: ARG002
        return self


class _Until:
    def __init__(self, exporter: MetricsExporter, stop: asyncio.Event) -> None:
        self._exporter = exporter
        self._stop = stop

    async def watch(self) -> None:
        await self._exporter.serve(self._stop)


def open_metrics(
    config: KvloomConfig, trust: FabricTrust, role: str, name: str, port: int | None, *, shares_port: bool
) -> MetricsExporter | NoMetrics:
    """Serve the metrics of this process if it has a port for them. Raises StartError and ConfigError."""
    if port is None:
        return NoMetrics()
    server = MetricsServer(config, port, shares_port=shares_port)
    announcement = TargetAnnouncement(config, trust, role=role, name=name, address=server.address)
    return MetricsExporter(server, announcement, shares_port=shares_port)
