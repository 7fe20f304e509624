"""Rollouts is what a world with rollouts has beside the rest: edges, a registry of rollouts, and the supervisor of its
models."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final

from kvloom_common.config import ModelConfig
from lab.dst.environment import Environment
from lab.dst.nodes.registry import SimRegistry
from lab.dst.rollouts.edge import SimEdge
from lab.dst.rollouts.metering import RouterCounters, SimMetering
from lab.dst.rollouts.registry import RolloutStore
from lab.dst.rollouts.sessions import Sessions
from lab.dst.rollouts.supervisor import SimSupervisor
from lab.dst.rollouts.versions import RolloutMachine, SimVersions
from lab.dst.views import RouterProcess
from router.core.actions import FleetChanged, RequestEnded
from tools.supervisor.rollout.plan import RolloutPlan

NUM_EDGES: Final = (1, 2, 3)


class SimulatedRollouts:
    """Its random numbers are its own."""

    def __init__(
        self,
        env: Environment,
        machine: RolloutMachine,
        routers: Callable[[], Sequence[RouterProcess]],
        registry: SimRegistry,
    ) -> None:
        self._env = env
        self.rng = random.Random(f"{env.scenario.seed} rollouts in the world")
        self._counters = RouterCounters()
        self.serving: dict[str, ModelConfig] = {}
        """The model that stands for each name of which there is or was a rollout."""
        self._cards: dict[str, ModelConfig] = {}
        """By model; those that are no version have none."""
        store = RolloutStore(env, registry)
        self.edges = [SimEdge(env, f"edge-{i}", store, self._card) for i in range(self.rng.choice(NUM_EDGES))]
        self.sessions = Sessions(env, self.edges)
        self.supervisor = SimSupervisor(
            env,
            machine,
            self.rng,
            store,
            self.serving,
            lambda old, new: SimVersions(env, machine, self.rng, self.edges[0], old, new),
            lambda: SimMetering(env, self._counters, routers),
        )

    def _card(self, model: str) -> ModelConfig:
        return self._cards.get(model) or ModelConfig(name=model)

    @property
    def standing(self) -> dict[str, str]:
        return {name: model.name for name, model in self.serving.items()}

    # -- what the supervisor is asked for -----------------------------------------------------------------------------

    def begin(self, plan: RolloutPlan) -> None:
        old = self.serving.setdefault(plan.name, self._card(plan.name))
        new = plan.successor_of(old)
        self._cards |= {old.name: old, new.name: new}
        self.supervisor.begin(plan)

    @property
    def is_running(self) -> bool:
        return bool(self.supervisor.running) or self.supervisor.is_starting

    def has(self, model: str) -> bool:
        """True when it is or was a version in a rollout, or the name of one."""
        return model in self.serving or model in self._cards

    # -- what routers report ------------------------------------------------------------------------------------------

    def take_report(self, router: str, report: FleetChanged | RequestEnded) -> None:
        if isinstance(report, RequestEnded):
            self._counters.count(router, report)
            return
        for edge in self.edges:
            self._env.timeline.after(self._env.scenario.latency_seconds, edge.take_fleet, router, report)

    def lose_router(self, router: str) -> None:
        """It was killed."""
        for edge in self.edges:
            self._env.timeline.after(2 * self._env.scenario.latency_seconds, edge.lose_router, router)

    def close(self) -> None:
        self.supervisor.close()
        for edge in self.edges:
            edge.loop.kill()
