"""Tenants with limits and budgets under random faults of routers, shards, Redis and control.

`make test` runs the first seeds, `make test-long` the others, and `kvloom-lab dst --limits` as many as it is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvloom_common.tenancy import usage_record
from kvloom_common.tenancy.prices import Price
from lab.dst.checker import Checker
from lab.dst.checkers import LIMIT_CHECKERS
from lab.dst.checkers.limits import (
    BudgetsKept,
    ChargesExact,
    ClaimsMoveNoLimit,
    ComputedIsMetered,
    LeasesConserved,
    RatesKept,
)
from lab.dst.run_seed import run_seed
from lab.dst.scenario import has_limits
from lab.dst.tenancy import hostile
from lab.dst.trace import join_lines
from router.core.events import Request
from router.core.lease_messages import LeaseGrant, LeaseWant
from router.core.relay.lifecycle import Lifecycle
from router.core.tenancy.budget_lease import BudgetLease
from router.core.tenancy.limit_plan import LimitPlan
from router.core.tenancy.rate_lease import RateLease
from router.core.tenancy.request_charge import RequestCharge
from tools.simulate.lease_owners import SimulatedBudget

NUM_SEEDS = 60
GROUP = 10
MAX_SEEDS = 40
"""In how many a planted bug must be caught."""


@pytest.mark.parametrize(
    "begin", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(GROUP, NUM_SEEDS, GROUP))]
)
def test_limits_hold_under_faults(begin: int) -> None:
    """Not one token over a budget, no rate above its bound, no lease lost, and every held request ends once."""
    for seed in range(begin, begin + GROUP):
        failure = run_seed(seed, with_limits=True).failure
        if failure is not None:
            pytest.fail(f"{failure.invariant}: {failure.detail}\n{join_lines(failure.history)}", pytrace=False)


def test_limits_have_their_own_random_numbers() -> None:
    """Seeds without limits keep their histories, and those with limits can be replayed."""
    assert run_seed(3, (), with_limits=False).digest != run_seed(3, (), with_limits=True).digest
    assert run_seed(3, (), with_limits=True).digest == run_seed(3, (), with_limits=True).digest


Patch = pytest.MonkeyPatch


def reserves_what_is_expected(patch: Patch) -> None:
    """A budget reserves no more than half of what an answer can cost."""
    original = BudgetLease.take

    def take(self: BudgetLease, need: int, now: float) -> int:
        return original(self, need // 2, now)

    patch.setattr(BudgetLease, "take", take)


def forgets_the_cap(patch: Patch) -> None:
    """The answer of a request that a budget cuts short may be as long as the request says."""
    original = RequestCharge.num_output_tokens

    def num_output_tokens(self: RequestCharge, limit: int) -> int:
        found = original(self, limit)
        self.max_tokens = None
        return found

    patch.setattr(RequestCharge, "num_output_tokens", num_output_tokens)


def counts_a_grant_twice(patch: Patch) -> None:
    """A lease of requests adds what it was granted to what it already has, and once more."""
    original = RateLease.on_grant

    def on_grant(self: RateLease, grant: LeaseGrant, now: float) -> None:
        original(self, grant, now)
        self.units += 2 * grant.granted

    patch.setattr(RateLease, "on_grant", on_grant)


def keeps_what_it_returns(patch: Patch) -> None:
    """A budget's lease that is given back stays in use."""
    original = BudgetLease.want

    def want(self: BudgetLease, now: float) -> LeaseWant | None:
        found = original(self, now)
        if found is not None and found.returned:
            self.free = found.returned
        return found

    patch.setattr(BudgetLease, "want", want)


def asks_anew_after_a_lost_answer(patch: Patch) -> None:
    """A budget that had no answer is asked for as if nothing had been granted."""
    original = BudgetLease.on_failure

    def on_failure(self: BudgetLease, num_routers: int, now: float) -> None:
        original(self, num_routers, now)
        self._unanswered = None

    patch.setattr(BudgetLease, "on_failure", on_failure)


def takes_one_grant_for_two(patch: Patch) -> None:
    """Control does not remember what it has granted: a change that is repeated is done again."""
    original = SimulatedBudget.lease

    def lease(self: SimulatedBudget, router: str, want: LeaseWant) -> LeaseGrant:
        self._last_changes.clear()
        return original(self, router, want)

    patch.setattr(SimulatedBudget, "lease", lease)


