"""grpc.health.v1 for the router, which is SERVING while it could answer a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvloom_common.process.service import HealthServicer, set_serving


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
