"""Limits of keys, tenants and organisations in the router core."""

from __future__ import annotations

from typing import Any

import pytest

from kvloom.v1.control_service_pb2 import FollowResponse, KeyEntry, OrganisationEntry, TenantEntry
from kvloom_common.tenancy.limits import Limits, limits_to_proto
from kvloom_common.tenancy.prices import Price
from router.core.actions import Action, LeasesWanted, LimitsCounted, RequestEnded, SubmitAttempt
from router.core.events import ChoiceSpec, ClientGone, DrainEnded, RequestCancelled, SlotsCancelled, Tick
from router.core.lease_messages import LeaseGrant, LeaseKind, LeaseName, LimitCount
from router.core.tenancy.budget_lease import MAX_SPARE_FACTOR, NUM_SPARE_REQUESTS
from router.core.tenancy.rate_lease import RateLease
from tests.fakes.core_rig import has, only, sent
from tests.fakes.limited_rig import LimitedRig, error_of, tenant_table

PRICE = Price("p1", "*", prompt_nanos=10, cached_nanos=1, output_nanos=100)


def test_a_request_without_limits_makes_nothing():
    """Most requests have no limits, and must not pay for those of others."""
    world = LimitedRig(tenant_table())
    actions = world.submit()
    assert has(actions, SubmitAttempt)
    assert not has(actions, LeasesWanted)
    assert world.limiter.num_accounts == 0


def test_a_request_is_held_until_its_lease_arrives():
    """Nobody knows how much is left before Redis has said so, and a refusal would be wrong."""
    world = LimitedRig(tenant_table(key=Limits(requests_per_minute=10)))
    actions = world.submit(grants=False)
    assert not has(actions, SubmitAttempt)
    assert [want.name.kind for want in world.wants] == [LeaseKind.REQUESTS]
    assert has(world.grant(), SubmitAttempt)


def test_the_limit_of_requests_is_exact():
    """The limit is a promise to whoever pays for the fleet."""
    world = LimitedRig(tenant_table(key=Limits(requests_per_minute=10)))
    outcomes = [error_of(world.submit(f"r{i}")) for i in range(12)]
    assert outcomes == [""] * 10 + ["RATE_LIMITED"] * 2
    world.rig.now += 6.0
    assert error_of(world.submit("again")) == ""
    assert error_of(world.submit("too early")) == "RATE_LIMITED"


def test_a_refusal_says_when_to_retry_and_that_is_true():
    """Clients wait as long as they are told."""
    world = LimitedRig(tenant_table(tenant=Limits(requests_per_minute=60)))
    for i in range(60):
        assert error_of(world.submit(f"r{i}")) == ""
    [finish] = sent(world.submit("refused")).finishes
    assert finish.error is not None
    assert finish.error.limit == "tenant:acme/web requests_per_minute"
    assert 0.9 < finish.error.retry_after_seconds < 1.1
    assert finish.error.limits is not None
    assert finish.error.limits.requests is not None
    assert finish.error.limits.requests.remaining == 0
    world.rig.now += finish.error.retry_after_seconds
    assert error_of(world.submit("retried")) == ""


def test_a_refused_request_burns_nothing_on_any_account():
    """Otherwise a key at its limit would use up what its tenant's other keys may have."""
    world = LimitedRig(
        tenant_table(key=Limits(requests_per_minute=1), tenant=Limits(requests_per_minute=100, tokens_per_minute=5000))
    )
    world.submit("first")
    before = _units(world)
    for i in range(5):
        assert error_of(world.submit(f"r{i}")) == "RATE_LIMITED"
    assert _units(world) == before


