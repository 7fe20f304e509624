"""Holds what the edges share through Redis, so that any of them can resume a stream that another one began.

One key for each edge holds the address where it listens; the edge's tag is part of the ids of its responses. One hash
for each resumable response describes it (edge_http/resume/records.py). One Redis stream for each edge, its journal, has
the latest progress of its resumable responses: everything since the last write is one entry, whatever the number of
responses. Hashes and journal are read only after their edge has died. Which edge may then continue a response is
decided in edge_http/recovery/claims.py.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

import msgspec
import redis.asyncio.retry
import redis.backoff
import redis.exceptions
import structlog

from edge_http.resume.records import (
    ProgressDelta,
    RequestsRecord,
    ResponseRecord,
    can_continue,
    decode_delta,
    decode_entry,
    decode_requests,
    decode_response,
)
from kvloom_common.discovery.redis_client import redis_client
from kvloom_common.trust.seal import PLAIN, Sealer, SealError

log = structlog.get_logger()

TIMEOUT_SECONDS: Final = 2.0
NEWCOMER_SECONDS: Final = 3.0
"""For so long after an edge has announced itself, other edges may still have to: Redis may have restarted empty."""
CACHED_SECONDS: Final = 5.0
MAX_CACHED_JOURNALS: Final = 4
_ENTRIES_PER_READ: Final = 32
_FIELD: Final = b"e"
_RESPONSE: Final = b"e"
_REQUESTS: Final = b"r"
_SNAPSHOT: Final = b"p"
_UNUSABLE: Final = (SealError, msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Reading a foreign value may raise one of these."""

T = TypeVar("T")


class EdgeRecord(msgspec.Struct, frozen=True):
    address: str
    """host:port where the other edges reach it."""
    link_ids: list[str] = []
    """The ids by which routers know its links; the usage records of its attempts are settled under these."""


class JournalBatch(msgspec.Struct):
    """The changes that one write adds to the journal; strings are response ids."""

    deltas: list[ProgressDelta] = []
    opened: list[tuple[str, bytes, bytes, bytes]] = []
    """Responses that are new to the journal: id, ResponseRecord, RequestsRecord (b"" if it is not kept), snapshot."""
    snapshots: list[tuple[str, bytes]] = []
    kept_here: list[str] = []
    """Responses that no other edge may continue any more."""
    ended: list[str] = []
    """Responses whose requests are over; their events are kept."""
    forgotten: list[str] = []
    claimed: list[str] = []
    """Responses whose claims are renewed."""


class ResponseRow(msgspec.Struct):
    """The hash of a response."""

    response: ResponseRecord
    requests: RequestsRecord | None
    """None if the response has ended, or if its requests were too large to keep."""
    snapshot: ProgressDelta | None
    """None if the response has ended."""


# An edge that becomes known is a newcomer at the same moment: else it could take the absence of another for its death.
_ANNOUNCE: Final = """
local before = redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2], 'GET')
if before then return 1 end
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
return 0
"""


class EdgesUnknownError(Exception):
    """Redis may have lost the edges' announcements."""


