"""Replays a decision file with changes, and compares each tenant's figures with what the file says.

Nothing but the changes differs: the same requests arrive at the same times at the real router core, with the rules that
routers have by default, and modelled shards answer them as long as they answered then. Of a request that was refused
then, the file has no answer and no block hashes. It is taken to answer with as many tokens as its tenant's requests did
on average, and to share as much with its tenant's request before it as these had cached.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from kvloom.errors import CATALOGUE
from kvloom_common.config import KvloomConfig
from kvloom_common.tenancy.prices import Prices
from kvloom_common.tenancy.table import TenantTable
from router.core.core import CoreConfig
from router.core_settings import core_config
from tools.simulate.decisions import RecordedRequest, Replay
from tools.simulate.fleet.fleet import FleetOptions
from tools.simulate.fleet.profile import Profile
from tools.simulate.lease_owners import SimulatedLimits
from tools.simulate.statistics import quantile
from tools.simulate.traces.open_loop import OpenTrace
from tools.simulate.traces.trace import hash_base
from tools.simulate.workload import Call, Outcome
from tools.simulate.world import simulate

ALL: Final = "*"
"""Used in place of a tenant's name for all of them."""
_TOO_MANY: Final = 429
_LIMIT_TYPES: Final = frozenset({"rate_limit_error", "insufficient_quota"})
_OVERLOAD_TYPES: Final = frozenset({"overloaded_error"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Says what is to be different."""

    policy: str
    profile: Profile
    num_shards: int
    prices: Prices
    """By which budgets of money are used up."""
    table: TenantTable | None = None
    """None: what limits refused then is refused again, and nothing else."""
    rate: float = 1.0
    seed: int = 0


class TenantFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds, of the requests that got a token."""

    requests: int
    refused: int
    """The number of requests that were answered with status 429."""
    failed: int
    """The number of requests that ended with another error."""
    ttft_p50: float | None
    ttft_p99: float | None
    num_output_tokens: int
    cost_nanos: int
    """Billionths of the currency."""


def predict(replay: Replay, change: WhatIf, on_progress: Callable[[int], None] | None = None) -> list[Outcome]:
    """The outcomes under the change, with the times of arrival that the file has if the rate is 1. Raises PluginError
    for a policy that cannot be loaded."""
    again, requests = _requests(replay, limits_change=change.table is not None)
    first = min(request.arrived_at for request in requests)
    table = change.table or TenantTable()
    price = change.prices.at(requests[0].model, first)
    table.prices = Prices([msgspec.structs.replace(price, model="*")])  # the only model has another name there
    trace = OpenTrace(
        [request.call for request in requests],
        [request.arrived_at - first for request in requests],
        0.0,
        replay.trace.block_size,
    )
    options = FleetOptions(
        profile=change.profile,
        num_shards=change.num_shards,
        capacity_blocks=replay.fleet.capacity_blocks if change.profile is replay.fleet.profile else None,
        seed=change.seed,
        speed_factors=replay.fleet.factors_of(change.num_shards) if change.profile is replay.fleet.profile else (),
        core_config=_router(change.policy),
        limits=SimulatedLimits(table, first),
        max_model_len=replay.fleet.max_model_len,
    )
    num_choices = [request.num_choices for request in requests]
    outcomes = [request.outcome(0) for request in again]
    outcomes += [
        dataclasses.replace(
            outcome,
            arrived_at=first + outcome.arrived_at,
            num_output_tokens=outcome.num_output_tokens * num_choices[outcome.call.call_id],
        )
        for outcome in simulate(trace.workload(change.rate, change.seed), options, on_progress).outcomes
    ]
    return outcomes


def recorded(replay: Replay) -> list[Outcome]:
    return [request.outcome(0) for request in (*replay.requests, *replay.refused)]


def by_tenant(outcomes: Iterable[Outcome], prices: Prices) -> dict[str, TenantFigures]:
    """The figures of each tenant, by its name or hash; "" is who has none. Those of ALL come last."""
    of_tenants: defaultdict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        of_tenants[outcome.call.tenant].append(outcome)
    found = {tenant: _figures(of_tenants[tenant], prices) for tenant in sorted(of_tenants)}
    return {**found, ALL: _figures(list(itertools.chain.from_iterable(of_tenants.values())), prices)}


def _router(policy: str) -> CoreConfig:
    config = KvloomConfig()
    config.router.placement.policy = policy
    return dataclasses.replace(
        core_config(config),
        answer_mode="off",
        safety_required=False,
        decision_sample_share=0.0,
        meters_usage=True,
        health=None,
    )


def _requests(replay: Replay, *, limits_change: bool) -> tuple[list[RecordedRequest], list[RecordedRequest]]:
    """(those that end as they did, those that are replayed). The latter are by arrival, and their calls are numbered in
    that order. Requests that no shard could have served, and those that left before their first token, end as they
    did."""
    again = [request for request in replay.requests if request.ttft_seconds is None]
    replayed = [request for request in replay.requests if request.ttft_seconds is not None]
    usual = _UsualAnswers(replayed)
    types = _OVERLOAD_TYPES | _LIMIT_TYPES if limits_change else _OVERLOAD_TYPES
    for request in replay.refused:
        kind = CATALOGUE.get(request.error_reason)
        if kind is not None and kind.openai_type in types:
            replayed.append(usual.complete(request, replay.trace.block_size))
        else:
            again.append(request)
    replayed.sort(key=lambda request: request.arrived_at)
    numbered = [
        msgspec.structs.replace(request, call=dataclasses.replace(request.call, call_id=number))
        for number, request in enumerate(replayed)
    ]
    return again, numbered


class _UsualAnswers:
    """Knows what the requests of each tenant were like that were served."""

    def __init__(self, served: Sequence[RecordedRequest]) -> None:
        """`served`: by arrival."""
        self._of_tenants: defaultdict[str, list[RecordedRequest]] = defaultdict(list)
        for request in served:
            self._of_tenants[request.call.tenant].append(request)
        self._all = served
        self._numbers = itertools.count()

    def complete(self, request: RecordedRequest, block_size: int) -> RecordedRequest:
        """A request that was refused, with an answer and blocks."""
        call = request.call
        alike = self._of_tenants.get(call.tenant) or self._all
        num_tokens = round(statistics.fmean(one.call.num_output_tokens for one in alike))
        cached = sum(one.num_cached_tokens for one in alike) / sum(one.call.num_prompt_tokens for one in alike)
        num_blocks = call.num_prompt_tokens // block_size
        place = bisect.bisect(alike, request.arrived_at, key=lambda one: one.arrived_at)
        shared = alike[max(0, place - 1)].call.block_hashes[: round(cached * num_blocks)]
        base = hash_base("refused", next(self._numbers))
        own = range(base, base + num_blocks - len(shared))
        limit = num_tokens if call.max_tokens is None else min(num_tokens, call.max_tokens)
        completed = dataclasses.replace(call, block_hashes=(*shared, *own), num_output_tokens=max(1, limit))
        return msgspec.structs.replace(request, call=completed)


def _figures(outcomes: Sequence[Outcome], prices: Prices) -> TenantFigures:
    served = [outcome for outcome in outcomes if outcome.num_output_tokens]
    ttfts = sorted(outcome.ttft_seconds for outcome in served)
    num_refused = sum(_is_refused(outcome) for outcome in outcomes)
    return TenantFigures(
        requests=len(outcomes),
        refused=num_refused,
        failed=sum(outcome.failed for outcome in outcomes) - num_refused,
        ttft_p50=quantile(ttfts, 0.50),
        ttft_p99=quantile(ttfts, 0.99),
        num_output_tokens=sum(outcome.num_output_tokens for outcome in served),
        cost_nanos=sum(_cost(outcome.call, outcome, prices) for outcome in served),
    )


def _is_refused(outcome: Outcome) -> bool:
    kind = CATALOGUE.get(outcome.error_reason)
    return kind is not None and kind.http_status == _TOO_MANY


def _cost(call: Call, outcome: Outcome, prices: Prices) -> int:
    _, cost = prices.cost(
        call.model,
        outcome.arrived_at,
        call.num_prompt_tokens,
        outcome.num_cached_tokens,
        outcome.num_output_tokens,
        has_answer=True,
        is_batch=call.is_batch,
    )
    return cost
