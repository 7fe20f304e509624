"""Says what a key may be used for, which roles may do what, and which priority classes an account may name."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

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


class ClassRights(msgspec.Struct, frozen=True, gc=False):
    allowed: tuple[str, ...] = ()
    """Empty: all."""
    default: str = ""
    """"": none; the tier of a request decides."""

    def allows(self, name: str) -> bool:
        return not self.allowed or name in self.allowed


ANY_CLASS = ClassRights()
"""Those of most: one object for all."""
