"""Limits of several routers against exact models, and against the `limits` package where it can say something."""

from __future__ import annotations

import random
from collections.abc import Sequence

import limits
import limits.storage
import limits.storage.memory
import limits.strategies
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom_common.tenancy.limits import Limits
from kvloom_common.tenancy.prices import Price
from router.core.actions import Action, RequestEnded, SubmitAttempt
from router.core.events import RequestCancelled, Tick
from router.core.tenancy.answer_cost import money_cost, token_cost
from tests.examples import num_examples
from tests.fakes.limited_rig import LimitedRig, tenant_table
from tools.simulate.lease_owners import BudgetOwner, RateOwner

NUM_ROUTERS = 3
GAPS = st.sampled_from([0.0, 0.01, 0.2, 0.6, 1.1, 3.0, 20.0, 61.0])


class Routers:
    """Three routers that share everything."""

    def __init__(self, limits_of_key: Limits, prices: Sequence[Price] = ()) -> None:
        self.rates, self.budgets = RateOwner(), BudgetOwner()
        table = tenant_table(key=limits_of_key, prices=prices)
        self.rigs = [
            LimitedRig(table, rates=self.rates, budgets=self.budgets, router=f"r{number}", meters_usage=True)
            for number in range(NUM_ROUTERS)
        ]
        self.now = 1.0
        self.admitted: list[float] = []
        """Times of requests that were admitted."""
        self.running: list[tuple[LimitedRig, SubmitAttempt]] = []
        self.num_requests = 0
        self.spent = 0

    def wait(self, seconds: float) -> None:
        """Time passes in steps that are short enough for leases to be given back."""
        while seconds > 0:
            step = min(seconds, 0.5)
            seconds -= step
            self.now += step
            for rig in self.rigs:
                rig.rig.now = self.now
                self.take(rig, rig.rig.handle(Tick()))

    def submit(self, router: int, max_tokens: int = 1, *, fails: bool = False) -> None:
        rig = self.rigs[router]
        self.num_requests += 1
        actions = rig.rig.submit(
            f"q{self.num_requests}", slots=(self.num_requests,), tenant="acme/web", key_id="k1", max_tokens=max_tokens
        )
        self.take(rig, actions, fails=fails)

    def take(self, rig: LimitedRig, actions: list[Action], *, fails: bool = False) -> None:
        actions = rig.note(actions, grants=False)
        for _ in range(50):
            if not rig.wants:
                break
            if fails:
                actions += rig.fail(NUM_ROUTERS)
            else:
                actions += rig.grant(grants=False)
        for action in actions:
            if isinstance(action, SubmitAttempt):
                self.admitted.append(self.now)
                self.running.append((rig, action))
            elif isinstance(action, RequestEnded) and action.usage is not None:
                for charge in action.usage.charges:
                    [budget] = self.budgets.budgets.values()
                    budget.record(rig.router, charge.own)
                    self.spent += charge.total

    def answer(self, num_tokens: int) -> None:
        """The request that has run longest is answered, or cancelled if it has no token."""
        if not self.running:
            return
        rig, attempt = self.running.pop(0)
        if num_tokens:
            self.take(rig, rig.raw_answer([attempt], num_tokens))
        else:
            self.take(rig, rig.rig.handle(RequestCancelled(attempt.request.request_id)))

    def check_bucket(self, limit: int, factor: float = 1.0, rest: float = 0.0) -> None:
        """Between any two times no more was admitted than the limit, and what it gains in that time."""
        for i, begin in enumerate(self.admitted):
            for j in range(i, len(self.admitted)):
                most = factor * (limit + limit / 60.0 * (self.admitted[j] - begin)) + rest
                assert j - i + 1 <= most + 1e-6


@settings(max_examples=num_examples(60))
@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(0, NUM_ROUTERS - 1), st.integers(1, 8), GAPS), max_size=25),
)
def test_routers_together_admit_what_one_bucket_would(limit: int, bursts: list[tuple[int, int, float]]):
    """Leases must not make a limit any larger: between two times, no more than the limit and what it gains."""
    world = Routers(Limits(requests_per_minute=limit))
    for router, count, seconds in bursts:
        for _ in range(count):
            world.submit(router)
        world.answer(1)
        world.wait(seconds)
        for bucket in world.rates.buckets.values():
            leased = sum(units for units, _ in bucket.leased.values())
            assert bucket.level + leased <= limit + 1e-6
    world.check_bucket(limit)


