"""The registry of rollouts. Only Redis is simulated: what is written there, and what follows, is the product's."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, TypeVar

import redis.exceptions

from kvloom_common.discovery.records import NameTakenError, RolloutRecord, may_replace
from kvloom_common.discovery.registry import POLL_SECONDS, TTL_SECONDS
from lab.dst.environment import Environment
from lab.dst.nodes.registry import SimRegistry
from lab.dst.virtual_loop import VirtualLoop

_T = TypeVar("_T")
_LOST_MESSAGE: Final = 0.15
"""How often a process misses that something was published. It finds it when it polls."""


class RolloutStore:
    """The part of Redis that has rollouts. Its random numbers are its own."""

    def __init__(self, env: Environment, registry: SimRegistry) -> None:
        """`registry`: that of the shards. Both are reached, or neither."""
        self._env = env
        self.rng = random.Random(f"{env.scenario.seed} rollout registry")
        self.registry = registry
        self._records: dict[str, tuple[RolloutRecord, float]] = {}
        """With the time at which each expires."""
        self._announced: dict[str, str] = {}
        """By name: the rollout that was announced last."""
        self._clients: list[RolloutClient] = []

    def add(self, client: RolloutClient) -> None:
        self._clients = [one for one in self._clients if one.loop.is_alive] + [client]

    def announce(self, record: RolloutRecord) -> None:
        """Announces a rollout as Registry.announce does. Raises NameTakenError."""
        now = self._env.timeline.now
        before, expires_at = self._records.get(record.key, (None, 0.0))
        live = before if expires_at > now else None
        if live is not None:
            was_announced = self._announced.get(record.key) == record.incarnation_id
            if not may_replace(live, record, was_announced=was_announced):
                raise NameTakenError(record.name, live)
        gap = now - expires_at if before is not None and before.incarnation_id == record.incarnation_id else 0.0
        self._announced[record.key] = record.incarnation_id
        self._records[record.key] = (record, now + TTL_SECONDS)
        self._env.checks.on_announced(record, now, max(0.0, gap))
        if record != live:
            self._publish()

    def withdraw(self, key: str, incarnation_id: str) -> None:
        record = self.list_records().get(key)
        if record is not None and record.incarnation_id == incarnation_id:
            del self._records[key]
            self._publish()

    def list_records(self) -> dict[str, RolloutRecord]:
        now = self._env.timeline.now
        return {key: record for key, (record, expires_at) in sorted(self._records.items()) if expires_at > now}

    def _publish(self) -> None:
        for client in self._clients:
            if client.is_connected and self.rng.random() >= _LOST_MESSAGE:
                self._env.timeline.after(self._env.scenario.latency_seconds * self.rng.random(), client.wake)


class RolloutClient:
    """A process's connection to it: see kvloom_common.discovery.registry.RolloutRegistry."""

    def __init__(self, env: Environment, store: RolloutStore, loop: VirtualLoop) -> None:
        self._env = env
        self._store = store
        self.loop = loop
        self._num_cuts = 0
        self._reconnected_at = env.timeline.now
        self._changed: asyncio.Event | None = None
        store.add(self)

    def cut_off(self, seconds: float) -> None:
        """This process alone cannot reach the registry for a while."""
        self._num_cuts += 1
        self._env.timeline.after(seconds, self._reconnect)

    def _reconnect(self) -> None:
        self._num_cuts -= 1
        self._reconnected_at = self._env.timeline.now

    @property
    def is_connected(self) -> bool:
        return self.loop.is_alive and not self._num_cuts and self._store.registry.is_reachable

    @property
    def connected_since(self) -> float | None:
        return max(self._reconnected_at, self._store.registry.reachable_since) if self.is_connected else None

    def wake(self) -> None:
        """Something was published."""
        if self._changed is not None:
            self._changed.set()

    async def announce(self, record: RolloutRecord) -> None:
        await self._call(self._store.announce, record)

    async def withdraw(self, key: str, incarnation_id: str = "") -> None:
        await self._call(self._store.withdraw, key, incarnation_id)

    async def list_records(self) -> dict[str, RolloutRecord]:
        return await self._call(self._store.list_records)

    async def watch(self) -> AsyncIterator[None]:
        self._changed = asyncio.Event()
        self._check()
        while True:
            yield
            try:
                async with asyncio.timeout(POLL_SECONDS * (0.1 + self._store.rng.random())):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            self._check()

    async def close(self) -> None:
        pass

    async def _call(self, command: Callable[..., _T], *args: Any) -> _T:
        """Run a command. It arrives although this process may hang meanwhile. Raises RedisError."""
        self._check()
        answer = self.loop.create_future()
        self._env.timeline.after(self._env.scenario.latency_seconds, self._answer, answer, command, args)
        return await answer

    def _answer(self, answer: asyncio.Future[_T], command: Callable[..., _T], args: tuple[Any, ...]) -> None:
        if answer.cancelled():
            return
        try:
            self._check()
            result = command(*args)
        except (redis.exceptions.RedisError, NameTakenError) as error:
            answer.set_exception(error)
        else:
            answer.set_result(result)

    def _check(self) -> None:
        if not self.is_connected:
            raise redis.exceptions.ConnectionError("the registry cannot be reached")
