"""Malformed and compressed gRPC messages, against the real servers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from kvloom.transport.grpc_errors import error_from_peer
from kvloom.v1.safety_service_pb2_grpc import add_SafetyServiceServicer_to_server
from kvloom_common.process.service import SERVER_OPTIONS, bind
from kvloom_common.transport.checked_server import CheckedServer
from safety_svc.policy_file import PolicyFile
from safety_svc.server import SafetyServicer
from tests.fakes.router_world import RouterWorld
from tests.fakes.shard_world import shard_world

pytest_plugins = ("tests.fakes.router_fixtures",)

TIMEOUT_SECONDS = 20.0
MALFORMED = b"\xff\xff\xff"


@contextlib.asynccontextmanager
async def safety_address() -> AsyncIterator[str]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_SafetyServiceServicer_to_server(SafetyServicer(PolicyFile("")), CheckedServer(server))
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


@pytest.fixture
async def addresses(world: RouterWorld) -> AsyncIterator[dict[str, str]]:
    await world.start_shard("shard-0")
    await world.start_router()
    async with shard_world() as shard, safety_address() as safety:
        yield {"Router": world.address, "Shard": shard.address, "Safety": safety}


@pytest.mark.parametrize(
    ("service", "method", "is_stream"),
    [
        ("Router", "Generate", False),
        ("Router", "Cancel", False),
        ("Router", "Plan", False),
        ("Router", "Connect", True),
        ("Shard", "Drain", False),
        ("Shard", "Connect", True),
        ("Safety", "Classify", False),
        ("Safety", "Screen", True),
        ("Router", "/grpc.health.v1.Health/Check", False),
        ("Router", "/grpc.health.v1.Health/Watch", False),
        ("Shard", "/grpc.health.v1.Health/Check", False),
        ("Router", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", True),
    ],
)
async def test_a_malformed_message_is_the_callers_error(
    addresses: dict[str, str], service: str, method: str, is_stream: bool
) -> None:
    """It was UNKNOWN with the name of a Python class: callers retried, and operators looked for a bug of ours."""
    async with grpc.aio.insecure_channel(addresses[service]) as channel:
        path = f"/kvloom.v1.{service}Service/{method}" if method[0] != "/" else method
        if is_stream:
            call = channel.stream_stream(path)()
            await call.write(MALFORMED)
        else:
            call = channel.unary_stream(path)(MALFORMED)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _read_to_its_end(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    error = error_from_peer(caught.value)
    assert error is not None
    assert "malformed" in error.message


async def _read_to_its_end(call: Any) -> None:
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while await call.read() is not grpc.aio.EOF:
            pass


async def test_compressed_messages_are_refused_before_they_are_inflated(addresses: dict[str, str]) -> None:
    """16 of 64 kB each made a router take a gigabyte, which it kept."""
    options = [("grpc.max_send_message_length", -1)]
    zeros = b"\x0a" + bytes(60 * 2**20)
    for address in addresses.values():
        async with grpc.aio.insecure_channel(address, options, grpc.Compression.Gzip) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/kvloom.v1.RouterService/Cancel")(zeros, timeout=60)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
