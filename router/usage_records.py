"""Usage records of ended requests, kept for clients that may report that they did not receive all metered tokens.

Tokens that a router has written to a client's stream may be lost with the stream. The client then asks another router
to resume behind the tokens that it received, and that router meters the lost ones again. When the client is connected
again, it reports how many tokens it had received of each lost request, and those metered beyond that are credited.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from router.core.actions import RequestEnded

MAX_RECORDS: Final = 65_536
"""The most usage records kept for all clients together; the oldest are forgotten."""
KEEP_SECONDS: Final = 300.0
"""A usage record is kept for at least this long, and for at most twice as long while new ones arrive."""


@dataclasses.dataclass(frozen=True, slots=True)
class Credit:
    """Tokens that were metered but never reached the client."""

    request_id: str
    tenant: str
    model: str
    num_tokens: int
    record: bytes = b""
    """The request's usage record, if usage is metered for tenants (router/metering)."""


class _UsageRecord(msgspec.Struct, gc=False):
    tenant: str
    model: str
    num_tokens: int
    record: bytes


class UsageRecords:
    """The usage records by link and request, of clients that name their links.

    They are the most numerous objects that outlive a request here, so each takes only two small objects. Objects that
    live for minutes among objects that live for milliseconds fragment the heap, and so cost more than their size.
    """

    def __init__(self, max_records: int = MAX_RECORDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_records = max_records
        self._clock = clock
        self._link_ids: dict[str, str] = {}
        """Client id -> link id, of the open streams."""
        self._records: dict[str, _UsageRecord] = {}
        """The records since `_began_at`."""
        self._began_at = clock()
        self._earlier: dict[str, _UsageRecord] = {}
        """The records of the period before that."""

    def open(self, client_id: str, link_id: str) -> None:
        """Called when a stream begins."""
        self._link_ids[client_id] = link_id

    def close(self, client_id: str) -> None:
        """Called when all requests of the stream have ended."""
        self._link_ids.pop(client_id, None)

    def request_ended(self, ended: RequestEnded, record: bytes = b"") -> None:
        """`record` is given back with a credit."""
        link_id = self._link_ids.get(ended.client_id)
        if link_id is None:
            return
        self._forget_old()
        key = _key(link_id, ended.request_id)
        for records in (self._records, self._earlier):
            records.pop(key, None)  # This is an earlier request of the same id, whose end the client has received.
        self._records[key] = _UsageRecord(ended.tenant, ended.model, ended.num_output_tokens, record)
        if len(self._records) + len(self._earlier) > self._max_records:
            oldest = self._earlier or self._records
            del oldest[next(iter(oldest))]

    def take(self, client_id: str, request_id: str) -> bytes:
        """Forgets the record of a request that came over this stream's link, and returns it; b"": there is none."""
        link_id = self._link_ids.get(client_id)
        if link_id is None:
            return b""
        key = _key(link_id, request_id)
        record = self._records.pop(key, None) or self._earlier.pop(key, None)
        return b"" if record is None else record.record

    def settle(self, link_id: str, num_received_tokens: Mapping[str, int]) -> list[Credit]:
        """Returns the credits, given the number of tokens that the client received of each request that the link lost.

        Each record is settled once, so a repeated report changes nothing: the next loss under the same id is that of a
        later attempt, which this router may never have seen. Requests without a record are skipped."""
        found: list[Credit] = []
        for request_id, num_received in num_received_tokens.items():
            key = _key(link_id, request_id)
            record = self._records.pop(key, None) or self._earlier.pop(key, None)
            if record is not None and record.num_tokens > num_received:
                num_lost = record.num_tokens - num_received
                found.append(Credit(request_id, record.tenant, record.model, num_lost, record.record))
        return found

    def _forget_old(self) -> None:
        """Starts a new period when one is due. If the router itself was suspended for several periods only one passes,
        so that the records from before the suspension are still kept."""
        now = self._clock()
        if now - self._began_at >= KEEP_SECONDS:
            self._earlier, self._records, self._began_at = self._records, {}, now


def _key(link_id: str, request_id: str) -> str:
    """Returns a key that no other pair has."""
    return f"{len(link_id)} {link_id}{request_id}"
