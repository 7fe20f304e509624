"""Which clients may resume a stream, for how long and how much of it; and what remains if none does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from tests.fakes.edge_world import EdgeWorld, chat_body, edge_world
from tests.fakes.fake_router_link import answer
from tests.fakes.resume_world import CHAT, client, config, metric, unattended
from tests.waiting import eventually


@pytest.fixture
async def world() -> AsyncIterator[EdgeWorld]:
    async with edge_world() as started:
        yield started


async def test_stream_not_begun_as_resumable_is_cancelled_at_once(world: EdgeWorld) -> None:
    """Most clients that go away never come back: their answers must not cost anything more."""
    plain = client(world)
    begin = asyncio.create_task(plain.begin(chat_body(stream=True), stop_after=1, resume="off"))
    request = await world.link.next_request()
    request.start()
    await begin
    async with asyncio.timeout(5):
        await request.cancelled.wait()
    assert await plain.resume() == 404


async def test_grace_zero_turns_resuming_off() -> None:
    """With 0, an answer is cancelled at once, whatever the client asks for."""
    async with edge_world(config(grace_seconds=0)) as world:
        dropped = client(world)
        begin = asyncio.create_task(dropped.begin(chat_body(stream=True), stop_after=1))
        request = await world.link.next_request()
        request.start()
        await begin
        async with asyncio.timeout(5):
            await request.cancelled.wait()
        assert await dropped.resume() == 404


async def test_on_by_default_and_off_by_header() -> None:
    """An operator may enable resuming for clients that cannot send the header; a client may still refuse."""
    async with edge_world(config(by_default=True)) as world:
        for resume, is_kept in (("on", True), ("off", False)):
            dropped = client(world)
            begin = asyncio.create_task(dropped.begin(chat_body(stream=True), stop_after=1, resume=resume))
            request = await world.link.next_request()
            request.start()
            await begin
            if is_kept:
                await unattended(world)
                assert not request.cancelled.is_set()
            else:
                async with asyncio.timeout(5):
                    await request.cancelled.wait()


async def test_client_that_does_not_return_is_cancelled() -> None:
    """No client reads the answer: after the grace period the engine stops, and the response is gone."""
    async with edge_world(config(grace_seconds=0.05)) as world:
        dropped = client(world)
        begin = asyncio.create_task(dropped.begin(chat_body(stream=True), stop_after=1))
        request = await world.link.next_request()
        request.start()
        await begin
        await unattended(world)
        request.tokens("in vain")
        assert not request.cancelled.is_set()
        async with asyncio.timeout(5):
            await request.cancelled.wait()
        await eventually(lambda: world.edge.admission.num_running == 0)
        assert await dropped.resume() == 404
        assert await metric(world, "kvloom_edge_expired_responses_total") == 1
        assert await metric(world, "kvloom_edge_unclaimed_events_total") == 1
        assert await metric(world, "kvloom_edge_resume_bytes") == 0


async def test_returning_in_time_stops_the_clock() -> None:
    """The grace period covers absence only; a client that is connected has all the time it needs."""
    async with edge_world(config(grace_seconds=0.1)) as world:
        dropped = client(world)
        begin = asyncio.create_task(dropped.begin(chat_body(stream=True), stop_after=1))
        request = await world.link.next_request()
        request.start()
        await begin
        await unattended(world)
        back = asyncio.create_task(dropped.resume())
        await unattended(world, 0)
        await asyncio.sleep(0.2)  # sleep: it is the passing of time that must not matter
        assert not request.cancelled.is_set()
        request.tokens("late")
        request.finish()
        assert await back == 200
        assert dropped.done


async def test_finished_answer_is_kept_until_it_expires() -> None:
    """The last events can be lost like any other, so a complete answer is kept; but not for ever, because memory is
    finite."""
    async with edge_world(config(grace_seconds=0.2)) as world:
        world.link.script = answer("Hello")
        dropped = client(world)
        await dropped.begin(chat_body(stream=True), stop_after=0)
        assert await dropped.resume() == 200
        assert dropped.done
        assert await dropped.resume() == 204
        await eventually(lambda: not world.edge.resume.streams)
        assert await dropped.resume() == 404
        assert await metric(world, "kvloom_edge_resumed_streams_total") == 2
        assert await metric(world, "kvloom_edge_replayed_events_total") == len(dropped.events)
        assert await metric(world, 'kvloom_edge_output_tokens_total{model="tiny"}') == 1  # counted once


async def test_other_callers_find_nothing(world: EdgeWorld) -> None:
    """On every route, another key gets the same answer as for an id that never existed."""
    world.link.script = answer("secret")
    owner = client(world)
    await owner.begin(chat_body(stream=True), stop_after=1)
    bodies = []
    for key, response_id in (("other", owner.response_id), ("secret", "chatcmpl-" + "0" * 24)):
        stranger = client(world, key=key)
        stranger.response_id = response_id
        assert await stranger.resume() == 404
        bodies += stranger.notices
        cancel = f"{world.url}{CHAT}/{response_id}/cancel"
        async with world.http.post(cancel, headers=stranger.headers) as response:
            bodies.append(await response.read())
    assert len(set(bodies)) == 1
    async with world.http.get(f"{world.url}{CHAT}/{owner.response_id}?stream=true") as response:
        assert response.status == 404  # without any key
    async with world.http.get(
        f"{world.url}/v1/completions/{owner.response_id}?stream=true", headers=owner.headers
    ) as response:
        assert response.status == 404  # not where this kind of answers is


async def test_evicted_events_are_said_to_be_gone() -> None:
    """The buffer is bounded: a client that is too late for an event gets an error, not an answer with a gap."""
    async with edge_world(config(max_response_bytes=8192)) as world:
        reader = client(world)
        begin = asyncio.create_task(reader.begin(chat_body(stream=True)))
        request = await world.link.next_request()
        request.start()
        for i in range(100):
            request.tokens(f"{i}")
        request.finish()
        await begin
        late = client(world)
        late.response_id = reader.response_id
        assert await late.resume() == 410
        assert json.loads(late.notices[0])["error"]["code"] == "events_gone"
        late.events = reader.events[:90]
        assert await late.resume() == 200
        assert late.events == reader.events


async def test_stream_that_nobody_could_take_up_whole_is_cancelled() -> None:
    """Once an event that no client has is forgotten, continuing would be useless."""
    async with edge_world(config(max_response_bytes=8192)) as world:
        dropped = client(world)
        begin = asyncio.create_task(dropped.begin(chat_body(stream=True), stop_after=1))
        request = await world.link.next_request()
        request.start()
        await begin
        await unattended(world)
        for i in range(100):
            request.tokens(f"{i}")
        async with asyncio.timeout(5):
            await request.cancelled.wait()
        assert await dropped.resume() == 404


async def test_all_responses_together_are_bounded() -> None:
    """However many clients drop, memory stays within `max_bytes`: complete answers are evicted first, the oldest before
    the others."""
    async with edge_world(config(max_bytes=64 * 1024)) as world:
        world.link.script = answer(*["x" * 1000] * 8)
        clients = []
        for _ in range(12):
            clients.append(client(world))
            await clients[-1].begin(chat_body(stream=True), stop_after=1)
            assert world.edge.resume._retention.num_bytes <= 64 * 1024
        assert await clients[0].resume() == 404
        assert await clients[-1].resume() == 200
        assert clients[-1].done
        assert await metric(world, "kvloom_edge_evicted_responses_total") > 0


async def test_unattended_answers_are_bounded() -> None:
    """Clients that leave after their request must not occupy the whole capacity of the edge: the answers that were left
    first are abandoned."""
    async with edge_world(config(max_unattended=2)) as world:
        clients, requests = [], []
        for _ in range(5):
            clients.append(client(world))
            begin = asyncio.create_task(clients[-1].begin(chat_body(stream=True), stop_after=1))
            requests.append(await world.link.next_request())
            requests[-1].start()
            await begin
            await eventually(lambda: all(not stream.is_attended for stream in world.edge.resume.streams.values()))
        async with asyncio.timeout(5):
            await asyncio.gather(*(request.cancelled.wait() for request in requests[:3]))
        assert not any(request.cancelled.is_set() for request in requests[3:])
        await eventually(lambda: world.edge.admission.num_running == 2)
        assert await clients[0].resume() == 404
        requests[4].finish()
        assert await clients[4].resume() == 200
        assert clients[4].done


async def test_cancel_ends_it_at_once(world: EdgeWorld) -> None:
    """A user who presses stop does not want to pay for the grace period."""
    dropped = client(world)
    begin = asyncio.create_task(dropped.begin(chat_body(stream=True), stop_after=1))
    request = await world.link.next_request()
    request.start()
    await begin
    async with world.http.post(f"{world.url}{CHAT}/{dropped.response_id}/cancel", headers=dropped.headers) as response:
        assert (response.status, await response.json()) == (200, {"id": dropped.response_id, "cancelled": True})
    assert request.cancelled.is_set() or await request.cancelled.wait()
    assert await dropped.resume() == 200
    assert json.loads(dropped.events[-1])["error"]["code"] == "cancelled"


@pytest.mark.parametrize(
    ("query", "headers", "param"),
    [
        ("", {}, "stream"),
        ("stream=true&starting_after=x", {}, "starting_after"),
        ("stream=true&starting_after=-1", {}, "starting_after"),
        ("stream=true&starting_after=99999999999999999999", {}, "starting_after"),
        ("stream=true&starting_after=99", {}, "starting_after"),
        ("stream=true", {"Last-Event-ID": "²"}, "Last-Event-ID"),
    ],
)
async def test_bad_positions_are_refused(world: EdgeWorld, query: str, headers: dict[str, str], param: str) -> None:
    """An impossible position is the client's error, is named, and disturbs no reader."""
    world.link.script = answer("x")
    dropped = client(world)
    await dropped.begin(chat_body(stream=True), stop_after=1)
    url = f"{world.url}{CHAT}/{dropped.response_id}?{query}"
    async with world.http.get(url, headers={**dropped.headers, **headers}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == param


async def test_bad_headers_of_a_request_are_refused(world: EdgeWorld) -> None:
    """Each names its header; nothing is submitted."""
    for headers, param in (
        ({"x-kvloom-resume": "maybe"}, "x-kvloom-resume"),
        ({"x-kvloom-resume": "on", "Idempotency-Key": "a b"}, "Idempotency-Key"),
        ({"x-kvloom-resume": "on", "Last-Event-ID": "3"}, "Last-Event-ID"),
    ):
        status, body = await world.post(CHAT, chat_body(stream=True), headers=headers)
        assert (status, body["error"]["param"]) == (400, param)
    assert not world.link.requests


async def test_drain_waits_for_unattended_answers(world: EdgeWorld) -> None:
    """A restart must not lose an answer whose client is about to return; it can return while the edge drains."""
    dropped = client(world)
    begin = asyncio.create_task(dropped.begin(chat_body(stream=True), stop_after=1))
    request = await world.link.next_request()
    request.start()
    await begin
    await unattended(world)
    drain = asyncio.create_task(world.server.drain())
    await eventually(lambda: world.edge.admission.draining)
    back = asyncio.create_task(dropped.resume())
    await unattended(world, 0)
    assert not drain.done()
    request.tokens("whole")
    request.finish()
    assert await back == 200
    assert dropped.done
    async with asyncio.timeout(5):
        await drain


async def test_stop_cancels_what_is_unattended() -> None:
    """An edge that stops leaves nothing running in the fabric, and no task behind."""
    async with edge_world() as world:
        dropped = client(world)
        begin = asyncio.create_task(dropped.begin(chat_body(stream=True), stop_after=1))
        request = await world.link.next_request()
        request.start()
        await begin
        await unattended(world)
        await world.server.stop()
        assert request.cancelled.is_set()
        assert world.edge.admission.num_running == 0
