"""Resuming a continued answer at another edge: while its edge lives, and after it has died."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from edge_http.recovery.edge_membership import EdgeMembership
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import FleetState, ModelInfo
from kvloom_common.config import RouteConfig
from kvloom_common.models.model_routes import ModelRoutes
from tests.fakes.edge_peers import die, edges, published
from tests.fakes.edge_world import EdgeWorld, chat_body
from tests.fakes.fake_router_link import ERROR, FakeRequest
from tests.fakes.resume_world import CHAT, client
from tests.fakes.resuming_client import ResumingClient
from tests.fakes.served_models import tiny_model
from tests.fakes.tiny_tokenizer import model_tokenizer
from tests.waiting import eventually

Pair = list[tuple[EdgeWorld, EdgeMembership]]
ROUTES = ModelRoutes([RouteConfig(name="chat", targets=["tiny"], fallback=["second"], on_loss="continue")])
LOST = KvloomError(ErrorReason.ERROR_REASON_SHARD_LOST, "the shard is gone")


@pytest.fixture
async def pair(redis_url: str) -> AsyncIterator[Pair]:
    async with edges(redis_url) as started:
        for world, _ in started:
            world.edge.models.routes = ROUTES
            world.edge.models.by_name = {**world.edge.models.by_name, "second": tiny_model("second")}
            infos = [ModelInfo(name=name, num_ready_shards=1, max_model_len=4096) for name in ("tiny", "second")]
            world.link.tell(FleetState(models=infos))
        yield started


def add(request: FakeRequest, text: str) -> None:
    request.tokens(text, token_ids=model_tokenizer().encode_now(text))


async def begin(pair: Pair) -> tuple[ResumingClient, FakeRequest]:
    """A stream that has lost its connection after its first text, and then its model; and the request to the next
    model, which has added a text."""
    world, peers = pair[0]
    streamed = client(world)
    reading = asyncio.create_task(streamed.begin(chat_body(model="chat", stream=True), stop_after=2))
    first = await world.link.next_request()
    first.start()
    add(first, "the")
    await reading
    await published(peers)
    add(first, " quick")
    first.finish(ERROR, error=LOST)
    second = await world.link.next_request()
    second.start()
    add(second, " fox")
    await published(peers)
    streamed.url = pair[1][0].url + CHAT
    return streamed, second


def text_of(streamed: ResumingClient) -> str:
    events = [json.loads(event) for event in streamed.events if event.startswith(b"{")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)


async def test_another_edge_passes_on_to_the_owner(pair: Pair) -> None:
    """Nothing changes for a client that comes back to any edge, as long as the one that has the answer lives."""
    streamed, second = await begin(pair)
    back = asyncio.create_task(streamed.resume())
    await eventually(lambda: pair[0][0].edge.resume.streams[streamed.response_id].is_attended)
    add(second, " jumps")
    second.finish()
    assert await back == 200
    assert (streamed.done, text_of(streamed)) == (True, "the quick fox jumps")


async def test_no_other_edge_continues_what_a_second_model_has_continued(pair: Pair) -> None:
    """What the journal has of the answer are tokens of two models. The client is told so, and no model is asked to go
    on with what it did not write."""
    streamed, _ = await begin(pair)
    await die(*pair[0])
    assert await streamed.resume() == 410
    assert b"too little of the answer was saved" in streamed.notices[-1]
    assert not pair[1][0].link.requests


async def test_an_answer_that_has_ended_is_replayed_after_its_edge_has_died(pair: Pair) -> None:
    """Its events are all that is needed."""
    streamed, second = await begin(pair)
    second.finish()
    await eventually(lambda: pair[0][0].edge.resume.streams[streamed.response_id].ended)
    await published(pair[0][1])
    await die(*pair[0])
    assert await streamed.resume() == 200
    assert (streamed.done, text_of(streamed)) == (True, "the quick fox")
    assert json.loads(streamed.events[-2])["kvloom"] == {"continued_by": "second"}
