"""Compares the usage records of the routers with what the clients received. Pure functions.

A router logs a usage record when a request ends. If a request continues at another router, each router meters the
tokens that it delivered, and credits those that it later finds were lost in transit. The sum of all records counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import msgspec


class LoggedUsage(msgspec.Struct, frozen=True):
    """A line of a router's log: the end of a request, or a credit for metered tokens that did not arrive."""

    request_id: str
    num_output_tokens: int = 0
    num_credited_tokens: int = 0
    outcome: str = ""
    process: str = ""
    tenant: str = ""
    client_request_id: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Delivery:
    """Records what one client received for one request."""

    request_ids: tuple[str, ...]
    """The last one is that of the answer. The client abandoned the earlier ones."""
    num_received_tokens: int
    num_due_tokens: int
    """The number of tokens of the whole answer."""
    is_complete: bool
    may_miss_usage_record: bool
    """Its router was killed, and with it the tokens that it had not yet recorded."""


@dataclasses.dataclass(slots=True)
class MeteringResult:
    """The usage records of a run compared with its deliveries."""

    num_metered_requests: int = 0
    num_metered_tokens: int = 0
    num_credited_tokens: int = 0
    """Tokens that a router metered although they were lost in transit. They are not in `num_metered_tokens`."""
    num_received_tokens: int = 0
    num_exact: int = 0
    """Complete answers whose usage records sum up to exactly what their client received."""
    num_lost_records: int = 0
    """Usage records that were lost with a router that was killed."""
    over: list[str] = dataclasses.field(default_factory=list)
    """Answers that were metered twice, or with more tokens than they have."""
    under: list[str] = dataclasses.field(default_factory=list)
    """Answers that were delivered and not metered, for no known reason."""


def parse_usage_record(line: bytes) -> LoggedUsage | None:
    if b'"request_ended"' not in line and b'"request_credited"' not in line:
        return None
    try:
        return msgspec.json.decode(line, type=LoggedUsage)
    except msgspec.DecodeError:
        return None


def compare_metering(deliveries: Iterable[Delivery], usage_records: Iterable[LoggedUsage]) -> MeteringResult:
    """Compare every delivery with its usage records."""
    metered: dict[str, int] = {}
    result = MeteringResult()
    names: dict[str, str] = {}
    for record in usage_records:
        if record.client_request_id.startswith("resp_"):  # its client knows a background response by this name
            names[record.request_id] = record.client_request_id
        answer = names.get(record.request_id, record.request_id)
        result.num_metered_requests += answer not in metered
        num_tokens = record.num_output_tokens - record.num_credited_tokens
        result.num_metered_tokens += num_tokens
        result.num_credited_tokens += record.num_credited_tokens
        metered[answer] = metered.get(answer, 0) + num_tokens
    for delivery in deliveries:
        _compare_one(delivery, metered, result)
    return result


def _compare_one(delivery: Delivery, metered: dict[str, int], result: MeteringResult) -> None:
    result.num_received_tokens += delivery.num_received_tokens
    for request_id in delivery.request_ids:
        tokens = metered.get(request_id, 0)
        if tokens > delivery.num_due_tokens:
            result.over.append(f"{request_id}: metered {tokens} tokens, the whole answer has {delivery.num_due_tokens}")
            return
    if not delivery.request_ids:
        return
    request_id = delivery.request_ids[-1]
    tokens = metered.get(request_id, 0)
    least = delivery.num_due_tokens if delivery.is_complete else delivery.num_received_tokens
    if tokens >= least:
        result.num_exact += delivery.is_complete
    elif delivery.may_miss_usage_record:
        result.num_lost_records += 1
    else:
        result.under.append(f"{request_id}: metered {tokens} tokens, at least {least} were delivered")
