"""Simulates what the routers have counted, as the supervisor reads it for its judgement."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.finish_reasons import FINISH_REASON_NAMES
from lab.dst.environment import Environment
from lab.dst.views import RouterProcess
from router.core.actions import RequestEnded
from tools.supervisor.rollout.measurements import REQUESTS, Increments, Series


class RouterCounters:
    """The counters of all routers, by incarnation."""

    def __init__(self) -> None:
        self.by_router: dict[str, Counter[Series]] = {}

    def count(self, router: str, ended: RequestEnded) -> None:
        error_type = ErrorReason.Name(ended.error_reason) if ended.error_reason else ""
        labels = {
            "error_type": error_type.removeprefix("ERROR_REASON_").lower(),
            "model": ended.model,
            "outcome": FINISH_REASON_NAMES[ended.reason],
        }
        self.by_router.setdefault(router, Counter())[f"{REQUESTS}_total", tuple(sorted(labels.items()))] += 1


class SimMetering:
    """See tools.supervisor.rollout.measurements.Metering: asks all routers that answer."""

    def __init__(
        self, env: Environment, counters: RouterCounters, routers: Callable[[], Sequence[RouterProcess]]
    ) -> None:
        self._env = env
        self._counters = counters
        self._routers = routers
        self.increments = Increments()

    async def read(self) -> bool:
        await asyncio.sleep(2 * self._env.scenario.latency_seconds)
        answering = [router for router in self._routers() if router.is_alive and not router.is_paused]
        for router in answering:
            counted = self._counters.by_router.get(router.name, Counter())
            self.increments.add(router.name, {series: float(value) for series, value in counted.items()})
        return bool(answering)

    async def close(self) -> None:
        pass
