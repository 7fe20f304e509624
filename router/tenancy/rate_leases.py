"""Asks Redis for leases of rates and slots, in the background."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import redis.asyncio.retry
import redis.backoff
import redis.exceptions
import structlog

from kvloom_common.discovery.redis_client import redis_client
from kvloom_common.process.cancellation import raise_if_cancelled
from router.core.events import LeasesGranted
from router.core.lease_messages import LeaseName, LeaseWant
from router.tenancy.lease_script import (
    LEASE_SCRIPT,
    ROUTERS_SCRIPT,
    account_key,
    grants_of,
    lease_arguments,
    routers_key,
)

log = structlog.get_logger()

TIMEOUT_SECONDS: Final = 0.5
"""How long Redis may take: less than the core holds a request (limiter.HOLD_SECONDS)."""
HEARTBEAT_SECONDS: Final = 5.0
MAX_BATCH: Final = 1024
"""Accounts in one pipeline."""
_SHA: Final = hashlib.sha1(LEASE_SCRIPT.encode(), usedforsecurity=False).hexdigest()


class RateLeases:
    """`ask` never blocks: all that was asked for meanwhile goes to Redis in one pipeline, one at a time. Every want is
    answered."""

    def __init__(self, url: str, key_prefix: str, router: str, on_answer: Callable[[LeasesGranted], None]) -> None:
        """`router`: a name that no other process has."""
        retry = redis.asyncio.retry.Retry(redis.backoff.NoBackoff(), 0)
        self._redis = redis_client(url, timeout_seconds=TIMEOUT_SECONDS, retry=retry)
        self._prefix = key_prefix
        self._router = router
        self._on_answer = on_answer
        self._wants: dict[LeaseName, LeaseWant] = {}
        self._wake = asyncio.Event()
        self._num_routers = 1
        self.is_up = True
        """True when Redis answered last."""

    def ask(self, wants: Sequence[LeaseWant]) -> None:
        self._wants.update((want.name, want) for want in wants)
        self._wake.set()

    async def run(self) -> None:
        """Runs until it is cancelled."""
        heartbeat = asyncio.create_task(self._count_routers(), name="limits' heartbeat")
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._wants:
                    await self._exchange()
        finally:
            heartbeat.cancel()
            await asyncio.gather(heartbeat, return_exceptions=True)
            await self._redis.aclose()

    async def _exchange(self) -> None:
        by_account: dict[str, list[LeaseWant]] = {}
        for name in list(self._wants):
            if name.account in by_account or len(by_account) < MAX_BATCH:
                by_account.setdefault(name.account, []).append(self._wants.pop(name))
        try:
            answers = await self._call(by_account)
        except (redis.exceptions.RedisError, OSError, TimeoutError) as error:
            raise_if_cancelled()
            self._note(is_up=False, cause=type(error).__name__)
            names = [want.name for wants in by_account.values() for want in wants]
            self._on_answer(LeasesGranted(failed=names, num_routers=self._num_routers))
            return
        self._note(is_up=True)
        grants = [
            grant
            for wants, answer in zip(by_account.values(), answers, strict=True)
            for grant in grants_of(wants, answer)
        ]
        self._on_answer(LeasesGranted(grants, num_routers=self._num_routers))

    async def _call(self, by_account: dict[str, list[LeaseWant]]) -> list[Any]:
        """Raises RedisError."""
        try:
            return await self._execute(by_account)
        except redis.exceptions.NoScriptError:
            await self._redis.script_load(LEASE_SCRIPT)
            return await self._execute(by_account)

    async def _execute(self, by_account: dict[str, list[LeaseWant]]) -> list[Any]:
        """If Redis does not know the script, nothing was executed."""
        pipeline = self._redis.pipeline(transaction=False)
        for account, wants in by_account.items():
            arguments = lease_arguments(self._router, wants)
            pipeline.evalsha(_SHA, 1, account_key(self._prefix, account), *arguments)
        return await pipeline.execute()

    async def _count_routers(self) -> None:
        while True:
            with contextlib.suppress(redis.exceptions.RedisError, OSError, TimeoutError):
                found = await self._redis.eval(ROUTERS_SCRIPT, 1, routers_key(self._prefix), self._router)
                self._num_routers = max(1, int(found))
            raise_if_cancelled()
            await asyncio.sleep(HEARTBEAT_SECONDS)

    def _note(self, *, is_up: bool, cause: str = "") -> None:
        if is_up != self.is_up:
            self.is_up = is_up
            if is_up:
                log.info("limit_sharing_resumed")
            else:
                log.warning("limit_sharing_failed", cause=cause)
