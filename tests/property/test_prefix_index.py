"""The prefix index against a naive model of what the shards hold."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.core.events import KvChange
from router.core.prefix_index.event_order import SNAPSHOT_RETRY_SECONDS
from router.core.prefix_index.prefix_index import PLACED_TTL_SECONDS, IndexStepSizes, PrefixIndex
from tests.examples import num_examples

SHARDS = ["a", "b", "c"]
MAX_BLOCKS = 24
hashes = st.integers(0, 31)
chains = st.builds(lambda start, size: list(range(start, min(32, start + size))), hashes, st.integers(0, 20))
hash_lists = st.one_of(chains, st.lists(hashes, max_size=12, unique=True), st.lists(hashes, max_size=16))
fates = st.sampled_from(["arrives"] * 4 + ["lost", "doubled", "delayed"])


@dataclasses.dataclass
class Batch:
    shard_id: str
    number: int
    change: KvChange

    @property
    def num_blocks(self) -> int:
        return len(self.change.stored) + len(self.change.removed)


@dataclasses.dataclass
class Snapshot:
    shard_id: str
    number: int
    block_hashes: list[int]


class NaiveShard:
    """What one shard really holds, what a router can know of it, and which placements it was promised."""

    def __init__(self, now: float) -> None:
        self.states: list[set[int]] = [set()]
        """Truth behind each batch, by its number."""
        self.known_number: int | None = None
        """Of the last batch behind which there is no gap."""
        self.highest_number = 0
        self.held: dict[int, Batch] = {}
        self.placed: dict[int, float] = {}
        self.promised: dict[int, float] = {}
        """As placed, known or not when it was placed."""
        self.asked_at: float | None = now

    @property
    def known(self) -> set[int]:
        return set() if self.known_number is None else self.states[self.known_number]

    @property
    def is_current(self) -> bool:
        return self.known_number is not None and self.known_number >= self.highest_number

    def arrived(self, batch: Batch) -> None:
        self.highest_number = max(self.highest_number, batch.number)
        if self.known_number is None or batch.number > self.known_number:
            self.held.setdefault(batch.number, batch)
        self._advance()

    def skip_to(self, number: int) -> bool:
        if self.known_number is not None and number < self.known_number:
            return False
        self.asked_at = None
        self.known_number = number
        self._advance()
        return True

    def _advance(self) -> None:
        self._confirm()
        if self.known_number is None:
            known_number = -1
        else:
            while self.known_number + 1 in self.held:
                self.known_number += 1
                self._confirm()
            known_number = self.known_number
        self.held = {number: batch for number, batch in self.held.items() if number > known_number}
        while sum(batch.num_blocks for batch in self.held.values()) > MAX_BLOCKS:
            del self.held[min(self.held)]

    def _confirm(self) -> None:
        """The states show only blocks that are stored and not removed again in one batch, hence one batch at a time."""
        for block_hash in self.known:
            self.placed.pop(block_hash, None)


def leading_blocks(prompt: list[int], believed: dict[str, set[int]]) -> dict[str, int]:
    depths = {
        shard_id: next((depth for depth, block_hash in enumerate(prompt) if block_hash not in blocks), len(prompt))
        for shard_id, blocks in believed.items()
    }
    return {shard_id: depth for shard_id, depth in depths.items() if depth}


class PrefixIndexMachine(RuleBasedStateMachine):
    """Shards store and remove blocks; their batches and snapshots are lost, doubled or reordered in transit, and shards
    restart. The index holds exactly the state after the last batch that it can know."""

    step_sizes: ClassVar = IndexStepSizes(run_blocks=5, sweep_runs=1, sweep_share=0.0)

    @initialize()
    def start(self) -> None:
        self.index = PrefixIndex(self.step_sizes)
        self.now = 0.0
        self.shards: dict[str, NaiveShard] = {}
        self.delayed: list[Batch] = []
        self.snapshots: list[Snapshot] = []

    @rule(shard_id=st.sampled_from(SHARDS))
    def shard_up(self, shard_id: str) -> None:
        """A shard connects or restarts: everything on its old stream is lost with it."""
        self.index.add_shard(shard_id, MAX_BLOCKS, self.now)
        self._forget(shard_id)
        self.shards[shard_id] = NaiveShard(self.now)

    @precondition(lambda self: self.shards)
    @rule(pick=st.integers(0, 2))
    def shard_down(self, pick: int) -> None:
        shard_id = self._pick(pick)
        self.index.remove_shard(shard_id)
        self._forget(shard_id)

    @precondition(lambda self: self.shards)
    @rule(pick=st.integers(0, 2), stored=hash_lists, fate=fates)
    def store(self, pick: int, stored: list[int], fate: str) -> None:
        shard_id = self._pick(pick)
        held = self.shards[shard_id].states[-1]
        stored = [block_hash for block_hash in stored if block_hash not in held][: MAX_BLOCKS - len(held)]
        self._send(shard_id, KvChange(stored=stored), fate)

    @precondition(lambda self: self.shards)
    @rule(pick=st.integers(0, 2), removed=hash_lists, fate=fates, backwards=st.booleans())
    def remove(self, pick: int, removed: list[int], fate: str, backwards: bool) -> None:
        self._send(self._pick(pick), KvChange(removed=removed[::-1] if backwards else removed), fate)

    @precondition(lambda self: self.shards)
    @rule(pick=st.integers(0, 2), stored=hash_lists, fate=fates)
    def clear(self, pick: int, stored: list[int], fate: str) -> None:
        self._send(self._pick(pick), KvChange(stored=stored, cleared=True), fate)

    @precondition(lambda self: self.delayed)
    @rule(pick=st.integers(0, 9))
    def delayed_batch(self, pick: int) -> None:
        self._arrive(self.delayed.pop(pick % len(self.delayed)))

    @precondition(lambda self: self.shards)
    @rule(pick=st.integers(0, 2), order=st.randoms(use_true_random=False), is_late=st.booleans())
    def snapshot(self, pick: int, order: object, is_late: bool) -> None:
        shard_id = self._pick(pick)
        shard = self.shards[shard_id]
        block_hashes = sorted(shard.states[-1])
        order.shuffle(block_hashes)
        snapshot = Snapshot(shard_id, len(shard.states) - 1, block_hashes)
        if is_late:
            self.snapshots.append(snapshot)
        else:
            self._arrive_snapshot(snapshot)

    @precondition(lambda self: self.snapshots)
    @rule(pick=st.integers(0, 9), fate=st.sampled_from(["arrives", "doubled", "lost"]))
    def late_snapshot(self, pick: int, fate: str) -> None:
        snapshot = self.snapshots.pop(pick % len(self.snapshots))
        for _ in range({"arrives": 1, "doubled": 2, "lost": 0}[fate]):
            self._arrive_snapshot(snapshot)

    @precondition(lambda self: self.shards)
    @rule(pick=st.integers(0, 2), block_hashes=hash_lists)
    def place(self, pick: int, block_hashes: list[int]) -> None:
        shard_id = self._pick(pick)
        self.index.place(shard_id, block_hashes, self.now)
        shard = self.shards[shard_id]
        shard.promised.update(dict.fromkeys(block_hashes, self.now + PLACED_TTL_SECONDS))
        block_hashes = [block_hash for block_hash in block_hashes if block_hash not in shard.known]
        again = [block_hash for block_hash in block_hashes if shard.placed.pop(block_hash, None) is not None]
        for block_hash in [*again, *block_hashes]:
            shard.placed.setdefault(block_hash, self.now + PLACED_TTL_SECONDS)
        while len(shard.placed) > MAX_BLOCKS:
            del shard.placed[next(iter(shard.placed))]

    @rule(seconds=st.sampled_from([1.0, 20.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for shard in self.shards.values():
            shard.placed = {block_hash: at for block_hash, at in shard.placed.items() if at > self.now}
            shard.promised = {block_hash: at for block_hash, at in shard.promised.items() if at > self.now}

    @rule(prompt=st.one_of(chains, st.lists(hashes, max_size=8)))
    def look_up(self, prompt: list[int]) -> None:
        """The overlap is the number of leading blocks that a shard is known to hold or was just given: a hole ends
        it."""
        believed = {shard_id: shard.known | shard.placed.keys() for shard_id, shard in self.shards.items()}
        assert self.index.count_overlaps(prompt, self.now) == leading_blocks(prompt, believed)

    @precondition(lambda self: self.shards)
    @rule()
    def last_snapshot(self) -> None:
        """Whatever was lost before: once the latest snapshot of every shard has arrived, the index is exact."""
        self.delayed.clear()
        self.snapshots.clear()
        for shard_id, shard in self.shards.items():
            self._arrive_snapshot(Snapshot(shard_id, len(shard.states) - 1, sorted(shard.states[-1])))
            assert shard.is_current
        while not self.index.is_settled:
            self.index.settle()
        for shard_id, shard in self.shards.items():
            assert self.index.num_stored(shard_id) == len(shard.states[-1])
            for block_hash in range(32):
                self.look_up([block_hash])

    @invariant()
    def is_sound(self) -> None:
        self.index.check_integrity()
        self.check_counts()

    def check_counts(self) -> None:
        for shard_id, shard in self.shards.items():
            assert self.index.num_stored(shard_id) == len(shard.known)

    def _send(self, shard_id: str, change: KvChange, fate: str) -> None:
        shard = self.shards[shard_id]
        held = set() if change.cleared else set(shard.states[-1])
        shard.states.append((held - set(change.removed)) | set(change.stored))
        batch = Batch(shard_id, len(shard.states) - 1, change)
        if fate == "delayed":
            self.delayed.append(batch)
        elif fate != "lost":
            for _ in range(2 if fate == "doubled" else 1):
                self._arrive(batch)

    def _arrive(self, batch: Batch) -> None:
        shard = self.shards[batch.shard_id]
        shard.arrived(batch)
        is_asking = not shard.is_current and (
            shard.asked_at is None or self.now - shard.asked_at >= SNAPSHOT_RETRY_SECONDS
        )
        assert self.index.apply_events(batch.shard_id, batch.number, [batch.change], self.now) == is_asking
        if shard.is_current:
            shard.asked_at = None
        elif is_asking:
            shard.asked_at = self.now

    def _arrive_snapshot(self, snapshot: Snapshot) -> None:
        shard = self.shards[snapshot.shard_id]
        is_news = shard.skip_to(snapshot.number)
        wants_more = self.index.apply_snapshot(snapshot.shard_id, snapshot.number, snapshot.block_hashes)
        assert wants_more == (is_news and not shard.is_current)

    def _forget(self, shard_id: str) -> None:
        self.shards.pop(shard_id, None)
        self.delayed = [batch for batch in self.delayed if batch.shard_id != shard_id]
        self.snapshots = [snapshot for snapshot in self.snapshots if snapshot.shard_id != shard_id]

    def _pick(self, pick: int) -> str:
        ids = sorted(self.shards)
        return ids[pick % len(ids)]


class SmallStepsMachine(PrefixIndexMachine):
    """The same with snapshots that are read block by block while everything else continues: the index never believes
    more than is known or was promised by a placement, and knows everything once it is settled. (A block that was placed
    before it was read counts as placed until it is read, even if it is removed meanwhile.)"""

    step_sizes: ClassVar = IndexStepSizes(
        run_blocks=3, snapshot_blocks=2, settle_blocks=1, sweep_runs=1, sweep_share=0.0
    )

    @rule(prompt=st.one_of(chains, st.lists(hashes, max_size=8)))
    def look_up(self, prompt: list[int]) -> None:
        overlaps = self.index.count_overlaps(prompt, self.now)
        most = {shard_id: shard.known | shard.promised.keys() for shard_id, shard in self.shards.items()}
        for shard_id, depth in overlaps.items():
            assert depth <= leading_blocks(prompt, most)[shard_id]
        if self.index.is_settled:
            least = {shard_id: shard.known for shard_id, shard in self.shards.items()}
            for shard_id, depth in leading_blocks(prompt, least).items():
                assert depth <= overlaps[shard_id]

    @rule()
    def settle(self) -> None:
        while not self.index.is_settled:
            self.index.settle()

    def check_counts(self) -> None:
        if self.index.is_settled:
            super().check_counts()


TestPrefixIndex = PrefixIndexMachine.TestCase
TestPrefixIndex.settings = settings(max_examples=num_examples(60), stateful_step_count=40, deadline=None)
TestPrefixIndexSmallSteps = SmallStepsMachine.TestCase
TestPrefixIndexSmallSteps.settings = settings(max_examples=num_examples(60), stateful_step_count=40, deadline=None)
