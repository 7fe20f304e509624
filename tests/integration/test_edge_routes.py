"""Requests that name a route, or several models: over real sockets, with a scripted router."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import FleetState, ModelInfo
from kvloom_common.config import KvloomConfig, OverloadConfig, RouteConfig, RouterConfig, RouteRule, RouteTarget
from kvloom_common.models.model_routes import ModelRoutes
from tests.fakes.edge_world import EdgeWorld, chat_body, edge_world
from tests.fakes.fake_router_link import ERROR, FakeRequest, FakeRouterLink, Script, answer
from tests.fakes.served_models import tiny_model

ROUTES = ModelRoutes(
    [
        RouteConfig(
            name="auto",
            rules=[RouteRule(features=["schema"], targets=["guided"]), RouteRule(tiers=["batch"], targets=["away"])],
            targets=["tiny"],
            fallback=["guided"],
        ),
        RouteConfig(name="split", targets=[RouteTarget(model="tiny"), RouteTarget(model="guided")]),
    ]
)
OVERLOADED = KvloomError(ErrorReason.ERROR_REASON_OVERLOADED, "full")
BROWNOUT = KvloomError(ErrorReason.ERROR_REASON_BROWNOUT, "overloaded")
WITHDRAWN = KvloomError(ErrorReason.ERROR_REASON_MODEL_NOT_FOUND, "is being withdrawn")
LIMITED = KvloomError(ErrorReason.ERROR_REASON_RATE_LIMITED, "too many of yours")


def fleet() -> FleetState:
    return FleetState(
        models=[
            ModelInfo(name="tiny", num_ready_shards=1, max_model_len=64),
            ModelInfo(name="guided", num_ready_shards=1, max_model_len=4096, capabilities=["guided", "logprobs"]),
            ModelInfo(name="away", num_ready_shards=0, max_model_len=4096),
        ]
    )


@pytest.fixture
async def world() -> AsyncIterator[EdgeWorld]:
    link = FakeRouterLink()
    link.tell(fleet())
    link.script = answer("Hi")
    async with edge_world(link=link, routes=ROUTES, more_models=[tiny_model("guided"), tiny_model("away")]) as started:
        yield started


async def test_a_request_waits_for_the_first_model_if_none_has_a_shard() -> None:
    """A fabric that is scaled to zero starts again by a route, too: a model that has shards goes first."""
    router = RouterConfig(overload=OverloadConfig(start_patience_seconds=60.0))
    link = FakeRouterLink()
    link.script = answer("Hi")
    others = [tiny_model("guided"), tiny_model("away")]
    async with edge_world(KvloomConfig(router=router), link=link, routes=ROUTES, more_models=others) as world:
        for num_shards, expected in ((0, "tiny"), (1, "guided")):
            guided = ModelInfo(name="guided", num_ready_shards=num_shards, max_model_len=4096)
            link.tell(FleetState(models=[ModelInfo(name="tiny", max_model_len=4096), guided]))
            status, text, headers = await ask(world, model="auto")
            assert (status, headers["x-kvloom-model"]) == (200, expected), text


def fails_for(model: str, error: KvloomError, after_tokens: int = 0) -> Script:
    """The other models answer."""

    def play(request: FakeRequest) -> None:
        if request.request.wanted.model != model:
            answer("Hi")(request)
            return
        if after_tokens:
            request.start()
        for _ in range(after_tokens):
            request.tokens("x")
        request.finish(ERROR, error=error)

    return play


async def ask(world: EdgeWorld, path: str = "/v1/chat/completions", **fields: Any) -> tuple[int, Any, dict[str, str]]:
    headers = fields.pop("headers", {})
    body = fields.pop("body", None) or chat_body(**fields)
    async with world.http.post(world.url + path, json=body, headers=headers) as response:
        return response.status, await response.text(), dict(response.headers)


@pytest.mark.parametrize(
    ("fields", "model", "route"),
    [
        ({}, "tiny", "auto;target=tiny"),
        ({"response_format": {"type": "json_object"}}, "guided", "auto;rule=1;target=guided"),
        ({"service_tier": "flex"}, "guided", "auto;rule=2;target=away;passed=away:no_shard_ready"),
        ({"logprobs": True}, "guided", "auto;target=tiny;passed=tiny:unsupported_parameter"),
        (
            {"messages": [{"role": "user", "content": "fox " * 100}], "max_tokens": 5},
            "guided",
            "auto;target=tiny;passed=tiny:context_length_exceeded",
        ),
    ],
)
async def test_a_route_chooses_and_says_how(world: EdgeWorld, fields: dict[str, Any], model: str, route: str) -> None:
    """The client sees which model answered, and the operator why; nothing was submitted to the others."""
    status, text, headers = await ask(world, model="auto", **fields)
    assert status == 200, text
    assert (headers["x-kvloom-model"], headers["x-kvloom-route"]) == (model, route)
    assert json.loads(text)["model"] == model
    assert [request.request.wanted.model for request in world.link.requests] == [model]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_next_model_takes_what_the_first_refused(world: EdgeWorld, stream: bool) -> None:
    """Overload of one model must not be an outage for those who name another one."""
    world.link.script = fails_for("tiny", OVERLOADED)
    status, text, headers = await ask(world, models=["guided"], stream=stream)
    assert status == 200, text
    assert "Hi" in text
    assert (headers["x-kvloom-model"], headers["x-kvloom-route"]) == ("guided", "tiny;passed=tiny:overloaded")
    assert [request.request.wanted.model for request in world.link.requests] == ["tiny", "guided"]
    assert not world.edge.admission.num_running


async def test_a_brownout_moves_requests_only_where_another_model_takes_them(world: EdgeWorld) -> None:
    """A router is told whether the client has another model. If that one cannot take the request, the first is asked
    again, as the last: a degraded answer is better than none."""

    def play(request: FakeRequest) -> None:
        if request.request.submit.has_fallback_model:
            request.finish(ERROR, error=BROWNOUT)
        elif request.request.wanted.model == "guided" and is_full:
            request.finish(ERROR, error=OVERLOADED)
        else:
            answer("Hi")(request)

    world.link.script, is_full = play, False
    _, _, headers = await ask(world, models=["guided"])
    assert (headers["x-kvloom-model"], headers["x-kvloom-route"]) == ("guided", "tiny;passed=tiny:brownout")
    is_full = True
    status, _, headers = await ask(world, models=["guided"])
    assert (status, headers["x-kvloom-model"]) == (200, "tiny")
    assert headers["x-kvloom-route"] == "tiny;passed=tiny:brownout,guided:overloaded"
    assert [request.request.wanted.model for request in world.link.requests[2:]] == ["tiny", "guided", "tiny"]
    await ask(world)
    assert not world.link.requests[-1].request.submit.has_fallback_model


async def test_a_stream_that_has_begun_stays_with_its_model(world: EdgeWorld) -> None:
    """A client must never get the beginning of one model's answer and the end of another's."""
    world.link.script = fails_for("tiny", OVERLOADED, after_tokens=1)
    status, text, _ = await ask(world, models=["guided"], stream=True)
    assert (status, len(world.link.requests)) == (200, 1)
    assert "overloaded" in text


async def test_errors_that_another_model_would_not_mend_are_final(world: EdgeWorld) -> None:
    """A caller's limit would otherwise be multiplied by the models that it lists."""
    world.link.script = fails_for("tiny", LIMITED)
    status, _, _ = await ask(world, models=["guided"])
    assert (status, len(world.link.requests)) == (429, 1)
    assert (await ask(world, models=["guided"], temperature=9))[0] == 400


