"""The eviction order with guaranteed shares against a naive model that counts every block anew each time."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvloom_common.kv_share import MAX_KV_SHARES_PERCENT, KvShare
from shard_server.engines.eviction_order import IDLE_SHARE_SECONDS, EvictionOrder, KvOwner, preempted_for
from tests.examples import num_examples

NUM_BLOCKS = 20
TAGS = (1, 2, 3)


@dataclasses.dataclass
class NaiveBlock:
    owner: KvOwner
    last_use: int | None = None
    """None: a sequence uses it."""


class OrderMachine(RuleBasedStateMachine):
    """Owners come, change their shares and lapse; blocks are used, released, used again and evicted."""

    def __init__(self) -> None:
        super().__init__()
        self.order = EvictionOrder(NUM_BLOCKS)
        self.blocks: dict[int, NaiveBlock] = {}
        self.now = 0.0
        self.num_uses = 0
        self.num_made = 0
        self.current: dict[int, KvOwner] = {0: self.order.common}

    @rule(tag=st.sampled_from(TAGS), percent=st.integers(1, 60), seconds=st.sampled_from((0.0, 1.0, 2000.0)))
    def submit(self, tag: int, percent: int, seconds: float) -> None:
        """A share that is renewed in time stays, and all together keep within the bound."""
        self.now += seconds
        before = {owner.tag: owner for owner in self.order.owners}
        others = sum(
            owner.guarantee
            for owner in before.values()
            if owner.tag != tag and self.now - owner.renewed_at < IDLE_SHARE_SECONDS
        )
        owner = self.order.owner_of(KvShare(tag, percent), self.now)
        left = NUM_BLOCKS * MAX_KV_SHARES_PERCENT // 100 - others
        expected = min(NUM_BLOCKS * percent // 100, left)
        assert owner.guarantee == expected if expected > 0 else owner is self.order.common
        self.current[tag] = owner

    @rule(seconds=st.sampled_from((1.0, 2000.0)))
    def submit_without_share(self, seconds: float) -> None:
        self.now += seconds
        assert self.order.owner_of(None, self.now) is self.order.common

    @rule(tag=st.sampled_from((0, *TAGS)), allows_last_resort=st.booleans())
    def allocate(self, tag: int, allows_last_resort: bool) -> None:
        """The model says which block goes; a protected one of another owner only as the last resort."""
        owner = self.current.get(tag, self.order.common)
        if len(self.blocks) == NUM_BLOCKS:
            unused = {block: one for block, one in self.blocks.items() if one.last_use is not None}
            allowed = {block for block in unused if not self._is_protected(block) or unused[block].owner is owner}
            assert self.order.num_available_to(owner) == len(allowed)
            if not unused or not (allowed or allows_last_resort):
                return
            block = self.order.evict(owner)
            assert block == self._first(owner)
            del self.blocks[block]
        self.num_made += 1
        self.blocks[self.num_made] = NaiveBlock(owner)
        self.order.add_used(owner)

    @precondition(lambda self: any(one.last_use is None for one in self.blocks.values()))
    @rule(data=st.data(), is_cached=st.booleans())
    def release(self, data: st.DataObject, is_cached: bool) -> None:
        block = data.draw(st.sampled_from([block for block, one in self.blocks.items() if one.last_use is None]))
        if is_cached:
            self.num_uses += 1
            self.blocks[block].last_use = self.num_uses
            self.order.add_unused(block, self.blocks[block].owner)
        else:
            self.order.drop_used(self.blocks.pop(block).owner)

    @precondition(lambda self: any(one.last_use is not None for one in self.blocks.values()))
    @rule(data=st.data())
    def use_again(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([block for block, one in self.blocks.items() if one.last_use is not None]))
        self.blocks[block].last_use = None
        self.order.use(block, self.blocks[block].owner)

    @invariant()
    def agrees(self) -> None:
        self.order.check_integrity()
        unused = [block for block, one in self.blocks.items() if one.last_use is not None]
        assert self.order.num_unused == len(unused)
        assert self.order.num_protected == sum(map(self._is_protected, unused))
        outside = {
            id(owner): max(0, self._num_used(owner) - owner.guarantee)
            for owner in (one.owner for one in self.blocks.values())
        }
        assert self.order.uses_lent_blocks == any(outside.values())
        if not any(outside.values()) and len(self.blocks) == NUM_BLOCKS:
            assert self.order.num_available_to(self.order.common), "an owner would wait for the shares of others"

    def _num_used(self, owner: KvOwner) -> int:
        return sum(one.owner is owner and one.last_use is None for one in self.blocks.values())

    def _is_protected(self, block: int) -> bool:
        """Whether it is among the most recently used blocks that fill up the owner's guarantee."""
        owner = self.blocks[block].owner
        newest = sorted(
            (one.last_use, other)
            for other, one in self.blocks.items()
            if one.owner is owner and one.last_use is not None
        )
        room = max(0, owner.guarantee - self._num_used(owner))
        return block in [other for _, other in newest[len(newest) - min(room, len(newest)) :]]

    def _first(self, owner: KvOwner) -> int:
        uses = {block: one.last_use for block, one in self.blocks.items() if one.last_use is not None}
        free_for_all = [block for block in uses if not self._is_protected(block)]
        own = [block for block in uses if self.blocks[block].owner is owner]
        return min(free_for_all or own or list(uses), key=lambda block: uses[block])


OrderMachine.TestCase.settings = settings(max_examples=num_examples(80), stateful_step_count=40, deadline=None)
TestEvictionOrder = OrderMachine.TestCase


class Sequence:
    def __init__(self, owner: KvOwner) -> None:
        self.owner = owner


@pytest.mark.parametrize("seed", range(20))
def test_the_oldest_sequence_is_never_preempted(seed: int) -> None:
    """Progress of the engine rests on it; and as long as others use lent blocks, those leave first."""
    rng = random.Random(seed)
    order = EvictionOrder(100)
    within = order.owner_of(KvShare(1, 30), 0.0)
    running = [Sequence(rng.choice((within, order.common))) for _ in range(rng.randrange(2, 8))]
    for position, sequence in enumerate(running):
        preempted = preempted_for(sequence, running)
        assert preempted is not running[0]
        assert running.index(preempted) >= position
        newer = [one for one in running[position + 1 :] if one.owner is order.common]
        if newer:
            assert preempted is newer[-1]
