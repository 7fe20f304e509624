"""Drains of single shards, for the admin page: of this machine's, and of those in its registry."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Final

import grpc.aio
import redis.exceptions

from kvloom.v1.shard_service_pb2 import DrainRequest
from kvloom.v1.shard_service_pb2_grpc import ShardServiceStub
from kvloom_common.trust.fabric_trust import FabricTrust
from tools.failures import CommandError
from tools.supervisor.fleet_registry import FleetRegistry
from tools.supervisor.readiness import reachable_address
from tools.supervisor.supervised_process import ProcessStatus

CALL_SECONDS: Final = 5.0


class ShardDrains:
    def __init__(
        self,
        statuses: Callable[[], Sequence[ProcessStatus]],
        registry: FleetRegistry,
        trust: FabricTrust,
    ) -> None:
        self._statuses = statuses
        self._registry = registry
        self._trust = trust

    async def set(self, shard: str, draining: bool, deadline_seconds: float | None) -> tuple[int, int]:
        """Begin a drain, or end it. Returns how many of its sequences run and wait. Raises CommandError."""
        found = {one.name: one.address for one in self._statuses() if one.role == "shard" and one.address}
        if shard not in found:
            with contextlib.suppress(redis.exceptions.RedisError, OSError):
                found |= {name: record.address for name, record in (await self._registry.read()).shards.items()}
        if shard not in found:
            raise CommandError(f"there is no shard {shard[:128]!r}; there are: {', '.join(sorted(found))}")
        request = DrainRequest(draining=draining, deadline_seconds=deadline_seconds)
        try:
            async with self._trust.open_channel(reachable_address(found[shard]), "shard", shard) as channel:
                answer = await ShardServiceStub(channel).Drain(request, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise CommandError(f"{shard} does not answer at {found[shard]}") from error
        if answer.HasField("error"):
            raise CommandError(answer.error.message)
        return answer.num_running, answer.num_waiting
