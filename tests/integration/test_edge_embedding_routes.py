"""Embeddings, rankings and scores by a route or a list of models: over real sockets, with a scripted router."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import FleetState, ModelInfo
from kvloom_common.config import CascadeConfig, RouteConfig, RouteRule
from kvloom_common.models.model_routes import ModelRoutes
from tests.fakes.edge_world import EdgeWorld, edge_world
from tests.fakes.fake_router_link import ERROR, FakeRequest, FakeRouterLink
from tests.fakes.served_models import tiny_model

ROUTES = ModelRoutes(
    [
        RouteConfig(name="vectors", targets=["tiny"]),
        RouteConfig(
            name="rank",
            rules=[RouteRule(languages=["de"], targets=["second"])],
            targets=["tiny"],
            fallback=["second"],
        ),
        RouteConfig(
            name="judged", targets=["tiny"], fallback=["second"], cascade=CascadeConfig(escalate_on=["refusal"])
        ),
    ]
)
WITHDRAWN = KvloomError(ErrorReason.ERROR_REASON_MODEL_NOT_FOUND, "is being withdrawn")
LOST = KvloomError(ErrorReason.ERROR_REASON_SHARD_LOST, "gone")
LIMITED = KvloomError(ErrorReason.ERROR_REASON_RATE_LIMITED, "too many of yours")
BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": ["the fox", "a dog"]},
    "/v1/rerank": {"query": "the fox", "documents": ["the fox", "a dog"]},
    "/v1/score": {"text_1": "the fox", "text_2": ["the fox", "a dog"]},
}


@pytest.fixture
async def world() -> AsyncIterator[EdgeWorld]:
    link = FakeRouterLink()
    able = ["embed", "rerank", "score"]
    link.tell(
        FleetState(
            models=[
                ModelInfo(name="tiny", num_ready_shards=1, max_model_len=64, capabilities=able, embedding_size=2),
                ModelInfo(name="second", num_ready_shards=1, max_model_len=4096, capabilities=able, embedding_size=2),
                ModelInfo(name="chatty", num_ready_shards=1, max_model_len=4096, capabilities=["generate"]),
                ModelInfo(name="away", num_ready_shards=0, max_model_len=4096, capabilities=able, embedding_size=2),
            ]
        )
    )
    link.script = embed
    models = [tiny_model(name) for name in ("second", "chatty", "away")]
    async with edge_world(link=link, routes=ROUTES, more_models=models) as started:
        yield started


def embed(request: FakeRequest) -> None:
    request.start()
    request.finish(embedding=struct.pack("<2f", 1.0, 0.0))


def fails_for_tiny(world: EdgeWorld, error: KvloomError, after: int = 0) -> None:
    """The second model embeds, and so does the first until it has embedded `after` inputs."""
    left = [after]

    def play(request: FakeRequest) -> None:
        if request.request.wanted.model != "tiny" or left[0]:
            left[0] -= request.request.wanted.model == "tiny"
            embed(request)
        else:
            request.finish(ERROR, error=error)

    world.link.script = play


async def ask(world: EdgeWorld, path: str, **fields: Any) -> tuple[int, Any, dict[str, str]]:
    headers = fields.pop("headers", {})
    async with world.http.post(world.url + path, json={**BODIES[path], **fields}, headers=headers) as response:
        return response.status, json.loads(await response.read()), dict(response.headers)


def models_asked(world: EdgeWorld) -> list[str]:
    return list(dict.fromkeys(request.request.wanted.model for request in world.link.requests))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "model", "route"),
    [
        ({"model": "vectors"}, "tiny", "vectors;target=tiny"),
        ({"model": "tiny", "models": ["second"]}, "tiny", "tiny"),
        ({"model": "away", "models": ["second"]}, "second", "away;passed=away:no_shard_ready"),
        ({"model": "chatty", "models": ["second"]}, "second", "chatty;passed=chatty:unsupported_parameter"),
        ({"model": "none", "models": ["second"]}, "second", "none;passed=none:model_not_found"),
    ],
)
async def test_routes_and_lists_choose_a_model_and_say_which(
    world: EdgeWorld, path: str, fields: dict[str, Any], model: str, route: str
) -> None:
    """A client must know whose vectors it stores."""
    status, answer, headers = await ask(world, path, **fields)
    assert status == 200, answer
    assert (headers["x-kvloom-model"], headers["x-kvloom-route"]) == (model, route)
    assert answer["model"] == model
    assert models_asked(world) == [model]


async def test_a_named_model_needs_no_headers(world: EdgeWorld) -> None:
    """As before there were routes, also for a model whose name is shared by a rollout."""
    status, _, headers = await ask(world, "/v1/embeddings", model="tiny")
    assert (status, "x-kvloom-route" in headers) == (200, False)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "rank"}, "model"),
        ({"model": "auto"}, "model"),
        ({"model": "judged"}, "model"),
        ({"model": "tiny", "models": ["second", "rank"]}, "models[1]"),
    ],
)
async def test_a_route_to_several_models_gives_no_embeddings(
    world: EdgeWorld, fields: dict[str, Any], param: str
) -> None:
    """Vectors of different models cannot be compared, and nobody would see that they were mixed."""
    status, answer, _ = await ask(world, "/v1/embeddings", **fields)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert "tiny" in answer["error"]["message"]
    assert not world.link.requests


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/score"])
@pytest.mark.parametrize("name", ["rank", "auto"])
async def test_rankings_may_come_from_any_model_of_a_route(world: EdgeWorld, path: str, name: str) -> None:
    """Their scores are compared within one response only."""
    fails_for_tiny(world, LOST)
    status, answer, headers = await ask(world, path, model=name)
    assert (status, headers["x-kvloom-model"]) == (200, "second"), answer
    rankings = answer["results"] if path == "/v1/rerank" else answer["data"]
    assert len(rankings) == 2
    assert "passed=tiny:shard_lost" in headers["x-kvloom-route"] or name == "auto"


async def test_rules_read_the_query(world: EdgeWorld) -> None:
    """It is what the user wrote."""
    _, _, headers = await ask(world, "/v1/rerank", model="rank", query="Was ist die Hauptstadt von Frankreich?")
    assert headers["x-kvloom-route"] == "rank;rule=1;target=second"


async def test_a_cascade_has_nothing_to_judge_in_a_ranking(world: EdgeWorld) -> None:
    """It comes from the model whose answers are not judged, as other answers that cannot be judged."""
    status, _, headers = await ask(world, "/v1/rerank", model="judged")
    assert (status, headers["x-kvloom-model"]) == (200, "second")


@pytest.mark.parametrize("path", BODIES)
async def test_a_response_has_vectors_of_one_model(world: EdgeWorld, path: str) -> None:
    """If the first model is lost when it has embedded some inputs, the second one embeds them all."""
    fails_for_tiny(world, LOST, after=1)
    status, answer, headers = await ask(world, path, model="tiny", models=["second"])
    assert (status, answer["model"], headers["x-kvloom-model"]) == (200, "second", "second")
    asked = [request.request.wanted.model for request in world.link.requests]
    assert asked.count("second") == len(asked) / 2
    ids = [request.request.wanted.request_id for request in world.link.requests]
    assert len(set(ids)) == len(ids)
    assert not world.edge.admission.collected.num_bytes


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("model", ["tiny", "vectors"])
async def test_what_comes_with_a_withdrawal_goes_to_the_successor(world: EdgeWorld, path: str, model: str) -> None:
    """An edge hears of it a moment later than the router: its clients got 404 at the end of a rollout."""
    world.edge.models.by_name = {
        **world.edge.models.by_name,
        "second": dataclasses.replace(tiny_model("second"), succeeds="tiny"),
    }
    fails_for_tiny(world, WITHDRAWN)
    status, answer, headers = await ask(world, path, model=model)
    assert (status, answer["model"], headers["x-kvloom-model"]) == (200, "second", "second")
    fails_for_tiny(world, LIMITED)
    assert (await ask(world, path, model=model))[0] == 429
    assert not world.edge.admission.collected.num_bytes


async def test_a_longer_text_goes_to_the_model_that_has_room(world: EdgeWorld) -> None:
    """Inputs are never cut."""
    status, answer, _ = await ask(world, "/v1/embeddings", model="tiny", models=["second"], input="fox " * 100)
    assert (status, answer["model"]) == (200, "second")


async def test_errors_that_another_model_would_not_mend_are_final(world: EdgeWorld) -> None:
    """A caller's limit would otherwise be multiplied by the models that it lists. The first error is shown if none
    can."""
    fails_for_tiny(world, LIMITED)
    status, _, _ = await ask(world, "/v1/embeddings", model="tiny", models=["second"])
    assert (status, models_asked(world)) == (429, ["tiny"])
    status, answer, _ = await ask(world, "/v1/embeddings", model="none", models=["nothing"])
    assert (status, "'none'" in answer["error"]["message"]) == (404, True)
    assert (await ask(world, "/v1/embeddings", model="tiny", models=["second"] * 9))[0] == 400


async def test_a_key_stands_for_the_whole_answer(world: EdgeWorld) -> None:
    """A repetition gets the same vectors, whichever model gave them, and nothing is embedded again."""
    fails_for_tiny(world, LOST)
    answers = []
    for _ in range(2):
        status, answer, headers = await ask(
            world, "/v1/embeddings", model="tiny", models=["second"], headers={"Idempotency-Key": "k"}
        )
        assert (status, headers["x-kvloom-model"]) == (200, "second")
        answers.append(answer)
    assert answers[0] == answers[1]
    assert [request.request.wanted.model for request in world.link.requests].count("second") == 2


async def test_all_models_together_have_the_time_of_one_request(world: EdgeWorld) -> None:
    """A client that waits for ten minutes must not wait for twenty."""
    fails_for_tiny(world, LOST)
    await ask(world, "/v1/score", model="rank")
    first, *_, last = (request.request.wanted.timeout_seconds for request in world.link.requests)
    assert last < first <= 600