async def test_the_first_error_is_reported_if_no_model_can(world: EdgeWorld) -> None:
    """It belongs to the model that the client preferred."""
    status, text, _ = await ask(world, model="none", models=["nothing"])
    assert status == 404
    assert "'none'" in text
    status, text, _ = await ask(world, models=[f"m{i}" for i in range(9)])
    assert status == 400
    assert "models" in text


@pytest.mark.parametrize("stream", [False, True])
async def test_what_comes_with_a_withdrawal_goes_to_the_successor(world: EdgeWorld, stream: bool) -> None:
    """An edge hears of it a moment later than the router: its clients got 404 at the end of a rollout. A key stands for
    the one model."""
    world.edge.models.by_name = {
        **world.edge.models.by_name,
        "guided": dataclasses.replace(tiny_model("guided"), succeeds="tiny"),
    }
    world.link.script = fails_for("tiny", WITHDRAWN)
    status, text, headers = await ask(world, stream=stream)
    assert (status, "Hi" in text, headers["x-kvloom-model"]) == (200, True, "guided")
    status, _, headers = await ask(world, model="auto", stream=stream)
    assert (status, headers["x-kvloom-model"]) == (200, "guided")
    assert (await ask(world, headers={"Idempotency-Key": "k1"}))[0] == 404
    world.link.script = fails_for("tiny", OVERLOADED)
    assert (await ask(world))[0] == 503
    assert not world.edge.admission.num_running


