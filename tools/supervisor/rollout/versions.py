"""The two versions of a model on this machine, as a rollout loads and unloads them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

from kvloom_common.config import ModelConfig
from tools.failures import CommandError
from tools.supervisor.models.changes import ModelChanges
from tools.supervisor.rollout.plan import RolloutPlan
from tools.supervisor.rollout.rollout import OnStep
from tools.supervisor.supervised_process import ProcessState


@dataclasses.dataclass(slots=True)
class ModelVersions:
    """See rollout.Versions. Each change waits until no other one is in progress."""

    plan: RolloutPlan
    old: ModelConfig
    models: ModelChanges
    changing: asyncio.Lock
    wait_served: Callable[[str], Awaitable[None]]
    """Returns when the edges of this machine serve the model. Raises CommandError."""
    on_change: Callable[[], None]
    _num_restarts: dict[str, int] = dataclasses.field(default_factory=dict)
    """By the name of each shard of the new version, when it was ready."""

    async def load_new(self, on_step: OnStep) -> None:
        async with self.changing:
            name = await self.models.load(self.plan.successor_of(self.old), self.plan.num_shards, on_step)
            self.on_change()
            try:
                await self.wait_served(name)
            except CommandError:
                await self.models.unload(name, 0.0, on_step, for_rollout=True)
                raise
            self._num_restarts = {status.name: status.restarts for status in self.models.statuses(name)}
        on_step(f"{name} is loaded and has no requests yet")

    async def unload_old(self, on_step: OnStep) -> None:
        await self._unload(self.old.name, on_step)

    async def unload_new(self, on_step: OnStep) -> None:
        await self._unload(self.plan.version, on_step)

    async def _unload(self, name: str, on_step: OnStep) -> None:
        async with self.changing:
            await self.models.unload(name, self.plan.drain_seconds, on_step, for_rollout=True)
            self.on_change()

    def lost_shards(self) -> str:
        """Planned restarts do not count."""
        for status in self.models.statuses(self.plan.version):
            if status.state in (ProcessState.RESTARTING, ProcessState.STOPPED):
                return f"{status.name} is {status.state}"
            if status.restarts > self._num_restarts.setdefault(status.name, status.restarts):
                return f"{status.name} has crashed"
        return ""
