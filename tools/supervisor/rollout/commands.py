"""Begins the rollouts of a machine, on its models and in its registry."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import Awaitable, Callable

from kvloom_common.config import KvloomConfig, ModelConfig
from kvloom_common.discovery.records import RolloutRecord
from kvloom_common.discovery.registry import RolloutRegistry
from kvloom_common.trust.fabric_trust import FabricTrust
from tools.failures import CommandError
from tools.supervisor.models.changes import ModelChanges
from tools.supervisor.models.history import ModelHistory
from tools.supervisor.rollout.announcement import RolloutAnnouncement
from tools.supervisor.rollout.measurements import RouterMetering
from tools.supervisor.rollout.plan import RolloutPlan
from tools.supervisor.rollout.rollout import OnStep, Rollout
from tools.supervisor.rollout.rollouts import Rollouts, RunningRollout
from tools.supervisor.rollout.state import RolloutState
from tools.supervisor.supervised_process import ProcessState


@dataclasses.dataclass(slots=True)
class MachineRollouts:
    """See RolloutCommands in service/server.py. `close` it before the processes stop."""

    config: KvloomConfig
    name: str
    """The supervisor's."""
    owner: str
    trust: FabricTrust
    models: ModelChanges
    changing: asyncio.Lock
    check_ready: Callable[[], None]
    """Raises CommandError if the fabric takes no commands now."""
    wait_served: Callable[[str], Awaitable[None]]
    on_change: Callable[[], None]
    report: OnStep
    """For the fabric's own log."""
    history: ModelHistory
    rollouts: Rollouts = dataclasses.field(default_factory=Rollouts)

    async def start(self, plan: RolloutPlan) -> None:
        """Raises CommandError."""
        self.check_ready()
        old = self.models.find(plan.name)
        for name in (old.name, plan.version):
            self.rollouts.check_free(name)
        if old.name == plan.version:
            raise CommandError(f"{plan.version} is served already")
        if old.name in self.models.asleep:
            raise CommandError(f"{old.name} sleeps (kvloom models wake {old.name})")
        if await self.models.is_served_elsewhere(old.name):
            raise CommandError(
                f"{old.name} is served by other machines too, whose shards this one cannot replace: unload it there"
            )
        self.rollouts.start(plan.name, lambda: self._begin(plan, old))

    def _begin(self, plan: RolloutPlan, old: ModelConfig) -> RunningRollout:
        names = tuple(plan.successor_of(old).aliases)
        incarnation_id = uuid.uuid4().hex
        record = RolloutRecord(
            plan.name, names, old.name, plan.version, 0.0, self.name, incarnation_id, self.owner, plan.scored_share
        )
        registry = RolloutRegistry(self.config.redis.url, self.config.redis.key_prefix, self.trust.sealer)
        state = RolloutState(old.name, plan.version, num_steps=len(plan.steps))

        def make(on_step: OnStep) -> Rollout:
            def report(text: str) -> None:
                on_step(text)
                self.report(text)

            return Rollout(
                plan,
                state,
                ModelVersions(plan, old, self.models, self.changing, self.wait_served, self.on_change),
                RolloutAnnouncement(registry, record),
                RouterMetering(self.config.redis, self.trust, (old.name, plan.version)),
                report,
            )

        return RunningRollout(make, self._on_end)

    def _on_end(self, state: RolloutState) -> None:
        self.report(f"{state.new}: {state.phase}{f' ({state.reason})' if state.reason else ''}")
        self.history.add(
            "rollout",
            state.new,
            state.phase,
            state.reason,
            old=state.old,
            step=state.step,
            num_steps=state.num_steps,
        )

    async def follow(self, name: str, on_step: OnStep) -> None:
        """Raises CommandError."""
        await self.rollouts.find(name).follow(on_step)

    def roll_back(self, name: str) -> None:
        """Raises CommandError."""
        self.rollouts.roll_back(name, "it was asked for (kvloom models rollback)")

    async def close(self) -> None:
        await self.rollouts.close()


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
