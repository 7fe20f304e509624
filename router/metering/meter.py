"""Makes usage records: of requests that have ended, of those that are running, and of what was lost in transit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from kvloom.adapters import full_name
from kvloom.errors import reason_name
from kvloom.v1.control_service_pb2 import BUDGET_UNIT_NANOS
from kvloom.v1.generation_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP
from kvloom_common.finish_reasons import FINISH_REASON_NAMES
from kvloom_common.tenancy.prices import Prices
from kvloom_common.tenancy.usage_record import (
    OUTCOME_EVICTED,
    OUTCOME_LOST,
    OWN_TIERS,
    TIER_DISCARDED,
    TIER_JUDGE,
    TIER_SHADOW,
    Charge,
    UsageRecord,
)
from router.core.actions import RequestEnded
from router.core.events import SHADOW_TENANT, TierRank
from router.core.request_end import RequestEnd

_TIERS: Final = {
    TierRank.JUDGE: TIER_JUDGE,
    TierRank.INTERACTIVE: "interactive",
    TierRank.BATCH: "batch",
    TierRank.SHADOW: TIER_SHADOW,
}
_GOOD_ENDS: Final = frozenset({FINISH_REASON_STOP, FINISH_REASON_LENGTH})

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(UsageRecord).decode


class Meter:
    """Pure but for the clock."""

    def __init__(self, producer: str, prices: Callable[[], Prices], clock: Callable[[], float] = time.time) -> None:
        self.producer = producer
        self._prices = prices
        self._clock = clock

    def record(self, ended: RequestEnded, number: int) -> bytes:
        """The JSON of the record of a request that has ended now."""
        outcome = OUTCOME_EVICTED if ended.end is RequestEnd.EVICTED else FINISH_REASON_NAMES[ended.reason]
        return _encode(self._record(ended, number, outcome, ended.reason in _GOOD_ENDS))

    def progress(self, running: RequestEnded) -> bytes:
        """That of a request that still runs, in case that nothing more is heard of it. It has no number yet."""
        return _encode(self._record(running, 0, OUTCOME_LOST, False))

    def correction(self, encoded: bytes, number: int, num_lost_tokens: int) -> bytes:
        """Returns the record that replaces another one: so many of its tokens were lost in transit."""
        record = _decode(encoded)
        num_output = max(0, record.num_output_tokens - num_lost_tokens)
        corrected = msgspec.structs.replace(
            record,
            number=number,
            corrects=record.number,
            num_output_tokens=num_output,
            num_reasoning_tokens=min(record.num_reasoning_tokens, num_output),
            charges=(),
        )
        corrected = self._priced(corrected, record.outcome in ("stop", "length"))
        charges = [_settled(charge, corrected.cost_nanos) for charge in record.charges]
        return _encode(msgspec.structs.replace(corrected, charges=tuple(charges)))

    def discard(self, encoded: bytes, number: int) -> bytes:
        """Returns the record that replaces one whose answer reached nobody."""
        record = _decode(encoded)
        charges = tuple(Charge(each.account, each.unit, each.period, 0, 0) for each in record.charges)
        discarded = msgspec.structs.replace(
            record,
            number=number,
            corrects=record.number,
            tier=TIER_DISCARDED,
            priority_class=record.served_class,
            tenant=_unbilled_tenant(TIER_DISCARDED, record.tenant),
            key_id="",
            charges=charges,
        )
        return _encode(self._priced(discarded, True))

    def _record(self, ended: RequestEnded, number: int, outcome: str, ended_well: bool) -> UsageRecord:
        usage = ended.usage
        assert usage is not None, "the core does not meter usage"
        adapter = "" if usage.adapter is None else usage.adapter.name
        num_output, moves, tenant = usage.num_resumed_tokens + ended.num_output_tokens, ended.moves, ended.tenant
        tier = _TIERS[usage.tier]
        if tier in OWN_TIERS:
            tenant = _unbilled_tenant(tier, tenant.removeprefix(SHADOW_TENANT))
        # What was never sent to a shard has used nothing.
        is_used = bool(ended.num_attempts or ended.is_result_cache_hit or num_output)
        num_prompt = ended.num_prompt_tokens if is_used else 0
        ended_at, duration_seconds = self._clock(), round(ended.e2e_latency_seconds, 6)
        cost = _NO_COST
        if tier not in OWN_TIERS:
            cost = self._cost(
                full_name(ended.model, adapter),
                ended_at - duration_seconds,
                (num_prompt, ended.num_cached_tokens, num_output),
                has_answer=ended_well or num_output > 0,
                is_batch=usage.tier is TierRank.BATCH,
                is_result_cache_hit=ended.is_result_cache_hit,
            )
        return UsageRecord(  # Python calls with more than 15 keywords are slow.
            self.producer,
            number,
            ended.request_id,
            tenant,
            ended_at,
            ended.model,
            adapter,
            usage.key_id,
            tier,
            outcome,
            reason_name(ended.error_reason) if ended.error_reason else "",
            num_prompt,
            ended.num_cached_tokens,
            num_output,
            usage.num_reasoning_tokens,
            ended.num_attempts,
            round(usage.block_seconds, 6),
            0.0 if ended.ttft_seconds is None else round(ended.ttft_seconds, 6),
            duration_seconds,
            ended.is_result_cache_hit,
            cost.price_id,
            cost.nanos,
            ended.client_request_id,
            usage.answer_id,
            usage.num_resumed_tokens,
            charges=usage.charges,
            num_preemptions=moves.num_preemptions,
            num_migrations=moves.num_migrations,
            num_failovers=moves.num_failovers,
            priority_class=ended.priority_class.name,
        )

    def _priced(self, record: UsageRecord, ended_well: bool) -> UsageRecord:
        """A record that has changed."""
        cost = _NO_COST
        if record.is_billed:
            cost = self._cost(
                record.priced_model,
                record.began_at,
                (record.num_prompt_tokens, record.num_cached_tokens, record.num_output_tokens),
                has_answer=ended_well or record.num_output_tokens > 0,
                is_batch=record.tier == "batch",
                is_result_cache_hit=record.is_result_cache_hit,
            )
        return msgspec.structs.replace(record, price_id=cost.price_id, cost_nanos=cost.nanos)

    def _cost(
        self,
        priced_model: str,
        began_at: float,
        num_tokens: tuple[int, int, int],
        *,
        has_answer: bool,
        is_batch: bool,
        is_result_cache_hit: bool,
    ) -> _Cost:
        """`num_tokens`: of the prompt, those of it that were cached, and of the output."""
        price = self._prices().at(priced_model, began_at)
        if not has_answer:
            return _Cost(price.id)
        num_prompt, num_cached, num_output = num_tokens
        nanos = price.cost_nanos(
            num_prompt, num_cached, num_output, is_batch=is_batch, is_result_cache_hit=is_result_cache_hit
        )
        return _Cost(price.id, nanos)


class _Cost(NamedTuple):
    price_id: str = ""
    nanos: int = 0


_NO_COST: Final = _Cost()


def _unbilled_tenant(tier: str, tenant: str) -> str:
    """No tenant of the directory has such a name, so nobody's usage or bill has the record."""
    return f"{tier}:{tenant}"


def _settled(charge: Charge, cost_nanos: int) -> Charge:
    """The charge in a correction: the record that it replaces has settled the lease."""
    total = cost_nanos if charge.unit == BUDGET_UNIT_NANOS else charge.total
    return Charge(charge.account, charge.unit, charge.period, 0, total)
