"""`moderation` on chat and on responses: results with the answer, in streams too, and what the policy's word blocks."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from edge_http.formatting.moderation import CATEGORIES
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from tests.fakes.edge_world import EdgeWorld, chat_body, edge_world
from tests.fakes.fake_router_link import CONTENT_FILTER, answer

pytestmark = pytest.mark.xdist_group("anthropic")  # which takes seconds to import

BLOCK = {"mode": "block"}
SCORE = {"mode": "score"}
BAD = ("a for", "bidden", " word")
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


@pytest.fixture
async def world() -> AsyncIterator[EdgeWorld]:
    async with edge_world() as started:
        yield started


@pytest.fixture
async def client(world: EdgeWorld) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="none", max_retries=0) as started:
        yield started


def asked(**policy: Any) -> Any:
    return {"model": "omni-moderation-latest", "policy": policy or None}


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}


async def events(world: EdgeWorld, path: str, body: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """What was sent, and the JSON of its events."""
    async with world.http.post(world.url + path, json=body | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        sent = await response.text()
    lines = [line.removeprefix("data: ") for line in sent.splitlines() if line.startswith("data: {")]
    return sent, [json.loads(line) for line in lines]


async def test_a_chat_has_the_results_of_both_sides(world: EdgeWorld, client: openai.AsyncOpenAI) -> None:
    """Each choice has one; the request's texts, with those of its history, have one together."""
    world.link.script = answer(*BAD)
    found = await client.chat.completions.create(**chat("nice", n=2), moderation=asked())
    assert found.moderation is not None
    assert found.moderation.input.type == found.moderation.output.type == "moderation_results"
    assert [result.flagged for result in found.moderation.input.results] == [False]
    assert [result.flagged for result in found.moderation.output.results] == [True, True]
    assert found.moderation.output.results[0].categories["forbidden-things"]
    assert set(CATEGORIES) < set(found.moderation.output.results[0].category_scores)
    assert [choice.message.content for choice in found.choices] == ["a forbidden word"] * 2


async def test_a_stream_has_them_in_a_chunk_of_their_own(world: EdgeWorld, client: openai.AsyncOpenAI) -> None:
    """The text is sent as it comes, and the results come before the usage."""
    stream = await client.chat.completions.create(
        **chat("forbidden"),
        moderation=asked(input=SCORE, output=SCORE),
        stream=True,
        stream_options={"include_usage": True},
    )
    request = await world.link.next_request()
    request.start()
    request.tokens(BAD[0])
    chunks = [await anext(stream), await anext(stream)]
    assert chunks[1].choices[0].delta.content == BAD[0]
    request.tokens("".join(BAD[1:]))
    request.finish()
    chunks += [chunk async for chunk in stream]
    assert [bool(chunk.choices) for chunk in chunks[-3:]] == [True, False, False]
    results: Any = chunks[-2].moderation
    usage = chunks[-1].usage
    assert results is not None
    assert usage is not None
    assert results.input.type == results.output.type == "moderation_results"
    assert results.input.results[0].flagged
    assert results.output.results[0].flagged


async def test_a_response_has_one_result_for_each_side(world: EdgeWorld, client: openai.AsyncOpenAI) -> None:
    """Complete and streamed, as the client's types demand."""
    world.link.script = answer(*BAD)
    whole = await client.responses.create(model="tiny", input="nice", moderation=asked())
    assert whole.moderation is not None
    assert whole.moderation.input.type == whole.moderation.output.type == "moderation_result"
    results: Any = whole.moderation
    assert (results.input.flagged, results.output.flagged) == (False, True)
    async with client.responses.stream(model="tiny", input="nice", moderation=asked()) as stream:
        final = await stream.get_final_response()
    assert final.moderation == whole.moderation
    plain = await client.responses.create(model="tiny", input="nice")
    assert plain.moderation is None


async def test_a_blocked_input_is_refused(world: EdgeWorld) -> None:
    """Nothing is submitted: its tokens are not computed, and not paid for."""
    for path, is_stream in itertools.product((CHAT, RESPONSES), (False, True)):
        told = {"messages": [{"role": "user", "content": "forbidden"}]} if path == CHAT else {"input": "forbidden"}
        wanted = {"model": "tiny", **told, "moderation": asked(input=BLOCK), "stream": is_stream}
        status, body = await world.post(path, wanted)
        assert (status, body["error"]["code"]) == (400, "content_filter")
        assert "forbidden-things" in body["error"]["message"]
    assert not world.link.requests


