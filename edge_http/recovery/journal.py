"""What the edges tell each other through Redis, so that any of them can take up a stream that another one began.

One key per edge says where it listens; its tag is part of the ids of its responses. A hash per resumable response says
what it is (edge_http/resume/records.py). One Redis stream per edge, the journal, has the latest news of its resumable
responses: all that came since the last write is one entry, whatever the number of responses. Hashes and journal are
read only when their edge has died. Who goes on with a response then: edge_http/recovery/claims.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec
import redis.asyncio.retry
import redis.backoff
import redis.exceptions

from edge_http.resume.records import ProgressDelta, decode_entry
from kvloom.discovery.redis_client import redis_client

TIMEOUT_SECONDS: Final = 2.0
NEWCOMER_SECONDS: Final = 3.0
"""For so long after an edge has announced itself anew, others may still have to: Redis may have started anew."""
_ENTRIES_PER_READ: Final = 32
_FIELD: Final = b"e"
_RESPONSE: Final = b"e"
_REQUESTS: Final = b"r"
_SNAPSHOT: Final = b"p"


class EdgeRecord(msgspec.Struct, frozen=True):
    address: str
    """host:port where the other edges reach it."""
    link_ids: list[str] = []
    """By which routers know it: what they have given to it is settled by these."""


class JournalBatch(msgspec.Struct):
    """What is written in one go."""

    news: list[ProgressDelta] = []
    opened: list[tuple[str, bytes, bytes, bytes]] = []
    """Responses that are new to the journal: id, ResponseRecord, RequestsRecord (b"": not kept), ProgressDelta of
    all."""
    snapshots: list[tuple[str, bytes]] = []
    """By response id: ProgressDelta of all that has come."""
    ended: list[str] = []
    """Nothing will be asked of a router any more; the events of these are kept."""
    forgotten: list[str] = []
    claimed: list[str] = []
    """Claims that go on."""


class ResponseRow(msgspec.Struct):
    """A response's hash."""

    response: bytes
    requests: bytes | None
    """None: it has ended, or may not be gone on with."""
    snapshot: bytes | None
    """None: it has ended."""


# An edge is never known without being a newcomer: another's absence would be taken for its death.
_ANNOUNCE: Final = """
local before = redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2], 'GET')
if before then return 1 end
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
return 0
"""


class EdgesUnknownError(Exception):
    """Redis does not know the edges at the moment."""


