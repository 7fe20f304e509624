"""Routes that discard the answer of a small model if it does not pass a test: over real sockets, with a scripted
router."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import TokenLogprobs
from kvloom.v1.router_service_pb2 import FleetState, ModelInfo
from kvloom_common.config import CascadeConfig, RouteConfig, RouteRule
from kvloom_common.models.model_routes import ModelRoutes
from kvloom_common.parsers.spec import ParserSpec
from tests.fakes.edge_world import EdgeWorld, chat_body, edge_world
from tests.fakes.fake_router_link import ERROR, LENGTH, FakeRequest, FakeRouterLink, answer
from tests.fakes.served_models import tiny_model

TESTS = CascadeConfig(escalate_on=["refusal", "schema", "logprob"], min_mean_logprob=-1.0)
ROUTES = ModelRoutes(
    [
        RouteConfig(name="chat", targets=["tiny"], fallback=["large"], cascade=TESTS),
        RouteConfig(
            name="spoken",
            rules=[
                RouteRule(languages=["de"], targets=["large"]),
                RouteRule(min_context_tokens=500, targets=["large"]),
            ],
            targets=["tiny"],
        ),
    ]
)
REFUSAL = "I'm sorry, but I can't help with that."
LOST = KvloomError(ErrorReason.ERROR_REASON_SHARD_LOST, "gone")


@pytest.fixture
async def world() -> AsyncIterator[EdgeWorld]:
    link = FakeRouterLink()
    capabilities = ["guided", "logprobs"]
    link.tell(
        FleetState(
            models=[
                ModelInfo(name=name, num_ready_shards=1, max_model_len=4096, capabilities=capabilities)
                for name in ("tiny", "large")
            ]
        )
    )
    async with edge_world(link=link, routes=ROUTES, more_models=[tiny_model("large")]) as started:
        yield started


def small_says(world: EdgeWorld, text: str, logprob: float = -0.1, **finish: Any) -> None:
    """The large model answers "Paris."."""

    def play(request: FakeRequest) -> None:
        if request.request.wanted.model == "large":
            answer("Par", "is.")(request)
            return
        has_logprobs = request.request.wanted.sampling.HasField("logprobs")
        for index in range(request.request.n):
            request.start(index)
            for word in text.split(" "):
                logprobs = [TokenLogprobs(logprob=logprob)] if has_logprobs else []
                request.tokens(word + " ", index, logprobs=logprobs)
        for index in range(request.request.n):
            request.finish(index=index, **finish)

    world.link.script = play


async def ask(world: EdgeWorld, path: str = "/v1/chat/completions", **fields: Any) -> tuple[int, str, dict[str, str]]:
    headers = fields.pop("headers", {})
    body = fields.pop("body", None) or chat_body(**{"model": "chat", **fields})
    async with world.http.post(world.url + path, json=body, headers=headers) as response:
        return response.status, await response.text(), dict(response.headers)


def asked(world: EdgeWorld) -> list[str]:
    return [request.request.wanted.model for request in world.link.requests]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_good_answer_of_the_small_model_is_delivered_whole(world: EdgeWorld, stream: bool) -> None:
    """That is what a cascade saves."""
    small_says(world, "It is Paris.")
    status, text, headers = await ask(world, stream=stream)
    assert status == 200, text
    assert "".join(_texts(text, stream=stream)).strip() == "It is Paris."
    assert "logprob" not in text.replace('"logprobs":null', "")
    assert (headers["x-kvloom-model"], headers["x-kvloom-route"]) == ("tiny", "chat;target=tiny")
    assert asked(world) == ["tiny"]
    assert not world.edge.admission.num_running


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "logprob", "fields", "reason"),
    [
        (REFUSAL, -0.1, {}, "refusal"),
        ("It may be Rome.", -2.0, {}, "logprob"),
        ('{"city": 3}', -0.1, {"response_format": {"type": "json_schema", "json_schema": {
            "name": "c", "schema": {"type": "object", "properties": {"city": {"type": "string"}}}}}}, "schema"),
    ],
)  # fmt: skip
async def test_an_answer_that_fails_a_test_is_never_shown(
    world: EdgeWorld, text: str, logprob: float, fields: dict[str, Any], reason: str, stream: bool
) -> None:
    """The client gets the next model's answer alone; what was discarded is counted."""
    small_says(world, text, logprob)
    status, got, headers = await ask(world, stream=stream, **fields)
    assert status == 200, got
    assert "Paris." in "".join(_texts(got, stream=stream))
    assert not any(word in got for word in ("sorry", "Rome", "city"))
    assert headers["x-kvloom-route"] == f"chat;cascade=tiny:{reason};target=large"
    assert asked(world) == ["tiny", "large"]
    metrics = world.edge.metrics.exposition().decode()
    num_tokens = float(len(text.split(" ")))
    assert (
        f'kvloom_edge_cascade_discarded_tokens_total{{model="tiny",reason="{reason}",route="chat"}} {num_tokens}'
        in metrics
    )


