"""Streams of `Connect` whose clients have named their links: what such a link has lost is settled by that name.

The client says what had come of a request that it lost with a stream: in the hello of its next one, or, where that one
may end at another router, by `Cancel` at the address that this router has named (docs/adr/0011).
"""

from __future__ import annotations

from typing import Protocol

from router.core.events import RequestCancelled
from router.core_driver import CoreDriver
from router.usage_records import UsageRecords


class LinkSession(Protocol):
    """One stream."""

    @property
    def client_id(self) -> str:
        """As the core knows it."""
        ...

    def leave(self) -> None:
        """Its requests must have ended, and been metered, when this returns."""
        ...


class LinkSessions:
    """Of one router, by link_id."""

    def __init__(self, dispatcher: CoreDriver, bills: UsageRecords) -> None:
        self._dispatcher = dispatcher
        self._usage_records = bills
        self._open: dict[str, LinkSession] = {}

    def open(self, link_id: str, link: LinkSession) -> None:
        """Ends the link's earlier stream, whose break may not have been seen here: what it ran goes on over this one,
        under the same names."""
        earlier = self._open.get(link_id)
        if earlier is not None:
            earlier.leave()
        self._open[link_id] = link
        self._usage_records.open(link.client_id, link_id)

    def close(self, link_id: str, link: LinkSession) -> None:
        """Its requests have ended."""
        if self._open.get(link_id) is link:
            del self._open[link_id]
        self._usage_records.close(link.client_id)

    def settle(
        self, link_id: str, request_id: str, num_received_tokens: int, speaker: LinkSession | None = None
    ) -> bool:
        """Credit what was metered beyond what came. Unless the link itself is the `speaker`, a request that it still
        has is ended first: it goes on elsewhere. False when nothing was credited."""
        link = self._open.get(link_id)
        if link is not None and link is not speaker:
            self._dispatcher.dispatch(RequestCancelled(request_id, link.client_id))
        found = self._usage_records.settle(link_id, {request_id: num_received_tokens})
        for credit in found:
            self._dispatcher.credited(credit)
        return bool(found)
