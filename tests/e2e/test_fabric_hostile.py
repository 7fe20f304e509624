"""Hostile clients on real sockets: each gets the right error, costs bounded memory, and disturbs no other client."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import psutil
import pytest

from kvloom.transport.grpc_errors import from_rpc_error
from kvloom.v1 import router_service_pb2, router_service_pb2_grpc
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.text.tokenizer import ChatMessage, ModelTokenizer
from shard_server.engines.sim_engine import expected_token_id
from tests.e2e import hostile
from tests.e2e.conftest import MAX_CONNECTIONS
from tests.e2e.fabric import RunningFabric

pytestmark = pytest.mark.xdist_group("strict")

MODEL = "smollm2-135m-instruct"
MAX_GROWTH_BYTES = 96 * 2**20
"""Of one process, over all attacks of its kind: caches and allocators settle, nothing is kept per attack."""
NUM_ROUNDS = 2
"""Of attacks that come again and again; in the long run there are ten."""


@pytest.fixture
def fabric(strict_fabric: RunningFabric) -> RunningFabric:
    return strict_fabric


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> ModelTokenizer:
    return ModelTokenizer.load(model_dir)


def rss_bytes(fabric: RunningFabric, role: str) -> int:
    return sum(psutil.Process(process["pid"]).memory_info().rss for process in fabric.processes(role))


class Healthy:
    """A client that behaves, while others do not: one answer after another, each compared with what it must be."""

    def __init__(self, fabric: RunningFabric, tokenizer: ModelTokenizer) -> None:
        self._url = fabric.http_url
        self._tokenizer = tokenizer
        self.num_answers = 0
        self.answered = asyncio.Event()
        self.stop = False

    async def run(self) -> None:
        # Its connection is open before the attack begins, and an open connection is kept.
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
            while not self.stop or not self.num_answers:
                await self._one(http, seed=self.num_answers)
                self.num_answers += 1
                self.answered.set()

    async def _one(self, http: aiohttp.ClientSession, seed: int) -> None:
        prompt = f"healthy {seed}"
        ids, _ = await self._tokenizer.encode_chat([ChatMessage("user", prompt)])
        body = {"model": MODEL, "stream": True, "max_tokens": 20, "seed": seed}
        body["messages"] = [{"role": "user", "content": prompt}]
        text = ""
        async with http.post(f"{self._url}/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event: dict[str, Any] = json.loads(line[6:])
                    assert "error" not in event, event
                    text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        assert text == self._tokenizer.decode([expected_token_id(ids, seed, i) for i in range(20)])


@contextlib.asynccontextmanager
async def healthy_stream(fabric: RunningFabric, tokenizer: ModelTokenizer) -> AsyncIterator[None]:
    """Runs beside the attack; its first answer has come before that begins."""
    healthy = Healthy(fabric, tokenizer)
    task = asyncio.create_task(healthy.run())
    answered = asyncio.create_task(healthy.answered.wait())
    await asyncio.wait((task, answered), timeout=60, return_when=asyncio.FIRST_COMPLETED)
    answered.cancel()
    yield
    healthy.stop = True
    async with asyncio.timeout(60):
        await task
    assert healthy.num_answers >= 1


ATTACKS: list[Callable[[hostile.Address], Awaitable[None]]] = [
    hostile.slow_headers,
    hostile.silent_connections,
    hostile.slow_bodies,
    hostile.half_open_streams,
    hostile.large_bodies,
    hostile.many_large_bodies,
    hostile.large_values,
    hostile.deep_json,
    hostile.invalid_text,
    hostile.header_floods,
    hostile.pipelined_garbage,
    hostile.chunked_abuse,
    hostile.length_lies,
]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
async def test_the_edge_under(fabric: RunningFabric, tokenizer: ModelTokenizer, attack: Any) -> None:
    """The attacker is told what is wrong, its neighbours notice nothing, and nothing is left of it in memory."""
    host, port = fabric.http_url.removeprefix("http://").split(":")
    address = (host, int(port))
    before = rss_bytes(fabric, "edge")
    async with healthy_stream(fabric, tokenizer):
        async with asyncio.timeout(120):
            await attack(address)
    assert rss_bytes(fabric, "edge") - before < MAX_GROWTH_BYTES


async def test_connections_over_the_limit_are_told(fabric: RunningFabric, tokenizer: ModelTokenizer) -> None:
    """A client beyond the limit gets 503 at once; clients within it are served."""
    host, port = fabric.http_url.removeprefix("http://").split(":")
    async with healthy_stream(fabric, tokenizer):
        # The healthy client's connection is one of those that exist: it has been answered over it.
        await hostile.too_many_connections((host, int(port)), MAX_CONNECTIONS)


# -- gRPC ----------------------------------------------------------------------------------------------------------


def request(**fields: Any) -> router_service_pb2.GenerateRequest:
    wanted = router_service_pb2.GenerateRequest(model=MODEL, text="hello", **fields)
    wanted.stop.max_tokens = 500
    return wanted


async def cancelled_generates(address: str, num_rounds: int = NUM_ROUNDS) -> None:
    """Opened and cancelled, some before the first byte went out, some in the middle."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = router_service_pb2_grpc.RouterServiceStub(channel)
        for round_ in range(num_rounds):
            calls = [stub.Generate(request()) for _ in range(90)]
            if round_ % 2:
                await asyncio.gather(*(call.read() for call in calls[:10]))
            for call in calls:
                call.cancel()
            await asyncio.gather(*(call.wait_for_connection() for call in calls), return_exceptions=True)