def charges_what_has_no_answer(patch: Patch) -> None:
    """A request that was refused, or failed before its first token, is charged for its prompt."""
    original = RequestCharge._used

    def used(self: RequestCharge, *numbers: int, has_answer: bool) -> list[int]:
        del has_answer
        return original(self, *numbers, has_answer=True)

    patch.setattr(RequestCharge, "_used", used)


def never_settles(patch: Patch) -> None:
    """What a request has reserved stays reserved after its end."""
    patch.setattr(Lifecycle, "_end_charged", lambda *_arguments: None)


def believes_claims(patch: Patch) -> None:
    """A request whose choices have output counts as one that has been admitted elsewhere, whoever says so."""
    patch.setattr(
        Request, "num_earlier_tokens", property(lambda self: sum(len(one.output_token_ids) for one in self.choices))
    )


def prefills_claims_for_nothing(patch: Patch) -> None:
    """What the choices have is no part of the prompt."""
    patch.setattr(Request, "num_prompt_tokens", property(lambda self: len(self.prompt_token_ids)))


def counts_the_furthest_run(patch: Patch) -> None:
    """Of all runs of an answer only one counts, as for answers of edges."""
    patch.setattr(usage_record, "last_runs", lambda runs: [max(runs)])


def issues_tickets_for_any_request(patch: Patch) -> None:
    """A ticket is not bound to what determines the answer."""
    patch.setattr(hostile, "_digest", lambda _request: "")


def continues_without_being_counted(patch: Patch) -> None:
    """No limit per minute counts a continuation, as those of processes of the fabric."""
    original = RequestCharge.__init__

    def init(self: RequestCharge, request: Request, plan: LimitPlan, price: Price) -> None:
        original(self, request, plan, price)
        if self.is_continued:
            self.num_rated_tokens = 0

    patch.setattr(RequestCharge, "__init__", init)


BUGS: list[tuple[Callable[[Patch], None], type[Checker]]] = [
    (reserves_what_is_expected, BudgetsKept),
    (forgets_the_cap, BudgetsKept),
    (counts_a_grant_twice, RatesKept),
    (keeps_what_it_returns, LeasesConserved),
    (never_settles, LeasesConserved),
    (asks_anew_after_a_lost_answer, LeasesConserved),
    (takes_one_grant_for_two, LeasesConserved),
    (charges_what_has_no_answer, ChargesExact),
    (believes_claims, ClaimsMoveNoLimit),
    (issues_tickets_for_any_request, ClaimsMoveNoLimit),
    (prefills_claims_for_nothing, ComputedIsMetered),
    (counts_the_furthest_run, ComputedIsMetered),
    (continues_without_being_counted, RatesKept),
]


FURTHER = (
    reserves_what_is_expected,
    keeps_what_it_returns,
    believes_claims,
    prefills_claims_for_nothing,
    continues_without_being_counted,
)
"""Of checkers that another bug tries; these take seconds."""


@pytest.mark.parametrize(
    ("plant", "checker"),
    [
        pytest.param(plant, checker, id=plant.__name__, marks=[pytest.mark.long] * (plant in FURTHER))
        for plant, checker in BUGS
    ],
)
def test_a_planted_bug_is_caught(plant: Callable[[Patch], None], checker: type[Checker], monkeypatch: Patch) -> None:
    """A checker that catches nothing would not be missed when it breaks."""
    plant(monkeypatch)
    for seed in range(MAX_SEEDS):
        failure = run_seed(seed, [checker], with_limits=True).failure
        if failure is not None and failure.invariant == checker.invariant:
            return
    pytest.fail(f"not caught in {MAX_SEEDS} seeds: {plant.__doc__}")


def test_every_checker_of_limits_has_a_planted_bug() -> None:
    """A new checker comes with a proof that it works."""
    own = {checker for checker in LIMIT_CHECKERS if checker.__module__.endswith(".limits")}
    assert {checker for _, checker in BUGS} == own
    assert {checker for plant, checker in BUGS if plant not in FURTHER} == own, "in every run"


def test_a_share_of_ordinary_seeds_has_limits() -> None:
    """What only some command asks for is not run by those who change something else."""
    share = sum(map(has_limits, range(1000))) / 1000
    assert 0.1 < share < 0.2
    seed = next(seed for seed in range(1000) if has_limits(seed))
    assert run_seed(seed, ()).digest == run_seed(seed, (), with_limits=True).digest
