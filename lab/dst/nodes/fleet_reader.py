"""A router's end of the registry: the real decisions about its links, in a simulated shell."""

from __future__ import annotations

from typing import Final, Protocol

from lab.dst.environment import Environment
from lab.dst.nodes.registry import SimRegistry
from lab.dst.nodes.shard import SimulatedShard
from lab.dst.views import RegistryReader, SimulatedRouterView, WorldView
from router.links.fleet_links import LinkTarget, follow_registry, lose_registry

_RETRY_SECONDS: Final = 0.2


class _Router(SimulatedRouterView, RegistryReader, Protocol):
    def connect(self, shard: SimulatedShard, *, replace: bool = False) -> None: ...

    def give_up(self, shard_id: str) -> None: ...


class _Link:
    """The part of a link that follow_registry needs to know."""

    def __init__(self, target: LinkTarget, node: _Router) -> None:
        self.target = target
        self.is_over = False
        self._node = node

    @property
    def connected(self) -> bool:
        return self.target.record.shard_id in self._node.streams


class FleetReader:
    """One router's. A restarted router has another."""

    def __init__(self, env: Environment, registry: SimRegistry, world: WorldView) -> None:
        self._env = env
        self._registry = registry
        self._world = world
        self._links: dict[str, _Link] = {}

    def start(self, node: _Router) -> None:
        self._registry.watch(node)

    def read(self, node: _Router) -> None:
        records = self._registry.list_shards()
        if records is None:
            lose_registry(link.target for link in self._links.values())
            self._env.checks.on_registry_lost(node)
            return
        changes = follow_registry(records, self._links)
        for shard_id in changes.ended:
            self._env.checks.on_link_ended(node, shard_id, self._world)
            del self._links[shard_id]
            node.give_up(shard_id)
        # Only now: work of the first of several links that end may be sent to the next one.
        self._env.checks.on_registry_read(node, self._world)
        for record in changes.started:
            link = self._links[record.shard_id] = _Link(LinkTarget(record), node)
            self._env.timeline.after(0.0, self._try, node, link)

    def may_connect(self, node: _Router, shard: SimulatedShard) -> bool:
        """True when a link reaches this shard now. One that reaches another process, or none, tries again later."""
        link = self._links.get(shard.shard_id)
        if link is None:
            return False
        if not link.target.registered:
            link.is_over = not link.connected  # the present connection stays until it breaks
            return False
        if self._registry.process_at(link.target.record.address) is shard:
            return True
        self._env.timeline.after(_RETRY_SECONDS, self._try, node, link)
        return False

    def accepts(self, shard_id: str, incarnation_id: str) -> bool:
        link = self._links.get(shard_id)
        if link is None or link.target.refusal(shard_id, incarnation_id):
            return False
        link.target.accept(incarnation_id)
        return True

    def _try(self, node: _Router, link: _Link) -> None:
        shard_id = link.target.record.shard_id
        shard = self._registry.process_at(shard_id)
        if self._links.get(shard_id) is link and shard is not None:
            node.post(node.connect, shard)