async def test_a_blocked_answer_is_never_sent(world: EdgeWorld) -> None:
    """It ends so whole and in streams, and also where an answer is kept."""
    world.link.script = answer(*BAD)
    body = chat("nice", moderation=asked(output=BLOCK))
    for headers in ({}, {"Idempotency-Key": "k"}):
        async with world.http.post(world.url + CHAT, json=body, headers=headers) as response:
            whole = await response.json()
        assert whole["choices"][0]["finish_reason"] == "content_filter"
        assert whole["choices"][0]["message"]["content"] == ""
        assert whole["usage"]["completion_tokens"] == len(BAD)
        assert whole["moderation"]["output"]["results"][0]["flagged"]
    sent, chunks = await events(world, CHAT, body)
    assert chunks[-2]["choices"][0]["finish_reason"] == "content_filter"
    assert "forbidden word" not in sent
    assert not any(piece in json.dumps(chunk["choices"]) for chunk in chunks for piece in BAD)
    sent, chunks = await events(world, RESPONSES, {"model": "tiny", "input": "x", "moderation": asked(output=BLOCK)})
    assert chunks[-1]["type"] == "response.incomplete"
    assert chunks[-1]["response"]["incomplete_details"] == {"reason": "content_filter"}
    assert chunks[-1]["response"]["moderation"]["output"]["flagged"]
    assert not any(piece in sent.replace("forbidden-things", "") for piece in BAD)


async def test_only_the_flagged_choice_is_blocked(world: EdgeWorld) -> None:
    """The others are delivered."""
    body = chat("nice", n=2, moderation=asked(output=BLOCK))
    posted = world.http.post(world.url + CHAT, json=body)
    async with _driven(world, posted) as found:
        texts = [(choice["message"]["content"], choice["finish_reason"]) for choice in found["choices"]]
    assert texts == [("", "content_filter"), ("good", "stop")]


class _driven:
    """Plays a forbidden and a good choice."""

    def __init__(self, world: EdgeWorld, posted: Any) -> None:
        self.world, self.posted = world, posted

    async def __aenter__(self) -> Any:
        def play(request: Any) -> None:
            for index, text in enumerate(("a forbidden", "good")):
                request.start(index)
                request.tokens(text, index)
                request.finish(index=index)

        self.world.link.script = play
        async with self.posted as response:
            return await response.json()

    async def __aexit__(self, *_: object) -> None:
        return None


async def test_without_a_verdict(world: EdgeWorld) -> None:
    """What is only scored says so; what might be blocked fails closed, before anything of it is sent."""
    world.link.script = answer("good")
    world.link.moderation_error = KvloomError(ErrorReason.ERROR_REASON_SAFETY_UNAVAILABLE, "Gone.")
    status, body = await world.post(CHAT, chat("nice", moderation=asked()))
    assert status == 200
    error = {"type": "error", "code": "safety_unavailable", "message": "Gone."}
    assert body["moderation"] == {"input": error, "output": error}
    for policy in ({"input": BLOCK}, {"output": BLOCK}):
        status, body = await world.post(CHAT, chat("nice", moderation=asked(**policy)))
        assert (status, body["error"]["code"]) == (503, "safety_unavailable"), policy
        status, body = await world.post(CHAT, chat("nice", moderation=asked(**policy), stream=True))
        assert (status, body["error"]["code"]) == (503, "safety_unavailable"), policy


async def test_bad_wishes(world: EdgeWorld) -> None:
    """Every refusal names the field."""
    for moderation, field in (
        ({}, "moderation.model"),
        ({"model": 1}, "moderation.model"),
        ({"model": "m", "policy": {"input": {"mode": "stop"}}}, "moderation.policy.input.mode"),
        ({"model": "m", "policy": {"output": {}}}, "moderation.policy.output.mode"),
    ):
        status, body = await world.post(CHAT, chat_body(moderation=moderation))
        assert (status, body["error"]["param"]) == (400, field)


async def test_a_message_says_why_it_was_refused(world: EdgeWorld) -> None:
    """Anthropic's clients read `stop_details`."""
    from anthropic.types import RefusalStopDetails

    def play(request: Any) -> None:
        request.start()
        request.tokens("so ")
        error = KvloomError(ErrorReason.ERROR_REASON_CONTENT_FILTERED, "Launch codes are not discussed here.")
        request.finish(CONTENT_FILTER, error=error)

    world.link.script = play
    body = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    _, found = await events(world, "/v1/messages", body)
    streamed = next(event["delta"] for event in found if event["type"] == "message_delta")
    _, whole = await world.post("/v1/messages", body)
    for stop in (streamed, whole):
        assert stop["stop_reason"] == "refusal"
        details = RefusalStopDetails.model_validate(stop["stop_details"])
        assert (details.category, details.explanation) == (None, "Launch codes are not discussed here.")