class ResumeJournal:
    """Raises redis.exceptions.RedisError when the server cannot be reached."""

    def __init__(self, url: str, key_prefix: str, sealer: Sealer = PLAIN) -> None:
        # One retry, at once: the connections to a Redis that was replaced turn out to be dead one by one. Callers retry
        # by themselves, and more retries of the client would only hide an outage.
        retry = redis.asyncio.retry.Retry(redis.backoff.NoBackoff(), 1, (redis.exceptions.ConnectionError,))
        self.redis = redis_client(url, timeout_seconds=TIMEOUT_SECONDS, retry=retry)
        self._prefix = key_prefix
        self._sealer = sealer

    @property
    def is_encrypted(self) -> bool:
        """True when what responses say can be read by processes of the fabric only."""
        return self._sealer is not PLAIN

    async def keep(self, tag: str, record: EdgeRecord, ttl_seconds: float, max_entries: int) -> tuple[bool, set[str]]:
        """Announce the edge and keep the latest entries of its journal for the next `ttl_seconds`, even if it dies
        meanwhile. Returns whether Redis knew the edge (if not, the edge is new, or Redis has lost its data), and the
        responses that other edges have taken over."""
        keys = self._edge_key(tag), self._newcomer_key
        announcement = self._sealer.sign(self._edge_key(tag), msgspec.json.encode(record))
        async with self.redis.pipeline(transaction=False) as pipe:
            pipe.eval(_ANNOUNCE, len(keys), *keys, announcement, _ms(ttl_seconds), tag, _ms(NEWCOMER_SECONDS))
            pipe.xtrim(self._journal_key(tag), maxlen=max_entries, approximate=False)
            pipe.pexpire(self._journal_key(tag), _ms(ttl_seconds))
            pipe.smembers(self.taken_key(tag))
            was_known, *_, taken = await pipe.execute()
        return bool(was_known), {response_id.decode() for response_id in taken}

    async def find_edge(self, tag: str, own_tag: str) -> EdgeRecord | None:
        """Returns None for an edge that is gone. Raises EdgesUnknownError while the edge may only not have announced
        itself yet because Redis has lost its data: then the asking edge is unknown too, or has just become known."""
        keys = self._edge_key(tag), self._edge_key(own_tag), self._newcomer_key
        value, own, newcomer = await self.redis.mget(keys)
        if value is not None:
            record = self._edge_record(tag, value)
            if record is None:
                raise EdgesUnknownError  # whether the edge lives is not known
            return record
        if own is None or newcomer is not None:
            raise EdgesUnknownError
        return None

    async def link_ids(self, tags: Iterable[str]) -> set[str]:
        """The link ids of those of these edges that Redis still knows."""
        tags = list(tags)
        found = await self.redis.mget([self._edge_key(tag) for tag in tags])
        records = [self._edge_record(tag, value) for tag, value in zip(tags, found, strict=True) if value is not None]
        return {link_id for record in records if record is not None for link_id in record.link_ids}

    def _edge_record(self, tag: str, value: Any) -> EdgeRecord | None:
        """None for a record that cannot be used."""
        try:
            return msgspec.json.decode(self._sealer.verified(self._edge_key(tag), value), type=EdgeRecord)
        except _UNUSABLE as error:
            log.warning("edge_record_ignored", edge_tag=tag, cause=str(error)[:200])
            return None

    async def write(
        self, tag: str, batch: JournalBatch, entry: bytes, max_entries: int, ttl_seconds: float
    ) -> set[str]:
        """Write `batch`, whose encoded deltas are `entry` (b"" for none), and drop the oldest entries beyond
        `max_entries`. Returns the responses of this edge that other edges have taken over. The entry is written first,
        so that no snapshot is ahead of the journal."""
        ttl_ms = _ms(ttl_seconds)
        async with self.redis.pipeline(transaction=False) as pipe:
            for response_id in batch.kept_here:  # before the entry, which may have what another model has added
                pipe.hdel(self._response_key(tag, response_id), _REQUESTS)
            if entry:
                sealed = self._sealer.encrypt(self._journal_key(tag), entry)
                pipe.xadd(self._journal_key(tag), {_FIELD: sealed}, maxlen=max_entries, approximate=False)
            for response_id, response, requests, snapshot in batch.opened:
                key = self._response_key(tag, response_id)
                fields: Any = {_RESPONSE: response, _SNAPSHOT: snapshot} | ({_REQUESTS: requests} if requests else {})
                pipe.hset(key, mapping={name: self._encrypted(key, name, value) for name, value in fields.items()})
                pipe.pexpire(key, ttl_ms)
            for response_id, snapshot in batch.snapshots:
                key = self._response_key(tag, response_id)
                pipe.hset(key, _SNAPSHOT, self._encrypted(key, _SNAPSHOT, snapshot))
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
        try:
            response = self._opened(key, _RESPONSE, values[0], decode_response)
            requests = self._opened(key, _REQUESTS, values[1], decode_requests)
            snapshot = self._opened(key, _SNAPSHOT, values[2], decode_delta)
        except _UNUSABLE as error:
            log.warning("journal_response_ignored", response_id=response_id, cause=str(error)[:200])
            return None
        if response is None:
            return None
        if requests is not None and not can_continue(response, requests):
            log.warning("journal_response_ignored", response_id=response_id, cause="other requests")
            return None
        return ResponseRow(response, requests, snapshot)

    def _opened(self, key: str, field: bytes, value: bytes | None, decode: Callable[[bytes], T]) -> T | None:
        return None if value is None else decode(self._sealer.decrypted(_field_of(key, field), value))

    def _encrypted(self, key: str, field: bytes, content: bytes) -> bytes:
        return self._sealer.encrypt(_field_of(key, field), content)

    async def read(self, tag: str, after_row: str) -> tuple[list[ProgressDelta], str]:
        """Returns the deltas behind that row, in the order of writing, and the last row. "" is before the first row."""
        found: list[ProgressDelta] = []
        while True:
            begin = f"({after_row}" if after_row else "-"
            rows: Any = await self.redis.xrange(self._journal_key(tag), min=begin, count=_ENTRIES_PER_READ)
            for row_id, fields in rows:
                after_row = row_id.decode()
                try:
                    found += decode_entry(self._sealer.decrypted(self._journal_key(tag), fields.get(_FIELD, b"")))
                except _UNUSABLE as error:
                    # What it held is then missing, which readers notice.
                    log.warning("journal_entry_ignored", edge_tag=tag, cause=str(error)[:200])
            if len(rows) < _ENTRIES_PER_READ:
                return found, after_row

    async def close(self) -> None:
        await self.redis.aclose()

    @property
    def _newcomer_key(self) -> str:
        return f"{self._prefix}:edge-newcomer"

    def _edge_key(self, tag: str) -> str:
        return f"{self._prefix}:edge:{tag}"

    def _journal_key(self, tag: str) -> str:
        return f"{self._prefix}:edge:{tag}:events"

    def _response_key(self, tag: str, response_id: str) -> str:
        return f"{self._prefix}:edge:{tag}:response:{response_id}"

    def idempotency_key(self, tenant: str, key: str) -> str:
        return f"{self._prefix}:edge-key:{tenant}:{key}"

    def claim_key(self, response_id: str) -> str:
        """See edge_http/recovery/claims.py."""
        return f"{self._prefix}:edge-claim:{response_id}"

    def taken_key(self, tag: str) -> str:
        """A set of the ids of responses that other edges have taken over from that edge."""
        return f"{self._prefix}:edge:{tag}:taken"


