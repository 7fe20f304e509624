"""Asks the routers again and again how their fleet is, and keeps a policy for each model."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

import grpc.aio
import structlog
from prometheus_client import CollectorRegistry, Metric

from kvloom.transport.channel_options import OpenChannel
from kvloom.v1.overview_pb2 import GetOverviewRequest
from kvloom.v1.overview_pb2_grpc import OverviewServiceStub
from kvloom.v1.router_service_pb2 import GetMetricsRequest
from kvloom.v1.router_service_pb2_grpc import RouterServiceStub
from kvloom_common.metrics.table import CollectorOf
from tools.failures import CommandError
from tools.scaler import metrics
from tools.scaler.load import TPOT_METRIC, TTFT_METRIC, FleetReading, ModelLoad, RouterAnswer, latencies_in, loads_of
from tools.scaler.policy import Recommendation, ScalingPolicy, ScalingTargets

log = structlog.get_logger()

READ_SECONDS: Final = 5.0
CALL_SECONDS: Final = 3.0
WINDOW_SECONDS: Final = 60.0
"""Rates and latencies are those of the last minute."""
STALE_SECONDS: Final = 30.0
"""Older readings are no answer to KEDA."""
MAX_MODELS: Final = 1024
"""Models beyond these have no policy."""


class FleetWatch:
    """Keeps recommendations up to date while `run` runs."""

    def __init__(
        self,
        find_routers: Callable[[], Awaitable[Sequence[str]]],
        open_channel: OpenChannel,
        targets: ScalingTargets,
        registry: CollectorRegistry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`find_routers` returns their addresses, and raises CommandError if it cannot ask; then the ones before are
        asked."""
        self._find_routers = find_routers
        self._open_channel = open_channel
        self._targets = targets
        self._clock = clock
        self._addresses: Sequence[str] = ()
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._readings: deque[FleetReading] = deque()
        self._policies: dict[str, ScalingPolicy] = {}
        self._loads: dict[str, ModelLoad] = {}
        self._read_at = clock()
        self._has_read = asyncio.Event()
        self.num_readings = 0
        self.recommendations: dict[str, Recommendation] = {}
        CollectorOf(registry, self._collect)

    @property
    def is_current(self) -> bool:
        """False while there is nothing, or only something old, to go by."""
        return self.num_readings > 0 and self._clock() - self._read_at <= STALE_SECONDS

    def num_ready(self, model: str) -> int:
        """Shards of the model that take requests."""
        load = self._loads.get(model)
        return 0 if load is None else load.num_shards

    async def until_read_after(self, num_readings: int) -> None:
        """Return when there are more readings than these, or the last one is too old to go by."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STALE_SECONDS):
                while self.num_readings <= num_readings:
                    await self._has_read.wait()

    async def run(self) -> None:
        try:
            while True:
                await self.read()
                await asyncio.sleep(READ_SECONDS)
        finally:
            await self.close()

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))
        self._channels.clear()

    async def read(self) -> None:
        """Ask all routers once. Without an answer everything stays as it is."""
        try:
            self._addresses = await self._find_routers()
        except CommandError as error:
            log.warning("routers_not_found", error=error.message)
        await self._keep_channels()
        found = await asyncio.gather(*map(self._ask, self._channels.values()))
        answers = [answer for answer in found if answer is not None]
        if not answers:
            log.warning("router_call_failed", num_routers=len(self._addresses))
            return
        self._use(FleetReading(self._clock(), answers))

    def _use(self, reading: FleetReading) -> None:
        while len(self._readings) > 1 and self._readings[1].at_seconds <= reading.at_seconds - WINDOW_SECONDS:
            self._readings.popleft()
        self._loads = loads_of(reading, self._readings[0] if self._readings else None)
        self._readings.append(reading)
        for model in self._policies.keys() - self._loads.keys():
            self._loads[model] = ModelLoad(num_shards=0)
        for model, load in self._loads.items():
            if model not in self._policies:
                if len(self._policies) >= MAX_MODELS:
                    continue
                self._policies[model] = ScalingPolicy(self._targets)
            before = self.recommendations.get(model)
            now = self.recommendations[model] = self._policies[model].recommend(load, reading.at_seconds)
            if before is not None and before.num_shards != now.num_shards:
                terms = {name: round(value, 2) for name, value in now.terms.items()}
                log.info("recommendation_changed", model=model, before=before.num_shards, now=now.num_shards, **terms)
        self._read_at = reading.at_seconds
        self.num_readings += 1
        self._has_read.set()
        self._has_read = asyncio.Event()

    async def _keep_channels(self) -> None:
        for address in self._channels.keys() - set(self._addresses):
            await self._channels.pop(address).close()
        for address in self._addresses:
            if address not in self._channels:
                self._channels[address] = self._open_channel(address)

    async def _ask(self, channel: grpc.aio.Channel) -> RouterAnswer | None:
        wanted = GetMetricsRequest(names=[TTFT_METRIC, TPOT_METRIC])
        with contextlib.suppress(grpc.aio.AioRpcError, ValueError):
            overview, counted = await asyncio.gather(
                OverviewServiceStub(channel).GetOverview(GetOverviewRequest(only_now=True), timeout=CALL_SECONDS),
                RouterServiceStub(channel).GetMetrics(wanted, timeout=CALL_SECONDS),
            )
            return RouterAnswer(overview, latencies_in(counted.text), counted.incarnation_id)
        return None

    def _collect(self) -> Iterable[Metric]:
        """Called by the thread of a scraper: dictionaries that it reads are replaced or only grow."""
        recommendations, loads = dict(self.recommendations), dict(self._loads)
        yield metrics.READING_AGE.collected(max(0.0, self._clock() - self._read_at))
        yield metrics.SHARDS_RECOMMENDED.collected({(name,): one.num_shards for name, one in recommendations.items()})
        yield metrics.SHARDS_NEEDED.collected(
            {(name, term): value for name, one in recommendations.items() for term, value in one.terms.items()}
        )
        yield metrics.SHARDS_READY.collected({(name,): one.num_shards for name, one in loads.items()})
        yield metrics.QUEUED_SECONDS.collected({(name,): one.queued_seconds for name, one in loads.items()})
