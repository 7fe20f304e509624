"""Loads and unloads models while traffic runs, as `tools/supervisor/models/changes.py` does."""

from __future__ import annotations

import random
from typing import Final

from lab.dst.nodes.shard import SimulatedShard
from lab.dst.scenario import MODELS, draw_loaded_shards
from lab.dst.unloading import withdraw
from lab.dst.world import World
from tools.supervisor.models.idle_watch import POLL_SECONDS, IdleWatch

MAX_SHARDS: Final = 8


class SimulatedModelChanges:
    """Its random numbers are its own."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._env = world.env
        self._rng = random.Random(f"{world.env.scenario.seed} model changes {world.env.timeline.now}")

    def model_loaded(self) -> None:
        """The shards of a further model join. It may have been there before, with other sizes."""
        loaded = {shard.shape.model for shard in self._world.shards}
        others = [model for model in MODELS if model not in loaded and not self._is_rolled_out(model)]
        if not others or len(self._world.shards) + 2 > MAX_SHARDS:
            return
        model = self._rng.choice(others)
        for shape in draw_loaded_shards(self._rng, self._env.scenario, model):
            self._world.add_shard(shape)
        if model not in self._world.traffic.models:
            self._world.traffic.models.append(model)
        self._env.count_fault("model_loaded")

    def model_unloaded(self) -> None:
        """The shards of a model are withdrawn. They stop when they have nothing to do any more."""
        self._begin()

    def unload_taken_back(self) -> None:
        """The operator changes their mind while a model is being unloaded."""
        model = next(iter(self._world.unloading), None) or self._begin()
        if model is not None:
            unload = self._world.unloading[model]
            self._env.timeline.after(self._rng.random() * 0.4, self._take_back, model, unload)

    def _begin(self) -> str | None:
        """Returns the model. The last one cannot be unloaded."""
        loaded = sorted({shard.shape.model for shard in self._world.shards} - self._world.unloading.keys())
        if len(loaded) < 2:
            return None
        loaded = [model for model in loaded if not self._is_rolled_out(model)]
        if not loaded:
            return None
        model = self._rng.choice(loaded)
        unload = self._world.unloading[model] = object()
        self._poll(model, unload, IdleWatch())
        return model

    def _is_rolled_out(self, model: str) -> bool:
        """The operator leaves models alone of which there is or was a rollout."""
        return self._world.rollouts is not None and self._world.rollouts.has(model)

    def _shards(self, model: str) -> list[SimulatedShard]:
        return [shard for shard in self._world.shards if shard.shape.model == model]

    def _poll(self, model: str, unload: object, watch: IdleWatch) -> None:
        if self._world.unloading.get(model) is not unload:
            return
        watch.take(withdraw(self._shards(model)))
        if not watch.is_over:
            self._env.timeline.after(POLL_SECONDS, self._poll, model, unload, watch)
            return
        for shard in self._shards(model):
            shard.begin_to_end()
            self._env.timeline.after(self._rng.random() * 0.2, self._end, shard)

    def _end(self, shard: SimulatedShard) -> None:
        """The process has drained."""
        self._world.remove_shard(shard)
        model = shard.shape.model
        if not self._shards(model):
            del self._world.unloading[model]
            self._env.count_fault("model_unloaded")

    def _take_back(self, model: str, unload: object) -> None:
        shards = self._shards(model)
        if self._world.unloading.get(model) is not unload or any(shard.is_ending for shard in shards):
            return
        del self._world.unloading[model]
        for shard in shards:
            if shard.is_up:
                shard.set_withdrawn(False)
        self._env.count_fault("unload_taken_back")
