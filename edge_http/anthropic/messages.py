"""System prompt and messages as those of a conversation.

The blocks of a message are joined by a blank line, and so are consecutive messages of one role, which are one turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from edge_http.anthropic.blocks import (
    CompactionBlock,
    ContentBlock,
    DirectiveBlock,
    DocumentBlock,
    MediaBlock,
    ResultBlock,
    SearchResultBlock,
    ServerResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    kind_of,
)
from edge_http.anthropic.requests import MessagesTurn, PromptBody
from edge_http.formatting.decoding import json_text
from kvloom.conversation.earlier import asked_message, omitted
from kvloom.errors import KvloomError, invalid_argument, unsupported
from kvloom.text.chat_message import ChatMessage, ToolCall
from kvloom_common.conversation.history import KnownCalls
from kvloom_common.text.prompt_images import NO_MARKS, ImageMarks

SEPARATOR: Final = "\n\n"
ERROR_PREFIX: Final = "Error: "
"""Precedes the result of a call that failed; chat templates have no other way to say so."""


def chat_messages(body: PromptBody, marks: ImageMarks = NO_MARKS) -> list[ChatMessage]:
    """`marks`: those of images that the model sees. Raises KvloomError (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER) that
    names the field, for what the last message of the user asks for."""
    messages: list[ChatMessage] = []
    system = _system_text(body.system)
    if system:
        messages.append(ChatMessage("system", system))
    calls = KnownCalls()
    given = body.messages[:-1] if _is_empty_end(body) else body.messages
    asked = asked_message([message.role for message in given])
    for role, blocks in _turns(given, asked):
        if role == "assistant":
            messages += _assistant(blocks, calls, marks)
        else:
            messages += _user(role, blocks, calls, marks)
    if is_continued(body):  # models continue text that ends with white space badly
        messages[-1] = messages[-1]._replace(content=messages[-1].content.rstrip())
    return messages


def is_continued(body: PromptBody) -> bool:
    """True when the last message is the beginning of the answer: one of the assistant that has text, and no calls."""
    last = body.messages[-1]
    if last.role != "assistant":
        return False
    if isinstance(last.content, str):
        return bool(last.content.strip())
    if any(isinstance(block, ToolUseBlock | ServerResultBlock) for block in last.content):
        return False
    return any(isinstance(block, TextBlock) and (block.text or "").strip() for block in last.content)


def _is_empty_end(body: PromptBody) -> bool:
    """True when the last message is the assistant's and says nothing, as after an answer that was cut off at once."""
    last = body.messages[-1]
    if last.role != "assistant" or len(body.messages) == 1:
        return False
    if isinstance(last.content, str):
        return not last.content.strip()
    return all(isinstance(block, TextBlock) and not (block.text or "").strip() for block in last.content)


