"""The supervisor of a machine whose models are rolled out: the product's rollouts, in a process that hangs or dies."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from kvloom_common.config import ModelConfig
from kvloom_common.discovery.records import RolloutRecord
from lab.dst.environment import Environment
from lab.dst.rollouts.metering import SimMetering
from lab.dst.rollouts.registry import RolloutClient, RolloutStore
from lab.dst.rollouts.versions import RolloutMachine, SimVersions
from lab.dst.scenario import ShardShape
from lab.dst.virtual_loop import VirtualLoop
from tools.supervisor.rollout.announcement import RolloutAnnouncement
from tools.supervisor.rollout.plan import RolloutPlan
from tools.supervisor.rollout.rollout import Rollout
from tools.supervisor.rollout.state import RolloutState


@dataclasses.dataclass(slots=True)
class SimulatedRollout:
    """A rollout that has not ended."""

    old: ModelConfig
    new: ModelConfig
    old_shapes: list[ShardShape]
    versions: SimVersions
    rollout: Rollout


class SimSupervisor:
    """`serving` has the model that stands for each name, and changes as rollouts end well."""

    def __init__(
        self,
        env: Environment,
        machine: RolloutMachine,
        rng: random.Random,
        store: RolloutStore,
        serving: dict[str, ModelConfig],
        make_versions: Callable[[str, str], SimVersions],
        make_metering: Callable[[], SimMetering],
    ) -> None:
        self._env = env
        self._machine = machine
        self._rng = rng
        self._store = store
        self._serving = serving
        self._make_versions = make_versions
        self._make_metering = make_metering
        self._num_begun = 0
        self._loop = VirtualLoop(env.timeline)
        self.running: dict[str, SimulatedRollout] = {}
        """By name."""
        self.is_starting = False
        """True when it was killed and its shards have not come back."""

    # -- rollouts -----------------------------------------------------------------------------------------------------

    def begin(self, plan: RolloutPlan) -> None:
        """Begins a rollout as MachineRollouts does."""
        old = self._serving[plan.name]
        new = plan.successor_of(old)
        self._num_begun += 1
        record = RolloutRecord(
            plan.name, tuple(new.aliases), old.name, new.name, 0.0, "supervisor", f"rollout-{self._num_begun}", "owner"
        )
        announcement = RolloutAnnouncement(RolloutClient(self._env, self._store, self._loop), record)
        state = RolloutState(old.name, new.name, num_steps=len(plan.steps))
        versions = self._make_versions(old.name, new.name)
        rollout = Rollout(plan, state, versions, announcement, self._make_metering(), self._note)
        shapes = [shard.shape for shard in versions.shards_of(old.name)]
        running = self.running[plan.name] = SimulatedRollout(old, new, shapes, versions, rollout)
        self._loop.start(rollout.run()).add_done_callback(lambda _task: self._end(plan.name, running))

    def _note(self, text: str) -> None:
        self._env.record_note("supervisor", text)

    def _end(self, name: str, running: SimulatedRollout) -> None:
        if self.running.get(name) is not running:
            return  # killed meanwhile
        del self.running[name]
        state = running.rollout.state
        self._note(f"{state.new}: {state.phase} {state.reason}")
        if state.phase == "done":
            self._serving[name] = running.new
        self._env.count_fault(f"rollout_{state.phase.replace(' ', '_')}")
        self._env.checks.on_rollout_ended(name, self._serving[name].name, self._env.timeline.now)

    def roll_back(self, name: str) -> bool:
        """Rolls back as Rollouts.roll_back does. Returns True when it was possible."""
        if self.running[name].rollout.state.phase == "finishing":
            return False
        self.running[name].rollout.roll_back("it was asked for")
        return True

    # -- the process --------------------------------------------------------------------------------------------------

    @property
    def is_hung(self) -> bool:
        return self._loop.is_paused

    def hang(self, seconds: float) -> None:
        self._note(f"hangs for {seconds:.1f} s")
        self._loop.pause()
        self._env.timeline.after(seconds, self._wake, self._loop)

    def _wake(self, loop: VirtualLoop) -> None:
        if loop.is_alive:
            loop.unpause()

    def kill(self) -> None:
        """Its shards die with it. It starts again with the models of its configuration file: the old ones."""
        self._note("is killed")
        running, self.running = self.running, {}
        self._loop.kill()
        self._loop = VirtualLoop(self._env.timeline)
        self.is_starting = True
        for name, one in running.items():
            for shard in one.versions.shards_of(one.new.name):
                self._machine.remove_shard(shard)
            for shard in one.versions.shards_of(one.old.name):
                if shard.is_ending:
                    self._machine.remove_shard(shard)
                elif shard.is_up:
                    shard.crash(0.0)
            self._env.checks.on_rollout_ended(name, one.old.name, self._env.timeline.now)
        self._env.timeline.after(self._rng.random() * 0.6, self._start_again, list(running.values()))

    def _start_again(self, before: list[SimulatedRollout]) -> None:
        for one in before:
            here = one.versions.shards_of(one.old.name)
            for shard in here:
                shard.bring_up()
            for shape in one.old_shapes[len(here) :]:
                self._machine.add_shard(shape)
        self.is_starting = False

    def close(self) -> None:
        self.running = {}
        self._loop.kill()
