"""The synchronous client, as programs without an event loop use it."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvloom import CancelOutcome, ErrorReason, KvloomError, SyncClient
from tests.fakes.fake_shard import expected_text
from tests.fakes.router_world import MODEL, RouterWorld
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)

LONG = {"model": MODEL, "max_tokens": 4000, "token_ids": [1]}


async def in_thread(work: Callable[[], Any]) -> Any:
    async with asyncio.timeout(20):
        return await asyncio.to_thread(work)


@pytest.fixture
async def shard(world: RouterWorld) -> Any:
    shard = await world.start_shard("shard-0", step_seconds=0.005)
    await world.start_router()
    await world.wait_for_shards(await world.connect(), 1)
    return shard


async def test_it_streams_and_completes_from_several_threads(world: RouterWorld, shard: Any) -> None:
    """Web frameworks with threads share one client."""

    def work() -> list[str]:
        with SyncClient(world.address) as client, ThreadPoolExecutor(4) as pool:

            def whole(number: int) -> str:
                if number % 2:
                    return client.complete(model=MODEL, token_ids=[number], max_tokens=5).text
                return "".join(d.text for d in client.generate(model=MODEL, token_ids=[number], max_tokens=5))

            assert [model.name for model in client.list_models()] == [MODEL]
            assert client.cancel("none") is CancelOutcome.NOT_FOUND
            return list(pool.map(whole, range(1, 9)))

    assert await in_thread(work) == [expected_text([number], 0, 5) for number in range(1, 9)]
    assert not any(thread.name == "kvloom" for thread in threading.enumerate())


async def test_leaving_the_loop_cancels(world: RouterWorld, shard: Any) -> None:
    """By `break` with a reference, by an exception, and by an interrupt of the wait."""

    def leave(client: SyncClient) -> Any:
        stream = client.generate(**LONG)
        for _ in stream:
            break
        return stream

    client = SyncClient(world.address)
    kept = await in_thread(lambda: leave(client))
    await eventually(lambda: shard.num_running == 0, "the cancel after a break")
    assert await in_thread(lambda: list(kept)) == []

    def fail() -> None:
        for _ in client.generate(**LONG):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await in_thread(lambda: _reraised(fail))
    await eventually(lambda: shard.num_running == 0, "the cancel after an interrupt")
    await in_thread(client.close)
    with pytest.raises(RuntimeError, match="closed"):
        client.list_models()


def _reraised(work: Callable[[], None]) -> None:
    work()


async def test_errors_and_garbage(world: RouterWorld, shard: Any) -> None:
    """Errors are those of `Client`; a client that is not closed ends with its last reference."""

    def work() -> None:
        client = SyncClient(world.address)
        with pytest.raises(KvloomError) as caught:
            client.complete(model="other", text="a")
        assert caught.value.reason is ErrorReason.MODEL_NOT_FOUND
        stream = client.generate(**LONG)
        next(stream)
        del client, stream, caught  # its traceback refers to the client
        gc.collect()

    await in_thread(work)
    await eventually(lambda: shard.num_running == 0, "the cancel")
    await eventually(lambda: not any(t.name == "kvloom" for t in threading.enumerate()), "the end of the thread")
