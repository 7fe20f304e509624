"""Scores the shards that can be the cheapest for a request, and no others: branch and bound.

    1. Every shard has a least cost, which follows from the request's prefill and from what runs there.
    2. The shard whose least cost is the lowest is scored next.
    3. This ends when the lowest least cost is above what the cheapest shard so far does cost.

Where a request has objectives, a shard that is expected to miss fewer of them comes before all that miss more, in the
least costs as in the costs.

In a large fleet even the least costs are computed for few shards: for those that have most of the prompt, and for the
first ones in the ledger's order of all others. So the time that a placement takes hardly depends on the fleet's size.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
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
MAX_LISTED: Final = 32
"""The same of shards that have a part of the prompt, where most of the fleet have nothing of it."""
SLACK: Final = 1.01
"""A shard that can be cheaper by less than this factor is not looked at. The idle shards of a large fleet are alike but
for the noise in what was learned of their speeds."""
NO_LIMIT: Final = (math.inf, math.inf)
_END: Final = OrderedShard(math.inf, 0, 0, "")


class CheapestFirst:
    def __init__(self, fleet: Fleet, candidates: CandidateBuilder, ledger: LoadLedger) -> None:
        self._fleet = fleet
        self._candidates = candidates
        self._ledger = ledger

    def score(
        self,
        policy: Policy,
        floor: CostFloor,
        shards: list[Shard],
        live: LiveRequest,
        now: float,
        *,
        num_wanted: int,
        num_best: int,
    ) -> tuple[list[Candidate], list[tuple[float, ...]], int]:
        """Returns those of the shards that can be one of the `num_best` cheapest, followed by others if they are fewer
        than `num_wanted`, the cost terms of each, and the number of the former. The others are not to be picked: an
        explanation must not change a placement."""
        builder, known, request = self._candidates, self._fleet.shards, live.request
        overlaps = builder.overlaps(shards, live, now)
        least_costs = self._least_costs(floor, shards, overlaps, live, now)
        num_expected_tokens = builder.num_expected_tokens(live)
        hashes = live.prompt_hashes(shards[0].description.block_size)
        arrival = Arrival(request.request_id, request.session_key, live.num_context_tokens, hashes)
        candidates: list[Candidate] = []
        terms: list[tuple[float, ...]] = []
        objectives, views = live.objectives, self._ledger.views

        def score_one(shard_id: str) -> tuple[float, float]:
            shard = known[shard_id]
            candidate = builder.one(shard, live, num_expected_tokens, overlaps.get(shard_id, 0), now)
            builder.complete([candidate], [shard], live, now)
            (costs,) = policy.costs(arrival, [candidate])
            candidates.append(candidate)
            terms.append(costs)
            num_missed = 0
            if objectives is not None:
                step_seconds = views[shard_id].report.decode_step_seconds
                num_missed = objectives.num_missed(now + candidate.predicted_ttft_seconds, step_seconds)
            return num_missed, sum(costs) + COST_EPSILON

        best = [NO_LIMIT] * num_best
        while shard_id := least_costs.pop(best[-1]):
            insort(best, score_one(shard_id))
            best.pop()
        num_promising = len(candidates)
        while len(candidates) < num_wanted and (shard_id := least_costs.pop(NO_LIMIT)):
            score_one(shard_id)
        return candidates, terms, num_promising

    def first(self, floor: CostFloor, shards: list[Shard], live: LiveRequest, now: float) -> list[Shard]:
        """Returns the NUM_LISTED shards whose least costs are the lowest."""
        overlaps = self._candidates.overlaps(shards, live, now)
        least_costs = self._least_costs(floor, shards, overlaps, live, now)
        return [self._fleet.shards[least_costs.pop(NO_LIMIT)] for _ in range(NUM_LISTED)]

    def _least_costs(
        self, floor: CostFloor, shards: list[Shard], overlaps: Mapping[str, int], live: LiveRequest, now: float
    ) -> _LeastCosts:
        if not self._candidates.is_only_tenant(live.request.tenant):
            floor = floor.without_others
        return _LeastCosts(self._fleet, self._ledger, floor, shards, overlaps, live, now)


class _LeastCosts:
    """The least that each of the shards can cost a request, the lowest first."""

    __slots__ = (
        "_far_seconds",
        "_floor",
        "_heap",
        "_least_of_others",
        "_next",
        "_now",
        "_num_missed",
        "_num_tokens",
        "_objectives",
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
        now: float,
    ) -> None:
        self._shards, self._views, self._now = fleet.shards, ledger.views, now
        self._objectives = live.objectives
        self._num_missed = 0 if live.objectives is None else live.objectives.num_missed(now, 0.0)
        """How many objectives any shard misses."""
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
            shards, num_cached_tokens = self._deepest(max(fleet.block_sizes), len(shards))
            self._unseen.difference_update(shards)
            self._far_seconds = order.usual_seconds(num_tokens)
            self._seconds = order.usual_seconds(num_tokens - num_cached_tokens, num_cached_tokens)
        self._heap = [self._least(shard) for shard in shards]
        """(objectives that it misses at least, the least cost, sequences that run there, the shard, its own prefill
        time if a wait for prefill queued there comes on top or else 0); of several with one least cost, the one that
        runs least is likely to be cheaper."""
        heapq.heapify(self._heap)
        self._next = _END
        self._least_of_others: tuple[float, float] = NO_LIMIT
        """The least of the shards from `_next` on, as in the heap."""
        self._advance()

    def _deepest(self, block_size: int, num_shards: int) -> tuple[list[Shard], int]:
        """Returns the shards that have most of the prompt, and how many of its tokens any other has at most. Where few
        of the fleet have a part of it, all of them are listed: the bound of the others is that of the whole prompt."""
        overlaps = self._overlaps
        if len(overlaps) <= max(NUM_LISTED, min(MAX_LISTED, num_shards // 2)):
            shard_ids, num_tokens = list(overlaps), 0
        else:
            shard_ids = sorted(overlaps, key=overlaps.__getitem__, reverse=True)
            num_tokens = min(overlaps[shard_ids[NUM_LISTED]] * block_size, self._num_tokens - 1)
            shard_ids = shard_ids[:NUM_LISTED]
        shards = map(self._shards.__getitem__, shard_ids)
        return [shard for shard in shards if shard in self._unseen], num_tokens

    def pop(self, limit: tuple[float, float]) -> str:
        """Remove and return the shard with the lowest least cost; "": there is none, or it is above `limit`. That is a
        number of objectives missed, with a cost."""
        heap = self._heap
        while True:
            if heap and heap[0] <= self._least_of_others:
                if heap[0] > limit:
                    return ""
                num_missed, least, num_running, shard_id, own_seconds = heap[0]
                if not own_seconds:
                    heapq.heappop(heap)
                    return shard_id
                view, now = self._views[shard_id], self._now
                queue_seconds = view.queue_seconds(now)
                if self._objectives is not None:
                    first_token_at = now + queue_seconds + own_seconds - COST_EPSILON
                    num_missed = self._objectives.num_missed(first_token_at, view.report.decode_step_seconds)
                heapq.heapreplace(heap, (num_missed, least + queue_seconds, num_running, shard_id, 0.0))
            elif self._next is _END or self._least_of_others > limit:
                return ""
            else:
                self._see_next(limit)

    def _see_next(self, limit: tuple[float, float]) -> None:
        key, _, _, shard_id = self._next
        self._advance()
        shard = self._shards[shard_id]
        if shard not in self._unseen:
            return
        if (self._num_missed, key * self._far_seconds) > limit and shard_id not in self._overlaps:
            return
        heapq.heappush(self._heap, self._least(shard))

    def _advance(self) -> None:
        self._next = one = next(self._others, _END)
        self._least_of_others = NO_LIMIT if one is _END else (self._num_missed, SLACK * one.key * self._seconds)

    def _least(self, shard: Shard) -> tuple[float, float, int, str, float]:
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
        num_missed = 0
        if self._objectives is not None:
            first_token_at = self._now + own - COST_EPSILON
            num_missed = self._objectives.num_missed(first_token_at, view.report.decode_step_seconds)
        return num_missed, own * factor, num_running, shard_id, own if view.queued and not view.ranked_work else 0.0
