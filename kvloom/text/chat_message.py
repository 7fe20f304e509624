"""A chat message. It has a module of its own because the SDK needs it and does not import Jinja."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation."""

    role: str
    """"system", "user", "assistant", or any other role that the model's template knows."""
    content: str
