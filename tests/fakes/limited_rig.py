"""A router core whose requests have limits, with the owners of the limits: leases are granted when a test says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvloom.errors import reason_name
from kvloom.v1 import control_service_pb2 as pb
from kvloom_common.tenancy.limits import Limits, limits_to_proto
from kvloom_common.tenancy.prices import Price
from kvloom_common.tenancy.table import TenantTable
from lab.dst.tenancy.sim_limits import price_to_proto
from router.core.actions import Action, LeasesWanted, RequestEnded, SendStep, SubmitAttempt
from router.core.events import LeasesGranted
from router.core.frames import Finish
from router.core.lease_messages import LeaseWant
from router.core.tenancy.limiter import Limiter
from tests.fakes.core_rig import CoreRig
from tools.simulate.lease_owners import BudgetOwner, RateOwner

NOON = 1_764_072_000.0
"""2025-11-25 12:00 UTC."""


def tenant_table(
    key: Limits | None = None,
    tenant: Limits | None = None,
    organisation: Limits | None = None,
    prices: Sequence[Price] = (),
) -> TenantTable:
    """The organisation acme with the project web and its key k1."""
    table = TenantTable()
    table.apply(
        pb.FollowResponse(
            table_id="t",
            version=1,
            begins_snapshot=True,
            is_complete=True,
            organisations=[pb.OrganisationEntry(id="acme", limits=limits_to_proto(organisation or Limits()))],
            tenants=[pb.TenantEntry(id="acme/web", limits=limits_to_proto(tenant or Limits()))],
            keys=[pb.KeyEntry(id="k1", digest=b"1" * 32, tenant="acme/web", limits=limits_to_proto(key or Limits()))],
            prices=[price_to_proto(price) for price in prices],
            has_prices=True,
        )
    )
    return table


class LimitedRig:
    def __init__(
        self,
        table: TenantTable,
        *,
        rates: RateOwner | None = None,
        budgets: BudgetOwner | None = None,
        router: str = "r1",
        **config: Any,
    ) -> None:
        self.rates, self.budgets = rates or RateOwner(), budgets or BudgetOwner()
        self.router = router
        self.clock_jump = 0.0
        """How many seconds the clock of the machine is before the time that passes."""
        self.limiter = Limiter(lambda: table, lambda now: NOON + now + self.clock_jump)
        self.rig = CoreRig(limiter=self.limiter, **config)
        self.rig.add_shard(max_batch=64, num_blocks=1000, max_model_len=4000)
        self.wants: list[LeaseWant] = []

    def submit(self, request_id: str = "r", *, grants: bool = True, **changes: Any) -> list[Action]:
        fields = {"tenant": "acme/web", "key_id": "k1", "slots": (self._slot(),)} | changes
        return self.note(self.rig.submit(request_id, **fields), grants=grants)

    _num_slots = 0

    def _slot(self) -> int:
        self._num_slots += 1
        return self._num_slots

    def note(self, actions: list[Action], *, grants: bool = True) -> list[Action]:
        """Take the wants out of actions and, with `grants`, answer them until there are no more."""
        actions = list(actions)
        self.wants += [want for action in actions if isinstance(action, LeasesWanted) for want in action.wants]
        for _ in range(100):
            if not (grants and self.wants):
                return actions
            actions += self.grant(grants=False)
        raise AssertionError("the router asks for leases without end")

    def grant(self, *, grants: bool = True) -> list[Action]:
        wants, self.wants = self.wants, []
        answers = [
            self.budgets.lease(self.router, want)
            if want.name.kind.is_budget
            else self.rates.lease(self.router, want, self.rig.now)
            for want in wants
        ]
        return self.note(self.rig.handle(LeasesGranted(answers)), grants=grants)

    def fail(self, num_routers: int = 1) -> list[Action]:
        """The owners cannot be asked."""
        names, self.wants = [want.name for want in self.wants], []
        return self.note(self.rig.handle(LeasesGranted(failed=names, num_routers=num_routers)), grants=False)

    def finishes(self, actions: list[Action]) -> list[Finish]:
        return [finish for action in actions if isinstance(action, SendStep) for finish in action.step.finishes]

    def answer(self, actions: list[Action], num_tokens: int) -> list[Action]:
        return self.note(self.raw_answer(actions, num_tokens))

    def raw_answer(self, actions: list[Action], num_tokens: int) -> list[Action]:
        """The shard answers the request that these actions submitted with so many tokens, or fewer if it may not."""
        attempt = next(action for action in actions if isinstance(action, SubmitAttempt))
        slot = attempt.choices[0].slot
        num_tokens = min(num_tokens, attempt.max_tokens)
        log = self.rig.start(attempt.shard_id, slot)
        for _ in range(num_tokens - 1):
            log += self.rig.step(attempt.shard_id, (slot, [7], "a"))
        reason = 2 if num_tokens == attempt.max_tokens else 1
        return log + self.rig.finish(attempt.shard_id, slot, reason)


def error_of(actions: Sequence[Action]) -> str:
    """The reason with which the only request that ended here was refused; "" if it was not."""
    ended = [action for action in actions if isinstance(action, RequestEnded)]
    assert len(ended) <= 1
    return reason_name(ended[0].error_reason) if ended and ended[0].error_reason else ""
