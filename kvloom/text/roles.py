"""The roles of chat messages, checked in the same way for every entry point."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvloom.errors import invalid_argument, unsupported

ROLES: Final[Mapping[str, str]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
"""Maps the roles that requests may have to those of chat templates."""
_UNSUPPORTED: Final = frozenset(("tool", "function"))


def template_role(role: str, field: str) -> str:
    """Return the role as chat templates know it. `field` names the role in the request. Raises KvloomError
    (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER)."""
    known = ROLES.get(role)
    if known is not None:
        return known
    if role in _UNSUPPORTED:
        raise unsupported(f"{field}: messages of role '{role}' are not supported.", field)
    raise invalid_argument(f"{field} must be one of {', '.join(ROLES)}.", field)
