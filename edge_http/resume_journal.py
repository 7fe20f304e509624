"""What the edges tell each other through Redis, so that any of them can take up a stream that another one began.

One key per edge says where it listens; its tag is part of the ids of its responses, so a response needs no key. One
Redis stream per edge, the journal, has the latest events of its resumable responses: all that came since the last
flush is one entry, whatever the number of responses. It is read only when its edge has died.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any, Final

import msgspec
import redis.asyncio
import redis.asyncio.retry
import redis.backoff

from kvloom.random_bytes import random_hex

TAG_CHARS: Final = 8
TIMEOUT_SECONDS: Final = 2.0
NEWCOMER_SECONDS: Final = 3.0
"""For so long after an edge has announced itself anew, others may still have to: Redis may have started anew."""
_ENTRIES_PER_READ: Final = 32
_FIELD: Final = b"e"


class EdgeRecord(msgspec.Struct, frozen=True):
    address: str
    """host:port where the other edges reach it."""


class JournalEntry(msgspec.Struct, array_like=True):
    """New events of one response."""

    response_id: str
    caller: bytes
    first_number: int
    num_events: int
    framed: bytes
    """The events, each in its HTTP/1.1 chunk."""
    ended: bool


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(list[JournalEntry]).decode


def new_tag() -> str:
    """Random: no two edges of a fabric have the same."""
    return secrets.token_hex(TAG_CHARS // 2)


def new_response_id(prefix: str, tag: str) -> str:
    """`prefix`: "chatcmpl-" or "cmpl-". Cannot be guessed."""
    return f"{prefix}{tag}{random_hex(8)}"


def tag_of(response_id: str) -> str:
    """Of the edge that made the id; "" when none did."""
    tag = response_id.rpartition("-")[2][:TAG_CHARS]
    return tag if len(tag) == TAG_CHARS and tag.isascii() and tag.isalnum() else ""


class EdgesUnknownError(Exception):
    """Redis does not know the edges at the moment."""


class ResumeJournal:
    """Raises redis.exceptions.RedisError when the server cannot be reached."""

    def __init__(self, url: str, key_prefix: str) -> None:
        # Callers try again by themselves; the client's own retries would only hide the outage.
        retry = redis.asyncio.retry.Retry(redis.backoff.NoBackoff(), 0)
        self._redis = redis.asyncio.Redis.from_url(
            url, socket_timeout=TIMEOUT_SECONDS, socket_connect_timeout=TIMEOUT_SECONDS, retry=retry
        )
        self._prefix = key_prefix

    async def keep(self, tag: str, record: EdgeRecord, ttl_seconds: float, max_entries: int) -> bool:
        """Announce the edge and keep the latest of its journal for the next `ttl_seconds`, also when it dies
        meanwhile. False when Redis did not know the edge: it is new, or Redis has lost what it knew."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.set(self._edge_key(tag), msgspec.json.encode(record), px=_ms(ttl_seconds), get=True)
            pipe.xtrim(self._journal_key(tag), maxlen=max_entries, approximate=False)
            pipe.pexpire(self._journal_key(tag), _ms(ttl_seconds))
            was_known = (await pipe.execute())[0] is not None
        if not was_known:
            await self._redis.set(self._newcomer_key, tag, px=_ms(NEWCOMER_SECONDS))
        return was_known

    async def find_edge(self, tag: str, own_tag: str) -> EdgeRecord | None:
        """None for an edge that is unknown for good. Raises EdgesUnknownError while it may only not have announced
        itself yet, because Redis has lost what it knew: the edge that asks is unknown too, or has just become known."""
        keys = self._edge_key(tag), self._edge_key(own_tag), self._newcomer_key
        value, own, newcomer = await self._redis.mget(keys)
        if value is not None:
            return msgspec.json.decode(value, type=EdgeRecord)
        if own is None or newcomer is not None:
            raise EdgesUnknownError
        return None

    async def append(self, tag: str, entry: bytes, max_entries: int) -> None:
        """Add an encoded entry, and forget the oldest ones beyond that number."""
        await self._redis.xadd(self._journal_key(tag), {_FIELD: entry}, maxlen=max_entries, approximate=False)

    async def read(self, tag: str) -> dict[str, list[JournalEntry]]:
        """The whole journal by response, in the order of writing."""
        found: dict[str, list[JournalEntry]] = {}
        begin = "-"
        while True:
            rows: Any = await self._redis.xrange(self._journal_key(tag), min=begin, count=_ENTRIES_PER_READ)
            for row_id, fields in rows:
                begin = "(" + row_id.decode()
                for entry in _decode(fields[_FIELD]):
                    found.setdefault(entry.response_id, []).append(entry)
            if len(rows) < _ENTRIES_PER_READ:
                return found

    async def close(self) -> None:
        await self._redis.aclose()

    @property
    def _newcomer_key(self) -> str:
        return f"{self._prefix}:edge-newcomer"

    def _edge_key(self, tag: str) -> str:
        return f"{self._prefix}:edge:{tag}"

    def _journal_key(self, tag: str) -> str:
        return f"{self._prefix}:edge:{tag}:events"


def encode_entries(entries: Iterable[JournalEntry]) -> bytes:
    return _encode(list(entries))


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