def test_a_rotated_key_has_no_more_than_the_key_that_it_replaces():
    """Whoever reached a limit had a whole one again after a rotation, which an administrator may do as often as he
    likes."""
    limits = limits_to_proto(Limits(requests_per_minute=2, tokens_per_day=1000))
    table = tenant_table()
    keys = [
        KeyEntry(id="k1", digest=b"1" * 32, tenant="acme/web", limits=limits),
        KeyEntry(id="k2", digest=b"2" * 32, tenant="acme/web", limits=limits, account="k1"),
        KeyEntry(id="other", digest=b"3" * 32, tenant="acme/web", limits=limits),
    ]
    table.apply(FollowResponse(table_id="t", version=2, is_complete=True, keys=keys))
    world = LimitedRig(table)
    assert [error_of(world.submit(key, key_id=key)) for key in ("k1", "k2", "other")] == ["", "", ""]
    for key in ("k1", "k2"):
        [finish] = sent(world.submit(f"{key} again", key_id=key)).finishes
        assert finish.error is not None
        assert finish.error.limit == "key:k1 requests_per_minute"
    table.apply(FollowResponse(table_id="t", version=3, is_complete=True, removed_keys=["k1"]))
    assert error_of(world.submit("after the grace", key_id="k2")) == "RATE_LIMITED"


def _units(world: LimitedRig) -> dict[str, int]:
    """What is left, leased or not."""
    left = {}
    for account in world.limiter._book:
        for lease in (account.requests, account.tokens):
            if lease is not None:
                left[f"{lease.name.account} {lease.name.kind.value}"] = lease.remaining(world.rig.now)
    return left


def test_tokens_are_settled_with_what_was_really_used():
    """An answer shorter than expected must not count for more than it is."""
    world = LimitedRig(tenant_table(key=Limits(tokens_per_minute=1000)))
    actions = world.submit(max_tokens=500)
    assert _units(world)["key:k1 tokens_per_minute"] == 1000 - 5 - 256
    world.answer(actions, 20)
    # 4 of the 5 prompt tokens were cached, and count in full unless a weight says otherwise.
    assert _units(world)["key:k1 tokens_per_minute"] == 1000 - 5 - 20
    world.submit("next", max_tokens=500)
    assert _units(world)["key:k1 tokens_per_minute"] == 1000 - 25 - 25  # its answer is expected to be as long


def test_cached_tokens_have_a_weight():
    """Prompts that cost the fleet nothing need not count."""
    world = LimitedRig(tenant_table(key=Limits(tokens_per_minute=1000, cached_token_percent=0)))
    world.answer(world.submit(max_tokens=10), 10)
    assert _units(world)["key:k1 tokens_per_minute"] == 1000 - 1 - 10


def test_an_answer_longer_than_expected_is_charged_later():
    """The expectation is a guess, but the rate must hold over time."""
    world = LimitedRig(tenant_table(key=Limits(tokens_per_minute=600)))
    world.answer(world.submit("a", max_tokens=3), 3)
    world.answer(world.submit("b", max_tokens=900), 900)
    world.rig.now += 0.5
    world.note(world.rig.handle(Tick()))
    assert error_of(world.submit("c", max_tokens=900)) == "RATE_LIMITED"
    world.rig.now += 60.0
    assert error_of(world.submit("d", max_tokens=900)) == ""


def test_a_prompt_above_the_limit_of_a_minute_can_never_be_admitted():
    """A retry would not help, so none is advised."""
    world = LimitedRig(tenant_table(key=Limits(tokens_per_minute=4)))
    assert error_of(world.submit()) == "REQUEST_TOO_LARGE"


def test_concurrent_requests_are_limited_until_one_ends():
    """However it ends, its slot is free again."""
    world = LimitedRig(tenant_table(tenant=Limits(max_concurrent_requests=2)))
    first = world.submit("a")
    world.submit("b")
    assert error_of(world.submit("c")) == "RATE_LIMITED"
    world.answer(first, 3)
    assert error_of(world.submit("d")) == ""
    world.note(world.rig.handle(RequestCancelled("b")))
    assert error_of(world.submit("e")) == ""
    assert error_of(world.submit("f")) == "RATE_LIMITED"


