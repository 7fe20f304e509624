"""The core's own consistency check."""

from __future__ import annotations

from lab.dst.checker import Checker
from lab.dst.views import SimulatedRouterView, WorldView


class Integrity(Checker):
    """The assertions of `RouterCore.check_integrity` hold: a reservation is released exactly once, no load estimate is
    negative, and every index of slots and requests is consistent.

    They scan the whole state and cost more than all the rest, so they run only after every third message. The time is
    better spent on more seeds."""

    invariant = "integrity"

    def __init__(self) -> None:
        self._num_messages = 0

    def integrity(self, node: SimulatedRouterView) -> None:
        self._num_messages += 1
        if self._num_messages % 3 == 0:
            self._check(node)

    def on_quiescence(self, world: WorldView) -> None:
        for node in world.nodes:
            self._check(node)

    def _check(self, node: SimulatedRouterView) -> None:
        try:
            node.core.check_integrity()
        except AssertionError as error:
            traceback = error.__traceback__
            while traceback is not None and traceback.tb_next is not None:
                traceback = traceback.tb_next
            place = "" if traceback is None else f" ({traceback.tb_frame.f_code.co_name}:{traceback.tb_lineno})"
            self.fail(f"{error or 'an assertion of check_integrity'}{place}")
