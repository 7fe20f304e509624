"""Copies of conversations in Redis: they save reads of the database, and change no answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
import sqlalchemy as sa

from kvloom_common.config import RedisConfig
from orchestrator.database.schema import hot_keys, items
from orchestrator.metrics import HOT_READS
from orchestrator.store import hot_items
from orchestrator.store.hot_items import HotItems
from tests.fakes.fake_router_link import answer
from tests.fakes.redis_server import ForgetfulRedis
from tests.fakes.state_world import ADMIN_KEY, StateWorld, state_world, state_world_on
from tests.waiting import eventually

SECONDS = 600


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, a Redis that takes a while is not away."""
    monkeypatch.setattr(hot_items, "TIMEOUT_SECONDS", 30.0)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=[pytest.mark.postgres, pytest.mark.long])])
async def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, redis_url: str
) -> AsyncIterator[StateWorld]:
    async with redis.asyncio.from_url(redis_url) as connection:
        await connection.flushall()
    async with state_world_on(
        request, tmp_path_factory, redis_url=redis_url, hot_conversation_seconds=SECONDS
    ) as started:
        started.edge.link.script = answer("Hello")
        yield started


def num_reads(outcome: str) -> float:
    return HOT_READS.labels(outcome).total


async def turn(world: StateWorld, conversation: str, text: str) -> str:
    """The prompt of a turn."""
    await world.client.responses.create(model="tiny", input=text, conversation=conversation)
    return world.prompt()


async def lose_rows(world: StateWorld, conversation: str, most: int) -> None:
    """Empties the first items of a conversation, so that who reads them from the database has something else."""
    async with world.database.writing() as connection:
        body = b'{"id":"msg_x","type":"message","role":"user","content":[{"type":"input_text","text":"lost"}]}'
        own = sa.and_(items.c.parent == conversation, items.c.position < most)
        await connection.execute(items.update().where(own).values(body=body))


async def test_a_turn_reads_from_the_database_what_is_new(world: StateWorld) -> None:
    """The prompt has all turns in order, of which the earlier ones come from the copies."""
    talk = await world.client.conversations.create(items=[{"type": "message", "role": "user", "content": "zero"}])
    said = ["zero"]
    for number in range(4):
        prompt = await turn(world, talk.id, f"turn{number}")
        said.append(f"turn{number}")
        places = [prompt.index(text) for text in said]
        assert places == sorted(places)
    before = num_reads("copy")
    await lose_rows(world, talk.id, 4)
    prompt = await turn(world, talk.id, "last")
    assert all(text in prompt for text in said)
    assert "lost" not in prompt
    assert num_reads("copy") == before + 1