def test_prompts_and_answers_have_maxima():
    """An answer that a limit cuts short says by which."""
    world = LimitedRig(tenant_table(key=Limits(max_prompt_tokens=5, max_output_tokens=3)))
    assert error_of(world.submit("long", prompt_token_ids=[1] * 6)) == "REQUEST_TOO_LARGE"
    actions = world.submit("r", max_tokens=10)
    assert only(actions, SubmitAttempt).max_tokens == 3
    log = world.answer(actions, 10)
    assert [finish.limited_by for finish in world.finishes(log)] == ["key:k1 max_output_tokens"]


def test_shadow_mode_counts_and_refuses_nothing():
    """Whoever introduces a limit wants to know first whom it would hit."""
    world = LimitedRig(tenant_table(key=Limits(requests_per_minute=2, shadow=True)))
    log = [action for i in range(4) for action in world.submit(f"r{i}")]
    assert sum(isinstance(action, SubmitAttempt) for action in log) == 4
    counts = [count for action in log if isinstance(action, LimitsCounted) for count in action.counts]
    assert counts.count(LimitCount("requests_per_minute", "would_refuse", "key:k1")) == 2
    assert not any(count.outcome == "refused" for count in counts)


def _counts(actions: list[Action]) -> list[tuple[str, str]]:
    return [(count.kind, count.outcome) for one in actions if isinstance(one, LimitsCounted) for count in one.counts]


def test_a_rate_in_shadow_mode_counts_sparse_requests_too():
    """A limit that is above a request a second is reached by clients who ask that often."""
    world = LimitedRig(tenant_table(key=Limits(requests_per_minute=2, max_concurrent_requests=3, shadow=True)))
    log: list[Action] = []
    for i in range(6):
        log += world.submit(f"r{i}")
        world.rig.now += 1.0
    assert sum(isinstance(action, SubmitAttempt) for action in log) == 6
    assert _counts(log).count(("requests_per_minute", "would_refuse")) == 4
    assert _counts(log).count(("max_concurrent_requests", "would_refuse")) == 3


@pytest.mark.parametrize("seconds_between", [0.0, 1.0])
def test_a_budget_in_shadow_mode_counts_what_it_would_have_done(seconds_between: float):
    """The same requests as with a hard budget (below) are cut and refused on paper only, and spend what they use."""
    limits = Limits(monthly_budget_nanos=2000, shadow=True)
    world = LimitedRig(tenant_table(tenant=limits, prices=[PRICE]), meters_usage=True)
    log: list[Action] = []
    for name in "abcd":
        log += world.submit(name, max_tokens=10)  # 1050 at most
        world.rig.now += seconds_between
    attempts = [action for action in log if isinstance(action, SubmitAttempt)]
    assert [attempt.max_tokens for attempt in attempts] == [10] * 4
    kind = "monthly_budget_nanos"
    assert _counts(log) == [(kind, "would_cap"), (kind, "would_refuse"), (kind, "would_refuse")]
    ends = [only(world.answer([attempt], 10), RequestEnded) for attempt in attempts]
    charges = [charge for end in ends if end.usage is not None for charge in end.usage.charges]
    assert [charge.total for charge in charges] == [1014] * 4  # 4 of 5 prompt tokens were cached
    assert [charge.own for charge in charges] == [1014, 950, 0, 0]


def test_a_budget_in_shadow_mode_waits_for_nobody():
    """Neither a slow service nor one that is away may be noticed by whom the limit does not bind yet."""
    world = LimitedRig(tenant_table(tenant=Limits(tokens_per_day=100, shadow=True)))
    actions = world.submit("a", grants=False, max_tokens=10)
    assert has(actions, SubmitAttempt)
    world.raw_answer(actions, 3)
    assert _counts(world.grant()) == []  # it has ended, and there was enough
    world.rig.now += 10.0
    assert has(world.submit("b", grants=False, max_tokens=10), SubmitAttempt)
    world.rig.handle(Tick())
    assert not any(error_of(world.submit(name, grants=False, max_tokens=80)) for name in "cde")
    assert ("tokens_per_day", "would_refuse") in _counts(world.fail())


