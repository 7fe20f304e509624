"""The limits of keys, tenants and organisations. Checked only in seeds with limits, and in all with `kvloom-lab dst
--limits`."""
# ruff: noqa: ARG002  (a hook has the same arguments for all checkers)

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from kvloom.v1.control_service_pb2 import BUDGET_UNIT_TOKENS
from kvloom.v1.generation_pb2 import FINISH_REASON_ERROR, FINISH_REASON_LENGTH, FINISH_REASON_STOP
from kvloom_common.tenancy import usage_record
from kvloom_common.tenancy.limits import Limits
from kvloom_common.tenancy.usage_record import AnswerRun
from lab.dst.checker import Checker
from lab.dst.observed import ObservedChoice, ObservedRequest
from lab.dst.tenancy.sim_limits import PRICE
from lab.dst.views import SimulatedRouterView, WorldView
from router.core.actions import RequestEnded, SubmitAttempt
from router.core.events import Request, TierRank
from router.core.lease_messages import LeaseKind, LeaseName
from tools.simulate.lease_owners import LEASE_SECONDS


class BudgetsKept(Checker):
    """Clients are never sent more than a hard budget of any account allows, whatever fails: not one token."""

    invariant = "budgets_kept"

    def __init__(self) -> None:
        self._spent: Counter[tuple[str, LeaseKind]] = Counter()
        self._begun: set[int] = set()
        """Requests of which something was sent; their prompts count."""
        self._requests: list[ObservedRequest] = []
        """They stay, so that their ids are not used again."""

    def on_sent(self, node: SimulatedRouterView, choice: ObservedChoice, token_ids: Sequence[int], delta: str) -> None:
        observed, limits = choice.request, node.limits
        if limits is None:
            return
        request = observed.request
        is_first = id(observed) not in self._begun and not observed.is_believed
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
    """Returns the least cost of some tokens, and of a prompt that may have been cached. Both together cost no less than
    each by itself."""
    num_prompt_tokens = request.num_prompt_tokens if is_first else 0
    if kind is LeaseKind.DAY_TOKENS:
        return num_tokens + limits.cached_token_percent * num_prompt_tokens // 100
    percent = PRICE.batch_percent if request.tier is TierRank.BATCH else 100
    prompt = PRICE.request_nanos + PRICE.cached_nanos * num_prompt_tokens if is_first else 0
    return (prompt + PRICE.output_nanos * num_tokens) * percent // 100


class _Admitted(NamedTuple):
    """A request that was admitted between these times."""

    dispatched_at: float
    arrived_at: float
    router: str
    is_continuation: bool
    """True for a continuation by a client outside the fabric: it counts, and is not refused."""