class ResumeJournal:
    """Raises redis.exceptions.RedisError when the server cannot be reached."""

    def __init__(self, url: str, key_prefix: str) -> None:
        # At once, and once: connections to a Redis that has been replaced are found out one by one. Callers try again
        # by themselves; more of the client's own retries would only hide an outage.
        retry = redis.asyncio.retry.Retry(redis.backoff.NoBackoff(), 1, (redis.exceptions.ConnectionError,))
        self.redis = redis_client(url, timeout_seconds=TIMEOUT_SECONDS, retry=retry)
        self.prefix = key_prefix

    async def keep(self, tag: str, record: EdgeRecord, ttl_seconds: float, max_entries: int) -> tuple[bool, set[str]]:
        """Announce the edge and keep the latest of its journal for the next `ttl_seconds`, also when it dies
        meanwhile. False when Redis did not know the edge: it is new, or Redis has lost what it knew. And the responses
        that others have taken over."""
        keys = self._edge_key(tag), self._newcomer_key
        async with self.redis.pipeline(transaction=False) as pipe:
            pipe.eval(
                _ANNOUNCE, len(keys), *keys, msgspec.json.encode(record), _ms(ttl_seconds), tag, _ms(NEWCOMER_SECONDS)
            )
            pipe.xtrim(self._journal_key(tag), maxlen=max_entries, approximate=False)
            pipe.pexpire(self._journal_key(tag), _ms(ttl_seconds))
            pipe.smembers(self.taken_key(tag))
            was_known, *_, taken = await pipe.execute()
        return bool(was_known), {response_id.decode() for response_id in taken}

    async def find_edge(self, tag: str, own_tag: str) -> EdgeRecord | None:
        """None for an edge that is unknown for good. Raises EdgesUnknownError while it may only not have announced
        itself yet, because Redis has lost what it knew: the edge that asks is unknown too, or has just become known."""
        keys = self._edge_key(tag), self._edge_key(own_tag), self._newcomer_key
        value, own, newcomer = await self.redis.mget(keys)
        if value is not None:
            return msgspec.json.decode(value, type=EdgeRecord)
        if own is None or newcomer is not None:
            raise EdgesUnknownError
        return None

    async def link_ids(self, tags: Iterable[str]) -> set[str]:
        """Of edges, as long as they are known. Raises RedisError."""
        found = await self.redis.mget([self._edge_key(tag) for tag in tags])
        records = [msgspec.json.decode(value, type=EdgeRecord) for value in found if value is not None]
        return {link_id for record in records for link_id in record.link_ids}

    async def write(
        self, tag: str, batch: JournalBatch, entry: bytes, max_entries: int, ttl_seconds: float
    ) -> set[str]:
        """Add `batch`, of which `entry` is the encoded news, to the journal (b"": none), and forget its oldest entries
        beyond that number. Returns the responses of this edge that others have taken over. The news comes first, so
        that no snapshot is ahead of it."""
        ttl_ms = _ms(ttl_seconds)
        async with self.redis.pipeline(transaction=False) as pipe:
            if entry:
                pipe.xadd(self._journal_key(tag), {_FIELD: entry}, maxlen=max_entries, approximate=False)
            for response_id, response, requests, snapshot in batch.opened:
                key = self._response_key(tag, response_id)
                fields: Any = {_RESPONSE: response, _SNAPSHOT: snapshot} | ({_REQUESTS: requests} if requests else {})
                pipe.hset(key, mapping=fields)
                pipe.pexpire(key, ttl_ms)
            for response_id, snapshot in batch.snapshots:
                key = self._response_key(tag, response_id)
                pipe.hset(key, _SNAPSHOT, snapshot)
                pipe.pexpire(key, ttl_ms)
            for response_id in batch.ended:
                key = self._response_key(tag, response_id)
                pipe.hdel(key, _REQUESTS, _SNAPSHOT)
                pipe.pexpire(key, ttl_ms)
            for response_id in batch.forgotten:
                pipe.unlink(self._response_key(tag, response_id))
            for response_id in batch.claimed:
                pipe.pexpire(self.claim_key(response_id), ttl_ms)
            pipe.smembers(self.taken_key(tag))
            taken = (await pipe.execute())[-1]
        return {response_id.decode() for response_id in taken}

    async def forget_taken(self, tag: str, response_ids: Iterable[str]) -> None:
        await self.redis.srem(self.taken_key(tag), *response_ids)

    async def read_response(self, tag: str, response_id: str) -> ResponseRow | None:
        key = self._response_key(tag, response_id)
        values: Any = await self.redis.hmget(key, (_RESPONSE, _REQUESTS, _SNAPSHOT))
        response, requests, snapshot = values
        return None if response is None else ResponseRow(response, requests, snapshot)

    async def read(self, tag: str, after_row: str) -> tuple[list[ProgressDelta], str]:
        """What the journal has behind that row, in the order of writing, and the last row. "": from its beginning."""
        found: list[ProgressDelta] = []
        while True:
            begin = f"({after_row}" if after_row else "-"
            rows: Any = await self.redis.xrange(self._journal_key(tag), min=begin, count=_ENTRIES_PER_READ)
            for row_id, fields in rows:
                after_row = row_id.decode()
                found += decode_entry(fields[_FIELD])
            if len(rows) < _ENTRIES_PER_READ:
                return found, after_row

    async def close(self) -> None:
        await self.redis.aclose()

    @property
    def _newcomer_key(self) -> str:
        return f"{self.prefix}:edge-newcomer"

    def _edge_key(self, tag: str) -> str:
        return f"{self.prefix}:edge:{tag}"

    def _journal_key(self, tag: str) -> str:
        return f"{self.prefix}:edge:{tag}:events"

    def _response_key(self, tag: str, response_id: str) -> str:
        return f"{self.prefix}:edge:{tag}:response:{response_id}"

    def claim_key(self, response_id: str) -> str:
        """See edge_http/recovery/claims.py."""
        return f"{self.prefix}:edge-claim:{response_id}"

    def taken_key(self, tag: str) -> str:
        """A set of the ids of responses that others have taken over from that edge."""
        return f"{self.prefix}:edge:{tag}:taken"


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