# -- budgets ----------------------------------------------------------------------------------------------------------


def test_a_budget_is_never_overspent_and_the_last_answer_is_cut_short():
    """The budget is hard: an answer ends where the money does, and says so."""
    world = LimitedRig(tenant_table(tenant=Limits(monthly_budget_nanos=2000), prices=[PRICE]))
    first = world.submit("a", max_tokens=10)  # 50 + 1000 at most
    assert only(first, SubmitAttempt).max_tokens == 10
    second = world.submit("b", max_tokens=10)
    assert only(second, SubmitAttempt).max_tokens == 9  # 950 are left
    assert error_of(world.submit("c", max_tokens=10)) == "BUDGET_EXHAUSTED"
    log = world.answer(second, 10)
    assert [finish.limited_by for finish in world.finishes(log)] == ["tenant:acme/web monthly_budget_nanos"]
    world.answer(first, 2)
    # Of 2000, 214 and 914 were used: 4 of 5 prompt tokens were cached.
    assert only(world.submit("d", max_tokens=10), SubmitAttempt).max_tokens == 8


def test_tokens_of_a_day_are_a_budget():
    """A day's tokens are exact, too."""
    world = LimitedRig(tenant_table(organisation=Limits(tokens_per_day=30)))
    assert only(world.submit("a", max_tokens=20), SubmitAttempt).max_tokens == 20
    assert error_of(world.submit("b", max_tokens=20)) == "BUDGET_EXHAUSTED"  # the prompt alone has 5 of 5
    world.rig.now += 12 * 3600.0
    assert only(world.submit("c", max_tokens=20), SubmitAttempt).max_tokens == 20  # the next day


@pytest.mark.parametrize("jump", [86_400.0, -86_400.0, 40 * 86_400.0])
def test_a_clock_that_jumps_and_comes_back_gives_no_budget_twice(jump: float):
    """Whoever can set a machine's clock, or its time server, must not get a period's budget again and again."""
    world = LimitedRig(
        tenant_table(organisation=Limits(tokens_per_day=30, monthly_budget_nanos=10**9), tenant=Limits())
    )
    outcomes = []
    for number, offset in enumerate((0.0, 0.0, jump, jump, 0.0, jump, 0.0)):
        world.clock_jump = offset
        world.rig.now += 1.0
        outcomes.append(error_of(world.submit(f"r{number}", max_tokens=25)))
    assert outcomes == ["", "BUDGET_EXHAUSTED"] * 2 + ["BUDGET_EXHAUSTED"] * 3


def test_without_the_owner_of_budgets_nothing_is_spent_beyond_the_lease():
    """An outage of control must not cost money, and is no fault of the caller."""
    world = LimitedRig(tenant_table(tenant=Limits(monthly_budget_nanos=10_000), prices=[PRICE]))
    world.submit(grants=False, max_tokens=10)
    assert error_of(world.fail()) == "BUDGET_UNAVAILABLE"
    world.rig.now += 2.0
    assert has(world.submit("later", max_tokens=10), SubmitAttempt)


def test_a_continued_answer_is_charged_once_for_its_request_and_prompt():
    """Its first router has charged them, and the loss of a router is no fault of the caller."""
    world = LimitedRig(tenant_table(key=Limits(requests_per_minute=1, tokens_per_minute=300)))
    world.answer(world.submit("a", max_tokens=10), 10)
    before = _units(world)
    world.answer(world.submit("b", choices=[ChoiceSpec(5, 0, [7] * 4)], max_tokens=10), 6)
    after = _units(world)
    assert after["key:k1 requests_per_minute"] == before["key:k1 requests_per_minute"]
    assert before["key:k1 tokens_per_minute"] - after["key:k1 tokens_per_minute"] == 6


