"""The JSON bodies of all endpoints, mutated field by field: types swapped, extremes, nesting, duplicate keys.

Every body is accepted or refused with an error that is the client's fault.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import aiohttp
from hypothesis import strategies as st

from edge_http.openai.requests import ChatBody, CompletionBody
from edge_http.openai.unsupported import CHAT, COMPLETION
from tests.fakes.edge_world import edge_world
from tests.fakes.fake_router_link import answer
from tests.fuzz.byte_edits import EDITS, edited
from tests.fuzz.log_watch import LogWatch
from tests.fuzz.target import Check, Target, check_message
from tests.fuzz.targets.http_requests import STATUSES

Draw = Callable[[st.SearchStrategy[Any]], Any]

MESSAGE: Final = {"role": "user", "content": "the fox"}
PARTS: Final = {"role": "user", "content": [{"type": "text", "text": "a"}]}
SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT_BODY: Final = {
    "model": "tiny",
    "messages": [{"role": "system", "content": "s"}, MESSAGE, {"role": "assistant", "content": "x"}, PARTS],
    "max_tokens": 2,
    "n": 2,
    "stop": ["a"],
    "stream": False,
    "stream_options": None,
    "temperature": 0.5,
    "logprobs": True,
    "top_logprobs": 2,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
}
COMPLETION_BODY: Final = {
    "model": "tiny",
    "prompt": ["a", "b"],
    "max_tokens": 2,
    "logprobs": 1,
    "stop_token_ids": [3],
    "structured_outputs": {"choice": ["a", "b"]},
    "user": "u",
    "seed": 1,
}
BODIES: Final = {
    "/v1/chat/completions": (CHAT_BODY, [*ChatBody.__struct_encode_fields__, *CHAT]),
    "/v1/completions": (COMPLETION_BODY, [*CompletionBody.__struct_encode_fields__, *COMPLETION]),
    "/v1/chat/completions/chatcmpl-x/cancel": ({}, ["id"]),
    "/v1/completions/cmpl-x/cancel": ({}, ["id"]),
}

NUMBERS = st.integers(-2, 20) | st.sampled_from(
    [2**31, 2**32, 2**53 + 1, 2**63, 2**64, -(2**63), 10**40, 10**400, 0.5, -0.0, 1e308, 1e-320, 5.0]
)
TEXTS = st.text(max_size=5) | st.sampled_from(["", "tiny", "text", "user", "\x00", "x" * 5000, "\ue000", "<|im_end|>"])
LEAVES = st.none() | st.booleans() | NUMBERS | TEXTS
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "a", "$ref"]), inner),
    max_leaves=5,
)


@st.composite
def inputs(draw: Draw) -> Any:
    """{"path", "body": JSON text}"""
    path = draw(st.sampled_from(list(BODIES)))
    valid, names = BODIES[path]
    body: Any = copy.deepcopy(valid)
    for name in draw(st.lists(st.sampled_from(list(body)), max_size=6, unique=True)) if body else ():
        del body[name]  # so that the checks behind the first refusal are reached
    for _ in range(draw(st.integers(0, 4))):
        node = draw(st.sampled_from(_nodes(body)))
        match draw(st.sampled_from(["replace", "replace", "drop", "nest", "add"])):
            case "add":
                _set(node, draw(st.sampled_from(names)), draw(VALUES))
            case "drop" if node:
                node.pop(draw(_keys(node)))
            case "nest" if node:
                key = draw(_keys(node))
                node[key] = _nested(node[key], draw(st.sampled_from([1, 2, 70])))
            case _ if node:
                node[draw(_keys(node))] = draw(VALUES)
            case _:
                pass
    text = json.dumps(body)
    if body and not draw(st.integers(0, 7)):  # a key twice, with two values
        text = text[:-1] + f", {json.dumps(draw(st.sampled_from(names)))}: {json.dumps(draw(VALUES))}}}"
    raw = edited(text.encode(), draw(EDITS) if not draw(st.integers(0, 7)) else [])
    return {"path": path, "body": raw.decode("latin-1")}


def _nodes(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    own = [value] if isinstance(value, dict | list) else []
    return own + [node for part in inner for node in _nodes(part)]


def _keys(node: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(list(node)) if isinstance(node, dict) else st.integers(0, len(node) - 1)


def _set(node: Any, name: str, value: Any) -> None:
    if isinstance(node, dict):
        node[name] = value
    else:
        node.append(value)


def _nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


@contextlib.asynccontextmanager
async def open_edge(_watch: LogWatch) -> AsyncIterator[Check]:
    async with edge_world() as world:
        world.link.script = answer("hi")

        async def check(value: Any) -> None:
            raw = value["body"].encode("latin-1")
            headers = {"Content-Type": "application/json"}
            async with world.http.post(world.url + value["path"], data=raw, headers=headers) as response:
                content = await response.read()
                assert response.status in STATUSES, (response.status, content)
                if response.status != 200:
                    error = json.loads(content)["error"]
                    check_message(error["message"])
                    assert error["param"] is None or isinstance(error["param"], str)
            async with world.http.get(world.url + "/ready") as response:
                assert response.status == 200

        try:
            yield check
        except aiohttp.ClientError as error:
            raise AssertionError("the edge closed the connection without an answer") from error


TARGET = Target("http_bodies", inputs(), open_edge, suite_examples=80)
