"""The fleet reports that clients get."""

from __future__ import annotations

from collections.abc import Sequence

from lab.dst.checker import Checker
from lab.dst.views import SimulatedRouterView
from router.core.actions import Action, FleetChanged
from router.core.events import Event, LoadReported, ShardDown, ShardUp


class FleetReported(Checker):
    """Clients know how many shards of each model are ready: every change is reported, and nothing else."""

    invariant = "fleet_reported"

    def __init__(self) -> None:
        self._reported: dict[SimulatedRouterView, FleetChanged] = {}

    def after_event(self, node: SimulatedRouterView, event: Event, actions: Sequence[Action]) -> None:
        reports = [action for action in actions if isinstance(action, FleetChanged)]
        for report in reports:
            if report == self._reported.get(node):
                self.fail(f"{node.name} reported the same fleet twice")
            self._reported[node] = report
        if not reports and not isinstance(event, ShardUp | ShardDown | LoadReported):
            return
        witness = node.witness
        ready = dict.fromkeys(witness.models, 0)
        for shard in witness.shards.values():
            ready[shard.description.model] += not shard.is_draining
        state = self._reported.get(node)
        known = {} if state is None else {model.name: model.num_ready_shards for model in state.models}
        if known != ready:
            self.fail(f"{node.name} has ready shards {ready}, its clients know of {known}")
