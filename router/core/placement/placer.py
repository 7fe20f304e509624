"""Filters shards, scores them with a policy, and picks the cheapest."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import xxhash

from kvloom.adapters import Adapter
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.class_rank import INTERACTIVE_RANK
from kvloom_common.text.block_hash import block_hashes, root_hash
from router.core.events import ShardDescription
from router.core.fleet.fleet import Fleet, Shard
from router.core.live import LiveRequest
from router.core.load.load_ledger import LoadLedger
from router.core.load.load_view import LoadView, QueuedPlacement
from router.core.load.speed_model import PrefillWork
from router.core.objectives import LiveObjectives
from router.core.placement.plan import Pick, PlacementPlan, ShardPlan
from router.core.placement.policy import Arrival, BacklogPolicy, Candidate, CostFloor, Policy
from router.core.placement.reuse_curve import ReuseCurve
from router.core.prefix_index.prefix_index import PrefixIndex

_OF_PREFILL: Final = ("own_prefill", "lost_capacity", "adapter")
MAX_EXPLAINED: Final = 16
"""How many shards are scored for an explanation: those that can be the cheapest, those that have a part of the prompt,
and some others. All of a fleet of 128 would take more time than the rest of the request."""
COST_EPSILON: Final = 1e-9
"""Costs closer than this are equal: floating point must not decide."""


class _Scores(NamedTuple):
    """The candidates for one request, with their costs."""

    picked_for: LiveRequest
    at: float
    candidates: list[Candidate]
    terms: list[tuple[float, ...]]
    """The cost terms of each candidate."""
    best: Candidate
    shards: list[Shard]
    """Those that could take the request."""
    is_for_explaining: bool
    """True when the candidates are all of these, or MAX_EXPLAINED."""


class LeastTtft(NamedTuple):
    """The earliest first token of a request that any shard would give, in seconds from now."""

    seconds: float
    idle_seconds: float
    """The same if nothing else ran there."""
    has_room: bool
    """True when a shard could take it now. If none can, the wait for a place comes on top of `seconds`."""


class Placer:
    def __init__(
        self,
        fleet: Fleet,
        index: PrefixIndex,
        ledger: LoadLedger,
        policy: Policy,
        seed: int,
        must_leave_room: Callable[[Shard, LiveRequest], bool],
        may_leave_room: Callable[[str], bool],
        decision_sample_share: float = 0.0,
    ) -> None:
        """`must_leave_room` says whether a request may not be sent to a shard although it has room, and
        `may_leave_room` whether that can be so for any shard of a model; `decision_sample_share` of the placements are
        explained."""
        self._explains_all = decision_sample_share >= 1
        self._decision_sample_limit = int(decision_sample_share * 2**64)
        self._fleet = fleet
        self._index = index
        self._ledger = ledger
        self._policy = policy
        self._policy_remembers = type(policy).placed is not Policy.placed
        """True when the policy is told what was placed; most remember nothing."""
        self._reuse = ReuseCurve()
        self._seed = seed
        self._must_leave_room = must_leave_room
        self._may_leave_room = may_leave_room
        self._num_placed = 0
        self._only_tenant: str | None = None
        """The tenant of all requests so far. None: there was none, or `_is_mixed`."""
        self._is_mixed = False
        """True when there has been a request of another class than interactive, or of another tenant."""
        self._last_scores: _Scores | None = None
        """The scores of the last pick."""

    @property
    def hold(self) -> BacklogPolicy | None:
        return self._policy.hold

    def has_room(self, shard: Shard, live: LiveRequest) -> bool:
        """True when the shard has room for the request's tenant."""
        return shard.has_room and not self._must_leave_room(shard, live)

    def any_has_room(self, live: LiveRequest) -> bool:
        """True when some ready shard has room for the request's tenant, if the request fits there or not."""
        return any(self.has_room(shard, live) for shard in self._fleet.ready(live.request.model))

    def fits(self, live: LiveRequest, shard: Shard) -> bool:
        """True when that ready shard could run the request."""
        if self._fleet.has_prefill_shards and not self._may_answer(live, shard):
            return False
        is_wide = shard.description.max_model_len >= live.min_window
        if not (shard.can_generate if live.request.pooling is None else shard.can_embed):
            return False
        adapter = live.request.adapter
        if adapter is not None and not shard.adapters.has(adapter):
            return False
        return is_wide and shard.shard_id != live.avoid_shard_id and not shard.is_suspected

    def eligible(self, live: LiveRequest) -> list[Shard]:
        """Ready shards that could run the request, with or without room: without suspected ones, and without the one
        where it just failed, if there is another."""
        window = live.min_window
        request = live.request
        known = self._fleet.ready_shards(request.model)
        if (
            window <= known.least_window
            and known.can_generate
            and request.pooling is None
            and request.adapter is None
            and not self._fleet.has_prefill_shards
        ):  # nearly always all of them could
            shards = known.preferred
            if live.avoid_shard_id and len(shards) > 1:
                return [shard for shard in shards if shard.shard_id != live.avoid_shard_id]
            return shards
        ready = known.shards
        if live.request.pooling is None:
            shards = [s for s in ready if s.description.max_model_len >= window and s.can_generate]
        else:
            shards = [s for s in ready if s.description.max_model_len >= window and s.can_embed]
        adapter = live.request.adapter
        if adapter is not None:
            shards = [shard for shard in shards if shard.adapters.has(adapter)]
        if self._fleet.has_prefill_shards:
            shards = [shard for shard in shards if not shard.is_for_prompts] or shards
            shards = [shard for shard in shards if self._may_answer(live, shard)] or shards
        if len(shards) > 1:
            shards = [shard for shard in shards if not shard.is_suspected] or shards
        if live.avoid_shard_id and len(shards) > 1:
            return [shard for shard in shards if shard.shard_id != live.avoid_shard_id]
        return shards

    def _may_answer(self, live: LiveRequest, shard: Shard) -> bool:
        """True when the shard is not for prompts only, and can use the request's hand-off if it has one."""
        return not shard.is_for_prompts and (not live.handoff or self._can_fetch(live, shard))

    @staticmethod
    def _can_fetch(live: LiveRequest, shard: Shard) -> bool:
        """True when the shard can use the request's hand-off."""
        split = live.split
        return split is not None and split.prefill_shard is not None and shard.can_fetch_from(split.prefill_shard)

    def can_run(self, live: LiveRequest) -> bool:
        """True when a shard that could run the request has room."""
        model = live.request.model
        for shard in self._fleet.shards.values():  # nearly always the first shard
            if (
                self.has_room(shard, live)
                and not shard.is_draining
                and shard.description.model == model
                and self.fits(live, shard)
            ):
                return True
        return any(self.has_room(shard, live) for shard in self.eligible(live))

    def open_shards(self, live: LiveRequest) -> list[Shard]:
        """The shards that could run the request and have room. An answer continues on a shard of the same variant if
        there is one: only then are its tokens those of an uninterrupted one. (For a first attempt the variant does not
        matter, as no KV moves between shards.)"""
        shards = [shard for shard in self.eligible(live) if len(shard.attempts) < shard.limit]
        if self._may_leave_room(live.request.model):
            shards = [shard for shard in shards if not self._must_leave_room(shard, live)]
        if live.variant and live.continues_answer:
            return [shard for shard in shards if shard.description.variant == live.variant] or shards
        return shards

    def pick(self, shards: list[Shard], live: LiveRequest, now: float) -> tuple[Shard, Candidate]:
        """The cheapest of the request's `open_shards`, with the candidate that describes it."""
        num_wanted = MAX_EXPLAINED if self.is_explained(live.request.request_id) else 0
        self._last_scores = scores = self._score(shards, live, now, num_wanted)
        return self._fleet.shards[scores.best.shard_id], scores.best

    def pick_among(self, shards: list[Shard], live: LiveRequest, now: float) -> tuple[Shard, Candidate]:
        """The cheapest of `shards`."""
        best = self._score(shards, live, now).best
        return self._fleet.shards[best.shard_id], best

    def candidate(self, live: LiveRequest, shard: Shard, now: float) -> Candidate:
        """One shard as the request sees it."""
        return self._candidates([shard], live, now)[0]

    def least_ttft(
        self, live: LiveRequest, held_ahead_seconds: Callable[[Candidate], float], now: float
    ) -> LeastTtft | None:
        """`held_ahead_seconds`: how long those that wait here for a shard and go before the request will take there.
        None: it is not known, because a shard that could run the request has not shown its speed lately."""
        shards = self.eligible(live)
        views = [self._ledger.view(shard.shard_id) for shard in shards]
        if not views or not all(view.has_shown_speed(now) for view in views):
            return None
        candidates = self._candidates(shards, live, now)
        waits = [one.queue_seconds + held_ahead_seconds(one) + one.adapter_wait_seconds for one in candidates]
        idle_seconds = min(
            view.speed.request_seconds(one.num_prefill_tokens, one.num_overlap_tokens, 0) + one.adapter_wait_seconds
            for view, one in zip(views, candidates, strict=True)
        )
        return LeastTtft(
            min(wait + one.own_seconds for wait, one in zip(waits, candidates, strict=True)),
            idle_seconds,
            any(self.has_room(shard, live) for shard in shards),
        )

    def costs_besides_prefill(self, live: LiveRequest, candidate: Candidate) -> float:
        """Returns what a shard costs the request beside the prefill of its own tokens, which it would cost on every
        shard that has as much of its prompt. Seconds; only for policies whose unit that is."""
        hashes = self.hashes(live, candidate.block_size)
        (terms,) = self._policy.costs(_arrival(live, candidate, hashes), [candidate])
        return sum(cost for name, cost in zip(self._policy.terms, terms, strict=True) if name not in _OF_PREFILL)

    def note_placed(
        self, live: LiveRequest, shard: Shard, candidate: Candidate, block_hashes: Sequence[int], now: float
    ) -> None:
        """The picked request is on its way; `block_hashes` are its blocks of the shard's size."""
        self._num_placed += 1
        shard.turn = self._num_placed
        self._reuse.note_prompt(block_hashes, now)
        if self._policy_remembers:
            self._policy.placed(_arrival(live, candidate, block_hashes), shard.shard_id)

    def is_explained(self, request_id: str) -> bool:
        """Returns true if the placement of that request is in the sample of those that are explained."""
        limit = self._decision_sample_limit
        return self._explains_all or (limit > 0 and xxhash.xxh3_64_intdigest(request_id.encode()) < limit)

    def explain_pick(self, live: LiveRequest, picked_shard_id: str, now: float) -> Pick:
        """The placement, with that shard just picked; to be called before anything is reserved for it."""
        scores = self._last_scores
        if scores is None or scores.picked_for is not live or scores.at != now or not scores.is_for_explaining:
            open_shards = self.open_shards(live)
            if not open_shards:
                filtered = self._filtered(live, ())
                num_prompt_tokens = len(live.request.prompt_token_ids)
                return Pick(num_prompt_tokens, picked_shard_id, "", self._policy.terms, (), (), filtered)
            scores = self._score(open_shards, live, now, MAX_EXPLAINED)
        picked = self._fleet.shards[picked_shard_id]
        if all(one.shard_id != picked_shard_id for one in scores.candidates) and picked in scores.shards:
            one = self.candidate(live, picked, now)
            terms = self._policy.costs(_arrival(live, one, self.hashes(live, one.block_size)), [one])
            scores = scores._replace(candidates=[*scores.candidates, one], terms=[*scores.terms, *terms])
        return self._pick_of(scores, live, picked_shard_id)

    def plan(self, live: LiveRequest, now: float) -> PlacementPlan:
        """How each shard compares for the request. Changes nothing."""
        open_shards = self.open_shards(live)
        if not open_shards:
            error = KvloomError(
                ErrorReason.ERROR_REASON_QUEUE_FULL,
                "Every shard that could take this request is full; it would wait in the router.",
                retry_after_seconds=1.0,
            )
            return PlacementPlan(len(live.request.prompt_token_ids), self._filtered(live, ()), error=error)
        scores = self._score(open_shards, live, now, len(open_shards))
        best = scores.best
        work = PrefillWork.of(best.num_prefill_tokens, best.num_overlap_tokens)
        deviation = self._ledger.view(best.shard_id).speed.deviation_seconds(work, best.num_context_tokens)
        plan = self._pick_of(scores, live, best.shard_id).plan
        return dataclasses.replace(plan, prefill_deviation_seconds=deviation)

    def hashes(self, live: LiveRequest, block_size: int) -> Sequence[int]:
        """Hashes of the prompt's full blocks."""
        hashes = live.hashes.get(block_size)
        if hashes is None and live.request.block_hashes is not None:
            hashes = live.request.block_hashes.get(block_size)
        if hashes is None:
            adapter, salt = live.request.adapter, live.request.cache_salt
            root = root_hash(live.request.model, "" if adapter is None else adapter.checksum, salt)
            hashes = block_hashes(live.request.prompt_token_ids, block_size, root)
            live.hashes[block_size] = hashes
        return hashes

    def _score(self, shards: list[Shard], live: LiveRequest, now: float, num_wanted: int = 0) -> _Scores:
        """The cost of placing the request on those of the shards that can be the cheapest, and on `num_wanted` of them
        at least."""
        hashes = self.hashes(live, shards[0].description.block_size)
        if (
            len(shards) > max(1, num_wanted)
            and self._policy.floor is not None
            and live.objectives is None
            and not live.handoff
        ):
            candidates, terms = self._promising(shards, live, hashes, self._policy.floor, num_wanted, now)
        else:
            candidates = self._candidates(shards, live, now)
            terms = self._policy.costs(_arrival(live, candidates[0], hashes), candidates)
        costs: Sequence[float] = list(map(sum, terms))
        if live.objectives is not None and len(candidates) > 1:
            costs = self._where_in_time(costs, candidates, live.objectives, now)
        best = candidates[self._cheapest(costs, candidates, live)]
        return _Scores(live, now, candidates, terms, best, shards, num_wanted > 0)

    def _promising(
        self,
        shards: list[Shard],
        live: LiveRequest,
        hashes: Sequence[int],
        floor: CostFloor,
        num_wanted: int,
        now: float,
    ) -> tuple[list[Candidate], list[tuple[float, ...]]]:
        """The candidates that can be the cheapest, with their cost terms: branch and bound. Shards are looked at in the
        order of the least that they can cost, which follows from the prefill alone, until that is more than the
        cheapest one does cost. So most of a large fleet is not looked at for a prompt that is cached somewhere."""
        overlaps = self._overlaps(shards, live, now)
        near = [shard for shard in shards if shard.shard_id in overlaps]
        candidates, terms, limit = self._cheapest_of(near, overlaps, live, hashes, floor, math.inf, now, num_wanted)
        num_wanted -= len(candidates)
        fastest_seconds = self._ledger.least_prefill_seconds(live.request.model, live.num_context_tokens)
        may_be_far = floor.own * fastest_seconds <= limit
        if may_be_far or num_wanted > 0:
            far = shards if not near else [shard for shard in shards if shard.shard_id not in overlaps]
            if not may_be_far:
                far = far[:num_wanted]
            more, more_terms, _ = self._cheapest_of(far, overlaps, live, hashes, floor, limit, now, num_wanted)
            return candidates + more, terms + more_terms
        return candidates, terms

    def _cheapest_of(
        self,
        shards: list[Shard],
        overlaps: Mapping[str, int],
        live: LiveRequest,
        hashes: Sequence[int],
        floor: CostFloor,
        limit: float,
        now: float,
        num_wanted: int = 0,
    ) -> tuple[list[Candidate], list[tuple[float, ...]], float]:
        """Those of the shards that may cost less than `limit`, and `num_wanted` of them at least, their cost terms, and
        what the cheapest costs."""
        floors = self._floors(shards, overlaps, live, floor, math.inf if num_wanted > 0 else limit)
        heapq.heapify(floors)
        num_expected_tokens = self._num_expected_tokens(live)
        candidates: list[Candidate] = []
        terms: list[tuple[float, ...]] = []
        while floors and (floors[0][0] <= limit or len(candidates) < num_wanted):
            least, number, waits = heapq.heappop(floors)
            shard = shards[number]
            if waits:
                least += self._ledger.views[shard.shard_id].queue_seconds(now)
                if floors and least > floors[0][0]:
                    heapq.heappush(floors, (least, number, False))
                    continue
                if least > limit and len(candidates) >= num_wanted:
                    break
            candidate = self._candidate(shard, live, num_expected_tokens, overlaps.get(shard.shard_id, 0), now)
            self._complete([candidate], [shard], live, now)
            (costs,) = self._policy.costs(_arrival(live, candidate, hashes), [candidate])
            limit = min(limit, sum(costs) + COST_EPSILON)
            candidates.append(candidate)
            terms.append(costs)
        return candidates, terms, limit

    def _floors(
        self, shards: list[Shard], overlaps: Mapping[str, int], live: LiveRequest, floor: CostFloor, limit: float
    ) -> list[tuple[float, int, bool]]:
        """(the least that it can cost, its number in the list, whether a wait for prefill queued there comes on top),
        of each of the shards for which that is not above `limit`. It runs once for every shard of a large fleet, and so
        reads what properties of the view would compute."""
        views, num_tokens = self._ledger.views, live.num_context_tokens
        is_alone = live.request.tenant == self._only_tenant  # of others, not all that wait or decode may count
        floors: list[tuple[float, int, bool]] = []
        for number, shard in enumerate(shards):
            view = views[shard.shard_id]
            num_cached = 0
            if shard.shard_id in overlaps:
                num_cached = overlaps[shard.shard_id] * shard.description.block_size
                if num_cached >= num_tokens:
                    num_cached = num_tokens - 1
            factor = floor.own + floor.waiting * (view.own_waiting + view.foreign_waiting)
            if is_alone:
                factor += floor.running * (view.own_running + view.foreign_running)
                if view.held:
                    factor += floor.waiting * len(view.held)
            num_context_tokens = view.own_context_tokens + view.foreign_context_tokens
            own = view.speed.request_seconds(num_tokens - num_cached, num_cached, num_context_tokens)
            if own * factor <= limit:
                floors.append((own * factor, number, bool(view.queued) and not view.ranked_work))
        return floors

    def _where_in_time(
        self, costs: Sequence[float], candidates: Sequence[Candidate], objectives: LiveObjectives, now: float
    ) -> Sequence[float]:
        """The costs, infinite for the candidates that are expected to miss more objectives than others do."""
        num_missed = [
            (now + one.predicted_ttft_seconds > objectives.ttft_due)
            + (self._ledger.view(one.shard_id).report.decode_step_seconds > objectives.tpot_seconds)
            for one in candidates
        ]
        least = min(num_missed)
        return [cost if missed == least else math.inf for cost, missed in zip(costs, num_missed, strict=True)]

    def _pick_of(self, scores: _Scores, live: LiveRequest, picked_shard_id: str) -> Pick:
        candidates = scores.candidates
        num_filtered = len(self._fleet.shards) - len(scores.shards)
        return Pick(
            len(live.request.prompt_token_ids),
            picked_shard_id,
            scores.best.shard_id,
            self._policy.terms,
            candidates,
            scores.terms,
            self._filtered(live, scores.shards) if num_filtered else (),
        )

    def _filtered(self, live: LiveRequest, open_shards: Sequence[Shard]) -> list[ShardPlan]:
        """The reasons why all other shards could not take it."""
        open_ids = {shard.shard_id for shard in open_shards}
        return [
            ShardPlan(shard.shard_id, filtered_reason=self._filtered_reason(shard, live))
            for shard in self._fleet.shards.values()
            if shard.shard_id not in open_ids
        ]

    def _candidates(self, shards: list[Shard], live: LiveRequest, now: float) -> list[Candidate]:
        num_expected_tokens = self._num_expected_tokens(live)
        overlaps = self._overlaps(shards, live, now)
        candidates = [
            self._candidate(shard, live, num_expected_tokens, overlaps.get(shard.shard_id, 0), now) for shard in shards
        ]
        if live.handoff:
            for number, shard in enumerate(shards):
                if self._can_fetch(live, shard):
                    num_blocks = -(-live.num_context_tokens // shard.description.block_size)  # all of them are fetched
                    candidates[number] = self._candidate(shard, live, num_expected_tokens, num_blocks, now)
        self._complete(candidates, shards, live, now)
        return candidates

    def _num_expected_tokens(self, live: LiveRequest) -> int:
        """The expected length of each of its answers."""
        request = live.request
        num_tokens, limit = self._ledger.expected_output.tokens(request.tenant, request.model), request.max_tokens
        return num_tokens if limit is None or limit > num_tokens else limit

    def _overlaps(self, shards: list[Shard], live: LiveRequest, now: float) -> Mapping[str, int]:
        """How many leading blocks of the prompt each of the shards holds, and may use. Those without any are absent."""
        sizes = {shard.description.block_size for shard in shards}
        counts: dict[str, int] = {}
        for block_size in sizes:
            found = self._index.count_overlaps(self.hashes(live, block_size), now)
            if live.max_cached_tokens is not None:
                limit = live.max_cached_tokens // block_size
                found = {shard_id: min(count, limit) for shard_id, count in found.items()}
            if len(sizes) == 1:
                return found
            of_size = (shard.shard_id for shard in shards if shard.description.block_size == block_size)
            counts.update((shard_id, found[shard_id]) for shard_id in of_size if shard_id in found)
        return counts

    def _complete(self, candidates: list[Candidate], shards: list[Shard], live: LiveRequest, now: float) -> None:
        """Add what only some requests wait for: other classes and tenants, and an adapter."""
        request = live.request
        if request.tenant != self._only_tenant or live.priority_class.rank != INTERACTIVE_RANK:
            self._see_others(candidates, shards, live, now)
        adapter = request.adapter
        if adapter is not None:
            for shard, candidate in zip(shards, candidates, strict=True):
                candidate.adapter_wait_seconds = _adapter_wait_seconds(shard, adapter, now)

    def _see_others(self, candidates: list[Candidate], shards: list[Shard], live: LiveRequest, now: float) -> None:
        """Make the candidates aware of other classes and tenants, from when there is the first of them."""
        rank, tenant = live.priority_class.rank, live.request.tenant
        if not self._is_mixed:
            self._is_mixed = rank != INTERACTIVE_RANK or self._only_tenant is not None
            self._only_tenant = None if self._is_mixed else tenant
        for shard, candidate in zip(shards, candidates, strict=True):
            _see_others(candidate, shard, self._ledger.view(shard.shard_id), rank, tenant, now)

    def _candidate(
        self, shard: Shard, live: LiveRequest, num_expected_tokens: int, num_overlap_blocks: int, now: float
    ) -> Candidate:
        shard_id, num_tokens = shard.shard_id, live.num_context_tokens
        description = shard.description
        # The last token is always computed: its logits are needed to sample the first output token.
        num_overlap_tokens = (
            min(num_overlap_blocks * description.block_size, num_tokens - 1) if num_overlap_blocks else 0
        )
        num_prefill_tokens = num_tokens - num_overlap_tokens
        view = self._ledger.view(shard_id)
        num_context_tokens = view.num_context_tokens
        num_new_blocks = -(-num_prefill_tokens // description.block_size)
        num_needed_blocks = num_new_blocks  # that have to be free for it
        if description.reserves_output:
            num_reserved_tokens = live.request.max_tokens or num_expected_tokens
            num_needed_blocks = -(-(num_prefill_tokens + num_reserved_tokens) // description.block_size)
        memory_wait_seconds = memory_pressure_seconds = 0.0
        if view.queued or view.held or num_needed_blocks + num_overlap_blocks > view.report.num_available_blocks // 2:
            num_needed_blocks, memory_wait_seconds, memory_pressure_seconds = self._memory(
                description, view, live, num_needed_blocks, num_overlap_blocks, num_expected_tokens, now
            )
        num_free_blocks = description.num_blocks - self._index.num_stored(shard_id)
        num_evicted_blocks = num_new_blocks - max(0, num_free_blocks) if num_free_blocks < num_new_blocks else 0
        return Candidate(  # in the order of its fields: by name it would take three times as long, for every shard
            shard_id,
            shard.turn,
            description.block_size,
            description.num_blocks,
            num_overlap_tokens,
            num_prefill_tokens,
            view.num_queued_prefill_tokens,
            view.num_running,
            view.num_waiting,
            num_context_tokens,
            description.num_blocks - view.num_free_blocks,
            num_evicted_blocks,
            self._reuse_probability(shard_id, now) if num_evicted_blocks else 0.0,
            view.queue_seconds(now),
            memory_wait_seconds,
            memory_pressure_seconds,
            self._decode_delay_seconds(view, live, num_expected_tokens, now)
            if view.decode_speed.seconds_per_token
            else 0.0,
            view.speed.request_seconds(num_prefill_tokens, num_overlap_tokens, num_context_tokens),
            view.bound_arrivals.per_second(now),
            view.busy.per_second(now),
            num_needed_blocks,
            num_expected_tokens,
            view.held.own_seconds if view.held else (),
        )

    @staticmethod
    def _decode_delay_seconds(view: LoadView, live: LiveRequest, num_expected_tokens: int, now: float) -> float:
        objectives, num_tokens = live.objectives, live.num_context_tokens
        if objectives is None or objectives.tpot_seconds == math.inf:
            return view.decode_delay_seconds(num_tokens, num_expected_tokens, now)
        return view.decode_delay_seconds(num_tokens, num_expected_tokens, now, objectives.tpot_seconds)

    def _memory(
        self,
        description: ShardDescription,
        view: LoadView,
        live: LiveRequest,
        num_needed: int,
        num_overlap_blocks: int,
        num_expected_tokens: int,
        now: float,
    ) -> tuple[int, float, float]:
        """(blocks that have to be free for the request, seconds until they are, cost to those that come later). The
        first is given without those of its prompt that are cached; what is cached and not in use counts as free, and
        is needed as well."""
        num_all = num_needed + num_overlap_blocks
        if num_all > description.num_blocks:
            return 0, 0.0, 0.0  # the shard refuses it
        num_free = view.num_free_blocks - view.held.num_blocks
        if num_all <= num_free - description.num_blocks // 2:
            return num_needed, 0.0, 0.0  # as nearly always
        num_needed = num_all
        if num_overlap_blocks and view.running:
            num_needed -= view.num_in_use(self.hashes(live, description.block_size), num_overlap_blocks)
        num_later = num_needed + (num_expected_tokens // view.growth_tokens if view.growth_tokens else 0)
        wait_seconds = view.memory_wait_seconds(num_needed, now)
        return num_needed, wait_seconds, view.memory_pressure_seconds(num_later, now)

    def _reuse_probability(self, shard_id: str, now: float) -> float:
        """The reuse probability of the blocks that the shard would evict next."""
        return self._reuse.probability(self._index.tail_age_seconds(shard_id, now))

    def _cheapest(self, costs: Sequence[float], candidates: Sequence[Candidate], live: LiveRequest) -> int:
        """Index of the lowest cost. Equal costs are decided by a hash of request, shard and seed: evenly over requests,
        and the same in a replay."""
        limit = min(costs) + COST_EPSILON
        tied = [index for index, cost in enumerate(costs) if cost <= limit]
        if len(tied) == 1:
            return tied[0]
        request_id = live.request.request_id
        return min(
            tied,
            key=lambda index: xxhash.xxh3_64_intdigest(
                f"{request_id}\0{candidates[index].shard_id}".encode(), seed=self._seed
            ),
        )

    def _filtered_reason(self, shard: Shard, live: LiveRequest) -> str:
        if shard.description.model != live.request.model:
            return f"serves {shard.description.model}"
        if shard.is_draining:
            return "draining"
        if shard.description.max_model_len < live.min_window:
            return f"window of {shard.description.max_model_len} tokens, {live.min_window} needed"
        if live.request.pooling is not None and not shard.can_embed:
            return "gives no embeddings"
        if live.request.pooling is None and not shard.can_generate:
            return "gives embeddings only"
        adapter = live.request.adapter
        if adapter is not None and not shard.adapters.has(adapter):
            return f"has no adapter {adapter.name} with the checksum {adapter.checksum[:12]}"
        if shard.is_for_prompts:
            return "computes prompts for other shards"
        if live.handoff and not self._can_fetch(live, shard):
            return "cannot fetch the prompt's KV from the shard that has computed it"
        if shard.health is not None and shard.is_suspected:
            return f"suspected: {shard.health.symptom}"
        if not shard.has_room:
            return "full"
        if self._must_leave_room(shard, live):
            return "the rest is left to other tenants"
        return "failed this request before"


def _adapter_wait_seconds(shard: Shard, adapter: Adapter, now: float) -> float:
    """0 for an adapter that is gone: the request is about to leave the shard."""
    return shard.adapters.wait_seconds(adapter, now) if shard.adapters.has(adapter) else 0.0


def _see_others(candidate: Candidate, shard: Shard, view: LoadView, class_rank: int, tenant: str, now: float) -> None:
    """Notes in the candidate what a request of that class and tenant waits for on a shard, and what waits for it, if
    there are several."""
    candidate.yielding_seconds = view.yielding(class_rank, now)[0]
    candidate.num_urgent = view.num_urgent_sequences(class_rank)
    num_by_tenant = shard.num_by_tenant
    if len(num_by_tenant) > 1 or tenant not in num_by_tenant:
        # No more of another tenant's sequences count as delayed than this tenant has itself: one with many answers
        # would otherwise turn the others away from whole shards.
        num_own = num_by_tenant.get(tenant, 0) + 1
        num_beyond = sum(max(0, num - num_own) for num in num_by_tenant.values())
        candidate.num_beyond_parts = min(num_beyond, candidate.num_running)
    if view.held:
        _see_held(candidate, view.held.values(), class_rank, tenant)


def _see_held(candidate: Candidate, all_held: Iterable[QueuedPlacement], class_rank: int, tenant: str) -> None:
    """Notes in the candidate what waits in the router for the shard. Tenants take turns, so that while the request
    waits, each other one is served no more than its own."""
    own_held: list[float] = []
    of_others: dict[str, float] = {}
    seconds_before, num_less_urgent = 0.0, 0
    for held in all_held:
        if held.class_rank < class_rank:
            seconds_before += held.own_seconds
        elif held.class_rank > class_rank:
            num_less_urgent += 1
        elif held.tenant == tenant:
            own_held.append(held.own_seconds)
        else:
            of_others[held.tenant] = of_others.get(held.tenant, 0.0) + held.own_seconds
    candidate.held_seconds = own_held
    candidate.num_held_less_urgent = num_less_urgent
    if of_others:
        own_seconds = candidate.own_seconds
        turn_seconds = own_seconds + sum(seconds for seconds in own_held if seconds <= own_seconds)
        seconds_before += sum(min(seconds, turn_seconds) for seconds in of_others.values())
    candidate.held_before_seconds = seconds_before


def _arrival(live: LiveRequest, candidate: Candidate, block_hashes: Sequence[int]) -> Arrival:
    """`candidate`: any shard, as the request sees it now."""
    request = live.request
    num_tokens = candidate.num_prefill_tokens + candidate.num_overlap_tokens
    return Arrival(request.request_id, request.session_key, num_tokens, block_hashes)