class RatesKept(Checker):
    """Between any two times, all routers together admit no more requests of an account than its limit and what it gains
    in that time. With faults of Redis it may be as much once more, for each of them."""

    invariant = "rates_kept"

    def __init__(self) -> None:
        self._admitted: dict[str, list[_Admitted]] = {}
        """By account."""
        self._dispatched: dict[int, tuple[ObservedRequest, float, float]] = {}

    def on_dispatch(self, node: SimulatedRouterView, observed: ObservedRequest | None, attempt: SubmitAttempt) -> None:
        if node.limits is None or observed is None or observed.num_attempts:
            return
        if observed.is_believed and not observed.request.answer_id:
            return
        waited = node.now - observed.arrived_at
        now = node.limits.now
        self._dispatched[id(observed)] = (observed, now - waited, now)

    def on_ended(self, node: SimulatedRouterView, observed: ObservedRequest | None, end: RequestEnded) -> None:
        """Leaves out a request that failed before its first token: it has burnt nothing, and made room for another
        one."""
        _, begin, dispatched_at = self._dispatched.pop(id(observed), (None, 0.0, 0.0))
        if node.limits is None or observed is None or not dispatched_at:
            return
        if end.reason == FINISH_REASON_ERROR and not end.num_output_tokens:
            return
        for account in node.limits.accounts_of(observed.request):
            limits = node.limits.limits_of[account]
            if limits.requests_per_minute and not limits.shadow:
                self._admitted.setdefault(account, []).append(
                    _Admitted(dispatched_at, begin, node.name, observed.is_believed)
                )

    def on_quiescence(self, world: WorldView) -> None:
        limits = world.limits
        if limits is None:
            return
        for account, admitted in self._admitted.items():
            limit = limits.limits_of[account].requests_per_minute
            if limits.num_faults:  # a Redis that forgets everything forgets what continuations took beyond the limit
                admitted = [one for one in admitted if not one.is_continuation]
            begins = sorted(one.arrived_at for one in admitted)
            for begin in begins[:: max(1, len(begins) // 20)]:
                later = sorted(one for one in admitted if one.arrived_at >= begin)
                for number, one in enumerate(later, 1):
                    if one.is_continuation:
                        continue
                    end, count = one.dispatched_at, number
                    for other in later[:number]:
                        # What a router has leased does not lack yet what continuations took elsewhere; and what came
                        # while it was held may have come after its admission.
                        seconds = 0.0 if other.router == one.router else LEASE_SECONDS
                        count -= other.is_continuation and other.dispatched_at > one.arrived_at - seconds
                    most = (1 + limits.num_faults) * (limit + limit / 60.0 * (end - begin))
                    if count > most + 1e-6 + limits.num_faults * 3:
                        self.fail(f"{account} had {count} requests in {end - begin:.3f} s, its limit is {limit}")


class ClaimsMoveNoLimit(Checker):
    """Claims of clients outside the fabric about their answers change no limit: the output that they claim counts as
    prompt, unless a ticket proves that this very answer has begun."""

    invariant = "claims_move_no_limit"

    def __init__(self) -> None:
        self._begun: dict[str, object] = {}
        """Answer -> its sampling, prompt and key."""

    def on_dispatch(self, node: SimulatedRouterView, observed: ObservedRequest | None, attempt: SubmitAttempt) -> None:
        if node.limits is None or observed is None or not observed.request.answer_id or observed.num_attempts:
            return
        request = observed.request
        determined = request.tenant, request.key_id, request.model, request.sampling, tuple(request.prompt_token_ids)
        if self._begun.setdefault(request.answer_id, determined) != determined:
            self.fail(f"{request.request_id} continues the answer to another request")
        num_tokens = len(request.prompt_token_ids)
        if observed.is_believed:
            return
        num_tokens += sum(len(spec.output_token_ids) for spec in request.choices)
        for account in node.limits.accounts_of(request):
            limits = node.limits.limits_of[account]
            for name in ("max_prompt_tokens", "tokens_per_minute"):
                limit = getattr(limits, name)
                if limit and num_tokens > limit and not limits.shadow:
                    self.fail(f"{request.request_id} has a prompt of {num_tokens}; {name} of {account} is {limit}")


class ComputedIsMetered(Checker):
    """Every run of an answer of a client outside the fabric counts, whatever the client says of it: what was prefilled,
    and each token that was generated, also those that a repetition has generated again."""

    invariant = "computed_is_metered"

    def __init__(self) -> None:
        self._runs: dict[str, list[AnswerRun]] = {}
        self._num_sent: Counter[str] = Counter()

    def on_ended(self, node: SimulatedRouterView, observed: ObservedRequest | None, end: RequestEnded) -> None:
        if observed is None or end.usage is None or not end.usage.answer_id or not end.num_attempts:
            return
        request, begin = observed.request, end.usage.num_resumed_tokens
        num_prefilled = len(request.prompt_token_ids) + sum(len(spec.output_token_ids) for spec in request.choices)
        if end.num_prompt_tokens + begin < num_prefilled:
            self.fail(f"{end.request_id}: {num_prefilled} tokens were prefilled, {end.num_prompt_tokens + begin} count")
        name = node.name, len(self._runs.setdefault(end.usage.answer_id, []))
        self._runs[end.usage.answer_id].append(AnswerRun(begin, begin + end.num_output_tokens, name))
        self._num_sent[end.usage.answer_id] += sum(choice.num_sent_tokens for choice in observed.choices)

    def on_quiescence(self, world: WorldView) -> None:
        for answer_id, runs in self._runs.items():
            counted = sum(run.end for run in usage_record.last_runs(runs))
            if counted < self._num_sent[answer_id] - usage_record.MAX_LOST_TOKENS:
                self.fail(f"{answer_id}: {self._num_sent[answer_id]} tokens were generated, {counted} count")


class LeasesConserved(Checker):
    """Once nothing is in flight, every router holds exactly as much of a budget as control believes, and less than
    there is: what it does not use is given back, whatever was lost on the way. No slot of a concurrent request is in
    use."""

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
            held: dict[LeaseName, int] = {}
            for account in limiter.accounts:
                if account.slots is not None and account.slots.used:
                    self.fail(f"{account.name} has {account.slots.used} slots in use on {node.name}")
                for name, lease in account.budgets.items():
                    held[name] = lease.free
                    if lease.reserved:
                        self.fail(f"{node.name} has {lease.reserved} of {name} reserved")
            for name, budget in limits.budgets.budgets.items():
                leased = budget.leased.get(node.name, 0)
                if leased != held.get(name, 0):
                    self.fail(f"{node.name} holds {held.get(name, 0)} of {name}, leased are {leased}")


class ChargesExact(Checker):
    """A budget is charged for the tokens that were sent, also by an earlier router, at their price, and for nothing
    else: what was refused, or never reached a shard, or failed before its first token, costs nothing. What control has
    settled is the sum of it."""

    invariant = "charges_exact"

    def __init__(self) -> None:
        self._settled: Counter[LeaseName] = Counter()

    def on_ended(self, node: SimulatedRouterView, observed: ObservedRequest | None, end: RequestEnded) -> None:
        if node.limits is None or observed is None or end.usage is None:
            return
        for charge in end.usage.charges:
            kind = LeaseKind.DAY_TOKENS if charge.unit == BUDGET_UNIT_TOKENS else LeaseKind.MONTH_NANOS
            limits = node.limits.limits_of[charge.account]
            due = _due(kind, limits, observed, end)
            if charge.total != due:
                self.fail(f"{end.request_id} costs {charge.account} {charge.total} of {kind.value}, due are {due}")
            if charge.own not in (0, due) and not (limits.shadow and charge.own < due):
                self.fail(f"{end.request_id} takes {charge.own} of {charge.account}, due are {due}")
            self._settled[LeaseName(charge.account, kind, charge.period)] += charge.own

    def on_quiescence(self, world: WorldView) -> None:
        if world.limits is None:
            return
        for name, settled in self._settled.items():
            budget = world.limits.budget(name)
            if (0 if budget is None else budget.spent) != settled:
                self.fail(f"{name}: {settled} were charged, control has settled {budget and budget.spent}")


def _due(kind: LeaseKind, limits: Limits, observed: ObservedRequest, end: RequestEnded) -> int:
    """Returns what the whole answer costs, with what it has of an earlier router."""
    request = observed.request
    num_output = sum(choice.num_sent_tokens for choice in observed.choices)
    num_prompt = len(request.prompt_token_ids)
    num_given = sum(len(spec.output_token_ids) for spec in request.choices)
    if request.num_claimed_tokens:
        num_prompt += num_given
    else:
        num_output += num_given
    has_run = end.num_attempts > 0 or end.is_result_cache_hit
    has_ended_well = has_run and end.reason in (FINISH_REASON_STOP, FINISH_REASON_LENGTH)
    if not num_output and not has_ended_well:
        return 0
    if kind is LeaseKind.DAY_TOKENS:
        return limits.weighted_tokens(num_prompt, end.num_cached_tokens, num_output, 0)
    return PRICE.cost_nanos(
        num_prompt,
        end.num_cached_tokens,
        num_output,
        is_batch=request.tier is TierRank.BATCH,
        is_result_cache_hit=end.is_result_cache_hit,
    )
