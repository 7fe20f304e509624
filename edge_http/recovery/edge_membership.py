"""This edge's membership in the group of edges that share a Redis: it publishes its resumable responses and finds those
of the others."""

from __future__ import annotations

from typing import Final

import structlog

from edge_http.edge import Edge
from edge_http.recovery.claims import ResumeClaims
from edge_http.recovery.journal import EdgeRecord, ResumeJournal
from edge_http.recovery.peer_proxy import PeerProxy
from edge_http.recovery.publisher import ResumePublisher, journal_ttl_seconds
from edge_http.recovery.response_locator import ResponseLocator
from kvloom_common.config import RedisConfig
from kvloom_common.trust.fabric_trust import NO_SECRET, FabricTrust

log = structlog.get_logger()

_WILDCARDS: Final = ("", "0.0.0.0", "::")


class EdgeMembership:
    """Owns the connections to Redis and to the other edges, and the publishing task."""

    def __init__(self, edge: Edge, redis: RedisConfig, address: str, trust: FabricTrust) -> None:
        resume = edge.resume_config
        self._journal = ResumeJournal(redis.url, redis.key_prefix, trust.sealer)
        self._publisher = ResumePublisher(edge.resume, self._journal, resume, self._own_record, edge.tag)
        claims = ResumeClaims(self._journal, journal_ttl_seconds(resume))
        proxy = PeerProxy(edge.config.max_concurrent_requests, edge.callers.headers, trust)
        self._locator = ResponseLocator(edge, self._journal, claims, proxy)
        edge.remote_responses = self._locator
        self._edge = edge
        self._address = address
        self._publisher.start()

    def _own_record(self) -> EdgeRecord:
        losses = self._edge.losses
        return EdgeRecord(self._address, [] if losses is None else losses.link_ids())

    async def stop_publishing(self) -> None:
        """Leave running responses to the other edges, if the journal has everything that was shown until now."""
        if await self._publisher.stop():
            self._edge.resume.hand_over()
        self._locator.leave()

    async def close(self) -> None:
        await self._publisher.stop()
        await self._locator.close()
        await self._journal.close()


def join_edges(
    edge: Edge, redis: RedisConfig, listening_at: str, trust: FabricTrust = NO_SECRET, *, shares_port: bool = False
) -> EdgeMembership | None:
    """`listening_at` is an address where only this edge listens. With `shares_port` it also listens at an address that
    it shares with other edges. Returns None if there is nothing to share: there is no Redis, resuming is off, or the
    edge has no address that others could use."""
    resume = edge.resume_config
    if not redis.url or not resume.grace_seconds:
        return None
    if not resume.advertised_address and listening_at.rpartition(":")[0].strip("[]") in _WILDCARDS:
        log.warning("resume_sharing_disabled", cause="resume.advertised_address is not set")
        return None
    advertised = resume.advertised_address
    if advertised and (shares_port or trust.has_secret):
        advertised = f"{advertised.rpartition(':')[0]}:{listening_at.rpartition(':')[2]}"
    return EdgeMembership(edge, redis, advertised or listening_at, trust)
