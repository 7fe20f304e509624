"""Says which priority classes (docs/concepts/scheduling.md) an organisation, a project or a key may name, and the
default one."""

from __future__ import annotations

import msgspec


class ClassRights(msgspec.Struct, frozen=True, gc=False):
    allowed: tuple[str, ...] = ()
    """Empty: all."""
    default: str = ""
    """"": none; the tier of a request decides."""

    def allows(self, name: str) -> bool:
        return not self.allowed or name in self.allowed


ANY_CLASS = ClassRights()
"""Those of most: one object for all."""
