"""The picker as a gRPC service with its health, and the tasks that keep its endpoints up to date."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import aiohttp
import structlog
from grpc_health.v1 import health_pb2
from prometheus_client import CollectorRegistry

from kvloom.v1 import external_processor_pb2 as ext_proc
from kvloom.v1 import external_processor_pb2_grpc
from kvloom_common.process.service import HealthServicer
from tools.gateway import metrics
from tools.gateway.engine_load import ScrapedLoad
from tools.gateway.exchange import Door, HttpExchange
from tools.gateway.picker import Picker
from tools.gateway.pool import Pool, PoolEndpoint
from tools.gateway.prompts import PromptReader
from tools.gateway.scraper import SCRAPE_SECONDS, TIMEOUT_SECONDS, follow_load

log = structlog.get_logger()

SERVICE_NAME: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
READINESS: Final = ("readiness", SERVICE_NAME, "")
"""The health services that say whether requests can be placed; `liveness` says that this process runs."""


class Gateway(external_processor_pb2_grpc.ExternalProcessorServicer):
    """Serves from `start` to `close`."""

    def __init__(
        self,
        pool: Pool,
        reader: PromptReader,
        health: HealthServicer,
        registry: CollectorRegistry,
        scrape_seconds: float = SCRAPE_SECONDS,
    ) -> None:
        self.picker = Picker(pool)
        self._health = health
        self._scrape_seconds = scrape_seconds
        self._kv_gaps = metrics.KV_GAPS.family(registry)
        requests = metrics.REQUESTS.family(registry)
        metrics.ENDPOINTS_READY.watch(registry, lambda: self.picker.num_ready)
        seconds = metrics.PICK_SECONDS.series(registry)
        self.door = Door(self.picker, reader, lambda outcome: requests.labels(outcome).inc(), seconds.observe)
        self._session: aiohttp.ClientSession | None = None
        self._loads: dict[PoolEndpoint, asyncio.Task[None]] = {}
        self._kv_events: dict[str, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS))
        await self._health.set("liveness", health_pb2.HealthCheckResponse.SERVING)
        await self._note_readiness()
        self.use_pool(self.picker.pool)

    def use_pool(self, pool: Pool) -> None:
        """The pool has changed: endpoints that are new are followed, and those that are gone forgotten."""
        assert self._session is not None
        self.picker.pool = pool
        self.door.reader.adapters = pool.adapters
        for endpoint in self._loads.keys() - set(pool.endpoints):
            self._loads.pop(endpoint).cancel()
            self._stop_kv_events(endpoint.address)
            self.picker.remove(endpoint.address)
            self._spawn(self._note_readiness())
        for endpoint in pool.endpoints:
            if endpoint not in self._loads:
                following = follow_load(self._session, endpoint, self._user_of(endpoint), self._scrape_seconds)
                self._loads[endpoint] = asyncio.create_task(following, name=f"load of {endpoint.address}")

    async def close(self) -> None:
        for address in list(self._kv_events):
            self._stop_kv_events(address)
        for task in self._loads.values():
            task.cancel()
        await asyncio.gather(*self._loads.values(), *self._background, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def Process(self, request_iterator: AsyncIterator[ext_proc.ProcessingRequest], context: Any) -> None:
        exchange = HttpExchange(self.door)
        try:
            async for message in request_iterator:
                for response in await exchange.handle(message):
                    await context.write(response)
                if exchange.is_over:
                    return
        finally:
            exchange.close()

    def _user_of(self, endpoint: PoolEndpoint) -> Any:
        address, picker = endpoint.address, self.picker

        def use(load: ScrapedLoad | None) -> None:
            if load is not None:
                now = asyncio.get_running_loop().time()
                if picker.describe(address, load, now, has_kv_events=bool(endpoint.kv_events)):
                    self._spawn(self._note_readiness())
                    if endpoint.kv_events:
                        self._follow_kv_events(endpoint)
                picker.report(address, load)
            if picker.set_ready(address, is_ready=load is not None):
                log.info("endpoint_readiness_changed", address=address, is_ready=load is not None)
                self._spawn(self._note_readiness())

        return use

    def _follow_kv_events(self, endpoint: PoolEndpoint) -> None:
        from tools.gateway.kv_events import KvTranslator
        from tools.gateway.kv_subscriber import KvSubscriber  # pyzmq is needed for this alone

        address, picker, loop = endpoint.address, self.picker, asyncio.get_running_loop()
        self._stop_kv_events(address)
        block_size, num_blocks = picker.block_size(address)
        subscriber = KvSubscriber(
            endpoint.kv_events,
            endpoint.kv_replay,
            KvTranslator(block_size, 2 * num_blocks),
            lambda changes: picker.apply(address, changes, loop.time()),
            lambda outcome: self._kv_gaps.labels(outcome).inc(),
        )
        self._kv_events[address] = self._spawn(subscriber.run())

    def _stop_kv_events(self, address: str) -> None:
        task = self._kv_events.pop(address, None)
        if task is not None:
            task.cancel()

    async def _note_readiness(self) -> None:
        is_ready = self.picker.num_ready > 0
        status = health_pb2.HealthCheckResponse
        for name in READINESS:
            await self._health.set(name, status.SERVING if is_ready else status.NOT_SERVING)

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task
