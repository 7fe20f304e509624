"""Scores the shards that could run a request with a policy, and picks the cheapest."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import xxhash

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from router.core.fleet.fleet import Fleet, Shard
from router.core.live import LiveRequest
from router.core.load.load_ledger import LoadLedger
from router.core.load.speed_model import PrefillWork
from router.core.objectives import LiveObjectives
from router.core.placement.candidates import CandidateBuilder
from router.core.placement.cheapest import COST_EPSILON, NUM_LISTED, CheapestFirst
from router.core.placement.eligibility import Eligibility
from router.core.placement.plan import Pick, PlacementPlan
from router.core.placement.policy import Arrival, BacklogPolicy, Candidate, Policy

_OF_PREFILL: Final = ("own_prefill", "lost_capacity", "adapter")
MAX_EXPLAINED: Final = NUM_LISTED
"""How many shards are scored for an explanation: those that can be the cheapest, those that have a part of the prompt,
and some others. All of a fleet of 128 would take more time than the rest of the request."""


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
        eligibility: Eligibility,
        candidates: CandidateBuilder,
        ledger: LoadLedger,
        policy: Policy,
        seed: int,
        decision_sample_share: float = 0.0,
    ) -> None:
        """`decision_sample_share` of the placements are explained."""
        self.eligibility = eligibility
        self._explains_all = decision_sample_share >= 1
        self._decision_sample_limit = int(decision_sample_share * 2**64)
        self._fleet = fleet
        self._candidates = candidates
        self._cheapest_first = CheapestFirst(fleet, candidates, ledger)
        self._ledger = ledger
        self._seed = seed
        self._num_placed = 0
        self._last_scores: _Scores | None = None
        """The scores of the last pick."""
        self.use_policy(policy)

    def use_policy(self, policy: Policy) -> None:
        self._policy = policy
        self._policy_remembers = type(policy).placed is not Policy.placed
        """True when the policy is told what was placed; most remember nothing."""

    @property
    def hold(self) -> BacklogPolicy | None:
        return self._policy.hold

    def pick(self, shards: list[Shard], live: LiveRequest, now: float) -> tuple[Shard, Candidate]:
        """The cheapest of the request's `open_shards`, with the candidate that describes it."""
        num_wanted = MAX_EXPLAINED if self.is_explained(live.request.request_id) else 0
        self._last_scores = scores = self._score(shards, live, now, num_wanted)
        return self._fleet.shards[scores.best.shard_id], scores.best

    def pick_among(self, shards: list[Shard], live: LiveRequest, now: float) -> tuple[Shard, Candidate]:
        """The cheapest of `shards`."""
        best = self._score(shards, live, now).best
        return self._fleet.shards[best.shard_id], best

    def pick_with_fallback(self, shards: list[Shard], live: LiveRequest, now: float) -> tuple[Shard, Candidate, str]:
        """The cheapest of `shards`, with the candidate that describes it, and the id of the cheapest of the others;
        "": there is no other."""
        scores = self._score(shards, live, now, num_best=2)
        best = scores.best
        others = [index for index, one in enumerate(scores.candidates) if one is not best]
        fallback = ""
        if others:
            candidates = [scores.candidates[index] for index in others]
            fallback = self._best([sum(scores.terms[index]) for index in others], candidates, live, now).shard_id
        return self._fleet.shards[best.shard_id], best, fallback

    def likely(self, shards: list[Shard], live: LiveRequest, now: float) -> list[Shard]:
        """Returns NUM_LISTED of the shards that are likely to be the cheapest, or all of them if the policy knows no
        bounds."""
        floor = self._policy.floor
        if floor is None or len(shards) <= NUM_LISTED:
            return shards
        return self._cheapest_first.first(floor, shards, live, now)

    def candidate(self, live: LiveRequest, shard: Shard, now: float) -> Candidate:
        """One shard as the request sees it."""
        return self._candidates.of([shard], live, now)[0]

    def least_ttft(
        self, live: LiveRequest, held_ahead_seconds: Callable[[Candidate], float], due: float, now: float
    ) -> LeastTtft | None:
        """`held_ahead_seconds`: how long those that wait here for a shard and go before the request will take there. If
        the shards that are likely to be the cheapest give it its first token before it is due, no others are looked at.
        None: it is not known, because a shard that could run the request has not shown its speed lately."""
        shards = self.eligibility.eligible(live)
        few = self.likely(shards, live, now)
        if len(few) < len(shards):
            least = self._least_ttft_of(few, live, held_ahead_seconds, now)
            if least is None or (least.has_room and now + least.seconds <= due):
                return least
        return self._least_ttft_of(shards, live, held_ahead_seconds, now)

    def _least_ttft_of(
        self, shards: list[Shard], live: LiveRequest, held_ahead_seconds: Callable[[Candidate], float], now: float
    ) -> LeastTtft | None:
        views = [self._ledger.view(shard.shard_id) for shard in shards]
        if not views or not all(view.has_shown_speed(now) for view in views):
            return None
        candidates = self._candidates.of(shards, live, now)
        waits = [one.queue_seconds + held_ahead_seconds(one) + one.adapter_wait_seconds for one in candidates]
        idle_seconds = min(
            view.speed.request_seconds(one.num_prefill_tokens, one.num_overlap_tokens, 0) + one.adapter_wait_seconds
            for view, one in zip(views, candidates, strict=True)
        )
        return LeastTtft(
            min(wait + one.own_seconds for wait, one in zip(waits, candidates, strict=True)),
            idle_seconds,
            any(self.eligibility.has_room(shard, live) for shard in shards),
        )

    def costs_besides_prefill(self, live: LiveRequest, candidate: Candidate) -> float:
        """Returns what a shard costs the request beside the prefill of its own tokens, which it would cost on every
        shard that has as much of its prompt. Seconds; only for policies whose unit that is."""
        hashes = live.prompt_hashes(candidate.block_size)
        (terms,) = self._policy.costs(_arrival(live, candidate, hashes), [candidate])
        return sum(cost for name, cost in zip(self._policy.terms, terms, strict=True) if name not in _OF_PREFILL)

    def note_placed(
        self, live: LiveRequest, shard: Shard, candidate: Candidate, block_hashes: Sequence[int], now: float
    ) -> None:
        """The picked request is on its way; `block_hashes` are its blocks of the shard's size."""
        self._num_placed += 1
        shard.turn = self._num_placed
        self._candidates.reuse.note_prompt(block_hashes, now)
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
            open_shards = self.eligibility.open_shards(live)
            if not open_shards:
                filtered = self.eligibility.filtered(live, ())
                num_prompt_tokens = len(live.request.prompt_token_ids)
                return Pick(num_prompt_tokens, picked_shard_id, "", self._policy.terms, (), (), filtered)
            scores = self._score(open_shards, live, now, MAX_EXPLAINED)
        picked = self._fleet.shards[picked_shard_id]
        if all(one.shard_id != picked_shard_id for one in scores.candidates) and picked in scores.shards:
            one = self.candidate(live, picked, now)
            terms = self._policy.costs(_arrival(live, one, live.prompt_hashes(one.block_size)), [one])
            scores = scores._replace(candidates=[*scores.candidates, one], terms=[*scores.terms, *terms])
        return self._pick_of(scores, live, picked_shard_id)

    def plan(self, live: LiveRequest, now: float) -> PlacementPlan:
        """How each shard compares for the request. Changes nothing."""
        open_shards = self.eligibility.open_shards(live)
        if not open_shards:
            error = KvloomError(
                ErrorReason.ERROR_REASON_QUEUE_FULL,
                "Every shard that could take this request is full; it would wait in the router.",
                retry_after_seconds=1.0,
            )
            return PlacementPlan(len(live.request.prompt_token_ids), self.eligibility.filtered(live, ()), error=error)
        scores = self._score(open_shards, live, now, len(open_shards))
        best = scores.best
        work = PrefillWork.of(best.num_prefill_tokens, best.num_overlap_tokens)
        deviation = self._ledger.view(best.shard_id).speed.deviation_seconds(work, best.num_context_tokens)
        plan = self._pick_of(scores, live, best.shard_id).plan
        return dataclasses.replace(plan, prefill_deviation_seconds=deviation)

    def _score(
        self, shards: list[Shard], live: LiveRequest, now: float, num_wanted: int = 0, num_best: int = 1
    ) -> _Scores:
        """The cost of placing the request on those of the shards that can be one of the `num_best` cheapest, and on
        `num_wanted` of them at least."""
        floor = self._policy.floor
        if len(shards) > max(1, num_wanted) and floor is not None and not live.handoff:
            candidates, terms, num_promising = self._cheapest_first.score(
                self._policy, floor, shards, live, now, num_wanted=num_wanted, num_best=num_best
            )
        else:
            hashes = live.prompt_hashes(shards[0].description.block_size)
            candidates = self._candidates.of(shards, live, now)
            terms = self._policy.costs(_arrival(live, candidates[0], hashes), candidates)
            num_promising = len(candidates)
        costs: Sequence[float] = list(map(sum, terms[:num_promising]))
        best = self._best(costs, candidates[:num_promising], live, now)
        return _Scores(live, now, candidates, terms, best, shards, num_wanted > 0)

    def _best(
        self, costs: Sequence[float], candidates: Sequence[Candidate], live: LiveRequest, now: float
    ) -> Candidate:
        """The cheapest of those that are expected to miss the fewest objectives."""
        if live.objectives is not None and len(candidates) > 1:
            costs = self._where_in_time(costs, candidates, live.objectives, now)
        return candidates[self._cheapest(costs, candidates, live)]

    def _where_in_time(
        self, costs: Sequence[float], candidates: Sequence[Candidate], objectives: LiveObjectives, now: float
    ) -> Sequence[float]:
        """The costs, infinite for the candidates that are expected to miss more objectives than others do."""
        views = self._ledger.views
        num_missed = [
            objectives.num_missed(now + one.predicted_ttft_seconds, views[one.shard_id].report.decode_step_seconds)
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
            self.eligibility.filtered(live, scores.shards) if num_filtered else (),
        )

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


def _arrival(live: LiveRequest, candidate: Candidate, block_hashes: Sequence[int]) -> Arrival:
    """`candidate`: any shard, as the request sees it now."""
    request = live.request
    num_tokens = candidate.num_prefill_tokens + candidate.num_overlap_tokens
    return Arrival(request.request_id, request.session_key, num_tokens, block_hashes)
