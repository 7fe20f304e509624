"""Chooses the cached block that is evicted next, if some owners have a guaranteed share of a shard's blocks
(docs/operate/kv-shares.md).

A block that is not free belongs to one owner, and is *used* (a sequence holds it) or *unused* (only the cache does).
Everything without a share belongs to one common owner, whose guarantee is 0. As long as an owner holds at most its
guarantee, its unused blocks are *protected*: others evict

1. the least recently used block of all that are not protected, whoever owns it,
2. else an owner that needs a block, the least recently used of its own,
3. else, at the caller's word that this is the last resort, the least recently used of all.

What an owner does not hold of its guarantee is lent: others use and cache blocks there, and since those are not
protected, the owner takes them back with its next allocations. Blocks that running sequences of others hold come back
when these end.

Invariants, checked by `check_integrity` and tests/property/test_eviction_order.py:
- The guarantees of all owners together are at most MAX_KV_SHARES_PERCENT of the blocks. So if no block outside the
  guarantees is used, a block that is not protected is free or unused: an owner never waits for others' shares.
- Without shares there is one list, and its order is that of the last uses.
- An owner has its guarantee from its first block until the share lapses, and never again: an owner whose share comes
  back is a new one. (So no block can become protected while the block before it is not; see BlockPool.)

Sources: the design is that of proportional-share resource management by minimum guarantees with borrowing, as in VMware
ESX's memory reservations (Waldspurger, OSDI 2002) and Hadoop's capacity scheduler, applied to LRU lists.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, Protocol, TypeVar

from kvloom_common.kv_share import MAX_KV_SHARES_PERCENT, KvShare
from shard_server.engines.base import KvShareUsage

IDLE_SHARE_SECONDS: Final = 3600.0
"""A share lapses when its owner has sent no request for so long. Shards are not told when a share is taken away."""


class KvOwner:
    """Holds blocks. `guarantee` is a number of blocks."""

    __slots__ = ("guarantee", "is_queued", "num_protected", "num_used", "renewed_at", "tag", "unused")

    def __init__(self, tag: int = 0) -> None:
        self.tag = tag
        self.guarantee = 0
        self.num_used = 0
        self.unused: OrderedDict[int, int] = OrderedDict()
        """Block → when it was last used, counted in uses. The least recently used one is the first."""
        self.num_protected = 0
        """The number of unused blocks that are protected: the most recently used ones."""
        self.renewed_at = 0.0
        self.is_queued = False
        """True while the heap has an entry for it."""

    @property
    def num_held(self) -> int:
        return self.num_used + len(self.unused)

    @property
    def is_within_share(self) -> bool:
        """True when its sequences use no blocks beyond its guarantee. False for the common owner."""
        return 0 < self.guarantee >= self.num_used

    def takes_over(self, other: KvOwner) -> bool:
        """True when a block that its sequence uses becomes its own: it has a share, and the block's owner has none."""
        return self.guarantee > 0 == other.guarantee


