"""The one script that leases rates and slots, for one account at once: it is atomic, and uses the clock of Redis.

An account is one hash. Per kind of limit it has the bucket (`KIND.level`, `KIND.at`; slots have none) and for each
router what it has leased (`KIND|ROUTER` = "units until"). Bucket and leases together never exceed the limit, so routers
together never admit more than one bucket would. What a router does not renew is free again after a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from router.core.lease_messages import LeaseGrant, LeaseKind, LeaseWant

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
