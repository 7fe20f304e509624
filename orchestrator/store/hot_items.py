"""Copies of the items of conversations in Redis, so that a turn reads from SQL only what is new since the last one.

SQL says who may read a conversation, and has its key, with which copies are encrypted and by whose digest they are
found. Under one key items are only appended: when one is deleted the key is, and so are all keys of what is deleted or
erased. No copy can then be read any more, wherever it is. A copy covers the items between two positions, so that copies
that are lost, or added twice, cost a read and nothing else."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import redis.asyncio.retry
import redis.backoff
import redis.exceptions
import sqlalchemy as sa
import structlog
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from sqlalchemy.ext.asyncio import AsyncConnection

from kvloom_common.config import RedisConfig
from kvloom_common.database.database import Database
from kvloom_common.discovery.redis_client import redis_client
from orchestrator.database.schema import items
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
_BEFORE_FIRST: Final = -1


class _Copy(msgspec.Struct, array_like=True):
    """The items, as SQL has them, that follow the one at `after`. The last one is at `last`."""

    after: int
    last: int
    bodies: list[bytes]


_COPY: Final = msgspec.msgpack.Decoder(_Copy)


class HotRead(NamedTuple):
    """The items that were read of a conversation, and those of them that have no copy yet."""

    conversation: str
    bodies: list[bytes]
    """The JSON of all items, in order."""
    key: bytes | None
    """None: the conversation has none yet, and no copies."""
    new: _Copy | None
    """The copy that is to be added; None: nothing was new."""
    replaces: bool
    """The new copy stands for all."""


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

    async def read(self, connection: AsyncConnection, tenant: str, conversation: str) -> HotRead:
        """All items of a conversation of which the caller's transaction has found that the tenant has it."""
        key = next(iter(await hot_keys.of(connection, [conversation])), None)
        copies = [] if key is None else await self._copies(key)
        known = [body for copy in copies for body in copy.bodies]
        last = copies[-1].last if copies else _BEFORE_FIRST
        rows = await _rows_from(connection, conversation, last)
        if known:
            # A database that was restored from a backup may have gone another way since.
            if rows and rows[0].position == last and bytes(rows[0].body) == known[-1]:
                rows = rows[1:]
            else:
                known, copies, last = [], [], _BEFORE_FIRST
                rows = await _rows_from(connection, conversation, last)
        HOT_READS.labels("copy" if known else "none").inc()
        new, replaces = None, not copies or len(copies) >= MAX_COPIES
        tail = [bytes(row.body) for row in rows]
        if rows:
            every = [*known, *tail] if replaces else tail
            new = _Copy(_BEFORE_FIRST if replaces else last, rows[-1].position, every)
        seal = seal_of(connection)
        bodies = [seal.opened(tenant, body) for body in (*known, *tail)]
        return HotRead(conversation, bodies, key, new, replaces)

    async def note(self, database: Database, read: HotRead) -> None:
        """Copies what was new in a read, after its transaction."""
        if read.key is None:
            key = AESGCM.generate_key(bit_length=256)
            await database.uninterrupted(hot_keys.give(database, read.conversation, key))
        elif read.new is not None and sum(map(len, read.new.bodies)) <= MAX_BYTES:
            nonce = os.urandom(_NONCE_BYTES)
            sealed = nonce + AESGCM(read.key).encrypt(nonce, msgspec.msgpack.encode(read.new), None)
            name = self._name(read.key)
            async with self._redis.pipeline(transaction=True) as pipe:
                if read.replaces:
                    pipe.delete(name)
                pipe.rpush(name, sealed)
                pipe.expire(name, self._kept_seconds)
                await self._asked(pipe.execute())

    async def forget(self, keys: Collection[bytes]) -> None:
        """Deletes copies that nobody can read any more, if Redis is there."""
        if keys:
            await self._asked(self._redis.delete(*map(self._name, keys)))

    async def _copies(self, key: bytes) -> Sequence[_Copy]:
        """The copies under a key that follow one another from the first item on."""
        found: list[_Copy] = []
        last, cipher = _BEFORE_FIRST, AESGCM(key)
        for sealed in await self._asked(self._redis.lrange(self._name(key), 0, -1)) or ():
            try:
                copy = _COPY.decode(cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], None))
            except (InvalidTag, ValueError):  # somebody else has written there
                return []
            if copy.after == last:
                found.append(copy)
                last = copy.last
        return found

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

    def _name(self, key: bytes) -> str:
        return f"{self._prefix}:hot:{hashlib.sha256(key).hexdigest()[:32]}"


async def _rows_from(connection: AsyncConnection, conversation: str, first: int) -> Sequence[Any]:
    wanted = sa.select(items.c.position, items.c.body).where(items.c.parent == conversation, items.c.position >= first)
    return (await connection.execute(wanted.order_by(items.c.position))).all()
