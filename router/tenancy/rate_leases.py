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
from router.core.lease_messages import LeaseGrant, LeaseKind, LeaseName, LeaseWant

log = structlog.get_logger()


RATE_SECONDS: Final = 4.0
"""How long units of a rate count as leased: twice as long as the router uses them (rate_lease.LEASE_SECONDS)."""
SLOT_SECONDS: Final = 30.0
"""How long slots count as leased: a router renews them three times in that time (slot_lease.RENEW_SECONDS)."""
ROUTER_SECONDS: Final = 15.0
"""How long a router is counted among those that share the limits after it was last heard of."""

LEASE_SCRIPT: Final = f"""
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local key, router = KEYS[1], ARGV[1]
local state, answers, keep = {{}}, {{}}, {SLOT_SECONDS}
local fields = redis.call('HGETALL', key)
for i = 1, #fields, 2 do state[fields[i]] = fields[i + 1] end
for i = 2, #ARGV, 6 do
  local kind, limit, wanted = ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
  local returned, debt, held = tonumber(ARGV[i + 3]), tonumber(ARGV[i + 4]), tonumber(ARGV[i + 5])
  local own, others, left, granted = kind .. '|' .. router, 0, 0, 0
  for field, value in pairs(state) do
    if string.sub(field, 1, #kind + 1) == kind .. '|' then
      local units, ends = string.match(value, '^(%S+) (%S+)$')
      if tonumber(ends) <= now then
        redis.call('HDEL', key, field)
      elseif field ~= own then
        others = others + tonumber(units)
      end
    end
  end
  local seconds = {RATE_SECONDS}
  if kind == '{LeaseKind.SLOTS.value}' then
    seconds = {SLOT_SECONDS}
    left = limit - held - others
    granted = math.max(0, math.min(wanted, left))
    left = left - granted
  else
    local level = tonumber(state[kind .. '.level'] or ARGV[i + 1])
    local at = tonumber(state[kind .. '.at'] or now)
    level = level + limit / 60 * math.max(0, now - at) + returned - debt
    level = math.min(level, limit - others - held)
    granted = math.max(0, math.min(wanted, math.floor(level)))
    level = level - granted
    redis.call('HSET', key, kind .. '.level', string.format('%.6f', level),
      kind .. '.at', string.format('%.6f', math.max(at, now)))
    left = math.floor(level)
    keep = math.max(keep, (limit - level) / limit * 60 + seconds)
  end
  if held + granted > 0 then
    redis.call('HSET', key, own, string.format('%.0f %.6f', held + granted, now + seconds))
  else
    redis.call('HDEL', key, own)
  end
  answers[#answers + 1] = string.format('%.0f %.0f', granted, left)
end
redis.call('PEXPIRE', key, math.ceil(keep * 1000))
return answers
"""

ROUTERS_SCRIPT: Final = f"""
local time = redis.call('TIME')
redis.call('ZADD', KEYS[1], time[1], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', time[1] - {ROUTER_SECONDS})
redis.call('EXPIRE', KEYS[1], {int(ROUTER_SECONDS)})
return redis.call('ZCARD', KEYS[1])
"""


def account_key(prefix: str, account: str) -> str:
    """The key of an account; the tag in braces keeps all of an account on one node of a cluster."""
    return f"{prefix}:limits:{{{account}}}"


def routers_key(prefix: str) -> str:
    return f"{prefix}:limits-routers"


def lease_arguments(router: str, wants: Sequence[LeaseWant]) -> list[str | int]:
    """Returns the script's arguments for the wants of one account."""
    arguments: list[str | int] = [router]
    for want in wants:
        arguments += [want.name.kind.value, want.limit, want.wanted, want.returned, want.debt, want.held]
    return arguments


def grants_of(wants: Sequence[LeaseWant], answers: Sequence[bytes]) -> list[LeaseGrant]:
    grants = []
    for want, answer in zip(wants, answers, strict=True):
        granted, remaining = map(int, answer.split())
        grants.append(LeaseGrant(want.name, granted, remaining, asked_at=want.asked_at))
    return grants


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
        except (redis.exceptions.RedisError, OSError) as error:
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
            with contextlib.suppress(redis.exceptions.RedisError, OSError):
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