def test_what_was_taken_beyond_a_limit_and_given_back_is_not_there_for_others():
    """A continuation is not refused, so it is taken where there is nothing. If it then fails, or its client leaves, its
    unit is the bucket's, which lacks more of them: clients could otherwise make room for requests as they liked.
    (`kvloom-lab dst` found it.)"""
    lease = RateLease(LeaseName("key:k1", LeaseKind.REQUESTS, ""), 3)
    lease.take(1)
    want = lease.want(1.0)
    assert want is not None
    assert want.debt == 1
    lease.on_grant(LeaseGrant(want.name, 0, -3, asked_at=1.0), 1.0)
    lease.give_back(1)
    assert not lease.has(1, 1.0)
    again = lease.want(2.0)
    assert again is not None
    assert (again.returned, again.held) == (1, 0)


def test_a_continuation_of_a_client_outside_the_fabric_counts_in_full():
    """Where and how often it continues only the client says. It is not refused, and the next request is."""
    world = LimitedRig(tenant_table(key=Limits(requests_per_minute=2, tokens_per_minute=400)))
    answer = {"choices": [ChoiceSpec(1, 0, [7] * 20)], "max_tokens": 21, "answer_id": "a", "num_ended_tokens": 100}
    for number in range(3):
        choices = [ChoiceSpec(number, 0, [7] * 20)]
        assert error_of(world.submit(f"r{number}", **(answer | {"choices": choices}))) == ""
    left = _units(world)
    assert left["key:k1 requests_per_minute"] <= 0
    assert left["key:k1 tokens_per_minute"] <= 400 - 3 * (5 + 20 + 100)
    assert error_of(world.submit("new", choices=[ChoiceSpec(9, 0)])) == "RATE_LIMITED"


def claiming(number: int = 0) -> dict[str, Any]:
    """A request for 42 tokens, of which one of two choices has 40, as its client says."""
    choices = [ChoiceSpec(2 * number, 0, [7] * 40), ChoiceSpec(2 * number + 1, 1)]
    return {"choices": choices, "num_claimed_tokens": 40, "max_tokens": 42}


def test_what_a_client_outside_the_fabric_claims_counts_as_prompt():
    """The fabric computes it, and no process of the fabric says that it did so before."""
    world = LimitedRig(tenant_table(key=Limits(requests_per_minute=3)))
    outcomes = [error_of(world.submit(f"r{i}", **claiming(i))) for i in range(4)]
    assert outcomes == ["", "", "", "RATE_LIMITED"]
    world = LimitedRig(tenant_table(key=Limits(tokens_per_minute=200)))
    assert [error_of(world.submit(f"r{i}", **claiming(i))) for i in range(3)] == ["", "", "RATE_LIMITED"]


def test_the_limit_of_prompts_holds_for_claimed_output():
    """One claimed token switched it off."""
    world = LimitedRig(tenant_table(key=Limits(max_prompt_tokens=44)))
    assert error_of(world.submit("a", **claiming())) == "REQUEST_TOO_LARGE"
    assert error_of(world.submit("b", max_tokens=42)) == ""


def test_claimed_output_is_charged_to_a_budget():
    """Of what two choices have, 40 tokens were claimed: with the prompt of 5 they cost 45, and 4 + 42 are new."""
    world = LimitedRig(tenant_table(tenant=Limits(tokens_per_day=1000)), meters_usage=True)
    log = world.submit("a", **claiming())
    attempt = only(log, SubmitAttempt)
    shard, slots = attempt.shard_id, [choice.slot for choice in attempt.choices]
    for slot in slots:
        world.rig.start(shard, slot)
    world.rig.finish(shard, slots[0])
    ended = only(world.rig.finish(shard, slots[1]), RequestEnded)
    assert (ended.num_prompt_tokens, ended.num_output_tokens) == (45, 2)
    assert ended.usage is not None
    assert [charge.total for charge in ended.usage.charges] == [47]
    assert ended.usage.num_resumed_tokens == 0