async def cancelled_connects(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = router_service_pb2_grpc.RouterServiceStub(channel)
        for _ in range(5):
            calls = [stub.Connect() for _ in range(80)]
            hello = router_service_pb2.ClientHello(client_id="hostile")
            for call in calls[::2]:
                # gRPC itself refuses streams of a connection that resets too many of them.
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await call.write(router_service_pb2.RouterServiceConnectRequest(hello=hello))
            for call in calls:
                call.cancel()


async def many_cancelled_generates(address: str) -> None:
    await cancelled_generates(address, 5 * NUM_ROUNDS)


async def oversized_messages(address: str) -> None:
    async with grpc.aio.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        stub = router_service_pb2_grpc.RouterServiceStub(channel)
        huge = router_service_pb2.GenerateRequest(model=MODEL, text="x" * (65 * 2**20))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Generate(huge).read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        large = router_service_pb2.GenerateRequest(model=MODEL, text="x" * (20 * 2**20))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Generate(large).read()
        assert from_rpc_error(refused.value).reason == ErrorReason.ERROR_REASON_REQUEST_TOO_LARGE
        many = router_service_pb2.GenerateRequest(model=MODEL)
        many.token_ids.ids.extend([1] * 5_000_000)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Generate(many).read()
        error = from_rpc_error(refused.value)
        assert (error.reason, error.field) == (ErrorReason.ERROR_REASON_REQUEST_TOO_LARGE, "token_ids.ids")


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
PING = b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + b"\x00" * 8
SETTINGS_FRAME = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


async def raw_frames(address: str, flood: bytes, count: int) -> bool:
    """Whether the server put an end to it."""
    host, port = address.rsplit(":", 1)
    async with hostile.connection((host, int(port))) as (reader, writer):

        async def listen() -> None:
            while await reader.read(65_536):
                pass

        listener = asyncio.create_task(listen())
        with contextlib.suppress(ConnectionError):
            writer.write(PREFACE)
            for _ in range(count):
                writer.write(flood)
                async with asyncio.timeout(20):
                    await writer.drain()
        done, _ = await asyncio.wait([listener], timeout=2.0)
        listener.cancel()
        await asyncio.gather(listener, return_exceptions=True)
        return bool(done)


async def ping_flood(address: str) -> None:
    assert await raw_frames(address, PING * 100, 100)


async def settings_flood(address: str) -> None:
    await raw_frames(address, SETTINGS_FRAME * 500, 100)


async def noise(address: str) -> None:
    host, port = address.rsplit(":", 1)
    for raw in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 100_000, PREFACE + b"\xff" * 100_000, b"\x16\x03\x01" * 1000):
        async with hostile.connection((host, int(port))) as (reader, writer):
            writer.write(raw)
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(5):
                    await reader.read()


@pytest.mark.parametrize(
    "attack",
    [
        cancelled_generates,
        pytest.param(many_cancelled_generates, marks=pytest.mark.long),
        cancelled_connects,
        oversized_messages,
        ping_flood,
        settings_flood,
        noise,
    ],
    ids=lambda attack: attack.__name__,
)
async def test_the_router_under(fabric: RunningFabric, tokenizer: ModelTokenizer, attack: Any) -> None:
    """Floods and nonsense on the gRPC port end where they began."""
    before = rss_bytes(fabric, "router")
    async with healthy_stream(fabric, tokenizer):
        async with asyncio.timeout(120):
            await attack(fabric.router_address)
    growth = rss_bytes(fabric, "router") - before
    assert growth < (2 * MAX_GROWTH_BYTES if attack is oversized_messages else MAX_GROWTH_BYTES)
    assert not sum(load.num_running + load.num_waiting for load in fabric.shard_loads())
