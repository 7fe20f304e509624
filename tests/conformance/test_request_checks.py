"""A bad request is refused alike over HTTP and over gRPC: for the same reason, and naming the same field."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from kvloom.request_fields import flat_field
from kvloom.transport.grpc_errors import from_rpc_error
from kvloom.v1.generation_pb2 import Guide, SamplingParams, StopConditions
from kvloom.v1.router_service_pb2 import (
    TIER_INTERACTIVE,
    TOOL_CHOICE_MODE_REQUIRED,
    Conversation,
    GenerateRequest,
    Message,
    Tool,
    ToolCall,
    ToolChoice,
)
from tests.fakes.edge_world import EdgeWorld, edge_world
from tests.fakes.router_world import MODEL, RouterWorld

pytest_plugins = ("tests.fakes.router_fixtures",)

WINDOW = 64


@pytest.fixture
async def edge(world: RouterWorld) -> AsyncIterator[EdgeWorld]:
    """An edge in front of the router of `world`."""
    async with edge_of(world, WINDOW) as started:
        yield started


@contextlib.asynccontextmanager
async def edge_of(world: RouterWorld, window: int) -> AsyncIterator[EdgeWorld]:
    await world.start_shard("shard-0", max_model_len=window)
    await world.start_router()
    link = await world.connect()
    await world.wait_for_shards(link, 1)
    async with edge_world(link=link) as started:
        yield started


def messages(*roles: str, content: str = "hi") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role in roles]}


def conversation(*roles: str, content: str = "hi") -> dict[str, Any]:
    return {"conversation": Conversation(messages=[Message(role=role, content=content) for role in roles])}


def sampling(**values: Any) -> dict[str, Any]:
    return {"sampling": SamplingParams(**values)}


def stop(**values: Any) -> dict[str, Any]:
    return {"stop": StopConditions(**values)}


def tools(*names: str, **function: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The body and the fields of a request with these tools, each of which has `function`."""
    body = [{"type": "function", "function": {"name": name, **function}} for name in names]
    schema = {"parameters": json.dumps(function["parameters"])} if "parameters" in function else {}
    return messages("user") | {"tools": body}, {"tools": [Tool(name=name, **schema) for name in names]}


def choice(http: Any, **grpc_choice: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    body, fields = tools("f")
    return body | {"tool_choice": http}, fields | {"tool_choice": ToolChoice(**grpc_choice)}


def history(call: dict[str, str], result_id: str = "c") -> tuple[dict[str, Any], dict[str, Any]]:
    """A conversation with a tool call and a result."""
    function = {"name": call.get("name", "f"), "arguments": call.get("arguments", "{}")}
    http_call = {"id": "c", "type": "function", "function": function}
    turns = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [http_call]},
        {"role": "tool", "tool_call_id": result_id, "content": "y"},
    ]
    grpc_turns = [
        Message(role="user", content="x"),
        Message(role="assistant", tool_calls=[ToolCall(id="c", **function)]),
        Message(role="tool", tool_call_id=result_id, content="y"),
    ]
    return {"messages": turns}, {"conversation": Conversation(messages=grpc_turns)}


DEEP: dict[str, Any] = {"type": "object"}
for _ in range(65):
    DEEP = {"type": "object", "properties": {"x": DEEP}}