async def test_many_copies_become_one(world: StateWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation of a thousand turns is not read in a thousand pieces."""
    monkeypatch.setattr(hot_items, "MAX_COPIES", 3)
    talk = await world.client.conversations.create()
    for number in range(9):
        prompt = await turn(world, talk.id, f"turn{number}")
        assert all(f"turn{earlier}" in prompt for earlier in range(number + 1))
    assert world.hot_items is not None
    copies = await world.hot_items.copies(talk.id)
    assert 1 <= len(copies.sealed) <= 3
    async with world.database.reading() as connection:
        read = await world.hot_items.read(connection, "acme/search", talk.id, world.now, copies)
    assert read is not None
    assert len(read.bodies) == 18


async def test_what_is_deleted_is_in_no_copy(world: StateWorld) -> None:
    """An item that is deleted, and one that takes its place, count from the next turn on; so does a conversation."""
    client = world.client
    talk = await client.conversations.create()
    for number in range(3):
        await turn(world, talk.id, f"turn{number}")
    listed = [item async for item in client.conversations.items.list(talk.id, order="asc")]
    await client.conversations.items.delete(listed[-1].id or "", conversation_id=talk.id)
    await client.conversations.items.delete(listed[0].id or "", conversation_id=talk.id)
    prompt = await turn(world, talk.id, "then")
    assert "turn0" not in prompt
    assert "turn1" in prompt
    prompt = await turn(world, talk.id, "at last")
    assert "turn0" not in prompt
    assert all(text in prompt for text in ("turn1", "turn2", "then", "at last"))
    await client.conversations.delete(talk.id)
    async with world.database.reading() as connection:
        assert (await connection.execute(hot_keys.select())).all() == []


async def test_a_database_that_was_restored_is_believed(world: StateWorld) -> None:
    """Copies of what happened after its backup are not."""
    talk = await world.client.conversations.create()
    for number in range(3):
        await turn(world, talk.id, f"turn{number}")
    async with world.database.writing() as connection:  # the last two items are as if they had never been
        await connection.execute(items.delete().where(items.c.parent == talk.id, items.c.position >= 2))
    prompt = await turn(world, talk.id, "another")
    assert "turn0" in prompt
    assert "turn1" not in prompt
    assert "turn1" not in await turn(world, talk.id, "way")


async def test_copies_cannot_be_read_without_the_database(world: StateWorld, redis_url: str) -> None:
    """Who reads Redis sees nothing that was said, and what somebody writes there is not believed."""
    talk = await world.client.conversations.create(items=[{"type": "message", "role": "user", "content": "secret"}])
    for number in range(3):
        await turn(world, talk.id, f"turn{number}")
    async with redis.asyncio.from_url(redis_url) as connection:
        [name] = await connection.keys("*hot*")
        copies = await connection.lrange(name, 0, -1)
        assert copies
        assert not any(word in copy for copy in copies for word in (b"secret", b"turn", b"msg_"))
        assert 0 < await connection.ttl(name) <= world.settings.hot_conversation_seconds
        await connection.lset(name, 0, copies[0][:16] + b"x" * 100)
    assert "secret" in await turn(world, talk.id, "then")


async def test_an_erasure_erases_copies(world: StateWorld, redis_url: str) -> None:
    """Their keys go with the database's rows, so that none can be read, and they are deleted besides."""
    talk = await world.client.conversations.create()
    for number in range(3):
        await turn(world, talk.id, f"turn{number}")
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    url = f"{world.edge.url}/kvloom/v1/erasures"
    async with world.edge.http.post(url, json={}, headers=headers) as response:
        made = await response.json()

    async def has_ended() -> bool:
        async with world.edge.http.get(f"{url}/{made['id']}", headers=headers) as response:
            return (await response.json())["status"] == "completed"

    async with world.jobs():
        await eventually(has_ended, "the end of the erasure")
    async with redis.asyncio.from_url(redis_url) as connection:
        assert await connection.keys("*hot*") == []
    async with world.database.reading() as connection:
        assert (await connection.execute(hot_keys.select())).all() == []


async def test_without_redis_nothing_is_lost(tmp_path: Path) -> None:
    """It is slower, and the same; Redis is used again when it is back, empty."""
    server = ForgetfulRedis()
    server.start()
    try:
        async with state_world(
            f"sqlite:///{tmp_path}/state.db", tmp_path, redis_url=server.url, hot_conversation_seconds=SECONDS
        ) as world:
            world.edge.link.script = answer("Hello")
            talk: Any = await world.client.conversations.create()
            for number in range(3):
                await turn(world, talk.id, f"turn{number}")
            server.kill()
            for number in range(3, 6):
                prompt = await turn(world, talk.id, f"turn{number}")
                assert all(f"turn{earlier}" in prompt for earlier in range(number + 1))
            server.start()
            assert world.hot_items is not None
            world.hot_items._paused_until = 0.0
            for number in range(6, 9):
                prompt = await turn(world, talk.id, f"turn{number}")
                assert all(f"turn{earlier}" in prompt for earlier in range(number + 1))
            before = num_reads("copy")
            await turn(world, talk.id, "last")
            assert num_reads("copy") == before + 1
    finally:
        server.kill()


async def test_a_redis_that_is_away_is_left_alone_for_a_while() -> None:
    """Turns do not wait for it one by one."""
    hot = HotItems(RedisConfig(url="redis://127.0.0.1:9"), 60)
    before = num_reads("away")
    for _ in range(5):
        await hot.forget(["conv_1"])
    assert num_reads("away") == before + 1
    await hot.close()
