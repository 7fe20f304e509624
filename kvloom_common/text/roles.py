"""The roles of chat messages, checked in the same way for every entry point."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvloom.errors import invalid_argument

ROLES: Final[Mapping[str, str]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
"""Maps the roles that requests may have to those of chat templates."""


def template_role(role: str, field: str) -> str:
    """Return the role as chat templates know it. `field` names the role in the request. Raises KvloomError
    (INVALID_ARGUMENT)."""
    known = ROLES.get(role)
    if known is not None:
        return known
    raise invalid_argument(f"{field} must be one of {', '.join(ROLES)}.", field)
