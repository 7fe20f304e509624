"""Places requests on the endpoints of a pool, with the router core's placer, prefix index, load ledger and speed
models. Pure: callers pass the time.

    placement = picker.pick(request, now)    it counts as waiting there, and its blocks as about to be stored
    picker.start(placement, now)             its first token has come
    picker.end(placement)                    it has ended there, whether it had started or not

Nothing waits here: a request that finds no room is refused.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from router.core.events import ChoiceSpec, KvChange, Request, ShardDescription, ShardLoad
from router.core.fleet.fleet import Fleet, Shard
from router.core.live import Attempt, LiveRequest, StreamClient
from router.core.load.load_ledger import LoadLedger
from router.core.load.load_view import Reservation
from router.core.objectives import Objectives
from router.core.placement import built_in_policy
from router.core.placement.candidates import CandidateBuilder
from router.core.placement.eligibility import Eligibility
from router.core.placement.placer import Placer
from router.core.placement.policy import Candidate
from router.core.prefix_index.prefix_index import PrefixIndex
from tools.gateway.engine_load import ScrapedLoad
from tools.gateway.pool import Pool
from tools.gateway.predicted_blocks import PredictedBlocks
from tools.gateway.prompts import GatewayPrompt

_MODEL: Final = ""
"""A pool serves one model, whatever its names are."""
_CLIENT: Final = StreamClient("gateway")
_UNLIMITED: Final = 2**40
COARSE_BLOCK_SIZE: Final = 64
"""Smaller blocks are counted together where the cache is only inferred: 100,000 tokens are hashed in 2 ms, not in 8."""


class PickRefusal(enum.Enum):
    UNAVAILABLE = "no engine of the pool is ready for this request"
    SATURATED = "the engines have no room for this request"


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """A request to be placed."""

    request_id: str
    prompt: GatewayPrompt
    tenant: str = ""
    priority: int = 0
    """Below 0: refused while all engines are saturated."""
    objectives: Objectives | None = None
    subset: Collection[str] | None = None
    """The endpoints that it may be placed on; None: all."""


class Placement:
    """A request on its endpoint."""

    __slots__ = ("attempt", "fallback", "has_started", "hashes", "live", "predicted_ttft_seconds", "slot")

    def __init__(self, live: LiveRequest, fallback: str) -> None:
        self.live = live
        self.fallback = fallback
        """The endpoint to try next; "": there is no other."""
        self.attempt: Attempt | None = None
        """None: it has ended."""
        self.slot = 0
        self.hashes: Sequence[int] = ()
        self.predicted_ttft_seconds = 0.0
        self.has_started = False

    @property
    def endpoint(self) -> str:
        """The address; "" once it has ended."""
        return "" if self.attempt is None else self.attempt.shard_id


class _Endpoint:
    """An endpoint, as far as the core does not know it."""

    def __init__(self, predicted: PredictedBlocks | None) -> None:
        self.predicted = predicted
        """None: it publishes KV events."""
        self.num_batches = 0
        self.last: ScrapedLoad | None = None
        self.num_foreign = 0
        self.placements: set[Placement] = set()


class Picker:
    def __init__(self, pool: Pool, seed: int = 0) -> None:
        self.pool = pool
        """Its limits and objectives; which of its endpoints exist, `describe` and `remove` say."""
        self._fleet = Fleet()
        self._index = PrefixIndex()
        self._ledger = LoadLedger()
        self._eligibility = Eligibility(self._fleet, lambda _shard, _live: False, lambda _model: False)
        candidates = CandidateBuilder(self._eligibility, self._index, self._ledger)
        policy = built_in_policy("ect")
        self._placer = Placer(self._fleet, self._eligibility, candidates, self._ledger, policy, seed)
        self._endpoints: dict[str, _Endpoint] = {}
        self._numbers = itertools.count(1)

    # -- endpoints ------------------------------------------------------------------------------------------------

    @property
    def num_ready(self) -> int:
        return len(self._fleet.ready(_MODEL))

    @property
    def num_placed(self) -> int:
        """Requests that have not ended."""
        return sum(len(known.placements) for known in self._endpoints.values())

    def num_stored(self, address: str) -> int:
        """How many blocks the endpoint is known to have."""
        return self._index.num_stored(address)

    def is_saturated(self, address: str) -> bool:
        """True when what waits there, or its KV cache, is beyond the pool's limits."""
        load = self._endpoints[address].last
        if load is None:
            return False
        return load.num_waiting >= self.pool.saturated_waiting or load.kv_usage >= self.pool.saturated_kv_usage

    def describe(self, address: str, load: ScrapedLoad, now: float, *, has_kv_events: bool) -> bool:
        """An endpoint has shown itself, with the size of its blocks. Returns False if it is known as that already;
        otherwise it counts as empty."""
        block_size, num_blocks = load.block_size or self.pool.block_size, load.num_blocks or self.pool.num_blocks
        if not has_kv_events and block_size < COARSE_BLOCK_SIZE:
            num_together = COARSE_BLOCK_SIZE // block_size
            block_size, num_blocks = block_size * num_together, -(-num_blocks // num_together)
        known = self._fleet.shards.get(address)
        if known is not None:
            if (known.description.block_size, known.description.num_blocks) == (block_size, num_blocks):
                return False
            self.remove(address)
        shard = self._fleet.add(
            ShardDescription(address, "", _MODEL, block_size, num_blocks, self.pool.max_requests, _UNLIMITED)
        )
        shard.limit = self.pool.max_requests
        self._ledger.add_shard(address, _MODEL, num_blocks, growth_tokens=block_size)
        self._index.add_shard(address, 2 * num_blocks, now)
        self._index.apply_snapshot(address, 0, ())
        self._endpoints[address] = _Endpoint(None if has_kv_events else PredictedBlocks(num_blocks))
        return True

    def block_size(self, address: str) -> tuple[int, int]:
        """The size of an endpoint's blocks in tokens, and their number."""
        description = self._fleet.shards[address].description
        return description.block_size, description.num_blocks

    def remove(self, address: str) -> None:
        """The endpoint is gone, and with it what was placed there."""
        if address not in self._endpoints:
            return
        for placement in list(self._endpoints[address].placements):
            self._release(placement)
        del self._endpoints[address]
        self._fleet.remove(address)
        self._ledger.remove_shard(address)
        self._index.remove_shard(address)

    def set_ready(self, address: str, *, is_ready: bool) -> bool:
        """An endpoint that is not ready is sent nothing new. Returns True if that has changed."""
        shard = self._fleet.shards.get(address)
        if shard is None or shard.is_draining is not is_ready:
            return False
        shard.is_draining = not is_ready
        self._fleet.note_readiness()
        return True

    def report(self, address: str, load: ScrapedLoad) -> None:
        """The endpoint's metrics were read. What it runs beyond what was placed here, others have sent it."""
        known, view = self._endpoints[address], self._ledger.view(address)
        block_size, num_blocks = self.block_size(address)
        num_running, num_waiting = round(load.num_running), round(load.num_waiting)
        # Requests end while the metrics are on their way: what is foreign is so in two readings in a row.
        num_foreign = max(0, num_running + num_waiting - view.own_running - view.own_waiting)
        known.num_foreign, num_foreign = num_foreign, min(known.num_foreign, num_foreign)
        num_foreign_waiting = min(num_foreign, max(0, num_waiting - view.own_waiting))
        num_used = min(num_blocks, round(load.kv_usage * num_blocks))
        self._ledger.report(
            address,
            ShardLoad(
                num_running=view.own_running + num_foreign - num_foreign_waiting,
                num_waiting=view.own_waiting + num_foreign_waiting,
                num_decode_context_tokens=num_used * block_size,
                num_available_blocks=num_blocks - num_used,
                decode_step_seconds=load.mean_itl_seconds(known.last),
                num_own_running=view.own_running,
                num_own_waiting=view.own_waiting,
                num_own_decode_context_tokens=view.own_context_tokens,
            ),
        )
        known.last = load

    def apply(self, address: str, changes: Sequence[KvChange], now: float) -> None:
        """The endpoint's KV blocks have changed, in this order."""
        known = self._endpoints.get(address)
        if known is not None and changes:
            known.num_batches += 1
            self._index.apply_events(address, known.num_batches, changes, now)

    # -- requests -------------------------------------------------------------------------------------------------

    def pick(self, wish: Wish, now: float) -> Placement | PickRefusal:
        prompt = wish.prompt
        request = Request(
            wish.request_id,
            _CLIENT.client_id,
            _MODEL,
            prompt.token_ids,
            "",
            (ChoiceSpec(0, 0),),
            max_tokens=prompt.most_tokens,
            tenant=wish.tenant,
            cache_salt=prompt.salt,
            objectives=wish.objectives,
        )
        live = LiveRequest(request, _CLIENT, now)
        eligible = self._eligibility.eligible(live)
        if wish.subset is not None:
            eligible = [shard for shard in eligible if shard.shard_id in wish.subset]
        if not eligible:
            return PickRefusal.UNAVAILABLE
        shards = [shard for shard in eligible if shard.has_room]
        if not shards or (wish.priority < 0 and all(self.is_saturated(shard.shard_id) for shard in eligible)):
            return PickRefusal.SATURATED
        shard, candidate, fallback = self._placer.pick_with_fallback(shards, live, now)
        placement = Placement(live, fallback)
        self._reserve(placement, shard, candidate, now)
        return placement

    def start(self, placement: Placement, now: float, *, is_seen: bool = True) -> None:
        """The first token of the answer has come. `is_seen`: it was seen to come, so that it tells the engine's
        speed. Without effect if it has started or ended before."""
        attempt = placement.attempt
        if attempt is None or placement.has_started:
            return
        placement.has_started = True
        # A prefill that has begun just now tells nothing.
        waited_seconds = 0.0 if is_seen else now - attempt.sent_at
        self._ledger.note_starts(attempt.shard_id, [(attempt.key, waited_seconds)], now)
        predicted = self._endpoints[attempt.shard_id].predicted
        if predicted is not None:
            self.apply(attempt.shard_id, predicted.store(placement.hashes), now)

    def move(self, placement: Placement, address: str, now: float) -> None:
        """Another endpoint than the picked one serves the request. Without effect if it is not one of the pool."""
        shard = self._fleet.shards.get(address)
        if shard is not None and placement.endpoint not in ("", address):
            self._release(placement)
            self._reserve(placement, shard, self._placer.candidate(placement.live, shard, now), now)

    def end(self, placement: Placement, num_output_tokens: int = 0) -> None:
        """The request has ended on its endpoint. 0 output tokens say nothing about how long answers are."""
        if num_output_tokens:
            self._ledger.expected_output.learn(placement.live.request.tenant, _MODEL, num_output_tokens)
        self._release(placement)

    def check_integrity(self) -> None:
        """Assert that nothing is reserved for what has ended."""
        self._ledger.check_integrity()
        self._index.check_integrity()
        placements = [placement for known in self._endpoints.values() for placement in known.placements]
        assert {one.attempt.key for one in placements if one.attempt is not None} == self._ledger.keys()
        assert len(placements) == len(self._ledger.keys()) == sum(len(s.attempts) for s in self._fleet.shards.values())

    def _reserve(self, placement: Placement, shard: Shard, candidate: Candidate, now: float) -> None:
        live, address = placement.live, shard.shard_id
        request, hashes = live.request, live.prompt_hashes(candidate.block_size)
        attempt = Attempt(request.request_id, 1, next(self._numbers), address, 1, now, request.tenant)
        self._ledger.reserve(
            attempt.key,
            Reservation(
                address,
                1,
                candidate.num_prefill_tokens,
                candidate.num_overlap_tokens,
                candidate.num_needed_blocks,
                now,
                num_expected_tokens=candidate.num_expected_tokens,
                block_hashes=hashes,
            ),
        )
        self._index.place(address, hashes, now)
        self._placer.note_placed(live, shard, candidate, hashes, now)
        placement.attempt, placement.slot, placement.hashes = attempt, shard.open_slot(attempt), hashes
        placement.predicted_ttft_seconds, placement.has_started = candidate.predicted_ttft_seconds, False
        self._endpoints[address].placements.add(placement)

    def _release(self, placement: Placement) -> None:
        attempt, placement.attempt = placement.attempt, None
        if attempt is not None:
            self._fleet.shards[attempt.shard_id].close_slot(placement.slot)
            self._ledger.release(attempt.key)
            self._endpoints[attempt.shard_id].placements.discard(placement)
