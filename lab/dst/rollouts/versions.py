"""The two versions of a model, as `tools/supervisor/rollout/commands.py` loads and unloads them."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from lab.dst.environment import Environment
from lab.dst.nodes.shard import SimulatedShard
from lab.dst.rollouts.edge import SimEdge
from lab.dst.scenario import ShardShape
from lab.dst.unloading import withdraw
from tools.failures import CommandError
from tools.supervisor.models.idle_watch import POLL_SECONDS, IdleWatch

_LOAD_FAILS: Final = 0.08
_MAX_LOAD_SECONDS: Final = 5.0
"""After so long without being served, a version counts as one that cannot be loaded."""

OnStep = Callable[[str], None]


class RolloutMachine(Protocol):
    """Where the shards are started and stopped."""

    @property
    def shards(self) -> Sequence[SimulatedShard]: ...

    def add_shard(self, shape: ShardShape) -> None: ...

    def remove_shard(self, shard: SimulatedShard) -> None: ...


class SimVersions:
    """See tools.supervisor.rollout.rollout.Versions. The new version has as many shards as the old one."""

    def __init__(
        self, env: Environment, machine: RolloutMachine, rng: random.Random, edge: SimEdge, old: str, new: str
    ) -> None:
        """`edge`: that of the machine."""
        self._env = env
        self._machine = machine
        self._rng = rng
        self._edge = edge
        self.old = old
        self.new = new
        self._incarnations: dict[str, int] = {}
        """By shard of the new version, when it was served."""

    def shards_of(self, model: str) -> list[SimulatedShard]:
        return [shard for shard in self._machine.shards if shard.shape.model == model]

    async def load_new(self, on_step: OnStep) -> None:
        await asyncio.sleep(self._rng.random() * 0.4)
        if self._rng.random() < _LOAD_FAILS:
            raise CommandError(f"{self.new} cannot be loaded")
        for shard in self.shards_of(self.old):
            self._machine.add_shard(dataclasses.replace(shard.shape, model=self.new))
        try:
            async with asyncio.timeout(_MAX_LOAD_SECONDS):
                while not self._edge.knows(self.new):  # noqa: ASYNC110  (another process, which is asked)
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            await self._unload(self.new)
            raise CommandError(f"{self.new} is not served") from None
        self._incarnations = {shard.shard_id: shard.incarnation for shard in self.shards_of(self.new)}
        on_step(f"{self.new} is loaded")

    async def unload_old(self, on_step: OnStep) -> None:
        await self._unload(self.old)
        on_step(f"{self.old} is unloaded")

    async def unload_new(self, on_step: OnStep) -> None:
        await self._unload(self.new)
        on_step(f"{self.new} is unloaded")

    async def _unload(self, model: str) -> None:
        watch = IdleWatch()
        while not watch.is_over:
            watch.take(withdraw(self.shards_of(model)))
            await asyncio.sleep(POLL_SECONDS)
        for shard in self.shards_of(model):
            shard.begin_to_end()
        for shard in self.shards_of(model):
            await self._drained(shard)
            self._env.checks.on_shard_stopped(shard)
            self._machine.remove_shard(shard)

    async def _drained(self, shard: SimulatedShard) -> None:
        """Return when nothing runs there any more. Nothing begins there, since it drains."""
        while shard.engine.sequences:  # noqa: ASYNC110  (an engine sets no event)
            await asyncio.sleep(POLL_SECONDS)
        await asyncio.sleep(self._rng.random() * 0.1)

    def lost_shards(self) -> str:
        for shard in self.shards_of(self.new):
            if not shard.is_up or shard.incarnation != self._incarnations.get(shard.shard_id):
                return f"{shard.shard_id} has crashed"
        return ""
