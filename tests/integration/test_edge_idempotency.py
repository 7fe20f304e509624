"""A request that is repeated with its Idempotency-Key is answered once, whether it is streamed, and whether it is
resumable."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from kvloom.v1.error_reason_pb2 import ErrorReason
from tests.fakes.edge_peers import edges
from tests.fakes.edge_world import EdgeWorld, chat_body, edge_world
from tests.fakes.fake_router_link import answer
from tests.fakes.resume_world import CHAT, config
from tests.waiting import eventually

KEY = "Idempotency-Key"
REPLAYED = "Idempotent-Replayed"


@pytest.fixture
async def world() -> AsyncIterator[EdgeWorld]:
    async with edge_world() as started:
        yield started


async def ask(
    world: EdgeWorld, key: str = "k", caller: str = "secret", path: str = CHAT, **fields: Any
) -> tuple[int, bytes, aiohttp.ClientResponse]:
    headers = {KEY: key, "Authorization": f"Bearer {caller}"}
    body = chat_body(**fields) if path == CHAT else {"model": "tiny", **fields}
    async with world.http.post(world.url + path, json=body, headers=headers) as response:
        return response.status, await response.read(), response


async def hang_up(asking: asyncio.Task[Any]) -> None:
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {}),
        (CHAT, {"stream": True}),
        ("/v1/completions", {"prompt": "the"}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
    ],
)
async def test_an_answered_request_is_replayed(world: EdgeWorld, path: str, fields: dict[str, Any]) -> None:
    """A client whose connection broke at the end does not pay twice, and gets the same bytes."""
    world.link.script = answer("Hel", "lo")
    status, first, response = await ask(world, path=path, **fields)
    assert (status, response.headers.get(REPLAYED)) == (200, None)
    num_requests = len(world.link.requests)
    status, again, response = await ask(world, path=path, **fields)
    assert (status, again) == (200, first)
    assert response.headers[REPLAYED] == "true"
    assert response.headers["Content-Type"].startswith(
        "text/event-stream" if "stream" in fields else "application/json"
    )
    assert len(world.link.requests) == num_requests
    await eventually(lambda: world.edge.admission.num_running == 0)


async def test_a_repeat_waits_for_the_running_answer(world: EdgeWorld) -> None:
    """Clients repeat a request because its answer takes long; that must not make it take longer."""
    first, second = asyncio.create_task(ask(world)), asyncio.create_task(ask(world))
    request = await world.link.next_request()
    await eventually(lambda: world.edge.admission.num_running == 2)
    request.start()
    request.tokens("Hello")
    request.finish()
    (_, body, _), (_, same, _) = await first, await second
    assert body == same
    assert json.loads(body)["choices"][0]["message"]["content"] == "Hello"
    assert len(world.link.requests) == 1


async def test_a_client_that_was_cut_off_finds_its_answer(world: EdgeWorld) -> None:
    """The request runs on for the grace period, in which its client can repeat it."""
    asking = asyncio.create_task(ask(world))
    request = await world.link.next_request()
    await hang_up(asking)
    await eventually(lambda: world.edge.admission.num_running == 1)
    again = asyncio.create_task(ask(world))
    await eventually(lambda: world.edge.admission.num_running == 2)
    assert not request.cancelled.is_set()
    request.start()
    request.finish()
    assert (await again)[0] == 200
    assert len(world.link.requests) == 1


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
async def test_without_a_repeat_it_is_cancelled(fields: dict[str, Any]) -> None:
    """A client that never comes back occupies no engine for longer than the grace period."""
    async with edge_world(config(grace_seconds=0.05)) as world:
        asking = asyncio.create_task(ask(world, **fields))
        request = await world.link.next_request()
        await hang_up(asking)
        async with asyncio.timeout(5):
            await request.cancelled.wait()
        await eventually(lambda: world.edge.admission.num_running == 0)
        assert len(world.edge.idempotent_answers) == len(world.edge.resume.streams) == 0
        assert world.edge.admission.collected.num_leases == 0


async def test_the_key_belongs_to_one_request_of_one_caller(world: EdgeWorld) -> None:
    """Another body is refused, so that no client takes the answer to another question for its own; other callers' keys
    are theirs."""
    world.link.script = answer("one")
    await ask(world)
    others: list[dict[str, Any]] = [{"seed": 5}, {"stream": True}]
    for other in others:
        status, body, _ = await ask(world, **other)
        assert (status, json.loads(body)["error"]["param"]) == (409, KEY)
    await ask(world, key="streamed", stream=True)
    assert (await ask(world, key="streamed"))[0] == 409
    world.link.script = answer("two")
    _, body, response = await ask(world, caller="other")
    assert json.loads(body)["choices"][0]["message"]["content"] == "two"
    assert REPLAYED not in response.headers


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
async def test_failures_are_not_kept(world: EdgeWorld, fields: dict[str, Any]) -> None:
    """A repeat after a failure is a new attempt: the key protects answers, not errors."""
    world.link.script = lambda request: request.fail(ErrorReason.ERROR_REASON_ENGINE_FAILED)
    assert (await ask(world, **fields))[0] == 500
    assert (await ask(world, max_tokens=-1, **fields))[0] == 400

    def fail_late(request: Any) -> None:
        request.start()
        request.tokens("Hel")
        request.fail(ErrorReason.ERROR_REASON_SHARD_LOST)

    world.link.script = fail_late
    status, body, _ = await ask(world, **fields)
    assert b"shard_lost" in body
    assert status == (200 if fields else 502)
    world.link.script = answer("Hello")
    status, body, response = await ask(world, **fields)
    assert status == 200
    assert b"shard_lost" not in body
    assert REPLAYED not in response.headers


async def test_kept_answers_are_bounded() -> None:
    """In time, in memory, and in what one caller may have of it."""
    async with edge_world(config(idempotency_seconds=0.05)) as world:
        world.link.script = answer("Hello")
        ways: list[dict[str, Any]] = [{}, {"stream": True}]
        for fields in ways:
            await ask(world, key=str(fields.get("stream", "")) or "whole", **fields)
        await eventually(lambda: not len(world.edge.idempotent_answers))
        assert world.edge.idempotent_answers.num_bytes == 0
    async with edge_world(config(max_kept_answer_bytes=10_000)) as world:
        world.link.script = answer("x" * 2000)
        for number in range(3):
            await ask(world, key=f"key-{number}", caller="greedy")
        assert len(world.edge.idempotent_answers) == 1
        await ask(world, key="a", caller="other")
        await ask(world, key="a", caller="third")
        assert 0 < world.edge.idempotent_answers.num_bytes <= 10_000
        assert (await ask(world, key="key-0", caller="greedy"))[0] == 200
        world.link.script = answer("y" * 6000)
        for _ in range(2):  # larger than what one caller may have
            assert REPLAYED not in (await ask(world, key="large", caller="greedy"))[2].headers
    async with edge_world(config(idempotency_seconds=0)) as world:
        world.link.script = answer("Hello")
        await ask(world)
        assert len(world.edge.idempotent_answers) == 0


async def test_stopping_ends_what_runs(world: EdgeWorld) -> None:
    """An edge that stops leaves no request in the engine, and its client an error instead of silence."""
    asking = asyncio.create_task(ask(world))
    request = await world.link.next_request()
    await world.edge.idempotent_answers.close()
    status, body, _ = await asking
    assert (status, json.loads(body)["error"]["code"]) == (499, "cancelled")
    assert request.cancelled.is_set()
    assert world.edge.admission.num_running == 0


async def test_a_repeat_at_another_edge(redis_url: str) -> None:
    """Edges share a port, so a repeat may reach another one. It gets the answer of the first, also one that still
    runs, and makes its own when the first edge has none."""
    async with edges(redis_url) as ((first, _), (second, _)):
        asking = asyncio.create_task(ask(first))
        request = await first.link.next_request()
        repeat = asyncio.create_task(ask(second))
        await eventually(lambda: first.edge.admission.num_running + second.edge.admission.num_running == 2)
        request.start()
        request.tokens("Hello")
        request.finish()
        _, body, _ = await asking
        status, same, response = await repeat
        assert (status, same) == (200, body)
        assert response.headers[REPLAYED] == "true"
        assert (await ask(second, seed=5))[0] == 409
        assert not second.link.requests
        await first.edge.idempotent_answers.close()
        second.link.script = answer("anew")
        status, body, response = await ask(second)
        assert (status, response.headers.get(REPLAYED)) == (200, None)
        assert b"anew" in body
