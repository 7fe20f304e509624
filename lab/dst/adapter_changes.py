"""Loads, unloads and replaces adapters while traffic runs, as `tools/supervisor/models/adapters.py` does."""

from __future__ import annotations

import random
from typing import Final

from kvloom.adapters import Adapter
from lab.dst.nodes.shard import SimulatedShard
from lab.dst.world import World

NAMES: Final = ("adapter-x", "adapter-y")


class SimulatedAdapterChanges:
    """Its random numbers are its own. A shard that hangs takes no calls; one that is down has the change when it is
    back."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._env = world.env
        self._rng = random.Random(f"{world.env.scenario.seed} adapter changes {world.env.timeline.now}")
        self._num_made = 0

    def adapter_loaded(self) -> None:
        """Some shards of a model get an adapter, which clients hear of."""
        model, name = self._rng.choice(self._world.shards).shape.model, self._rng.choice(NAMES)
        known = [adapter for other, adapter in self._world.traffic.adapters if (other, adapter.name) == (model, name)]
        if known:
            self._give(model, known[-1], self._rng.choice((0.5, 1.0)))
        else:
            self._give(model, self._new(model, name), self._rng.choice((0.5, 1.0)))

    def adapter_unloaded(self) -> None:
        """One shard of a model loses an adapter, or all do."""
        having = [shard for shard in self._world.shards if shard.adapters]
        if not having:
            return
        first = self._rng.choice(having)
        name = self._rng.choice(sorted(first.adapters))
        for shard in [first] if self._rng.random() < 0.5 else self._shards(first.shape.model):
            self._env.timeline.after(self._rng.random() * 0.02, shard.change_adapter, name, None)

    def adapter_replaced(self) -> None:
        """Other weights get the name of an adapter, on one shard after another."""
        having = [shard for shard in self._world.shards if shard.adapters]
        if having:
            first = self._rng.choice(having)
            name = self._rng.choice(sorted(first.adapters))
            self._give(first.shape.model, self._new(first.shape.model, name), 1.0)

    def _new(self, model: str, name: str) -> Adapter:
        self._num_made += 1
        adapter = Adapter(name, f"{name}-{self._num_made}")
        self._world.traffic.adapters.append((model, adapter))
        return adapter

    def _give(self, model: str, adapter: Adapter, share: float) -> None:
        for shard in self._shards(model):
            if self._rng.random() < share:
                self._env.timeline.after(
                    self._rng.random() * 0.05, shard.change_adapter, adapter.name, adapter.checksum
                )

    def _shards(self, model: str) -> list[SimulatedShard]:
        return [shard for shard in self._world.shards if shard.shape.model == model]