# By name: the HTTP body, the fields of GenerateRequest, and the reason and the field of the refusal.
INVALID, UNSUPPORTED, TOO_LONG = "INVALID_ARGUMENT", "UNSUPPORTED_PARAMETER", "CONTEXT_LENGTH_EXCEEDED"
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "unknown role": (messages("user", "wizard"), conversation("user", "wizard"), INVALID, "messages[1].role"),
    "empty role": (messages(""), conversation(""), INVALID, "messages[0].role"),
    "upper case role": (messages("User"), conversation("User"), INVALID, "messages[0].role"),
    "no messages": (messages(), conversation(), INVALID, "messages"),
    "no model": ({"model": "none"}, {"model": "none"}, "MODEL_NOT_FOUND", "model"),
    "too hot": ({"temperature": 2.5}, sampling(temperature=2.5), INVALID, "temperature"),
    "less than no mass": ({"top_p": -0.5}, sampling(top_p=-0.5), INVALID, "top_p"),
    "presence": ({"presence_penalty": -3}, sampling(presence_penalty=-3), INVALID, "presence_penalty"),
    "frequency": ({"frequency_penalty": 2.1}, sampling(frequency_penalty=2.1), INVALID, "frequency_penalty"),
    "no tokens": ({"max_tokens": 0}, stop(max_tokens=0), INVALID, "max_tokens"),
    "over the window": ({"max_tokens": WINDOW}, stop(max_tokens=WINDOW), TOO_LONG, "max_tokens"),
    "many stops": ({"stop": ["a"] * 17}, stop(stop=["a"] * 17), INVALID, "stop"),
    "empty stop": ({"stop": ["a", ""]}, stop(stop=["a", ""]), INVALID, "stop[1]"),
    "long stop": ({"stop": ["a" * 257]}, stop(stop=["a" * 257]), INVALID, "stop[0]"),
    "many stop tokens": ({"stop_token_ids": [1] * 65}, stop(stop_token_ids=[1] * 65), INVALID, "stop_token_ids"),
    "many choices": ({"n": 17}, {"n": 17}, INVALID, "n"),
    "long session": (
        {"prompt_cache_key": "k" * 257},
        {"session_key": "k" * 257},
        INVALID,
        "prompt_cache_key|session_key",
    ),
    "bad guide": (
        {"structured_outputs": {"regex": ""}},
        sampling(guide=Guide(regex="")),
        INVALID,
        "structured_outputs|guide",
    ),
    "bad tool name": (*tools("a b"), INVALID, "tools[0].function.name|tools[0].name"),
    "same tool twice": (*tools("f", "f"), INVALID, "tools[1].function.name|tools[1].name"),
    "many tools": (*tools(*(f"f{i}" for i in range(1025))), INVALID, "tools"),
    "no schema": (*tools("f", parameters=[1]), INVALID, "tools[0].function.parameters|tools[0].parameters"),
    "deep schema": (*tools("f", parameters=DEEP), INVALID, "tools[0].function.parameters|tools[0].parameters"),
    "choice without tools": (
        messages("user") | {"tool_choice": "required"},
        {"tool_choice": ToolChoice(mode=TOOL_CHOICE_MODE_REQUIRED)},
        INVALID,
        "tool_choice",
    ),
    "choice of no tool": (
        *choice({"type": "function", "function": {"name": "g"}}, name="g"),
        INVALID,
        "tool_choice",
    ),
}
GOOD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no mass": ({"top_p": 0}, sampling(top_p=0)),
    "broken arguments": history({"arguments": "{"}),
    "arguments are no object": history({"arguments": "[1]"}),
    "nameless call": history({"name": ""}),
    "result of no call": history({}, "d"),
    "result without call": (messages("user", "tool"), conversation("user", "tool")),
}


@pytest.mark.parametrize("name", GOOD)
async def test_histories_are_taken_alike(world: RouterWorld, name: str) -> None:
    """What models and other software wrote before is no error of the caller in either API, and is the same prompt."""
    body, fields = GOOD[name]
    async with edge_of(world, 1000) as edge:
        status, answer = await edge.chat(**{"max_tokens": 1, **messages("user"), **body})
        assert status == 200, answer
        wanted = {"model": MODEL, **conversation("user"), "stop": StopConditions(max_tokens=1), **fields}
        responses = [each async for each in (await world.stub()).Generate(GenerateRequest(**wanted))]
        [finish] = [delta.finish for each in responses for delta in each.deltas if delta.HasField("finish")]
        assert finish.num_prompt_tokens == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("name", BAD)
async def test_refusals_are_the_same(world: RouterWorld, edge: EdgeWorld, name: str) -> None:
    """A client that moves from one API to the other finds the same checks, not a stricter and a looser fabric."""
    body, fields, reason, field = BAD[name]
    http_field, _, grpc_field = field.partition("|")
    status, answer = await edge.chat(**body)
    by_http = answer["error"]
    defaults = {"model": MODEL, "tier": TIER_INTERACTIVE, **conversation("user")}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in (await world.stub()).Generate(GenerateRequest(**{**defaults, **fields})):
            pass
    by_grpc = from_rpc_error(caught.value)
    assert by_grpc.reason_name == reason
    assert status == by_grpc.kind.http_status
    assert (by_http["type"], by_http["code"]) == (by_grpc.kind.openai_type, by_grpc.kind.openai_code)
    assert by_http["param"].startswith(http_field)
    assert flat_field(by_grpc.field).startswith(grpc_field or http_field)
    if "role" in field:
        assert by_http["message"] == by_grpc.message.replace("conversation.", "")
