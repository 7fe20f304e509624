"""The bills: what routers counted for a request, against what its client got. Pure.

A router bills a request when it ends, with a line of its log. One that goes on at another router is billed by each for
what that one delivered, less what it credits when it hears that some of it was lost on its way; the sum is what counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import msgspec


class UsageRecord(msgspec.Struct, frozen=True):
    """A line of a router's log: a request's end, or what was metered of it and turned out not to have arrived."""

    request_id: str
    num_output_tokens: int = 0
    num_credited_tokens: int = 0
    outcome: str = ""
    process: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Delivery:
    """What one client got under one request id."""

    request_ids: tuple[str, ...]
    """The last is that of the answer; those before were given up by the client."""
    num_seen_tokens: int
    num_due_tokens: int
    """Of the whole answer."""
    is_complete: bool
    may_miss_usage_record: bool
    """Its router was killed meanwhile, and what that had not yet billed went with it."""


@dataclasses.dataclass(slots=True)
class Settlement:
    num_billed_requests: int = 0
    num_metered_tokens: int = 0
    num_credited_tokens: int = 0
    """Metered by a router, and lost on their way; not in `num_metered_tokens`."""
    num_seen_tokens: int = 0
    num_exact: int = 0
    """Complete answers whose bill is exactly what their client got."""
    num_lost_bills: int = 0
    """Went with a router that was killed."""
    over: list[str] = dataclasses.field(default_factory=list)
    """Billed more than was delivered, or twice."""
    under: list[str] = dataclasses.field(default_factory=list)
    """Delivered and not billed, for no known reason."""


def parse_usage_record(line: bytes) -> UsageRecord | None:
    if b'"request ended"' not in line and b'"request credited"' not in line:
        return None
    try:
        return msgspec.json.decode(line, type=UsageRecord)
    except msgspec.DecodeError:
        return None


def settle(deliveries: Iterable[Delivery], bills: Iterable[UsageRecord]) -> Settlement:
    """Compare every delivery with its bills."""
    billed: dict[str, int] = {}
    result = Settlement()
    for bill in bills:
        result.num_billed_requests += bill.request_id not in billed
        num_tokens = bill.num_output_tokens - bill.num_credited_tokens
        result.num_metered_tokens += num_tokens
        result.num_credited_tokens += bill.num_credited_tokens
        billed[bill.request_id] = billed.get(bill.request_id, 0) + num_tokens
    for delivery in deliveries:
        _settle_one(delivery, billed, result)
    return result


def _settle_one(delivery: Delivery, billed: dict[str, int], result: Settlement) -> None:
    result.num_seen_tokens += delivery.num_seen_tokens
    for request_id in delivery.request_ids:
        tokens = billed.get(request_id, 0)
        if tokens > delivery.num_due_tokens:
            result.over.append(f"{request_id}: billed {tokens} tokens, the whole answer has {delivery.num_due_tokens}")
            return
    if not delivery.request_ids:
        return
    request_id = delivery.request_ids[-1]
    tokens = billed.get(request_id, 0)
    least = delivery.num_due_tokens if delivery.is_complete else delivery.num_seen_tokens
    if tokens >= least:
        result.num_exact += delivery.is_complete
    elif delivery.may_miss_usage_record:
        result.num_lost_bills += 1
    else:
        result.under.append(f"{request_id}: billed {tokens} tokens, at least {least} were delivered")
