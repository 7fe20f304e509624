"""Bodies of Anthropic's API that no client sends: each is converted, or refused by name."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from edge_http.anthropic.messages import chat_messages, is_continued
from edge_http.anthropic.requests import decode_messages
from edge_http.anthropic.settings import max_tokens_of, output_guide, sampling_of, stop_conditions, template_options
from edge_http.anthropic.tools import tools_of
from kvloom.errors import KvloomError

BLOCKS: list[dict[str, Any]] = [
    {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}},
    {"type": "thinking", "thinking": "hm", "signature": ""},
    {"type": "redacted_thinking", "data": "d"},
    {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
    {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "y"}], "is_error": True},
    {"type": "image", "source": {"type": "url", "url": "x"}},
]
VALUES: dict[str, list[Any]] = {
    "system": ["s", BLOCKS[:1], None],
    "stream": [True, None],
    "temperature": [0.5, 2],
    "top_p": [0.5],
    "top_k": [3, -1],
    "stop_sequences": [["x"], [""], []],
    "tools": [[{"name": "f", "input_schema": {"type": "object"}, "input_examples": [{"a": 1}]}], [{"type": "bash_1"}]],
    "tool_choice": [
        {"type": "any"},
        {"type": "tool", "name": "f"},
        {"type": "auto", "disable_parallel_tool_use": True},
    ],
    "thinking": [{"type": "enabled", "budget_tokens": 2000}, {"type": "adaptive", "display": "omitted"}],
    "output_config": [{"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}}],
    "metadata": [{"user_id": "u"}],
    "context_management": [{"edits": [{"type": "clear_thinking_20251015"}]}, {"edits": [{}]}],
    "mcp_servers": [[], [1]],
}
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
blocks = st.sampled_from(BLOCKS) | st.builds(
    lambda block, key, value: {**block, key: value},
    st.sampled_from(BLOCKS),
    st.sampled_from(["type", "text", "input", "content", "id", "tool_use_id", "other"]),
    anything,
)
messages = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system"]),
            "content": st.text(max_size=5) | st.lists(blocks, max_size=4),
        }
    ),
    max_size=5,
)
bodies = st.fixed_dictionaries(
    {"model": st.just("m"), "max_tokens": st.sampled_from([5, 0, 4000]), "messages": messages},
    optional={name: st.sampled_from(values) | anything for name, values in VALUES.items()},
).map(lambda body: json.dumps(body).encode())


@given(bodies)
@example(b"[]")
@example(b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"\\ud800"}]}')
@example(
    b'{"model":"m","max_tokens":1,"messages":[{"role":"assistant","content":'
    b'[{"type":"tool_use","id":"1","name":"f","input":{"a":"\xff"}}]}]}'
)
@example(
    b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"x"}],"tools":[{"name":"f","input_schema":{},'
    b'"input_examples":[{"a":"\xff"}]}]}'
)
@example(
    b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"x"}],'
    b'"output_config":{"format":{"type":"json_schema","schema":{"a":"\xff"}}}}'
)
@example(
    b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"x"}],"tools":[{"name":"f","input_schema":'
    + b'{"a":' * 5000
    + b"1"
    + b"}" * 5000
    + b"}]}"
)
def test_no_body_breaks_anything(raw: bytes) -> None:
    """Whatever is in a body, its sender gets an answer or an error with a sentence, never a fault of ours."""
    error: KvloomError | None = None
    try:
        body = decode_messages(raw, 100)
        tools_of(body)
        converted = chat_messages(body)
        assert not is_continued(body) or converted[-1].content
        template_options(body)
        guide = output_guide(body)
        sampling_of(body, guide[0] if guide else None)
        stop_conditions(body, max_tokens_of(body))
    except KvloomError as refused:
        error = refused
    assert error is None or (error.kind.http_status == 400 and error.message.endswith("."))
