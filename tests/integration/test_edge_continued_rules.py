"""Which answers the next model of a route continues, and what becomes of the others: over real sockets, with a scripted
router."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from edge_http.admission import EdgeSettings
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import FleetState, ModelInfo
from kvloom_common.config import EdgeConfig, RouteConfig
from kvloom_common.models.model_routes import ModelRoutes
from kvloom_common.models.served_model import ServedModel
from kvloom_common.parsers.spec import ParserSpec
from tests.fakes.edge_world import EdgeWorld, chat_body, edge_world
from tests.fakes.fake_router_link import ERROR, LENGTH, FakeRequest, FakeRouterLink
from tests.fakes.resume_world import client
from tests.fakes.served_models import tiny_model
from tests.fakes.tiny_tokenizer import model_tokenizer

ROUTES = ModelRoutes(
    [
        RouteConfig(name="chat", targets=["tiny"], fallback=["alias", "second", "third"], on_loss="continue"),
        RouteConfig(name="plain", targets=["tiny"], fallback=["second"]),
        RouteConfig(name="thinks", targets=["tiny"], fallback=["thinker"], on_loss="continue"),
        RouteConfig(name="short", targets=["tiny"], fallback=["window"], on_loss="continue"),
    ]
)
LOST = KvloomError(ErrorReason.ERROR_REASON_SHARD_LOST, "the shard is gone")
FULL = KvloomError(ErrorReason.ERROR_REASON_QUEUE_FULL, "the queue is full")
LIMITED = KvloomError(ErrorReason.ERROR_REASON_RATE_LIMITED, "too many of yours")
THINKER = ServedModel("thinker", model_tokenizer(), 0, "fp", ParserSpec(reasoning="qwen3"))


@pytest.fixture
async def world() -> AsyncIterator[EdgeWorld]:
    async with a_world() as started:
        yield started


def a_world(config: EdgeConfig | None = None) -> Any:
    link = FakeRouterLink()
    capabilities = ["guided", "logprobs", "generate"]
    windows = {"tiny": 4096, "second": 4096, "third": 4096, "thinker": 4096, "window": 20}
    link.tell(
        FleetState(
            models=[
                ModelInfo(name=name, num_ready_shards=1, max_model_len=window, capabilities=capabilities)
                for name, window in windows.items()
            ]
        )
    )
    models = [tiny_model(name) for name in ("second", "third", "window")]
    return edge_world(config, link=link, routes=ROUTES, more_models=[*models, THINKER])


async def ask(world: EdgeWorld, path: str = "/v1/chat/completions", **fields: Any) -> str:
    headers = fields.pop("headers", {})
    body = fields.pop("body", None) or chat_body(**{"model": "chat", "stream": True, **fields})
    async with world.http.post(world.url + path, json=body, headers=headers) as response:
        return await response.text()


def play(world: EdgeWorld, **of_models: list[str | KvloomError]) -> None:
    """What each model does: it sends texts, and then it ends with an error or regularly."""

    def script(request: FakeRequest) -> None:
        texts = [text for text in of_models[request.request.wanted.model] if isinstance(text, str)]
        errors = [error for error in of_models[request.request.wanted.model] if isinstance(error, KvloomError)]
        if texts:
            request.start()
        for text in texts:
            request.tokens(text, token_ids=model_tokenizer().encode_now(text))
        if errors:
            request.finish(ERROR, error=errors[0])
        else:
            request.finish()

    world.link.script = script


def asked(world: EdgeWorld) -> list[str]:
    return [request.request.wanted.model for request in world.link.requests]


def events_of(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def content_of(text: str) -> str:
    choices = [choice for event in events_of(text) for choice in event.get("choices", ())]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def test_the_next_model_gets_the_text_as_progress(world: EdgeWorld) -> None:
    """To routers and shards it is an answer that has lost its router: they know how to go on after any character. The
    prompt is that of a request of its own, with a name of its own, and the rest of the time."""
    play(world, tiny=["the", " quick", LOST], second=[" brown", " fox"])
    text = await ask(world, max_tokens=10, min_tokens=4, seed=3)
    assert content_of(text) == "the quick brown fox"
    first, second = (request.request for request in world.link.requests)
    [progress] = second.partial_choices
    assert model_tokenizer().decode(progress.token_ids.tolist()) == "the quick"
    assert progress.num_chars == len("the quick")
    assert second.is_new
    assert (second.wanted.stop.max_tokens, second.wanted.stop.min_tokens) == (10, 4)
    assert second.prompt_token_ids == first.prompt_token_ids
    assert (second.wanted.request_id, second.wanted.sampling.seed) == (f"{first.wanted.request_id}.continued1", 3)
    assert second.wanted.timeout_seconds < first.wanted.timeout_seconds


async def test_the_end_says_what_happened(world: EdgeWorld) -> None:
    """The headers have named the first model already. Usage counts what both have generated, for one prompt."""
    play(world, tiny=["the", " quick", LOST], second=[" brown", " fox", " jumps"])
    plain = events_of(await ask(world))
    assert plain[-1]["kvloom"] == {"continued_by": "second"}
    assert not any("kvloom" in event for event in plain[:-1])
    headers = {"x-kvloom-details": "true"}
    counted = events_of(await ask(world, stream_options={"include_usage": True}, headers=headers))
    num_prompt_tokens = len(world.link.requests[0].request.prompt_token_ids)
    assert counted[-1]["usage"] | {"prompt_tokens_details": 0} == {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": 5,
        "total_tokens": num_prompt_tokens + 5,
        "prompt_tokens_details": 0,
    }
    assert counted[-1]["kvloom"]["continued_by"] == "second"
    assert counted[-1]["kvloom"]["shard_id"] == "shard-0"
    metrics = world.edge.metrics.exposition().decode()
    assert 'continued_answers_total{continued_by="second",model="tiny",route="chat"} 2.0' in metrics
    assert 'kvloom_edge_output_tokens_total{model="tiny"} 4.0' in metrics
    assert 'kvloom_edge_output_tokens_total{model="second"} 6.0' in metrics


async def test_each_model_is_tried_once_and_the_first_loss_is_reported(world: EdgeWorld) -> None:
    """Also if all are lost one after the other: nothing goes in a circle. An alias is no other model."""
    world.edge.models.by_name = {**world.edge.models.by_name, "alias": world.edge.models.by_name["tiny"]}
    play(world, tiny=["a", LOST], second=["b", " c", FULL], third=["d", FULL])
    text = await ask(world)
    assert content_of(text) == "ab cd"
    assert asked(world) == ["tiny", "second", "third"]
    assert "the shard is gone" in text
    assert 'finish_reason":"' not in text
    names = [request.request.wanted.request_id for request in world.link.requests]
    assert [name.removeprefix(names[0]) for name in names] == ["", ".continued1", ".continued2"]
    metrics = world.edge.metrics.exposition().decode()
    assert 'continued_answers_total{continued_by="third",model="second",route="chat"} 1.0' in metrics
    assert not world.edge.admission.num_running


async def test_a_model_that_refuses_is_passed(world: EdgeWorld) -> None:
    """Before it has added a token, as before the first token of an answer."""
    play(world, tiny=["a", LOST], second=[FULL], third=["b"])
    text = await ask(world)
    assert (content_of(text), asked(world)) == ("ab", ["tiny", "second", "third"])
    assert events_of(text)[-1]["kvloom"] == {"continued_by": "third"}
    assert 'model="tiny",route="chat"} 1.0' in world.edge.metrics.exposition().decode()


async def test_a_model_that_has_refused_before_is_not_asked_to_continue(world: EdgeWorld) -> None:
    """What is lost before the first token falls back as on any route, and goes on from there."""
    play(world, tiny=[FULL], second=["a", LOST], third=["b"])
    text = await ask(world)
    assert (content_of(text), asked(world)) == ("ab", ["tiny", "second", "third"])


async def test_errors_that_are_no_loss_are_final(world: EdgeWorld) -> None:
    """A caller's limit, or a deadline, would be the same at the next model."""
    play(world, tiny=["a", LIMITED], second=["b"])
    text = await ask(world)
    assert (content_of(text), asked(world)) == ("a", ["tiny"])
    assert "too many of yours" in text
    play(world, tiny=["a", LOST], second=["b", LIMITED], third=["c"])
    text = await ask(world)
    assert (content_of(text), asked(world)[1:]) == ("ab", ["tiny", "second"])
    assert "too many of yours" in text


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "plain"},
        {"model": "tiny", "models": ["second"]},
        {"model": "thinks"},
        {"n": 2},
        {"tools": [TOOL]},
        {"response_format": {"type": "json_object"}},
        {"logprobs": True},
        {"prompt_logprobs": 0, "stream": False},
        {"path": "/v1/completions", "body": {"model": "chat", "stream": True, "prompt": [1, 2, 3]}},
        {"path": "/v1/completions", "body": {"model": "chat", "stream": True, "prompt": ["a", "b"]}},
        {"path": "/v1/completions", "body": {"model": "chat", "stream": True, "prompt": "a", "echo": True}},
    ],
)
async def test_other_answers_fail_as_they_did(world: EdgeWorld, fields: dict[str, Any]) -> None:
    """A call, a form or a list of log-probabilities that one model has begun cannot be completed by another one; nor is
    anything continued by a route that does not say so."""
    play(world, tiny=["a", LOST], second=["b"], third=["c"], thinker=["d"])
    text = await ask(world, **fields)
    if fields.get("stream", True):
        assert "the shard is gone" in text
        assert set(asked(world)) == {"tiny"}
    assert "continued_by" not in text
    assert "continued_answers_total{" not in world.edge.metrics.exposition().decode()


