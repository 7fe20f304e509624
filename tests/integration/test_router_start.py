"""A router that starts while clients already wait for it, as they do at a port that routers share."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import grpc
import pytest

from kvloom.transport.grpc_errors import from_rpc_error
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import StopConditions
from kvloom.v1.router_service_pb2 import GenerateRequest, TokenIds
from kvloom_common.discovery.records import ShardRecord
from kvloom_common.process import service
from tests.fakes.fake_shard import expected_text
from tests.fakes.router_world import MODEL, TIMEOUT_SECONDS, RouterWorld

pytest_plugins = ("tests.fakes.router_fixtures",)

PROMPT = [4, 5, 6]


async def ask_before_start(world: RouterWorld) -> asyncio.Task[str]:
    """Makes a request before the router serves, and then starts the router."""
    await world.bind_router()
    stub = await world.stub()
    request = GenerateRequest(model=MODEL, token_ids=TokenIds(ids=PROMPT), stop=StopConditions(max_tokens=8))

    async def generate() -> str:
        call = stub.Generate(request, wait_for_ready=True, timeout=TIMEOUT_SECONDS)
        return "".join([delta.text async for response in call for delta in response.deltas])

    asking = asyncio.create_task(generate())
    await asyncio.sleep(0)  # The request is made now.
    world.serve_router()
    return asking


@pytest.mark.parametrize("num_dead_shards", [0, 3])
async def test_clients_that_wait_for_the_start_are_answered(
    world: RouterWorld, monkeypatch: pytest.MonkeyPatch, num_dead_shards: int
) -> None:
    """A new router finds its shards and its safety service some milliseconds after it has its port. Earlier requests
    would be rejected although nothing is wrong. Registered shards that are gone do not delay the start."""
    monkeypatch.setattr(service, "OPEN_SECONDS", 60.0)
    await world.start_safety()
    await world.start_shard("shard-0")
    for number in range(num_dead_shards):
        with socket.create_server(("127.0.0.1", 0)) as gone:
            host, port = gone.getsockname()
        await world.registry.announce(ShardRecord(f"shard-{number + 1}", f"{host}:{port}", MODEL, "gone"))
    assert await (await ask_before_start(world)) == expected_text(PROMPT, 0, 8)


async def refusal(world: RouterWorld) -> ErrorReason:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (await ask_before_start(world))
    return from_rpc_error(caught.value).reason


@pytest.mark.parametrize("registry_is_away", [False, True])
async def test_a_router_opens_at_once_if_there_is_nothing_to_wait_for(
    world: RouterWorld, monkeypatch: pytest.MonkeyPatch, registry_is_away: bool
) -> None:
    """If no shard is registered, or the registry is unreachable, perhaps for long, clients get an error at once."""
    monkeypatch.setattr(service, "OPEN_SECONDS", 60.0)
    if registry_is_away:
        with socket.create_server(("127.0.0.1", 0)) as gone:
            world.config.redis.url = "redis://{}:{}".format(*gone.getsockname())
    assert await refusal(world) == ErrorReason.ERROR_REASON_NO_SHARD_READY


@contextlib.asynccontextmanager
async def silent_shard(world: RouterWorld) -> AsyncIterator[socket.socket]:
    """Registers a shard-0 that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        await world.registry.announce(ShardRecord("shard-0", f"{host}:{port}", MODEL, "silent"))
        yield silent


async def test_a_silent_shard_is_not_waited_for_once_its_new_incarnation_is_registered(
    world: RouterWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router waits only for the shards that are registered now."""
    monkeypatch.setattr(service, "OPEN_SECONDS", 60.0)
    async with silent_shard(world) as silent:
        asking = await ask_before_start(world)
        connection, _ = await asyncio.to_thread(silent.accept)
        with connection:
            await world.start_shard("shard-0")
            assert await asking == expected_text(PROMPT, 0, 8)


async def test_a_router_does_not_wait_long_for_a_silent_shard(
    world: RouterWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard that hangs must not keep the router from starting."""
    monkeypatch.setattr(service, "OPEN_SECONDS", 0.05)
    async with silent_shard(world):
        assert await refusal(world) == ErrorReason.ERROR_REASON_NO_SHARD_READY
