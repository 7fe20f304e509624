"""Scores the shards that can be the cheapest for a request, and no others: branch and bound.

    1. Every shard has a least cost, which follows from the request's prefill and from what runs there.
    2. The shard whose least cost is the lowest is scored next.
    3. This ends when the lowest least cost is above what the cheapest shard so far does cost.

In a large fleet even the least costs are computed for few shards: for those that have most of the prompt, and for the
first ones in the ledger's order of all others. So the time that a placement takes hardly depends on the fleet's size.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from typing import Final

from router.core.fleet.fleet import Fleet, Shard
from router.core.live import LiveRequest
from router.core.load.cost_order import OrderedShard
from router.core.load.load_ledger import LoadLedger
from router.core.placement.candidates import CandidateBuilder
from router.core.placement.policy import Arrival, Candidate, CostFloor, Policy

COST_EPSILON: Final = 1e-9
"""Costs closer than this are equal: floating point must not decide."""
NUM_LISTED: Final = 8
"""The least costs of so many shards are computed first; a fleet that has no more needs no order."""
SLACK: Final = 1.01
"""A shard that can be cheaper by less than this factor is not looked at. The idle shards of a large fleet are alike but
for the noise in what was learned of their speeds."""
_END: Final = OrderedShard(math.inf, 0, 0, "")


class CheapestFirst:
    def __init__(self, fleet: Fleet, candidates: CandidateBuilder, ledger: LoadLedger) -> None:
        self._fleet = fleet
        self._candidates = candidates
        self._ledger = ledger

    def score(
        self, policy: Policy, floor: CostFloor, shards: list[Shard], live: LiveRequest, num_wanted: int, now: float
    ) -> tuple[list[Candidate], list[tuple[float, ...]], int]:
        """Returns those of the shards that can be the cheapest, followed by others if they are fewer than `num_wanted`,
        the cost terms of each, and the number of the former. The others are not to be picked: an explanation must not
        change a placement."""
        builder, known, request = self._candidates, self._fleet.shards, live.request
        overlaps = builder.overlaps(shards, live, now)
        if not builder.is_only_tenant(request.tenant):
            floor = floor.without_others
        least_costs = _LeastCosts(self._fleet, self._ledger, floor, shards, overlaps, live)
        num_expected_tokens = builder.num_expected_tokens(live)
        hashes = live.prompt_hashes(shards[0].description.block_size)
        arrival = Arrival(request.request_id, request.session_key, live.num_context_tokens, hashes)
        candidates: list[Candidate] = []
        terms: list[tuple[float, ...]] = []

        def score_one(shard_id: str) -> float:
            shard = known[shard_id]
            candidate = builder.one(shard, live, num_expected_tokens, overlaps.get(shard_id, 0), now)
            builder.complete([candidate], [shard], live, now)
            (costs,) = policy.costs(arrival, [candidate])
            candidates.append(candidate)
            terms.append(costs)
            return sum(costs) + COST_EPSILON

        limit = math.inf
        while shard_id := least_costs.pop(limit, now):
            limit = min(limit, score_one(shard_id))
        num_promising = len(candidates)
        while len(candidates) < num_wanted and (shard_id := least_costs.pop(math.inf, now)):
            score_one(shard_id)
        return candidates, terms, num_promising


class _LeastCosts:
    """The least that each of the shards can cost a request, the lowest first."""

    __slots__ = (
        "_far_seconds",
        "_floor",
        "_heap",
        "_next",
        "_num_tokens",
        "_others",
        "_overlaps",
        "_seconds",
        "_shards",
        "_unseen",
        "_views",
    )

    def __init__(
        self,
        fleet: Fleet,
        ledger: LoadLedger,
        floor: CostFloor,
        shards: list[Shard],
        overlaps: Mapping[str, int],
        live: LiveRequest,
    ) -> None:
        self._shards, self._views = fleet.shards, ledger.views
        self._floor = floor
        self._overlaps = overlaps
        self._num_tokens = num_tokens = live.num_context_tokens
        self._others: Iterator[OrderedShard] = iter(())
        """Shards whose least costs are not computed yet; those that are not in `_unseen` are passed over."""
        self._unseen: set[Shard] = set()
        self._far_seconds = self._seconds = 1.0
        """The prefill time that those need at least which have nothing of the prompt, and all of them."""
        if len(shards) > NUM_LISTED:
            order = ledger.order(live.request.model)
            self._others = iter(order.cheapest_first(floor.own, floor.waiting, floor.running))
            self._unseen.update(shards)
            shards, num_cached_tokens = self._deepest(max(fleet.block_sizes))
            self._unseen.difference_update(shards)
            self._far_seconds = order.usual_seconds(num_tokens)
            self._seconds = order.usual_seconds(num_tokens - num_cached_tokens, num_cached_tokens)
        self._next = next(self._others, _END)
        self._heap = [self._least(shard) for shard in shards]
        """(the least cost, sequences that run there, the shard, whether a wait for prefill queued there comes on top);
        of several with one least cost, the one that runs least is likely to be cheaper."""
        heapq.heapify(self._heap)

    def _deepest(self, block_size: int) -> tuple[list[Shard], int]:
        """Returns the shards that have most of the prompt, and how many of its tokens any other has at most."""
        overlaps = self._overlaps
        if len(overlaps) <= NUM_LISTED:
            shard_ids, num_tokens = list(overlaps), 0
        else:
            shard_ids = sorted(overlaps, key=overlaps.__getitem__, reverse=True)
            num_tokens = min(overlaps[shard_ids[NUM_LISTED]] * block_size, self._num_tokens - 1)
        shards = map(self._shards.__getitem__, shard_ids[:NUM_LISTED])
        return [shard for shard in shards if shard in self._unseen], num_tokens

    def pop(self, limit: float, now: float) -> str | None:
        """Remove and return the shard with the lowest least cost. None: there is none, or it is above `limit`."""
        heap = self._heap
        while True:
            least_of_others = SLACK * self._next.key * self._seconds
            if heap and heap[0][0] <= least_of_others:
                least, num_running, shard_id, waits = heap[0]
                if least > limit:
                    return None
                if not waits:
                    heapq.heappop(heap)
                    return shard_id
                least += self._views[shard_id].queue_seconds(now)
                heapq.heapreplace(heap, (least, num_running, shard_id, False))
            elif least_of_others > limit or self._next is _END:
                return None
            else:
                self._see_next(limit)

    def _see_next(self, limit: float) -> None:
        key, _, _, shard_id = self._next
        self._next = next(self._others, _END)
        shard = self._shards[shard_id]
        if shard not in self._unseen or (key * self._far_seconds > limit and shard_id not in self._overlaps):
            return
        heapq.heappush(self._heap, self._least(shard))

    def _least(self, shard: Shard) -> tuple[float, int, str, bool]:
        """It reads what properties of the view would compute: a large fleet is asked for many."""
        shard_id, floor, num_tokens = shard.shard_id, self._floor, self._num_tokens
        view = self._views[shard_id]
        num_cached = 0
        if shard_id in self._overlaps:
            num_cached = self._overlaps[shard_id] * shard.description.block_size
            if num_cached >= num_tokens:
                num_cached = num_tokens - 1
        factor = floor.own + floor.waiting * (view.own_waiting + view.foreign_waiting)
        num_running = view.own_running + view.foreign_running
        if floor.running:
            factor += floor.running * num_running
            if view.held:
                factor += floor.waiting * len(view.held)
        num_context_tokens = view.own_context_tokens + view.foreign_context_tokens
        own = view.speed.request_seconds(num_tokens - num_cached, num_cached, num_context_tokens)
        return own * factor, num_running, shard_id, bool(view.queued) and not view.ranked_work
