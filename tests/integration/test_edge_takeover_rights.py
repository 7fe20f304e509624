"""Which callers may have a running answer taken over, and which answers: with its key, as its caller, and never one
that was given up."""

from __future__ import annotations

import asyncio

from tests.fakes.edge_peers import edges, published
from tests.fakes.scripted_answer import (
    begin_live,
    client,
    kill,
    kinds,
)
from tests.waiting import eventually


async def test_same_key_at_another_edge(redis_url: str) -> None:
    """A client that repeats its POST gets the answer that it began: forwarded while its edge lives, also before the
    first event, and taken over after the edge has died. Another body under the key is refused. Another caller has its
    own keys."""
    path, body, script = kinds()["chat"]
    async with edges(redis_url) as ((first, one), (second, _)):
        waiting = client(first, path, **{"Idempotency-Key": "k"})
        reading = asyncio.create_task(waiting.begin(body))
        request = await first.link.next_request()
        repeated = client(second, path, **{"Idempotency-Key": "k"})
        repeating = asyncio.create_task(repeated.begin(body))
        await asyncio.wait([reading], timeout=5)  # taken over by the repeated one
        script.play(request, 0, 4)
        await eventually(lambda: len(repeated.events) == 3)
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
    """A request that was refused or cancelled may be repeated under its key, at any edge."""
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
    """It gets the same answer as for an unknown id, and no request is submitted for it."""
    path, body, script = kinds()["chat"]
    async with edges(redis_url) as ((first, one), (second, _)):
        streamed, _, reading = await begin_live(first, path, body, script, 4)
        await kill(first, one, reading)
        stranger = client(second, path, key="other")
        stranger.response_id = streamed.response_id
        assert await stranger.resume() == 404
        assert not second.link.requests


async def test_cancelled_answer_is_not_revived(redis_url: str) -> None:
    """An answer that its client cancelled, or abandoned for too long, is over, although its edge dies later."""
    path, body, script = kinds()["chat"]
    async with edges(redis_url) as ((first, one), (second, _)):
        streamed, _, reading = await begin_live(first, path, body, script, 4)
        first.edge.resume._on_abandoned(first.edge.resume.streams[streamed.response_id])
        await published(one)
        await kill(first, one, reading)
        streamed.url = second.url + path
        assert await streamed.resume() == 404
        assert not second.link.requests
