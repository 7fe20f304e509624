"""The limits of keys, tenants and organisations. Checked only in runs with limits (`kvloom dst --limits`)."""
# ruff: noqa: ARG002  (a hook has the same arguments for all checkers)

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvloom.tenancy.limits import Limits
from kvloom.v1.generation_pb2 import FINISH_REASON_ERROR
from router.core.actions import RequestEnded, SubmitAttempt
from router.core.events import Request, Tier
from router.core.lease_messages import LeaseKind
from tools.dst.checker import Checker
from tools.dst.observed import ObservedChoice, ObservedRequest
from tools.dst.tenancy.sim_limits import PRICE
from tools.dst.views import RouterView, WorldView


class BudgetsKept(Checker):
    """What clients are sent is never more than a hard budget of any account, whatever fails: not one token."""

    invariant = "budgets_kept"

    def __init__(self) -> None:
        self._spent: Counter[tuple[str, LeaseKind]] = Counter()
        self._begun: set[int] = set()
        """Requests of which something was sent; their prompts count."""
        self._requests: list[ObservedRequest] = []
        """They stay, so that their ids are not used again."""

    def on_sent(self, node: RouterView, choice: ObservedChoice, token_ids: Sequence[int], delta: str) -> None:
        observed, limits = choice.request, node.limits
        if limits is None:
            return
        request = observed.request
        is_first = id(observed) not in self._begun and not observed.is_continued
        if is_first:
            self._begun.add(id(observed))
            self._requests.append(observed)
        for account in limits.accounts_of(request):
            of_account = limits.limits_of[account]
            for kind, limit in (
                (LeaseKind.DAY_TOKENS, of_account.tokens_per_day),
                (LeaseKind.MONTH_NANOS, of_account.monthly_budget_nanos),
            ):
                if not limit or of_account.shadow:
                    continue
                self._spent[account, kind] += _least_cost(kind, of_account, request, len(token_ids), is_first=is_first)
                if self._spent[account, kind] > limit:
                    self.fail(f"{account} has used {self._spent[account, kind]} of {limit} {kind.value}")


def _least_cost(kind: LeaseKind, limits: Limits, request: Request, num_tokens: int, *, is_first: bool) -> int:
    """Of some tokens, and of a prompt that may have been cached. Both together cost no less than each by itself."""
    num_prompt_tokens = len(request.prompt_token_ids) if is_first else 0
    if kind is LeaseKind.DAY_TOKENS:
        return num_tokens + limits.cached_token_percent * num_prompt_tokens // 100
    percent = PRICE.batch_percent if request.tier is Tier.BATCH else 100
    prompt = PRICE.request_nanos + PRICE.cached_nanos * num_prompt_tokens if is_first else 0
    return (prompt + PRICE.output_nanos * num_tokens) * percent // 100


class RatesKept(Checker):
    """Between any two times, all routers together admit no more requests of an account than its limit and what it gains
    in that time. With faults of Redis it may be as much once more, for each of them."""

    invariant = "rates_kept"

    def __init__(self) -> None:
        self._admitted: dict[str, list[tuple[float, float]]] = {}
        """Account -> (arrival, dispatch) of its requests: they were admitted between these times."""
        self._dispatched: dict[int, tuple[ObservedRequest, float, float]] = {}

    def on_dispatch(self, node: RouterView, observed: ObservedRequest | None, attempt: SubmitAttempt) -> None:
        if node.limits is None or observed is None or observed.num_attempts or observed.is_continued:
            return
        waited = node.now - observed.arrived_at
        now = node.limits.now
        self._dispatched[id(observed)] = (observed, now - waited, now)

    def on_ended(self, node: RouterView, observed: ObservedRequest | None, end: RequestEnded) -> None:
        """What failed before its first token has burnt nothing, and made room for another request."""
        _, begin, dispatched_at = self._dispatched.pop(id(observed), (None, 0.0, 0.0))
        if node.limits is None or observed is None or not dispatched_at:
            return
        if end.reason == FINISH_REASON_ERROR and not end.num_output_tokens:
            return
        for account in node.limits.accounts_of(observed.request):
            limits = node.limits.limits_of[account]
            if limits.requests_per_minute and not limits.shadow:
                self._admitted.setdefault(account, []).append((begin, dispatched_at))

    def on_quiescence(self, world: WorldView) -> None:
        limits = world.limits
        if limits is None:
            return
        for account, admitted in self._admitted.items():
            limit = limits.limits_of[account].requests_per_minute
            begins = sorted(begin for begin, _ in admitted)
            for begin in begins[:: max(1, len(begins) // 20)]:
                ends = sorted(end for other, end in admitted if other >= begin)
                for count, end in enumerate(ends, 1):
                    most = (1 + limits.num_faults) * (limit + limit / 60.0 * (end - begin))
                    if count > most + 1e-6 + limits.num_faults * 3:
                        self.fail(f"{account} had {count} requests in {end - begin:.3f} s, its limit is {limit}")


class LeasesConserved(Checker):
    """Once nothing is in flight, every router holds exactly as much of a budget as control believes, and less than
    there is; and no slot of a concurrent request is in use."""

    invariant = "leases_conserved"

    def on_quiescence(self, world: WorldView) -> None:
        limits = world.limits
        if limits is None:
            return
        for name, budget in limits.budgets.budgets.items():
            if budget.remaining < 0:
                self.fail(f"{name} is overspent: {budget.remaining} remain")
        for node in world.nodes:
            limiter = node.core.limiter
            if limiter is None:
                continue
            for account in limiter.accounts:
                if account.slots is not None and account.slots.used:
                    self.fail(f"{account.name} has {account.slots.used} slots in use on {node.name}")
                for name, lease in account.budgets.items():
                    budget = limits.budget(name)
                    leased = 0 if budget is None else budget.leased.get(node.name, 0)
                    if lease.reserved or lease.free > leased:
                        self.fail(f"{node.name} holds {lease.free} and {lease.reserved} of {name}, leased are {leased}")
