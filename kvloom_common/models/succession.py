"""A model that is being unloaded leaves its names to the one that succeeds it, also where nothing is known of the
rollout: the registry may be away, or the process new."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import FleetState
from kvloom_common.models.catalogue import Catalogue
from kvloom_common.models.model_routes import ModelRoutes
from kvloom_common.models.served_model import ServedModel

_POLL_SECONDS: Final = 1.0


class FleetSource(Protocol):
    """Where an edge hears of the models: its link to the routers."""

    @property
    def fleet(self) -> FleetState: ...

    async def wait_fleet_change(self) -> None: ...


@dataclasses.dataclass(slots=True)
class SuccessionFollower:
    """Keeps the routes of an edge in step with the withdrawals that routers report. See
    kvloom_common.process.watched_files.following."""

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


def fallback_models(passed: Sequence[tuple[str, KvloomError]], models: Mapping[str, ServedModel]) -> Iterator[str]:
    """The models that succeed those of `passed` that routers no longer take requests for, each once: a process hears of
    a withdrawal a moment after the router, and what it sends meanwhile is refused. `passed` are the models that have
    been tried, with their errors, and may grow while this is iterated; `models` are those that the process has."""
    for name, error in passed:
        if error.reason == ErrorReason.ERROR_REASON_MODEL_NOT_FOUND:
            held = models.get(name)
            tried = {other for other, _ in passed}
            for model in models.values():
                is_heir = model.succeeds in (name, held.name if held else name) and model.adapter is None
                if is_heir and model.name not in tried:
                    yield model.name
                    break


def error_to_report(passed: Sequence[tuple[str, KvloomError]]) -> KvloomError:
    """The error that a client gets if none of the models could take its request: that of the first, which it preferred.
    Models that do not exist, or have just been withdrawn, count only if no other was there: that one may be only busy.
    """
    errors = [error for _, error in passed]
    return next((error for error in errors if error.reason != ErrorReason.ERROR_REASON_MODEL_NOT_FOUND), errors[0])