def test_a_continued_answer_without_budget_ends_with_what_it_has():
    """An answer that has begun does not fail because of a limit."""
    world = LimitedRig(tenant_table(tenant=Limits(tokens_per_day=20)))
    world.submit("a", max_tokens=15)
    log = world.submit("b", choices=[ChoiceSpec(5, 0, [7] * 4), ChoiceSpec(6, 1)], max_tokens=10)
    finishes = sent(log).finishes
    assert [(finish.slot, finish.reason, finish.limited_by) for finish in finishes] == [
        (5, 2, "tenant:acme/web tokens_per_day"),
        (6, 2, "tenant:acme/web tokens_per_day"),
    ]


# -- the ends of held requests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancelled", "client gone", "timeout", "drained", "last try"])
def test_a_held_request_ends_exactly_once(how: str):
    """Held requests must not be lost, nor leave anything behind."""
    world = LimitedRig(tenant_table(key=Limits(requests_per_minute=10, max_concurrent_requests=5)))
    log = world.submit(grants=False, timeout_seconds=0.5 if how == "timeout" else 60.0)
    match how:
        case "cancelled":
            log += world.rig.handle(RequestCancelled("r"))
        case "client gone":
            log += world.rig.handle(ClientGone("c"))
        case "drained":
            log += world.rig.handle(DrainEnded())
        case _:
            deadline = world.rig.core.next_deadline()
            assert deadline is not None
            while not (has(log, RequestEnded) or has(log, SubmitAttempt)):
                world.rig.now = max(deadline, world.rig.now + 0.1)
                log += world.rig.handle(Tick())
    log += world.grant()
    if how == "last try":
        log += world.answer(log, 3)
    assert sum(isinstance(action, RequestEnded) for action in log) == 1
    assert world.rig.core.is_idle


def test_a_choice_that_was_cancelled_while_its_request_was_held_stays_ended():
    """The other choices are answered. (Found by dst: the cancelled one was ended once more.)"""
    choices = [ChoiceSpec(1, 0, [7] * 4), ChoiceSpec(2, 1)]
    world = LimitedRig(tenant_table(key=Limits(requests_per_minute=10, tokens_per_day=100)))
    log = world.submit(grants=False, choices=choices, max_tokens=4)
    log += world.rig.handle(SlotsCancelled("c", [1]))
    log += world.grant()
    attempt = only(log, SubmitAttempt)
    assert [choice.index for choice in attempt.choices] == [1]


def test_while_redis_is_away_each_router_has_its_share():
    """Serving goes on, within a bound: all routers together admit no more than the limit."""
    world = LimitedRig(tenant_table(key=Limits(requests_per_minute=12)))
    world.submit("r", grants=False)
    log = world.fail(num_routers=3)
    log += [action for i in range(10) for action in world.submit(f"r{i}", grants=False)]
    assert sum(isinstance(action, SubmitAttempt) for action in log) == 4
    world.rig.now += 1.0
    world.submit("asks again")
    assert world.limiter.num_local_leases == 0


def test_unused_leases_are_given_back():
    """Another router needs them."""
    world = LimitedRig(
        tenant_table(
            tenant=Limits(requests_per_minute=600, monthly_budget_nanos=10**6, max_concurrent_requests=5),
            prices=[PRICE],
        )
    )
    for i in range(20):
        world.answer(world.submit(f"r{i}", max_tokens=5), 5)
        world.rig.now += 0.2
    for _ in range(200):
        world.rig.now += 0.5
        world.note(world.rig.handle(Tick()))
    assert world.limiter.num_accounts == 0
    assert all(not slots.leased for slots in world.rates.slots.values())
    [budget] = world.budgets.budgets.values()
    assert budget.leased["r1"] == 20 * (10 + 4 + 500)  # what was used: 4 of 5 prompt tokens were cached


