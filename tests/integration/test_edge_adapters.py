"""Requests for adapters over HTTP: by which names, what routers get, and what clients see of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from kvloom.adapters import Adapter
from kvloom.v1.router_service_pb2 import AdapterInfo, FleetState, ModelInfo
from kvloom_common.config import RouteConfig
from kvloom_common.models.catalogue import Catalogue, adapters_of
from kvloom_common.models.model_routes import ModelRoutes
from tests.fakes.edge_world import EdgeWorld, chat_body, edge_world
from tests.fakes.fake_router_link import FakeRouterLink, answer
from tests.fakes.served_models import tiny_model

ROUTES = ModelRoutes([RouteConfig(name="counsel", targets=["tiny:law"]), RouteConfig(name="poetry", targets=["tiny"])])
MESSAGES: Any = [{"role": "user", "content": "the fox"}]


def fleet() -> FleetState:
    adapters = [AdapterInfo(name=name, checksum=f"{name}-1", num_ready_shards=1) for name in ("law", "poetry", "tiny")]
    return FleetState(models=[ModelInfo(name="tiny", num_ready_shards=2, max_model_len=64, adapters=adapters)])


@pytest.fixture
async def world() -> AsyncIterator[EdgeWorld]:
    link = FakeRouterLink()
    link.tell(fleet())
    link.script = answer("Hi")
    catalogue = Catalogue([tiny_model()])
    catalogue.set_adapters(adapters_of(link.fleet))
    async with edge_world(link=link, routes=ROUTES) as started:
        started.edge.models.by_name = catalogue.by_name
        yield started


@pytest.mark.parametrize("name", ["tiny:law", "law", "counsel"])
async def test_an_adapter_is_requested_by_either_name_or_by_a_route(world: EdgeWorld, name: str) -> None:
    """The router gets the full name and the checksum, by which the answer can continue only with this adapter."""
    status, body = await world.chat(model=name)
    assert status == 200
    assert body["model"] == "tiny:law"
    (wanted,) = [request.request.wanted for request in world.link.requests]
    assert (wanted.model, wanted.adapter_checksum) == ("tiny:law", "law-1")


@pytest.mark.parametrize(("name", "model"), [("tiny", "tiny"), ("poetry", "tiny"), ("tiny:tiny", "tiny:tiny")])
async def test_names_of_models_and_routes_have_precedence(world: EdgeWorld, name: str, model: str) -> None:
    """Whoever registers an adapter must not redirect the requests of others; its full name still works."""
    assert (await world.chat(model=name))[1]["model"] == model
    assert world.link.requests[0].request.wanted.adapter_checksum == ("tiny-1" if ":" in model else "")


async def test_every_api_that_generates_takes_adapters(world: EdgeWorld) -> None:
    """Clients of any API may ask for one."""
    limit = {"model": "law", "max_tokens": 4}
    for path, body in (
        ("/v1/completions", {**limit, "prompt": "the fox"}),
        ("/v1/responses", {"model": "law", "input": "the fox"}),
        ("/v1/messages", {**limit, "messages": MESSAGES}),
    ):
        status, answered = await world.post(path, body)
        assert (status, answered["model"]) == (200, "tiny:law")
    assert {request.request.wanted.adapter_checksum for request in world.link.requests} == {"law-1"}
    assert (await world.post("/tokenize", {"model": "law", "prompt": "the fox"}))[0] == 200


async def test_what_is_not_served_is_named(world: EdgeWorld) -> None:
    """An unknown adapter is a 404 that lists those that exist; embeddings are the model's own."""
    status, body = await world.chat(model="tiny:medicine")
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    assert body["error"]["message"] == "The model 'tiny' has no adapter 'medicine'; it has law, poetry, tiny."
    status, body = await world.post("/v1/embeddings", {"model": "law", "input": "the fox"})
    assert (status, body["error"]["param"]) == (400, "model")
    assert "is an adapter" in body["error"]["message"]


async def test_windows_and_auto_are_those_of_models(world: EdgeWorld) -> None:
    """An adapter has the window of its model, and nobody gets one who did not ask for it."""
    status, body = await world.chat(model="tiny:law", max_tokens=500)
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert (await world.chat(model="auto"))[1]["model"] == "tiny"


async def test_models_are_listed_with_their_adapters(world: EdgeWorld) -> None:
    """In vLLM's shape, each adapter once: by its own name where that is enough."""
    async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="none", max_retries=0) as client:
        listed = {model.id: model.to_dict() async for model in client.models.list()}
        assert set(listed) == {"tiny", "law", "poetry", "tiny:tiny", "counsel"}
        assert (listed["law"]["root"], listed["law"]["parent"]) == ("tiny:law", "tiny")
        assert (listed["tiny"]["parent"], listed["tiny"]["num_ready_shards"]) == (None, 2)
        assert (await client.models.retrieve("tiny:law")).to_dict() == listed["law"] | {"id": "tiny:law"}
        assert listed["law"]["num_ready_shards"] == 1
        answered = await client.chat.completions.create(model="tiny:law", messages=MESSAGES, max_tokens=4)
        assert answered.model == "tiny:law"


async def test_an_adapter_that_was_replaced_is_another_one(world: EdgeWorld) -> None:
    """Edges follow the fleet."""
    catalogue = Catalogue([tiny_model()])
    catalogue.set_adapters({"tiny": {"law": "law-2"}})
    world.edge.models.by_name = catalogue.by_name
    await world.chat(**chat_body(model="law"))
    assert world.link.requests[0].request.wanted.adapter_checksum == "law-2"
    assert catalogue.by_name["law"].adapter == Adapter("law", "law-2")
