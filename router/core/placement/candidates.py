"""A shard as a request sees it: what it has to compute there, wait for, and take from others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from kvloom.adapters import Adapter
from kvloom_common.class_rank import INTERACTIVE_RANK
from router.core.fleet.fleet import Shard
from router.core.live import LiveRequest
from router.core.load.load_ledger import LoadLedger
from router.core.load.load_view import LoadView, QueuedPlacement
from router.core.placement.eligibility import Eligibility
from router.core.placement.policy import Candidate
from router.core.placement.reuse_curve import ReuseCurve
from router.core.prefix_index.prefix_index import PrefixIndex


class CandidateBuilder:
    """Makes the candidates of a request out of the load, the prefix index and the queues of shards."""

    def __init__(self, eligibility: Eligibility, index: PrefixIndex, ledger: LoadLedger) -> None:
        self.reuse = ReuseCurve()
        """How likely idle blocks are to be used again, by what was placed so far."""
        self._eligibility = eligibility
        self._index = index
        self._ledger = ledger
        self._only_tenant: str | None = None
        """The tenant of all requests so far. None: there was none, or `_is_mixed`."""
        self._is_mixed = False
        """True when there has been a request of another class than interactive, or of another tenant."""

    def is_only_tenant(self, tenant: str) -> bool:
        """Returns true if all requests so far were interactive ones of that tenant."""
        return tenant == self._only_tenant

    def of(self, shards: list[Shard], live: LiveRequest, now: float) -> list[Candidate]:
        """Returns the shards as the request sees them, in the order given."""
        num_expected_tokens = self.num_expected_tokens(live)
        overlaps = self.overlaps(shards, live, now)
        candidates = [
            self.one(shard, live, num_expected_tokens, overlaps.get(shard.shard_id, 0), now) for shard in shards
        ]
        if live.handoff:
            for number, shard in enumerate(shards):
                if self._eligibility.can_fetch(live, shard):
                    num_blocks = -(-live.num_context_tokens // shard.description.block_size)  # all of them are fetched
                    candidates[number] = self.one(shard, live, num_expected_tokens, num_blocks, now)
        self.complete(candidates, shards, live, now)
        return candidates

    def num_expected_tokens(self, live: LiveRequest) -> int:
        """The expected length of each of its answers."""
        request = live.request
        num_tokens, limit = self._ledger.expected_output.tokens(request.tenant, request.model), request.max_tokens
        return num_tokens if limit is None or limit > num_tokens else limit

    def overlaps(self, shards: list[Shard], live: LiveRequest, now: float) -> Mapping[str, int]:
        """How many leading blocks of the prompt each of the shards holds, and may use. Those without any are absent."""
        sizes = self._eligibility.block_sizes(shards)
        counts: dict[str, int] = {}
        for block_size in sizes:
            found = self._index.count_overlaps(live.prompt_hashes(block_size), now)
            if live.max_cached_tokens is not None:
                limit = live.max_cached_tokens // block_size
                found = {shard_id: min(count, limit) for shard_id, count in found.items()}
            if len(sizes) == 1:
                return found
            of_size = (shard.shard_id for shard in shards if shard.description.block_size == block_size)
            counts.update((shard_id, found[shard_id]) for shard_id in of_size if shard_id in found)
        return counts

    def complete(self, candidates: list[Candidate], shards: list[Shard], live: LiveRequest, now: float) -> None:
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

    def one(
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
        num_available_blocks = view.num_free_blocks
        memory_wait_seconds = memory_pressure_seconds = 0.0
        if view.queued or view.held or num_needed_blocks + num_overlap_blocks > view.report.num_available_blocks // 2:
            num_needed_blocks, memory_wait_seconds, memory_pressure_seconds = self._memory(
                shard, live, num_available_blocks, num_needed_blocks, num_overlap_blocks, num_expected_tokens, now
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
            description.num_blocks - num_available_blocks,
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
        shard: Shard,
        live: LiveRequest,
        num_available: int,
        num_needed: int,
        num_overlap_blocks: int,
        num_expected_tokens: int,
        now: float,
    ) -> tuple[int, float, float]:
        """(blocks that have to be free for the request, seconds until they are, cost to those that come later). The
        first is given without those of its prompt that are cached; what is cached and not in use counts as free, and
        is needed as well."""
        description, view = shard.description, self._ledger.view(shard.shard_id)
        num_all = num_needed + num_overlap_blocks
        if num_all > description.num_blocks:
            return 0, 0.0, 0.0  # the shard refuses it
        num_free = num_available - view.held.num_blocks
        if num_all <= num_free - description.num_blocks // 2:
            return num_needed, 0.0, 0.0  # as nearly always
        num_needed = num_all
        if num_overlap_blocks and view.running:
            num_needed -= view.num_in_use(live.prompt_hashes(description.block_size), num_overlap_blocks)
        num_later = num_needed + (num_expected_tokens // view.growth_tokens if view.growth_tokens else 0)
        return num_needed, *view.memory_seconds(num_needed, num_later, num_free, now)

    def _reuse_probability(self, shard_id: str, now: float) -> float:
        """The reuse probability of the blocks that the shard would evict next."""
        return self.reuse.probability(self._index.tail_age_seconds(shard_id, now))


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
