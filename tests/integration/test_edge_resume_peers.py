"""Streams that are resumed at another edge, while the edge that began them lives and after it has died."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from edge_http.recovery.edge_membership import EdgeMembership
from kvloom_common.config import RedisConfig
from tests.fakes.edge_peers import begin, die, edges, join, left_by_a_dead_edge, published
from tests.fakes.edge_world import EdgeWorld, chat_body, edge_world
from tests.fakes.fake_router_link import answer
from tests.fakes.redis_server import redis_server
from tests.fakes.resume_world import CHAT, client
from tests.waiting import eventually


@pytest.fixture
async def pair(redis_url: str) -> AsyncIterator[list[tuple[EdgeWorld, EdgeMembership]]]:
    async with edges(redis_url) as started:
        yield started


async def test_another_edge_passes_on_to_the_owner(pair: list[tuple[EdgeWorld, EdgeMembership]]) -> None:
    """A load balancer may send a returning client to any edge: the client gets missed events and live ones all the
    same."""
    (first, _), (second, _) = pair
    streamed, request = await begin(first, 4)
    request.tokens("missed ")
    await published(pair[0][1])
    streamed.url = second.url + CHAT
    back = asyncio.create_task(streamed.resume())
    await eventually(lambda: first.edge.resume.streams[streamed.response_id].is_attended)
    request.tokens("live")
    request.finish()
    assert await back == 200
    assert streamed.done
    again = client(first)
    again.response_id = streamed.response_id
    assert await again.read_to_the_end() == streamed.events
    assert await streamed.resume() == 204


@pytest.mark.parametrize("seed", range(6))
async def test_any_sequence_of_drops_at_any_edge_gives_the_same_events(redis_url: str, seed: int) -> None:
    """Seeded: the client returns to one of three edges each time, and loses its connection at any event."""
    rng = random.Random(seed)
    async with edges(redis_url, count=3) as started:
        worlds = [world for world, _ in started]
        streamed, request = await begin(worlds[0], 2)
        await published(started[0][1])
        deltas = ["0 ", *(f"{i} " for i in range(1, 40))]
        back: asyncio.Task[int] | None = None
        for delta in deltas[1:]:
            if back is None or back.done():
                streamed.url = rng.choice(worlds).url + CHAT
                back = asyncio.create_task(streamed.resume(stop_after=len(streamed.events) + rng.randrange(8)))
            request.tokens(delta)
            await asyncio.sleep(0.003 * rng.random())  # sleep: the pace of tokens
        request.finish()
        assert back is not None
        await back
        streamed.url = worlds[1].url + CHAT
        events = await streamed.read_to_the_end()
        chunks = [json.loads(event) for event in events[:-1]]
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == "".join(deltas)
        whole = client(worlds[0])
        whole.response_id = streamed.response_id
        assert await whole.read_to_the_end() == events
        assert not streamed.notices


async def test_drop_between_client_and_relay_starts_the_clock(redis_url: str) -> None:
    """The edge that holds the answer must notice through the other edge that its client is gone, and may cancel
    then."""
    async with edges(redis_url, grace_seconds=0.2) as ((first, peers), (second, _)):
        streamed, request = await begin(first, 2)
        await published(peers)
        streamed.url = second.url + CHAT
        back = asyncio.create_task(streamed.resume())
        await eventually(lambda: first.edge.resume.streams[streamed.response_id].is_attended)
        back.cancel()
        await asyncio.gather(back, return_exceptions=True)
        async with asyncio.timeout(5):
            await request.cancelled.wait()


async def test_cancel_at_another_edge(pair: list[tuple[EdgeWorld, EdgeMembership]]) -> None:
    """A cancellation takes effect wherever the load balancer sends it."""
    (first, peers), (second, _) = pair
    streamed, request = await begin(first, 2)
    await published(peers)
    cancel = f"{second.url}{CHAT}/{streamed.response_id}/cancel"
    async with second.http.post(cancel, headers={"Authorization": "Bearer other"}) as response:
        assert response.status == 404
    assert not request.cancelled.is_set()
    async with second.http.post(cancel, headers=streamed.headers) as response:
        assert (response.status, await response.json()) == (200, {"id": streamed.response_id, "cancelled": True})
    async with asyncio.timeout(5):
        await request.cancelled.wait()


async def test_other_callers_find_nothing_elsewhere(pair: list[tuple[EdgeWorld, EdgeMembership]]) -> None:
    """Neither through the other edge nor in the journal; the answer is the same as for an id that never existed."""
    (first, peers), (second, _) = pair
    streamed, _ = await begin(first, 2)
    await published(peers)
    stranger, unknown = client(second, key="other"), client(second)
    stranger.response_id = streamed.response_id
    unknown.response_id = streamed.response_id[:-4] + "ffff"
    for _ in range(2):
        assert await stranger.resume() == 404
        assert await unknown.resume() == 404
        assert stranger.notices == unknown.notices
        await die(first, peers)
        peers._publisher.start()  # for the fixture to stop


async def test_finished_answer_survives_its_edge(pair: list[tuple[EdgeWorld, EdgeMembership]]) -> None:
    """A complete answer is replayed to the last byte, although the edge that wrote it is dead."""
    (first, peers), (second, _) = pair
    first.link.script = answer("Hel", "lo")
    whole, streamed = client(first), client(first)
    await whole.begin(chat_body(stream=True))
    streamed.response_id = whole.response_id
    await published(peers)
    await die(first, peers)
    streamed.url = second.url + CHAT
    assert await streamed.resume(stop_after=2) == 200
    assert await streamed.read_to_the_end() == whole.events
    assert await streamed.resume() == 204


async def test_edge_that_was_restarted_knows_what_it_had_written(redis_url: str) -> None:
    """A supervisor restarts a dead edge at its address: with nothing in memory, it still has its journal."""
    redis = RedisConfig(url=redis_url, key_prefix="edge-resume-restarted")
    whole, port = await left_by_a_dead_edge(redis)
    async with edge_world(port=port) as after:
        peers = join(after, redis)
        streamed = client(after)
        streamed.response_id = whole.response_id
        assert await streamed.read_to_the_end() == whole.events
        await peers.close()


async def test_owner_that_dies_behind_a_relay(pair: list[tuple[EdgeWorld, EdgeMembership]]) -> None:
    """The forwarding edge must not end the stream as if it were complete: the client sees a broken connection, and
    returns."""
    (first, peers), (second, _) = pair
    streamed, request = await begin(first, 2)
    await published(peers)
    streamed.url = second.url + CHAT
    back = asyncio.create_task(streamed.resume())
    stream = first.edge.resume.streams[streamed.response_id]
    await eventually(lambda: stream.is_attended)
    request.tokens("live")
    await eventually(lambda: len(streamed.events) == 3)
    runner = first.server._runner.server
    assert runner is not None
    for connection in list(runner.connections):
        assert connection.transport is not None
        connection.transport.abort()
    with pytest.raises(Exception, match=r"payload|disconnected|closed"):
        await back
    assert not streamed.done


async def test_journal_is_bounded_and_may_overlap(redis_url: str) -> None:
    """Old entries are dropped, so that Redis cannot fill up; a client that needs one of them gets an error."""
    async with edges(redis_url, max_journal_bytes=2 * 2**20) as ((first, peers), (second, _)):
        streamed, request = await begin(first, 2)
        for _ in range(30):
            for _ in range(100):
                request.tokens("x" * 1000)
            await published(peers)
        assert peers._publisher._num_bytes <= 2 * 2**20
        await die(first, peers)
        streamed.url = second.url + CHAT
        assert await streamed.resume() == 410


async def test_redis_outage_harms_nothing_but_resuming_elsewhere() -> None:
    """Streams continue and are resumable at their edge; once Redis is back, the other edges know them too."""
    redis = redis_server()
    await asyncio.to_thread(redis.start)
    try:
        async with edges(redis.connection_url) as ((first, _), (second, _)):
            await asyncio.to_thread(redis.stop)
            streamed, request = await begin(first, 2)
            back = asyncio.create_task(streamed.resume())
            request.tokens("x")
            request.finish()
            assert await back == 200
            assert streamed.done
            elsewhere = client(second)
            elsewhere.response_id = streamed.response_id
            assert await elsewhere.resume() == 503
            error = json.loads(elsewhere.notices[0])["error"]
            assert error["code"] == "response_unavailable"
            assert error["message"].startswith("Where this response is")
    finally:
        with contextlib.suppress(Exception):
            await asyncio.to_thread(redis.stop)


async def test_redis_that_starts_anew_loses_no_answer(redis_url: str) -> None:
    """It is empty, as after a crash. Until the edges have announced themselves again, a client is asked to come back
    later, and never gets the error that its answer is gone. Ended answers are written again, so that they survive their
    edge. (`kvloom-lab chaos` found it.)"""
    async with edges(redis_url) as ((first, peers), (second, _)):
        first.link.script = answer("Hel", "lo")
        whole, streamed = client(first), client(first)
        await whole.begin(chat_body(stream=True))
        streamed.response_id, streamed.url = whole.response_id, second.url + CHAT
        await published(peers)
        async with redis.asyncio.Redis.from_url(redis_url) as server:
            await server.flushall()
        assert await streamed.resume() == 503

        async def is_found() -> bool:
            return await streamed.resume(stop_after=2) == 200

        await eventually(is_found, "the response is found again")
        await published(peers)
        await die(first, peers)
        assert await streamed.read_to_the_end() == whole.events


async def test_connections_to_a_redis_that_was_replaced_cost_nothing(redis_url: str) -> None:
    """The pool detects one by one that they are dead. An edge that was killed while its journal waited a second because
    of one of them left answers that no other edge could find. (`kvloom-lab chaos` found it.)"""
    async with edges(redis_url, 1) as ((world, peers),):
        journal = peers._publisher._journal
        await asyncio.gather(*(journal.redis.ping() for _ in range(4)))
        async with redis.asyncio.Redis.from_url(redis_url) as server:
            await server.client_kill_filter(_type="normal")
        streamed, _ = await begin(world, 2)
        await asyncio.gather(*(published(peers), *(journal.redis.ping() for _ in range(4))))
        assert await journal.read_response(peers._publisher._tag, streamed.response_id) is not None
