"""Every place of an answer in which a model's text stands, found by looking at answers of every API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from kvloom.v1.router_service_pb2 import GenerateRequest
from kvloom_common.parsers.spec import ParserSpec
from tests.answer_positions import ANSWER_POSITIONS, GENERATE
from tests.fakes.screened_world import ScreenedWorld, WritingEngine, screened_world, showing_tokenizer

pytest_plugins = ("tests.fakes.router_fixtures",)

MARKER = "quilt"
CALL = '<tool_call>\n{"name": "%s", "arguments": {"q": "%s"}}\n</tool_call>'
PLAIN = "ok"
"""With it, the marker stands only where an answer repeats its request."""
WRITTEN = (f"a {MARKER} is", f"<think>a {MARKER}</think>ok", CALL % ("f", MARKER), CALL % (MARKER, "x"))
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}
FUNCTIONS = [{"name": name, "parameters": SCHEMA} for name in ("f", MARKER)]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [USER],
        "tools": [{"type": "function", "function": function} for function in FUNCTIONS],
        "logprobs": True,
        "top_logprobs": 1,
    },
    "/v1/completions": {"prompt": "hi", "logprobs": 1, "max_tokens": 200},
    "/v1/responses": {
        "input": "hi",
        "tools": [{"type": "function", **function} for function in FUNCTIONS],
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
    },
    "/v1/messages": {
        "messages": [USER],
        "max_tokens": 200,
        "tools": [{"name": function["name"], "input_schema": SCHEMA} for function in FUNCTIONS],
    },
}


def strings(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """All strings and the names of all fields, with their paths. The bytes of tokens are text, too."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for name, child in value.items():
            yield f"{path}.KEY", name
            yield from strings(child, f"{path}.{'*' if path.endswith('input') else name}".lstrip("."))
    elif isinstance(value, list) and path.endswith("bytes"):
        yield path, bytes(value).decode()
    elif isinstance(value, list):
        for child in value:
            yield from strings(child, f"{path}[]")


def places_of_marker(events: list[Any]) -> set[str]:
    """The paths at which the marker stands, whole or in the parts of a stream."""
    by_path: dict[str, str] = {}
    for path, text in (found for event in events for found in strings(event)):
        by_path[path] = by_path.get(path, "") + text
    return {path for path, text in by_path.items() if MARKER in text}


async def generated(world: ScreenedWorld) -> list[Any]:
    """The events of a `Generate`."""
    wanted = {
        "model": "tiny",
        "conversation": {"messages": [USER]},
        "tools": [{"name": each["name"], "parameters": json.dumps(SCHEMA)} for each in FUNCTIONS],
    }
    call = (await world.router.stub()).Generate(json_format.ParseDict(wanted, GenerateRequest()))
    return [json_format.MessageToDict(each, preserving_proto_field_name=True) async for each in call]


async def posted(world: ScreenedWorld, path: str, *, is_stream: bool) -> list[Any]:
    """The body of an answer, or its events."""
    status, body = await world.post(path, {"model": "tiny", "stream": is_stream, **BODIES[path]})
    assert status == 200, body
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines or [body]]


async def test_the_places_of_a_models_text_are_known(router_redis_url: str, tmp_path: Path) -> None:
    """The table of docs/operate/safety.md has them. That forbidden text is in none is shown in test_withheld_text.py,
    which looks at every string."""
    policy = tmp_path / "policy.toml"
    policy.write_text('[[rules]]\nname = "codes"\nphrases = ["launch code"]\n')
    engine, found = WritingEngine(showing_tokenizer()), dict[tuple[str, str], set[str]]()
    output = ParserSpec("hermes", "qwen3")
    async with screened_world(router_redis_url, policy, engine, output, is_known_to_router=True) as world:
        for written in (PLAIN, *WRITTEN):
            engine.answer = world.tokenizer.encode_now(written)
            found[GENERATE, written] = places_of_marker(await generated(world))
            for path in BODIES:
                both = [await posted(world, path, is_stream=is_stream) for is_stream in (False, True)]
                found[path, written] = set().union(*map(places_of_marker, both))
    for path, known in ANSWER_POSITIONS.items():
        places = set().union(*(found[path, written] for written in WRITTEN)) - found[path, PLAIN]
        assert places == set(known), path
