"""A model that is being unloaded leaves its names to the one that succeeds it, also where nothing is known of the
rollout: the registry may be away, or the process new."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Final, Protocol

from kvloom.models.catalogue import Catalogue
from kvloom.models.model_routes import ModelRoutes
from kvloom.v1.router_service_pb2 import FleetState

_POLL_SECONDS: Final = 1.0


class FleetSource(Protocol):
    """Where an edge hears of the models: its link to the routers."""

    @property
    def fleet(self) -> FleetState: ...

    async def wait_fleet_change(self) -> None: ...


@dataclasses.dataclass(slots=True)
class SuccessionFollower:
    """Keeps the routes of an edge in step with the withdrawals that routers report. See
    kvloom.process.watched_files.following."""

    catalogue: Catalogue
    routes: ModelRoutes
    source: FleetSource

    async def watch(self) -> None:
        """Follow changes until cancelled."""
        while True:
            withdrawn = {info.name for info in self.source.fleet.models if info.withdrawn}
            self.routes.follow_successors(self.catalogue.successors(withdrawn))
            try:
                # The card of a successor may come later than the withdrawal.
                async with asyncio.timeout(_POLL_SECONDS if withdrawn else None):
                    await self.source.wait_fleet_change()
            except TimeoutError:
                pass
