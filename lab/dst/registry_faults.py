"""The faults of the registry: bad and stale records, and none."""

from __future__ import annotations

from typing import Final

import msgspec

from lab.dst.nodes.shard import SimulatedShard
from lab.dst.world import World

_LATE_SECONDS: Final = (0.5, 4.0, 20.0)
"""How long what should not be there stays. The longest outlasts the time in which a live shard must be found."""


class RegistryFaults:
    def __init__(self, world: World) -> None:
        self._world = world
        self._registry = world.registry

    def _victim(self) -> SimulatedShard:
        return self._registry.rng.choice(self._world.shards)

    def _put(self, key: str, content: bytes, *, seconds: tuple[float, ...] = _LATE_SECONDS) -> None:
        if self._registry.is_reachable:
            self._registry.put(key, content, self._registry.rng.choice(seconds))

    def registry_garbage(self) -> None:
        """A value that is no record, in place of a true one or beside it."""
        rng = self._registry.rng
        content = rng.choice((rng.randbytes(20), b"[]", b'{"shard_id": 7}', b'{"shard_id":"x"}', b"[" * 3000, b""))
        self._put(rng.choice((self._victim().shard_id, "shard-new")), content)

    def registry_stale(self) -> None:
        """The record of an incarnation that has died, in place of the one that lives."""
        shard = self._victim()
        record = self._registry.record_of(shard, shard.incarnation - 1)
        self._put(shard.shard_id, msgspec.json.encode(record))

    def registry_name_twice(self) -> None:
        """A record of a shard under another name, or one with the address of another shard."""
        shard, other = self._victim(), self._victim()
        record = self._registry.record_of(shard)
        if self._registry.rng.random() < 0.5:
            self._put("shard-alias", msgspec.json.encode(record))
        else:
            moved = msgspec.structs.replace(record, address=other.shard_id, incarnation_id="moved")
            self._put(shard.shard_id, msgspec.json.encode(moved), seconds=_LATE_SECONDS[:2])

    def registry_removed(self) -> None:
        """The record of a shard that lives disappears."""
        if self._registry.is_reachable:
            self._registry.remove(self._victim().shard_id)

    def registry_down(self) -> None:
        self._registry.is_reachable = False
        self._world.env.timeline.after(self._registry.rng.random() * 1.5, self._world.repair_registry)
