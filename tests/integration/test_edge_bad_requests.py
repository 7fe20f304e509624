"""Whatever is wrong with a request, its client gets the right status and an OpenAI error that names the field."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from edge_http.openai.sampling import check_window
from kvloom.errors import KvloomError
from kvloom.v1.router_service_pb2 import FleetState, ModelInfo
from kvloom_common.config import EdgeConfig
from tests.fakes.edge_world import EdgeWorld, chat_body, edge_world
from tests.fakes.fake_router_link import answer

USER = {"role": "user", "content": "hi"}


@pytest.fixture
async def world() -> AsyncIterator[EdgeWorld]:
    async with edge_world() as started:
        yield started


def part(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "user", "content": [{"type": "text", "text": "a"}, fields]}]}


def schema(content: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": content}}}


def nested(depth: int) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for _ in range(depth):
        content = {"items": content}
    return content


INVALID = [
    ({"model": None}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [USER, {"role": "user", "content": 3}]}, "messages[1].content"),
    ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [USER, {"content": "x"}]}, "messages[1].role"),
    ({"messages": [USER, {"role": "wizard", "content": "x"}]}, "messages[1].role"),
    (part(type="text"), "messages[1].content[1].text"),
    (part(type="text", text=1), "messages[1].content[1].text"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 2**70}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"seed": 2**64}, "seed"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a", 3]}, "stop[1]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"min_p": 1.5}, "min_p"),
    ({"min_p": -0.1}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1000}, "repetition_penalty"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {"-5": 1}}, "logit_bias"),
    ({"logit_bias": {"4294967296": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ({"metadata": "x"}, "metadata"),
    ({"guided_json": {}, "structured_outputs": {"regex": "a"}}, "guided_json"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_json"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"priority": -1}, "priority"),
    ({"priority": 2**40}, "priority"),
    ({"priority": 0.5}, "priority"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    (schema(7), "response_format.json_schema.schema"),
    (schema({"x": "x" * 65_536}), "response_format.json_schema.schema"),
    (schema(nested(65)), "response_format.json_schema.schema"),
    (schema({"type": "integer", "multipleOf": 1000003}), "response_format.json_schema.schema"),
    (schema({"properties": {"a": {"multipleOf": 1e-30}}}), "response_format.json_schema.schema"),
    # This one kept a thread of the compiler for ever, and the next one took 20 s and 1.1 GB.
    (schema({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}), "response_format.json_schema.schema"),
    (
        schema({"properties": {f"p{i}": {"multipleOf": 9973 - i} for i in range(300)}}),
        "response_format.json_schema.schema",
    ),
    (schema({"multipleOf": 0.9973, "anyOf": [{"multipleOf": 9967}]}), "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a" * 16_385}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a"] * 1025}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a" * 65_537]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "start: %json {}"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
]


@pytest.mark.parametrize(("fields", "param"), INVALID)
async def test_bad_chat_values_are_named(world: EdgeWorld, fields: dict[str, Any], param: str) -> None:
    """Users can find the faulty field without reading our code."""
    status, body = await world.chat(**fields)
    assert (status, body["error"]["param"]) == (400, param)
    assert body["error"]["type"] == "invalid_request_error"
    assert param in body["error"]["message"]
    assert not world.link.requests


UNSUPPORTED = [
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"include_reasoning": False}, "include_reasoning"),
    ({"mirostat": 2}, "mirostat"),
    ({"maxTokens": 3}, "maxTokens"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"max_tokenz": 3}, "max_tokenz"),
    (part(type="image_url", image_url={"url": "x"}), "messages[1].content[1].type"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
]


@pytest.mark.parametrize(("fields", "param"), UNSUPPORTED)
async def test_unsupported_parameters_are_refused_by_name(world: EdgeWorld, fields: dict[str, Any], param: str) -> None:
    """Ignoring an option that a client sets would silently be a wrong answer."""
    status, body = await world.chat(**fields)
    assert (status, body["error"]["param"], body["error"]["code"]) == (400, param, "unsupported_parameter")
    assert not world.link.requests


async def test_values_that_mean_off_are_accepted(world: EdgeWorld) -> None:
    """Clients send default values explicitly, and echo our messages back with all their null fields."""
    world.link.script = answer("x")
    echoed = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "tool_calls": None,
        "annotations": [],
        "audio": None,
    }
    status, _ = await world.chat(
        messages=[USER, echoed, {**USER, "name": "ann"}],
        tools=[],
        logit_bias={},
        response_format={"type": "text"},
        store=False,
        functions=None,
        modalities=["text"],
        max_tokens=None,
        stop=None,
        n=None,
        stream_options=None,
        logprobs=False,
        top_logprobs=0,
        add_generation_prompt=True,
        continue_final_message=False,
        skip_special_tokens=True,
        use_beam_search=False,
        best_of=1,
        include_reasoning=True,
        mirostat=0,
        guided_json=None,
        guided_choice=None,
        structured_outputs=None,
        anything_at_all=None,
    )
    assert status == 200


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": ""}, "prompt", None),
        ({"prompt": []}, "prompt", None),
        ({"prompt": ["a", 3]}, "prompt", None),
        ({"prompt": ["a", ""]}, "prompt[1]", None),
        ({"prompt": [[1], []]}, "prompt[1]", None),
        ({"prompt": [1, -1]}, "prompt[1]", None),
        ({"prompt": [[1], [2, 10**30]]}, "prompt[1][1]", None),
        ({"prompt": ["a"] * 65}, "prompt", None),
        ({"prompt": ["a"] * 20, "n": 8}, "prompt", None),
        ({"prompt": {}}, "prompt", None),
        ({}, "prompt", None),
        ({"prompt": "a", "logprobs": 21}, "logprobs", None),
        ({"prompt": "a", "suffix": "b"}, "suffix", "unsupported_parameter"),
        ({"prompt": "a", "echo": 1}, "echo", None),
        ({"prompt": "a", "best_of": 2}, "best_of", "unsupported_parameter"),
    ],
)
async def test_bad_completion_values_are_named(
    world: EdgeWorld, fields: dict[str, Any], param: str, code: str | None
) -> None:
    """The same checks apply at the other endpoint."""
    status, body = await world.post("/v1/completions", {"model": "tiny", **fields})
    assert (status, body["error"]["param"], body["error"]["code"]) == (400, param, code)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b'{"model":"\xff"}', "not valid UTF-8"),
        (b'{"model":"\\ud800"}', "one half of a surrogate pair"),
        (b'{"model":"\\ud83d\\ude42 \\uDC00"}', "\\uDC00 is one half of a surrogate pair"),
        (b'\xef\xbb\xbf{"model":"tiny"}', "byte order mark"),
        ('{"model":"tiny"}'.encode("utf-16"), "UTF-16"),
        (b'{"model":"ti\0ny"}', "null byte at position 12"),
        (b'{"model":"tiny","metadata":{"a":' + b"[" * 100_000, "nested too deeply"),
        (b'{"model":"tiny","messages":[],"temperature":NaN}', "not valid JSON"),
    ],
)
async def test_bodies_that_are_no_json(world: EdgeWorld, raw: bytes, message: str) -> None:
    """Malformed bytes are the client's error, never ours."""
    headers = {"Content-Type": "application/json"}
    async with world.http.post(f"{world.url}/v1/chat/completions", data=raw, headers=headers) as response:
        assert response.status == 400
        assert message in (await response.json())["error"]["message"]


