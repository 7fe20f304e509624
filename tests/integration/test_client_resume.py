"""`generate(..., resumable=True)`: the loop of an SDK user notices no break."""

from __future__ import annotations

import asyncio
import copy
import random
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvloom.client.client import Client
from kvloom.errors import KvloomError
from router.core.core import RouterCore
from router.core_settings import core_config
from router.server import RouterServer
from tests.fakes.breaking_proxy import BreakingProxy
from tests.fakes.fake_shard import expected_text, expected_tokens
from tests.fakes.generate_stream import PROMPT, metered, start
from tests.fakes.router_world import MODEL, TIMEOUT_SECONDS, RouterWorld
from tests.fakes.served_models import catalogue_of
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)


async def test_the_sdk_mends_lost_connections(world: RouterWorld) -> None:
    """The user's `async for` sees no break, however often the connection is reset. No token is lost, doubled or metered
    twice, also while a shard dies."""
    await start(world, {"step_seconds": 0.004})
    await world.start_shard("shard-1", step_seconds=0.004)
    proxy = BreakingProxy(world.address)
    await proxy.start()
    rng = random.Random(5)

    async def ask(client: Client, number: int) -> None:
        prompt = [number, 1]
        deltas = [
            delta async for delta in client.generate(model=MODEL, token_ids=prompt, max_tokens=120, resumable=True)
        ]
        assert [i for delta in deltas for i in delta.token_ids] == expected_tokens(prompt, 0, 120)
        assert "".join(delta.text for delta in deltas) == expected_text(prompt, 0, 120)
        assert sum(delta.finish is not None for delta in deltas) == 1

    async with Client(proxy.address) as client, asyncio.timeout(4 * TIMEOUT_SECONDS):
        answers = [asyncio.create_task(ask(client, number)) for number in range(8)]
        while not all(answer.done() for answer in answers):
            await asyncio.sleep(rng.uniform(0.02, 0.15))  # sleep: the pace of what breaks connections
            proxy.reset()
        await asyncio.gather(*answers)
    await proxy.stop()
    assert proxy.num_connections > 2
    assert metered(world) == (8, 8 * 120)


async def test_the_sdk_mends_a_connection_that_breaks_before_anything_was_heard(world: RouterWorld) -> None:
    """The request is made once, whether or not the router has received it before the break."""
    shard = await start(world)
    proxy = BreakingProxy(world.address)
    await proxy.start()
    async with Client(proxy.address) as client, asyncio.timeout(2 * TIMEOUT_SECONDS):
        for arrives in (False, True):
            proxy.refuse(not arrives)
            shard.pause()
            options: Any = {"model": MODEL, "token_ids": PROMPT, "max_tokens": 20, "resumable": True}
            answer = asyncio.create_task(_collect(client, **options))
            if arrives:
                await eventually(lambda: shard.num_running, "the request")
            else:
                await eventually(lambda: proxy.num_connections > 2, "some attempts")
            proxy.reset()
            proxy.refuse(False)
            shard.resume()
            assert await answer == expected_tokens(PROMPT, 0, 20)
    await proxy.stop()
    assert metered(world) == (2, 40)


async def test_the_sdk_cancels_what_it_leaves(world: RouterWorld) -> None:
    """Leaving the loop ends the request, without a grace period."""
    shard = await start(world)
    async with Client(world.address) as client:
        answer = client.generate(model=MODEL, token_ids=PROMPT, max_tokens=4000, resumable=True)
        async for _ in answer:
            break
        await answer.aclose()
        await eventually(lambda: shard.cancelled_slots and not shard.num_running, "the cancel")


@pytest.mark.parametrize("reattach_seconds", [0.0, 10.0])
async def test_a_router_that_does_not_know_the_answer_any_more(world: RouterWorld, reattach_seconds: float) -> None:
    """A client was away for longer than the grace period: the router continues after what was received, and credits
    what it had generated beyond. Without reattaching that is an error, never a second, different answer."""
    await start(world, {"step_seconds": 0.01}, grace_seconds=0.05)
    proxy = BreakingProxy(world.address)
    await proxy.start()
    token_ids: list[int] = []

    async def reopen() -> None:
        await eventually(lambda: world.metric("kvloom_router_expired_answers_total"), "the end of the grace period")
        proxy.refuse(False)

    async with Client(proxy.address, reattach_seconds=reattach_seconds) as client:
        options: Any = {"model": MODEL, "token_ids": PROMPT, "max_tokens": 80, "resumable": True}
        answer = aiter(client.generate(**options))  # held here, so that it is not cancelled between two loops
        token_ids += (await anext(answer)).token_ids
        proxy.refuse(True)
        proxy.reset()
        reopening = asyncio.create_task(reopen())

        async def read_on() -> None:
            async for delta in answer:  # one may have arrived before the connection broke
                token_ids.extend(delta.token_ids)

        if reattach_seconds:
            await read_on()
            assert token_ids == expected_tokens(PROMPT, 0, 80)
        else:
            with pytest.raises(KvloomError, match="no longer kept") as caught:
                await read_on()
            assert caught.value.reason_name == "ROUTER_LOST"
        await reopening
    await proxy.stop()
    credited = world.metric("kvloom_router_tokens_credited_total", model=MODEL)
    assert credited > 0
    assert metered(world)[1] - credited == len(token_ids)


async def _collect(client: Client, **options: Any) -> list[int]:
    return [i async for delta in client.generate(**options) for i in delta.token_ids]


async def test_the_sdk_finds_the_router_among_several_at_one_address(world: RouterWorld) -> None:
    """Routers may share a port: a new connection may reach any of them, and only one has the answer."""
    await start(world, {"step_seconds": 0.005})
    config = copy.deepcopy(world.config)
    config.redis.key_prefix += "-other"  # a fake shard serves one router
    other = RouterServer(config, RouterCore(core_config(config)), catalogue_of(config), "router-1", CollectorRegistry())
    stop = asyncio.Event()
    address = await other.start("127.0.0.1", 0)
    serving = asyncio.create_task(other.serve(stop))
    proxy = BreakingProxy(world.address)
    await proxy.start()
    async with Client(proxy.address) as client, asyncio.timeout(2 * TIMEOUT_SECONDS):
        token_ids: list[int] = []
        async for delta in client.generate(model=MODEL, token_ids=PROMPT, max_tokens=60, resumable=True):
            if not token_ids:
                proxy.redirect(address)
                proxy.reset()
            token_ids += delta.token_ids
    assert token_ids == expected_tokens(PROMPT, 0, 60)
    assert metered(world) == (1, 60)
    await proxy.stop()
    stop.set()
    await asyncio.wait_for(serving, TIMEOUT_SECONDS)


async def test_the_sdk_asks_another_router_for_an_answer_that_has_not_begun(world: RouterWorld) -> None:
    """A router that is not there costs a moment, and no answer."""
    await start(world)
    proxy = BreakingProxy(world.address)
    await proxy.start()
    proxy.refuse(True)
    async with Client([proxy.address, world.address]) as client, asyncio.timeout(2 * TIMEOUT_SECONDS):
        options: Any = {"model": MODEL, "token_ids": PROMPT, "max_tokens": 20, "resumable": True}
        assert await _collect(client, **options) == expected_tokens(PROMPT, 0, 20)
    await proxy.stop()
