"""Of a large fleet few shards are scored for a placement; the one that is picked is the cheapest of all, or as good."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.events import ChoiceSpec, Request, ShardDescription, ShardLoad
from router.core.fleet.fleet import Fleet, Shard
from router.core.live import LiveRequest, StreamClient
from router.core.load.load_ledger import MIN_LEARN_INTERVAL, LoadLedger
from router.core.load.load_view import MIN_OBSERVATIONS, QueuedPlacement, Reservation
from router.core.objectives import LiveObjectives, Objectives
from router.core.placement.candidates import CandidateBuilder
from router.core.placement.cheapest import NUM_LISTED, SLACK
from router.core.placement.ect import Ect
from router.core.placement.eligibility import Eligibility
from router.core.placement.placer import Placer
from router.core.placement.policy import Candidate
from router.core.prefix_index.prefix_index import PrefixIndex
from tests.examples import num_examples

BLOCK = 16


class RandomFleet:
    """Shards that differ in speed, in what they have cached, and in what they have to do."""

    def __init__(self, seed: int, num_shards: int, num_tenants: int, *, has_objectives: bool = False) -> None:
        self.has_objectives = has_objectives
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
        live = LiveRequest(request, StreamClient("c"), self.now)
        if self.has_objectives and draw.random() < 0.8:
            wanted = Objectives(
                ttft_seconds=draw.choice([None, 0.02, 0.2, 2.0]), tpot_seconds=draw.choice([None, 0.03, 0.05])
            )
            live.objectives = LiveObjectives(wanted, self.now - draw.choice([0.0, 0.1]), is_continued=False)
        return live

    def reserve(self, live: LiveRequest, shard: Shard) -> Candidate:
        shard_id, one = shard.shard_id, self.placer.candidate(live, shard, self.now)
        reservation = Reservation(
            shard_id, 1, one.num_prefill_tokens, one.num_overlap_tokens, one.num_needed_blocks, self.now
        )
        self.ledger.reserve((live.request.request_id, 1), reservation)
        self.index.place(shard_id, live.prompt_hashes(BLOCK), self.now)
        return one

    def start(self, shard_id: str, num_prefill_tokens: int) -> None:
        """All that waits there has its first token, after the time that so much prefill takes."""
        seconds = self.slowness[int(shard_id[1:])] * num_prefill_tokens * self.draw.uniform(0.9, 1.1) / 10_000
        self.now += seconds
        queued = self.ledger.view(shard_id).queued
        self.ledger.note_starts(shard_id, [(other, 0.0) for other in list(queued)], self.now)

    def compute(self, live: LiveRequest, shard: Shard) -> None:
        """The shard has the request for itself, and ends it."""
        self.start(shard.shard_id, self.reserve(live, shard).num_prefill_tokens)
        self.ledger.release((live.request.request_id, 1))

    def run(self, live: LiveRequest, shard: Shard) -> None:
        """The shard gets the request, and what it has is some time older then; now and then other routers' work too."""
        draw, ledger, shard_id = self.draw, self.ledger, shard.shard_id
        one, view = self.reserve(live, shard), ledger.view(shard_id)
        self.now += draw.choice([0.0, 0.01, 0.3])
        fate = draw.random()
        if fate < 0.7:
            self.start(shard_id, one.num_prefill_tokens)
        if fate < 0.5:
            ledger.release(draw.choice(list(view.running)))
        if draw.random() < 0.1:
            num_foreign = draw.randrange(4)
            load = ShardLoad(
                num_waiting=num_foreign,
                num_running=num_foreign,
                num_available_blocks=4000,
                decode_step_seconds=draw.choice([0.02, 0.04, 0.06]) if self.has_objectives else 0.0,
            )
            ledger.report(shard_id, load)
        if draw.random() < 0.1:
            view.held[live.request.request_id] = QueuedPlacement(one.own_seconds, 1, live.request.tenant)
        if draw.random() < 0.1:
            shard.limit = draw.choice([0, 8])  # it is full, or has room

    def ranks(self, live: LiveRequest, shards: list[Shard]) -> dict[str, tuple[int, float]]:
        """How many objectives each of the shards is expected to miss, and what it costs."""
        costs = {shard.shard_id: shard.cost_seconds for shard in self.placer.plan(live, self.now).shards}
        return {shard.shard_id: (self.num_missed(live, shard), costs[shard.shard_id]) for shard in shards}

    def num_missed(self, live: LiveRequest, shard: Shard) -> int:
        objectives = live.objectives
        if objectives is None:
            return 0
        first_token_at = self.now + self.placer.candidate(live, shard, self.now).predicted_ttft_seconds
        step_seconds = self.ledger.view(shard.shard_id).report.decode_step_seconds
        return (first_token_at > objectives.ttft_due) + (step_seconds > objectives.tpot_seconds)