async def test_unknown_model(world: EdgeWorld) -> None:
    """The client gets OpenAI's 404 before anything is queued."""
    status, body = await world.chat(model="gpt-9")
    assert (status, body["error"]["code"], body["error"]["param"]) == (404, "model_not_found", "model")


async def test_window(world: EdgeWorld) -> None:
    """The message has the numbers, and the field shows which side to shorten."""
    world.link.fleet = FleetState(models=[ModelInfo(name="tiny", num_ready_shards=1, max_model_len=20)])
    status, body = await world.chat(messages=[{"role": "user", "content": "x" * 50}])
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "context_length_exceeded", "messages")
    assert body["error"]["message"].startswith(
        "This model's maximum context length is 20 tokens. However, you requested"
    )
    assert "prompt is too long" in body["error"]["message"], "LangChain looks for this"
    status, body = await world.post("/v1/completions", {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 18})
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "context_length_exceeded", "max_tokens")


def test_window_boundary() -> None:
    """Prompt plus answer may fill the context window exactly."""
    check_window(10, 10, 20, "messages")
    check_window(19, None, 20, "messages")
    for num_prompt_tokens, max_tokens in ((20, None), (10, 11)):
        with pytest.raises(KvloomError):
            check_window(num_prompt_tokens, max_tokens, 20, "messages")


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "code"),
    [
        ("GET", "/v1/chat/completions", {}, 501, "not_implemented"),
        ("DELETE", "/v1/models", {}, 405, "method_not_allowed"),
        ("OPTIONS", "/v1/chat/completions", {}, 405, "method_not_allowed"),
        ("POST", "/v1/chat/completion", {}, 404, "not_found"),
        ("GET", "/chat.py", {}, 404, "not_found"),
        ("GET", "/page/index.html", {}, 404, "not_found"),
        ("POST", "/v1/chat/completions", {"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
        ("POST", "/v1/chat/completions", {"Content-Type": "application/json; charset=latin-1"}, 415, None),
        (
            "POST",
            "/v1/chat/completions",
            {"Content-Type": "application/json", "Content-Encoding": "gzip"},
            415,
            "unsupported_media_type",
        ),
    ],
)
async def test_wrong_path_method_and_type(
    world: EdgeWorld, method: str, path: str, headers: dict[str, str], status: int, code: str | None
) -> None:
    """Every endpoint answers in JSON."""
    data = b"{}" if method == "POST" else None
    async with world.http.request(method, world.url + path, data=data, headers=headers) as response:
        body = await response.json()
        assert response.status == status
        if code:
            assert body["error"]["code"] == code
        if status == 405:
            assert response.headers["Allow"]


async def raw_exchange(world: EdgeWorld, request: bytes) -> tuple[bytes, Any]:
    reader, writer = await asyncio.open_connection(*world.address)
    writer.write(request)
    async with asyncio.timeout(5):
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.read(100_000)
    writer.close()
    await writer.wait_closed()
    return head.split(b"\r\n")[0], json.loads(body)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"\x16\x03\x01 not http\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nBad Header: x\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", b"413"),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", b"413"),
        (
            b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X%d: %b\r\n" % (i, b"a" * 900) for i in range(30)),
            b"413",
        ),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
            b"400",
        ),
    ],
)
async def test_requests_that_are_no_http(world: EdgeWorld, request_bytes: bytes, status: bytes) -> None:
    """Bytes that are not HTTP get a short JSON error and no stack trace."""
    line, body = await raw_exchange(world, request_bytes + (b"" if request_bytes.endswith(b"\r\n\r\n") else b"\r\n"))
    assert line.split(b" ")[1] == status
    assert body["error"]["type"] == "invalid_request_error"
    assert b"a" * 100 not in json.dumps(body).encode()


