"""Tells the edges and routers of the fleet how the requests for a model are shared, as long as a rollout is watched."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

import msgspec
import redis.exceptions

from kvloom_common.discovery.records import NameTakenError, RolloutRecord
from kvloom_common.discovery.registry import HEARTBEAT_SECONDS, TTL_SECONDS
from tools.failures import CommandError


class Shares(Protocol):
    """How a rollout sets the share of the new version."""

    async def announce(self, share: float) -> None:
        """From now on the share is this one, until `end`. Raises CommandError if nobody can be told."""
        ...

    @property
    def is_lost(self) -> bool:
        """True when nobody follows the announcement any more, because it could not be renewed."""
        ...

    async def end(self, *, at_once: bool) -> None:
        """Announce it no longer. Not `at_once`: it holds until it expires."""
        ...


class Announcements(Protocol):
    """Where the record is announced. All methods raise RedisError or OSError while it cannot be reached; see
    kvloom_common.discovery.registry.Registry."""

    async def announce(self, record: RolloutRecord) -> None:
        """Raises NameTakenError if another supervisor rolls out the model."""
        ...

    async def withdraw(self, key: str, incarnation_id: str = "") -> None: ...

    async def close(self) -> None: ...


class RolloutAnnouncement:
    """The record in the registry, which is renewed until `end`."""

    def __init__(self, registry: Announcements, record: RolloutRecord) -> None:
        """`record`: the first one; its share is set by `announce`."""
        self._registry = registry
        self._record = record
        self._renewing: asyncio.Task[None] | None = None
        self._renewed_at = 0.0
        """When the latest announcement was sent that has arrived."""

    async def announce(self, share: float) -> None:
        self._record = msgspec.structs.replace(self._record, share=share)
        sent_at = asyncio.get_running_loop().time()
        try:
            await self._registry.announce(self._record)
        except NameTakenError as error:
            raise CommandError(f"{self._record.name} is being rolled out by {error.holder.address}") from error
        except (redis.exceptions.RedisError, OSError) as error:
            raise CommandError(f"the registry cannot be reached: {error or type(error).__name__}") from error
        self._renewed_at = sent_at
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew(), name=f"rollout of {self._record.new}")

    async def _renew(self) -> None:
        """Until the announcement is lost, for example because this process was suspended. Edges and routers have gone
        back to the old version then, and their sessions must not come and go."""
        clock = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            if self.is_lost:
                return
            sent_at = clock.time()
            with contextlib.suppress(redis.exceptions.RedisError, OSError, NameTakenError):
                await self._registry.announce(self._record)
                self._renewed_at = sent_at

    @property
    def is_lost(self) -> bool:
        return asyncio.get_running_loop().time() - self._renewed_at > TTL_SECONDS

    async def end(self, *, at_once: bool) -> None:
        if self._renewing is not None:
            # The Redis client loses a cancellation that comes while its connection breaks.
            while not self._renewing.done():
                self._renewing.cancel()
                await asyncio.wait({self._renewing}, timeout=0.2)
        if at_once:
            with contextlib.suppress(redis.exceptions.RedisError, OSError):
                await self._registry.withdraw(self._record.key, self._record.incarnation_id)
        await self._registry.close()