@pytest.mark.parametrize(("num_tenants", "has_objectives"), [(1, False), (3, False), (1, True), (3, True)])
@given(seed=st.integers(0, 2**32), num_shards=st.integers(2, 40))
@settings(max_examples=num_examples(10), deadline=None)
def test_no_shard_is_cheaper_than_the_picked_one(
    num_tenants: int, has_objectives: bool, seed: int, num_shards: int
) -> None:
    """A bound that is above a shard's cost would hide it, and so would one that takes a shard to miss an objective that
    it meets. In a large fleet, others may be cheaper by little. What a gateway tries next is the best of the rest."""
    slack = 1.0 if num_shards <= NUM_LISTED else SLACK
    rig = RandomFleet(seed, num_shards, num_tenants, has_objectives=has_objectives)
    for _ in range(30):
        live = rig.request()
        open_shards = rig.placer.eligibility.open_shards(live)
        if not open_shards:
            break
        picked, _, fallback = rig.placer.pick_with_fallback(open_shards, live, rig.now)
        ranks = rig.ranks(live, open_shards)
        assert_is_best(ranks, rig.placer.pick(open_shards, live, rig.now)[0].shard_id, slack)
        assert_is_best(ranks, picked.shard_id, slack)
        del ranks[picked.shard_id]
        assert bool(fallback) is bool(ranks)
        if fallback:
            assert_is_best(ranks, fallback, slack)
        rig.run(live, picked if rig.draw.random() < 0.5 else rig.draw.choice(open_shards))
        rig.ledger.check_integrity()
        rig.fleet.check_integrity()


@given(seed=st.integers(0, 2**32), num_shards=st.integers(NUM_LISTED + 1, 24))
@settings(max_examples=num_examples(10), deadline=None)
def test_few_shards_tell_whether_a_request_can_be_in_time(seed: int, num_shards: int) -> None:
    """What a shard that was not looked at could do in time must not be refused."""
    rig = RandomFleet(seed, num_shards, 1)
    shards = list(rig.fleet.shards.values())
    for shard in shards * MIN_OBSERVATIONS:
        rig.now += MIN_LEARN_INTERVAL
        rig.compute(rig.request(), shard)
    for _ in range(10):
        live, due = rig.request(), rig.now + rig.draw.choice([0.0, 0.02, 0.1, 0.5])
        some, every = (rig.placer.least_ttft(live, lambda _: 0.0, limit, rig.now) for limit in (due, -1.0))
        if some is None or every is None:
            break
        assert (rig.now + some.seconds <= due) is (rig.now + every.seconds <= due)
        assert some.seconds >= every.seconds
        rig.run(live, rig.draw.choice(shards))


def assert_is_best(ranks: dict[str, tuple[int, float]], shard_id: str, slack: float) -> None:
    """None of them misses fewer objectives, and none that misses as many is cheaper by more than the slack."""
    num_missed, cost = ranks[shard_id]
    least_missed, least_cost = min(ranks.values())
    assert num_missed == least_missed
    assert cost <= slack * least_cost + 1e-6