@pytest.mark.parametrize("version", ["HTTP/0.9", "HTTP/2.0"])
async def test_versions_of_http_that_are_not_served(world: EdgeWorld, version: str) -> None:
    """They are refused by name, in a version that the client can read."""
    line, body = await raw_exchange(world, f"GET /live {version}\r\nHost: x\r\n\r\n".encode())
    assert line == b"HTTP/1.1 505 HTTP Version Not Supported"
    assert body["error"]["code"] == "unsupported_http_version"


@pytest.mark.parametrize("line", ["gzip, chunked", "chunked, chunked", "identity, chunked", "gzip", "x"])
async def test_transfer_codings_other_than_chunked(world: EdgeWorld, line: str) -> None:
    """A proxy that decodes them would see another body than this server, and so another next request."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    coding = f"Transfer-Encoding: {line}\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n"
    status, body = await raw_exchange(world, (head + coding).encode())
    assert status.split(b" ")[1] == b"501"
    assert (body["error"]["code"], body["error"]["param"]) == ("unsupported_transfer_coding", "Transfer-Encoding")


async def test_two_transfer_encodings(world: EdgeWorld) -> None:
    """They count as one list of two codings."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    twice = b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    status, _ = await raw_exchange(world, head + twice)
    assert status.split(b" ")[1] == b"501"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET /nowhere HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nBad Header: x\r\n\r\n",
        b"\x16\x03\x01 not http\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: 1\r\n\r\n{",
    ],
)
async def test_no_response_names_versions(world: EdgeWorld, request_bytes: bytes) -> None:
    """Versions of Python and aiohttp tell attackers which known faults to try."""
    reader, writer = await asyncio.open_connection(*world.address)
    writer.write(request_bytes)
    async with asyncio.timeout(5):
        head = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    assert b"server:" not in head.lower()
    assert b"python" not in head.lower()


async def test_body_over_the_limit_is_refused_at_once() -> None:
    """An oversize body is not read to its end, whether its size is announced or not."""
    async with edge_world(EdgeConfig(max_body_bytes=1000)) as world:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        for request in (
            head + b"Content-Length: 5000000000\r\n\r\n{",
            head + b"Transfer-Encoding: chunked\r\n\r\n800\r\n" + b" " * 0x800 + b"\r\n",
        ):
            line, body = await raw_exchange(world, request)
            assert b"413" in line
            assert body["error"]["code"] == "request_too_large"


async def test_expect_100_continue(world: EdgeWorld) -> None:
    """curl waits a second for this before it sends a large body."""
    world.link.script = answer("x")
    data = json.dumps(chat_body()).encode()
    reader, writer = await asyncio.open_connection(*world.address)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(data)
    )
    async with asyncio.timeout(5):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(data)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
    writer.close()
    await writer.wait_closed()
