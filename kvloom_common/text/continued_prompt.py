"""The prompt of a conversation whose last message the model continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvloom.errors import unsupported
from kvloom_common.text.chat_template import ChatTemplate

_END: Final = "\uf8ffend of the last message\uf8ff"
"""Stands behind the last message while it is rendered, so that what the template adds behind it can be cut off."""


def continued_prompt(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    options: Mapping[str, Any] | None = None,
) -> str:
    """The prompt up to the end of the last message's content. Raises KvloomError (INVALID_ARGUMENT,
    UNSUPPORTED_PARAMETER)."""
    *others, last = messages
    content = last["content"]
    marked = [*others, {**last, "content": content + _END}]
    text = template.render_variables(marked, tools, options, add_generation_prompt=False)
    prompt, _, _ = text.partition(_END)
    if text.count(_END) != 1 or not prompt.endswith(content.lstrip()):
        raise unsupported(
            "messages: this model's chat template cannot leave the assistant's last message open to be continued. Let "
            "the last message be the user's.",
            "messages",
        )
    return prompt
