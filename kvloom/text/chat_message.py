"""A chat message. It has a module of its own because the SDK needs it and does not import Jinja."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation."""

    role: str
    """"system", "user" or "assistant"; "developer" means "system" (kvloom/text/roles.py)."""
    content: str
