"""A running answer continues at another edge when the edge that wrote it is gone: the client's events are those of an
undisturbed stream, byte for byte, whatever it asked for and wherever the edge dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from edge_http.recovery.edge_membership import EdgeMembership
from edge_http.resume.commit_gate import CommitGate
from kvloom.router_link.tracked_request import Assignment
from tests.fakes.edge_peers import edges, nothing, published
from tests.fakes.edge_world import EdgeWorld
from tests.fakes.redis_server import redis_server
from tests.fakes.scripted_answer import (
    COMPLETIONS,
    PARSED,
    begin_live,
    client,
    end_at,
    kill,
    kinds,
    parsed_kinds,
    same_but_names,
    undisturbed,
)
from tests.waiting import eventually

Pair = list[tuple[EdgeWorld, EdgeMembership]]


@pytest.mark.parametrize("kind", [*kinds(), *parsed_kinds()])
async def test_killed_anywhere(redis_url: str, kind: str) -> None:
    """After any of the router's updates: the whole answer is what it would have been, and the router is asked for the
    missing rest only, and only for choices that have not ended."""
    path, body, script = {**kinds(), **parsed_kinds()}[kind]
    output = PARSED if kind in parsed_kinds() else None
    async with edges(redis_url, output=output) as ((first, _), _):
        expected = await undisturbed(first, path, body, script)
    steps = range(1, len(script.steps), 1 if len(script.steps) < 15 else max(3, len(script.steps) // 8))

    async def one(end: int) -> None:
        async with edges(redis_url, output=output) as ((first, peers), (second, _)):
            streamed, request, reading = await begin_live(first, path, body, script, end)
            await kill(first, peers, reading)
            streamed.url = second.url + path
            back = asyncio.create_task(streamed.resume(by_header=end % 2 == 0))
            rest = await second.link.next_request()
            script.check(rest, end)
            assert rest.request.wanted.sampling == request.request.wanted.sampling
            assert rest.request.wanted.sampling.HasField("seed")
            assert rest.request.wanted.stop == request.request.wanted.stop
            assert (rest.request.wanted.request_id, rest.request.submit.prompt_text) == (
                request.request.wanted.request_id,
                request.request.submit.prompt_text,
            )
            assert list(rest.request.prompt_token_ids) == list(request.request.prompt_token_ids)
            script.restart(rest, end)
            assert await back == 200
            assert same_but_names(streamed.events) == expected
            assert not streamed.notices
            again = client(second, path)
            again.response_id = streamed.response_id
            assert await again.read_to_the_end() == streamed.events

    await asyncio.gather(*map(one, steps))


async def test_two_edges_die_in_a_row(redis_url: str) -> None:
    """An edge that has taken an answer over leaves as much to the next edge as the first edge left to it."""
    path, body, script = kinds()["chat with all"]
    async with edges(redis_url, count=3) as ((first, one), (second, two), (third, _)):
        expected = await undisturbed(first, path, body, script)
        streamed, _, reading = await begin_live(first, path, body, script, 7)
        await kill(first, one, reading)
        streamed.url = second.url + path
        reading = asyncio.create_task(streamed.resume())
        script.play(await second.link.next_request(), 7, 12)
        stream = second.edge.resume.streams[streamed.response_id]
        await eventually(lambda: len(streamed.events) == stream.num_events)
        await kill(second, two, reading)
        await end_at(third, path, streamed, script, 12)
        assert same_but_names(streamed.events) == expected


async def test_an_answer_keeps_all_that_was_asked(redis_url: str) -> None:
    """An urgent answer must not become a patient one because an edge has died, nor lose its receipt or its deadline,
    nor take another sub-flow's share."""
    path, body, script = kinds()["chat"]
    headers = {
        "x-kvloom-priority-class": "batch",
        "x-llm-d-inference-fairness-id": "chat 7",
        "x-kvloom-receipt": "true",
        "x-kvloom-deadline-ms": "60000",
        "x-kvloom-slo-tpot-ms": "50",
        "x-session-id": "one",
        "x-request-id": "mine",
        "traceparent": f"00-{1:032x}-{1:016x}-01",
    }
    async with edges(redis_url) as ((first, peers), (second, _)):
        first.edge.receipt_keys = Path("unused")
        streamed, request, reading = await begin_live(first, path, body, script, 4, **headers)
        asked = request.request.submit
        assert asked.request.receipt
        assert asked.request.objectives.deadline_ms == 60000
        await kill(first, peers, reading)
        await end_at(second, path, streamed, script, 4)
        again = second.link.requests[0].request.submit
        assert again.request.timeout_seconds < asked.request.timeout_seconds
        assert again.request.objectives.elapsed_ms > asked.request.objectives.elapsed_ms
        for submit in (asked, again):
            submit.request.timeout_seconds = submit.request.objectives.elapsed_ms = 0
        assert again == asked


