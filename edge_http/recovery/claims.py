"""Decides which edge holds a response that was taken over from another edge, and which response an idempotency key
names.

A claim is a Redis key that only changes hands by compare-and-set. It is made before the journal of the edge that is
taken to be dead is read, and that edge checks for claims after each write. So it never shows to a client what it wrote
too late to be read.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from edge_http.recovery.journal import ResumeJournal

# The claim is idempotent, because the answer to a first attempt may have been lost.
_CLAIM: Final = """
local now = redis.call('GET', KEYS[1]) or ''
if now ~= ARGV[1] and now ~= ARGV[2] then return now end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
redis.call('SADD', KEYS[2], ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return ARGV[2]
"""
_NAME: Final = """
local now = redis.call('GET', KEYS[1])
if (now or '') ~= ARGV[1] then return now or '' end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return ARGV[2]
"""
_RELEASE: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return end
if ARGV[2] == '' then redis.call('DEL', KEYS[1]) else redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3]) end
redis.call('SREM', KEYS[2], ARGV[4])
"""


class Claim(msgspec.Struct, frozen=True):
    """Its fields are the tags of edges."""

    holder: str
    """The edge that holds the response."""
    source: str
    """The edge whose journal has the response until the holder's journal has it."""

    def encode(self) -> str:
        return f"{self.holder} {self.source}"


class KeyedResponse(msgspec.Struct, frozen=True):
    """The response that an idempotency key stands for."""

    response_id: str
    body_digest: str

    def encode(self) -> str:
        return f"{self.response_id} {self.body_digest}"


class ResumeClaims:
    """Raises redis.exceptions.RedisError when the server cannot be reached."""

    def __init__(self, journal: ResumeJournal, ttl_seconds: float) -> None:
        self._journal = journal
        self._redis = journal.redis
        self._ttl_ms = max(1, round(ttl_seconds * 1000))

    async def find(self, response_id: str) -> Claim | None:
        value: Any = await self._redis.get(self._journal.claim_key(response_id))
        return _claim(value)

    async def claim(self, response_id: str, before: Claim | None, wanted: Claim, loser: str) -> Claim | None:
        """Replace the claim `before`, and notify the edge `loser`. Returns the claim that stands now. If this raises,
        the claim may have been made or may still be made; the same call can be repeated."""
        return _claim(await self._replace(_CLAIM, response_id, before, wanted, loser))

    async def release(self, response_id: str, claim: Claim, before: Claim | None, loser: str) -> None:
        """Restore the state before `claim`."""
        await self._replace(_RELEASE, response_id, claim, before, loser)

    async def _replace(
        self, script: str, response_id: str, old: Claim | None, new: Claim | None, loser: str
    ) -> bytes | None:
        keys = self._journal.claim_key(response_id), self._journal.taken_key(loser)
        claims = (claim.encode() if claim else "" for claim in (old, new))
        result: Any = self._redis.eval(script, len(keys), *keys, *claims, self._ttl_ms, response_id)
        return await result

    async def name(
        self, tenant: str, key: str, before: KeyedResponse | None, wanted: KeyedResponse, ttl_seconds: float
    ) -> KeyedResponse:
        """Let an idempotency key stand for `wanted` if it stands for `before`. Returns the response that it stands for
        now."""
        now: bytes = await self._redis.eval(
            _NAME,
            1,
            self._journal.idempotency_key(tenant, key),
            *(before.encode() if before else "", wanted.encode(), max(1, round(ttl_seconds * 1000))),
        )
        response_id, _, body_digest = now.decode().partition(" ")
        return KeyedResponse(response_id, body_digest)


def _claim(value: bytes | None) -> Claim | None:
    if not value:
        return None
    holder, _, source = value.decode("utf-8", "replace").partition(" ")
    return Claim(holder, source)
