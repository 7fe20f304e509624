"""Answers that the next model of a route continues, over an edge, a router and the shards of two models whose
tokenizers and chat templates differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from tests.fakes.two_models_world import FIRST, SECOND, TwoModelsWorld, two_models_world

pytest_plugins = ("tests.fakes.router_fixtures",)

TEXT = "the quick ñandú 東京 🎈 jumps over "
CONTINUED = f'kvloom_edge_continued_answers_total{{continued_by="{SECOND}",model="{FIRST}",route="chat"}}'
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "the fox"}]},
    "/v1/completions": {"prompt": "the fox"},
    "/v1/messages": {"messages": [{"role": "user", "content": "the fox"}]},
    "/v1/responses": {"input": "the fox"},
}

Event = dict[str, Any]


def text_of(events: list[Event]) -> str:
    """The text deltas of a stream in the shape of any API."""
    pieces: list[str] = []
    for event in events:
        if event.get("type") == "content_block_delta":
            pieces.append(event["delta"]["text"])
        elif event.get("type") == "response.output_text.delta":
            pieces.append(event["delta"])
        pieces += [
            choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
            for choice in event.get("choices", ())
        ]
    return "".join(pieces)


def details_of(events: list[Event]) -> Any:
    """What the last event says in its field `kvloom`, in the shape of any API."""
    found = [event.get("response", event).get("kvloom") for event in events]
    return next((details for details in reversed(found) if details), None)


async def ask(
    world: TwoModelsWorld,
    path: str = "/v1/chat/completions",
    on_event: Callable[[Event], None] = lambda _: None,
    **fields: Any,
) -> list[Event]:
    body = {"model": "chat", "stream": True, **BODIES[path], **fields}
    events: list[Event] = []
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as http,
        http.post(world.url + path, json=body) as response,
    ):
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                events.append(json.loads(line[6:]))
                on_event(events[-1])
    return events


@pytest.mark.parametrize("path", BODIES)
async def test_no_character_is_lost_or_repeated(router_redis_url: str, path: str) -> None:
    """The second model goes on where the client's text ends, wherever the first one is lost: also within a character of
    several tokens. All tokens together are at most max_tokens, and each model has metered its own."""
    limit: dict[str, Any] = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 60}
    async with two_models_world(router_redis_url, TEXT) as world:
        for number, num_tokens in enumerate((1, 2, *range(5, 15)), 1):
            before = world.num_metered(FIRST), world.num_metered(SECOND)
            world.lose_first_after(num_tokens)
            events = await ask(world, path, **limit)
            assert (TEXT * 9).startswith(text_of(events).rstrip("\ufffd"))  # max_tokens may cut a character
            assert len(text_of(events)) >= 60 - num_tokens - 20
            assert details_of(events) == {"continued_by": SECOND}
            after = world.num_metered(FIRST), world.num_metered(SECOND)
            assert (after[0] - before[0], after[1] - before[1]) == (num_tokens, 60 - num_tokens)
            assert f"{CONTINUED} {number}.0" in world.edge.metrics.exposition().decode()
        assert not world.edge.admission.num_running


async def test_a_fleet_that_dies_in_the_middle(router_redis_url: str) -> None:
    """No shard of the model is left. The answer that a client is reading goes on, and the next one begins at the second
    model."""
    async with two_models_world(router_redis_url, TEXT) as world:

        def kill(event: Event) -> None:
            if text_of([event]):
                world.engines[FIRST].die()

        events = await ask(world, on_event=kill, max_tokens=400, stream_options={"include_usage": True})
        assert (TEXT * 30).startswith(text_of(events).rstrip("\ufffd"))
        assert events[-1]["usage"]["completion_tokens"] == 400
        assert events[-1]["kvloom"] == {"continued_by": SECOND}
        assert {event["model"] for event in events} == {FIRST}
        metered = world.num_metered(FIRST), world.num_metered(SECOND)
        assert sum(metered) == 400
        assert min(metered) > 0
        again = await ask(world, max_tokens=5)
        assert {event["model"] for event in again} == {SECOND}


async def test_a_stop_string_across_the_seam(router_redis_url: str) -> None:
    """A client must not see the beginning of what it asked to stop at, wherever the first model is lost."""
    async with two_models_world(router_redis_url, "the dog and END of it, and more of it") as world:
        for num_tokens in range(2, 8):
            world.lose_first_after(num_tokens)
            events = await ask(world, max_tokens=80, stop=[" END of"])
            assert text_of(events) == "the dog and"
            assert events[-1]["choices"][0]["finish_reason"] == "stop"
            assert details_of(events) == {"continued_by": SECOND}