class EvictionOrder:
    """The unused blocks of a pool of `num_blocks`, and how many each owner uses. A block is any number that the pool
    knows it by. All operations take O(1) without shares; with them, O(log owners) amortised, except where said."""

    def __init__(self, num_blocks: int) -> None:
        self.common = KvOwner()
        self.num_unused = 0
        self.num_protected = 0
        self.num_last_resorts = 0
        """Protected blocks that were evicted for others. Counted from the start."""
        self._num_blocks = num_blocks
        self._owners: OrderedDict[int, KvOwner] = OrderedDict()
        """Those with a guarantee, by tag; the one that was renewed least recently is the first."""
        self._num_guaranteed = 0
        self._num_outside = 0
        """Blocks that owners with a share use beyond their guarantees."""
        self._num_uses = 0
        self._oldest: list[tuple[int, int, KvOwner]] = []
        """A heap with one entry for each owner, other than the common one, that has unused blocks without protection.
        An entry is at most as old as the owner's first block: it is corrected when it comes to the top."""
        self._entries = itertools.count()

    # -- shares -------------------------------------------------------------------------------------------------------

    @property
    def has_shares(self) -> bool:
        return bool(self._owners)

    @property
    def owners(self) -> Iterable[KvOwner]:
        """Those with a guarantee."""
        return self._owners.values()

    @property
    def uses_lent_blocks(self) -> bool:
        """True while sequences use blocks outside of guarantees, which will come back."""
        return self.common.num_used > 0 or self._num_outside > 0

    def owner_of(self, share: KvShare | None, now: float) -> KvOwner:
        """The owner of a sequence that has just been submitted. Its share is from now on the one that is given, as far
        as others leave it: all together have at most MAX_KV_SHARES_PERCENT."""
        if self._owners:
            self._end_idle(now)
        if share is None:
            return self.common
        owner = self._owners.get(share.owner)
        num_left = self._num_blocks * MAX_KV_SHARES_PERCENT // 100 - self._num_guaranteed
        if owner is not None:
            num_left += owner.guarantee
        guarantee = min(self._num_blocks * share.percent // 100, num_left)
        if guarantee <= 0:
            if owner is not None:
                self._end_share(owner)
            return self.common
        if owner is None:
            owner = self._owners[share.owner] = KvOwner(share.owner)
        self._owners.move_to_end(share.owner)
        owner.renewed_at = now
        if guarantee != owner.guarantee:
            self._set_guarantee(owner, guarantee)
        return owner

    def num_available_to(self, owner: KvOwner) -> int:
        """How many unused blocks may be evicted for an owner, short of the last resort."""
        return self.num_unused - self.num_protected + owner.num_protected

    def usage(self) -> KvShareUsage | None:
        """Takes O(owners), and nothing as long as there was never a share."""
        if not self._owners and not self.num_last_resorts:
            return None
        num_kept = num_held = 0
        for owner in self._owners.values():
            num_kept += min(owner.num_held, owner.guarantee)
            num_held += owner.num_held
        return KvShareUsage(
            num_kept=num_kept,
            num_lent=self._num_guaranteed - num_kept,
            num_beyond=num_held - num_kept,
            num_protected=self.num_protected if self.uses_lent_blocks else 0,
            num_last_resorts=self.num_last_resorts,
        )

    def _end_idle(self, now: float) -> None:
        while self._owners:
            owner = next(iter(self._owners.values()))
            if now - owner.renewed_at < IDLE_SHARE_SECONDS:
                return
            self._end_share(owner)

    def _end_share(self, owner: KvOwner) -> None:
        del self._owners[owner.tag]
        self._set_guarantee(owner, 0)

    def _set_guarantee(self, owner: KvOwner, guarantee: int) -> None:
        self._num_outside -= max(0, owner.num_used - owner.guarantee)
        self._num_guaranteed += guarantee - owner.guarantee
        owner.guarantee = guarantee
        self._num_outside += max(0, owner.num_used - guarantee)
        self._protect(owner)

    # -- blocks -------------------------------------------------------------------------------------------------------

    def add_used(self, owner: KvOwner, num_blocks: int = 1) -> None:
        """Free blocks are used from now on."""
        if owner is self.common:
            owner.num_used += num_blocks
        else:
            self._change_used(owner, num_blocks)

    def drop_used(self, owner: KvOwner, num_blocks: int = 1) -> None:
        """Used blocks are free, or are about to be those of another owner."""
        if owner is self.common:
            owner.num_used -= num_blocks
        else:
            self._change_used(owner, -num_blocks)

    def add_unused(self, block: int, owner: KvOwner) -> None:
        """A used block is held by the cache only."""
        self.num_unused += 1
        self._num_uses += 1
        owner.unused[block] = self._num_uses
        if owner is self.common:
            owner.num_used -= 1
        else:
            self._change_used(owner, -1)

    def use(self, block: int, owner: KvOwner) -> None:
        """An unused block is used again."""
        del owner.unused[block]
        self.num_unused -= 1
        if owner is self.common:
            owner.num_used += 1
        else:
            self._change_used(owner, 1)

    def evict(self, owner: KvOwner) -> int:
        """Take out the unused block that goes first when `owner` needs one. There must be one. Evicting another
        owner's protected block is the last resort; it takes O(owners)."""
        loser = self._first_unprotected()
        if loser is None:
            loser = owner
            if not owner.unused:
                loser = min((one for one in self._owners.values() if one.unused), key=_first_use)
                self.num_last_resorts += 1
        block, _ = loser.unused.popitem(last=False)
        self.num_unused -= 1
        if loser is not self.common:
            self._protect(loser)
        return block

    def check_integrity(self) -> None:
        """Raise AssertionError unless the counts follow from the owners' blocks. Owners whose shares have lapsed
        are not known here, only what they add to the counts."""
        owners = self._owners.values()
        assert self._num_guaranteed == sum(owner.guarantee for owner in owners), "the guarantees do not add up"
        assert self._num_guaranteed * 100 <= self._num_blocks * MAX_KV_SHARES_PERCENT, "too much is guaranteed"
        assert self.num_protected == sum(owner.num_protected for owner in owners), "the protected blocks do not add up"
        assert self._num_outside >= sum(max(0, owner.num_used - owner.guarantee) for owner in owners)
        for owner in (self.common, *owners):
            wanted = min(len(owner.unused), max(0, owner.guarantee - owner.num_used))
            assert owner.num_protected == wanted, f"{wanted} blocks should be protected, not {owner.num_protected}"
            assert owner.num_used >= 0, "more blocks were released than were used"
            uses = list(owner.unused.values())
            assert uses == sorted(uses), "the blocks are not in the order of their last uses"
            assert owner.is_queued or owner is self.common or len(uses) == wanted, "an owner is missing in the heap"
        assert sum(len(owner.unused) for owner in (self.common, *owners)) <= self.num_unused

    def _change_used(self, owner: KvOwner, change: int) -> None:
        before = owner.num_used
        owner.num_used = before + change
        self._num_outside += max(0, before + change - owner.guarantee) - max(0, before - owner.guarantee)
        self._protect(owner)

    def _protect(self, owner: KvOwner) -> None:
        """Something about the owner has changed."""
        num_unused = len(owner.unused)
        num_protected = min(num_unused, max(0, owner.guarantee - owner.num_used))
        self.num_protected += num_protected - owner.num_protected
        owner.num_protected = num_protected
        if num_protected < num_unused and not owner.is_queued:
            owner.is_queued = True
            heapq.heappush(self._oldest, (_first_use(owner), next(self._entries), owner))

    def _first_unprotected(self) -> KvOwner | None:
        """The owner of the least recently used block that is not protected."""
        common, heap = self.common, self._oldest
        while heap:
            noted_use, _, owner = heap[0]
            if owner.num_protected == len(owner.unused):
                heapq.heappop(heap)
                owner.is_queued = False
                continue
            first_use = _first_use(owner)
            if noted_use == first_use:
                return common if common.unused and _first_use(common) < first_use else owner
            heapq.heapreplace(heap, (first_use, next(self._entries), owner))
        return common if common.unused else None


def _first_use(owner: KvOwner) -> int:
    return next(iter(owner.unused.values()))


class _Ranked(Protocol):
    """A running sequence."""

    @property
    def owner(self) -> KvOwner: ...


_S = TypeVar("_S", bound=_Ranked)


def preempted_for(sequence: _S, running: list[_S]) -> _S:
    """Returns the running sequence that loses its blocks so that `sequence` gets one: the newest that uses blocks
    outside of its owner's guarantee, of those that are not older than `sequence`; else the newest of all. `running` is
    in order of admission. So the oldest sequence is never preempted, and sequences within a share only for want of
    others."""
    position = running.index(sequence)
    for other in reversed(running[position + 1 :]):
        if not other.owner.is_within_share:
            return other
    if not sequence.owner.is_within_share and has_others_outside(sequence, running):
        return sequence
    return running[-1]


def has_others_outside(sequence: _S | None, running: Iterable[_S]) -> bool:
    """True when other running sequences use blocks outside of guarantees."""
    return any(other is not sequence and not other.owner.is_within_share for other in running)
