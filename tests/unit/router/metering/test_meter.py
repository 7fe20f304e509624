"""What usage records say, and to whom they belong."""

from __future__ import annotations

from typing import Any

import msgspec

from kvloom.v1.control_service_pb2 import BUDGET_UNIT_NANOS
from kvloom.v1.generation_pb2 import FINISH_REASON_ERROR, FINISH_REASON_STOP
from kvloom_common.tenancy.prices import Price, Prices
from kvloom_common.tenancy.usage_record import Charge, UsageRecord
from router.core.actions import RequestEnded
from router.core.events import SHADOW_TENANT, TierRank
from router.core.priority_classes import PriorityClass
from router.core.request_end import RelocationCounts
from router.core.request_usage import RequestUsage
from router.metering.meter import Meter

PRICES = Prices([Price("p1", "*", prompt_nanos=1, output_nanos=3)])


def ended(
    *, tier: TierRank = TierRank.INTERACTIVE, tenant: str = "acme/search", num_attempts: int = 1, num_output: int = 5,
    reason: Any = FINISH_REASON_STOP, answer_id: str = "", num_reasoning: int = 0, **fields: Any,
) -> RequestEnded:  # fmt: skip
    charges = (Charge("tenant:acme/search", BUDGET_UNIT_NANOS, "2026-11", 25, 25),)
    usage = RequestUsage(tier, None, "k1", answer_id, 0, 0.5, num_reasoning, charges)
    return RequestEnded(
        "r", tenant, "m", "s0", num_attempts, reason, 0, 10, 0, num_output, 0.0, 0.1, 0.2, usage=usage, **fields
    )


def record_of(encoded: bytes) -> UsageRecord:
    return msgspec.json.decode(encoded, type=UsageRecord)


def meter() -> Meter:
    return Meter("r0/1", lambda: PRICES, lambda: 1000.0)


def test_a_record_has_its_reasoning_and_its_moves() -> None:
    """Both were 0 in all records."""
    record = record_of(meter().record(ended(num_reasoning=3, moves=RelocationCounts(1, 2, 3)), 1))
    assert (record.num_reasoning_tokens, record.cost_nanos) == (3, 25)
    assert (record.num_preemptions, record.num_migrations, record.num_failovers) == (1, 2, 3)


def test_a_record_has_the_class_with_which_the_request_was_served() -> None:
    """It is not that of the tier, which decides the price; a correction and a discarded answer keep it."""
    encoded = meter().record(ended(tier=TierRank.BATCH, priority_class=PriorityClass("gold", 0)), 1)
    corrected, discarded = meter().correction(encoded, 2, 1), meter().discard(encoded, 2)
    assert [record_of(one).priority_class for one in (encoded, corrected, discarded)] == ["gold"] * 3
    assert record_of(encoded).tier == "batch"


def test_shadow_traffic_is_nobodys_bill() -> None:
    """Its records named a tenant with a NUL character, which PostgreSQL does not store."""
    for encode in (lambda one: meter().record(one, 1), meter().progress):
        record = record_of(encode(ended(tier=TierRank.SHADOW, tenant=f"{SHADOW_TENANT}acme/search")))
        assert (record.tenant, record.tier, record.cost_nanos) == ("shadow:acme/search", "shadow", 0)
        assert record.num_prompt_tokens == 10


def test_a_judgement_is_nobodys_bill() -> None:
    """A tenant does not pay for models that judge its texts, and its usage does not have them."""
    record = record_of(meter().record(ended(tier=TierRank.JUDGE, tenant="acme/search"), 1))
    assert (record.tenant, record.tier, record.cost_nanos) == ("judge:acme/search", "judge", 0)


def test_a_discarded_answer_is_taken_off_the_bill() -> None:
    """A caller does not pay for the candidates of a cascade that it never sees."""
    discarded = record_of(meter().discard(meter().record(ended(), 1), 2))
    assert (discarded.number, discarded.corrects) == (2, 1)
    assert (discarded.tenant, discarded.tier, discarded.key_id) == ("discarded:acme/search", "discarded", "")
    assert (discarded.cost_nanos, discarded.num_output_tokens) == (0, 5)
    assert [charge.total for charge in discarded.charges] == [0]


def test_what_was_never_sent_to_a_shard_has_used_nothing() -> None:
    """A request that gave way in the queue is on record, and free."""
    record = record_of(meter().record(ended(num_attempts=0, num_output=0, reason=FINISH_REASON_ERROR), 1))
    assert (record.outcome, record.num_prompt_tokens, record.cost_nanos) == ("evicted", 0, 0)


def test_lost_tokens_take_their_reasoning_with_them() -> None:
    """Reasoning can never be more than the output."""
    corrected = record_of(meter().correction(meter().record(ended(num_reasoning=4), 1), 2, 3))
    assert (corrected.num_output_tokens, corrected.num_reasoning_tokens) == (2, 2)
