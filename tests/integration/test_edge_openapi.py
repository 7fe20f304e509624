"""/openapi.json describes what the edge does, and /docs shows it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import make_mocked_request

from edge_http.admin.operations import ADMIN_OPERATIONS
from edge_http.answers.features import CacheUseHeaders
from edge_http.openai import requests
from edge_http.openai.response_objects import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    ErrorBody,
    ModelList,
    ModerationObject,
)
from edge_http.server.api_docs import API_ROUTES, document_bytes
from edge_http.server.http_router import HANDLERS, route_of
from edge_http.tenant_usage import TenantUsage
from kvloom.errors import KvloomError
from kvloom.limits_state import LimitsState, RateState, limits_state_from_proto, limits_state_to_proto
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.access.api_keys import ApiKeys
from kvloom_common.callers import Callers
from kvloom_common.config import EdgeConfig, RouteConfig
from kvloom_common.models.model_routes import ModelRoutes
from kvloom_common.parsers.spec import ParserSpec
from tests.conftest import REPOSITORY
from tests.fakes.edge_world import chat_body, edge_world
from tests.fakes.fake_control import ACME, SEARCH, SEARCH_KEY, key_of
from tests.fakes.fake_router_link import ERROR, LENGTH, FakeRequest, answer
from tests.fakes.tenants import callers_of
from tests.words import is_fragment

DOCUMENT = json.loads(document_bytes(needs_key=False, has_tenants=True))
FUNCTION = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


def every(node: Any) -> Iterator[dict[str, Any]]:
    """All objects inside a document."""
    if isinstance(node, dict):
        yield node
        node = list(node.values())
    if isinstance(node, list):
        for part in node:
            yield from every(part)


def test_every_text_can_be_read_alone() -> None:
    """A reader sees one description at a time, without the sentence that a fragment belongs to."""
    texts = [
        node[key] for node in every(DOCUMENT) for key in ("description", "summary") if isinstance(node.get(key), str)
    ]
    assert len(texts) > 300
    assert not sorted(text for text in texts if is_fragment(text))
    assert not sorted(text for text in texts if len(text.split()) == 1 and text.endswith("."))


def test_every_route_is_described_and_nothing_else() -> None:
    """A route without an entry, or an entry without its route, fails here. HEAD is what GET says, without a body."""
    served = {(path, method) for path, methods in HANDLERS.items() for method in methods if method != "HEAD"}
    assert {(operation.path, operation.method) for operation in (*API_ROUTES, *ADMIN_OPERATIONS)} == served
    described = {(path, method.upper()) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert described == served


def test_the_page_names_every_path() -> None:
    """People look for an endpoint in docs/reference/http-api.md."""
    page = (REPOSITORY / "docs" / "reference" / "http-api.md").read_text()
    assert [route.path for route in API_ROUTES if route.tag != "Pages" and f"{route.path}" not in page] == []


def test_a_path_with_an_id_needs_no_more_than_its_record() -> None:
    """Whoever adds /v1/files/{id} must not find a second table of such paths."""
    templates = [route.path for route in API_ROUTES if "{id}" in route.path]
    assert len(templates) > 5
    for template in templates:
        request = make_mocked_request("GET", template.replace("{id}", "abc"))
        assert route_of(request) == template


def test_administration_is_described_where_there_are_tenants() -> None:
    """Paths that a fabric does not serve would mislead its users."""
    plain = json.loads(document_bytes(needs_key=False))
    assert not {operation.path for operation in ADMIN_OPERATIONS} & plain["paths"].keys()
    key = DOCUMENT["components"]["schemas"]["ApiKey"]["properties"]
    assert key["scopes"] == {"type": "array", "items": {"type": "string"}}
    assert key["limits"] == {"$ref": "#/components/schemas/Limits"}


def test_the_document_is_well_formed() -> None:
    """References lead somewhere, ids are unique, and every response says what it is."""
    assert DOCUMENT["openapi"] == "3.1.0"
    for node in every(DOCUMENT):
        if isinstance(node.get("$ref"), str):
            found: Any = DOCUMENT
            for key in node["$ref"].removeprefix("#/").split("/"):
                found = found[key]
    operations = [operation for methods in DOCUMENT["paths"].values() for operation in methods.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"\w+", name) for name in names)
    for path, methods in DOCUMENT["paths"].items():
        for operation in methods.values():
            parameters = [p for p in operation.get("parameters", ()) if p.get("in") == "path"]
            assert {p["name"] for p in parameters} == set(re.findall(r"\{(\w+)\}", path))
            for response in operation["responses"].values():
                assert response["description"]
                assert "x-request-id" in response["headers"]


def test_fields_come_from_the_types_that_decode_them() -> None:
    """The document cannot lag behind the code: names, requirements and descriptions are those of the source."""
    chat = DOCUMENT["components"]["schemas"]["ChatBody"]
    assert set(chat["properties"]) == set(requests.ChatBody.__struct_fields__)
    assert set(chat["required"]) == {"model", "messages"}
    assert chat["additionalProperties"] is False
    assert chat["properties"]["top_k"]["description"] == "An extension. 0 or -1 means all tokens, which is the default."


SAMPLING = (
    *("temperature", "top_p", "top_k", "seed", "stop", "n", "stream", "presence_penalty", "frequency_penalty", "min_p"),
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "logprobs", "top_logprobs", "repetition_penalty"),
    *("min_tokens", "stop_sequences", "tools", "tool_choice", "parallel_tool_calls", "response_format"),
)


def test_every_field_of_a_request_has_a_meaning() -> None:
    """And those by which answers are made have their range and their default, so that nobody has to try them."""
    schemas = DOCUMENT["components"]["schemas"]
    waiting = [
        operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        for path, methods in DOCUMENT["paths"].items()
        for operation in methods.values()
        if "requestBody" in operation and not path.startswith("/admin/")
    ]
    seen: set[str] = set()
    while waiting:
        ref = waiting.pop()
        if ref in seen:
            continue
        seen.add(ref)
        schema = schemas[ref.rpartition("/")[2]]
        waiting += re.findall(r'"\$ref": "([^"]+)"', json.dumps(schema))
        for name, about in schema.get("properties", {}).items():
            assert about.get("description"), (ref, name)
            if name in SAMPLING and name not in schema.get("required", ()):
                assert re.search("default|absent", about["description"]), (ref, name, about["description"])
    assert len(seen) > 50


def test_keys_are_demanded_where_the_edge_demands_them() -> None:
    """A generated client asks for a key only if one is needed."""
    closed = json.loads(document_bytes(needs_key=True))["paths"]
    assert closed["/v1/models"]["get"]["security"] == [{"bearer": []}, {"apiKey": []}]
    assert DOCUMENT["paths"]["/v1/models"]["get"]["security"][-1] == {}
    assert closed["/health"]["get"]["security"] == []


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2, "logprobs": True, "top_logprobs": 2},
        {"tools": [{"type": "function", "function": FUNCTION}]},
        {"functions": [FUNCTION]},
    ],
    ids=["plain", "logprobs", "tools", "functions"],
)
async def test_chat_answers_are_as_described(fields: dict[str, Any]) -> None:
    """Answers are made from templates; they are decoded here with the types of the document."""

    def play(request: FakeRequest) -> None:
        for index in range(request.request.n):
            request.start(index)
        if "logprobs" not in fields:
            text = '<think>hm</think>ok <tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
            for index in range(request.request.n):
                request.tokens(text, index)
        for index in range(request.request.n):
            request.finish(index=index)

    async with edge_world(output=ParserSpec(tools="hermes", reasoning="qwen3")) as world:
        world.link.script = play
        url, headers = f"{world.url}/v1/chat/completions", {"x-kvloom-details": "true"}
        async with world.http.post(url, json=chat_body(**fields), headers=headers) as response:
            assert response.status == 200, await response.text()
            msgspec.json.decode(await response.read(), type=ChatCompletion)
        body = chat_body(**fields, stream=True, stream_options={"include_usage": True})
        async with world.http.post(url, json=body, headers=headers) as response:
            events = (await response.text()).removesuffix("\n\n").split("\n\n")
        assert events.pop().endswith("data: [DONE]")
        for event in events:
            msgspec.json.decode(event.partition("data: ")[2], type=ChatCompletionChunk)


async def test_other_answers_are_as_described() -> None:
    """As above, for the other endpoints and for errors."""
    async with edge_world() as world:
        world.link.script = answer("x")
        for path, body, kind in (
            ("/v1/completions", {"model": "tiny", "prompt": "the fox"}, Completion),
            ("/v1/moderations", {"input": "forbidden"}, ModerationObject),
            ("/v1/completions", {"model": "tiny"}, ErrorBody),
            ("/v1/audio/speech", {}, ErrorBody),
        ):
            _, answered = await world.post(path, body)
            msgspec.convert(answered, kind)
        async with world.http.get(f"{world.url}/v1/models") as response:
            msgspec.json.decode(await response.read(), type=ModelList)


OF_HTTP = {"content-type", "content-length", "date", "connection", "transfer-encoding", "cache-control"} | {
    "x-accel-buffering",
    "vary",
}
TRIES: list[tuple[str, dict[str, Any]]] = [
    *(
        (path, {**body, "stream": stream})
        for path, body in (
            ("/v1/chat/completions", chat_body()),
            ("/v1/chat/completions", chat_body(model="either")),
            ("/v1/completions", {"model": "tiny", "prompt": "the fox"}),
            ("/v1/responses", {"model": "tiny", "input": "the fox"}),
            ("/v1/messages", chat_body(max_tokens=5)),
        )
        for stream in (False, True)
    ),
    ("/v1/embeddings", {"model": "tiny", "input": "the fox"}),
    ("/v1/rerank", {"model": "tiny", "query": "a", "documents": ["b"]}),
    ("/v1/score", {"model": "tiny", "text_1": "a", "text_2": "b"}),
    ("/v1/messages/count_tokens", chat_body()),
]


@pytest.mark.parametrize("outcome", ["answered", "refused"])
async def test_every_header_of_a_response_is_described(tmp_path: Path, outcome: str) -> None:
    """Clients are generated from the document; those of tenants must learn of their limits and costs from it."""
    limits = limits_state_to_proto(LimitsState(RateState(60, 41, 19.0), RateState(400, 300, 1.5)))

    def play(request: FakeRequest) -> None:
        if outcome == "refused":
            error = KvloomError(
                ErrorReason.ERROR_REASON_BUDGET_EXHAUSTED,
                "No.",
                limit="key:k",
                limits=limits_state_from_proto(limits),
                end="rejected",
            )
            request.finish(ERROR, error=error)
            return
        request.start(limits=limits)
        request.tokens("Hi")
        request.finish(LENGTH, limited_by="key:k max_output_tokens")

    callers = callers_of(tmp_path, [ACME, SEARCH, key_of(SEARCH_KEY, "acme/search")])
    routes = ModelRoutes([RouteConfig(name="either", targets=["tiny"])])
    seen: set[str] = set()
    async with edge_world(callers=callers, routes=routes) as world:
        world.link.script, world.edge.features = play, [CacheUseHeaders()]
        assert callers.identities is not None
        usage = TenantUsage(callers.identities)
        world.edge.add_usage(usage)
        usage._known["acme/search", key_of(SEARCH_KEY, "acme/search").id] = time.monotonic(), 10**9
        headers = {"Authorization": f"Bearer {SEARCH_KEY}", "x-kvloom-explain": "1"}
        for path, body in TRIES:
            headers["Idempotency-Key"] = f"{path.replace('/', '.')}-{body['model']}-{body.get('stream')}"
            for _ in range(2):  # the second one is answered from the kept answer
                async with world.http.post(world.url + path, json=body, headers=headers) as response:
                    await response.read()
                responses = DOCUMENT["paths"][path]["post"]["responses"]
                described = responses.get(str(response.status), responses["default"])["headers"]
                sent = {name.lower() for name in response.headers} - OF_HTTP
                assert sent <= {name.lower() for name in described}, (path, response.status)
                seen |= sent
    if outcome == "answered":
        assert {"x-kvloom-cost", "x-kvloom-budget-remaining", "x-kvloom-limited-by", "x-kvloom-route"} <= seen
        assert {"x-kvloom-cache", "idempotent-replayed"} <= seen
    else:
        assert {"x-should-retry", "x-kvloom-reason", "x-llm-d-request-dropped-reason"} <= seen
    assert {"x-ratelimit-limit-requests", "anthropic-ratelimit-input-tokens-reset"} <= seen


async def test_served_without_a_key_and_without_other_hosts() -> None:
    """A newcomer reads the reference before having a key, also on a machine without internet."""
    async with edge_world(callers=Callers(api_keys=ApiKeys([]))) as world:
        async with world.http.get(f"{world.url}/openapi.json") as response:
            assert (response.status, response.content_type) == (200, "application/json")
            assert await response.read() == document_bytes(needs_key=True)
        for path in ("/docs", "/docs.js", "/docs.css"):
            async with world.http.get(world.url + path) as response:
                assert response.status == 200
                assert "default-src 'self'" in response.headers["Content-Security-Policy"]
                assert not re.search(r"https?://", await response.text())


async def test_switched_off() -> None:
    """An operator who does not want to describe the API gets 404 for all of it, and the chat page stays."""
    async with edge_world(EdgeConfig(api_docs=False)) as world:
        for path in ("/openapi.json", "/docs", "/docs.js", "/docs.css"):
            async with world.http.get(world.url + path) as response:
                assert response.status == 404
        async with world.http.get(f"{world.url}/") as response:
            assert response.status == 200