async def test_second_edge_dies_before_it_has_written_anything(redis_url: str) -> None:
    """It dies between its claim and its first journal entry: the third edge continues from what the first edge left."""
    path, body, script = kinds()["chat"]
    async with edges(redis_url, count=3) as ((first, one), (second, two), (third, _)):
        streamed, _, reading = await begin_live(first, path, body, script, 4)
        await kill(first, one, reading)
        await two._publisher.stop()
        streamed.url = second.url + path
        reading = asyncio.create_task(streamed.resume())
        await second.link.next_request()
        second.edge.resume.publish_with(two._publisher.gate, lambda _: None)
        await second.server.stop()
        await asyncio.gather(reading, return_exceptions=True)
        await end_at(third, path, streamed, script, 4)
        assert streamed.done


async def test_two_clients_race(redis_url: str) -> None:
    """At two edges at once: one of these continues the answer, the other forwards to it; the router is asked once."""
    path, body, script = kinds()["chat"]
    async with edges(redis_url, count=3) as ((first, one), (second, _), (third, _)):
        streamed, _, reading = await begin_live(first, path, body, script, 4)
        await kill(first, one, reading)
        racers = [client(world, path) for world in (second, third, second, third)]
        for racer in racers:
            racer.response_id = streamed.response_id
        running = [asyncio.create_task(racer.resume()) for racer in racers]
        await eventually(lambda: bool(second.link.requests or third.link.requests))
        (rest,) = second.link.requests + third.link.requests
        script.play(rest, 4)
        await asyncio.gather(*running)
        assert {racer.status for racer in racers} <= {200, 409}
        assert len(second.link.requests + third.link.requests) == 1
        last = client(third, path)
        last.response_id = streamed.response_id
        whole = await last.read_to_the_end()
        for racer in racers:
            assert racer.events == whole[: len(racer.events)]
            assert racer.done or b"stream_taken_over" in racer.notices[0]


