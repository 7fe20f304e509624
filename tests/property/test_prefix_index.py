"""The prefix index against a naive model of what the shards hold."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.core.events import KvChange
from router.core.prefix_index import PLACED_TTL_SECONDS, PrefixIndex

SHARDS = ["a", "b", "c"]
MAX_BLOCKS = 12
hashes = st.integers(0, 15)
hash_lists = st.lists(hashes, max_size=6, unique=True)


class PrefixIndexMachine(RuleBasedStateMachine):
    """Shards store and remove blocks; their batches are lost, doubled or reordered on the way, shards restart. As long
    as a shard's numbers were contiguous the index knows exactly what it holds."""

    @initialize()
    def start(self) -> None:
        self.index = PrefixIndex()
        self.now = 0.0
        self.held: dict[str, set[int]] = {}
        """What the shard really holds."""
        self.known: dict[str, set[int]] = {}
        """What a router can know: the state behind the last contiguous batch or snapshot."""
        self.number: dict[str, int] = {}
        self.next_number: dict[str, int | None] = {}
        self.delayed: list[tuple[str, int, KvChange, set[int]]] = []
        self.placed: dict[str, dict[int, float]] = {}

    @precondition(lambda self: len(self.held) < len(SHARDS))
    @rule(pick=st.integers(0, 2))
    def shard_up(self, pick: int) -> None:
        missing = [shard_id for shard_id in SHARDS if shard_id not in self.held]
        shard_id = missing[pick % len(missing)]
        self.index.add_shard(shard_id, MAX_BLOCKS, self.now)
        self.held[shard_id], self.known[shard_id] = set(), set()
        self.number[shard_id], self.next_number[shard_id] = 0, None
        self.placed[shard_id] = {}

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 2))
    def shard_down(self, pick: int) -> None:
        """Batches of the old incarnation go with its stream."""
        shard_id = self._pick(pick)
        self.index.remove_shard(shard_id)
        for table in (self.held, self.known, self.number, self.next_number, self.placed):
            del table[shard_id]
        self.delayed = [batch for batch in self.delayed if batch[0] != shard_id]

    @precondition(lambda self: self.held)
    @rule(
        pick=st.integers(0, 2),
        stored=hash_lists,
        removed=hash_lists,
        cleared=st.booleans(),
        fate=st.sampled_from(["arrives"] * 4 + ["lost", "doubled", "delayed"]),
    )
    def change(self, pick: int, stored: list[int], removed: list[int], cleared: bool, fate: str) -> None:
        shard_id = self._pick(pick)
        held = self.held[shard_id]
        if cleared:
            held.clear()
        held.difference_update(removed)
        stored = [block_hash for block_hash in stored if block_hash not in held][: MAX_BLOCKS - len(held)]
        held.update(stored)
        self.number[shard_id] += 1
        batch = (shard_id, self.number[shard_id], KvChange(stored, removed, cleared), set(held))
        if fate == "delayed":
            self.delayed.append(batch)
        elif fate != "lost":
            for _ in range(2 if fate == "doubled" else 1):
                self._arrive(batch)

    @precondition(lambda self: self.delayed)
    @rule(pick=st.integers(0, 9))
    def delayed_batch(self, pick: int) -> None:
        self._arrive(self.delayed.pop(pick % len(self.delayed)))

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 2))
    def snapshot(self, pick: int) -> None:
        shard_id = self._pick(pick)
        self.index.apply_snapshot(shard_id, self.number[shard_id], sorted(self.held[shard_id]))
        self.known[shard_id] = set(self.held[shard_id])
        self.next_number[shard_id] = self.number[shard_id] + 1
        self._confirm(shard_id)

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 2), block_hashes=hash_lists)
    def place(self, pick: int, block_hashes: list[int]) -> None:
        shard_id = self._pick(pick)
        self.index.place(shard_id, block_hashes, self.now)
        placed = self.placed[shard_id]
        for block_hash in block_hashes:
            if block_hash not in self.known[shard_id]:
                placed.pop(block_hash, None)
                placed[block_hash] = self.now + PLACED_TTL_SECONDS
        while len(placed) > MAX_BLOCKS:
            del placed[next(iter(placed))]

    @rule(seconds=st.sampled_from([1.0, 20.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for placed in self.placed.values():
            for block_hash in [h for h, expires_at in placed.items() if expires_at <= self.now]:
                del placed[block_hash]

    @rule(prompt=st.lists(hashes, max_size=8))
    def look_up(self, prompt: list[int]) -> None:
        """Overlap is the number of leading blocks that a shard is known to hold or was just given."""
        expected: dict[str, int] = {}
        for shard_id in self.held:
            believed = self.known[shard_id] | self.placed[shard_id].keys()
            depth = 0
            while depth < len(prompt) and prompt[depth] in believed:
                depth += 1
            if depth:
                expected[shard_id] = depth
        assert self.index.count_overlaps(prompt, self.now) == expected

    @invariant()
    def is_sound(self) -> None:
        self.index.check_integrity()
        for shard_id, known in self.known.items():
            assert self.index.num_stored(shard_id) == len(known)

    def _arrive(self, batch: tuple[str, int, KvChange, set[int]]) -> None:
        shard_id, number, change, state = batch
        awaited = self.next_number[shard_id]
        is_gap = awaited is not None and number > awaited
        assert self.index.apply_events(shard_id, number, [change], self.now) == is_gap
        if is_gap:
            self.next_number[shard_id] = None
        elif number == awaited:
            self.next_number[shard_id] = number + 1
            self.known[shard_id] = set(state)
            self._confirm(shard_id)

    def _confirm(self, shard_id: str) -> None:
        for block_hash in self.known[shard_id]:
            self.placed[shard_id].pop(block_hash, None)

    def _pick(self, pick: int) -> str:
        ids = sorted(self.held)
        return ids[pick % len(ids)]


TestPrefixIndex = PrefixIndexMachine.TestCase
TestPrefixIndex.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
