"""Collects what the routers of the fleet have counted for the two versions of a model, since some moment."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Final, Protocol

import grpc
import redis.exceptions
from prometheus_client.samples import Sample

from kvloom.errors import CATALOGUE
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import GetMetricsRequest
from kvloom.v1.router_service_pb2_grpc import RouterServiceStub
from kvloom_common.config import RedisConfig
from kvloom_common.discovery.registry import RouterRegistry
from kvloom_common.metrics.exposition import samples_in
from kvloom_common.models import likelihood_gap
from kvloom_common.models.likelihood_gap import GapSums
from kvloom_common.trust.fabric_trust import FabricTrust
from tools.supervisor.rollout.judge import Counts

REQUESTS: Final = "kvloom_router_requests"
TTFT: Final = "kvloom_router_time_to_first_token_seconds"
_TIMEOUT_SECONDS: Final = 2.0
_MAX_CONCURRENT_CALLS: Final = 32

Series = tuple[str, tuple[tuple[str, str], ...]]
"""A name with its labels."""
Reading = Mapping[Series, float]
"""The counters of one router."""


def _is_fault(reason: str) -> bool:
    """True when an error is the fabric's fault. "" is none; one that is not known here is."""
    try:
        kind = CATALOGUE[ErrorReason.Value(f"ERROR_REASON_{reason.upper()}")]
    except (KeyError, ValueError):
        return bool(reason)
    return kind.openai_type in ("api_error", "overloaded_error")


def reading_of(samples: Iterable[Sample], models: Iterable[str]) -> Reading:
    """The counters of these models."""
    wanted = set(models)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for sample in samples
        if sample.labels.get("model") in wanted and not sample.name.endswith("_created")
    }


def counts_of(reading: Reading, model: str) -> Counts:
    """Returns the counts of a model. Requests that failed by the caller's fault, or were cancelled, are left out."""
    num_requests = num_errors = 0
    cumulative: dict[float, float] = {}
    for (name, labels), value in reading.items():
        label = dict(labels)
        if label.get("model") != model:
            continue
        if name == f"{REQUESTS}_total":
            is_fault = _is_fault(label.get("error_type", ""))
            if is_fault or not label.get("error_type"):
                num_requests += int(value) * (is_fault or label.get("outcome") != "cancelled")
                num_errors += int(value) * is_fault
        elif name == f"{TTFT}_bucket":
            bound = float(label["le"])
            cumulative[bound] = cumulative.get(bound, 0.0) + value
    bounds = tuple(sorted(cumulative))
    passed = [0, *(int(cumulative[bound]) for bound in bounds)]
    return Counts(num_requests, num_errors, bounds, tuple(b - a for a, b in itertools.pairwise(passed)))


def gap_of(reading: Reading, old: str, new: str) -> GapSums:
    """How much less likely the new version finds the answers of the old one, as far as it has scored them."""
    return likelihood_gap.gap_sums_of(
        ((name, dict(labels), value) for (name, labels), value in reading.items()), old, new
    )


class Increments:
    """Sums what the counters of several routers have grown by. A router that is seen for the first time has grown by
    nothing: what it counted before belongs to no step."""

    def __init__(self) -> None:
        self._last: dict[str, Reading] = {}
        self.total: dict[Series, float] = {}

    def add(self, router: str, reading: Reading) -> None:
        """`router`: what tells the process from others, and from its predecessors."""
        before = self._last.get(router, reading)
        for series, value in reading.items():
            grown = value - before.get(series, 0.0)
            if grown:
                self.total[series] = self.total.get(series, 0.0) + grown
        self._last[router] = reading

    def since(self, earlier: Reading) -> Reading:
        return {series: value - earlier.get(series, 0.0) for series, value in self.total.items()}


class RolloutMeasurements(Protocol):
    """Where a rollout gets its figures from."""

    async def read(self) -> bool:
        """Bring the increments up to date. False if no router could be asked."""
        ...

    @property
    def increments(self) -> Increments: ...

    async def close(self) -> None: ...


@dataclasses.dataclass(slots=True)
class RouterMetering:
    """Asks all routers of the fleet. `close` it."""

    redis: RedisConfig
    trust: FabricTrust
    models: tuple[str, str]
    increments: Increments = dataclasses.field(default_factory=Increments)
    _registry: RouterRegistry = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self._registry = RouterRegistry(self.redis.url, self.redis.key_prefix, self.trust.sealer)

    async def read(self) -> bool:
        try:
            routers = await self._registry.list_routers()
        except (redis.exceptions.RedisError, OSError):
            return False
        limit = asyncio.Semaphore(_MAX_CONCURRENT_CALLS)
        return any(await asyncio.gather(*(self._ask(address, limit) for address in routers)))

    async def _ask(self, address: str, limit: asyncio.Semaphore) -> bool:
        async with limit, self.trust.open_channel(address, "router") as channel:
            try:
                request = GetMetricsRequest(names=[REQUESTS, TTFT, *likelihood_gap.COUNTERS])
                answer = await RouterServiceStub(channel).GetMetrics(request, timeout=_TIMEOUT_SECONDS)
                self.increments.add(answer.incarnation_id, reading_of(samples_in(answer.text), self.models))
            except (grpc.aio.AioRpcError, ValueError):
                return False
        return True

    async def close(self) -> None:
        await self._registry.close()
