"""System prompt and messages as those of a conversation.

The blocks of a message are joined by a blank line, and so are consecutive messages of one role, which are one turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from edge_http.anthropic.blocks import (
    ContentBlock,
    RedactedThinkingBlock,
    RefusedBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from edge_http.anthropic.requests import Message, PromptBody
from edge_http.formatting.decoding import json_text
from kvloom.errors import KvloomError, invalid_argument, unsupported
from kvloom.text.chat_message import ChatMessage, ToolCall
from kvloom_common.conversation.history import checked_arguments

SEPARATOR: Final = "\n\n"
ERROR_PREFIX: Final = "Error: "
"""Precedes the result of a call that failed; chat templates have no other way to say so."""


def chat_messages(body: PromptBody) -> list[ChatMessage]:
    """Raises KvloomError (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER) that names the field."""
    messages: list[ChatMessage] = []
    system = _system_text(body.system)
    if system:
        messages.append(ChatMessage("system", system))
    names: dict[str, str] = {}
    """The tool of each call so far, by the call's id."""
    for role, blocks in _turns(body.messages):
        if role == "assistant":
            messages.append(_assistant(blocks, names))
        else:
            messages += _user(role, blocks, names)
    return messages


def is_continued(body: PromptBody) -> bool:
    """Whether the last message is the beginning of the answer."""
    return body.messages[-1].role == "assistant"


def check_continued(messages: Sequence[ChatMessage]) -> None:
    """Raise KvloomError (INVALID_ARGUMENT) if the last message cannot be the beginning of an answer."""
    last = messages[-1]
    if last.tool_calls or last.reasoning:
        raise invalid_argument("messages: the last message is the assistant's, so it may only have text.", "messages")
    if not last.content:
        raise invalid_argument("messages: the last message is the assistant's, and it is empty.", "messages")
    if last.content != last.content.rstrip():
        raise invalid_argument("messages: the assistant's last message must not end with whitespace.", "messages")


def _system_text(system: str | Sequence[TextBlock] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    return SEPARATOR.join(block.text for block in system if block.text)


def _turns(messages: Sequence[Message]) -> Iterator[tuple[str, list[tuple[str, ContentBlock]]]]:
    """The role of each turn, and its blocks with the fields that they are."""
    role, blocks = messages[0].role, list[tuple[str, ContentBlock]]()
    for number, message in enumerate(messages):
        if message.role != role:
            yield role, blocks
            role, blocks = message.role, []
        field = f"messages[{number}].content"
        if isinstance(message.content, str):
            blocks.append((field, TextBlock(text=message.content)))
        else:
            blocks += [(f"{field}[{i}]", block) for i, block in enumerate(message.content)]
    yield role, blocks


def _assistant(blocks: Sequence[tuple[str, ContentBlock]], names: dict[str, str]) -> ChatMessage:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for field, block in blocks:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case RedactedThinkingBlock():
                pass
            case ToolUseBlock():
                calls.append(
                    ToolCall(
                        block.id,
                        block.name,
                        checked_arguments(json_text(block.input, f"{field}.input"), f"{field}.input"),
                    )
                )
                names[block.id] = block.name
            case _:
                raise _refused(block, field, "assistant")
    return ChatMessage("assistant", _joined(texts), tool_calls=tuple(calls), reasoning=_joined(thoughts))


def _user(role: str, blocks: Sequence[tuple[str, ContentBlock]], names: dict[str, str]) -> list[ChatMessage]:
    """A turn of the user, or of the system. The results of calls are messages of their own."""
    messages: list[ChatMessage] = []
    texts: list[str] = []
    for field, block in blocks:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ToolResultBlock() if role == "user":
                if texts:
                    messages.append(ChatMessage(role, _joined(texts)))
                    texts = []
                messages.append(_result(block, field, names))
            case _:
                raise _refused(block, field, role)
    if texts or not messages:
        messages.append(ChatMessage(role, _joined(texts)))
    return messages


def _result(block: ToolResultBlock, field: str, names: dict[str, str]) -> ChatMessage:
    if block.tool_use_id not in names:
        field = f"{field}.tool_use_id"
        raise invalid_argument(f"{field}: no earlier message has a tool_use {block.tool_use_id[:64]!r}.", field)
    texts: list[str] = []
    if isinstance(block.content, str):
        texts.append(block.content)
    for number, part in enumerate(block.content if isinstance(block.content, list) else ()):
        if not isinstance(part, TextBlock):
            raise _refused(part, f"{field}.content[{number}]", "tool_result")
        texts.append(part.text)
    content = (ERROR_PREFIX if block.is_error else "") + _joined(texts)
    return ChatMessage("tool", content, tool_call_id=block.tool_use_id, name=names[block.tool_use_id])


def _joined(texts: Sequence[str]) -> str:
    return SEPARATOR.join(text for text in texts if text)


def _refused(block: ContentBlock, field: str, where: str) -> KvloomError:
    field += ".type"
    if isinstance(block, RefusedBlock):
        return unsupported(f"{field}: blocks of type {block.kind()!r} are not supported.", field)
    kind = type(block).__struct_config__.tag
    return invalid_argument(f"{field}: blocks of type {kind!r} do not go with role {where}.", field)
