"""A fabric whose routers find shards by names: without Redis, while DNS answers, and while it does not."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
import structlog

from kvloom_common.config import KvloomConfig
from kvloom_common.discovery import named_shards
from kvloom_common.discovery.named_shards import NamedShards
from kvloom_common.discovery.router_finder import linked_routers
from kvloom_common.process.service import StartError
from kvloom_common.trust.secret import FabricSecret
from kvloom_common.trust.shared_secret import SharedSecret
from lab.free_ports import pick_free_ports
from router.process import RouterListenOptions, open_router
from tests.fakes.fake_dns import FakeDns
from tests.fakes.fake_shard import FakeShard, expected_text, expected_tokens
from tests.fakes.router_world import MODEL, Answer, RouterWorld, link_request, num_ready_shards
from tests.fakes.served_models import catalogue_of
from tests.fakes.shard_world import shard_world
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)

HOSTS = ("127.0.0.2", "127.0.0.3")


@contextlib.asynccontextmanager
async def running_shards(*names: str) -> AsyncIterator[list[FakeShard]]:
    """Shards at one port, each at a host of its own."""
    [port] = pick_free_ports(1)
    shards = [FakeShard(name, model=MODEL) for name in names]
    try:
        for shard, host in zip(shards, HOSTS, strict=False):
            await shard.start(port, host)
        yield shards
    finally:
        for shard in shards:
            await shard.stop()


@pytest.fixture
async def dns() -> FakeDns:
    found = FakeDns()
    found.addresses["shards"] = list(HOSTS)
    return found


def named(shards: list[FakeShard], dns: FakeDns) -> NamedShards:
    return NamedShards([f"shards:{shards[0].address.rpartition(':')[2]}"], resolve=dns.resolve)


async def test_a_name_that_is_not_answered_keeps_its_shards(dns: FakeDns, monkeypatch: pytest.MonkeyPatch) -> None:
    """DNS fails more often than shards do: a router must not forget a fleet because of it. It asks a resolver that
    hangs only once, and says so once."""
    monkeypatch.setattr(named_shards, "QUERY_SECONDS", 0.05)
    async with running_shards("shard-0", "shard-1") as shards:
        source = named(shards, dns)
        assert set(await source.list_shards()) == {"shard-0", "shard-1"}
        with structlog.testing.capture_logs() as lines:
            dns.failure = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
            assert set(await source.list_shards()) == {"shard-0", "shard-1"}
            dns.failure = None
            dns.may_answer.clear()
            num_queries = dns.num_queries
            for _ in range(3):
                assert set(await source.list_shards()) == {"shard-0", "shard-1"}
            assert dns.num_queries == num_queries + 1
        assert [(line["event"], line["num_addresses"]) for line in lines] == [("shard_query_failed", 2)]
        dns.may_answer.set()
        dns.addresses["shards"] = [HOSTS[1]]
        await source.list_shards()  # perhaps the answer to the query that hung
        assert set(await source.list_shards()) == {"shard-1"}
        dns.addresses["shards"] = []  # no address is an answer, too
        assert await source.list_shards() == {}
        await source.close()


async def test_connected_shards_are_not_asked_again(dns: FakeDns) -> None:
    """A router of hundreds of shards would otherwise make hundreds of calls in every round."""
    async with running_shards("shard-0", "shard-1") as shards:
        source = named(shards, dns)
        await source.list_shards()
        assert set(await source.list_shards({"shard-0"})) == {"shard-0", "shard-1"}
        assert [shard.num_asked for shard in shards] == [1, 2]
        await source.close()


async def test_of_two_shards_of_one_name_the_first_stays(dns: FakeDns) -> None:
    """Otherwise a router would change between them in every round, and break the streams each time."""
    async with running_shards("shard-0", "shard-0") as shards:
        source = named(shards, dns)
        dns.addresses["shards"] = [HOSTS[1]]
        with structlog.testing.capture_logs() as lines:
            for _ in range(3):
                assert (await source.list_shards())["shard-0"].address == shards[1].address
                dns.addresses["shards"] = list(HOSTS)
        taken = [line["address"] for line in lines if line["event"] == "shard_name_taken"]
        assert taken == [shards[0].address]
        await source.close()


async def test_with_a_secret_only_shards_of_the_fabric_are_found() -> None:
    """Whoever changes an answer of DNS must not become a shard, which gets prompts."""
    secret = FabricSecret.draw()
    async with shard_world(trust=SharedSecret(secret, ("shard",), "shard-0")) as shard:
        for known, expected in ((secret, {"shard-0"}), (FabricSecret.draw(), set())):
            source = NamedShards([shard.address], SharedSecret(known, ("router",), "router-0"))
            assert set(await source.list_shards()) == expected
            await source.close()


async def test_the_machine_resolves_names() -> None:
    """A name is what users write; one that cannot be a name must not keep the others from being found."""
    async with shard_world() as shard:
        source = NamedShards([f"localhost:{shard.address.rpartition(':')[2]}", f"{'a' * 70}:1"])
        with structlog.testing.capture_logs() as lines:
            assert set(await source.list_shards()) == {"shard-0"}
        assert [line["host"] for line in lines if line["event"] == "shard_query_failed"] == ["a" * 70]
        await source.close()


async def test_a_fabric_serves_without_redis(world: RouterWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Router, shards and the links of edges work where no Redis runs at all; a shard that goes loses no answer, and one
    that comes back is used again."""
    monkeypatch.setattr(named_shards, "POLL_SECONDS", 0.05)
    async with running_shards("shard-0", "shard-1") as shards:
        world.config.redis.url = ""
        world.config.router.shards = [shard.address for shard in shards]
        await world.start_router()
        world.config.router.host, _, port = world.address.rpartition(":")
        world.config.router.port = int(port)
        async with linked_routers(world.config, "edge-0") as link:
            await eventually(lambda: num_ready_shards(link) == 2, "both shards")
            answers = [Answer() for _ in range(6)]
            for number, answer in enumerate(answers):
                link.submit(link_request([number], 200), answer)
            await eventually(lambda: all(len(answer.token_ids[0]) > 5 for answer in answers), "a few tokens each")
            await shards[0].stop()
            await eventually(lambda: all(answer.done for answer in answers), "all answers")
            for number, answer in enumerate(answers):
                assert answer.token_ids[0] == expected_tokens([number], 0, 200)
                assert answer.texts[0] == expected_text([number], 0, 200)
            await eventually(lambda: num_ready_shards(link) == 1, "the loss")
            host, _, port = shards[0].address.rpartition(":")
            again = FakeShard("shard-0", model=MODEL, incarnation_id="2")
            await again.start(int(port), host)
            try:
                await eventually(lambda: num_ready_shards(link) == 2, "the shard that came back")
            finally:
                await again.stop()


async def test_a_router_that_cannot_find_shards_says_so() -> None:
    """Without Redis and names it would wait forever; what tenants use could not be counted."""
    config = KvloomConfig()
    config.model.name = MODEL
    with pytest.raises(StartError, match=r"router\.shards"):
        await open_router(config, catalogue_of(config), "router-0", RouterListenOptions(0))
    config.router.shards, config.control.enabled = ["shards:1"], True
    with pytest.raises(StartError, match=r"control\.enabled"):
        await open_router(config, catalogue_of(config), "router-0", RouterListenOptions(0))