@settings(max_examples=num_examples(60))
@given(
    st.integers(3, 12),
    st.lists(st.tuples(st.integers(0, NUM_ROUTERS - 1), st.integers(1, 8), GAPS, st.booleans()), max_size=25),
)
def test_without_redis_the_limit_is_exceeded_by_no_more_than_is_said(
    limit: int, bursts: list[tuple[int, int, float, bool]]
):
    """docs/operate/limits.md: at most the limit once more, however often Redis comes and goes, and one request a
    router."""
    world = Routers(Limits(requests_per_minute=limit))
    for router, count, seconds, fails in bursts:
        for _ in range(count):
            world.submit(router, fails=fails)
        world.wait(seconds)
    world.check_bucket(limit, factor=2.0, rest=NUM_ROUTERS)


PRICE = Price("p", "*", prompt_nanos=3, cached_nanos=1, output_nanos=10, request_nanos=7)


@settings(max_examples=num_examples(80))
@given(
    st.integers(1, 3000),
    st.lists(
        st.tuples(
            st.integers(0, NUM_ROUTERS - 1),
            st.integers(1, 40),
            st.integers(0, 40),
            st.sampled_from([0.0, 0.3, 3.0]),
            st.booleans(),
        ),
        max_size=30,
    ),
)
def test_a_budget_is_never_overspent(limit: int, requests: list[tuple[int, int, int, float, bool]]):
    """Hard means hard: not one token over it, whatever the control service does."""
    world = Routers(Limits(monthly_budget_nanos=limit), [PRICE])
    for router, max_tokens, num_tokens, seconds, fails in requests:
        world.submit(router, max_tokens, fails=fails)
        if seconds:
            world.answer(num_tokens)
            world.wait(seconds)
        _check_budget(world, limit)
    while world.running:
        world.answer(5)
    world.wait(10.0)
    _check_budget(world, limit)
    for budget in world.budgets.budgets.values():
        assert not any(budget.leased.values())
        assert budget.spent == world.spent


def _check_budget(world: Routers, limit: int) -> None:
    assert world.spent <= limit
    for budget in world.budgets.budgets.values():
        assert budget.remaining >= 0
        for rig in world.rigs:
            held = sum(
                lease.free + lease.reserved for account in rig.limiter._book for lease in account.budgets.values()
            )
            assert held == budget.leased.get(rig.router, 0)


@given(
    st.integers(0, 50), st.integers(0, 200), st.integers(0, 100), st.integers(0, 20), st.integers(0, 300),
    st.integers(0, 5000), st.booleans(),
)  # fmt: skip
def test_what_is_affordable_is_the_most_that_is(
    num_prompt: int, output_nanos: int, percent: int, request_nanos: int, most: int, units: int, is_batch: bool
):
    """One token more would be over budget, and one less would waste money."""
    price = Price("p", "*", 0.0, 7, 3, output_nanos, request_nanos, percent)
    weights = Limits(cached_token_percent=percent, reasoning_token_percent=percent + output_nanos)
    for cost in (money_cost(price, num_prompt, is_batch=is_batch), token_cost(weights, num_prompt)):
        found = cost.affordable_tokens(units, most)
        expected = [number for number in range(most + 1) if cost.units(number) <= units]
        assert found == (expected[-1] if expected else None)


# -- the oracle -------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def time(self) -> float:
        return self.now


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 12))])
def test_what_a_moving_window_allows_is_allowed(seed: int, monkeypatch: pytest.MonkeyPatch):
    """`limits` counts what was admitted in the last minute. A bucket admits at least as much as long as nobody was
    refused, and at most twice as much."""
    rng = random.Random(seed)
    clock = Clock()
    monkeypatch.setattr(limits.storage.memory, "time", clock)
    limit = rng.choice((2, 5, 20))
    oracle = limits.strategies.MovingWindowRateLimiter(limits.storage.MemoryStorage())
    once, twice = limits.RateLimitItemPerMinute(limit), limits.RateLimitItemPerMinute(2 * limit)
    world = Routers(Limits(requests_per_minute=limit))
    was_refused = False
    for _ in range(60):
        world.submit(rng.randrange(NUM_ROUTERS))
        is_admitted = bool(world.running)
        world.running.clear()
        was_refused = was_refused or not oracle.hit(once, "ours")
        assert is_admitted or was_refused
        assert not is_admitted or oracle.hit(twice, "admitted")
        # Never a whole minute in sum: an entry of that age is in the window until the oracle's thread has removed it.
        seconds = rng.choice((0.0, 0.503, 60.0 / limit + 0.0011, 30.0017))
        clock.now += seconds
        world.wait(seconds)
