"""The guide of demanded calls and the parser of what is written under it agree, whatever the tools' schemas."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.conversation.tools import REQUIRED, Tool, check_tools
from kvloom.v1.generation_pb2 import SamplingParams
from kvloom_common.conversation.tool_plan import plan_tools
from kvloom_common.parsers.events import TextDelta, ToolCallArguments, ToolCallStart
from kvloom_common.parsers.output_parser import make_parser
from kvloom_common.parsers.spec import ToolSchema
from shard_server.submits import guide_of
from tests.fakes.tiny_guides import eos_token_id, started
from tests.fakes.tiny_tokenizer import byte_level_tokenizer

MAX_TOKENS = 300
MAX_EXAMPLES = 60
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
NAMES = ["a", "b", "city", "ids", "$id", "type", "é"]
JUNK = [None, 0, -1, "", "x", [], {}, True]
SCALARS = [None, True, False, -5, 0, 3, "x", "", 'q"', 0.5]
PATTERNS = ["^a+$", "b", "(?=a)b", r"^[\w\-]+\/x$", "(", r"\bx", "^(a|b)?$", "a^"]
REFERENCES = ["#", "#/$defs/d", "#/properties/a", "#/nowhere", "https://example.org/x", "t.json#/$defs/d"]
LEAVES: dict[str, Callable[[Random], Any]] = {
    "type": lambda rng: rng.choice([*TYPES, *TYPES, rng.sample(TYPES, 2), rng.choice(JUNK)]),
    "enum": lambda rng: rng.sample(SCALARS, rng.randint(1, 3)),
    "const": lambda rng: rng.choice(SCALARS),
    "pattern": lambda rng: rng.choice(PATTERNS),
    "format": lambda rng: rng.choice(["date-time", "uuid", "password", "duration", "int64", "email"]),
    "minLength": lambda rng: rng.randint(0, 3),
    "maxLength": lambda rng: rng.randint(0, 8),
    "minimum": lambda rng: rng.randint(-9, 9),
    "maximum": lambda rng: rng.randint(-9, 9),
    "exclusiveMinimum": lambda rng: rng.choice([True, False, -3, 3]),
    "multipleOf": lambda rng: rng.choice([1, 2, 0.5, 0.01, 7, 99991, 0]),
    "minItems": lambda rng: rng.randint(0, 2),
    "maxItems": lambda rng: rng.randint(0, 3),
    "uniqueItems": lambda rng: rng.random() < 0.5,
    "minProperties": lambda rng: rng.randint(0, 2),
    "maxProperties": lambda rng: rng.randint(0, 2),
    "required": lambda rng: rng.choice([rng.sample(NAMES, 2), rng.sample(NAMES, 1), rng.choice(JUNK)]),
    "$ref": lambda rng: rng.choice(REFERENCES),
    "$id": lambda rng: rng.choice(["https://example.org/t.json", "urn:x", "#x"]),
    "$schema": lambda _: "http://json-schema.org/draft-07/schema#",
    "default": lambda rng: rng.choice(JUNK),
    "x-vendor": lambda rng: rng.choice(JUNK),
}
"""Keywords, and the values that they get."""
ONE_CHILD = ["additionalProperties", "propertyNames", "items", "contains", "not", "if", "then"]
MANY_CHILDREN = ["anyOf", "oneOf", "allOf", "prefixItems", "items"]
NAMED_CHILDREN = ["properties", "patternProperties", "$defs", "dependentSchemas"]


def random_schema(rng: Random, levels_left: int) -> Any:
    """A schema as servers of tools write them, and as they should not."""
    if rng.random() < 0.05:
        return rng.random() < 0.8
    schema = {name: LEAVES[name](rng) for name in rng.sample(list(LEAVES), rng.choice([0, 1, 1, 2, 3]))}
    if not levels_left:
        return schema
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        match rng.randint(0, 5):
            case 0:
                schema[rng.choice(ONE_CHILD)] = random_schema(rng, levels_left - 1)
            case 1:
                children = [random_schema(rng, levels_left - 1) for _ in range(rng.randint(1, 3))]
                schema[rng.choice(MANY_CHILDREN)] = children
            case 2:
                schema[rng.choice(["properties", *NAMED_CHILDREN])] = rng.choice(JUNK)
            case _:
                names = ["d", "^a", "b$"] if rng.random() < 0.3 else NAMES
                children = {name: random_schema(rng, levels_left - 1) for name in rng.sample(names, rng.randint(0, 3))}
                schema[rng.choice(["properties", *NAMED_CHILDREN])] = children
    return schema


@functools.cache
def token_texts() -> list[str]:
    tokenizer = byte_level_tokenizer()
    return [tokenizer.decode([token_id]) for token_id in range(tokenizer.get_vocab_size())]


def written(state: Any, seed: int) -> tuple[list[int], bool]:
    """The tokens that a model writes which chooses at random, and likes to come to an end; whether it has."""
    rng = Random(seed)
    eos = eos_token_id()
    token_ids: list[int] = []
    for _ in range(MAX_TOKENS):
        bits = np.unpackbits(state.mask(), bitorder="little")
        allowed = [int(token_id) for token_id in np.flatnonzero(bits)]
        if eos in allowed:
            return token_ids, True
        assert allowed, "the guide is a dead end"
        closing = [token_id for token_id in allowed if token_texts()[token_id] in ('"', "}", "]", '"}', "e", "l")]
        token_id = rng.choice(closing if closing and rng.random() < 0.6 else allowed)
        assert state.take([token_id])
        token_ids.append(token_id)
    return token_ids, False


def check(tools: Sequence[Tool], seed: int, *, is_parallel: bool) -> None:
    check_tools(tools)
    plan = plan_tools(tools, REQUIRED, is_parallel=is_parallel)
    assert plan.parser is not None
    guide = guide_of(SamplingParams(guide=plan.guide))
    token_ids, has_ended = written(started(guide), seed)
    schemas = [ToolSchema(tool.name, tool.parameters) for tool in tools]
    decoded = byte_level_tokenizer().decode
    for end in range(len(token_ids) + 1):
        parser = make_parser(plan.parser, schemas)
        events = [*parser.feed(decoded(token_ids[:end])), *parser.finish()]
        assert not any(isinstance(event, TextDelta) for event in events), decoded(token_ids[:end])
    if has_ended:
        assert any(isinstance(event, ToolCallStart) for event in events)
        arguments: dict[int, str] = {}
        for event in events:
            if isinstance(event, ToolCallArguments):
                arguments[event.index] = arguments.get(event.index, "") + event.text
        assert all(isinstance(json.loads(each), dict) for each in arguments.values())


@given(st.integers(0, 2**32))
@settings(max_examples=MAX_EXAMPLES, deadline=None)
def test_a_demanded_call_is_a_call_and_never_text(seed: int) -> None:
    """MCP servers' schemas are not the caller's to change: none of them is refused, what is written under the guide is
    a call with an object, and what is cut off at any token is no answer in text."""
    rng = Random(seed)
    tools = [Tool("get_weather", parameters={"type": "object", "properties": {"city": {"enum": ["Oslo"]}}})]
    for name in rng.sample(["f", "mcp__server.x-y"], rng.randint(1, 2)):
        schema = random_schema(rng, 3)
        tools.append(Tool(name, parameters=schema if isinstance(schema, dict) else {}))
    check(tools[rng.randint(0, 1) :], seed, is_parallel=rng.random() < 0.5)
