"""Copies of the items of conversations in Redis, so that a turn reads from SQL only what is new since the last one.

Copies are read before SQL, which then says in one query who may read the conversation, with which key its copies are
encrypted, and what follows them. Under one key items are only appended: when one is deleted the key is, and so are all
keys of what is deleted or erased. No copy can then be read any more, wherever it is. A copy covers the items between
two positions, so that copies that are lost, or added twice, cost a read and nothing else."""

from __future__ import annotations

import asyncio
import hashlib
import os
import struct
from collections.abc import Collection
from typing import Any, Final, NamedTuple

import msgspec
import redis.asyncio.retry
import redis.backoff
import redis.exceptions
import structlog
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from sqlalchemy.ext.asyncio import AsyncConnection

from kvloom_common.config import RedisConfig
from kvloom_common.database.database import Database
from kvloom_common.discovery.redis_client import redis_client
from orchestrator.metrics import HOT_READS
from orchestrator.seal import seal_of
from orchestrator.store import hot_keys

log = structlog.get_logger()

TIMEOUT_SECONDS: Final = 0.25
PAUSE_SECONDS: Final = 5.0
"""How long Redis is not asked after it has failed."""
MAX_COPIES: Final = 32
"""Copies of one conversation, of which the next reader makes one."""
MAX_BYTES: Final = 4 * 2**20
"""The size of a conversation that is copied."""
_NONCE_BYTES: Final = 12
_PLACE: Final = struct.Struct("<qq")
"""A copy begins with the position that it follows, and that of its last item: they are not secret, but sealed."""
_BEFORE_FIRST: Final = -1


class Copies(NamedTuple):
    """The copies of a conversation that follow one another from the first item on, as Redis has them."""

    sealed: list[bytes]
    last: int = _BEFORE_FIRST
    """The position of the last item."""


class HotRead(NamedTuple):
    """The items that were read of a conversation, and those of them that have no copy yet."""

    conversation: str
    bodies: list[bytes]
    """The JSON of all items, in order."""
    key: bytes | None
    """None: the conversation has none yet, and no copies."""
    new: list[bytes]
    """The items that are to be copied, as SQL has them."""
    after: int
    """The position that these follow; -1: they are all, and replace other copies."""
    last: int


_BODIES: Final = msgspec.msgpack.Decoder(list[bytes])


class HotItems:
    """Where Redis is away, everything is read from SQL."""

    def __init__(self, config: RedisConfig, kept_seconds: int) -> None:
        """`kept_seconds`: how long copies are kept that nobody reads."""
        retry = redis.asyncio.retry.Retry(redis.backoff.NoBackoff(), 1, (redis.exceptions.ConnectionError,))
        self._redis = redis_client(config.url, timeout_seconds=TIMEOUT_SECONDS, retry=retry)
        self._prefix = config.key_prefix
        self._kept_seconds = kept_seconds
        self._paused_until = 0.0

    async def close(self) -> None:
        await self._redis.aclose()

    async def copies(self, conversation: str) -> Copies:
        """Return what Redis has of a conversation. It is asked before the transaction of `read`, which checks the
        copies."""
        found, last = list[bytes](), _BEFORE_FIRST
        for sealed in await self._asked(self._redis.lrange(self._name(conversation), 0, -1)) or ():
            if len(sealed) > _PLACE.size and _PLACE.unpack_from(sealed)[0] == last:
                found.append(sealed)
                last = _PLACE.unpack_from(sealed)[1]
        return Copies(found, last)

    async def read(
        self, connection: AsyncConnection, tenant: str, conversation: str, now: float, copies: Copies
    ) -> HotRead | None:
        """All items of a conversation; None if the tenant has none of this id."""
        rows = await hot_keys.rows_from(connection, tenant, conversation, now, copies.last)
        if not rows:
            return None
        key, last = rows[0].key, copies.last
        known = [] if key is None else _opened(AESGCM(key), copies)
        if known:
            # A database that was restored from a backup may have gone another way since.
            first = rows[0]
            known = known if first.position == last and bytes(first.body) == known[-1] else []
        if copies.sealed and not known:
            last = _BEFORE_FIRST
            rows = await hot_keys.rows_from(connection, tenant, conversation, now, last)
        HOT_READS.labels("copy" if known else "none").inc()
        tail = [bytes(row.body) for row in rows if row.position is not None and row.position > last]
        seal = seal_of(connection)
        bodies = [seal.opened(tenant, body) for body in (*known, *tail)]
        if not tail:
            return HotRead(conversation, bodies, key, [], last, last)
        is_whole = not known or len(copies.sealed) >= MAX_COPIES
        new, after = ([*known, *tail], _BEFORE_FIRST) if is_whole else (tail, last)
        return HotRead(conversation, bodies, key, new, after, rows[-1].position)

    async def note(self, database: Database, read: HotRead) -> None:
        """Copies what was new in a read, after its transaction."""
        if read.key is None:
            key = AESGCM.generate_key(bit_length=256)
            await database.uninterrupted(hot_keys.give(database, read.conversation, key))
        elif read.new and sum(map(len, read.new)) <= MAX_BYTES:
            place, nonce = _PLACE.pack(read.after, read.last), os.urandom(_NONCE_BYTES)
            sealed = AESGCM(read.key).encrypt(nonce, msgspec.msgpack.encode(read.new), place)
            name = self._name(read.conversation)
            async with self._redis.pipeline(transaction=True) as pipe:
                if read.after == _BEFORE_FIRST:
                    pipe.delete(name)
                pipe.rpush(name, place + nonce + sealed)
                pipe.expire(name, self._kept_seconds)
                await self._asked(pipe.execute())

    async def forget(self, conversations: Collection[str]) -> None:
        """Deletes copies that nobody can read any more, if Redis is there."""
        if conversations:
            await self._asked(self._redis.delete(*map(self._name, conversations)))

    async def _asked(self, command: Any) -> Any:
        """Awaits an answer of Redis; None while it is away."""
        clock = asyncio.get_running_loop().time
        if clock() < self._paused_until:
            command.close()
            return None
        try:
            return await command
        except (redis.exceptions.RedisError, OSError) as error:
            self._paused_until = clock() + PAUSE_SECONDS
            HOT_READS.labels("away").inc()
            log.warning("hot_conversations_paused", cause=type(error).__name__)
            return None

    def _name(self, conversation: str) -> str:
        return f"{self._prefix}:hot:{hashlib.sha256(conversation.encode()).hexdigest()[:32]}"


def _opened(cipher: AESGCM, copies: Copies) -> list[bytes]:
    """The items, as SQL has them; none if a copy was made with another key."""
    known: list[bytes] = []
    begin = _PLACE.size + _NONCE_BYTES
    for sealed in copies.sealed:
        try:
            body = cipher.decrypt(sealed[_PLACE.size : begin], sealed[begin:], sealed[: _PLACE.size])
            known += _BODIES.decode(body)
        except (InvalidTag, ValueError):
            return []
    return known