def _texts(body: str, *, stream: bool) -> list[str]:
    if not stream:
        return [choice["message"]["content"] for choice in json.loads(body)["choices"]]
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    return [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]


async def test_a_call_whose_arguments_are_wrong_is_made_again(world: EdgeWorld) -> None:
    """A client cannot run a call of a function that does not exist, or with arguments that its schema forbids."""
    function = {"name": "f", "parameters": {"type": "object", "required": ["city"]}}
    small_says(world, '{"name": "f", "arguments": {}}', reason=LENGTH)
    _, text, headers = await ask(world, tools=[{"type": "function", "function": function}], tool_choice="required")
    assert headers["x-kvloom-route"] == "chat;cascade=tiny:schema;target=large", text


async def test_all_choices_must_pass(world: EdgeWorld) -> None:
    """With n > 1 the client would get the bad one, too."""

    def play(request: FakeRequest) -> None:
        for index in range(request.request.n):
            request.start(index)
            request.tokens(REFUSAL if index and request.request.wanted.model == "tiny" else "Paris.", index)
        for index in range(request.request.n):
            request.finish(index=index)

    world.link.script = play
    _, text, headers = await ask(world, n=2)
    assert headers["x-kvloom-route"] == "chat;cascade=tiny:refusal;target=large"
    assert [choice["message"]["content"] for choice in json.loads(text)["choices"]] == ["Paris.", "Paris."]


async def test_a_candidate_that_is_lost_is_passed(world: EdgeWorld) -> None:
    """Nothing of it has reached the client, even if its shard was lost in the middle."""

    def play(request: FakeRequest) -> None:
        if request.request.wanted.model == "large":
            answer("Paris.")(request)
            return
        request.start()
        request.tokens("It")
        request.finish(ERROR, error=LOST)

    world.link.script = play
    status, text, headers = await ask(world, stream=True)
    assert (status, headers["x-kvloom-route"]) == (200, "chat;target=tiny;passed=tiny:shard_lost")
    assert "Paris." in text


async def test_logprobs_are_shown_to_whoever_asked_for_them(world: EdgeWorld) -> None:
    """The cascade asks for its own purposes as well."""
    small_says(world, "Paris.")
    _, text, _ = await ask(world, logprobs=True)
    assert json.loads(text)["choices"][0]["logprobs"]["content"][0]["logprob"] == pytest.approx(-0.1)


async def test_an_answer_that_is_named_comes_from_the_last_model(world: EdgeWorld) -> None:
    """A repetition of the request must find one answer, which may not be discarded."""
    small_says(world, "It is Paris.")
    status, text, headers = await ask(world, headers={"Idempotency-Key": "k1"})
    assert (status, headers["x-kvloom-model"], asked(world)) == (200, "large", ["large"]), text


async def test_all_apis_and_the_official_client_have_cascades(world: EdgeWorld) -> None:
    """One path for all shapes."""
    small_says(world, REFUSAL)
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"model": "chat", "prompt": "the fox"},
        "/v1/responses": {"model": "chat", "input": "the fox"},
        "/v1/messages": {"model": "chat", "messages": [{"role": "user", "content": "the fox"}], "max_tokens": 5},
    }
    for path, body in bodies.items():
        for stream in (False, True):
            status, text, headers = await ask(world, path, body={**body, "stream": stream})
            assert (status, headers["x-kvloom-model"]) == (200, "large"), text
            assert "sorry" not in text
    async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="chat", messages=[{"role": "user", "content": "the fox"}], stream=True
        )
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Paris."


