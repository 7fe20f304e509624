"""Loads and unloads models while traffic runs, as `tools/supervisor/models/changes.py` does."""

from __future__ import annotations

import random
from typing import Final

from tools.dst.nodes.shard import SimShard
from tools.dst.scenario import MODELS, draw_loaded_shards
from tools.dst.world import World

MAX_SHARDS: Final = 8
_POLL_SECONDS: Final = 0.1
_NUM_IDLE_POLLS: Final = 3
"""As in the supervisor."""


class ModelChanges:
    """Its random numbers are its own."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._env = world.env
        self._rng = random.Random(f"{world.env.scenario.seed} model changes {world.env.timeline.now}")

    def model_loaded(self) -> None:
        """The shards of a further model join. It may have been there before, with other sizes."""
        loaded = {shard.shape.model for shard in self._world.shards}
        others = [model for model in MODELS if model not in loaded]
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
        model = self._rng.choice(loaded)
        unload = self._world.unloading[model] = object()
        self._poll(model, unload, 0)
        return model

    def _shards(self, model: str) -> list[SimShard]:
        return [shard for shard in self._world.shards if shard.shape.model == model]

    def _poll(self, model: str, unload: object, num_idle: int) -> None:
        """Every shard is told again each time: it may have restarted. One that hangs does not answer."""
        if self._world.unloading.get(model) is not unload:
            return
        shards = [shard for shard in self._shards(model) if shard.is_up]
        for shard in shards:
            if not shard.is_hung:
                shard.set_withdrawn(True)
        is_idle = not any(shard.is_hung or shard.engine.sequences for shard in shards)
        num_idle = num_idle + 1 if is_idle else 0
        if num_idle < _NUM_IDLE_POLLS:
            self._env.timeline.after(_POLL_SECONDS, self._poll, model, unload, num_idle)
            return
        for shard in self._shards(model):
            shard.begin_to_end()
            self._env.timeline.after(self._rng.random() * 0.2, self._end, shard)

    def _end(self, shard: SimShard) -> None:
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
