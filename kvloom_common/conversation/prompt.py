"""The prompt of a conversation with a model."""

from __future__ import annotations

import contextlib
import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvloom.conversation.tools import Tool
from kvloom.text.chat_message import ChatMessage, ToolCall
from kvloom_common.conversation.plain_messages import plain_messages
from kvloom_common.text.chat_template import TemplateRejectionError
from kvloom_common.text.prompt_images import PromptImages
from kvloom_common.text.tokenizer import ModelTokenizer


async def conversation_prompt(
    tokenizer: ModelTokenizer,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] = (),
    options: Mapping[str, Any] | None = None,
    is_continued: bool = False,
    *,
    scope: str | None = None,
    images: PromptImages | None = None,
) -> tuple[array[int], str]:
    """The (token ids, rendered text). The text is what the safety service screens: it has every text that the model is
    shown, in whatever field it was written, beside its neighbours. `options`: further variables of the chat template,
    e.g. {"enable_thinking": False}. `is_continued`: the last message is the beginning of the answer. `scope`: as for
    `ModelTokenizer.encode`. `images`: those of which the messages have marks. Raises KvloomError."""
    template = tokenizer.template
    if template is not None and not template.knows_tools and (tools or _has_calls(messages)):
        messages, tools = plain_messages(messages, tools), ()
    functions = [tool.as_function() for tool in tools]
    try:
        return await tokenizer.encode_chat(messages, functions, options, is_continued, scope=scope, images=images)
    except TemplateRejectionError:
        if is_continued:
            raise
        for other, told in other_ways(messages, tools):
            functions = [tool.as_function() for tool in told]
            with contextlib.suppress(TemplateRejectionError):
                return await tokenizer.encode_chat(other, functions, options, scope=scope, images=images)
        raise


def num_written_chars(messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> int:
    """Returns how many characters of a conversation its caller has written."""
    num_chars = 0
    for tool in tools:
        num_chars += len(json.dumps(tool.as_function(), ensure_ascii=False))
    for message in messages:
        num_chars += len(message.content)
        if message.reasoning:
            num_chars += len(message.reasoning)
        for call in message.tool_calls:
            num_chars += len(call.arguments)
    return num_chars


def _has_calls(messages: Sequence[ChatMessage]) -> bool:
    for message in messages:  # noqa: SIM110  (a generator would cost a call for each message)
        if message.tool_calls or message.tool_call_id:
            return True
    return False


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
