"""Says whether a machine's part of a fabric is complete and serves, or what is missing."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import redis.exceptions

from kvloom_common.config import KvloomConfig
from kvloom_common.trust.fabric_trust import FabricTrust
from tools.failures import CommandError
from tools.supervisor.fleet_records import FleetRecords
from tools.supervisor.fleet_registry import FleetRegistry
from tools.supervisor.models.changes import ModelChanges
from tools.supervisor.process_specs import started_roles
from tools.supervisor.readiness import (
    edges_without,
    not_ready_reasons,
    roles_missing,
    shards_to_register,
    shards_without_router,
)
from tools.supervisor.spares import has_stand_in
from tools.supervisor.state import FabricState
from tools.supervisor.supervised_process import ProcessStatus
from tools.supervisor.supervisor import Supervisor

_READY_TIMEOUT_SECONDS = 60.0
"""The time in which processes that are ready must find one another."""
_POLL_SECONDS = 0.05


class FabricReadiness:
    """Compares the processes, the registry and what routers see with what was configured."""

    def __init__(
        self,
        config: KvloomConfig,
        state: FabricState,
        supervisor: Supervisor,
        models: ModelChanges,
        registry: FleetRegistry | None,
        trust: FabricTrust,
        log_dir: Path,
    ) -> None:
        """`registry` is that of a fleet."""
        self._config = config
        self._state = state
        self._supervisor = supervisor
        self._models = models
        self._registry = registry
        self._trust = trust
        self._log_dir = log_dir
        self._roles = started_roles(config)
        self.num_spares = 0
        """The shards that stand in for others now."""

    async def _what_is_missing(self) -> list[str]:
        """Returns the reasons why this machine is not ready. Roles that other machines of the fleet are to have, and
        that none has yet, are none: then it is ready as soon as its own processes are, and registered."""
        statuses = self._supervisor.statuses
        if not self._supervisor.all_ready:
            away = [f"{status.name} is {status.state}" for status in statuses if status.state != "ready"]
            return away or ["not all processes run"]
        num_shards = self._models.num_awake_shards + self.num_spares if "shard" in self._roles else 0
        if not num_shards and self._models.asleep:
            return []  # nothing is served, as it was asked for
        if self._registry is None and "shard" not in self._roles:
            return []  # the shards are elsewhere, found by their names
        records = await self.records()
        if records is None:
            return await not_ready_reasons(statuses, num_shards, self._trust)
        missing = [f"{name} is not registered yet" for name in shards_to_register(statuses, records)]
        if not missing and not self.roles_missing(records):
            missing = await not_ready_reasons(statuses, num_shards, self._trust)
        if not missing and records.routers:
            alone = await shards_without_router(statuses, self._trust)
            missing = [f"no router has connected to {name} yet" for name in alone]
        return missing

    async def _edges_without(self, model: str) -> list[str]:
        return await edges_without(self._supervisor.statuses, model, self._trust) if model else []

    def roles_missing(self, records: FleetRecords) -> list[str]:
        has_router = "router" in self._roles or self._config.edge.colocate
        roles = {*self._roles, *(["router"] if has_router else [])}
        needs_safety = has_router and self._config.safety.on_unavailable == "refuse"
        return roles_missing(roles, records, needs_safety=needs_safety)

    async def records(self) -> FleetRecords | None:
        """None outside a fleet, or if the registry cannot be read."""
        if self._registry is None:
            return None
        try:
            return await self._registry.read()
        except (redis.exceptions.RedisError, OSError):
            return None

    async def wait(self, model: str = "") -> None:
        """Until the fabric is complete, and its edges serve the model. Raises CommandError."""
        deadline = time.monotonic() + _READY_TIMEOUT_SECONDS
        while missing := await self._what_is_missing() or await self._edges_without(model):
            if time.monotonic() > deadline:
                raise CommandError(
                    f"every process runs, but {self._state.place} did not become ready within "
                    f"{_READY_TIMEOUT_SECONDS:g} s: {'; '.join(missing)} (logs: {self._log_dir})"
                )
            await asyncio.sleep(_POLL_SECONDS)

    async def why_not_served(self) -> list[str]:
        """Why requests are not served. A fabric that has lost some of its shards serves."""
        statuses = self._supervisor.statuses
        records = await self.records()
        missing = [] if records is None else self.roles_missing(records)
        reasons = [f"the fleet has no {role}" for role in missing]
        if self._models.asleep and not self._models.num_awake_shards:
            reasons += [f"{name} sleeps (kvloom models wake {name})" for name in self._models.asleep]
        reasons += await not_ready_reasons(statuses, 0 if missing else 1, self._trust)
        if not reasons and self._registry is not None:
            alone = await shards_without_router(statuses, self._trust)
            reasons = [f"no router is connected to {name}" for name in alone]
        return reasons

    async def has_stand_in_for(self, status: ProcessStatus) -> bool:
        """True when another shard has the model, here or on another machine of the fleet."""
        if has_stand_in(status, self._supervisor.statuses):
            return True
        records = await self.records()
        return records is not None and any(
            record.model == status.model and record.owner != self._state.owner for record in records.shards.values()
        )
