"""All processes of one simulation: routers, shards, the safety service and clients."""

from __future__ import annotations

import functools

from lab.dst.checkers import Checks
from lab.dst.environment import Environment
from lab.dst.nodes.fleet_reader import FleetReader
from lab.dst.nodes.registry import SimRegistry
from lab.dst.nodes.router_node import RouterNode
from lab.dst.nodes.safety import SimSafety
from lab.dst.nodes.shard import SimulatedShard
from lab.dst.rollouts.world import SimulatedRollouts
from lab.dst.scenario import ShardShape
from lab.dst.tenancy.sim_limits import SimLimits
from lab.dst.traffic import Traffic
from lab.dst.views import ShardView


class World:
    def __init__(self, seed: int, checks: Checks, *, with_limits: bool = False) -> None:
        self.env = Environment(seed, checks, with_limits=with_limits)
        scenario = self.env.scenario
        self.safety = SimSafety(self.env)
        self.shards = [SimulatedShard(self.env, f"shard-{i}", shape) for i, shape in enumerate(scenario.shards)]
        self.unloading: dict[str, object] = {}
        """Models that are being unloaded, each with what tells this unload from another one of the same model."""
        self._incarnations: dict[str, int] = {}
        """The last incarnation of each shard id whose process was removed."""
        self.registry = SimRegistry(self.env, self.shards)
        self.rollouts = self._rollouts() if scenario.has_rollouts else None
        self.nodes = [self._router(i, incarnation=1) for i in range(scenario.num_routers)]
        self.traffic = Traffic(self.env, self.nodes, None if self.rollouts is None else self.rollouts.sessions)

    def start(self) -> None:
        for shard in self.shards:
            self._start(shard)
        if self.env.scenario.has_registry:
            self.registry.start()
        for node in self.nodes:
            node.start()
            for _ in range(self.env.scenario.clients_per_router):
                self.traffic.add_stream(node.number)

    def _start(self, shard: SimulatedShard) -> None:
        if self.env.scenario.has_registry:
            shard.on_start = functools.partial(self.registry.announce, shard)
        shard.start()

    def add_shard(self, shape: ShardShape) -> None:
        """Start a further shard. It gets the first name that is free, as those of a supervisor do."""
        taken = {shard.shard_id for shard in self.shards}
        shard_id = next(name for i in range(len(taken) + 1) if (name := f"shard-{i}") not in taken)
        shard = SimulatedShard(self.env, shard_id, shape, self._incarnations.get(shard_id, 0))
        self.shards.append(shard)
        self._start(shard)
        if self.env.scenario.has_registry:
            self.registry.add(shard)
        for node in self.nodes:
            node.connect(shard)

    def remove_shard(self, shard: SimulatedShard) -> None:
        """Its process has ended, for ever. Routers notice at once, as far as they can be reached."""
        if shard.is_up:
            shard.crash(0.0)
        self.shards.remove(shard)
        self._incarnations[shard.shard_id] = shard.incarnation
        if self.env.scenario.has_registry:
            self.registry.withdraw(shard)

    def restart_router(self, number: int) -> None:
        """Kill a router and start a new incarnation at once, with no state. Its clients reconnect."""
        old = self.nodes[number]
        new = self.nodes[number] = self._router(number, old.incarnation + 1)
        old.stop()
        if self.rollouts is not None:
            self.rollouts.lose_router(old.name)
        new.start()
        self.traffic.add_stream(number)

    def replace_drained(self, node: RouterNode) -> None:
        if node.is_alive:
            self.restart_router(node.number)

    def repair(self) -> None:
        """Undo all faults that are still in effect. Bad records stay until they expire."""
        self.repair_registry()
        for node in list(self.nodes):
            if node.is_draining:
                self.replace_drained(node)
        for shard in self.shards:
            shard.restore_speed()
            if shard.is_up and not shard.is_ending:
                shard.set_draining(False)
            for node in self.nodes:
                node.connect(shard)
        self.safety.restore_speed()
        if self.env.limits is not None:
            self.env.limits.repair()

    def repair_registry(self) -> None:
        self.registry.is_reachable = True

    @property
    def limits(self) -> SimLimits | None:
        return self.env.limits

    @property
    def is_harmless(self) -> bool:
        return self.env.scenario.is_harmless

    def is_announced(self, shard: ShardView) -> bool:
        return self.registry.is_announced(shard)

    def named_incarnations(self) -> dict[str, str]:
        """The incarnations that the registry names now, also those that it should not."""
        return {key: record.incarnation_id for key, record in (self.registry.list_shards() or {}).items()}

    def is_quiescent(self) -> bool:
        """True when nothing is in flight and every process is up and connected."""
        return (
            not self.unloading
            and not (self.rollouts is not None and self.rollouts.is_running)
            and all(shard.is_up and not shard.is_stuck and not shard.engine.sequences for shard in self.shards)
            and all(len(node.streams) == len(self.shards) and not node.is_paused for node in self.nodes)
            and all(node.core.is_idle and node.safety is not None for node in self.nodes)
            and all(
                not stream.open for node in self.nodes for stream in node.clients.values() if stream.is_open_at_client
            )
        )

    def describe_activity(self) -> str:
        """Says what keeps the world from being quiescent."""
        running = sum(len(shard.engine.sequences) for shard in self.shards)
        live = [name for node in self.nodes for name in node.witness.live]
        connected = sum(len(node.streams) for node in self.nodes)
        waiting = sum(len(stream.open) for node in self.nodes for stream in node.clients.values())
        return (
            f"{running} sequences are running, requests {live} are live, clients wait for {waiting} answers, "
            f"{connected} streams are up, models {list(self.unloading)} are being unloaded, rollouts run: "
            f"{self.rollouts is not None and self.rollouts.is_running}, idle cores "
            f"{[node.core.is_idle for node in self.nodes]}"
        )

    def _router(self, number: int, incarnation: int) -> RouterNode:
        fleet = FleetReader(self.env, self.registry, self) if self.env.scenario.has_registry else None
        on_report = _ignore if self.rollouts is None else self.rollouts.take_report
        return RouterNode(self.env, number, incarnation, self.shards, self.safety, fleet, on_report)

    def _rollouts(self) -> SimulatedRollouts:
        return SimulatedRollouts(self.env, self, lambda: self.nodes, self.registry)

    def close(self) -> None:
        """Leave no coroutine of the product behind."""
        if self.rollouts is not None:
            self.rollouts.close()


def _ignore(_router: str, _report: object) -> None:
    pass