class _JournalCopy:
    def __init__(self) -> None:
        self.last_row = ""
        self.deltas: dict[int, list[ProgressDelta]] = {}
        """By the response's number."""
        self.reading = asyncio.Lock()


class JournalCache:
    """The journals of dead edges, which are read once for all clients that come back at about the same time."""

    def __init__(self, journal: ResumeJournal) -> None:
        self._journal = journal
        self._copies: OrderedDict[str, _JournalCopy] = OrderedDict()

    async def deltas_of(self, tag: str, number: int) -> Sequence[ProgressDelta]:
        """All deltas of a response that the journal of that edge has now. Raises RedisError."""
        copy = self._copies.get(tag)
        if copy is None:
            copy = self._copies[tag] = _JournalCopy()
            asyncio.get_running_loop().call_later(CACHED_SECONDS, self._forget, tag, copy)
            if len(self._copies) > MAX_CACHED_JOURNALS:
                self._copies.popitem(last=False)
        async with copy.reading:
            found, copy.last_row = await self._journal.read(tag, copy.last_row)
            for delta in found:
                copy.deltas.setdefault(delta.number, []).append(delta)
        return copy.deltas.get(number, ())

    def _forget(self, tag: str, copy: _JournalCopy) -> None:
        if self._copies.get(tag) is copy:
            del self._copies[tag]


def _field_of(key: str, field: bytes) -> str:
    """Returns the context with which a field of a hash is encrypted."""
    return f"{key} {field.decode()}"


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