async def test_an_answer_in_one_piece_begins_anew(world: EdgeWorld) -> None:
    """Its client has nothing of it yet: the next model answers from the beginning, as on any route."""
    play(world, tiny=["a", LOST], second=["b"])
    body = json.loads(await ask(world, stream=False))
    assert (body["model"], body["choices"][0]["message"]["content"]) == ("second", "b")


@pytest.mark.parametrize("limit", [{"max_tokens": 500}, {}])
async def test_an_answer_is_cut_to_the_window_of_the_model_that_continues_it(
    world: EdgeWorld, limit: dict[str, Any]
) -> None:
    """A shorter end is more than none. A window without room for the text is none."""
    play(world, tiny=["a", LOST], window=["b"])
    messages = [{"role": "user", "content": "the"}]
    text = await ask(world, model="short", messages=messages, **limit)
    second = world.link.requests[-1].request
    assert content_of(text) == "ab"
    assert second.wanted.stop.max_tokens == (20 - len(second.prompt_token_ids) if limit else 0)
    play(world, tiny=["a"] * 30 + [LOST], window=["b"])
    text = await ask(world, model="short", messages=messages)
    assert asked(world)[2:] == ["tiny"]
    assert "the shard is gone" in text


async def test_the_official_client_reads_one_answer(world: EdgeWorld) -> None:
    """It knows nothing of models that are lost."""
    play(world, tiny=["the", LOST], second=[" fox"])
    async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="none", max_retries=0) as openai_client:
        stream = await openai_client.chat.completions.create(
            model="chat", messages=[{"role": "user", "content": "the fox"}], stream=True
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "the fox"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_a_client_that_leaves_ends_the_second_model_too(world: EdgeWorld) -> None:
    """What nobody reads is not generated, whoever would do it."""
    asking = asyncio.create_task(ask(world))
    first = await world.link.next_request()
    first.start()
    first.tokens("a")
    first.finish(ERROR, error=LOST)
    second = await world.link.next_request()
    second.tokens("b")
    asking.cancel()
    async with asyncio.timeout(5):
        await second.cancelled.wait()
        await world.edge.admission.wait_idle()
    assert asked(world) == ["tiny", "second"]


@pytest.mark.parametrize("is_continued", [False, True])
async def test_a_reader_that_stalls_ends_the_model_that_writes(is_continued: bool) -> None:
    """The answer ends by itself, at whichever model, and nothing goes on unread."""
    async with a_world(EdgeSettings(max_buffered_bytes=64 * 1024)) as world:
        loop = asyncio.get_running_loop()
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.setblocking(False)
            await loop.sock_connect(raw, world.address)
            body = json.dumps(chat_body(model="chat", stream=True))
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            await loop.sock_sendall(raw, f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
            writer = await world.link.next_request()
            writer.start()
            if is_continued:
                writer.tokens("a", token_ids=model_tokenizer().encode_now("a"))
                writer.finish(ERROR, error=LOST)
                writer = await world.link.next_request()
            for number in range(50_000):
                writer.tokens("x" * 1000)
                if number % 10 == 0:
                    await asyncio.sleep(0)  # as in reality, frames arrive in different turns of the event loop
                if writer.cancelled.is_set():
                    break
            assert writer.cancelled.is_set()
        await world.edge.admission.wait_idle()
        assert asked(world) == (["tiny", "second"] if is_continued else ["tiny"])
        assert "kvloom_edge_slow_clients_total 1.0" in world.edge.metrics.exposition().decode()


async def test_an_answer_that_has_all_its_tokens_ends(world: EdgeWorld) -> None:
    """Its model may be lost between the last token and the news that it was the last. The router then ends it."""
    world.link.script = None
    asking = asyncio.create_task(ask(world, max_tokens=1))
    first = await world.link.next_request()
    first.start()
    first.tokens("a", token_ids=model_tokenizer().encode_now("a"))
    first.finish(ERROR, error=LOST)
    second = await world.link.next_request()
    assert second.request.wanted.stop.max_tokens == len(second.request.partial_choices[0].token_ids)
    second.finish(LENGTH)
    text = await asking
    assert content_of(text) == "a"
    assert '"finish_reason":"length"' in text


@pytest.mark.parametrize("by_header", [False, True])
async def test_a_continued_answer_can_be_resumed(by_header: bool) -> None:
    """The connection may be lost before, and come back after, the model: the events are one sequence."""
    async with a_world() as world:
        streamed = client(world)
        reading = asyncio.create_task(streamed.begin(chat_body(model="chat", stream=True), stop_after=2))
        first = await world.link.next_request()
        first.start()
        first.tokens("the", token_ids=model_tokenizer().encode_now("the"))
        await reading
        first.tokens(" quick", token_ids=model_tokenizer().encode_now(" quick"))
        first.finish(ERROR, error=LOST)
        second = await world.link.next_request()
        second.start()
        second.tokens(" fox")
        second.finish()
        assert await streamed.resume(by_header=by_header) == 200
        events = [json.loads(event) for event in streamed.events[:-1]]
        assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == "the quick fox"
        assert events[-1]["kvloom"] == {"continued_by": "second"}
        assert streamed.done


async def test_a_key_stands_for_the_whole_continued_answer(world: EdgeWorld) -> None:
    """A repetition gets the same events, and no model is asked again."""
    play(world, tiny=["the", LOST], second=[" fox"])
    headers = {"Idempotency-Key": "k", "Authorization": "Bearer me"}
    texts = [await ask(world, headers=headers) for _ in range(2)]
    assert texts[0] == texts[1]
    assert content_of(texts[0]) == "the fox"
    assert asked(world) == ["tiny", "second"]


async def test_a_cancelled_answer_ends_at_the_model_that_continues_it(world: EdgeWorld) -> None:
    """A client names the answer by its id, whichever model writes it."""
    streamed = client(world)
    reading = asyncio.create_task(streamed.begin(chat_body(model="chat", stream=True)))
    first = await world.link.next_request()
    first.start()
    first.tokens("a")
    first.finish(ERROR, error=LOST)
    second = await world.link.next_request()
    url = f"{streamed.url}/{first.request.wanted.request_id}/cancel"
    async with world.http.post(url, headers=streamed.headers) as response:
        assert response.status == 200, await response.text()
    async with asyncio.timeout(5):
        await second.cancelled.wait()
    await reading