async def test_hung_edge_that_wakes_up(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It detects that another edge has taken its answer over. It shows nothing of what it has generated since, breaks
    its reader off, cancels the request, and leaves the other edge's journal alone."""
    monkeypatch.setattr("edge_http.recovery.peer_proxy.ANSWER_SECONDS", 0.1)
    monkeypatch.setattr("edge_http.recovery.peer_proxy.PROBE_SECONDS", 0.1)
    path, body, script = kinds()["chat"]
    async with edges(redis_url) as ((first, one), (second, _)):
        streamed, request, reading = await begin_live(first, path, body, script, 4)
        awake = asyncio.Event()
        flush, answer = one._publisher._flush, first.server._connections.request_handler

        async def asleep() -> None:
            await awake.wait()
            await flush()

        async def no_answer(request: Any) -> Any:
            await awake.wait()
            return await answer(request)

        monkeypatch.setattr(one._publisher, "_flush", asleep)
        monkeypatch.setattr(first.server._connections, "request_handler", no_answer)
        monkeypatch.setattr(CommitGate, "_on_late", lambda _: None)  # a process that stands still has no timers
        await asyncio.sleep(0)
        elsewhere = client(second, path)
        elsewhere.response_id, elsewhere.events = streamed.response_id, list(streamed.events)
        back = asyncio.create_task(elsewhere.resume())
        rest = await second.link.next_request()
        script.check(rest, 4)
        num_shown = len(streamed.events)
        script.play(request, 4, 6)
        awake.set()
        await asyncio.wait_for(reading, 5)
        assert len(streamed.events) == num_shown
        assert b"stream_taken_over" in streamed.notices[0]
        assert request.cancelled.is_set()
        script.play(rest, 4)
        assert await back == 200
        assert elsewhere.done
        assert streamed.response_id not in first.edge.resume.streams


async def test_losses_are_reported_and_add_up(redis_url: str) -> None:
    """The routers of the dead edge learn how much of each attempt was delivered: the metered tokens less the credited
    ones are what the client got."""
    path, body, script = kinds()["chat"]
    async with edges(redis_url, count=3) as ((first, one), (second, two), (third, _)):
        for world, link_id in ((first, "link-1"), (second, "link-2"), (third, "link-3")):
            world.edge.losses = Ledger(link_id)
        streamed, request, reading = await begin_live(first, path, body, script, 4)
        await kill(first, one, reading)
        streamed.url = second.url + path
        reading = asyncio.create_task(streamed.resume())
        rest = await second.link.next_request()
        script.play(rest, 4, 6)
        stream = second.edge.resume.streams[streamed.response_id]
        publication = second.edge.resume.publications[streamed.response_id]
        await eventually(lambda: len(streamed.events) == stream.num_events == publication.num_published)
        name = request.request.wanted.request_id
        assert second.edge.losses.reported == [("link-1", name, 3)]
        await kill(second, two, reading)
        streamed.url = third.url + path
        back = asyncio.create_task(streamed.resume())
        script.play(await third.link.next_request(), 6)
        assert await back == 200
        assert third.edge.losses.reported == [("link-1", name, 3), ("link-2", name, 2)]


async def test_what_the_journal_never_heard_of_is_not_billed(redis_url: str) -> None:
    """An edge may die between a submit and the write that records it. A router may have sent it tokens meanwhile, and
    none of them was shown, so none of them is metered."""
    path, body, script = kinds()["chat"]
    async with edges(redis_url) as ((first, one), (second, _)):
        first.edge.losses, second.edge.losses = Ledger("link-1", knows_attempts=False), Ledger("link-2")
        one._publisher._keep_at = 0.0  # as a second later
        streamed = client(first, path)
        reading = asyncio.create_task(streamed.begin(body))
        request = await first.link.next_request()
        await published(one)
        response_id = next(iter(first.edge.resume.streams))
        await kill(first, one, reading)
        streamed.response_id = response_id
        streamed.url = second.url + path
        back = asyncio.create_task(streamed.resume())
        script.play(await second.link.next_request(), 0)
        assert await back == 200
        assert second.edge.losses.reported == [("link-1", request.request.wanted.request_id, 0)]


class Ledger:
    """The loss reports of one link."""

    def __init__(self, link_id: str, *, knows_attempts: bool = True) -> None:
        self.reported: list[tuple[str, str, int]] = []
        self._link_id = link_id
        self._knows_attempts = knows_attempts

    def link_ids(self) -> list[str]:
        return [self._link_id]

    def assignments(self, handle: int) -> list[Assignment]:
        if not self._knows_attempts:
            return []
        return [Assignment(self._link_id, 3 if self._link_id == "link-2" else 5 if self._link_id == "link-3" else 0)]

    def note_delegated_loss(self, link_id: str, request_id: str, num_tokens: int) -> None:
        self.reported.append((link_id, request_id, num_tokens))


async def test_several_prompts(redis_url: str) -> None:
    """One of them has ended: only the other is requested, under its own name."""
    body = {
        "model": "tiny",
        "prompt": ["the fox", "the dog"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with edges(redis_url) as ((first, one), (second, _)):
        streamed = client(first, COMPLETIONS)
        reading = asyncio.create_task(streamed.begin(body))
        done, running = await first.link.next_request(), await first.link.next_request()
        done.start()
        done.tokens("a")
        done.finish()
        running.start()
        running.tokens("b")
        await eventually(lambda: len(streamed.events) == 3)
        await kill(first, one, reading)
        streamed.url = second.url + COMPLETIONS
        back = asyncio.create_task(streamed.resume())
        rest = await second.link.next_request()
        assert rest.request.wanted.request_id == running.request.wanted.request_id
        assert [list(choice.token_ids) for choice in rest.request.partial_choices] == [[65]]
        rest.start()
        rest.tokens("c")
        rest.finish()
        assert await back == 200
        chunks = [json.loads(event) for event in streamed.events[:-1]]
        assert [(c["index"], c["text"]) for chunk in chunks for c in chunk["choices"] if c["text"]] == [
            (0, "a"),
            (1, "b"),
            (1, "c"),
        ]
        assert chunks[-1]["usage"]["completion_tokens"] == 3


async def test_redis_away_holds_nothing_up() -> None:
    """Streams continue without Redis, with one pause of at most `commit_seconds`. A client that is ahead of the journal
    when its edge dies gets the error that its events are gone, not different events."""
    redis = redis_server()
    await asyncio.to_thread(redis.start)
    try:
        path, body, script = kinds()["chat"]
        async with edges(redis.connection_url) as ((first, _), _):
            streamed, request, reading = await begin_live(first, path, body, script, 3)
            await asyncio.to_thread(redis.stop)
            loop = asyncio.get_running_loop()
            began_at = loop.time()
            script.play(request, 3)
            await asyncio.wait_for(reading, 5)
            assert streamed.done
            assert loop.time() - began_at < 1.5
    finally:
        with contextlib.suppress(Exception):
            await asyncio.to_thread(redis.stop)


async def test_client_ahead_of_the_journal(redis_url: str) -> None:
    """Where Redis is slow, no event waits longer than `commit_seconds`. A client that has seen more than the journal
    has gets `events_gone`."""
    path, body, script = kinds()["chat"]
    async with edges(redis_url, commit_seconds=0.05) as ((first, one), (second, _)):
        streamed = client(first, path)
        reading = asyncio.create_task(streamed.begin(body))
        request = await first.link.next_request()
        script.play(request, 0, 3)
        await eventually(lambda: len(streamed.events) == 3)
        await published(one)
        one._publisher._flush = nothing
        script.play(request, 3, 5)
        await eventually(lambda: len(streamed.events) == 4)
        await kill(first, one, reading)
        streamed.url = second.url + path
        assert await streamed.resume() == 410
        assert not second.link.requests
        del streamed.events[3:]
        back = asyncio.create_task(streamed.resume())
        rest = await second.link.next_request()
        script.check(rest, 3)
        script.play(rest, 3)
        assert await back == 200
        assert streamed.done


async def test_full_edge_takes_nothing_over(redis_url: str) -> None:
    """It answers with an error, and the response is available to another edge."""
    path, body, script = kinds()["chat"]
    async with edges(redis_url, count=3) as ((first, one), (second, _), (third, _)):
        streamed, _, reading = await begin_live(first, path, body, script, 4)
        await kill(first, one, reading)
        second.edge.config.max_concurrent_requests = 0
        streamed.url = second.url + path
        assert await streamed.resume() == 429
        streamed.url = third.url + path
        back = asyncio.create_task(streamed.resume())
        script.play(await third.link.next_request(), 4)
        assert await back == 200
        assert streamed.done


async def test_nobody_comes_for_what_was_taken_over(redis_url: str) -> None:
    """The client that returned is gone again: the answer is cancelled after the grace period, like any other."""
    path, body, script = kinds()["chat"]
    async with edges(redis_url, grace_seconds=0.3) as ((first, one), (second, _)):
        streamed, _, reading = await begin_live(first, path, body, script, 4)
        await kill(first, one, reading)
        streamed.url = second.url + path
        back = asyncio.create_task(streamed.resume())
        rest = await second.link.next_request()
        back.cancel()
        await asyncio.gather(back, return_exceptions=True)
        async with asyncio.timeout(5):
            await rest.cancelled.wait()
