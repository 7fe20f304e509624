"""The part of a long conversation that a model gets with `truncation: "auto"`.

Instructions of the system stay, and so do pinned turns, and the last ones. When a conversation no longer fits, so many
of its earliest turns are left out that only half of the room is used: until that has filled up again, each prompt
begins with the prompt before it, so that the prefix cache has it. (With as few turns left out as possible, each prompt
would have another beginning.) The turns that are left out follow from the conversation alone, and so nothing needs to
be remembered between requests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from edge_http.openai.sampling import MAX_CHARS_PER_TOKEN
from kvloom.conversation.tools import Tool
from kvloom.text.chat_message import ChatMessage
from kvloom_common.text.tokenizer import ModelTokenizer

KEPT_SHARE: Final = 0.5
"""The part of the room that is used after turns were left out."""
ANSWER_SHARE: Final = 0.25
"""The part of the window that is left for the answer, if its request does not say how long that may be."""
MESSAGE_TOKENS: Final = 12
"""The tokens that a chat template adds to a message, at most."""


def first_kept(turns: Sequence[int], room: int) -> int:
    """The number of the first turn that is kept, of turns that have so many tokens. The last one always is."""
    first, total = 0, 0
    for number, size in enumerate(turns):
        total += size
        if total > room:
            while first < number and total > room * KEPT_SHARE:
                total -= turns[first]
                first += 1
    return first


def within(messages: Sequence[ChatMessage], sizes: Sequence[int], room: int) -> list[ChatMessage]:
    """The messages that fit the room. `sizes`: the tokens of each. A turn begins with a message of the user."""
    numbers: list[int] = []  # the turn of each message
    turns: list[int] = []
    pinned: set[int] = set()
    for message, size in zip(messages, sizes, strict=True):
        if message.role == "system":
            room -= size
        elif message.role == "user" or not turns:
            turns.append(size)
        else:
            turns[-1] += size
        numbers.append(len(turns) - 1)
        if message.is_pinned:
            pinned.add(len(turns) - 1)
    free = [number for number in range(len(turns)) if number not in pinned]
    room -= sum(turns[number] for number in pinned if number >= 0)
    kept = {*pinned, *free[first_kept([turns[number] for number in free], room) :]}
    both = zip(messages, numbers, strict=True)
    return [message for message, number in both if message.role == "system" or number in kept]


def left_out(messages: Sequence[ChatMessage], kept: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages that `within` has not kept."""
    names = set(map(id, kept))
    return [message for message in messages if id(message) not in names]


async def fitting(
    messages: Sequence[ChatMessage], tools: Sequence[Tool], tokenizer: ModelTokenizer, room: int, scope: str
) -> Sequence[ChatMessage]:
    """The messages that fit the room together with the tools. `scope`: see ModelTokenizer.encode. Raises
    KvloomError."""
    texts = [_written(message) for message in messages]
    tools_text = "".join(f"{tool.name}{tool.description}{json.dumps(dict(tool.parameters))}" for tool in tools)
    if sum(len(text.encode()) + MESSAGE_TOKENS for text in (*texts, tools_text)) <= room:  # a token has a byte
        return messages
    too_long = room * MAX_CHARS_PER_TOKEN
    sizes = [
        MESSAGE_TOKENS + (room + 1 if len(text) > too_long else len(await tokenizer.encode(text, scope=scope)))
        for text in (*texts, tools_text)
    ]
    return within(messages, sizes[:-1], room - sizes[-1])


def _written(message: ChatMessage) -> str:
    return "\n".join((message.content, message.reasoning, *(call.name + call.arguments for call in message.tool_calls)))