def _system_text(system: str | Sequence[TextBlock] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    return _joined([block.text or "" for block in system])


class _Placed(NamedTuple):
    """A block, and where it stands."""

    block: ContentBlock
    field: str
    is_asked: bool
    """It is of the message by which the new turn asks for something."""


def _turns(messages: Sequence[MessagesTurn], asked: int | None) -> Iterator[tuple[str, list[_Placed]]]:
    """The role of each turn, and its blocks."""
    role, blocks = messages[0].role, list[_Placed]()
    for number, message in enumerate(messages):
        if message.role != role:
            yield role, blocks
            role, blocks = message.role, []
        field = f"messages[{number}].content"
        if isinstance(message.content, str):
            blocks.append(_Placed(TextBlock(text=message.content), field, is_asked=False))
            continue
        # A file that a tool has read comes as a block beside the tool's result.
        is_asked = number == asked and not any(isinstance(block, ToolResultBlock) for block in message.content)
        blocks += [_Placed(block, f"{field}[{i}]", is_asked) for i, block in enumerate(message.content)]
    yield role, blocks


def _assistant(blocks: Sequence[_Placed], calls: KnownCalls, marks: ImageMarks) -> list[ChatMessage]:
    """A turn of the assistant. The results of calls that another server answered within it divide it."""
    messages: list[ChatMessage] = []
    texts: list[str] = []
    thoughts: list[str] = []
    made: list[ToolCall] = []

    def end_message() -> None:
        messages.append(ChatMessage("assistant", _joined(texts), tool_calls=tuple(made), reasoning=_joined(thoughts)))
        for parts in (texts, thoughts, made):
            parts.clear()

    for block, field, _ in blocks:
        match block:
            case TextBlock():
                texts.append(block.text or "")
            case ThinkingBlock():
                thoughts.append(block.thinking or "")
            case ToolUseBlock():
                made.append(calls.add(block.id, block.name, json_text(block.input, f"{field}.input")))
            case ServerResultBlock():
                end_message()
                content = block.content
                text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
                messages.append(calls.result(block.tool_use_id, None, text))
            case _:
                texts.append(_kept_text(block, marks))
    if texts or thoughts or made or not messages:
        end_message()
    return messages


def _user(role: str, blocks: Sequence[_Placed], calls: KnownCalls, marks: ImageMarks) -> list[ChatMessage]:
    """A turn of the user, or of the system. The results of calls are messages of their own."""
    messages: list[ChatMessage] = []
    texts: list[str] = []
    for block, field, is_asked in blocks:
        match block:
            case TextBlock():
                if block.text is None and is_asked:
                    raise invalid_argument(f"{field}.text is missing.", f"{field}.text")
                texts.append(block.text or "")
            case ToolResultBlock():
                if texts:
                    messages.append(ChatMessage(role, _joined(texts)))
                    texts = []
                messages.append(_result(block, calls, marks))
            case _:
                text = _kept_text(block, marks)
                if is_asked and not (isinstance(block, DirectiveBlock) or _is_readable(block) or id(block) in marks):
                    raise _refused(block, field, role)
                texts.append(text)
    if texts or not messages:
        messages.append(ChatMessage(role, _joined(texts)))
    return messages


def _result(block: ToolResultBlock, calls: KnownCalls, marks: ImageMarks) -> ChatMessage:
    parts = block.content if isinstance(block.content, list) else ()
    texts = [block.content] if isinstance(block.content, str) else [_kept_text(part, marks) for part in parts]
    content = (ERROR_PREFIX if block.is_error else "") + _joined(texts)
    return calls.result(block.tool_use_id, None, content)


def _is_readable(block: ContentBlock) -> bool:
    """True when a block that is no text has one."""
    if isinstance(block, DocumentBlock):
        return bool(_document_text(block))
    return isinstance(block, SearchResultBlock | ToolReferenceBlock | CompactionBlock)


def _kept_text(block: ContentBlock | ResultBlock, marks: ImageMarks) -> str:
    """The text that stands for a block; "" for one that says nothing to a model that reads text."""
    match block:
        case TextBlock():
            return block.text or ""
        case DocumentBlock():
            return _document_text(block) or omitted("document")
        case SearchResultBlock():
            return _joined([block.title or "", block.source or "", *_texts_of(block.content)])
        case ToolReferenceBlock():
            return block.tool_name or block.name or ""
        case CompactionBlock():
            return block.content or ""
        case MediaBlock():
            return marks.get(id(block)) or omitted(kind_of(block))
        case _:
            return ""


def _document_text(block: DocumentBlock) -> str:
    source = block.source
    if source is None or source.type not in ("text", "content"):
        return ""
    texts = [source.data or ""] if source.type == "text" else _texts_of(source.content)
    return _joined([block.title or "", block.context or "", *texts])


def _texts_of(content: Any) -> list[str]:
    """The texts among blocks that were not decoded."""
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else ()
    texts = (part.get("text") if isinstance(part, dict) else None for part in parts)
    return [text for text in texts if isinstance(text, str)]


def _joined(texts: Sequence[str]) -> str:
    return SEPARATOR.join(text for text in texts if text)


def _refused(block: ContentBlock, field: str, where: str) -> KvloomError:
    field += ".type"
    kind = kind_of(block)
    if isinstance(block, DocumentBlock):
        why = "are read by an orchestrator, and there is none (kvloom up --orchestrator)."
        return unsupported(f"{field}: documents that are not text {why}", field)
    if isinstance(block, MediaBlock):
        message = f"{field}: blocks of type {kind!r} are not supported: this model has no capability 'vision'."
        return unsupported(message, field)
    return invalid_argument(f"{field}: blocks of type {kind!r} do not go with role {where}.", field)
