"""The rollouts that begin while traffic runs, and what befalls them."""

from __future__ import annotations

import random
from typing import Final

from lab.dst.nodes.shard import SimulatedShard
from lab.dst.rollouts.world import SimulatedRollouts
from lab.dst.world import World
from tools.supervisor.rollout.judge import RolloutLimits
from tools.supervisor.rollout.plan import RolloutPlan

MAX_SHARDS: Final = 12
_STEPS: Final = ((1, 10, 50, 100), (1, 10, 50, 100), (10, 100), (20, 40, 60, 80, 100), (50, 100), (100,))
_LAPSE_SECONDS: Final = 8.0
"""Longer than a record lives that is not renewed."""


class RolloutChanges:
    """Its random numbers are its own. A change is counted when it has been made."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._env = world.env
        self._rng = random.Random(f"{world.env.scenario.seed} rollout changes {world.env.timeline.now}")
        self._num_begun = 0

    @property
    def _rollouts(self) -> SimulatedRollouts:
        assert self._world.rollouts is not None
        return self._world.rollouts

    def rollout_begun(self) -> None:
        """A new version of a model is rolled out, unless another rollout runs."""
        rollouts, world = self._rollouts, self._world
        names = {shard.shape.model.partition("@")[0] for shard in world.shards}
        names -= {model.partition("@")[0] for model in world.unloading}
        name = self._rng.choice(sorted(names) or [""])
        old = rollouts.serving[name].name if name in rollouts.serving else name
        shards = self._shards(old)
        if rollouts.is_running or rollouts.supervisor.is_hung or not shards:
            return
        if len(world.shards) + len(shards) > MAX_SHARDS:
            return
        number = int(old.partition("@")[2] or 1) + 1
        limits = RolloutLimits(min_requests=self._rng.choice((0, 0, 1, 3)))
        steps, hold = self._rng.choice(_STEPS), self._rng.choice((0.1, 0.3, 0.6))
        plan = RolloutPlan(f"{name}@{number}", steps=steps, hold_seconds=hold, limits=limits)
        rollouts.begin(plan)
        if plan.version not in world.traffic.models:
            world.traffic.models.append(plan.version)
        self._env.count_fault("rollout_begun")

    def rollout_taken_back(self) -> None:
        """The operator changes their mind."""
        for name in self._rollouts.supervisor.running:
            if self._rollouts.supervisor.roll_back(name):
                self._env.count_fault("rollout_taken_back")

    def new_version_fails(self) -> None:
        """It does on most requests, from now on."""
        for one in self._rollouts.supervisor.running.values():
            for shard in self._shards(one.new.name):
                shard.break_engine(0.7)
                self._env.count_fault("new_version_fails")

    def old_version_slow(self) -> None:
        """Slows the old version's shards, so that what they have begun takes long to end."""
        for one in self._rollouts.supervisor.running.values():
            for shard in self._shards(one.old.name):
                shard.slowness = 10.0
                self._env.timeline.after(self._rng.random() * 5.0, shard.restore_speed)
                self._env.count_fault("old_version_slow")

    def supervisor_killed(self) -> None:
        if self._rollouts.supervisor.running:
            self._rollouts.supervisor.kill()
            self._env.count_fault("supervisor_killed")

    def supervisor_hung(self) -> None:
        if self._rollouts.is_running:
            self._rollouts.supervisor.hang(self._rng.choice((1.0, _LAPSE_SECONDS)) * self._rng.random())
            self._env.count_fault("supervisor_hung")

    def registry_lost(self) -> None:
        """No process can reach the registry."""
        if self._rollouts.is_running:
            self._world.registry.is_reachable = False
            seconds = self._rng.choice((1.0, _LAPSE_SECONDS)) * self._rng.random()
            self._env.timeline.after(seconds, self._world.repair_registry)
            self._env.count_fault("registry_lost")

    def edge_cut_off(self) -> None:
        """One edge cannot reach the registry."""
        edge = self._rng.choice(self._rollouts.edges)
        if self._rollouts.is_running:
            edge.registry.cut_off(self._rng.random() * _LAPSE_SECONDS)
            self._env.count_fault("edge_cut_off")

    def _shards(self, model: str) -> list[SimulatedShard]:
        return [shard for shard in self._world.shards if shard.shape.model == model]
