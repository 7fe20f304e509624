"""The open `Connect` streams by link id, so that usage which a broken stream lost can be settled (docs/adr/0011).

When a stream breaks, its client reports how many tokens of each lost request it had received. It does so in the hello
of its next stream, or, where that stream may end at another router, by `Cancel` at the address that this router sent.
"""

from __future__ import annotations

from typing import Protocol

from router.core.events import RequestCancelled
from router.core_driver import CoreDriver
from router.usage_records import UsageRecords


class LinkSession(Protocol):
    """One open stream."""

    @property
    def client_id(self) -> str:
        """The core's id for the stream."""
        ...

    def leave(self) -> None:
        """Ends the stream's requests: when this returns they must have ended and been metered."""
        ...


class LinkSessions:
    """The sessions of one router, by link id."""

    def __init__(self, driver: CoreDriver, usage_records: UsageRecords) -> None:
        self._driver = driver
        self._usage_records = usage_records
        self._open: dict[str, LinkSession] = {}

    def open(self, link_id: str, link: LinkSession) -> None:
        """Registers a stream and ends the link's earlier one, whose break this router may not have noticed: the
        client resumes the earlier stream's requests over this one, under the same ids."""
        earlier = self._open.get(link_id)
        if earlier is not None:
            earlier.leave()
        self._open[link_id] = link
        self._usage_records.open(link.client_id, link_id)

    def close(self, link_id: str, link: LinkSession) -> None:
        """Called when all requests of the stream have ended."""
        if self._open.get(link_id) is link:
            del self._open[link_id]
        self._usage_records.close(link.client_id)

    def settle(
        self, link_id: str, request_id: str, num_received_tokens: int, reported_by: LinkSession | None = None
    ) -> bool:
        """Credits the tokens that were metered but not received, and returns whether there were any. If the request
        still runs on the link's open stream it is ended first, because the client resumes it elsewhere, unless that
        stream itself reported the loss."""
        link = self._open.get(link_id)
        if link is not None and link is not reported_by:
            self._driver.dispatch(RequestCancelled(request_id, link.client_id))
        found = self._usage_records.settle(link_id, {request_id: num_received_tokens})
        for credit in found:
            self._driver.tokens_credited(credit)
        return bool(found)
