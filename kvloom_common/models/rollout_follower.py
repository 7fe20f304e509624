"""Keeps the routes of an edge or a router in step with the rollouts in the registry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from typing import Any, Protocol

import redis.exceptions
import structlog

from kvloom_common.config import KvloomConfig
from kvloom_common.discovery.records import RolloutRecord
from kvloom_common.discovery.registry import HEARTBEAT_SECONDS, TTL_SECONDS, RolloutRegistry
from kvloom_common.models.model_routes import ModelRoutes
from kvloom_common.trust.seal import Sealer

log = structlog.get_logger()


class RolloutSource(Protocol):
    """Where the rollouts are read. All methods raise RedisError or OSError while it cannot be reached; see
    kvloom_common.discovery.registry.Registry."""

    def watch(self) -> AsyncIterator[None]: ...

    async def list_records(self) -> Mapping[str, RolloutRecord]: ...


class RolloutFollower:
    """See kvloom_common.process.watched_files.following. Without Redis there are no rollouts."""

    def __init__(
        self,
        config: KvloomConfig,
        sealer: Sealer,
        routes: ModelRoutes,
        on_change: Callable[[Collection[RolloutRecord]], None] = lambda _: None,
        report: Callable[..., Any] | None = None,
    ) -> None:
        """`report` is called with an event for the log and its fields; None: it is logged."""
        self._config = config
        self._on_change = on_change
        self._report = report or log.info  # as a default value it would be the logger of the import, unconfigured
        self._sealer = sealer
        self._routes = routes
        self._rollouts: Mapping[str, RolloutRecord] = {}

    async def watch(self) -> None:
        """Follow changes until cancelled."""
        if not self._config.redis.url:
            return
        registry = RolloutRegistry(self._config.redis.url, self._config.redis.key_prefix, self._sealer)
        try:
            await self.follow(registry)
        finally:
            await registry.close()

    async def follow(self, source: RolloutSource) -> None:
        """Follow what this source has, until cancelled. While it cannot be reached, what was read last holds for as
        long as its records would: after that nobody is served by a new version that may not be watched any more."""
        clock = asyncio.get_running_loop()
        last_read = clock.time()
        while True:
            try:
                async for _ in source.watch():
                    self._follow(await source.list_records())
                    last_read = clock.time()
            except (redis.exceptions.RedisError, OSError):
                if clock.time() - last_read >= TTL_SECONDS:
                    self._follow({})
                await asyncio.sleep(HEARTBEAT_SECONDS)

    def _follow(self, rollouts: Mapping[str, RolloutRecord]) -> None:
        if rollouts == self._rollouts:
            return
        for name in sorted(rollouts.keys() | self._rollouts.keys()):
            rollout = rollouts.get(name)
            if rollout is None:
                self._report("rollout_ended", model=name)
            elif rollout != self._rollouts.get(name):
                self._report("rollout_share_changed", model=name, old=rollout.old, new=rollout.new, share=rollout.share)
        self._rollouts = rollouts
        self._routes.follow_rollouts(rollouts.values())
        self._on_change(rollouts.values())
