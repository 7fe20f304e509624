"""Translates TensorRT-LLM's KV events to kvloom's, in which a block has the hash that routers compute from its tokens.

TensorRT-LLM's own block hashes serve only as identities: a map from (rank, identity) to our hash resolves the blocks of
`removed` events and the parents of children. Pure: no thread, no clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Final

import structlog
import xxhash

from kvloom_common.text.block_hash import block_hashes
from shard_server.engines.base import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from shard_server.engines.tensorrt_llm.kv_cache.kv_records import BlockIdentity, KvRecord, StoredBlock
from shard_server.engines.tensorrt_llm.kv_cache.kv_roots import RootLedger

log = structlog.get_logger()

_Key = tuple[int, BlockIdentity]
"""Rank and identity."""

MIN_IDENTITIES: Final = 65_536


@dataclasses.dataclass(slots=True)
class _Block:
    hashed: int
    parent: _Block | None
    root: int
    first: bytes | None
    """The tokens, if the block is the first of its chain."""
    advertised: bool = False
    removed: bool = False


class KvEventTranslator:
    """`translate` takes the records in order. A block that several ranks or identities hold is reported once. Where
    there are several groups of layers, all must hold a block: it is gone as soon as one of them has removed it."""

    def __init__(self, block_size: int, num_blocks: int, roots: RootLedger) -> None:
        self._block_size = block_size
        self._max_identities = max(4 * num_blocks, MIN_IDENTITIES)
        self._roots = roots
        self._blocks: dict[_Key, _Block] = {}
        self._partial: dict[_Key, None] = {}
        """Blocks shorter than block_size. No router looks them up, so their removal is ignored."""
        self._holders: dict[int, tuple[int, ...]] = {}
        """By hash: the ranks of the advertised blocks with it."""
        self._next_event_ids: dict[int, int] = {}
        self._window_size: int | None = None
        self._events: list[KvEvent] = []
        self.num_resyncs = 0

    def translate(self, records: Iterable[KvRecord]) -> list[KvEvent]:
        for record in records:
            self._check_order(record)
            if record.kind == "created":
                self._on_created(record)
            elif record.kind == "all_cleared":
                self._clear(record.rank, forget=True)
            elif self._window_size is None or record.window_size in (None, self._window_size):
                self._apply(record)
        if len(self._blocks) > self._max_identities:
            self.forget_all("more blocks than the cache can hold: removals must have been lost")
        return self.take_events()

    def forget_all(self, reason: str) -> None:
        """Forget all blocks and start over; `take_events` returns the event."""
        log.warning("kv_events_started_over", reason=reason)
        self.num_resyncs += 1
        self._blocks.clear()
        self._partial.clear()
        self._holders.clear()
        self._events.append(AllBlocksCleared())

    def rank_of(self, token_ids: Sequence[int], root: int) -> int | None:
        """The attention data-parallel rank that holds the longest prefix of these tokens; None: none holds any."""
        for hashed in reversed(block_hashes(token_ids, self._block_size, root)):
            if hashed in self._holders:
                return self._holders[hashed][0]
        return None

    def take_events(self) -> list[KvEvent]:
        events, self._events = self._events, []
        return events

    # -- order --------------------------------------------------------------------------------------------------------

    def _check_order(self, record: KvRecord) -> None:
        """Numbers are contiguous per rank; a gap means lost events, 0 with `created` an engine that restarted."""
        rank = record.rank
        expected = self._next_event_ids.get(rank)
        self._next_event_ids[rank] = record.event_id + 1
        if expected is None or record.event_id == expected:
            return
        self.num_resyncs += 1
        restarted = record.event_id == 0 and record.kind == "created"
        log.warning(
            "kv_events_engine_restarted" if restarted else "kv_events_lost",
            rank=rank,
            expected=expected,
            event_id=record.event_id,
        )
        if restarted:
            self._window_size = None
        self._clear(rank, forget=restarted)

    def _on_created(self, record: KvRecord) -> None:
        """Only the largest attention window's blocks hold whole prefixes."""
        window = record.window_size
        if window is not None and (self._window_size is None or window > self._window_size):
            if self._window_size is not None and self._blocks:
                self.forget_all("a larger attention window has appeared")
            self._window_size = window

    def _clear(self, rank: int, *, forget: bool) -> None:
        """Stop advertising this rank's blocks. Unless `forget` is set, their identities stay known: a block whose child
        is stored, or that is updated, has proved that it still exists and is reported again."""
        for key, block in list(self._blocks.items()):
            if key[0] == rank:
                if block.advertised:
                    block.advertised = False
                    self._release_holder(block.hashed, rank)
                if forget:
                    self._delete(key)
        for key in [key for key in self._partial if forget and key[0] == rank]:
            del self._partial[key]
        self._events.append(AllBlocksCleared())
        if self._holders:
            self._events.append(BlockStored(list(self._holders)))  # the blocks of the other ranks

    # -- blocks -------------------------------------------------------------------------------------------------------

    def _apply(self, record: KvRecord) -> None:
        if record.kind == "stored":
            self._on_stored(record)
        elif record.kind == "removed":
            self._on_removed(record)
        elif record.kind == "updated":
            for identity in record.identities:
                block = self._blocks.get((record.rank, identity))
                if block is not None:
                    self._advertise([block], record.rank)

    def _on_stored(self, record: KvRecord) -> None:
        rank = record.rank
        parent = None
        if record.parent is not None:
            parent = self._blocks.get((rank, record.parent))
            if parent is None:  # lost in a gap, of unknown content, or of an unknown root: so are its children
                self._note_partial(record, record.blocks)
                return
        whole: list[StoredBlock] = []
        for block in record.blocks:
            if block.num_tokens != self._block_size or block.token_bytes is None:
                break
            whole.append(block)
        self._note_partial(record, record.blocks[len(whole) :])
        if not whole:
            return
        root = parent.root if parent is not None else self._claim(rank, whole)
        if root is None:
            return
        stored: list[_Block] = []
        for block in whole:
            key = (rank, block.identity)
            known = self._blocks.get(key)
            if known is None:
                assert block.token_bytes is not None
                seed = root if parent is None else parent.hashed
                hashed = xxhash.xxh3_64_intdigest(block.token_bytes, seed=seed)
                first = block.token_bytes if parent is None else None
                known = self._blocks[key] = _Block(hashed, parent, root, first)
            parent = known
            stored.append(known)
        self._advertise(stored, rank)

    def _claim(self, rank: int, whole: list[StoredBlock]) -> int | None:
        known = self._blocks.get((rank, whole[0].identity))
        if known is not None:
            return known.root
        return self._roots.claim(
            [block.token_bytes for block in whole if block.token_bytes is not None], whole[0].cache_salt
        )

    def _note_partial(self, record: KvRecord, blocks: Iterable[StoredBlock]) -> None:
        for block in blocks:
            if block.num_tokens < self._block_size:
                self._partial[(record.rank, block.identity)] = None
        while len(self._partial) > self._max_identities:
            del self._partial[next(iter(self._partial))]

    def _on_removed(self, record: KvRecord) -> None:
        removed: list[int] = []
        for identity in record.identities:
            key = (record.rank, identity)
            if key in self._partial:
                del self._partial[key]
                continue
            block = self._blocks.get(key)
            if block is None:
                continue
            self._delete(key)
            if block.advertised:
                block.advertised = False
                if self._release_holder(block.hashed, record.rank):
                    removed.append(block.hashed)
        if removed:
            self._events.append(BlockRemoved(removed))

    def _advertise(self, blocks: list[_Block], rank: int) -> None:
        """Report the blocks that routers do not know, after their ancestors."""
        chain: list[_Block] = []
        ancestor = blocks[0].parent
        while ancestor is not None and not ancestor.advertised and not ancestor.removed:
            chain.append(ancestor)
            ancestor = ancestor.parent
        new: list[int] = []
        for block in [*reversed(chain), *blocks]:
            if not block.advertised:
                block.advertised = True
                holders = self._holders.get(block.hashed, ())
                self._holders[block.hashed] = (*holders, rank)
                if not holders:
                    new.append(block.hashed)
        if new:
            self._events.append(BlockStored(new))

    def _release_holder(self, hashed: int, rank: int) -> bool:
        """Remove one holder of a hash; returns whether it was the last."""
        holders = self._holders[hashed]
        if len(holders) > 1:
            position = holders.index(rank)
            self._holders[hashed] = holders[:position] + holders[position + 1 :]
            return False
        del self._holders[hashed]
        return True

    def _delete(self, key: _Key) -> None:
        block = self._blocks.pop(key)
        block.removed = True
        if block.first is not None:
            self._roots.release(block.first, block.root)
