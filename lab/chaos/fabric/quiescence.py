"""Checks that the fabric is idle and complete after the last answer."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import grpc
import grpc.aio

from kvloom.v1 import shard_service_pb2, shard_service_pb2_grpc
from kvloom_common.models.configured import num_configured_shards
from lab.chaos.fabric.cluster import Cluster
from tools.supervisor.readiness import num_ready_shards

_TIMEOUT_SECONDS: Final = 45.0
"""Longer than the grace period of streams whose clients left."""
_POLL_SECONDS: Final = 0.25


async def wait_for_quiescence(cluster: Cluster) -> list[str]:
    """Returns what is still wrong when the time is up. The list is empty as soon as the fabric is idle and complete."""
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while wrong := await _problems(cluster):
        if time.monotonic() > deadline:
            return [f"{_TIMEOUT_SECONDS:g} s after the last answer: {what}" for what in wrong]
        await asyncio.sleep(_POLL_SECONDS)
    return []


async def _problems(cluster: Cluster) -> list[str]:
    wrong: list[str] = []
    for name in cluster.names("shard"):
        load = await _load_of(cluster, name)
        if load is None:
            wrong.append(f"{name} does not answer")
        elif load.num_running or load.num_waiting:
            wrong.append(
                f"{name} still runs {load.num_running + load.num_waiting} sequences although all clients are done"
            )
    num_shards = num_configured_shards(cluster.config)
    wrong += [
        f"{name} does not see all {num_shards} shards"
        for name in cluster.names("router")
        if (await num_ready_shards(cluster.status(name).internal_address, cluster.trust) or 0) < num_shards
    ]
    return wrong


async def _load_of(cluster: Cluster, name: str) -> shard_service_pb2.LoadReport | None:
    async with cluster.trust.open_channel(cluster.status(name).address, "shard", name) as channel:
        stub = shard_service_pb2_grpc.ShardServiceStub(channel)
        try:
            return (await stub.GetInfo(shard_service_pb2.GetInfoRequest(), timeout=2.0)).load
        except grpc.aio.AioRpcError:
            return None
