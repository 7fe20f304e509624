"""Keeps the routes of an edge or a router in step with the rollouts in the registry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection

import redis.exceptions
import structlog

from kvloom.config import KvloomConfig
from kvloom.discovery.records import RolloutRecord
from kvloom.discovery.registry import HEARTBEAT_SECONDS, TTL_SECONDS, RolloutRegistry
from kvloom.models.model_routes import ModelRoutes
from kvloom.trust.seal import Sealer

log = structlog.get_logger()


class RolloutFollower:
    """See kvloom.process.watched_files.following. Without Redis there are no rollouts."""

    def __init__(
        self,
        config: KvloomConfig,
        sealer: Sealer,
        routes: ModelRoutes,
        on_change: Callable[[Collection[RolloutRecord]], None] = lambda _: None,
    ) -> None:
        self._config = config
        self._on_change = on_change
        self._sealer = sealer
        self._routes = routes
        self._rollouts: dict[str, RolloutRecord] = {}

    async def watch(self) -> None:
        """Follow changes until cancelled. While Redis cannot be reached, what was read last holds for as long as its
        records would: after that nobody is served by a new version that may not be watched any more."""
        if not self._config.redis.url:
            return
        registry = RolloutRegistry(self._config.redis.url, self._config.redis.key_prefix, self._sealer)
        last_read = time.monotonic()
        try:
            while True:
                try:
                    async for _ in registry.watch():
                        self._follow(await registry.list_records())
                        last_read = time.monotonic()
                except (redis.exceptions.RedisError, OSError):
                    if time.monotonic() - last_read >= TTL_SECONDS:
                        self._follow({})
                    await asyncio.sleep(HEARTBEAT_SECONDS)
        finally:
            await registry.close()

    def _follow(self, rollouts: dict[str, RolloutRecord]) -> None:
        if rollouts == self._rollouts:
            return
        for name in sorted(rollouts.keys() | self._rollouts.keys()):
            rollout = rollouts.get(name)
            if rollout is None:
                log.info("rollout ended", model=name)
            elif rollout != self._rollouts.get(name):
                log.info("rollout", model=name, old=rollout.old, new=rollout.new, share=rollout.share)
        self._rollouts = rollouts
        self._routes.follow_rollouts(rollouts.values())
        self._on_change(rollouts.values())
