"""The picker's placements: by cache, by load and by what Envoy allows. No sockets."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

import pytest

from kvloom_common.text.block_hash import block_hashes, root_hash
from router.core.events import KvChange
from router.core.objectives import Objectives
from tools.gateway.engine_load import ScrapedLoad
from tools.gateway.kv_events import prefix_salt
from tools.gateway.picker import Picker, PickRefusal, Placement, Wish
from tools.gateway.pool import Pool, PoolEndpoint
from tools.gateway.prompts import GatewayPrompt

A, B, C = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"
SALT = prefix_salt("", "")
IDLE = ScrapedLoad(block_size=16, num_blocks=1000)


class Picked:
    """A picker of three endpoints with a clock."""

    def __init__(self, *, has_kv_events: bool = False, **settings: object) -> None:
        addresses = (A, B, C)
        self.now = 100.0
        self.picker = Picker(Pool(endpoints=[PoolEndpoint(address=one) for one in addresses], **settings))
        self._number = 0
        for address in addresses:
            assert self.picker.describe(address, IDLE, self.now, has_kv_events=has_kv_events)
            self.picker.report(address, IDLE)

    def try_pick(self, token_ids: Sequence[int], subset: Collection[str] | None = None, **wish: object) -> object:
        self.now += 0.01
        self._number += 1
        prompt = GatewayPrompt(token_ids, SALT, 100, True)
        name = f"request-{self._number}"
        return self.picker.pick(Wish(request_id=name, prompt=prompt, subset=subset, **wish), self.now)

    def pick(self, token_ids: Sequence[int], subset: Collection[str] | None = None) -> Placement:
        found = self.try_pick(token_ids, subset)
        assert isinstance(found, Placement)
        return found

    def answer(self, placement: Placement) -> None:
        """All of its answer comes."""
        self.now += 0.05
        self.picker.start(placement, self.now)
        self.picker.end(placement, 20)


def prompt(seed: int, num_tokens: int = 4000) -> list[int]:
    return random.Random(seed).choices(range(50_000), k=num_tokens)


def test_a_conversation_stays_where_its_beginning_was_computed() -> None:
    """Engines without KV events: what was computed there counts as cached, for longer than a placement does."""
    picked = Picked()
    first = picked.pick(prompt(1))
    home = first.endpoint
    assert first.fallback not in ("", home)
    picked.answer(first)
    picked.now += 600.0
    for turn in range(1, 6):
        placement = picked.pick(prompt(1) + prompt(100 + turn, 200))
        assert placement.endpoint == home
        picked.answer(placement)
    assert len({picked.pick(prompt(seed)).endpoint for seed in range(10, 16)}) == 3, "others are spread"
    picked.picker.check_integrity()


def test_kv_events_say_where_a_prompt_is_cached() -> None:
    """With events nothing is inferred: a prompt goes to the engine that says that it has its blocks, until it says that
    it has them no longer."""
    picked = Picked(has_kv_events=True)
    hashes = block_hashes(prompt(1), 16, root_hash("", "", SALT))
    for home, other in ((B, C), (C, B)):
        picked.picker.apply(other, [KvChange(cleared=True)], picked.now)
        picked.picker.apply(home, [KvChange(stored=hashes)], picked.now)
        picked.now += 60.0
        placement = picked.pick(prompt(1))
        assert placement.endpoint == home
        picked.picker.end(placement)
        picked.now += 60.0  # until the placement itself counts no more
    picked.picker.check_integrity()


def test_an_engine_that_others_keep_busy_is_avoided() -> None:
    """The scraped load beyond what was placed here belongs to others, and counts from the second reading on."""
    picked = Picked()
    busy = ScrapedLoad(num_running=60, num_waiting=20, kv_usage=0.9, block_size=16, num_blocks=1000)
    for address in (A, B):
        picked.picker.report(address, busy)
        picked.picker.report(address, busy)
    assert {picked.pick(prompt(seed, 400)).endpoint for seed in range(4)} == {C}
    picked.picker.check_integrity()


@pytest.mark.parametrize(("subset", "expected"), [((B,), {B}), ((A, C), {A, C}), ((A, "10.9.9.9:1"), {A})])
def test_only_endpoints_of_the_subset_are_picked(subset: Sequence[str], expected: set[str]) -> None:
    """The gateway may leave a choice among some only: no other may be named, not even as the next one to try."""
    picked = Picked()
    placements = [picked.pick(prompt(seed), subset) for seed in range(12)]
    named = {address for one in placements for address in (one.endpoint, one.fallback)} - {""}
    assert named == expected


def test_without_an_endpoint_that_is_ready_requests_are_refused() -> None:
    """An empty subset, one that is unknown, and engines whose metrics cannot be read."""
    picked = Picked()
    for subset in ((), ("10.9.9.9:1",)):
        assert picked.try_pick(prompt(1), subset) is PickRefusal.UNAVAILABLE
    for address in (A, B, C):
        assert picked.picker.set_ready(address, is_ready=False)
    assert picked.try_pick(prompt(1)) is PickRefusal.UNAVAILABLE
    picked.picker.set_ready(B, is_ready=True)
    assert picked.pick(prompt(1)).endpoint == B


def test_saturation_refuses_what_may_be_refused() -> None:
    """A priority below 0 is for requests that are dropped first; the others go on until each engine has as many as it
    may."""
    picked = Picked(max_requests=2)
    full = ScrapedLoad(num_running=1, kv_usage=0.85, block_size=16, num_blocks=1000)
    for address in (A, B, C):
        picked.picker.report(address, full)
    assert picked.try_pick(prompt(0), priority=-1) is PickRefusal.SATURATED
    placements = [picked.pick(prompt(seed)) for seed in range(6)]
    assert picked.try_pick(prompt(9)) is PickRefusal.SATURATED
    freed = placements[3].endpoint
    picked.answer(placements[3])
    assert picked.pick(prompt(9)).endpoint == freed


def test_a_request_counts_where_it_is_served() -> None:
    """The gateway may have gone on to the next endpoint: the first one has nothing of it."""
    picked = Picked()
    placement = picked.pick(prompt(1))
    served = placement.fallback
    picked.picker.move(placement, served, picked.now)
    assert placement.endpoint == served
    picked.picker.check_integrity()
    picked.picker.move(placement, "10.9.9.9:1", picked.now)
    assert placement.endpoint == served, "not one of the pool"
    picked.answer(placement)
    picked.now += 60.0  # until the placement on the first one counts no more
    assert picked.pick(prompt(1)).endpoint == served


def test_an_endpoint_that_goes_takes_its_requests_along() -> None:
    """Their ends come later, and must find nothing to release."""
    picked = Picked()
    placements = [picked.pick(prompt(seed)) for seed in range(6)]
    gone = placements[0].endpoint
    picked.picker.remove(gone)
    picked.picker.check_integrity()
    assert picked.picker.num_ready == 2
    for placement in placements:
        picked.answer(placement)
    picked.picker.check_integrity()
    assert picked.picker.describe(gone, IDLE, picked.now, has_kv_events=False)
    larger = ScrapedLoad(block_size=128, num_blocks=1000)
    assert picked.picker.describe(gone, larger, picked.now, has_kv_events=False), (
        "another block size: it is another one"
    )
    assert picked.picker.block_size(gone) == (128, 1000)


def test_objectives_that_only_one_endpoint_can_meet_are_met() -> None:
    """x-llm-d-slo-ttft-ms: an endpoint with the prefix but a long queue is left to requests that have time."""
    picked = Picked()
    first = picked.pick(prompt(1, 1600))
    home = first.endpoint
    picked.answer(first)
    for seed in range(20, 26):
        picked.pick(prompt(1, 1600) + prompt(seed, 12_000), (home,))
    found = picked.try_pick(prompt(1, 1600), objectives=Objectives(ttft_seconds=0.5))
    assert isinstance(found, Placement)
    assert found.predicted_ttft_seconds < 0.5


def test_any_order_of_starts_ends_and_losses_leaves_nothing_behind() -> None:
    """Answers, endpoints and metrics come and go in any order: what is reserved is exactly what is live."""
    for seed in range(8):
        choose = random.Random(seed)
        picked = Picked(has_kv_events=seed % 2 == 0)
        live: list[Placement] = []
        for _ in range(50):
            step = choose.random()
            address = choose.choice((A, B, C))
            if step < 0.4:
                found = picked.try_pick(prompt(choose.randrange(5), choose.choice((10, 100, 1000))))
                live += [found] if isinstance(found, Placement) else []
            elif step < 0.8 and live:
                placement = choose.choice(live)
                if step < 0.5:
                    picked.picker.start(placement, picked.now, is_seen=choose.random() < 0.5)
                elif step < 0.7:
                    picked.picker.end(placement, choose.randrange(3))
                else:
                    picked.picker.move(placement, address, picked.now)
            elif step < 0.9:
                picked.picker.remove(address)
            else:
                picked.picker.describe(address, IDLE, picked.now, has_kv_events=False)
                picked.picker.report(address, ScrapedLoad(num_running=choose.randrange(9), kv_usage=choose.random()))
            picked.picker.check_integrity()
