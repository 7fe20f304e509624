"""Answers from the result cache, for tenants with limits: a hit costs its share, and no budget is overspent."""

from __future__ import annotations

from typing import Any

from kvloom.v1.generation_pb2 import FINISH_REASON_STOP, RESULT_CACHE_USE_HIT
from kvloom_common.tenancy.limits import Limits
from kvloom_common.tenancy.prices import Price
from router.core.actions import Action, RequestEnded, SubmitAttempt
from router.core.events import CachedChoice, Request, RequestArrived
from router.core.frames import Finish
from tests.fakes.core_rig import has, only
from tests.fakes.limited_rig import LimitedRig, error_of, tenant_table

PRICE = Price("p1", "*", prompt_nanos=10, cached_nanos=10, output_nanos=100, result_cache_percent=10)
FULL_COST = 5 * 10 + 4 * 100


def _hit(world: LimitedRig, request_id: str = "hit", **changes: Any) -> list[Action]:
    """A request whose answer of four tokens is known."""
    cached = [CachedChoice([7, 7, 7, 7], ["a", "a", "a", "a"], Finish(0, FINISH_REASON_STOP))]
    handle = world.rig.handle

    def with_answer(event: RequestArrived) -> list[Action]:
        assert isinstance(event.request, Request)
        return handle(RequestArrived(event.request, "ticket", RESULT_CACHE_USE_HIT, cached))

    world.rig.handle = with_answer
    try:
        actions = world.submit(request_id, grants=False, **changes)
    finally:
        world.rig.handle = handle
    return world.note(actions)


def _world(budget: int) -> LimitedRig:
    return LimitedRig(tenant_table(tenant=Limits(monthly_budget_nanos=budget), prices=[PRICE]), meters_usage=True)


def test_a_hit_costs_its_share_of_the_price():
    """The tenant pays for what was computed once, and the lease gets back the rest."""
    world = _world(100_000)
    actions = _hit(world)
    assert not has(actions, SubmitAttempt)
    ended = only(actions, RequestEnded)
    assert ended.is_result_cache_hit
    assert ended.num_output_tokens == 4
    assert ended.usage is not None
    assert [charge.total for charge in ended.usage.charges] == [FULL_COST // 10]


def test_a_cached_answer_that_is_longer_than_the_budget_allows_is_not_sent():
    """It would be overspent. So the answer is computed, as far as it goes."""
    world = _world(5 * 10 + 3 * 100)
    actions = _hit(world)
    assert only(actions, SubmitAttempt).max_tokens == 3
    ended = only(world.answer(actions, 4), RequestEnded)
    assert not ended.is_result_cache_hit
    assert ended.usage is not None
    assert [charge.total for charge in ended.usage.charges] == [5 * 10 + 3 * 100]


def test_hits_count_as_requests():
    """Otherwise a limit of requests could be passed by asking the same again and again."""
    world = LimitedRig(tenant_table(key=Limits(requests_per_minute=2)), meters_usage=True)
    assert [error_of(_hit(world, f"hit-{i}")) for i in range(3)] == ["", "", "RATE_LIMITED"]
