"""The messages of a chat request as those of a conversation."""

from __future__ import annotations

import json
from collections.abc import Sequence

from edge_http.openai.requests import (
    CalledFunction,
    ContentPart,
    Message,
    ToolCallBody,
    message_text,
)
from kvloom.conversation.earlier import MEDIA, asked_message, omitted
from kvloom.text.chat_message import ChatMessage, ToolCall
from kvloom_common.conversation.history import KnownCalls
from kvloom_common.text.prompt_images import NO_MARKS, ImageMarks
from kvloom_common.text.roles import template_role


def chat_messages(messages: Sequence[Message], marks: ImageMarks = NO_MARKS) -> list[ChatMessage]:
    """`marks`: those of images that the model sees. Raises KvloomError (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER) that
    names the field: for a role that there is not, and for what the last message of the user asks for."""
    calls = KnownCalls()
    asked = asked_message([message.role for message in messages])
    return [
        _message(message, number, calls, marks, is_asked=number == asked) for number, message in enumerate(messages)
    ]


def _message(message: Message, number: int, calls: KnownCalls, marks: ImageMarks, *, is_asked: bool) -> ChatMessage:
    role = template_role(message.role, f"messages[{number}].role")
    content = message.content
    if not isinstance(content, str):
        content = message_text(message, number, marks) if is_asked else _kept_text(content, marks)
    if role == "assistant":
        return _assistant(message, content, calls)
    if role == "tool":
        call_id = message.name if message.role == "function" else message.tool_call_id
        return calls.result(call_id, message.name, content)
    return ChatMessage(role, content)


def _assistant(message: Message, content: str, calls: KnownCalls) -> ChatMessage:
    made = [_call(call, calls) for call in message.tool_calls or ()]
    if message.function_call is not None:
        name = message.function_call.name
        made.append(calls.add(name, name, _arguments(message.function_call)))
    return ChatMessage(
        "assistant",
        content if message.refusal is None else message.refusal,
        tool_calls=tuple(made),
        reasoning=_reasoning(message),
    )


def _reasoning(message: Message) -> str:
    for given in (message.reasoning_content, message.reasoning):
        if isinstance(given, str) and given:
            return given
    return ""


def _call(call: ToolCallBody, calls: KnownCalls) -> ToolCall:
    if call.custom is not None:  # the input of a tool that takes text
        arguments = json.dumps({"input": call.custom.input or ""}, ensure_ascii=False)
        return calls.add(call.id, call.custom.name, arguments)
    function = call.function or CalledFunction()
    return calls.add(call.id, function.name, _arguments(function))


def _arguments(function: CalledFunction) -> str:
    given = function.arguments
    return given or "" if given is None or isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def _kept_text(content: Sequence[ContentPart] | None, marks: ImageMarks) -> str:
    """The text of a message of the history. Images and the like are noted, and other parts without a text left out."""
    texts: list[str] = []
    for part in content or ():
        if part.type in MEDIA:
            texts.append(marks.get(id(part)) or omitted(MEDIA[part.type]))
        else:
            texts.append(part.text or part.refusal or "")
    return "".join(texts)
