"""What clients are told of the fleet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from router.core.actions import Action, FleetChanged
from router.core.events import Event, LoadReported, ShardDown, ShardUp
from tools.dst.checkers.base import Checker

if TYPE_CHECKING:
    from tools.dst.nodes.router_node import RouterNode


class FleetTold(Checker):
    """Clients know how many shards of each model are ready: every change is told, and nothing else is."""

    invariant = "fleet_told"

    def __init__(self) -> None:
        self._told: dict[RouterNode, FleetChanged] = {}

    def after_event(self, node: RouterNode, event: Event, actions: Sequence[Action]) -> None:
        told = [action for action in actions if isinstance(action, FleetChanged)]
        for news in told:
            if news == self._told.get(node):
                self.fail(f"{node.name} told the same fleet twice")
            self._told[node] = news
        if not told and not isinstance(event, ShardUp | ShardDown | LoadReported):
            return
        witness = node.witness
        ready = dict.fromkeys(witness.models, 0)
        for shard in witness.shards.values():
            ready[shard.description.model] += not shard.is_draining
        state = self._told.get(node)
        known = {} if state is None else {model.name: model.num_ready_shards for model in state.models}
        if known != ready:
            self.fail(f"{node.name} has ready shards {ready}, its clients were told {known}")
