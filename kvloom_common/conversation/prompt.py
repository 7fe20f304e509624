"""The prompt of a conversation with a model."""

from __future__ import annotations

import contextlib
import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from kvloom.conversation.tools import Tool
from kvloom.text.chat_message import ChatMessage
from kvloom_common.conversation.plain_messages import plain_messages
from kvloom_common.conversation.strict_turns import other_ways
from kvloom_common.text.chat_template import TemplateRejectionError
from kvloom_common.text.tokenizer import ModelTokenizer


async def conversation_prompt(
    tokenizer: ModelTokenizer,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] = (),
    options: Mapping[str, Any] | None = None,
    is_continued: bool = False,
    *,
    scope: str | None = None,
) -> tuple[array[int], str]:
    """The (token ids, rendered text). The text is what the safety service screens: it has every text that the model is
    shown, in whatever field it was written, beside its neighbours. `options`: further variables of the chat template,
    e.g. {"enable_thinking": False}. `is_continued`: the last message is the beginning of the answer. `scope`: as for
    `ModelTokenizer.encode`. Raises KvloomError."""
    template = tokenizer.template
    if template is not None and not template.knows_tools and (tools or _has_calls(messages)):
        messages, tools = plain_messages(messages, tools), ()
    functions = [tool.as_function() for tool in tools]
    try:
        return await tokenizer.encode_chat(messages, functions, options, is_continued, scope=scope)
    except TemplateRejectionError:
        if is_continued:
            raise
        for other, told in other_ways(messages, tools):
            functions = [tool.as_function() for tool in told]
            with contextlib.suppress(TemplateRejectionError):
                return await tokenizer.encode_chat(other, functions, options, scope=scope)
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
