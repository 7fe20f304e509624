"""The shard's cached blocks as its routers see them: events numbered without a gap, and the whole set on demand."""

from __future__ import annotations

from collections.abc import Sequence

from kvloom.v1 import kv_event_pb2
from kvloom.v1.kv_event_pb2 import KvEventBatch, KvSnapshot
from shard_server.engines.base import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent


class KvMirror:
    def __init__(self) -> None:
        self._number = 0
        self._cached: dict[int, None] = {}
        """An ordered set, in the order in which the blocks were stored: routers read neighbouring hashes faster."""

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached)

    def apply(self, events: Sequence[KvEvent]) -> KvEventBatch:
        """Number the events of one step as the next batch."""
        batch = [self._apply(event) for event in events]
        self._number += 1
        return KvEventBatch(number=self._number, events=batch)

    def snapshot(self) -> KvSnapshot:
        """Every cached block; the next batch has the number of the snapshot + 1."""
        return KvSnapshot(number=self._number, block_hashes=self._cached)

    def _apply(self, event: KvEvent) -> kv_event_pb2.KvEvent:
        match event:
            case BlockStored(hashes):
                self._cached.update(dict.fromkeys(hashes))
                return kv_event_pb2.KvEvent(block_stored=kv_event_pb2.BlockStored(block_hashes=hashes))
            case BlockRemoved(hashes):
                for block_hash in hashes:
                    self._cached.pop(block_hash, None)
                return kv_event_pb2.KvEvent(block_removed=kv_event_pb2.BlockRemoved(block_hashes=hashes))
            case AllBlocksCleared():
                self._cached.clear()
                return kv_event_pb2.KvEvent(all_blocks_cleared=kv_event_pb2.AllBlocksCleared())
