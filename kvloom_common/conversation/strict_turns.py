"""Conversations for chat templates that refuse what does not have the order of their training.

Many templates demand that user and assistant take turns, know a system message at the beginning only or none at all,
or want ids of calls of a certain form. Histories of real clients have none of that, so what such a template refuses is
told in another way, from the one that changes least to the one that every template knows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from kvloom.conversation.tools import Tool
from kvloom.text.chat_message import ChatMessage, ToolCall
from kvloom_common.conversation.plain_messages import plain_messages

_SEPARATOR = "\n\n"
_NUM_ID_CHARS = 9
"""Mistral's templates have ids of this length."""


def other_ways(
    messages: Sequence[ChatMessage], tools: Sequence[Tool]
) -> Iterator[tuple[Sequence[ChatMessage], Sequence[Tool]]]:
    """The conversation as other messages, and the tools that are told beside them."""
    turns = _turns(_with_short_ids(messages))
    yield turns, tools
    yield _without_system(turns), tools
    plain = _turns(plain_messages(messages, tools))
    yield plain, ()
    yield _without_system(plain), ()


def _with_short_ids(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    for message in messages:
        calls = [ToolCall(_short(call.id), call.name, call.arguments) for call in message.tool_calls]
        yield message._replace(tool_calls=calls, tool_call_id=message.tool_call_id and _short(message.tool_call_id))


def _short(call_id: str) -> str:
    return hashlib.blake2b(call_id.encode(), digest_size=8).hexdigest()[:_NUM_ID_CHARS]


def _turns(messages: Iterator[ChatMessage] | Sequence[ChatMessage]) -> list[ChatMessage]:
    """One system message at the beginning, if there is any; then the user's and the assistant's in turn, with the
    results of calls behind them. What the system says later is the user's, and a conversation begins with the user."""
    turns: list[ChatMessage] = []
    for message in messages:
        if message.role == "system" and any(turn.role != "system" for turn in turns):
            message = ChatMessage("user", message.content)
        last = turns[-1] if turns else None
        if last is not None and last.role == message.role and message.role != "tool" and not last.tool_calls:
            turns[-1] = message._replace(
                content=_joined(last.content, message.content), reasoning=_joined(last.reasoning, message.reasoning)
            )
            continue
        if message.role == "assistant" and (last is None or last.role == "system"):
            turns.append(ChatMessage("user", ""))
        elif message.role == "user" and last is not None and last.role == "tool":
            turns.append(ChatMessage("assistant", ""))  # the results of its calls are not followed by the user
        turns.append(message)
    return turns


def _without_system(turns: Sequence[ChatMessage]) -> list[ChatMessage]:
    if not turns or turns[0].role != "system":
        return list(turns)
    first, *others = turns
    if others and others[0].role == "user":
        return [others[0]._replace(content=_joined(first.content, others[0].content)), *others[1:]]
    return [ChatMessage("user", first.content), *others]


def _joined(*texts: str) -> str:
    return _SEPARATOR.join(text for text in texts if text)
