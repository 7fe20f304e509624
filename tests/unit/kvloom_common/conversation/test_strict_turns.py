"""Templates that refuse histories of real clients get them told in another way."""

from __future__ import annotations

import functools
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.conversation.tools import Tool
from kvloom.errors import KvloomError
from kvloom.text.chat_message import ChatMessage, ToolCall
from kvloom_common.conversation.history import checked_messages
from kvloom_common.conversation.prompt import conversation_prompt
from kvloom_common.text.chat_template import ChatTemplate
from kvloom_common.text.tokenizer import ModelTokenizer
from tests.fakes.tiny_tokenizer import byte_level_tokenizer

ALTERNATING: Final = """\
{%- if messages[0].role == 'system' %}{% set loop_messages = messages[1:] %}[S]{{ messages[0].content }}
{%- else %}{% set loop_messages = messages %}{% endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.index = ns.index + 1 %}
{%- elif message.role not in ('assistant', 'tool') %}{{ raise_exception('Only user and assistant') }}{% endif %}
{%- for call in message.tool_calls or [] %}
{%- if call.id | length != 9 %}{{ raise_exception('Tool call IDs should have length 9!') }}{% endif %}
{%- endfor %}[{{ message.role }}]{{ message.content }}{% endfor %}{{ tools }}
"""
"""As Mistral's."""
WITHOUT_SYSTEM: Final = """\
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if message.role not in ('user', 'assistant') %}{{ raise_exception('no such role') }}{% endif %}
{{ message.role }}: {{ message.content }}{% endfor %}
"""
"""As Gemma's."""
TOOLS: Final = [Tool("f")]


@functools.cache
def tokenizer(source: str) -> ModelTokenizer:
    return ModelTokenizer(byte_level_tokenizer(), template=ChatTemplate(source, {}))


contents = st.sampled_from(["", "a", "b"])
histories = st.lists(
    st.builds(ChatMessage, st.sampled_from(["system", "user", "assistant", "tool"]), contents)
    | st.builds(
        lambda content, number: ChatMessage("assistant", content, [ToolCall(f"call_{number}", "f", "{}")]),
        contents,
        st.integers(0, 3),
    ),
    max_size=6,
)


@pytest.mark.parametrize("source", [ALTERNATING, WITHOUT_SYSTEM])
@given(history=histories, tools=st.sampled_from([(), TOOLS]))
async def test_any_history_has_a_prompt(source: str, history: list[ChatMessage], tools: list[Tool]) -> None:
    """Agents interleave system messages, send two messages of one role, and begin with the assistant."""
    messages = checked_messages([*history, ChatMessage("user", "the end")])
    _, text = await conversation_prompt(tokenizer(source), messages, tools)
    assert text.rstrip().removesuffix("None").rstrip().rpartition("the end")[1]


async def test_a_conversation_that_the_template_takes_is_not_changed() -> None:
    """The other ways are for what is refused."""
    messages = [
        ChatMessage("system", "s"),
        ChatMessage("user", "a"),
        ChatMessage("assistant", "b"),
        ChatMessage("user", "c"),
    ]
    _, text = await conversation_prompt(tokenizer(ALTERNATING), messages)
    assert text.startswith("[S]s[user]a[assistant]b[user]c")


async def test_nothing_said_is_lost() -> None:
    """What the system says later becomes the user's."""
    messages = [
        ChatMessage("assistant", "a"),
        ChatMessage("system", "b"),
        ChatMessage("user", "c"),
        ChatMessage("user", "d"),
    ]
    _, text = await conversation_prompt(tokenizer(WITHOUT_SYSTEM), messages)
    assert " ".join(text.split()) == "user: assistant: auser: b c d"


@pytest.mark.parametrize("options", [{}, {"is_continued": True}])
async def test_a_template_that_takes_nothing_says_why(options: Any) -> None:
    """Its own words are the error, not those about another way."""
    refusing = tokenizer("{{ raise_exception('never ' ~ messages | length) }}")
    with pytest.raises(KvloomError, match="rejects these messages: never 2"):
        await conversation_prompt(refusing, [ChatMessage("user", "a"), ChatMessage("assistant", "b")], **options)
