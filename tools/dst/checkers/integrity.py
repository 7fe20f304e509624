"""The core's own books agree with one another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tools.dst.checkers.base import Checker

if TYPE_CHECKING:
    from tools.dst.router_node import RouterNode


class Integrity(Checker):
    """A reservation is released exactly once, no view goes negative, every slot and every request is where it is said
    to be: the assertions of `RouterCore.check_integrity`, behind every message."""

    invariant = "integrity"

    def integrity(self, node: RouterNode) -> None:
        try:
            node.core.check_integrity()
        except AssertionError as error:
            traceback = error.__traceback__
            while traceback is not None and traceback.tb_next is not None:
                traceback = traceback.tb_next
            place = "" if traceback is None else f" ({traceback.tb_frame.f_code.co_name}:{traceback.tb_lineno})"
            self.fail(f"{error or 'an assertion of check_integrity'}{place}")
