"""What is known of a request once it has ended: the unit of metering.

A router writes one record for each request that ends there, numbered without a gap. A request that continues at another
router has a record of each; they have the same `request_id`, and each says how far the whole answer had come, so that
the record that came furthest counts for all of them (see `merged`): what a router lost when it died is covered by the
record of the router where the request continued.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class UsageRecord(msgspec.Struct, frozen=True, omit_defaults=True, array_like=False):
    """Times are seconds since 1970, durations are seconds, costs are billionths of the currency."""

    producer: str
    """The router and its incarnation: "ROUTER/INCARNATION"."""
    number: int
    """From 1 on, without a gap, for each producer."""
    request_id: str
    """The id inside the fabric, which an answer keeps when it continues at another router."""
    tenant: str
    ended_at: float
    model: str
    adapter: str = ""
    key_id: str = ""
    tier: str = "interactive"
    outcome: str = "stop"
    """How it ended: a finish reason in lower case, or "error"."""
    error_reason: str = ""
    """The name of an ErrorReason, without its prefix."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    """Delivered output tokens of the whole answer, with those that earlier routers have delivered."""
    num_reasoning_tokens: int = 0
    num_attempts: int = 0
    block_seconds: float = 0.0
    """KV blocks times the seconds for which they were held."""
    ttft_seconds: float = 0.0
    """0: there was no token."""
    duration_seconds: float = 0.0
    is_result_cache_hit: bool = False
    price_id: str = ""
    cost_nanos: int = 0
    client_request_id: str = ""


def merged(records: Sequence[UsageRecord]) -> UsageRecord:
    """The one record of a request that has several: that of the router where its answer came furthest. Of equal ones
    the last one counts."""
    return max(records, key=lambda record: (record.num_output_tokens, record.ended_at))
