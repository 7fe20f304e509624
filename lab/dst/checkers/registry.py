"""Checks that shards are found by their records, as the processes that these name, and the fleet reports of clients."""
# ruff: noqa: ARG002  (a hook has the same arguments for all checkers)

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lab.dst.checker import Checker
from lab.dst.observed import ObservedRequest
from lab.dst.views import SimulatedRouterView, WorldView
from router.core.actions import Action, FleetChanged, SubmitAttempt
from router.core.events import Event, LoadReported, ShardDown, ShardUp

FOUND_SECONDS: Final = 8.0
"""Two polls of the registry, a partition, and the longest pause between two attempts to connect."""


class ShardsFound(Checker):
    """A shard that lives and whose record can be read is connected to every router before long, whatever else the
    registry holds."""

    invariant = "shards_found"

    def __init__(self) -> None:
        self._since: dict[tuple[SimulatedRouterView, str], tuple[int, float]] = {}
        """Since when a router could have connected to an incarnation."""

    def on_registry_read(self, node: SimulatedRouterView, world: WorldView) -> None:
        for shard in world.shards:
            key = (node, shard.shard_id)
            if shard.shard_id in node.streams or shard.is_stuck or not shard.is_up or not world.is_announced(shard):
                self._since.pop(key, None)
                continue
            incarnation, since = self._since.get(key, (0, 0.0))
            if incarnation != shard.incarnation:
                self._since[key] = (shard.incarnation, node.now)
            elif node.now - max(since, node.here_since) > FOUND_SECONDS:
                self.fail(f"{node.name} has not found {shard.shard_id}-{incarnation} for {node.now - since:.1f} s")


class RecordsFollowed(Checker):
    """A request is sent only to the incarnation that the router's latest record of a shard names, or that connected
    while the router could read none, and a connection ends for the registry's sake only if that names another."""

    invariant = "records_followed"

    def __init__(self) -> None:
        self._named: dict[SimulatedRouterView, dict[str, str]] = {}
        """The incarnations that each router has read last. Without an entry, it could not read them."""
        self._connected_blindly: dict[tuple[SimulatedRouterView, str], str] = {}
        """The incarnations that connected while there was no entry."""

    def on_registry_read(self, node: SimulatedRouterView, world: WorldView) -> None:
        self._named[node] = world.named_incarnations()

    def on_registry_lost(self, node: SimulatedRouterView) -> None:
        self._named.pop(node, None)

    def on_link_ended(self, node: SimulatedRouterView, shard_id: str, world: WorldView) -> None:
        named = world.named_incarnations().get(shard_id)
        if shard_id in node.streams and named in (None, node.witness.shards[shard_id].description.incarnation_id):
            self.fail(f"{node.name} gave up {shard_id}, which is connected; its record names {named or 'no other'}")

    def after_event(self, node: SimulatedRouterView, event: Event, actions: Sequence[Action]) -> None:
        if isinstance(event, ShardUp):
            key = (node, event.shard.shard_id)
            self._connected_blindly.pop(key, None)
            if node not in self._named:
                self._connected_blindly[key] = event.shard.incarnation_id

    def on_dispatch(self, node: SimulatedRouterView, observed: ObservedRequest | None, attempt: SubmitAttempt) -> None:
        named = self._named.get(node, {}).get(attempt.shard_id)
        connected = node.witness.shards[attempt.shard_id].description.incarnation_id
        if named not in (None, connected) and self._connected_blindly.get((node, attempt.shard_id)) != connected:
            self.fail(f"{node.name} uses {connected} although the record names {named}")


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
