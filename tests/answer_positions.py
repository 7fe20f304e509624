"""Every place of an answer in which a model's text stands, for the table of docs/operate/safety.md
(`python -m tests.text_positions`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

GENERATE: Final = "gRPC `Generate`"
ANSWER_POSITIONS: Final[Mapping[str, Sequence[str]]] = {
    "/v1/chat/completions": (
        "choices[].delta.content",
        "choices[].delta.reasoning_content",
        "choices[].delta.tool_calls[].function.arguments",
        "choices[].delta.tool_calls[].function.name",
        "choices[].logprobs.content[].bytes",
        "choices[].logprobs.content[].token",
        "choices[].logprobs.content[].top_logprobs[].bytes",
        "choices[].logprobs.content[].top_logprobs[].token",
        "choices[].message.content",
        "choices[].message.reasoning_content",
        "choices[].message.tool_calls[].function.arguments",
        "choices[].message.tool_calls[].function.name",
    ),
    "/v1/completions": (
        "choices[].logprobs.tokens[]",
        "choices[].logprobs.top_logprobs[].KEY",
        "choices[].text",
    ),
    "/v1/responses": (
        "arguments",
        "delta",
        "item.arguments",
        "item.content[].logprobs[].bytes",
        "item.content[].logprobs[].token",
        "item.content[].logprobs[].top_logprobs[].bytes",
        "item.content[].logprobs[].top_logprobs[].token",
        "item.content[].text",
        "item.name",
        "logprobs[].bytes",
        "logprobs[].token",
        "logprobs[].top_logprobs[].bytes",
        "logprobs[].top_logprobs[].token",
        "output[].arguments",
        "output[].content[].logprobs[].bytes",
        "output[].content[].logprobs[].token",
        "output[].content[].logprobs[].top_logprobs[].bytes",
        "output[].content[].logprobs[].top_logprobs[].token",
        "output[].content[].text",
        "output[].name",
        "part.logprobs[].bytes",
        "part.logprobs[].token",
        "part.logprobs[].top_logprobs[].bytes",
        "part.logprobs[].top_logprobs[].token",
        "part.text",
        "response.output[].arguments",
        "response.output[].content[].logprobs[].bytes",
        "response.output[].content[].logprobs[].token",
        "response.output[].content[].logprobs[].top_logprobs[].bytes",
        "response.output[].content[].logprobs[].top_logprobs[].token",
        "response.output[].content[].text",
        "response.output[].name",
        "text",
    ),
    "/v1/messages": (
        "content[].input.*",
        "content[].name",
        "content[].text",
        "content[].thinking",
        "content_block.name",
        "delta.partial_json",
        "delta.text",
        "delta.thinking",
    ),
    GENERATE: (
        "deltas[].output[].reasoning",
        "deltas[].output[].tool_call_arguments.text",
        "deltas[].output[].tool_call_start.name",
        "deltas[].text",
    ),
}
"""Where a model's text stands in answers and in the events of streams. A test looks at answers of every API
(tests/integration/test_answer_positions.py)."""


def answer_table() -> str:
    """The table, as Markdown."""
    rows = ["| answer | where the model's text stands |", "|---|---|"]
    for route, paths in ANSWER_POSITIONS.items():
        shown = route if route == GENERATE else f"`POST {route}`"
        shown_paths = ", ".join(f"`{path}`" for path in paths)
        rows.append(f"| {shown} | {shown_paths} |")
    return "\n".join(rows)
