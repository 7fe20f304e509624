"""A chat message. It has a module of its own because the SDK needs it and does not import Jinja."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple


class ToolCall(NamedTuple):
    """A call that the assistant made."""

    id: str
    """Names the call in the message with its result."""
    name: str
    arguments: str
    """A JSON object."""

    @property
    def parsed(self) -> dict[str, Any]:
        """The arguments. Raises ValueError for those of a call that was cut off, or that the model got wrong."""
        value: Any = json.loads(self.arguments or "{}")
        if not isinstance(value, dict):
            raise ValueError("The arguments are not a JSON object.")  # noqa: TRY004  (as for text that is no JSON)
        return value


class ChatMessage(NamedTuple):
    """One message of a conversation."""

    role: str
    """"system", "user", "assistant" or "tool"; "developer" means "system" (kvloom_common/text/roles.py)."""
    content: str
    tool_calls: Sequence[ToolCall] = ()
    """The calls of an assistant's message."""
    tool_call_id: str = ""
    """The call to which a message of role "tool" is the result."""
    name: str = ""
    """The tool whose result it is."""
    reasoning: str = ""
    """The assistant's thoughts before it answered."""
    is_pinned: bool = False
    """Its turn stays when the earliest turns of a conversation are left out."""
