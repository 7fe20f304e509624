"""What one caller, one address, and all of them together can make a router hold over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import pytest

from kvloom.errors import KvloomError
from kvloom.transport.grpc_errors import error_from_peer
from kvloom.v1 import router_service_pb2 as pb
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import StopConditions
from kvloom.v1.router_service_pb2_grpc import RouterServiceStub
from kvloom_common.limits.memory_watch import LARGE_BYTES, MemoryLevel
from router.rpc.limits import RpcSettings
from tests.fakes.fake_shard import FakeShard
from tests.fakes.router_world import MODEL, TIMEOUT_SECONDS, RouterWorld
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)

NEW_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


def caller(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {name}"),)


def request(text: str = "the fox", **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(model=MODEL, text=text, stop=StopConditions(max_tokens=1000), **fields)


async def start(world: RouterWorld, **limits: int) -> FakeShard:
    world.config.callers = RpcSettings(**limits)
    shard = await world.start_shard("shard-0", step_seconds=0.01)
    await world.start_router()
    await world.wait_for_shards(await world.connect(), 1)
    return shard


async def begin(stub: RouterServiceStub, name: str, text: str = "the fox") -> Any:
    """A stream that has its first token."""
    call = stub.Generate(request(text), metadata=caller(name), timeout=60)
    assert await call.read() is not grpc.aio.EOF
    return call


async def read_to_its_end(call: Any) -> None:
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while await call.read() is not grpc.aio.EOF:
            pass


async def refusal(call: Any) -> KvloomError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_to_its_end(call)
    error = error_from_peer(caught.value)
    assert error is not None
    return error


async def test_streams_of_one_caller_leave_room_for_others(world: RouterWorld) -> None:
    """5,000 streams of one caller took a third of all places, and four such callers all of them."""
    await start(world, max_concurrent_requests=3)
    stub = await world.stub()
    held = [await begin(stub, "one") for _ in range(3)]
    error = await refusal(stub.Generate(request(), metadata=caller("one")))
    assert error.reason == ErrorReason.ERROR_REASON_RATE_LIMITED
    assert error.retry_after_seconds > 0
    assert "callers.max_concurrent_requests" in error.message
    await begin(stub, "two")
    held[0].cancel()
    limits = world.server._parts.limits
    await eventually(lambda: limits.num_open == 3, "the place of a cancelled stream")
    await begin(stub, "one")


async def test_connections_with_rpcs_of_one_address(world: RouterWorld) -> None:
    """One address could have all connections that a router can serve."""
    await start(world, max_connections_per_address=2)
    world.server._sweep.ports.clear()  # it would close the connection, possibly before the refusal
    async with contextlib.AsyncExitStack() as stack:
        stubs: list[RouterServiceStub] = []
        for _ in range(3):
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(world.address, NEW_CONNECTION))
            stubs.append(RouterServiceStub(channel))
        held = [await begin(stub, "one") for stub in stubs[:2]]
        error = await refusal(stubs[2].Generate(request(), metadata=caller("two")))
        assert error.reason == ErrorReason.ERROR_REASON_RATE_LIMITED
        assert "callers.max_connections_per_address" in error.message
        held[0].cancel()
        limits = world.server._parts.limits
        await eventually(lambda: limits.num_open == 1, "the end of a cancelled stream")
        await begin(stubs[2], "two")


async def test_idle_connections_of_one_address_are_closed(world: RouterWorld) -> None:
    """gRPC accepts connections by itself: those without an RPC were counted nowhere."""
    await start(world, max_connections_per_address=30)
    host, _, port = world.address.rpartition(":")
    connections = [await asyncio.open_connection(host, int(port)) for _ in range(40)]
    world.server._sweep.sweep()
    reads = [asyncio.create_task(reader.read()) for reader, _ in connections]
    await eventually(lambda: sum(read.done() for read in reads) >= 11, "the end of the latest connections")
    assert not any(read.done() for read in reads[:10])
    other, writer = await asyncio.open_connection(host, int(port), local_addr=("127.0.0.2", 0))
    world.server._sweep.sweep()
    assert await other.read(9)  # the server's settings: it is served
    for _, open_writer in (*connections, (None, writer)):
        open_writer.close()
    await asyncio.gather(*reads, return_exceptions=True)


async def test_all_connections_of_a_router(world: RouterWorld) -> None:
    """Each connection takes a descriptor and some 100 kB."""
    await start(world, max_connections=4)
    host, _, port = world.address.rpartition(":")
    connections = [await asyncio.open_connection(host, int(port)) for _ in range(8)]
    heads = await asyncio.gather(*(reader.read(9) for reader, _ in connections), return_exceptions=True)
    assert sum(isinstance(head, bytes) and len(head) == 9 for head in heads) <= 4
    for _, writer in connections:
        writer.close()


async def test_bytes_of_all_requests(world: RouterWorld) -> None:
    """Requests are held until their answers end: thousands of megabytes each would fill the process."""
    await start(world, max_pending_request_bytes=4096, max_message_bytes=1024)
    stub = await world.stub()
    text = "x" * 1500
    await begin(stub, "one", text)
    error = await refusal(stub.Generate(request(text), metadata=caller("one")))
    assert error.reason == ErrorReason.ERROR_REASON_RATE_LIMITED
    await begin(stub, "two", text)
    error = await refusal(stub.Generate(request(text), metadata=caller("three")))
    assert error.reason == ErrorReason.ERROR_REASON_OVERLOADED
    await begin(stub, "three")


async def test_requests_that_do_not_arrive_give_way(world: RouterWorld) -> None:
    """Each request that is being received may become as large as a message can be."""
    await start(world, max_pending_request_bytes=4 * 2**20, max_message_bytes=2**20)
    async with grpc.aio.insecure_channel(world.address, NEW_CONNECTION) as channel:
        method = channel.stream_stream("/kvloom.v1.RouterService/Generate")
        silent = [method(metadata=caller("attacker")) for _ in range(4)]
        receipts = world.server._parts.limits._receipts
        await eventually(lambda: receipts.num_receipts == 4, "four requests that do not arrive")
        await asyncio.sleep(0.3)  # sleep: the time in which small messages arrive
        stub = await world.stub()
        assert (await stub.ListModels(pb.ListModelsRequest(), metadata=caller("two"), timeout=TIMEOUT_SECONDS)).models
        await eventually(lambda: any(call.done() for call in silent), "the end of one of the attacker's")
        (ended,) = [call for call in silent if call.done()]
        assert (await refusal(ended)).reason == ErrorReason.ERROR_REASON_OVERLOADED


async def test_a_router_that_is_short_of_memory(world: RouterWorld) -> None:
    """It refuses large prompts, then all, and continues what runs."""
    world.config.router.max_prompt_tokens = 200_000
    await start(world)
    stub, link = await world.stub(), await world.connect()
    running = await begin(stub, "one")
    world.server._on_memory_level(MemoryLevel.HIGH)
    await begin(stub, "one")
    large = "the fox " * LARGE_BYTES
    error = await refusal(stub.Generate(request(large), metadata=caller("one")))
    assert error.reason == ErrorReason.ERROR_REASON_OVERLOADED
    answer = await world.ask(link, [1] * 20_000, 3)
    assert answer.finish.error.reason == ErrorReason.ERROR_REASON_OVERLOADED
    world.server._on_memory_level(MemoryLevel.FULL)
    error = await refusal(stub.Generate(request(), metadata=caller("two")))
    assert error.reason == ErrorReason.ERROR_REASON_OVERLOADED
    answer = await world.ask(link, [1] * 20, 3)
    assert answer.finish.error.reason == ErrorReason.ERROR_REASON_OVERLOADED
    assert await running.read() is not grpc.aio.EOF
    world.server._on_memory_level(MemoryLevel.NORMAL)
    await begin(stub, "two")
    assert len((await world.ask(link, [1] * 20, 3)).token_ids[0]) == 3
