"""Conversations with tools for chat templates that know no tools.

The tools are described in the system message, in the form that most open models were trained on (Hermes): a call is
JSON between `<tool_call>` tags, and a result stands between `<tool_response>` tags in the user's turn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from kvloom.conversation.tools import Tool
from kvloom.text.chat_message import ChatMessage, ToolCall


def plain_messages(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[ChatMessage]:
    """The conversation as messages that have nothing but role and content."""
    plain: list[ChatMessage] = []
    is_result = False
    for message in messages:
        was_result, is_result = is_result, message.role == "tool"
        if not is_result:
            plain.append(ChatMessage(message.role, _content(message)))
            continue
        result = f"<tool_response>\n{message.content}\n</tool_response>"
        if was_result:  # results of parallel calls are one turn
            plain[-1] = ChatMessage("user", f"{plain[-1].content}\n{result}")
        else:
            plain.append(ChatMessage("user", result))
    if tools:
        _describe(plain, tools)
    return plain


def _describe(messages: list[ChatMessage], tools: Sequence[Tool]) -> None:
    described = "\n".join(map(_description, tools))
    text = (
        "You can call the following tools. Each line is the JSON description of one tool.\n"
        f"<tools>\n{described}\n</tools>\n"
        "To call a tool, write a JSON object with its name and arguments between <tool_call> tags, like this:\n"
        '<tool_call>\n{"name": "the tool", "arguments": {"an argument": "its value"}}\n</tool_call>'
    )
    if messages and messages[0].role == "system":
        messages[0] = ChatMessage("system", f"{messages[0].content}\n\n{text}")
    else:
        messages.insert(0, ChatMessage("system", text))


def _description(tool: Tool) -> str:
    """Without white space, which is a fifth of the tokens: agents bring hundreds of tools."""
    described = tool.as_function()
    if not tool.description:
        del described["function"]["description"]
    return json.dumps(described, ensure_ascii=False, separators=(",", ":"))


def _content(message: ChatMessage) -> str:
    parts = [message.content] if message.content else []
    return "\n".join(parts + [_call(call) for call in message.tool_calls])


def _call(call: ToolCall) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n</tool_call>'