@pytest.mark.parametrize("stream", [False, True])
async def test_a_delivered_answer_is_the_one_that_was_generated(stream: bool) -> None:
    """Its usage has the reasoning tokens, its id is that of the request in the fabric, and it may be longer than the
    bytes that may wait for a slow reader."""
    link = FakeRouterLink()
    link.tell(FleetState(models=[ModelInfo(name=name, num_ready_shards=1) for name in ("tiny", "large")]))
    tests = CascadeConfig(escalate_on=["refusal"])
    routes = ModelRoutes([RouteConfig(name="chat", targets=["tiny"], fallback=["large"], cascade=tests)])
    words = ["<think>", *["hm "] * 9, "</think>", *["Paris "] * 9000]
    link.script = answer(*words)
    output = ParserSpec(reasoning="qwen3")
    async with edge_world(link=link, routes=routes, more_models=[tiny_model("large")], output=output) as world:
        options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
        _, text, headers = await ask(world, stream=stream, **options)
        assert headers["x-kvloom-model"] == "tiny"
        bodies = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")] if stream else []
        body = bodies[-1] if stream else json.loads(text)
        assert body["usage"]["completion_tokens"] == len(words)
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 10
        assert body["id"] == world.link.requests[0].request.wanted.request_id
        assert sum(said.count("Paris") for said in _texts(text, stream=stream)) == 9000
        assert not world.edge.admission.collected.num_bytes


async def test_a_client_that_leaves_ends_the_candidate(world: EdgeWorld) -> None:
    """An answer that nobody waits for is generated in vain, whether it is held or not."""
    asking = asyncio.create_task(ask(world, stream=True))
    request = await world.link.next_request()
    request.start()
    request.tokens("It")
    asking.cancel()
    async with asyncio.timeout(5):
        await request.cancelled.wait()
        await world.edge.admission.wait_idle()
    assert [each.request.wanted.model for each in world.link.requests] == ["tiny"]
    counted = 'discarded_tokens_total{model="tiny",reason="failed",route="chat"} 1.0'
    assert counted in world.edge.metrics.exposition().decode()


async def test_all_models_together_have_the_time_of_one_request() -> None:
    """A client that waits for ten minutes must not wait for twenty."""
    link = FakeRouterLink()
    link.tell(FleetState(models=[ModelInfo(name=name, num_ready_shards=1) for name in ("tiny", "large")]))
    tests = CascadeConfig(escalate_on=["refusal"])
    routes = ModelRoutes([RouteConfig(name="chat", targets=["tiny"], fallback=["large"], cascade=tests)])
    async with edge_world(link=link, routes=routes, more_models=[tiny_model("large")]) as world:
        asking = asyncio.create_task(ask(world))
        first = await link.next_request()
        answer(REFUSAL)(first)
        second = await link.next_request()
        answer("Paris.")(second)
        assert (await asking)[0] == 200
        assert second.request.wanted.timeout_seconds < first.request.wanted.timeout_seconds <= 600


async def test_aliases_may_be_candidates(world: EdgeWorld) -> None:
    """A route may name its models as clients do."""
    tests = CascadeConfig(escalate_on=["refusal"])
    world.edge.models.routes = ModelRoutes(
        [RouteConfig(name="chat", targets=["small"], fallback=["large"], cascade=tests)]
    )
    world.edge.models.by_name = {**world.edge.models.by_name, "small": world.edge.models.by_name["tiny"]}
    small_says(world, REFUSAL)
    assert (await ask(world))[2]["x-kvloom-route"] == "chat;cascade=tiny:refusal;target=large"


@pytest.mark.parametrize(
    ("fields", "route"),
    [
        ({"messages": [{"role": "user", "content": "What is the capital of France?"}]}, "spoken;target=tiny"),
        (
            {"messages": [{"role": "user", "content": "Was ist die Hauptstadt von Frankreich?"}]},
            "spoken;rule=1;target=large",
        ),
        ({"max_tokens": 500}, "spoken;rule=2;target=large"),
    ],
)
async def test_rules_read_the_language_and_the_context(world: EdgeWorld, fields: dict[str, Any], route: str) -> None:
    """A small model that speaks English only need not be asked in German."""
    world.link.script = answer("Hi")
    assert (await ask(world, model="spoken", **fields))[2]["x-kvloom-route"] == route
