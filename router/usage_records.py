"""Bills of requests whose client may say that it has not got all that was metered.

What a router has written to a client's stream may be lost with the stream. The client then asks another router to go on
behind what has come, which meters the lost tokens again. When the client is back it says what had come of each request
that it lost, and whatever was metered beyond that is credited.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from router.core.actions import RequestEnded

MAX_BILLS: Final = 65_536
"""Of all clients together; the oldest are forgotten."""
KEEP_SECONDS: Final = 300.0
"""So long at least a bill is remembered, and at most twice as long while there are new ones."""


@dataclasses.dataclass(frozen=True, slots=True)
class Credit:
    """Tokens that were metered and never reached the client."""

    request_id: str
    tenant: str
    model: str
    num_tokens: int


class _UsageRecord(msgspec.Struct, gc=False):
    tenant: str
    model: str
    num_tokens: int


class UsageRecords:
    """By link and request; only of clients that name their links.

    There are more of them than of anything else here that outlives a request. Each takes two small objects: what is
    kept for minutes among objects that live for milliseconds leaves holes, and so costs more than its size.
    """

    def __init__(self, max_bills: int = MAX_BILLS, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bills = max_bills
        self._clock = clock
        self._link_ids: dict[str, str] = {}
        """By client stream."""
        self._usage_records: dict[str, _UsageRecord] = {}
        """Since `_began_at`."""
        self._began_at = clock()
        self._earlier: dict[str, _UsageRecord] = {}
        """Of the time before."""

    def open(self, client_id: str, link_id: str) -> None:
        """A stream began."""
        self._link_ids[client_id] = link_id

    def close(self, client_id: str) -> None:
        """All its requests have ended."""
        self._link_ids.pop(client_id, None)

    def note(self, ended: RequestEnded) -> None:
        link_id = self._link_ids.get(ended.client_id)
        if link_id is None:
            return
        self._forget_old()
        key = _key(link_id, ended.request_id)
        for bills in (self._usage_records, self._earlier):
            bills.pop(key, None)  # an earlier bearer of the name, which the client has heard the end of
        self._usage_records[key] = _UsageRecord(ended.tenant, ended.model, ended.num_output_tokens)
        if len(self._usage_records) + len(self._earlier) > self._max_bills:
            oldest = self._earlier or self._usage_records
            del oldest[next(iter(oldest))]

    def settle(self, link_id: str, num_received_tokens: Mapping[str, int]) -> list[Credit]:
        """What is to be credited, given what had come of the requests that the link lost. Said twice it changes
        nothing; requests that are not remembered here are passed over. A bill is settled once: the next loss of a name
        is that of a later attempt, which may never have come here."""
        found: list[Credit] = []
        for request_id, num_received in num_received_tokens.items():
            key = _key(link_id, request_id)
            bill = self._usage_records.pop(key, None) or self._earlier.pop(key, None)
            if bill is not None and bill.num_tokens > num_received:
                found.append(Credit(request_id, bill.tenant, bill.model, bill.num_tokens - num_received))
        return found

    def _forget_old(self) -> None:
        """However long the router itself stood still, what it billed before that outlasts it: of two turns that are due
        only one is taken."""
        now = self._clock()
        if now - self._began_at >= KEEP_SECONDS:
            self._earlier, self._usage_records, self._began_at = self._usage_records, {}, now


def _key(link_id: str, request_id: str) -> str:
    """Unlike that of any other pair."""
    return f"{len(link_id)} {link_id}{request_id}"
