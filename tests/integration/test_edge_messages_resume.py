"""A message of Anthropic's API outlives its connection and its edge, with thinking and calls, to the byte."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from edge_http.resume.response_name import edge_tag_of
from kvloom_common.access.api_keys import ApiKey, ApiKeys, digest_of
from kvloom_common.callers import Callers
from kvloom_common.parsers.spec import ParserSpec
from kvloom_common.text.detokenizer import IncrementalDetokenizer
from tests.fakes.edge_peers import edges
from tests.fakes.edge_world import EdgeWorld, edge_world
from tests.fakes.fake_router_link import answer
from tests.fakes.scripted_answer import (
    MESSAGES,
    Script,
    begin_live,
    client,
    kill,
    messages_body,
    same_but_names,
    undisturbed,
)
from tests.fakes.tiny_tokenizer import model_tokenizer

pytestmark = pytest.mark.xdist_group("anthropic")  # which takes seconds to import

OUTPUT = ParserSpec(tools="hermes", reasoning="qwen3")
TEXT = '<think>Hé</think>Ok\n<tool_call>\n{"name": "get_time", "arguments": {"a": 1}}\n</tool_call>'
BODY: dict[str, Any] = messages_body(
    stream=True, tools=[{"name": "get_time", "input_schema": {"type": "object", "properties": {}}}]
)
KEY = "kvl-test"


def tokens_of(text: str) -> Sequence[tuple[int, str]]:
    tokenizer = model_tokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [(token_id, detokenizer.push((token_id,))) for token_id in tokenizer.encode_now(text)]


async def test_killed_in_any_block(redis_url: str) -> None:
    """Another edge ends the block that the dead one had begun, with its number, its call's id and its rest."""
    script = Script(tokens=tokens_of(TEXT))
    async with edges(redis_url, output=OUTPUT) as ((first, _), _):
        expected = await undisturbed(first, MESSAGES, BODY, script)
    kinds = b"".join(expected)
    assert all(kind in kinds for kind in (b"thinking_delta", b"signature_delta", b"text_delta", b"input_json_delta"))

    async def one(end: int) -> None:
        async with edges(redis_url, output=OUTPUT) as ((first, peers), (second, _)):
            streamed, _, reading = await begin_live(first, MESSAGES, BODY, script, end)
            await kill(first, peers, reading)
            streamed.url = second.url + MESSAGES
            back = asyncio.create_task(streamed.resume(by_header=end % 2 == 0))
            rest = await second.link.next_request()
            script.check(rest, end)
            script.restart(rest, end)
            assert await back == 200
            assert same_but_names(streamed.events) == expected
            ids = {event.split(b'"id":"')[1][:30] for event in streamed.events if b'"id":"toolu_' in event}
            assert len(ids) == 1

    await asyncio.gather(*map(one, range(1, len(script.steps), 7)))


async def test_a_stream_is_resumed_under_its_own_path() -> None:
    """The id names the message and its edge; the other APIs' paths know nothing of it."""
    async with edge_world() as world:
        world.link.script = answer("Hel", "lo")
        streamed = client(world, MESSAGES)
        await streamed.begin(messages_body(stream=True), stop_after=4)
        assert streamed.response_id.startswith("msg_")
        assert edge_tag_of(streamed.response_id) == world.edge.tag
        for other in ("/v1/chat/completions", "/v1/completions"):
            streamed.url = world.url + other
            assert await streamed.resume() == 404
        streamed.url = world.url + MESSAGES
        assert await streamed.resume() == 200
        assert streamed.done
        headers = {"Authorization": "Bearer secret"}
        path = f"{world.url}{MESSAGES}/{streamed.response_id}/cancel"
        async with world.http.post(path, headers=headers) as response:
            assert response.status == 200


async def test_a_key_of_another_request() -> None:
    """An Idempotency-Key of a chat does not give its stream to a message with the same body."""
    body = messages_body(stream=True)
    async with edge_world() as world:
        world.link.script = answer("Hello")
        chat = client(world, "/v1/chat/completions", **{"Idempotency-Key": "k"})
        await chat.begin(body)
        message = client(world, MESSAGES, **{"Idempotency-Key": "k"})
        await message.begin(body)
        assert (chat.status, message.status) == (200, 409)
        assert b'"type":"error"' in message.notices[0]


async def test_keys() -> None:
    """Old clients send x-api-key, and those of today a bearer token; who has neither gets Anthropic's error."""
    import anthropic

    async with edge_world(callers=Callers(api_keys=ApiKeys([ApiKey("alice", digest_of(KEY))]))) as world:
        world.link.script = answer("x")
        await _check_key(world, {"x-api-key": KEY}, 200)
        await _check_key(world, {"Authorization": f"Bearer {KEY}"}, 200)
        await _check_key(world, {"x-api-key": "wrong"}, 401)
        async with anthropic.AsyncAnthropic(base_url=world.url, api_key=KEY, max_retries=0) as official:
            await official.messages.create(model="tiny", max_tokens=9, messages=[{"role": "user", "content": "x"}])


async def _check_key(world: EdgeWorld, headers: dict[str, str], status: int) -> None:
    for path, body in ((MESSAGES, messages_body()), (MESSAGES + "/count_tokens", messages_body())):
        if path != MESSAGES:
            del body["max_tokens"]
        async with world.http.post(world.url + path, json=body, headers=headers) as response:
            assert response.status == status
            if status == 401:
                assert (await response.json())["error"]["type"] == "authentication_error"
