"""The conversion of a shard's KV events into the core's changes."""

from __future__ import annotations

from kvloom.v1.kv_event_pb2 import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, KvEventBatch
from router.convert import MAX_SINGLES, kv_events_from_proto
from router.core.events import KvChange


def stored(*hashes: int) -> KvEvent:
    return KvEvent(block_stored=BlockStored(block_hashes=hashes))


def changes(*events: KvEvent) -> list[KvChange]:
    arrived = kv_events_from_proto("s0", KvEventBatch(number=7, events=events))
    assert (arrived.shard_id, arrived.number) == ("s0", 7)
    return list(arrived.changes)


def test_single_stored_blocks_are_joined() -> None:
    """Decoding sequences fill one block each, and an index update for each would cost more than its token."""
    assert changes(stored(1), stored(2), stored(3)) == [KvChange(stored=[1, 2, 3])]
    many = changes(*map(stored, range(2 * MAX_SINGLES + 1)))
    assert [len(change.stored) for change in many] == [MAX_SINGLES, MAX_SINGLES, 1]


def test_nothing_overtakes_anything() -> None:
    """A block that is stored, removed and stored again is present in the end, and a prompt's blocks stay neighbours."""
    removed = KvEvent(block_removed=BlockRemoved(block_hashes=[1]))
    cleared = KvEvent(all_blocks_cleared=AllBlocksCleared())
    assert changes(
        stored(1), removed, stored(1), stored(2, 3), stored(4), KvEvent(), stored(5), cleared, stored(6)
    ) == [
        KvChange(stored=[1]),
        KvChange(removed=[1]),
        KvChange(stored=[1]),
        KvChange(stored=[2, 3]),
        KvChange(stored=[4]),
        KvChange(stored=[5]),
        KvChange(cleared=True),
        KvChange(stored=[6]),
    ]
