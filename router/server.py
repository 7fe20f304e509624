"""One router: its parts put together, from its start through its drain to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import structlog
from prometheus_client import REGISTRY, CollectorRegistry

from kvloom.v1 import router_service_pb2
from kvloom_common.config import KvloomConfig
from kvloom_common.discovery.announcer import Announcer, advertised_address, fabric_host, name_owner
from kvloom_common.discovery.named_shards import NamedShards
from kvloom_common.discovery.records import NameTakenError, RouterRecord
from kvloom_common.discovery.registry import RouterRegistry, ShardRegistry
from kvloom_common.limits.address_limit import AddressLimit
from kvloom_common.limits.connection_sweep import ConnectionSweep
from kvloom_common.limits.memory_watch import MemoryLevel, MemoryWatch
from kvloom_common.metrics.table import GaugeRecord
from kvloom_common.models.card_service import SERVICE_NAME as CARD_SERVICE_NAME
from kvloom_common.models.catalogue import Catalogue
from kvloom_common.process import service
from kvloom_common.process.service import HealthServicer, set_serving
from kvloom_common.process.watched_files import following
from kvloom_common.transport.standard_services import add_health_and_reflection
from kvloom_common.trust.fabric_trust import NO_SECRET, FabricTrust
from router import metric_table as table
from router.assembly import assemble
from router.core.core import RouterCore
from router.core.events import DrainEnded, DrainStarted
from router.links.fleet_watcher import FleetWatcher
from router.links.local_link import LocalRouterLink
from router.links.safety_link import SafetyLink
from router.listener import RouterListener

log = structlog.get_logger()


ROUTER_SERVICE_NAME: Final = router_service_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name
SERVICE_NAMES: Final = (ROUTER_SERVICE_NAME, CARD_SERVICE_NAME)
CLOSE_GRACE_SECONDS: Final = 1.0
CANCEL_AGAIN_SECONDS: Final = 0.2


class RouterServer:
    """Owns the core driver, the links and the gRPC server of one router. Call `start` and then `serve`, once each."""

    def __init__(
        self,
        config: KvloomConfig,
        core: RouterCore,
        catalogue: Catalogue,
        router_id: str = "router",
        metrics_registry: CollectorRegistry = REGISTRY,
        *,
        shares_port: bool = False,
        trust: FabricTrust = NO_SECRET,
    ) -> None:
        """`catalogue` has the models whose files this machine has; the cards of the others come from their shards. With
        `shares_port`, other processes may listen on the router's port (SO_REUSEPORT), for example a successor. Raises
        StartError, ConfigError."""
        self._config = config
        self._core = core
        self._router_id = router_id
        self._trust = trust
        self._catalogue = catalogue
        self._draining = False
        parts = self._parts = assemble(
            config,
            core,
            catalogue,
            router_id,
            metrics_registry,
            shares_port=shares_port,
            trust=trust,
            is_draining=lambda: self._draining,
        )
        self._driver, self._records, self._answers = parts.driver, parts.records, parts.answers
        self.callers, self.features = parts.callers, parts.features
        self._registry = (
            NamedShards(config.router.shards, trust)
            if config.router.shards
            else ShardRegistry(config.redis.url, config.redis.key_prefix, trust.sealer)
        )
        self._watcher = FleetWatcher(self._registry, router_id, self._driver, trust, catalogue)
        health = add_health_and_reflection(
            parts.for_clients.server, SERVICE_NAMES, with_reflection=config.fabric.reflection
        )
        self._health = HealthReporter(health, SERVICE_NAMES, self._is_serving)
        self._driver.on_fleet_change(self._health.refresh)
        self._records.metrics.watch(self._gauges)
        most, proxies = config.callers.max_connections_per_address, config.edge.trusted_proxies
        self._sweep = ConnectionSweep(most, lambda: AddressLimit(most, proxies))
        self._memory = MemoryWatch(
            table.MEMORY, config.fabric.max_memory_bytes, self._on_memory_level, metrics_registry, self._is_idle
        )

    async def start(self, host: str, port: int, own_port: int | None = None) -> str:
        """Binds the ports; clients that connect wait until `serve` opens them. Returns the address, which is that of
        `own_port` if one is given. Raises StartError when a port is taken or the decision log's file cannot be
        written."""
        for writer in self._records.writers:
            writer.open()
        if self._records.metering is not None:
            await self._records.metering.start()
        add_port = NO_SECRET.add_port if self._parts.tls is None else self._parts.tls.add_port
        self._parts.for_clients.bind(host, port, add_port)
        if own_port is not None:
            self._parts.for_clients.bind(host, own_port, add_port)
        if self._parts.for_fabric is not None:
            self._parts.for_fabric.bind(fabric_host(self._config, host), 0, self._trust.add_port)
        self._answers.address = self._advertised(self._parts.for_clients.address)
        self._sweep.ports = self._parts.for_clients.ports
        return self._parts.for_clients.address

    @property
    def internal_address(self) -> str:
        """Where the processes of the fabric reach this router; "" when it has no secret."""
        return "" if self._parts.for_fabric is None else self._parts.for_fabric.address

    def local_link(self, name: str) -> LocalRouterLink:
        """Returns a link to this router for an edge in the same process."""
        link = LocalRouterLink(
            self._driver, self._parts.intake, name, self._parts.moderation, self._parts.side_calls, self._parts.overview
        )
        if self._records.metering is not None:
            self._records.usage_records.open(link.client_id, link.client_id)
        return link

    async def serve(self, stop: asyncio.Event, on_open: Callable[[], None] = lambda: None) -> None:
        """Serves until `stop` is set, and then drains. `on_open` is called when the router can be reached. Raises what
        one of the router's own tasks raised."""
        try:
            files = self._memory, self._sweep, self._parts.tls, self.callers.watched
            watched = filter(None, (*files, *self.features.watched, self._records.witness))
            async with following(*watched), asyncio.TaskGroup() as tasks:
                owned = [
                    tasks.create_task(self._watcher.run(), name="fleet watcher"),
                    tasks.create_task(self._health.run(), name="health reporter"),
                    tasks.create_task(self._parts.samples.run(), name="fleet samples"),
                ]
                if self._parts.safety_link is not None:
                    owned.append(tasks.create_task(self._parts.safety_finder.run(), name="safety finder"))
                    owned.append(tasks.create_task(self._connect_safety(self._parts.safety_link), name="safety link"))
                if self._records.metering is not None:
                    owned.append(tasks.create_task(self._records.metering.run(), name="metering"))
                    owned.append(tasks.create_task(self._records.suspensions.watch(), name="suspensions"))
                if self._parts.leases is not None:
                    owned.append(tasks.create_task(self._parts.leases.run(), name="leases of limits"))
                for writer in self._records.writers:
                    tasks.create_task(writer.run(), name="decision writer")
                await service.wait_to_open(self._find_peers(), stop)
                announcer = await self._open()
                on_open()
                if announcer is None:
                    await stop.wait()
                else:
                    announcing = tasks.create_task(announcer.run(), name="announcer")
                    await stop.wait()
                    await _cancel_all([announcing])
                    await announcer.withdraw()
                await self._drain()
                await self._close_streams()
                await _cancel_all(owned)
                for writer in self._records.writers:
                    writer.close()  # Its task ends once the remaining lines are written.
        finally:
            await self._close_streams()
            await self._answers.close()
            await self.features.close()
            self._driver.close()
            if self._records.metering is not None:
                await self._records.metering.close()
            await self._registry.close()

    def _is_idle(self) -> bool:
        return not self._driver.num_live_requests

    def _on_memory_level(self, level: MemoryLevel) -> None:
        self._parts.limits.on_memory_level(level)
        self._parts.intake.on_memory_level(level)
        if level > MemoryLevel.NORMAL:
            self._catalogue.release_caches()

    async def _find_peers(self) -> None:
        """Requests that arrive before the shards and the safety service are known would be rejected although nothing is
        wrong. At a port shared with other routers that may be any client's request."""
        await self._watcher.wait_until_tried()
        if self.callers.identities is not None:
            await self.callers.identities.tried.wait()
        if self._parts.safety_link is not None:
            await self._parts.safety_link.tried.wait()

    async def _connect_safety(self, link: SafetyLink) -> None:
        await self._parts.safety_finder.found.wait()
        await link.run()

    async def _open(self) -> Announcer[RouterRecord] | None:
        """Returns what announces it; None without Redis. Raises StartError if another machine has a router of this
        name."""
        announcer = await self._named_announcer() if self._config.redis.url else None
        for listener in self._listeners:
            await listener.start()
        log.info("router_started", address=self._parts.for_clients.address, internal_address=self.internal_address)
        return announcer

    async def _named_announcer(self) -> Announcer[RouterRecord]:
        registry = RouterRegistry(self._config.redis.url, self._config.redis.key_prefix, self._trust.sealer)
        clients_address = self._answers.address
        address = self._advertised(self.internal_address) if self.internal_address else clients_address
        owner = name_owner(self._config.data_dir)
        record = RouterRecord(address, self._router_id, self._parts.incarnation_id, clients_address, owner)
        announcer = Announcer(registry, record)
        try:
            await announcer.wait_for_name()
        except NameTakenError as error:
            await announcer.close()
            raise service.StartError(str(error)) from error
        return announcer

    def _advertised(self, address: str) -> str:
        return advertised_address(self._config, address)

    async def _drain(self) -> None:
        self._draining = True
        self.features.drain()
        self._driver.dispatch(DrainStarted())
        self._health.refresh()
        log.info("drain_began", num_live_requests=self._driver.num_live_requests)
        try:
            async with asyncio.timeout(self._config.fabric.drain_timeout_seconds):
                await self._driver.wait_idle()
        except TimeoutError:
            log.warning("drain_timed_out", num_live_requests=self._driver.num_live_requests)
            self._driver.dispatch(DrainEnded())

    async def _close_streams(self) -> None:
        await asyncio.gather(*(listener.stop(CLOSE_GRACE_SECONDS) for listener in self._listeners))

    @property
    def _listeners(self) -> list[RouterListener]:
        return (
            [self._parts.for_clients]
            if self._parts.for_fabric is None
            else [self._parts.for_clients, self._parts.for_fabric]
        )

    def _is_serving(self) -> bool:
        has_safety = self._driver.has_safety or self._config.safety.on_unavailable == "allow"
        waits_for_shards = self._config.router.overload.start_patience_seconds > 0
        has_shard = waits_for_shards or any(model.num_ready_shards for model in self._core.fleet.models)
        return has_shard and has_safety and not self._draining

    def _gauges(self) -> dict[GaugeRecord, float]:
        return {
            table.REQUESTS_LIVE: self._driver.num_live_requests - self.features.num_own_requests,
            table.REQUESTS_QUEUED: self._core.num_queued_requests,
            table.CLIENTS_CONNECTED: self._driver.num_clients,
            table.SAFETY_CONNECTED: float(self._driver.has_safety),
            table.DECISIONS_REMEMBERED: self._records.decisions.num_remembered,
            table.DRAINING: float(self._draining),
        }


async def _cancel_all(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancels the tasks, repeatedly: the Redis client loses a cancellation that comes while its connection breaks."""
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_SECONDS)


class HealthReporter:
    """Reports changes of the router's health. It needs a task, `run`, because the health servicer's setter is
    asynchronous."""

    def __init__(self, health: HealthServicer, service_names: Sequence[str], is_serving: Callable[[], bool]) -> None:
        self._health = health
        self._service_names = service_names
        self._is_serving = is_serving
        self._wake = asyncio.Event()

    def refresh(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        """Runs until it is cancelled."""
        reported = False
        while True:
            await self._wake.wait()
            self._wake.clear()
            serving = self._is_serving()
            if serving != reported:
                await set_serving(self._health, self._service_names, serving)
                reported = serving