def test_a_change_of_limits_holds_for_the_next_request():
    """What is worked out once for a key must not outlive the entries that it was worked out from."""
    table = tenant_table(key=Limits(max_output_tokens=8), tenant=Limits(max_output_tokens=9))
    world = LimitedRig(table)
    assert only(world.submit("a"), SubmitAttempt).max_tokens == 8
    table.apply(FollowResponse(keys=[KeyEntry(id="k1", digest=b"1" * 32, tenant="acme/web")]))
    assert only(world.submit("b"), SubmitAttempt).max_tokens == 9
    limits = limits_to_proto(Limits(max_output_tokens=3))
    table.apply(FollowResponse(organisations=[OrganisationEntry(id="acme", limits=limits)]))
    assert only(world.submit("c"), SubmitAttempt).max_tokens == 3
    table.apply(FollowResponse(tenants=[TenantEntry(id="acme/web")], organisations=[OrganisationEntry(id="acme")]))
    assert only(world.submit("d"), SubmitAttempt).max_tokens == 10


def test_the_owners_of_limits_are_asked_by_time_and_not_by_request():
    """A question to control takes a transaction, and it has all routers to answer."""
    limits = Limits(
        requests_per_minute=10**6,
        tokens_per_minute=10**8,
        max_concurrent_requests=1000,
        tokens_per_day=10**9,
        monthly_budget_nanos=10**12,
    )
    world = LimitedRig(tenant_table(key=limits, organisation=limits, prices=[PRICE]))
    running: list[list[Action]] = []
    num_questions = num_held = 0
    for i in range(1000):  # for five seconds
        world.rig.now += 0.005
        actions = world.submit(f"r{i}")
        num_held += any(
            count.outcome == "held" for one in actions if isinstance(one, LimitsCounted) for count in one.counts
        )
        running.append(actions)
        if len(running) > 20:
            actions = actions + world.answer(running.pop(0), 3)
        num_questions += sum(isinstance(action, LeasesWanted) for action in actions)
    assert num_questions < 60
    assert num_held < 20


def test_a_budget_is_returned_when_less_of_it_is_needed():
    """What one router holds of a budget, no other may spend."""
    world = LimitedRig(tenant_table(key=Limits(monthly_budget_nanos=10**9), prices=[PRICE]))
    held: list[int] = []
    for seconds_between in (0.002, 0.5):
        for i in range(1000 if seconds_between < 0.1 else 40):
            world.rig.now += seconds_between
            world.answer(world.submit(f"{seconds_between} {i}", max_tokens=10), 10)
            world.note(world.rig.handle(Tick()))
        [account] = world.limiter.accounts
        held.append(sum(lease.free for lease in account.budgets.values()))
    most_per_request = 5 * 10 + 10 * 100
    assert held[0] > 200 * most_per_request
    assert held[1] <= MAX_SPARE_FACTOR * NUM_SPARE_REQUESTS * most_per_request


def test_what_another_model_has_begun_is_not_charged_again():
    """The text so far was metered as the answer of the model that has been lost: this one has only continued it."""
    world = LimitedRig(tenant_table(tenant=Limits(monthly_budget_nanos=10_000), prices=[PRICE]), meters_usage=True)
    begun = [ChoiceSpec(1, 0, output_token_ids=[7, 7], num_delivered_chars=2)]
    actions = world.submit(choices=begun, num_foreign_tokens=2)
    ended = only(world.answer(actions, 3), RequestEnded)
    assert ended.num_output_tokens == 3
    assert ended.usage is not None
    assert ended.usage.num_resumed_tokens == 0
    assert [charge.total for charge in ended.usage.charges] == [5 * 10 - 4 * 9 + 3 * 100]
