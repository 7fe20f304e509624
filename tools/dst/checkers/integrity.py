"""The core's own books agree with one another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tools.dst.checkers.base import Checker

if TYPE_CHECKING:
    from tools.dst.nodes.router_node import RouterNode
    from tools.dst.world import World


class Integrity(Checker):
    """A reservation is released exactly once, no view goes negative, every slot and every request is where it is said
    to be: the assertions of `RouterCore.check_integrity`.

    They look at everything and cost more than all else, so behind every third message: more seeds find more."""

    invariant = "integrity"

    def __init__(self) -> None:
        self._num_messages = 0

    def integrity(self, node: RouterNode) -> None:
        self._num_messages += 1
        if self._num_messages % 3 == 0:
            self._check(node)

    def at_rest(self, world: World) -> None:
        for node in world.nodes:
            self._check(node)

    def _check(self, node: RouterNode) -> None:
        try:
            node.core.check_integrity()
        except AssertionError as error:
            traceback = error.__traceback__
            while traceback is not None and traceback.tb_next is not None:
                traceback = traceback.tb_next
            place = "" if traceback is None else f" ({traceback.tb_frame.f_code.co_name}:{traceback.tb_lineno})"
            self.fail(f"{error or 'an assertion of check_integrity'}{place}")
