"""A forbidden text that a model writes leaves in no field of any API, whole or in pieces."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from kvloom.v1.generation_pb2 import FINISH_REASON_CONTENT_FILTER
from kvloom.v1.router_service_pb2 import GenerateRequest
from kvloom_common.parsers.spec import ParserSpec
from kvloom_common.text.json_escapes import unescaped
from lab.redteam.campaign import seen_texts
from safety_svc.folding import fold, letters_of
from tests.fakes.screened_world import ScreenedWorld, WritingEngine, screened_world, showing_tokenizer

pytest_plugins = ("tests.fakes.router_fixtures",)

POLICY = """
[[rules]]
name = "codes"
category = "weapons"
message = "No such codes."
phrases = ["launch code", "launch-code"]
confusables = true
spaced = true
"""
USER = {"role": "user", "content": "hi"}
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "%s", "arguments": {"q": "%s"}}\n</tool_call>'
WRITTEN = {
    "text": "so the launch code is",
    "look-alikes": "so the l\u0430unch c0de is",
    "spaced": "so the l.a.u.n.c.h  c o d e is",
    "reasoning": "<think>so the launch code is</think>ok",
    "arguments": CALL % ("f", "launch code"),
    "escaped arguments": CALL % ("f", r"launch\ncode"),
    "spelled arguments": CALL % ("f", r"so \u006caunch\u0020code"),
    "spaced arguments": CALL % ("f", r"l\na\nu\nn\nc\nh\nc\no\nd\ne"),
    "name": CALL % ("launch-code", "x"),
    "end of the arguments": CALL % ("f", "x" * 99 + " launch code"),
}
CALL_SIGNS = ('"tool_calls":[', '"type":"function_call"', '"type":"tool_use"', "tool_call_start")
"""What begins a call in some API."""
STOPPED = "so the launch "
"""Followed by a stop string, it is forbidden."""
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [USER],
        "tools": [{"type": "function", "function": FUNCTION}],
        "logprobs": True,
        "top_logprobs": 1,
        "n": 2,
    },
    "/v1/completions": {"prompt": "hi", "logprobs": 1, "max_tokens": 200},
    "/v1/responses": {
        "input": "hi",
        "tools": [{"type": "function", **FUNCTION}],
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
    },
    "/v1/messages": {
        "messages": [USER],
        "max_tokens": 200,
        "tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}],
    },
}
PLAIN_BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "hi", "max_tokens": 200},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [USER], "max_tokens": 200},
}
STOPS = {"/v1/chat/completions": "stop", "/v1/completions": "stop", "/v1/messages": "stop_sequences"}
ENDS = {
    "/v1/chat/completions": '"finish_reason":"content_filter"',
    "/v1/completions": '"finish_reason":"content_filter"',
    "/v1/responses": '"incomplete_details":{"reason":"content_filter"}',
    "/v1/messages": '"stop_reason":"refusal"',
}


@pytest.fixture
async def fabric(router_redis_url: str, tmp_path: Path) -> AsyncIterator[tuple[ScreenedWorld, WritingEngine]]:
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY)
    engine = WritingEngine(showing_tokenizer())
    async with screened_world(router_redis_url, policy, engine, ParserSpec("hermes", "qwen3")) as world:
        yield world, engine


def is_forbidden(text: str) -> bool:
    read = fold(unescaped(text).replace("\u0430", "a").replace("0", "o"))[0]
    return "launchcode" in letters_of(read)[0]


@pytest.mark.parametrize("path", BODIES)
async def test_no_api_shows_it(fabric: tuple[ScreenedWorld, WritingEngine], path: str) -> None:
    """Tokens, their log-probabilities and thoughts wait for the verdict on the text that they are made of, and calls
    for that on all of the call: none has begun."""
    world, engine = fabric
    for (kind, written), is_stream in itertools.product(WRITTEN.items(), (False, True)):
        engine.answer = world.tokenizer.encode_now(written)
        status, body = await world.post(path, {"model": "tiny", "stream": is_stream, **BODIES[path]})
        assert status == 200, (kind, body)
        assert not any(map(is_forbidden, seen_texts(body))), (kind, is_stream, body)
        assert path == "/v1/completions" or not any(sign in body for sign in CALL_SIGNS), (kind, is_stream, body)
        assert ENDS[path] in body, (kind, is_stream, body)


async def test_an_allowed_call_arrives_in_every_api(fabric: tuple[ScreenedWorld, WritingEngine]) -> None:
    """What is held until the verdict on all of it is then sent, and the answer ends as it would without a policy."""
    world, engine = fabric
    engine.answer = world.tokenizer.encode_now("Sure. " + CALL % ("f", "Rome") + " And " + CALL % ("f", "Oslo"))
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
        status, body = await world.post(path, {"model": "tiny", "stream": True, **BODIES[path]})
        assert status == 200, body
        assert any(sign in body for sign in CALL_SIGNS), body
        for word in ("Sure", "Rome", "Oslo"):
            assert any(word in text for text in seen_texts(body)), (path, word, body)
        assert ENDS[path] not in body, body


@pytest.mark.parametrize("path", STOPS)
async def test_a_stop_string_does_not_complete_it(fabric: tuple[ScreenedWorld, WritingEngine], path: str) -> None:
    """The client knows that the stop string followed the text, and some APIs say so."""
    world, engine = fabric
    engine.answer = world.tokenizer.encode_now(STOPPED + "code and more")
    for is_stream in (False, True):
        wanted = {"model": "tiny", "stream": is_stream, **BODIES[path], STOPS[path]: ["code"]}
        status, body = await world.post(path, wanted)
        assert status == 200, body
        assert not any("launch" in text for text in seen_texts(body)), body
        assert ENDS[path] in body, body


async def test_a_client_learns_what_it_saw_too_soon(router_redis_url: str, tmp_path: Path) -> None:
    """A rule in mode `async` lets text be shown before its verdict. No API has an event that takes it back, so only
    those are told that ask for details."""
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY + 'mode = "async"\n')
    engine = WritingEngine(showing_tokenizer())
    async with screened_world(router_redis_url, policy, engine, ParserSpec("hermes", "qwen3")) as world:
        engine.answer = world.tokenizer.encode_now(WRITTEN["text"])
        for path, plain in PLAIN_BODIES.items():
            wanted = {"model": "tiny", "stream": True, **plain}
            _, body = await world.post(path, wanted, {"x-kvloom-details": "true"})
            shown = max((text for text in seen_texts(body) if WRITTEN["text"].startswith(text)), key=len)
            told = re.search(r'"num_retracted_chars":\[(\d+)\]', body)
            assert shown[: len(shown) - int(told[1] if told else 0)] == "so the ", body
            assert ENDS[path] in body
            _, body = await world.post(path, wanted)
            assert "num_retracted_chars" not in body


async def test_no_generate_shows_it(fabric: tuple[ScreenedWorld, WritingEngine]) -> None:
    """Clients over gRPC get tokens, which are text to all who know the vocabulary."""
    world, engine = fabric
    stub = await world.router.stub()
    wanted = {
        "model": "tiny",
        "conversation": {"messages": [USER]},
        "tools": [{"name": "f", "parameters": json.dumps(FUNCTION["parameters"])}],
        "sampling": {"logprobs": 1},
        "n": 2,
    }
    for kind, written in (*WRITTEN.items(), ("stop", STOPPED + "code and more")):
        engine.answer = world.tokenizer.encode_now(written)
        stop = {"stop": {"stop": ["code"]}} if kind == "stop" else {}
        ids: list[int] = []
        finishes: list[Any] = []
        texts = ""
        async for response in stub.Generate(json_format.ParseDict({**wanted, **stop}, GenerateRequest())):
            for delta in response.deltas:
                if delta.index == 0:
                    ids += delta.token_ids
                    texts += delta.text + str(list(delta.output))
                finishes += [delta.finish] if delta.HasField("finish") else []
        assert not is_forbidden(world.tokenizer.decode(ids)), (kind, ids)
        assert not is_forbidden(texts), kind
        assert not any(sign in texts for sign in CALL_SIGNS), kind
        # A call of an unknown tool is text.
        assert kind == "name" or "tool_call" not in world.tokenizer.decode(ids), kind
        assert [finish.reason for finish in finishes] == [FINISH_REASON_CONTENT_FILTER] * 2, kind
