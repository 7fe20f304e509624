"""What a checker is."""

from __future__ import annotations

from typing import ClassVar, NoReturn

from tools.dst.violation import Violation


class Checker:
    """Looks at what happens and raises Violation. It has any of the methods of `Checks`, under the same names, and is
    made anew for every world."""

    invariant: ClassVar[str]

    def fail(self, detail: str) -> NoReturn:
        raise Violation(self.invariant, detail)
