"""A Redis that does not answer in the middle of a takeover costs time, not the answer: whatever it has executed by
then, or executes later, the client that comes back gets the rest. (`kvloom-lab chaos` found it.)"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.exceptions import TimeoutError as RedisTimeoutError

from edge_http.recovery.edge_membership import EdgeMembership
from tests.fakes.edge_peers import edges, published
from tests.fakes.scripted_answer import begin_live, client, end_at, kill, kinds, same_but_names, undisturbed


def lose_next_answer(monkeypatch: pytest.MonkeyPatch, peers: EdgeMembership, command: str) -> None:
    """Redis executes the next command, but the edge gets no answer to it."""
    redis = peers._journal.redis
    tell = getattr(redis, command)

    async def unheard(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(redis, command, tell)
        await tell(*args, **options)
        raise RedisTimeoutError("no answer")

    monkeypatch.setattr(redis, command, unheard)


@pytest.mark.parametrize("comes_to", ["the same edge", "another edge"])
@pytest.mark.parametrize("command", ["eval", "xrange"])
async def test_takeover_that_was_cut_short_is_made_good(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, command: str, comes_to: str
) -> None:
    """The claim exists (`eval`), but its edge does not know it; or the edge cannot read the journal afterwards
    (`xrange`)."""
    path, body, script = kinds()["chat"]
    async with edges(redis_url, count=3) as ((first, one), (second, two), (third, _)):
        expected = await undisturbed(first, path, body, script)
        streamed, _, reading = await begin_live(first, path, body, script, 4)
        await kill(first, one, reading)
        streamed.url = second.url + path
        lose_next_answer(monkeypatch, two, command)
        assert await streamed.resume() == 503
        if comes_to == "the same edge":
            await end_at(second, path, streamed, script, 4)
        else:
            streamed.url = third.url + path
            back = asyncio.create_task(streamed.resume())
            script.play(await second.link.next_request(), 4)
            assert await back == 200
        assert same_but_names(streamed.events) == expected


async def test_claim_that_was_never_made_is_made_again(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis may just as well not have received it; meanwhile a third edge continues the answer, and keeps it."""
    path, body, script = kinds()["chat"]
    async with edges(redis_url, count=3) as ((first, one), (second, two), (third, _)):
        streamed, _, reading = await begin_live(first, path, body, script, 4)
        await kill(first, one, reading)

        async def unheard_of(*_: Any) -> Any:
            raise RedisTimeoutError("no answer")

        with monkeypatch.context() as patch:
            patch.setattr(two._journal.redis, "eval", unheard_of)
            streamed.url = second.url + path
            assert await streamed.resume() == 503
        await end_at(third, path, streamed, script, 4)
        again = client(second, path)
        again.response_id = streamed.response_id
        assert await again.read_to_the_end() == streamed.events


async def test_answer_that_turns_out_to_have_ended_is_there_for_all_who_come(redis_url: str) -> None:
    """Its edge died between the answer's end and the note that nothing is left to do. The edge that claims it replays
    it, releases the claim, and can replay it again."""
    path, body, script = kinds()["chat"]
    async with edges(redis_url, count=3) as ((first, one), (second, _), (third, _)):
        streamed, request, reading = await begin_live(first, path, body, script, 4)
        journal, response_id = one._journal, streamed.response_id
        key = journal._response_key(first.edge.tag, response_id)
        row: Any = await journal.redis.hgetall(key)
        script.play(request, 4)
        await reading
        await published(one)
        await journal.redis.hset(key, mapping=row)
        await kill(first, one, reading)
        for world in (second, second, third):
            late = client(world, path)
            late.response_id = response_id
            assert await late.read_to_the_end() == streamed.events


async def test_writes_that_were_made_unheard_push_nothing_out_of_the_journal(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis keeps as many entries as the edge has counted. An entry that is written again, because no answer confirmed
    it, is there twice, and earlier entries have to stay."""
    path, body, script = kinds()["chat"]
    async with edges(redis_url) as ((first, one), (second, _)):
        whole = client(first, path)
        reading = asyncio.create_task(whole.begin(body))
        script.play(await first.link.next_request(), 0)
        await reading
        await published(one)
        write = one._journal.write

        async def unheard(*args: Any) -> Any:
            await write(*args)
            raise RedisTimeoutError("no answer")

        late = client(first, path)
        with monkeypatch.context() as patch:
            patch.setattr(one._journal, "write", unheard)
            reading = asyncio.create_task(late.begin(body))
            request = await first.link.next_request()
            script.play(request, 0, 4)
            for _ in range(3):
                with pytest.raises(RedisTimeoutError):
                    await published(one)
        script.play(request, 4)
        await reading
        await published(one)
        await kill(first, one, reading)
        for streamed in (whole, late):
            again = client(second, path)
            again.response_id = streamed.response_id
            assert await again.read_to_the_end() == streamed.events
