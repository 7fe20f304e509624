"""Guided decoding over HTTP: a body's guide reaches the fabric unchanged, and errors that only the engine can find name
the body's field."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvloom.guide import GUIDE_FIELD
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import Choices, Guide
from tests.fakes.edge_world import EdgeWorld, edge_world
from tests.fakes.fake_router_link import FakeRequest, answer

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": "é"}}, "required": ["b"]}


@pytest.fixture
async def world() -> AsyncIterator[EdgeWorld]:
    async with edge_world() as world:
        yield world


GIVEN = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Guide(json_object=True)),
    ({"structured_outputs": {"json_object": True}}, Guide(json_object=True)),
    ({"structured_outputs": {"regex": "a+"}}, Guide(regex="a+")),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, Guide(choice=Choices(texts=["yes", "no"]))),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Guide(grammar='start: "a"')),
    ({"structured_outputs": {"json": '{"type": "null"}', "regex": None}}, Guide(json_schema='{"type": "null"}')),
    ({}, None),
]


@pytest.mark.parametrize(("fields", "guide"), GIVEN)
async def test_every_form_reaches_the_fabric(world: EdgeWorld, fields: dict[str, Any], guide: Guide | None) -> None:
    """OpenAI's field and vLLM's extensions have the same meaning."""
    world.link.script = answer("x")
    status, _ = await world.chat(**fields)
    assert status == 200
    sampling = world.link.requests[0].request.wanted.sampling
    assert sampling.HasField("guide") == (guide is not None)
    assert guide is None or sampling.guide == guide


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_schema_keeps_the_order_of_its_properties(world: EdgeWorld, path: str) -> None:
    """The engine generates properties in the schema's order, which re-encoding must not change."""
    world.link.script = answer("x")
    body: dict[str, Any] = {
        "model": "tiny",
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
    }
    body |= {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    status, _ = await world.post(path, body)
    assert status == 200
    text = world.link.requests[0].request.wanted.sampling.guide.json_schema
    assert list(json.loads(text)["properties"]) == ["b", "a"]
    assert json.loads(text) == SCHEMA


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_compiler_refuses_names_the_bodys_field(world: EdgeWorld, stream: bool) -> None:
    """The client does not know sampling.guide, and a stream that has not begun can still have an error status."""

    def refuse(request: FakeRequest) -> None:
        request.fail(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, "The guide cannot be followed: x.", field=GUIDE_FIELD)

    world.link.script = refuse
    status, body = await world.chat(structured_outputs={"regex": "("}, stream=stream)
    assert status == 400
    assert body["error"]["param"] == "structured_outputs.regex"
    assert body["error"]["code"] is None
