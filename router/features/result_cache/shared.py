"""Answers that the routers of a fabric share through Redis, encrypted with the fabric's secret.

Nothing here blocks or raises. An answer is looked up for at most `timeout_seconds`, and not at all for a while after
Redis has failed; answers that cannot be written at once wait in a bounded queue, and beyond that are not shared.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any, Final

import redis.backoff
import redis.exceptions
import structlog
from redis.asyncio.retry import Retry

from kvloom_common.discovery.redis_client import redis_client
from kvloom_common.trust.seal import Sealer, SealError

log = structlog.get_logger()

MAX_WAITING_WRITES: Final = 256
MAX_LOOKUPS: Final = 256
"""At a time; further requests do not ask."""
LOOKUP_SECONDS: Final = 0.01
"""How long a request waits for Redis: less than a prompt takes to compute."""
PAUSE_SECONDS: Final = 5.0
"""How long Redis is not asked after it has failed."""
_TIMEOUT_SECONDS: Final = 2.0
_SCAN_COUNT: Final = 1000


class SharedResultCache:
    """Call `watch` in a task, and `close` at the end."""

    def __init__(self, url: str, key_prefix: str, sealer: Sealer, timeout_seconds: float = LOOKUP_SECONDS) -> None:
        retry = Retry(redis.backoff.NoBackoff(), 0)
        self._redis = redis_client(url, timeout_seconds=_TIMEOUT_SECONDS, retry=retry)
        self._prefix = f"{key_prefix}:result"
        self._sealer = sealer
        self._timeout_seconds = timeout_seconds
        self._writes: OrderedDict[str, tuple[bytes, float]] = OrderedDict()
        self._has_writes = asyncio.Event()
        self._lookups: set[asyncio.Task[None]] = set()
        self._paused_until = 0.0

    @property
    def is_asked(self) -> bool:
        """True when a look-up makes sense now."""
        return len(self._lookups) < MAX_LOOKUPS and time.monotonic() >= self._paused_until

    def look_up(self, key: bytes, scope: str, on_found: Callable[[bytes | None], None]) -> None:
        """Calls `on_found` with the answer, or None, within the time limit. It must not raise."""
        task = asyncio.create_task(self._look_up(self._name(key, scope), on_found), name="result cache look-up")
        self._lookups.add(task)
        task.add_done_callback(self._lookups.discard)

    def store(self, key: bytes, answer: bytes, scope: str, seconds: float) -> None:
        if len(self._writes) < MAX_WAITING_WRITES:
            self._writes[self._name(key, scope)] = answer, seconds
            self._has_writes.set()

    async def watch(self) -> None:
        """Write what is to be shared, until cancelled."""
        while True:
            await self._has_writes.wait()
            self._has_writes.clear()
            writes, self._writes = self._writes, OrderedDict()
            try:
                async with self._redis.pipeline(transaction=False) as pipe:
                    for name, (answer, seconds) in writes.items():
                        pipe.set(name, self._sealer.encrypt(name, answer), px=max(1, round(seconds * 1000)))
                    await pipe.execute()
            except (redis.exceptions.RedisError, OSError) as error:
                self._pause(error)
                await asyncio.sleep(PAUSE_SECONDS)

    async def clear(self, scopes: Collection[str] | None) -> None:
        """Forget the answers of some scopes, or all. Raises RedisError, OSError."""
        self._writes.clear()
        for tag in ("*",) if scopes is None else map(_tag, scopes):
            async for name in self._redis.scan_iter(match=f"{self._prefix}:{tag}:*", count=_SCAN_COUNT):
                await self._redis.unlink(name)

    async def close(self) -> None:
        for task in self._lookups:
            task.cancel()
        await asyncio.gather(*self._lookups, return_exceptions=True)
        await self._redis.aclose()

    async def _look_up(self, name: str, on_found: Callable[[bytes | None], None]) -> None:
        answer: bytes | None = None
        try:
            async with asyncio.timeout(self._timeout_seconds):
                sealed: Any = await self._redis.get(name)
            answer = None if sealed is None else self._sealer.decrypted(name, sealed)
        except SealError as error:
            log.warning("shared_answer_ignored", cause=str(error))
        except (redis.exceptions.RedisError, OSError) as error:  # with TimeoutError
            self._pause(error)
        finally:
            on_found(answer)

    def _pause(self, error: Exception) -> None:
        self._paused_until = time.monotonic() + PAUSE_SECONDS
        log.info("shared_cache_paused", cause=repr(error)[:200])

    def _name(self, key: bytes, scope: str) -> str:
        return f"{self._prefix}:{_tag(scope)}:{key.hex()}"


def _tag(scope: str) -> str:
    """Tells scopes apart in Redis' keys, without their names."""
    return hashlib.sha256(scope.encode(errors="surrogateescape")).hexdigest()[:16]
