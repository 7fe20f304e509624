"""Everything that one seed brings about."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence

import xxhash

from kvloom.v1.error_reason_pb2 import ErrorReason
from router.core.actions import Action
from router.core.events import Event, StepArrived
from router.core.frames import Finish
from tools.dst.checkers import Checks
from tools.dst.faults import Faults
from tools.dst.nodes.router_node import RouterNode
from tools.dst.nodes.safety import SimSafety
from tools.dst.nodes.shard import SimShard
from tools.dst.scenario import draw_scenario
from tools.dst.timeline import Timeline
from tools.dst.traffic import Traffic
from tools.dst.violation import Violation

MAX_REST_SECONDS = 60.0
SETTLE_SECONDS = 1.0
FORGET_SECONDS = 120.0
"""Longer than any router believes in blocks that it only expects."""
MAX_TRACE = 4000

TraceEntry = tuple[float, str, Event, Sequence[Action]]


class World:
    """`run` lives through chaos and then rest, as often as the scenario says. Raises Violation."""

    def __init__(self, seed: int, checks: Checks | None = None) -> None:
        self.rng = random.Random(seed)
        self.scenario = draw_scenario(seed, self.rng)
        self.checks = checks or Checks()
        self.timeline = Timeline(start=100.0)
        self.is_calm = False
        self.num_events = 0
        self.num_engine_tokens = 0
        self.num_delivered_tokens = 0
        self.faults: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.trace: deque[TraceEntry] = deque(maxlen=MAX_TRACE)
        self._num_touches = 0
        self._digest = xxhash.xxh3_64()
        self.safety = SimSafety(self)
        self.shards = [SimShard(self, f"shard-{i}", shape) for i, shape in enumerate(self.scenario.shards)]
        self.nodes = [RouterNode(self, i, life=1) for i in range(self.scenario.num_routers)]
        self.traffic = Traffic(self)

    @property
    def digest(self) -> str:
        """Names the history: two runs of one seed must agree."""
        return self._digest.hexdigest()

    def run(self) -> None:
        for shard in self.shards:
            shard.start()
        for node in self.nodes:
            node.start()
            for _ in range(self.scenario.clients_per_router):
                self.traffic.add_stream(node.number)
        for _ in range(self.scenario.num_epochs):
            self.is_calm = False
            self.traffic.start()
            Faults(self).start()
            self.timeline.run_until(self.timeline.now + self.scenario.chaos_seconds)
            self._come_to_rest()

    # -- rest ---------------------------------------------------------------------------------------------------------

    def _come_to_rest(self) -> None:
        """No more faults: what is open must end, and nothing may be left behind."""
        self.is_calm = True
        self._repair()
        end = self.timeline.now + MAX_REST_SECONDS
        while not self._is_at_rest():
            if self.timeline.now > end:
                raise Violation("comes_to_rest", self._what_goes_on())
            self.timeline.run_until(self.timeline.now + SETTLE_SECONDS)
        for shard in self.shards:
            self._num_touches += 1
            shard.touch_cache(self._num_touches)
        self.timeline.run_until(self.timeline.now + SETTLE_SECONDS)
        self.timeline.run_until(self.timeline.now + FORGET_SECONDS)
        self.checks.at_rest(self)

    def _repair(self) -> None:
        for node in list(self.nodes):
            if node.is_draining:
                self.replace_drained(node)
        for shard in self.shards:
            self.restore_speed(shard)
            if shard.is_up:
                shard.set_draining(False)
            for node in self.nodes:
                node.connect(shard)
        self.restore_safety_speed()

    def _is_at_rest(self) -> bool:
        return (
            all(shard.is_up and not shard.is_stuck and not shard.engine.sequences for shard in self.shards)
            and all(len(node.streams) == len(self.shards) and not node.is_paused for node in self.nodes)
            and all(node.core.is_idle and node.safety is not None for node in self.nodes)
            and all(
                not stream.open for node in self.nodes for stream in node.clients.values() if stream.is_open_at_client
            )
        )

    def _what_goes_on(self) -> str:
        running = sum(len(shard.engine.sequences) for shard in self.shards)
        live = [name for node in self.nodes for name in node.witness.live]
        connected = sum(len(node.streams) for node in self.nodes)
        waiting = sum(len(stream.open) for node in self.nodes for stream in node.clients.values())
        return (
            f"{MAX_REST_SECONDS:g} seconds without faults, and still: {running} sequences run, requests {live} are "
            f"live, clients wait for {waiting} answers, {connected} streams are up, "
            f"idle cores {[node.core.is_idle for node in self.nodes]}"
        )

    # -- what faults undo ---------------------------------------------------------------------------------------------

    def bring_up(self, shard: SimShard) -> None:
        if not shard.is_up:
            shard.start()

    def restore_speed(self, shard: SimShard) -> None:
        shard.slowness = 1.0

    def bring_up_safety(self) -> None:
        self.safety.is_up = True

    def restore_safety_speed(self) -> None:
        self.safety.slowness = 1.0

    def restart_router(self, number: int) -> None:
        """Killed, and at once there again, knowing nothing. Its clients come back."""
        old = self.nodes[number]
        new = self.nodes[number] = RouterNode(self, number, old.life + 1)
        old.stop()
        new.start()
        self.traffic.add_stream(number)

    def replace_drained(self, node: RouterNode) -> None:
        if node.is_alive:
            self.restart_router(node.number)

    # -- books --------------------------------------------------------------------------------------------------------

    def chance(self, kind: str) -> bool:
        """Whether a fault of this kind strikes at this opportunity."""
        probability = 0.0 if self.is_calm else self.scenario.rates.get(kind, 0.0)
        if probability and self.rng.random() < probability:
            self.faults[kind] += 1
            return True
        return False

    def count_fault(self, kind: str) -> None:
        self.faults[kind] += 1

    def count_error(self, finish: Finish) -> None:
        if finish.error is not None:
            self.ends[ErrorReason.Name(finish.error.reason)] += 1

    def note_event(self, node: RouterNode, event: Event) -> None:
        self.num_events += 1
        self.trace.append((self.timeline.now, node.name, event, ()))
        self._digest.update(f"{self.timeline.now!r}{node.name}{type(event).__name__}".encode())
        if isinstance(event, StepArrived):
            self._digest.update(repr(event.step.token_ids).encode())

    def note_actions(self, actions: Sequence[Action]) -> None:
        time, name, event, _ = self.trace[-1]
        self.trace[-1] = (time, name, event, actions)
        self._digest.update(f"{len(actions)}".encode())
