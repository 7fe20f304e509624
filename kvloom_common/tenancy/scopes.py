"""Says what a key may be used for, and which roles may do what.

A key has scopes; a user has a role in an organisation. Roles are ordered: each may do all that the one before it may.
"""

from __future__ import annotations

from typing import Final, Literal

Scope = Literal["inference", "usage", "guardrails", "admin"]
Role = Literal["reader", "member", "operator", "admin"]

SCOPES: Final[tuple[Scope, ...]] = ("inference", "usage", "guardrails", "admin")
"""`inference`: requests to models. `usage`: the usage and the budget of the own tenant.
`guardrails`: judgements of the safety policy on texts that are served elsewhere. `admin`: changes of the own
organisation, and the fabric's own calls (adapters)."""
DEFAULT_SCOPES: Final[tuple[Scope, ...]] = ("inference", "usage")
ROLES: Final[tuple[Role, ...]] = ("reader", "member", "operator", "admin")
SCOPES_OF_ROLE: Final[dict[Role, frozenset[Scope]]] = {
    "reader": frozenset({"usage"}),
    "member": frozenset({"inference", "usage"}),
    "operator": frozenset({"inference", "usage", "guardrails"}),
    "admin": frozenset({"inference", "usage", "guardrails", "admin"}),
}


def includes(role: Role, needed: Role) -> bool:
    """True when someone with this role may do what needs the other one."""
    return ROLES.index(role) >= ROLES.index(needed)
