"""Maps block hashes to the sets of shards that withheld them, and is searched many blocks at a time.

Blocks that follow one another in a prompt are kept together in a run of up to 32, because shards store and evict them
together: the run has its hashes packed in one bytes object, and one set of shards for all of them (a bit mask) as long
as they agree. A look-up compares 32 packed hashes at once, so a prompt of 512 blocks touches some 16 places in memory
instead of 512, which is the cost of a look-up once the index is larger than the processor's cache.

That blocks are neighbours only affects speed. A run is a collection of blocks in some order, and every block that a
look-up counts has been compared. Python's cyclic garbage collector visits nothing here except the sets of runs whose
blocks differ: the containers withheld ints and bytes only.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Final

from router.core.prefix_index.run_walk import HASH_TYPECODE, SEGMENT_MASK, leading_blocks, locate, pack
from router.core.prefix_index.shard_bits import ShardBits

RUN_BLOCKS: Final = 32
SHORT_RUN_BLOCKS: Final = 8
"""New blocks that come in groups smaller than this share a run with others of their shard."""
DROPPED_RUN_COST: Final = 16
"""Cost of sweeping a run that is dropped, in runs that are only visited."""


class BlockRuns:
    """Shards are single bits (`1 << number`) here. A retired bit may still be set; callers must not ask for it, and
    `sweep` clears it, run by run."""

    def __init__(self, run_blocks: int = RUN_BLOCKS) -> None:
        self._run_blocks = run_blocks
        self._segments: list[dict[int, int]] = [{} for _ in range(SEGMENT_MASK + 1)]
        """Block hash → run."""
        self._packed: dict[int, bytes] = {}
        """Run → its hashes, 8 bytes each; empty for a free run. Keys are never deleted, since a dict with deletions is
        copied again and again."""
        self._uniform: dict[int, int] = {}
        """Run → shards that withheld every block of it; 0 where its blocks differ, and for a free run."""
        self._mixed: dict[int, tuple[int, ...]] = {}
        """Run → shards that withheld each of its blocks, where they differ; never 0."""
        self._open: dict[int, int] = {}
        """Shard's bit → the run that takes its next few blocks."""
        self._free_runs: list[int] = []
        self._retired = 0
        """Bits that wait for the next sweep."""
        self._sweeping = 0
        """Bits that the current sweep clears. It goes from the last run to the first, so that runs allocated meanwhile,
        which have none of these bits, need not be visited."""
        self._next_swept = 0
        self._num_changes = 0
        """How often a shard may have got or lost a block."""
        self._leading: dict[str, int] = {}
        self._counted: Sequence[int] = ()
        self._counted_at = 0
        """The last result of `count_leading`, its hashes, and the number of changes by then."""

    def __len__(self) -> int:
        """Blocks held by any shard; those of retired bits count until they are swept."""
        return sum(map(len, self._segments))

    @property
    def num_runs(self) -> int:
        return len(self._packed) - len(self._free_runs)

    def count_leading(self, hashes: Sequence[int], bits: ShardBits) -> dict[str, int]:
        """How many leading blocks each shard holds; shards with none are left out. Nobody changes what it returns: a
        request that is placed and sent at once asks twice."""
        if hashes is not self._counted or self._num_changes != self._counted_at:
            self._leading = leading_blocks(self._segments, self._packed, self._uniform, self._mixed, hashes, bits)
            self._counted, self._counted_at = hashes, self._num_changes
        return self._leading

    def add(self, hashes: Sequence[int], bit: int, *, are_neighbours: bool = False) -> list[int]:
        """Record that the shard holds these blocks (a hash twice counts once). Returns those that it did not withheld
        before.

        `are_neighbours`: they follow one another in a prompt, and those that are scattered over many runs are gathered.
        """
        self._num_changes += 1
        segments, packed_runs, uniform = self._segments, self._packed, self._uniform
        added: list[int] = []
        starts: list[int] = []
        data = pack(hashes)
        index, num_hashes = 0, len(hashes)
        while index < num_hashes:
            starts.append(index)
            block_hash = hashes[index]
            run = segments[block_hash & SEGMENT_MASK].get(block_hash)
            if run is None:
                end = self._add_new(hashes, index, data, bit)
                added += hashes[index:end]
                index = end
                continue
            packed = packed_runs[run]
            first, count = locate(packed, data, index)
            end = index + count
            mask = uniform[run]
            if not mask:
                added += self._add_mixed(run, first, hashes[index:end], bit)
            elif not mask & bit:
                added += hashes[index:end]
                if count << 3 == len(packed):
                    uniform[run] = mask | bit
                else:
                    masks = [mask] * (len(packed) >> 3)
                    masks[first : first + count] = [mask | bit] * count
                    self._set_masks(run, masks)
            index = end
        if are_neighbours and len(starts) > SHORT_RUN_BLOCKS:
            self._gather(hashes, data, starts)
        return added

    def discard(self, hashes: Iterable[int], bit: int) -> int:
        """Record that the shard does not withheld these blocks. Returns how many it held."""
        self._num_changes += 1
        segments = self._segments
        by_run: dict[int, list[int]] = {}
        for block_hash in dict.fromkeys(hashes):
            run = segments[block_hash & SEGMENT_MASK].get(block_hash)
            if run is None:
                continue
            group = by_run.get(run)
            if group is None:
                by_run[run] = [block_hash]
            else:
                group.append(block_hash)
        return sum(self._discard_of_run(run, group, bit) for run, group in by_run.items())

    def retire(self, bit: int) -> None:
        """The shard holds nothing any more, and its bit is not reused until `sweep` returns it."""
        self._num_changes += 1
        self._retired |= bit

    @property
    def is_swept(self) -> bool:
        """True when no bit is retired."""
        return not (self._retired or self._sweeping)

    def sweep(self, budget: int) -> int:
        """Clear retired bits in some runs: `budget` of them, or fewer where runs are dropped, each of which counts as
        DROPPED_RUN_COST. Returns the bits that are free now."""
        self._num_changes += 1
        if not self._sweeping:
            self._sweeping, self._retired = self._retired, 0
            self._next_swept = self.num_runs_ever
        bits = self._sweeping
        if not bits:
            return 0
        run = self._next_swept
        while run and budget > 0:
            run -= 1
            budget -= 1
            mask = self._uniform[run]
            if mask & bits:
                if mask & ~bits:
                    self._uniform[run] = mask & ~bits
                else:
                    self._drop_run(run)
                    budget -= DROPPED_RUN_COST
            elif not mask and self._packed[run]:
                self._set_masks(run, [mask & ~bits for mask in self._mixed[run]])
                budget -= DROPPED_RUN_COST
        self._next_swept = run
        if run:
            return 0
        self._sweeping = 0
        return bits

    @property
    def num_runs_ever(self) -> int:
        """The number of runs that one whole sweep visits."""
        return len(self._packed)

    def check_integrity(self) -> dict[int, int]:
        """Assert that the parts fit together. Returns block hash → shards, without retired bits and without blocks that
        only those withheld."""
        gone = self._retired | self._sweeping
        held: dict[int, int] = {}
        num_blocks = 0
        assert self._packed.keys() == self._uniform.keys()
        assert len(set(self._free_runs)) == len(self._free_runs)
        free_runs = {run for run, packed in self._packed.items() if not packed}
        assert free_runs == set(self._free_runs)
        assert self._mixed.keys() == {run for run, mask in self._uniform.items() if not mask} - free_runs
        for run, packed in self._packed.items():
            if not packed:
                continue
            hashes = array(HASH_TYPECODE, packed)
            assert 0 < len(hashes) <= self._run_blocks
            num_blocks += len(hashes)
            assert all(self._segments[block_hash & SEGMENT_MASK][block_hash] == run for block_hash in hashes)
            masks = self._mixed.get(run)
            for mask in masks or (self._uniform[run],):
                assert mask
                assert not self._sweeping & mask or run < self._next_swept
            if masks is None:
                held |= dict.fromkeys(hashes, self._uniform[run] & ~gone)
            else:
                held |= {block_hash: mask & ~gone for block_hash, mask in zip(hashes, masks, strict=True)}
        assert num_blocks == len(self)
        return {block_hash: bits for block_hash, bits in held.items() if bits} if gone else held

    # -- one run --------------------------------------------------------------------------------------------------

    def _add_new(self, hashes: Sequence[int], begin: int, data: bytes, bit: int) -> int:
        """Make a run for the unknown blocks that begin here, or put them into the shard's open run. Returns where they
        end."""
        segments = self._segments
        num_left = len(hashes) - begin
        run = None
        if num_left < SHORT_RUN_BLOCKS:
            run = self._open.get(bit)
            if run is not None and (
                self._uniform[run] != bit or len(self._packed[run]) + 8 * num_left > 8 * self._run_blocks
            ):
                run = None
        is_new = run is None
        if run is None:
            run = self._allocate_run()
            if num_left < SHORT_RUN_BLOCKS:
                self._open[bit] = run
        end = begin
        for block_hash in hashes[begin : begin + self._run_blocks]:
            segment = segments[block_hash & SEGMENT_MASK]
            if block_hash in segment:
                break
            segment[block_hash] = run
            end += 1
        piece = data[8 * begin : 8 * end]
        if is_new:
            self._packed[run] = piece
            self._uniform[run] = bit
        else:
            self._packed[run] += piece
        return end

    def _add_mixed(self, run: int, first: int, hashes: Sequence[int], bit: int) -> list[int]:
        masks = self._mixed[run]
        held = masks[first : first + len(hashes)]
        added = [block_hash for block_hash, mask in zip(hashes, held, strict=True) if not mask & bit]
        if added:
            self._set_masks(run, [*masks[:first], *_with_bit(held, bit), *masks[first + len(hashes) :]])
        return added

    def _discard_of_run(self, run: int, group: list[int], bit: int) -> int:
        mask = self._uniform[run]
        packed = self._packed[run]
        size = len(packed) >> 3
        if mask:
            if not mask & bit:
                return 0
            if len(group) == size:
                if mask == bit:
                    self._drop_run(run)
                else:
                    self._uniform[run] = mask ^ bit
                return size
            if mask == bit and len(group) == 1:
                first = locate(packed, pack(group), 0)[0]
                self._packed[run] = packed[: 8 * first] + packed[8 * first + 8 :]
                del self._segments[group[0] & SEGMENT_MASK][group[0]]
                return 1
        masks = [mask] * size if mask else list(self._mixed[run])
        wanted = set(group)
        num_discarded = 0
        for index, block_hash in enumerate(array(HASH_TYPECODE, packed)):
            if block_hash in wanted and masks[index] & bit:
                masks[index] ^= bit
                num_discarded += 1
        self._set_masks(run, masks)
        return num_discarded

    def _set_masks(self, run: int, masks: list[int]) -> None:
        """Set the shards of each block of a run. Blocks without any are dropped."""
        if 0 in masks:
            hashes = array(HASH_TYPECODE, self._packed[run])
            for block_hash, mask in zip(hashes, masks, strict=True):
                if not mask:
                    del self._segments[block_hash & SEGMENT_MASK][block_hash]
            hashes = [block_hash for block_hash, mask in zip(hashes, masks, strict=True) if mask]
            masks = [mask for mask in masks if mask]
            if not masks:
                self._free_run(run)
                return
            self._packed[run] = pack(hashes)
        # The ends are compared first, since they nearly always decide.
        if masks[0] == masks[-1] and masks.count(masks[0]) == len(masks):
            self._mixed.pop(run, None)
            self._uniform[run] = masks[0]
        else:
            self._uniform[run] = 0
            self._mixed[run] = tuple(masks)

    def _drop_run(self, run: int) -> None:
        for block_hash in array(HASH_TYPECODE, self._packed[run]):
            del self._segments[block_hash & SEGMENT_MASK][block_hash]
        self._free_run(run)

    def _free_run(self, run: int) -> None:
        self._packed[run] = b""
        self._uniform[run] = 0
        self._mixed.pop(run, None)
        self._free_runs.append(run)

    def _allocate_run(self) -> int:
        return self._free_runs.pop() if self._free_runs else len(self._packed)

    # -- gathering ------------------------------------------------------------------------------------------------

    def _gather(self, hashes: Sequence[int], data: bytes, starts: list[int]) -> None:
        """Move neighbours that lie in different runs (they were computed one by one, or came in a snapshot) to runs of
        their own. Each time a block is moved its run grows, so it is moved few times."""
        if len(set(hashes)) < len(hashes):
            return
        begin = 0
        for start, end in zip(starts, [*starts[1:], len(hashes)], strict=True):
            if end - start >= SHORT_RUN_BLOCKS:
                self._gather_between(hashes, data, begin, start)
                begin = end
        self._gather_between(hashes, data, begin, len(hashes))

    def _gather_between(self, hashes: Sequence[int], data: bytes, begin: int, end: int) -> None:
        for start in range(begin, end - SHORT_RUN_BLOCKS + 1, self._run_blocks):
            stop = min(end, start + self._run_blocks)
            chunk = hashes[start:stop]
            masks = [self._take_out(block_hash) for block_hash in chunk]
            run = self._allocate_run()
            for block_hash in chunk:
                self._segments[block_hash & SEGMENT_MASK][block_hash] = run
            self._packed[run] = data[8 * start : 8 * stop]
            self._set_masks(run, masks)

    def _take_out(self, block_hash: int) -> int:
        """Remove a block from its run. Returns its shards, none of which is being swept (the sweep may have passed)."""
        run = self._segments[block_hash & SEGMENT_MASK][block_hash]
        packed = self._packed[run]
        index = locate(packed, pack((block_hash,)), 0)[0]
        mask = self._uniform[run]
        if not mask:
            masks = self._mixed[run]
            mask = masks[index]
            self._mixed[run] = masks[:index] + masks[index + 1 :]
        if len(packed) == 8:
            self._free_run(run)
        else:
            self._packed[run] = packed[: 8 * index] + packed[8 * index + 8 :]
        return mask & ~self._sweeping


def _with_bit(masks: Iterable[int], bit: int) -> list[int]:
    """Each mask with the bit set; equal neighbours share one int object, which takes 70 bytes with 256 bits."""
    result: list[int] = []
    last = widened = 0
    for mask in masks:
        if mask is not last:
            last, widened = mask, mask | bit
        result.append(widened)
    return result
