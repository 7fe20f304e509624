"""Of a large fleet few shards are scored for a placement; the one that is picked is the cheapest of all, or as good."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.events import ChoiceSpec, Request, ShardDescription, ShardLoad
from router.core.fleet.fleet import Fleet, Shard
from router.core.live import LiveRequest, StreamClient
from router.core.load.load_ledger import LoadLedger
from router.core.load.load_view import QueuedPlacement, Reservation
from router.core.placement.candidates import CandidateBuilder
from router.core.placement.cheapest import NUM_LISTED, SLACK
from router.core.placement.ect import Ect
from router.core.placement.eligibility import Eligibility
from router.core.placement.placer import Placer
from router.core.prefix_index.prefix_index import PrefixIndex
from tests.examples import num_examples

BLOCK = 16


class RandomFleet:
    """Shards that differ in speed, in what they have cached, and in what they have to do."""

    def __init__(self, seed: int, num_shards: int, num_tenants: int) -> None:
        self.draw = random.Random(seed)
        self.now, self.num_requests = 1.0, 0
        self.tenants = [f"tenant {number}" for number in range(num_tenants)]
        self.fleet, self.index, self.ledger = Fleet(), PrefixIndex(), LoadLedger()
        eligibility = Eligibility(self.fleet, lambda _shard, _live: False, lambda _model: False)
        builder = CandidateBuilder(eligibility, self.index, self.ledger)
        self.placer = Placer(self.fleet, eligibility, builder, self.ledger, Ect(), seed)
        self.slowness = [self.draw.choice([1.0, 1.0, 1.03, 2.0]) for _ in range(num_shards)]
        for number in range(num_shards):
            description = ShardDescription(f"s{number}", "i", "m", BLOCK, 4000, 8, 100_000)
            self.fleet.add(description)
            self.ledger.add_shard(description.shard_id, "m", description.num_blocks)
            self.index.add_shard(description.shard_id, 8000, self.now)

    def request(self) -> LiveRequest:
        """It shares a beginning with many others, or a longer one with few."""
        draw, prompt = self.draw, list[int]()
        for group, num_tokens in ((3, 320), (12, 1600), (10**6, 400)):
            first = 2000 * draw.randrange(group)
            prompt += range(first, first + draw.randrange(num_tokens))
        self.num_requests += 1
        tenant = draw.choice(self.tenants)
        request = Request(f"r{self.num_requests}", "c", "m", prompt or [1], "", [ChoiceSpec(1, 0)], tenant=tenant)
        return LiveRequest(request, StreamClient("c"), self.now)

    def run(self, live: LiveRequest, shard: Shard) -> None:
        """The shard gets the request, and what it has is some time older then; now and then other routers' work too."""
        draw, ledger, shard_id = self.draw, self.ledger, shard.shard_id
        one = self.placer.candidate(live, shard, self.now)
        hashes = live.prompt_hashes(BLOCK)
        view = ledger.view(shard_id)
        key = (live.request.request_id, 1)
        reservation = Reservation(
            shard_id, 1, one.num_prefill_tokens, one.num_overlap_tokens, one.num_needed_blocks, self.now
        )
        ledger.reserve(key, reservation)
        self.index.place(shard_id, hashes, self.now)
        self.now += draw.choice([0.0, 0.01, 0.3])
        fate = draw.random()
        if fate < 0.7:
            self.now += self.slowness[int(shard_id[1:])] * one.num_prefill_tokens * draw.uniform(0.9, 1.1) / 10_000
            ledger.note_starts(shard_id, [(other, 0.0) for other in list(view.queued)], self.now)
        if fate < 0.5:
            ledger.release(draw.choice(list(view.running)))
        if draw.random() < 0.1:
            num_foreign = draw.randrange(4)
            load = ShardLoad(num_waiting=num_foreign, num_running=num_foreign, num_available_blocks=4000)
            ledger.report(shard_id, load)
        if draw.random() < 0.1:
            view.held[live.request.request_id] = QueuedPlacement(one.own_seconds, 1, live.request.tenant)
        if draw.random() < 0.1:
            shard.limit = draw.choice([0, 8])  # it is full, or has room


@pytest.mark.parametrize("num_tenants", [1, 3])
@given(seed=st.integers(0, 2**32), num_shards=st.integers(2, 40))
@settings(max_examples=num_examples(20), deadline=None)
def test_no_shard_is_cheaper_than_the_picked_one(num_tenants: int, seed: int, num_shards: int) -> None:
    """A bound that is above a shard's cost would hide it. In a large fleet, others may be cheaper by little."""
    slack = 1.0 if num_shards <= NUM_LISTED else SLACK
    rig = RandomFleet(seed, num_shards, num_tenants)
    for _ in range(30):
        live = rig.request()
        open_shards = rig.placer.eligibility.open_shards(live)
        if not open_shards:
            break
        picked, _ = rig.placer.pick(open_shards, live, rig.now)
        costs = {shard.shard_id: shard.cost_seconds for shard in rig.placer.plan(live, rig.now).shards}
        assert costs[picked.shard_id] <= slack * min(costs[shard.shard_id] for shard in open_shards) + 1e-6
        rig.run(live, picked if rig.draw.random() < 0.5 else rig.draw.choice(open_shards))
        rig.ledger.check_integrity()
        rig.fleet.check_integrity()
