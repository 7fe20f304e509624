"""An edge that is short of memory refuses large requests, then all of them, and recovers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import structlog.testing

from edge_http.metric_table import MEMORY
from kvloom_common.config import EdgeConfig
from kvloom_common.limits.memory_watch import LARGE_BYTES, MemoryLevel, MemoryWatch
from tests.fakes.edge_world import EdgeWorld, chat_body, edge_world
from tests.fakes.fake_router_link import answer
from tests.fakes.resume_world import CHAT
from tests.waiting import eventually

LIMIT_BYTES = 1000 * 2**20
LARGE = "the fox " * (LARGE_BYTES // 4)


class Memory:
    """What the process is said to hold."""

    resident_bytes = 100 * 2**20

    def __call__(self) -> int:
        return self.resident_bytes


@contextlib.asynccontextmanager
async def watched(world: EdgeWorld) -> AsyncIterator[Memory]:
    memory = Memory()
    edge = world.edge
    watch = MemoryWatch(
        MEMORY,
        LIMIT_BYTES,
        edge.on_memory_level,
        edge.metrics.registry,
        edge.admission.is_idle,
        memory,
        sample_seconds=0.002,
    )
    task = asyncio.create_task(watch.watch())
    yield memory
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def level(world: EdgeWorld) -> float:
    value = world.edge.metrics.registry.get_sample_value("kvloom_edge_memory_level")
    assert value is not None
    return value


async def test_large_requests_are_refused_before_all_are() -> None:
    """The kernel would otherwise kill the process, with all answers that run in it."""
    async with edge_world() as world, watched(world) as memory:
        running = asyncio.create_task(world.chat())
        request = await world.link.next_request()
        request.start()
        world.link.script = answer("a")
        with structlog.testing.capture_logs() as logs:
            memory.resident_bytes = 900 * 2**20
            await eventually(lambda: level(world) == MemoryLevel.HIGH)
            assert (await world.chat())[0] == 200
            async with world.http.post(world.url + CHAT, json=chat_body(prompt_cache_key=LARGE)) as refused:
                assert refused.status == 503
                assert refused.headers["Retry-After"]
                assert (await refused.json())["error"]["code"] == "overloaded"
            memory.resident_bytes = 1001 * 2**20
            await eventually(lambda: level(world) == MemoryLevel.FULL)
            status, error = await world.chat()
            assert (status, error["error"]["code"]) == (503, "overloaded")
            memory.resident_bytes = 100 * 2**20
            await eventually(lambda: level(world) == MemoryLevel.NORMAL)
        changes = [entry["level"] for entry in logs if entry["event"] == "memory_level_changed"]
        assert changes == ["high", "full", "normal"]
        assert (await world.chat())[0] == 200
        request.tokens("x" * (2 * LARGE_BYTES))
        request.finish()
        status, body = await running
        assert status == 200
        assert len(body["choices"][0]["message"]["content"]) == 2 * LARGE_BYTES


async def test_a_body_on_its_way_is_not_read_to_its_end() -> None:
    """The largest senders are those that have not finished: their bodies are dropped, which frees memory at once."""
    async with edge_world(EdgeConfig()) as world:
        reader, writer = await asyncio.open_connection(*world.address)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 4000000\r\n\r\n"
        writer.write(head.encode() + b" " * 1_000_000)
        await eventually(lambda: world.edge.admission.bodies.num_bytes > LARGE_BYTES)
        world.edge.on_memory_level(MemoryLevel.HIGH)
        writer.write(b" " * 100_000)
        assert (await reader.readline()).startswith(b"HTTP/1.1 503 ")
        await eventually(lambda: not world.edge.admission.bodies.num_bytes)
        writer.close()


async def test_an_answer_begun_while_memory_is_short_stays_small() -> None:
    """Answers that ran before are completed; new ones could be 32 MiB each."""
    async with edge_world() as world:
        world.edge.on_memory_level(MemoryLevel.HIGH)
        asking = asyncio.create_task(world.chat())
        request = await world.link.next_request()
        request.start()
        request.tokens("x" * (2 * LARGE_BYTES))
        status, error = await asking
        assert (status, error["error"]["code"]) == (503, "overloaded")
        assert request.cancelled.is_set()