async def test_a_model_that_was_withdrawn_hides_no_overload(world: EdgeWorld) -> None:
    """A client that is told of a missing model does not try again, but the fallback is only busy."""

    def play(request: FakeRequest) -> None:
        request.finish(ERROR, error=WITHDRAWN if request.request.wanted.model == "tiny" else OVERLOADED)

    world.link.script = play
    assert (await ask(world, models=["guided"]))[0] == 503


async def test_any_model_is_none_if_there_is_none(world: EdgeWorld) -> None:
    """An edge may start before it has learnt of the first model."""
    world.edge.models.by_name, world.edge.models.routes = {}, ModelRoutes()
    status, text, _ = await ask(world, model="auto")
    assert (status, "'auto'" in text) == (404, True)


async def test_a_key_stands_for_one_model(world: EdgeWorld) -> None:
    """With an idempotency key the answer is remembered, so it may not become another model's by a repetition."""
    world.link.script = fails_for("tiny", OVERLOADED)
    status, _, _ = await ask(world, models=["guided"], headers={"Idempotency-Key": "k1"})
    assert (status, len(world.link.requests)) == (503, 1)


async def test_a_session_stays_with_its_share(world: EdgeWorld) -> None:
    """Its cached prefix is there, and its answers have one voice."""
    seen = set()
    for session in range(20):
        models = {(await ask(world, model="split", prompt_cache_key=f"s{session}"))[2]["x-kvloom-model"] for _ in "ab"}
        assert len(models) == 1
        seen |= models
    assert seen == {"tiny", "guided"}


async def test_all_apis_are_routed(world: EdgeWorld) -> None:
    """One path for all shapes."""
    message = {"model": "auto", "messages": [{"role": "user", "content": "the fox"}], "max_tokens": 5}
    for path, body in {
        "/v1/completions": {"model": "auto", "prompt": "the fox"},
        "/v1/responses": {"model": "auto", "input": "the fox"},
        "/v1/messages": message,
    }.items():
        status, text, headers = await ask(world, path, body=body)
        assert status == 200, text
        assert headers["x-kvloom-model"] == "tiny"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
        (
            "/v1/messages",
            {
                "max_tokens": 5,
                "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}],
            },
        ),
    ],
)
async def test_images_are_for_models_that_see(world: EdgeWorld, path: str, body: dict[str, Any]) -> None:
    """A rule sends them there; where there is none, the error says what is missing."""
    rules = [RouteRule(features=["vision"], targets=["guided"])]
    world.edge.models.routes = ModelRoutes([RouteConfig(name="seen", rules=rules, targets=["tiny"])])
    status, text, _ = await ask(world, path, body={"model": "seen", **body})
    assert status == 400
    assert "'guided'" in text
    assert "'vision'" in text
    assert not world.link.requests


async def test_routes_are_listed_as_models(world: EdgeWorld) -> None:
    """Chat pages offer what /v1/models lists."""
    async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="none", max_retries=0) as client:
        models = {model.id: model.to_dict() async for model in client.models.list()}
        assert set(models) == {"tiny", "guided", "away", "auto", "split"}
        assert (models["auto"]["root"], models["auto"]["max_model_len"]) == (None, 4096)
        assert (await client.models.retrieve("split")).id == "split"
