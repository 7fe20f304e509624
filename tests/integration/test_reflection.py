"""gRPC reflection describes the services to anyone who can connect; operators may switch it off."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2

from tests.fakes.router_world import RouterWorld
from tests.fakes.shard_world import shard_world, sim_config

TIMEOUT_SECONDS = 20.0


async def has_reflection(address: str) -> bool:
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(TIMEOUT_SECONDS):
        await channel.channel_ready()
        ask = channel.unary_unary(  # as if it were unary, since a stream may break before it has been refused
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            reflection_pb2.ServerReflectionRequest.SerializeToString,
            reflection_pb2.ServerReflectionResponse.FromString,
        )
        try:
            return "kvloom.v1" in str(await ask(reflection_pb2.ServerReflectionRequest(list_services="")))
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            return False


@pytest.mark.parametrize("wanted", [True, False])
async def test_router(wanted: bool, redis_url: str) -> None:
    world = RouterWorld(redis_url)
    world.config.fabric.reflection = wanted
    try:
        await world.start_router()
        assert await has_reflection(world.address) is wanted
    finally:
        await world.close()


@pytest.mark.parametrize("wanted", [True, False])
async def test_shard(wanted: bool) -> None:
    config = sim_config()
    config.fabric.reflection = wanted
    async with shard_world(config) as world:
        assert await has_reflection(world.address) is wanted


async def test_safety_service(tmp_path: Path) -> None:
    """Its own tests show that reflection is on by default."""
    config = tmp_path / "kvloom.json"
    config.write_text(json.dumps({"fabric": {"reflection": False}}))
    pipe = asyncio.subprocess.PIPE
    arguments = ("-m", "safety_svc", "--config", str(config), "--port", "0")
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=pipe, stderr=pipe)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(TIMEOUT_SECONDS):
            ready = json.loads(await process.stdout.readline())
        assert not await has_reflection(ready["address"])
    finally:
        process.terminate()
        await process.communicate()
