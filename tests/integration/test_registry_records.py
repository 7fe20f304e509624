"""What else the registry may hold, with a real Redis: foreign values neither stand in the way of processes nor take
their places."""

from __future__ import annotations

import msgspec
import pytest
import redis.asyncio
import redis.exceptions

from kvloom_common.discovery.records import NameTakenError, ShardRecord
from kvloom_common.discovery.registry import ShardRegistry

RECORD = ShardRecord("shard-0", "127.0.0.1:1", "m", "i", owner="o")


async def test_a_record_under_another_key_is_ignored(redis_url: str) -> None:
    """It would open a link to the shard that it names at each read of the registry, beside the one that there is."""
    registry = ShardRegistry(redis_url, "records")
    await registry.announce(RECORD)
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        await client.set("records:shard:shard-9", msgspec.json.encode(RECORD))
        await client.sadd("records:shard_ids", "shard-9")
    assert await registry.list_shards() == {"shard-0": RECORD}
    await registry.close()


async def test_shards_of_several_models_are_listed_with_their_models(redis_url: str) -> None:
    """They come and go by themselves, and a name is taken whatever model its holder serves."""
    registry = ShardRegistry(redis_url, "models")
    records = [ShardRecord(f"shard-{n}", f"127.0.0.1:{n}", model, "i", owner="o") for n, model in enumerate("mnm")]
    for record in records:
        await registry.announce(record)
    assert [record.model for record in (await registry.list_shards()).values()] == ["m", "n", "m"]
    with pytest.raises(NameTakenError):
        await registry.announce(ShardRecord("shard-1", "127.0.0.1:9", "other", "j", owner="p"))
    await registry.withdraw("shard-1")
    assert await registry.list_shards() == {"shard-0": records[0], "shard-2": records[2]}
    await registry.announce(ShardRecord("shard-1", "127.0.0.1:9", "other", "j", owner="p"))
    assert (await registry.list_shards())["shard-1"].model == "other"
    await registry.close()


async def test_a_foreign_value_in_place_of_the_set_of_names_is_deleted(redis_url: str) -> None:
    """No shard could be found until an operator deleted it."""
    registry = ShardRegistry(redis_url, "typed")
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        await client.set("typed:shard_ids", "no set")
    with pytest.raises(redis.exceptions.ResponseError):
        await registry.list_shards()
    await registry.announce(RECORD)
    assert await registry.list_shards() == {"shard-0": RECORD}
    await registry.close()
