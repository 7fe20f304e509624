"""What a request costs in the core with fifteen limits in three accounts: calls and bytecodes, in virtual time.

`python -m tests.unit.cost.test_limits_cost` prints the counts for tests/baselines/limits_cost.json.
"""

from __future__ import annotations

from collections.abc import Callable

from kvloom_common.tenancy.limits import Limits
from kvloom_common.tenancy.prices import Price
from router.core.actions import LeasesWanted, SubmitAttempt
from router.core.core import CoreConfig, RouterCore
from router.core.events import (
    ChoiceSpec,
    Event,
    KvSnapshotArrived,
    LeasesGranted,
    Request,
    RequestArrived,
    SafetyUp,
    ShardDescription,
    ShardUp,
    StepArrived,
)
from router.core.frames import Finish, Start, Step
from router.core.lease_messages import LeaseGrant
from router.core.tenancy.limiter import Limiter
from tests.fakes.cost_counting import Counts, assert_no_dearer, bytecodes_of, calls_of, print_baseline
from tests.fakes.limited_rig import NOON, tenant_table

FIVE = Limits(
    requests_per_minute=10**7,
    tokens_per_minute=10**9,
    max_concurrent_requests=10**4,
    tokens_per_day=10**12,
    monthly_budget_nanos=10**15,
)
PRICE = Price("p", "*", prompt_nanos=150, cached_nanos=75, output_nanos=600)
NUM_LIVE = 32


def core_with(limits: Limits) -> Callable[[], None]:
    """Serves a request for each call, while NUM_LIVE run. Leases are granted as they are wanted."""
    table = tenant_table(limits, limits, limits, [PRICE])
    limiter = Limiter(lambda: table, lambda now: NOON + now)
    core = RouterCore(CoreConfig(meters_usage=True), seed=1, limiter=limiter)
    slots: list[int] = []
    now = 1.0
    num_requests = 0

    def handle(event: Event) -> None:
        for action in core.handle(event, now):
            if isinstance(action, SubmitAttempt):
                slots.append(action.choices[0].slot)
            elif isinstance(action, LeasesWanted):
                wants = action.wants
                handle(
                    LeasesGranted(
                        [LeaseGrant(one.name, one.wanted, one.limit, one.limit, now, one.number) for one in wants]
                    )
                )

    def serve() -> None:
        nonlocal now, num_requests
        now += 0.001
        num_requests += 1
        handle(
            RequestArrived(
                Request(
                    request_id=f"r{num_requests}",
                    client_id="c",
                    model="m",
                    prompt_token_ids=[1, 2, 3, 4, 5],
                    prompt_text="text",
                    choices=[ChoiceSpec(num_requests, 0)],
                    max_tokens=1,
                    tenant="acme/web",
                    key_id="k1",
                )
            )
        )
        if len(slots) > NUM_LIVE:
            slot = slots.pop(0)
            step = Step([slot], [], [7], ["a"], starts=[Start(slot, 0, 0.0)], finishes=[Finish(slot, 2)])
            handle(StepArrived("s0", step))

    handle(SafetyUp(False, False))
    handle(ShardUp(ShardDescription("s0", "i", "m", 16, 10**6, 10**4, 4096)))
    handle(KvSnapshotArrived("s0", 0, ()))
    for _ in range(1000):
        serve()
    return serve


async def counts() -> Counts:
    without, with_limits = core_with(Limits()), core_with(FIVE)
    return {
        "fifteen limits, over none": {
            "calls": round(calls_of(with_limits) - calls_of(without)),
            "bytecodes": round(bytecodes_of(with_limits) - bytecodes_of(without)),
        }
    }


async def test_limits_cost_no_more_than_they_did() -> None:
    """A look-up for each limit of each account is little, and there are fifteen of them."""
    assert_no_dearer("limits_cost", await counts())


if __name__ == "__main__":
    print_baseline(counts)
