"""The index of which shard holds which KV block.

It is as exact as the shards' numbered KV events, plus the blocks of requests that were just placed and whose prefill
has not been reported yet: two requests with one new prefix then go to one shard. Errors cost speed, never correctness.
Holes (a block whose predecessor was evicted) are kept; only leading blocks count.

No step takes long. When a shard loses all its blocks (it disconnects, or a snapshot replaces them), its bit is retired,
it gets another one, and the old bit is swept later; a large snapshot is read in batches. Every event and every
placement does a part of the remaining work (`settle`).
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Final

from router.core.events import KvChange
from router.core.prefix_index.block_runs import RUN_BLOCKS, BlockRuns
from router.core.prefix_index.event_order import EventOrder
from router.core.prefix_index.shard_bits import ShardBits

PLACED_TTL_SECONDS: Final = 30.0
STORE_RATE_SECONDS: Final = 300.0
"""Time constant of the moving average of blocks stored per second."""


@dataclasses.dataclass(frozen=True, slots=True)
class IndexStepSizes:
    """How much work is done in one step."""

    run_blocks: int = RUN_BLOCKS
    snapshot_blocks: int = 8192
    """Blocks of a snapshot that are read when it arrives: some 3 ms."""
    settle_blocks: int = 512
    """Blocks of the rest that are read in each later step."""
    sweep_runs: int = 256
    """Runs visited in each later step; fewer where runs are dropped."""
    sweep_share: float = 1 / 256
    """Share of all runs that is swept whenever a bit is retired, which bounds how much faster bits are retired than
    swept."""


class _ShardBlocks:
    """The known contents of one shard. Its bit marks stored and placed blocks alike."""

    __slots__ = (
        "awaits_expiry",
        "bit",
        "max_blocks",
        "num_stored",
        "order",
        "placed",
        "removed",
        "shard_id",
        "store_rate",
        "store_rate_at",
        "unread",
        "unread_from",
    )

    def __init__(self, shard_id: str, bit: int, max_blocks: int, now: float) -> None:
        self.shard_id = shard_id
        self.bit = bit
        self.max_blocks = max_blocks
        self.num_stored = 0
        self.placed: dict[int, float] = {}
        """Hash → when it expires, in the order of expiry. These blocks are not stored."""
        self.awaits_expiry = False
        """True when it has an entry in the heap of expiries."""
        self.order = EventOrder(max_blocks, now)
        self.unread: Sequence[int] = ()
        """The last snapshot, while it is being read."""
        self.unread_from = 0
        self.removed: set[int] = set()
        """Blocks removed since that snapshot, which must not be read from it any more."""
        self.store_rate = 0.0
        self.store_rate_at = now

    @property
    def num_unread(self) -> int:
        return len(self.unread) - self.unread_from


class PrefixIndex:
    """Memory is bounded by what the shards can withheld: at most `max_blocks` stored and as many placed hashes each."""

    def __init__(self, step_sizes: IndexStepSizes | None = None) -> None:
        self._step_sizes = step_sizes or IndexStepSizes()
        self._runs = BlockRuns(self._step_sizes.run_blocks)
        self._bits = ShardBits()
        self._shards: dict[str, _ShardBlocks] = {}
        self._reading: deque[_ShardBlocks] = deque()
        """Shards with an unread rest of a snapshot."""
        self._expiries: list[tuple[float, int, _ShardBlocks]] = []
        """Heap: for each shard with placed blocks, a time before which none of them expires."""
        self._expiry_serials = itertools.count()

    # -- shards ---------------------------------------------------------------------------------------------------

    def add_shard(self, shard_id: str, max_blocks: int, now: float) -> None:
        """Add a shard with unknown contents; its snapshot is to follow. A shard that is there already has restarted."""
        if shard_id in self._shards:
            self.remove_shard(shard_id)
        self._shards[shard_id] = _ShardBlocks(shard_id, self._bits.allocate(shard_id), max_blocks, now)

    def remove_shard(self, shard_id: str) -> None:
        shard = self._shards.pop(shard_id)
        self._stop_reading(shard)
        self._retire(shard)
        shard.placed.clear()
        shard.num_stored = 0

    def apply_events(self, shard_id: str, number: int, changes: Sequence[KvChange], now: float) -> bool:
        """Apply one numbered batch. Returns True when a snapshot must be requested: batches before this one are missing
        (it is kept meanwhile), and none was requested in the last SNAPSHOT_RETRY_SECONDS."""
        shard = self._shards[shard_id]
        for batch in shard.order.push(number, changes):
            self._apply(shard, batch, now)
        self.settle()
        return shard.order.wants_snapshot(now)

    def apply_snapshot(self, shard_id: str, number: int, block_hashes: Sequence[int]) -> bool:
        """Replace the known contents of a shard; a snapshot older than the events already applied is ignored.
        `block_hashes` may be read until later and must not change. Returns True when batches are missing even so, and
        another snapshot must be requested."""
        shard = self._shards[shard_id]
        if not shard.order.skip_to(number):
            return False
        self._forget_stored(shard)
        # A shard may announce more than it has. Knowing less is safe, growing without bound is not.
        shard.unread = block_hashes if len(block_hashes) <= shard.max_blocks else block_hashes[: shard.max_blocks]
        shard.unread_from = 0
        self._reading.append(shard)
        self._read(shard, self._step_sizes.snapshot_blocks)
        for batch in shard.order.take():
            self._apply(shard, batch, shard.store_rate_at)
        return not shard.order.is_current

    # -- requests -------------------------------------------------------------------------------------------------

    def place(self, shard_id: str, block_hashes: Sequence[int], now: float) -> None:
        """A request with these blocks was sent there: assume them cached for PLACED_TTL_SECONDS, or until they are
        stored."""
        shard = self._shards[shard_id]
        self._expire(now)
        placed = shard.placed
        expires_at = now + PLACED_TTL_SECONDS
        added = self._runs.add(block_hashes, shard.bit, are_neighbours=True)
        if placed and len(added) < len(block_hashes) and not placed.keys().isdisjoint(block_hashes):
            for block_hash in [block_hash for block_hash in block_hashes if block_hash in placed]:
                del placed[block_hash]
                placed[block_hash] = expires_at
        if added:
            placed.update(dict.fromkeys(added, expires_at))
            self._await_expiry(shard, expires_at)
        if len(placed) > shard.max_blocks:
            self._drop_placed(shard, list(itertools.islice(placed, len(placed) - shard.max_blocks)))
        self.settle()

    def count_overlaps(self, block_hashes: Sequence[int], now: float) -> dict[str, int]:
        """The number of leading blocks of `block_hashes` that each shard holds; shards with none are left out."""
        self._expire(now)
        return self._runs.count_leading(block_hashes, self._bits)

    def num_stored(self, shard_id: str) -> int:
        """The number of blocks that the shard is known to have cached."""
        shard = self._shards[shard_id]
        return shard.num_stored + (shard.num_unread if shard.unread else 0)

    def tail_age_seconds(self, shard_id: str, now: float) -> float:
        """The age of the blocks that the shard would evict next, by Little's law: blocks held / blocks stored per
        second. Infinite for a shard that stores nothing."""
        shard = self._shards[shard_id]
        rate = shard.store_rate * math.exp((shard.store_rate_at - now) / STORE_RATE_SECONDS)
        return (shard.num_stored + shard.num_unread) / rate if rate > 1e-9 else math.inf

    @property
    def num_blocks(self) -> int:
        """Different blocks in memory, including those that have lost their last shard and wait to be swept."""
        return len(self._runs)

    # -- deferred work ----------------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """True when all snapshots are read and all retired bits are swept."""
        return not self._reading and self._runs.is_swept

    def settle(self) -> None:
        """Do a part of the remaining work: some 0.1 ms. It is called by events and placements, and may be called when
        idle."""
        if self._reading:
            self._read(self._reading[0], self._step_sizes.settle_blocks)
        elif not self._runs.is_swept:
            self._sweep(self._step_sizes.sweep_runs)

    def check_integrity(self) -> None:
        """Assert that the bits are exactly what is counted and placed, and that the parts fit together."""
        self._bits.check_integrity([(shard.shard_id, shard.bit) for shard in self._shards.values()])
        held = self._runs.check_integrity()
        num_by_bits = Counter(held.values())
        for bits in num_by_bits:
            assert not bits & ~self._bits.all
        for shard in self._shards.values():
            num_held = sum(number for bits, number in num_by_bits.items() if bits & shard.bit)
            assert num_held == shard.num_stored + len(shard.placed)
            assert all(held.get(block_hash, 0) & shard.bit for block_hash in shard.placed)
            assert shard.num_stored <= shard.max_blocks
            assert len(shard.placed) <= shard.max_blocks
            assert (shard.num_unread > 0) == (shard in self._reading)
            assert not shard.removed or shard.num_unread
            assert shard.awaits_expiry or not shard.placed
            assert sum(entry[2] is shard for entry in self._expiries) == shard.awaits_expiry
            shard.order.check_integrity()

    def _apply(self, shard: _ShardBlocks, changes: Iterable[KvChange], now: float) -> None:
        num_stored = 0
        for change in changes:
            if change.cleared:
                self._forget_stored(shard)
            if change.removed:
                self._remove_stored(shard, change.removed)
            if change.stored:
                self._add_stored(shard, change.stored, are_neighbours=True)
                num_stored += len(change.stored)
        if num_stored:
            decay = math.exp((shard.store_rate_at - now) / STORE_RATE_SECONDS)
            shard.store_rate = shard.store_rate * decay + num_stored / STORE_RATE_SECONDS
            shard.store_rate_at = now

    def _add_stored(self, shard: _ShardBlocks, block_hashes: Sequence[int], *, are_neighbours: bool) -> None:
        if not self._runs.is_swept:
            self._sweep(len(block_hashes))  # so that memory is freed as fast as it is used
        if len(block_hashes) > shard.max_blocks - shard.num_stored:
            # More than the shard has: it miscounts.
            for block_hash in block_hashes:
                if shard.num_stored < shard.max_blocks:
                    self._add_stored_within(shard, (block_hash,), are_neighbours=False)
        else:
            self._add_stored_within(shard, block_hashes, are_neighbours=are_neighbours)

    def _add_stored_within(self, shard: _ShardBlocks, block_hashes: Sequence[int], *, are_neighbours: bool) -> None:
        num_added = len(self._runs.add(block_hashes, shard.bit, are_neighbours=are_neighbours))
        shard.num_stored += num_added
        if shard.placed and num_added < len(block_hashes):
            for block_hash in block_hashes:
                if shard.placed.pop(block_hash, None) is not None:
                    shard.num_stored += 1

    def _remove_stored(self, shard: _ShardBlocks, block_hashes: Sequence[int]) -> None:
        if shard.num_unread:
            shard.removed.update(block_hashes)
            if len(shard.removed) > shard.num_unread:
                self._read(shard, shard.num_unread)
        if shard.placed:
            block_hashes = [block_hash for block_hash in block_hashes if block_hash not in shard.placed]
        shard.num_stored -= self._runs.discard(block_hashes, shard.bit)

    def _forget_stored(self, shard: _ShardBlocks) -> None:
        """Forget all stored blocks; placed ones stay."""
        self._stop_reading(shard)
        if not shard.num_stored:
            return
        self._retire(shard)
        shard.num_stored = 0
        shard.bit = self._bits.allocate(shard.shard_id)
        self._runs.add(list(shard.placed), shard.bit)

    def _read(self, shard: _ShardBlocks, max_blocks: int) -> None:
        """Read the next blocks of the shard's snapshot."""
        begin = shard.unread_from
        block_hashes = shard.unread[begin : begin + max_blocks]
        shard.unread_from += len(block_hashes)
        if shard.removed:
            block_hashes = [block_hash for block_hash in block_hashes if block_hash not in shard.removed]
        self._add_stored(shard, block_hashes, are_neighbours=False)
        if not shard.num_unread:
            self._stop_reading(shard)

    def _stop_reading(self, shard: _ShardBlocks) -> None:
        if shard in self._reading:
            self._reading.remove(shard)
        shard.unread = ()
        shard.unread_from = 0
        shard.removed.clear()

    def _retire(self, shard: _ShardBlocks) -> None:
        """Look-ups no longer find the shard's bit anywhere."""
        self._bits.retire(shard.bit)
        if not shard.num_stored and not shard.placed:
            self._bits.free(shard.bit)
            return
        self._runs.retire(shard.bit)
        self._sweep(max(self._step_sizes.sweep_runs, int(self._runs.num_runs_ever * self._step_sizes.sweep_share)))

    def _sweep(self, max_runs: int) -> None:
        self._bits.free(self._runs.sweep(max_runs))

    # -- placed blocks --------------------------------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        while self._expiries and self._expiries[0][0] <= now:
            shard = heapq.heappop(self._expiries)[2]
            shard.awaits_expiry = False
            due = [item[0] for item in itertools.takewhile(lambda item: item[1] <= now, shard.placed.items())]
            self._drop_placed(shard, due)
            if shard.placed:
                self._await_expiry(shard, next(iter(shard.placed.values())))

    def _await_expiry(self, shard: _ShardBlocks, expires_at: float) -> None:
        if not shard.awaits_expiry:
            shard.awaits_expiry = True
            heapq.heappush(self._expiries, (expires_at, next(self._expiry_serials), shard))

    def _drop_placed(self, shard: _ShardBlocks, block_hashes: Sequence[int]) -> None:
        for block_hash in block_hashes:
            del shard.placed[block_hash]
        self._runs.discard(block_hashes, shard.bit)
